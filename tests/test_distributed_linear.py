"""Linear attention over sharded sequences: equal to one process, one state per boundary on the wire, and errors on every rank."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tiled_attention as ta
import tiled_attention.distributed
from processes import Processes, Wire, processes

SIZES = (2, 4)
HEADS, HEADS_KV, DIM, DIM_V = 4, 2, 8, 6
# Lengths of the pieces, of at most 4 ranks: even, uneven, with empty ones at either end and in the middle.
LENGTHS = ((16, 16, 16, 16), (70, 3, 0, 129), (0, 5, 9, 0))


def inputs(lengths: tuple[int, ...], dtype: torch.dtype, decay: str | None, state: bool, causal: bool) -> dict[str, Any]:
    """The whole call, the same on all ranks, and gradients of its results."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(of)

    n, real = sum(lengths), torch.float64 if dtype == torch.float64 else torch.float32
    x: dict[str, Any] = {"query": randn(2, HEADS, n, DIM), "key": randn(2, HEADS_KV, n, DIM), "value": randn(2, HEADS_KV, n, DIM_V)}
    if decay == "per token":
        x["log_decay"] = -randn(2, HEADS_KV, n, of=real).abs() / 8
        x["log_decay"][0, 0, n // 3] = -torch.inf
    elif decay == "per feature":
        x["log_decay"] = -randn(2, HEADS_KV, n, DIM, of=real).abs() / 8
    x["key_mask"] = torch.rand(2, n, generator=generator) > 0.2
    x["initial_state"] = (randn(2, HEADS_KV, DIM, DIM_V, of=real), randn(2, HEADS_KV, DIM, of=real).abs() * 9) if state else None
    x["grad_out"] = randn(2, HEADS, n, DIM_V)
    x["grad_state"] = (randn(2, HEADS_KV, DIM, DIM_V, of=real), randn(2, HEADS_KV, DIM, of=real))
    return x


def leaves(x: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {name: x[name] for name in ("query", "key", "value", "log_decay") if name in x}
    if x["initial_state"] is not None:
        found |= dict(zip(("kv", "k_sum"), x["initial_state"]))
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in found.items()}


def attend(function: Any, x: dict[str, Any], given: dict[str, torch.Tensor], last: bool, **options: Any) -> dict[str, torch.Tensor]:
    """Results and gradients; `last`: the returned state counts in the loss."""
    state = ta.LinearState(given["kv"], given["k_sum"]) if "kv" in given else None
    others = {name: given[name] for name in ("query", "key", "value", "log_decay") if name in given}
    out, after = function(**others, key_mask=x["key_mask"], initial_state=state, return_state=True, **options)
    results, grads = [out], [x["grad_out"]]
    if last:
        results, grads = [out, *after], [x["grad_out"], *x["grad_state"]]
    by_input = torch.autograd.grad(results, list(given.values()), grads)
    return {
        "out": out.detach(),
        "kv": after.kv.detach(),
        "k_sum": after.k_sum.detach(),
        **{f"grad_{k}": g for k, g in zip(given, by_input)},
    }


def piece(x: dict[str, Any], lengths: tuple[int, ...], rank: int) -> dict[str, Any]:
    begin = sum(lengths[:rank])
    rows = slice(begin, begin + lengths[rank])
    cut = {name: x[name][:, :, rows] for name in ("query", "key", "value", "log_decay", "grad_out") if name in x}
    return {**x, **cut, "key_mask": x["key_mask"][:, rows]}


def check_equal(lengths: tuple[int, ...], dtype: torch.dtype, decay: str | None, state: bool, causal: bool, normalize: bool) -> None:
    """Against the call on the whole, in float64 at the limit of rounding."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = lengths[-size:]
    x = inputs(lengths, dtype, decay, state, causal)
    options: dict[str, Any] = {"causal": causal, "normalize": normalize, "scale": None if normalize else 0.5}
    want = attend(ta.linear_attention, x, leaves(x), True, **options)
    mine = piece(x, lengths, rank)
    got = attend(ta.distributed.linear_attention, mine, leaves(mine), rank == size - 1, **options)
    begin = sum(lengths[:rank])
    limit = {"atol": 1e-9, "rtol": 1e-9} if dtype == torch.float64 else {"atol": 2e-4, "rtol": 2e-3}
    for name in ("out", "grad_query", "grad_key", "grad_value", "grad_log_decay"):
        if name in want:
            torch.testing.assert_close(
                got[name], want[name][:, :, begin : begin + lengths[rank]], **limit, msg=lambda m, n=name: f"{n}: {m}"
            )
    for name in ("kv", "k_sum"):
        if rank == size - 1 or not causal:
            torch.testing.assert_close(got[name], want[name], **limit)
        if state and rank == 0:
            torch.testing.assert_close(got[f"grad_{name}"], want[f"grad_{name}"], **limit)
        elif state:
            assert (got[f"grad_{name}"] == 0).all()


CALLS = [
    *itertools.product(LENGTHS, (torch.float64,), (None, "per token", "per feature"), (False, True), (True,), (True, False)),
    *itertools.product(LENGTHS, (torch.float64,), (None,), (False,), (False,), (True, False)),
    (LENGTHS[1], torch.float32, "per token", True, True, True),
    (LENGTHS[1], torch.float32, None, False, False, True),
]


def check_all_calls() -> None:
    for call in CALLS:
        try:
            check_equal(*call)
        except AssertionError as error:
            raise AssertionError(f"{call}: {error}") from None


@pytest.mark.parametrize("size", SIZES)
def test_sharded_equals_whole(size: int):
    processes(size).run(check_all_calls)


def check_wire(causal: bool, decay: str | None) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = LENGTHS[1][-size:]
    mine = piece(inputs(lengths, torch.float32, decay, False, causal), lengths, rank)
    given = {name: mine[name].requires_grad_() for name in ("query", "key", "value", "log_decay") if name in mine}
    with Wire() as forward:
        out = ta.distributed.linear_attention(**given, causal=causal)
    with Wire() as backward:
        out.backward(mine["grad_out"])
    return forward.calls, backward.calls


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("decay", (None, "per feature"))
def test_one_state_crosses_each_boundary_and_nothing_else(size: int, decay: str | None):
    state = 4 * 2 * HEADS_KV * (DIM * DIM_V + DIM)
    for rank, (forward, backward) in enumerate(processes(size).run(check_wire, True, decay)):
        took, gave = [("recv_", state)] * (rank > 0), [("send", state)] * (rank < size - 1)
        assert forward == took + gave
        took, gave = [("recv_", state)] * (rank < size - 1), [("send", state)] * (rank > 0)
        assert backward == took + gave


@pytest.mark.parametrize("size", SIZES)
def test_without_order_the_states_are_summed_once(size: int):
    state = 4 * 2 * HEADS_KV * (DIM * DIM_V + DIM)
    for forward, backward in processes(size).run(check_wire, False, None):
        assert forward == backward == [("allreduce_", state)]


def check_group_of_one() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    x = inputs((20,), torch.float32, "per token", True, True)
    for options in ({"causal": True, "log_decay": x["log_decay"]}, {"causal": False}):
        options |= {"key_mask": x["key_mask"], "return_state": True}
        got = ta.distributed.linear_attention(x["query"], x["key"], x["value"], group=alone, **options)
        want = ta.linear_attention(x["query"], x["key"], x["value"], **options)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1].kv, want[1].kv) and torch.equal(got[1].k_sum, want[1].k_sum)


def test_group_of_one_is_the_operator():
    processes(2).run(check_group_of_one)


def check_groups() -> None:
    """Two groups side by side, one of them in another order of ranks than the world."""
    rank = dist.get_rank()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    place = mesh["sequence"].get_local_rank()
    x = inputs((7, 9), torch.float64, None, False, True)
    query, key, value = (x[name] + mesh["data"].get_local_rank() for name in ("query", "key", "value"))
    want = ta.linear_attention(query, key, value, causal=True)
    rows = (slice(0, 7), slice(7, 16))[place]
    got = ta.distributed.linear_attention(*(t[:, :, rows] for t in (query, key, value)), causal=True, group=mesh["sequence"])
    torch.testing.assert_close(got, want[:, :, rows], atol=1e-9, rtol=1e-9, msg=lambda m: f"rank {rank}: {m}")


def test_subgroups():
    processes(4).run(check_groups)


def check_feature_maps() -> None:
    """Callable maps, autocast, GQA with a state of each query head, half precision."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = (13, 40)
    x = inputs(lengths, torch.float32, None, False, True)
    begin = sum(lengths[:rank])
    rows = slice(begin, begin + lengths[rank])
    assert size == 2
    torch.manual_seed(3)
    decay = -torch.rand(2, HEADS, sum(lengths))
    for options in (
        {"feature_map": ta.FavorFeatures(DIM, 16, seed=0)},
        {"feature_map": (torch.nn.functional.softplus, "exp")},
        {"feature_map": "relu", "normalize": False},
        {"log_decay": decay},
    ):
        mine = {**options, "log_decay": decay[..., rows]} if "log_decay" in options else options
        want = ta.linear_attention(x["query"], x["key"], x["value"], causal=True, **options)
        got = ta.distributed.linear_attention(*(x[n][:, :, rows] for n in ("query", "key", "value")), causal=True, **mine)
        torch.testing.assert_close(got, want[:, :, rows], atol=2e-5, rtol=2e-4)
    with torch.autocast("cpu", torch.bfloat16):
        got = ta.distributed.linear_attention(*(x[n][:, :, rows] for n in ("query", "key", "value")), causal=True)
        want = ta.linear_attention(x["query"], x["key"], x["value"], causal=True)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want[:, :, rows], atol=2e-2, rtol=2e-2)


def test_feature_maps_decays_and_autocast():
    processes(2).run(check_feature_maps)


def check_compiled() -> None:
    """Inside torch.compile the call breaks the graph and runs as it is."""
    x = inputs((8, 8), torch.float32, None, False, True)
    mine = piece(x, (8, 8), dist.get_rank())

    def call(query: torch.Tensor) -> torch.Tensor:
        return ta.distributed.linear_attention(query * 2, mine["key"], mine["value"], causal=True) + 1

    torch.testing.assert_close(torch.compile(call, backend="eager")(mine["query"]), call(mine["query"]))


def test_compiled():
    processes(2).run(check_compiled)


def raised(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except Exception as error:
        assert type(error) is kind, f"expected {kind.__name__}, got {type(error).__name__}: {error}"
        return str(error)
    raise AssertionError(f"expected {kind.__name__}")


def check_errors() -> dict[str, str]:
    rank = dist.get_rank()
    x = piece(inputs((4, 4, 4, 4), torch.float32, None, False, True), (4, 4, 4, 4), rank)
    query, key, value = x["query"], x["key"], x["value"]
    run = ta.distributed.linear_attention
    odd = rank == 1
    errors = {
        "shape": raised(ValueError, lambda: run(query[:1] if odd else query, key[:1] if odd else key, value[:1] if odd else value)),
        "head_dim": raised(ValueError, lambda: run(query, key, value[..., :3] if odd else value)),
        "dtype": raised(ValueError, lambda: run(*(t.double() if odd else t for t in (query, key, value)))),
        "option": raised(ValueError, lambda: run(query, key, value, causal=odd)),
        "decay": raised(ValueError, lambda: run(query, key, value, causal=True, log_decay=-torch.rand(2, HEADS_KV, 4) if odd else None)),
        "gradient": raised(ValueError, lambda: run(query.clone().requires_grad_(odd), key, value)),
        "refused": raised(TypeError if odd else RuntimeError, lambda: run(query, key, value, causal="yes" if odd else True)),
        "other call": raised(ValueError, lambda: _other_call(query, key, value) if odd else run(query, key, value)),
    }
    torch.testing.assert_close(run(query, key, value, causal=True).shape, query[..., :DIM_V].shape)  # the group goes on
    return errors


def _other_call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    from tiled_attention.distributed.agreement import agree
    from tiled_attention.distributed.peers import Peers

    agree(Peers(None, query.device, None), "another call", {})


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_disagree_are_named_on_every_rank(size: int):
    said = processes(size).run(check_errors)
    for name, pattern in (
        ("shape", "the leading dimensions and heads of query must be equal on all ranks: rank 0 has (2, 4), rank 1 has (1, 4)"),
        ("head_dim", "head_dim of value must be equal on all ranks: rank 0 has 6, rank 1 has 3"),
        ("dtype", "the dtype of query must be equal on all ranks: rank 0 has torch.float32, rank 1 has torch.float64"),
        ("option", "causal must be equal on all ranks: rank 0 has False, rank 1 has True"),
        ("decay", "log_decay must be equal on all ranks: rank 0 has None, rank 1 has per token"),
        ("gradient", "whether an input requires a gradient must be equal on all ranks: rank 0 has False, rank 1 has True"),
        ("other call", "function must be equal on all ranks: rank 0 has distributed.linear_attention, rank 1 has another call"),
    ):
        assert {errors[name] for errors in said} == {pattern}
    for rank, errors in enumerate(said):
        assert "causal must be True or False, got 'yes'" in errors["refused"]
        assert rank == 1 or "distributed.linear_attention: rank 1 raised TypeError: causal" in errors["refused"]


def check_arguments() -> None:
    x = piece(inputs((4, 4), torch.float32, None, False, True), (4, 4), dist.get_rank())
    given = (x["query"], x["key"], x["value"])
    run = ta.distributed.linear_attention
    assert "group must be a process group" in raised(TypeError, lambda: run(*given, group="all"))
    assert "timeout must be a number of seconds > 0" in raised(ValueError, lambda: run(*given, timeout=0))
    message = raised(RuntimeError, lambda: torch.func.grad(lambda q: run(q, *given[1:], causal=True).sum())(given[0]))
    assert "differentiated once" in message
    query = given[0].clone().requires_grad_()
    out = run(query, *given[1:], causal=True)
    message = raised(RuntimeError, lambda: torch.autograd.grad(out.sum(), query, create_graph=True))
    assert "differentiated once" in message


def test_arguments():
    processes(2).run(check_arguments)


def test_without_a_group_the_error_says_so():
    x = inputs((4,), torch.float32, None, False, True)
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group first"):
        ta.distributed.linear_attention(x["query"], x["key"], x["value"])


def connected(size: int) -> Processes:
    """Ranks with a call behind them: the first one connects to the store, which may take longer than the time-outs of these tests."""
    group = Processes(size)
    group.run(check_wire, True, None)
    return group


def check_lost(lengths: tuple[int, ...]) -> tuple[str, float]:
    x = piece(inputs(lengths, torch.float32, None, False, True), lengths, dist.get_rank())
    begin = time.monotonic()
    message = raised(RuntimeError, lambda: ta.distributed.linear_attention(x["query"], x["key"], x["value"], causal=True, timeout=1.5))
    return message, time.monotonic() - begin


def check_lost_in_backward() -> str:
    """The first rank has no loss: the others say who did not come."""
    x = piece(inputs((4, 4, 4), torch.float32, None, False, True), (4, 4, 4), dist.get_rank())
    query = x["query"].requires_grad_()
    out = ta.distributed.linear_attention(query, x["key"], x["value"], causal=True, timeout=1.5)
    return "" if dist.get_rank() == 0 else raised(RuntimeError, lambda: out.sum().backward())


def test_a_rank_without_a_loss_is_named_in_time():
    group = connected(3)
    try:
        for message in group.run(check_lost_in_backward)[1:]:
            assert message == "backward of distributed.linear_attention: rank 0 did not make this call within 1.5 s"
    finally:
        group.close()


def test_a_lost_rank_is_named_in_time():
    group = connected(3)
    try:
        group.kill(1)
        for message, seconds in group.run(check_lost, (4, 4, 4), ranks=(0, 2)):
            assert message == "distributed.linear_attention: rank 1 did not make this call within 1.5 s"
            assert seconds < 30
    finally:
        group.close()


def check_late() -> str:
    """Comes when the other has given up."""
    x = piece(inputs((4, 4), torch.float32, None, False, True), (4, 4), dist.get_rank())
    if dist.get_rank() == 1:
        time.sleep(1.5)
    limit = 0.5 if dist.get_rank() == 0 else 20.0
    return raised(RuntimeError, lambda: ta.distributed.linear_attention(x["query"], x["key"], x["value"], causal=True, timeout=limit))


def test_a_late_rank_hears_that_the_others_gave_up():
    group = connected(2)
    try:
        first, second = group.run(check_late)
        assert first == "distributed.linear_attention: rank 1 did not make this call within 0.5 s"
        assert second == f"distributed.linear_attention: rank 0 raised RuntimeError: {first}"
    finally:
        group.close()
