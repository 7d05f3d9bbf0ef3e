"""Operators on DTensors: sharded by batch items or heads as one process, without communication; other placements right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh

import tiled_attention as ta
from processes import Wire, processes

BATCH, HEADS, HEADS_KV, N, DIM = 4, 4, 2, 12, 8
# Of the tensors of a call: the dimension of batch items and that of heads, None where there is none.
DIMS: dict[str, tuple[int | None, int | None]] = {
    **dict.fromkeys(
        ("query", "key", "value", "log_decay", "kv", "k_sum", "new_key", "new_value", "key_cache", "value_cache", "mask"), (0, 1)
    ),
    **dict.fromkeys(("alibi_slopes", "sinks", "bandwidth"), (None, 0)),
    **dict.fromkeys(("packed_query", "packed_key", "packed_value"), (None, 1)),
    "bias": (None, 1),
    "row_bias": (0, None),
    "score_weight": (None, 0),
    "general_weight": (None, None),
    "cache_seqlens": (0, None),
}
Tensors = dict[str, torch.Tensor]


def tensors(heads_kv: int = HEADS_KV, n: int = N, batch: int = BATCH, heads: int = HEADS) -> Tensors:
    """Equal on all ranks."""
    generator = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "query": randn(batch, heads, n, DIM),
        "key": randn(batch, heads_kv, n, DIM),
        "value": randn(batch, heads_kv, n, DIM + 2),
        "bias": randn(1, heads, n, n),
        "row_bias": randn(batch, 1, 1, n),
        "mask": randn(batch, heads, n, n) > -0.5,
        "alibi_slopes": randn(heads).abs(),
        "sinks": randn(heads),
        "score_weight": randn(heads, DIM),
        "general_weight": randn(DIM, DIM),
        "log_decay": -randn(batch, heads_kv, n).abs(),
        "kv": randn(batch, heads_kv, DIM, DIM + 2),
        "k_sum": randn(batch, heads_kv, DIM).abs() * 9,
        "packed_query": randn(n, heads, DIM),
        "packed_key": randn(n, heads_kv, DIM),
        "packed_value": randn(n, heads_kv, DIM),
        "key_cache": randn(batch, heads_kv, n, DIM),
        "value_cache": randn(batch, heads_kv, n, DIM),
        "new_key": randn(batch, heads_kv, 1, DIM),
        "new_value": randn(batch, heads_kv, 1, DIM),
        "cache_seqlens": torch.tensor([3, 7, 1, 9][:batch]),
    }


def qkv(t: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return t["query"], t["key"], t["value"]


CU_SEQLENS = torch.tensor([0, 5, 5, N])
ROTARY = ta.RotaryEmbedding(DIM).double()
CALLS: dict[str, Callable[[Tensors], Any]] = {
    "attention": lambda t: ta.attention(*qkv(t)),
    "attention, lse": lambda t: ta.attention(*qkv(t), mask=ta.Causal(), softcap=2.0, return_lse=True),
    "attention, bias": lambda t: ta.attention(*qkv(t), bias=t["bias"], sinks=t["sinks"], alibi_slopes=t["alibi_slopes"]),
    "attention, bias per item": lambda t: ta.attention(*qkv(t), bias=t["row_bias"], mask=t["mask"]),
    "attention, dropout": lambda t: ta.attention(*qkv(t), dropout_p=0.3),
    "attention, lengths": lambda t: ta.attention(*qkv(t), mask=ta.KeyLengths(torch.tensor([3, 0, 12, 7]))),
    "attention, offsets": lambda t: ta.attention(*qkv(t), mask=ta.Causal(), query_offset=torch.tensor([0, 4, -3, 9])),
    "attention, documents": lambda t: ta.attention(*qkv(t), mask=ta.Documents(CU_SEQLENS)),
    "attention, rotary": lambda t: ta.attention(*qkv(t), rotary=ROTARY),
    "attention, strided": lambda t: ta.attention(*qkv(t), mask=ta.Strided(2) & ta.Causal()),
    "weights": lambda t: ta.attention_weights(t["query"], t["key"], bias=t["bias"], rows=torch.tensor([7, 0])),
    "additive": lambda t: ta.additive_attention(*qkv(t), t["score_weight"], mask=ta.Causal(), dropout_p=0.2),
    "additive weights": lambda t: ta.additive_attention_weights(t["query"], t["key"], t["score_weight"]),
    "luong": lambda t: ta.luong_attention(*qkv(t), score="general", weight=t["general_weight"]),
    "gaussian": lambda t: ta.gaussian_attention(*qkv(t), 1.5),
    "sdpa": lambda t: ta.scaled_dot_product_attention(*qkv(t), is_causal=True, enable_gqa=True),
    "rotated": lambda t: ROTARY(t["query"], t["key"]),
    "varlen": lambda t: ta.attention_varlen(*(t[f"packed_{n}"] for n in ("query", "key", "value")), CU_SEQLENS, CU_SEQLENS, 7, 7),
    "linear": lambda t: ta.linear_attention(*qkv(t)),
    "linear, causal": lambda t: _linear(t),
    "linear, step": lambda t: _step(t),
}
UNGROUPED = (
    "attention",
    "attention, bias",
    "attention, dropout",
    "weights",
    "additive",
    "linear, causal",
)  # also with as many heads, and one


def _linear(t: Tensors) -> tuple[torch.Tensor, ...]:
    state = ta.LinearState(t["kv"], t["k_sum"])
    out, after = ta.linear_attention(*qkv(t), causal=True, log_decay=t["log_decay"], initial_state=state, return_state=True)
    return out, *after


def _step(t: Tensors) -> tuple[torch.Tensor, ...]:
    query, key, value = (x[:, :, :1] for x in qkv(t))
    out, after = ta.linear_attention_step(query, key, value, ta.LinearState(t["kv"], t["k_sum"]))
    return out, *after


class Recorded(dict):  # type: ignore[type-arg]
    """Notes which tensors a call takes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.used: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.used.append(name)
        return super().__getitem__(name)


def run(
    call: Callable[[Tensors], Any], given: Tensors, grads: list[torch.Tensor] | None, generator: torch.Generator | None = None
) -> tuple[list[torch.Tensor], Tensors]:
    """Results and gradients of what requires one. With a generator `grads` is filled first."""
    torch.manual_seed(11)
    outs = call(given)
    outs = [outs] if isinstance(outs, torch.Tensor) else list(outs)
    leaves = {name: x for name, x in given.items() if x.requires_grad}
    if grads is None:
        return outs, {}
    if generator is not None:
        grads.extend(torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outs)
    moving = [(out, grad) for out, grad in zip(outs, grads) if out.requires_grad]
    by_leaf = torch.autograd.grad([out for out, _ in moving], list(leaves.values()), [grad for _, grad in moving])
    return outs, dict(zip(leaves, by_leaf))


def compare(
    name: str, whole: Tensors, mesh: Any, sharded: tuple[str, ...], placements: Callable[[str], list[Placement]] | None = None
) -> int:
    """The call on DTensors against the call on whole tensors, with and without gradients. Returns how often ranks communicated."""
    call = CALLS[name]
    with torch.no_grad():
        recorded = Recorded(whole)
        call(recorded)
    used = {key: whole[key].clone().requires_grad_(whole[key].is_floating_point()) for key in dict.fromkeys(recorded.used)}

    def place(key: str) -> list[Placement]:
        if placements is not None:
            return placements(key)
        dims = [DIMS[key][("batch", "heads").index(what)] for what in sharded]
        return [Replicate() if dim is None or used[key].shape[dim] == 1 else Shard(dim) for dim in dims]

    given = {key: distribute_tensor(x.detach(), mesh, place(key)).requires_grad_(x.requires_grad) for key, x in used.items()}
    generator = torch.Generator().manual_seed(2)
    grads: list[torch.Tensor] = []
    want, want_grads = run(call, used, grads, generator)
    communicated = Wire()
    with communicated:
        with torch.no_grad():
            quiet, _ = run(call, given, None)
        placed = [distribute_tensor(grad, mesh, out.placements, src_data_rank=None) for grad, out in zip(grads, quiet)]
        outs, got_grads = run(call, given, placed)
    for at, (x, y, z) in enumerate(zip(want, outs, quiet)):
        assert y.shape == x.shape and z.shape == x.shape, f"{name}: shape {y.shape} of result {at}, not {x.shape}"
        for got in (y, z):
            torch.testing.assert_close(
                got.full_tensor(), x.detach(), atol=1e-10, rtol=1e-10, msg=lambda m, k=at: f"{name}, result {k}: {m}"
            )
    for key, grad in want_grads.items():
        got = got_grads[key]
        assert isinstance(got, DTensor) and got.shape == grad.shape, f"{name}: gradient of {key}"
        torch.testing.assert_close(got.full_tensor(), grad, atol=1e-10, rtol=1e-10, msg=lambda m, k=key: f"{name}, gradient of {k}: {m}")
    return len(communicated.calls)


def check_sharded(what: str) -> None:
    """One dimension of the mesh, and with four ranks two: batch items over one, heads over the other."""
    size = dist.get_world_size()
    mesh, sharded = (init_device_mesh("cpu", (2,)), (what,)) if size == 2 else (init_device_mesh("cpu", (2, 2)), ("batch", what))
    for name in CALLS if size == 2 else UNGROUPED:
        for heads_kv in (HEADS_KV, HEADS, 1) if name in UNGROUPED and size == 2 else (HEADS_KV,):
            if name != "varlen" or what == "heads":
                count = compare(name, tensors(heads_kv), mesh, sharded)
                assert count == 0, f"{name} with {heads_kv} heads of key and value communicates {count} times"


@pytest.mark.parametrize(("size", "what"), ((2, "batch"), (2, "heads"), (4, "heads")))
def test_sharded_calls_equal_whole_ones_without_communication(size: int, what: str):
    processes(size).run(check_sharded, what)


def check_uneven() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("attention, bias", "attention, dropout", "linear, causal", "weights"):
        assert compare(name, tensors(3, batch=3, heads=3), mesh, ("batch",)) == 0
        assert compare(name, tensors(3, batch=3, heads=3), mesh, ("heads",)) == 0


@pytest.mark.parametrize("size", (2, 4))
def test_uneven_shards_and_empty_ones(size: int):
    processes(size).run(check_uneven)


def check_elsewhere() -> None:
    """Sharded by sequence or features, partial, or mixed: right results, by communication."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    counts = {}
    for dim in (2, 3):
        for name in ("attention, lse", "attention, dropout", "linear, causal", "sdpa"):
            counts[name, dim] = compare(
                name, tensors(), mesh, (), lambda key, d=dim: [Shard(d) if key in ("query", "key", "value") else Replicate()]
            )
    assert all(count > 0 for count in counts.values())
    mixed: dict[str, Placement] = {"query": Shard(1), "key": Shard(0), "value": Replicate()}
    compare("attention", tensors(), mesh, (), lambda key: [mixed[key]])
    # 3 heads of key and value over the ranks: they cannot be divided with the 6 of query
    compare("attention, bias", tensors(3, heads=6), mesh, ("heads",))
    t = tensors()
    halves = {n: DTensor.from_local(t[n] / mesh.size(), mesh, [Partial()], run_check=False) for n in ("query", "key", "value")}
    got = ta.attention(**halves)
    torch.testing.assert_close(got.full_tensor(), ta.attention(t["query"], t["key"], t["value"]), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("size", (2, 4))
def test_other_placements_are_right(size: int):
    processes(size).run(check_elsewhere)


def check_block_lists() -> None:
    """Lists per batch item and head, and lists for all, with more than a tile."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(3)
    t = tensors(HEADS_KV, 130)
    blocks = torch.rand(BATCH, HEADS, 9, 9, generator=generator) > 0.4
    for mask in (ta.BlockSparse(blocks, 16), ta.Causal() & ta.Global((1, 70)), ta.Strided(3) | ta.SlidingWindow(2, 0)):
        want = ta.attention(t["query"], t["key"], t["value"], mask=mask)
        for dim in (0, 1):
            with Wire() as communicated:
                got = ta.attention(
                    *(distribute_tensor(t[n], mesh, [Shard(dim)], src_data_rank=None) for n in ("query", "key", "value")), mask=mask
                )
            assert not communicated.calls
            torch.testing.assert_close(got.full_tensor(), want, atol=1e-10, rtol=1e-10)


def check_half() -> None:
    """16-bit inputs keep what rounding took from out: one more result, sharded as out."""
    mesh = init_device_mesh("cpu", (2,))
    t = {n: x.bfloat16() for n, x in tensors().items() if n in ("query", "key", "value")}
    whole = [x.clone().requires_grad_() for x in t.values()]
    want = torch.autograd.grad(ta.attention(*whole).float().square().sum(), whole)
    for dim in (0, 1):
        leaves = [distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_() for x in t.values()]
        got = torch.autograd.grad(ta.attention(*leaves).float().square().sum(), leaves)
        for x, y in zip(want, got):
            assert torch.equal(x, y.full_tensor())


def check_decode() -> None:
    mesh = init_device_mesh("cpu", (2,))
    t = {n: x.float() if x.is_floating_point() else x for n, x in tensors().items()}
    names = ("query", "key_cache", "value_cache", "cache_seqlens", "new_key", "new_value")
    query = t["query"][:, :, :1]
    for dim in (0, 1):
        caches = {n: t[n].clone() for n in ("key_cache", "value_cache")}
        whole = {**{n: t[n] for n in names}, **caches, "query": query}
        given = {n: distribute_tensor(x, mesh, [Shard(dim) if DIMS[n][dim] is not None else Replicate()]) for n, x in whole.items()}
        want = ta.attention_decode(**whole)
        with Wire() as communicated:
            got = ta.attention_decode(**given)
        assert not communicated.calls
        torch.testing.assert_close(got.full_tensor(), want)
        for name in caches:
            assert torch.equal(given[name].full_tensor(), whole[name])
    given["key_cache"] = given["key_cache"].redistribute(placements=[Replicate()])
    with pytest.raises(ValueError, match="key_cache is written in place and must have the placements"):
        ta.attention_decode(**given)


def check_errors() -> None:
    mesh, t = init_device_mesh("cpu", (2,)), tensors()
    query, key, value = (distribute_tensor(t[n], mesh, [Shard(1)]) for n in ("query", "key", "value"))
    with pytest.raises(ValueError, match="value must be a DTensor on .*, as other tensors of the call are, got a plain tensor"):
        ta.attention(query, key, t["value"])
    with pytest.raises(ValueError, match="query must be a DTensor"):
        ta.linear_attention(t["query"], key, value)
    with pytest.raises(ValueError, match="bias must be a DTensor"):
        ta.attention(query, key, value, bias=t["bias"].requires_grad_())
    other = init_device_mesh("cpu", (1, 2))
    with pytest.raises(ValueError, match="key must be on the mesh of the others"):
        ta.attention(query, distribute_tensor(t["key"], other, [Replicate(), Shard(1)]), value)
    leaf = query.detach().requires_grad_()
    weights = ta.attention_weights(leaf, key)
    with pytest.raises(RuntimeError, match="second derivatives exist in eager mode only"):
        torch.autograd.grad(weights.sum(), leaf, create_graph=True)


def check_compiled() -> None:
    mesh, t = init_device_mesh("cpu", (2,)), tensors()
    call = torch.compile(lambda q, k, v: ta.attention(q, k, v, mask=ta.Causal()), backend="aot_eager", fullgraph=True, dynamic=False)
    for dim in (0, 1):
        leaves = [distribute_tensor(t[n], mesh, [Shard(dim)]).requires_grad_() for n in ("query", "key", "value")]
        whole = [t[n].clone().requires_grad_() for n in ("query", "key", "value")]
        want, got = ta.attention(*whole, mask=ta.Causal()), call(*leaves)
        torch.testing.assert_close(got.full_tensor(), want, atol=1e-10, rtol=1e-10)
        want_grads = torch.autograd.grad(want.square().sum(), whole)
        got_grads = torch.autograd.grad(got.square().sum(), leaves)
        for x, y in zip(want_grads, got_grads):
            torch.testing.assert_close(y.full_tensor(), x, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("check", (check_block_lists, check_half, check_decode, check_errors, check_compiled), ids=lambda f: f.__name__[6:])
def test_more(check: Callable[[], None]):
    processes(2).run(check)


def test_every_operator_has_a_rule():
    from torch._library.simple_registry import find_torch_dispatch_rule

    names = [name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("tiled_attention::")]
    assert len(names) > 25
    for name in names:
        assert find_torch_dispatch_rule(getattr(torch.ops.tiled_attention, name).default, DTensor) is not None, name
