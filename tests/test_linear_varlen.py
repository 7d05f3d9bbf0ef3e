"""Linear attention over packed sequences: each is what it is alone, with its own state; derivatives; compilation; bad input."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import tiled_attention as ta
from checks import same_bits
from tiled_attention import reference
from tiled_attention.linear_testing import LinearCase, leaves_of, results
from tiled_attention.testing import DTYPES

LENGTHS = [0, 5, 64, 0, 1, 70, 33, 0]
CASE = LinearCase(batch=(1,), num_heads=4, num_heads_kv=2, seqlen_q=sum(LENGTHS), head_dim_v=6, masked=0.2)
CASES = {
    "plain": CASE.replace(masked=0.0),
    "states": CASE.replace(state=True),
    "decay per token": CASE.replace(decay="token", state=True, resets=True),
    "decay per feature": CASE.replace(decay="feature", state=True, resets=True),
    "not normalised": CASE.replace(normalize=False, feature_map="identity", scale=0.5, state=True),
    "not causal": CASE.replace(causal=False),
    "hidden": CASE.replace(hidden=torch.nan, layout="heads_last"),
}


def offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def given(case: LinearCase, lengths: list[int] = LENGTHS) -> dict[str, Any]:
    """Arguments of a packed call: those of the case, with a state for each sequence."""
    inputs = case.inputs()
    if case.state:
        inputs["initial_state"] = case.replace(batch=(len(lengths),), seqlen_q=1).inputs()["initial_state"]
    return inputs


def packed(lengths: list[int] = LENGTHS) -> Any:
    return lambda **inputs: ta.linear_attention(**inputs, return_state=True, cu_seqlens=offsets(lengths))


def one_by_one(function: Any, lengths: list[int] = LENGTHS) -> Any:
    """`function` on each sequence alone."""

    def run(query: Tensor, key: Tensor, value: Tensor, initial_state: Any = None, **others: Any) -> Any:
        outs, states = [], []
        for b, rows in enumerate(itertools.starmap(slice, itertools.pairwise([0, *itertools.accumulate(lengths)]))):
            own = {name: tensor[:, :, rows] for name, tensor in (("query", query), ("key", key), ("value", value))} | others
            if "log_decay" in others:
                own["log_decay"] = others["log_decay"][:, :, rows]
            if "key_mask" in others:
                own["key_mask"] = others["key_mask"][:, rows]
            if initial_state is not None:
                own["initial_state"] = ta.LinearState(*(part[b : b + 1] for part in initial_state))
            out, state = function(**own)
            outs.append(out)
            states.append(state)
        return torch.cat(outs, 2), ta.LinearState(*(torch.cat(parts) for parts in zip(*states)))

    return run


def alone(**inputs: Any) -> Any:
    return ta.linear_attention(**inputs, return_state=True)


def grads_of(case: LinearCase, lengths: list[int] = LENGTHS) -> dict[str, Tensor]:
    shapes = results(packed(lengths), given(case, lengths))
    return {name: torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in shapes.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_each_sequence_has_the_bits_it_has_alone(name, dtype):
    case = CASES[name].replace(dtype=dtype)
    inputs, grads = given(case), grads_of(case)
    got, want = results(packed(), inputs, None, grads), results(one_by_one(alone), inputs, None, grads)
    assert set(got) >= {"out", "final_kv", "final_k_sum", "query", "key", "value"}
    for result, tensor in got.items():
        assert same_bits(tensor, want[result]), result


@pytest.mark.parametrize("lengths", [[1200, 3, 0, 40], [300] * 4, [700, 600, 1, 1, 1, 1]])
@pytest.mark.parametrize("name", ["plain", "decay per token", "decay per feature", "not causal"])
def test_bits_do_not_depend_on_how_threads_share_the_work(name, lengths):
    """With few heads a long sequence is shared, beside short ones that are not."""
    case = CASES[name].replace(num_heads=1, num_heads_kv=1, seqlen_q=sum(lengths), resets=False)
    inputs, grads = given(case, lengths), grads_of(case, lengths)
    torch.set_num_threads(1)
    want = results(one_by_one(alone, lengths), inputs, None, grads)
    for threads in (1, 3, 5):
        torch.set_num_threads(threads)
        got = results(packed(lengths), inputs, None, grads)
        assert all(same_bits(got[result], want[result]) for result in want), threads


@pytest.mark.parametrize("name", CASES)
def test_against_the_definition(name, isa):
    case = CASES[name].replace(dtype=torch.float64, resets=False)
    inputs, grads = given(case), grads_of(case)
    got, want = results(packed(), inputs, None, grads), results(one_by_one(reference.linear_attention), inputs, None, grads)
    for result, tensor in got.items():
        torch.testing.assert_close(tensor, want[result], rtol=1e-10, atol=1e-11, msg=lambda text, result=result: f"{result}: {text}")


def test_layout_and_states():
    inputs = given(CASES["hidden"].replace(dtype=torch.bfloat16, state=True))
    out, state = packed()(**inputs)
    assert out.dtype == torch.bfloat16 and out.transpose(1, 2).is_contiguous() and out.isfinite().all()
    assert state.kv.shape == (len(LENGTHS), 2, 8, 6) and state.k_sum.shape == (len(LENGTHS), 2, 8)
    for part, initial in zip(state, inputs["initial_state"], strict=True):
        assert part.dtype == torch.float32 and part.is_contiguous()
        assert all(same_bits(part[b], initial[b]) for b, length in enumerate(LENGTHS) if length == 0)
    assert same_bits(out, ta.linear_attention(**inputs, cu_seqlens=offsets(LENGTHS, torch.int64)))


def test_nothing_leaks_between_sequences():
    inputs = given(CASES["plain"])
    changed = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    for name in ("query", "key", "value"):
        changed[name][:, :, 5:69] = torch.nan
    (a, _), (b, _) = packed()(**inputs), packed()(**changed)
    others = [*range(5), *range(69, sum(LENGTHS))]
    assert same_bits(a[:, :, others], b[:, :, others]) and b[:, :, 5:69].isnan().all()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens(lengths, poisoned):
    case = CASES["states"].replace(seqlen_q=0)
    inputs = given(case, lengths)
    grads = grads_of(case, lengths)
    found = results(packed(lengths), inputs, None, grads)
    assert found["out"].shape == (1, 4, 0, 6)
    for part, initial in (("final_kv", "kv"), ("final_k_sum", "k_sum")):
        assert same_bits(found[part], leaves_of(inputs)[initial]) and same_bits(found[initial], grads[part])


def test_one_sequence_and_decays_per_query_head(poisoned):
    case = CASES["decay per token"].replace(seqlen_q=70, num_heads_kv=4)
    inputs = given(case, [70])
    inputs["key"], inputs["value"] = (inputs[name][:, ::2] for name in ("key", "value"))
    got, want = packed([70])(**inputs), alone(**inputs)
    assert got[1].kv.shape == (1, 4, 8, 6)
    assert all(same_bits(a, b) for a, b in ((got[0], want[0]), *zip(got[1], want[1], strict=True)))


@pytest.mark.parametrize("causal", [True, False])
def test_derivatives(causal):
    lengths = [2, 0, 1]
    shapes = ((1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2), *(((1, 1, 3), (3, 1, 2, 2), (3, 1, 2)) if causal else ()))
    leaves = [torch.rand(shape, dtype=torch.float64).requires_grad_() for shape in shapes]

    def run(query, key, value, *states):
        options: dict = dict(key_mask=torch.tensor([[True, True, True]]))
        if causal:
            options |= dict(log_decay=-states[0], initial_state=ta.LinearState(*states[1:]))
        out, state = ta.linear_attention(query, key, value, causal=causal, cu_seqlens=offsets(lengths), return_state=True, **options)
        return out, *state

    assert gradcheck(run, leaves, check_forward_ad=True)
    assert gradgradcheck(run, leaves, fast_mode=True)


def test_functional_transforms():
    lengths = [2, 0, 3]
    tensors = [torch.randn(1, 2, 5, 3, dtype=torch.float64) for _ in range(3)]
    run = lambda query, cu: ta.linear_attention(query, *tensors[1:], causal=True, cu_seqlens=cu)
    queries, cu = torch.randn(3, 1, 2, 5, 3, dtype=torch.float64), torch.stack([offsets(x) for x in ([2, 0, 3], [1, 4, 0], [0, 0, 5])])
    mapped = torch.func.vmap(run)(queries, cu)
    assert same_bits(mapped, torch.stack([run(*sample) for sample in zip(queries, cu)]))
    of_sum = lambda query: run(query, offsets(lengths)).square().sum()
    per_sample = torch.func.vmap(torch.func.grad(of_sum))(queries)
    want = torch.stack([torch.autograd.functional.jacobian(of_sum, query) for query in queries])
    torch.testing.assert_close(per_sample, want, rtol=0, atol=0)
    torch.testing.assert_close(torch.func.hessian(of_sum)(tensors[0]), torch.autograd.functional.hessian(of_sum, tensors[0]))


def test_opcheck():
    ops = torch.ops.tiled_attention
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    for dtype in (torch.float32, torch.bfloat16):
        inputs = given(CASES["decay per token"].replace(dtype=dtype, seqlen_q=8), [3, 0, 5])
        leaves = [*leaves_of(inputs).values()]
        leaves[3] = leaves[3][..., None]
        arguments = [*leaves[:3], inputs["key_mask"][:, None, None], *leaves[3:], offsets([3, 0, 5], torch.int64), 1, 1, True, True, 1.0]
        torch.library.opcheck(ops.linear_attention_fwd.default, tuple(arguments), test_utils=utils[:3])
        backward = (*map(torch.ones_like, ops.linear_attention_fwd(*arguments)), *arguments, 63)
        torch.library.opcheck(ops.linear_attention_bwd.default, backward, test_utils=utils[:3])
        floats = [x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
        torch.library.opcheck(ops.linear_attention.default, tuple(floats), test_utils=utils)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_with_other_lengths(backend):
    torch._dynamo.reset()

    def run(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, cu: Tensor) -> Any:
        out, state = ta.linear_attention(query, key, value, causal=True, log_decay=-decay.exp(), cu_seqlens=cu, return_state=True)
        return out, *state

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    for lengths in ([2, 3], [4, 0, 1], [7, 7, 2]):
        total = sum(lengths)
        tensors = [torch.randn(shape, requires_grad=True) for shape in ((1, 4, total, 4), *[(1, 2, total, 4)] * 2, (1, 2, total))]
        found = []
        for call in (compiled, run):
            parts = call(*tensors, offsets(lengths))
            found.append((*parts, *torch.autograd.grad(sum(part.square().sum() for part in parts), tensors)))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)


GOOD = offsets([2, 3])


@pytest.mark.parametrize(
    ("cu_seqlens", "text"),
    [
        (GOOD + 1, "must start at 0, got 1"),
        (GOOD[:-1], "must end at the total length \\(5\\), got 2"),
        (GOOD.flip(0), "must start at 0, got 5"),
        (torch.tensor([0, 4, 3, 5]), "must not decrease, got 4 before 3 at 1"),
        (GOOD.float(), "int32 or int64 tensor, got torch.float32"),
        ([0, 5], "int32 or int64 tensor, got list"),
        (GOOD[None], "must have shape \\(num_sequences \\+ 1,\\)"),
        (GOOD[:0], "must have shape \\(num_sequences \\+ 1,\\)"),
        (GOOD.to("meta"), "must be on the device of query"),
    ],
)
def test_bad_offsets(cu_seqlens, text):
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=text) as raised:
        ta.linear_attention(x, x, x, cu_seqlens=cu_seqlens)
    raised.match("cu_seqlens")


def test_bad_shapes():
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match="query must have shape \\(1, heads, total, head_dim\\)"):
        ta.linear_attention(*[x.expand(2, 2, 5, 4)] * 3, cu_seqlens=GOOD)
    with pytest.raises(ValueError, match="key must have the total length of query"):
        ta.linear_attention(x, x[:, :, :3], x[:, :, :3], cu_seqlens=GOOD)
    with pytest.raises(ValueError, match="initial_state.kv must have shape \\(2, 2, 4, 4\\), got \\(1, 2, 4, 4\\)"):
        state = ta.LinearState(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4))
        ta.linear_attention(x, x, x, causal=True, cu_seqlens=GOOD, initial_state=state)


def test_the_operators_check_for_themselves():
    x, cu = torch.randn(1, 2, 5, 4), GOOD.long()
    run = lambda *tensors: torch.ops.tiled_attention.linear_attention_fwd(*tensors, 1, 1, True, True, 1.0)
    for tensors, text in (
        ([x.expand(2, 2, 5, 4)] * 3, "query must have shape \\(1, num_heads, total, head_dim\\) with cu_seqlens"),
        ([x[0]] * 3, "query must have shape \\(1, num_heads, total, head_dim\\) with cu_seqlens"),
    ):
        with pytest.raises(RuntimeError, match=text):
            run(*tensors, None, None, None, None, cu)
    with pytest.raises(RuntimeError, match="cu_seqlens must be int64, got int32"):
        run(x, x, x, None, None, None, None, GOOD)
    with pytest.raises(RuntimeError, match="initial_kv must have shape \\(2, 2, 4, 4\\)"):
        run(x, x, x, None, None, torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4), cu)
