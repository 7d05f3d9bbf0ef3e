"""The named lists of cases on a GPU, against the same float64 oracle on the CPU: values, lse and every gradient."""

import dataclasses
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import cases
import oracle
import tf32
import tiled_attention as ta
from checks import check_zeros, same_bits
from tiled_attention import linear_testing
from tiled_attention.linear_testing import LinearCase
from tiled_attention.testing import DTYPES, Case, Inputs, assert_accurate, real_dtype

# `make gpu` runs this file by its name.
pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
EXACT = [*cases.SMALL, *cases.BOUNDARY, *cases.FEATURES, *cases.ADVERSARIAL]
F32, F64, BF16, F16 = DTYPES

LINEAR = [
    *(LinearCase(dtype=dtype, causal=causal) for dtype in DTYPES for causal in (False, True)),
    *(LinearCase(seqlen_q=n, dtype=DTYPES[k % 4], causal=k % 2 == 0) for k, n in enumerate((1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 257))),
    *(LinearCase(head_dim=d, head_dim_v=2 * d + 1, dtype=DTYPES[k % 4]) for k, d in enumerate((1, 2, 5, 16, 17, 33, 64, 65, 130))),
    *(LinearCase(feature_map=name, dtype=dtype) for name in ("relu", "exp", "identity", ("elu", "exp")) for dtype in (F32, BF16)),
    *(LinearCase(seqlen_q=130, decay=decay, rate=rate, resets=resets, dtype=dtype)
      for decay in ("token", "feature") for rate in (0.1, 3.0) for resets in (False, True) for dtype in (F32, F64)),
    *(LinearCase(seqlen_q=100, state=True, decay=decay, dtype=dtype) for decay in (None, "token", "feature") for dtype in DTYPES),
    *(LinearCase(masked=0.4, hidden=float("nan"), causal=causal, dtype=dtype) for causal in (False, True) for dtype in DTYPES),
    *(LinearCase(num_heads=4, num_heads_kv=2, normalize=normal, scale=0.3, dtype=dtype) for normal in (False, True) for dtype in DTYPES),
    *(LinearCase(layout=layout, dtype=BF16) for layout in ("heads_last", "dim_first", "strided", "gapped", "offset")),
]  # fmt: skip


def moved(value: Any, device: str) -> Any:
    """`value` on another device with the same strides, tensors inside masks and states too."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_neg():
            return torch._neg_view(move(torch._neg_view(leaf)))
        span = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True)) if leaf.numel() else 0
        # The view's own memory, and as far from 16-byte alignment as it was.
        first = leaf.storage_offset() % (16 // leaf.element_size())
        storage = torch.empty(first + span, dtype=leaf.dtype, device=device)
        storage[first:] = leaf.as_strided((span,), (1,), leaf.storage_offset()).to(device)
        return storage.as_strided(leaf.shape, leaf.stride(), first)

    return torch.utils._pytree.tree_map(move, value)


def on_device(x: Inputs) -> Inputs:
    """The tensors that the call takes, on the GPU; what the oracle reads stays."""
    given = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    taken = ("query", "key", "value", "mask", "bias", "alibi_slopes", "sinks", "query_offset")
    return Inputs(**given | {name: moved(given[name], "cuda") for name in taken})


def expected_on_device(case: Case) -> oracle.Expected:
    """The oracle's results, under the dropout mask that the GPU draws."""
    if not case.dropout_p:
        return oracle.expected(case)
    draw = ta.dropout_mask
    with mock.patch.object(oracle.ta, "dropout_mask", lambda *sizes: draw(*sizes, device="cuda").cpu()):
        return oracle.expected.__wrapped__(case)


def run(case: Case, x: Inputs, want: oracle.Expected | None) -> dict[str, Tensor]:
    """As checks.run, on the GPU, with the results on the CPU."""
    x = on_device(x)
    torch.manual_seed(case.seed)
    if want is None:
        with torch.no_grad():
            out, lse = ta.attention(**x.arguments(), return_lse=True)
        return {"out": out.cpu(), "lse": lse.cpu()}
    x.requires_grad_()
    out, lse = ta.attention(**x.arguments(), return_lse=True)
    leaves = x.leaves()
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), [want.grad_out.cuda(), want.grad_lse.cuda()])
    return {name: tensor.detach().cpu() for name, tensor in {"out": out, "lse": lse, **dict(zip(leaves, gradients, strict=True))}.items()}


def check(case: Case) -> None:
    """Within the limits of products of rounded weights for 16 bits; exact zeros; the same bits without gradients and in another call."""
    want = expected_on_device(case)
    x = case.inputs()
    got = run(case, x, want)
    for name, exact in want.exact.items():
        dtype = real_dtype(case.dtype) if name == "lse" else want.stored.get(name, case.dtype)
        assert got[name].dtype == dtype, f"{name}: expected {dtype}, got {got[name].dtype}"
        assert_accurate(got[name], exact, want.limit(name, case.dtype.itemsize == 2), name)
    check_zeros(x, got)
    for again in (run(case, x, None), run(case, x, want)):
        for name, tensor in again.items():
            assert same_bits(tensor, got[name]), f"{name}: another call gives other bits"


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.id)
def test_exact(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.SLOW, ids=lambda case: case.id)
def test_exact_long(case: Case) -> None:
    check(case)


@pytest.fixture
def allow_tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("case", tf32.CASES, ids=lambda case: case.id)
def test_tf32(case: Case, allow_tf32: None) -> None:
    want = expected_on_device(case)
    x = tf32.rounded_inputs(case)
    want = dataclasses.replace(want, grad_out=tf32.rounded(want.grad_out))
    exact = oracle.attention_and_gradients(x, want.grad_out, want.grad_lse, want.kept)
    got = run(case, x, want)
    for name, limit in tf32.limits(x, exact, want.grad_out, want.grad_lse, want.kept).items():
        tf32.assert_within(got[name], exact[name], limit, name)
    torch.backends.cuda.matmul.allow_tf32 = False
    assert case.seqlen_q * case.kv_length < 100 or not same_bits(run(case, x, want)["out"], got["out"]), "this is float32"


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.id)
def test_linear(case: LinearCase) -> None:
    def attention(**given: Any) -> Any:
        # The leaves stay those of the CPU: autograd carries their gradients back.
        names = [name for name, value in given.items() if isinstance(value, Tensor)]
        device = {name: given[name].to("cuda") if given[name].requires_grad else moved(given[name], "cuda") for name in names}
        if "initial_state" in given:
            device["initial_state"] = ta.LinearState(*(part.to("cuda") for part in given["initial_state"]))
        out, state = ta.linear_attention(**given | device, return_state=True)
        return out.cpu(), tuple(part.cpu() for part in state)

    linear_testing.check(case, attention)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_step(dtype: torch.dtype) -> None:
    case = LinearCase(seqlen_q=5, dtype=dtype, decay="token", state=True)
    given = moved(case.inputs(), "cuda")
    out, final = ta.linear_attention(**given, return_state=True)
    state, outs = given["initial_state"], []
    for t in range(5):
        token = {name: given[name][..., t : t + 1, :] for name in ("query", "key", "value")}
        step, state = ta.linear_attention_step(**token, state=state, log_decay=given["log_decay"][..., t : t + 1])
        outs.append(step)
    tolerance = {F64: 1e-12, F32: 1e-5}.get(dtype, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(torch.cat(outs, -2), out, atol=tolerance * float(out.abs().max()), rtol=tolerance)
    torch.testing.assert_close(state.kv, final.kv, atol=1e-4, rtol=1e-4)


def test_cpu_and_gpu_draw_the_same_mask_from_one_seed() -> None:
    sizes = (0.3, 2, 3, 40, 50, ())
    seed = torch.tensor(1234567890123)
    ops = torch.ops.tiled_attention
    assert torch.equal(ops.dropout_mask(seed.cuda(), *sizes).cpu(), ops.dropout_mask(seed, *sizes))


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_cuda_graph_replays(dropout_p: float) -> None:
    query, key, value = (torch.randn(2, 4, 130, 64, device="cuda", dtype=BF16) for _ in range(3))
    call = lambda: ta.attention(query, key, value, mask=ta.Causal(), dropout_p=dropout_p)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    query.copy_(torch.randn_like(query))
    graph.replay()
    first = out.clone()
    graph.replay()
    if dropout_p:
        assert not torch.equal(out, first)  # another seed each time
    else:
        assert torch.equal(first, call())


@pytest.mark.parametrize("causal", [True, False])
def test_a_cuda_graph_takes_packed_sequences_of_other_lengths(causal: bool) -> None:
    tensors = [torch.randn(1, heads, 300, 64, device="cuda", dtype=BF16) for heads in (4, 2, 2)]
    offsets = torch.tensor([0, 70, 70, 200, 300], device="cuda")
    call = lambda: ta.linear_attention(*tensors, causal=causal, cu_seqlens=offsets, return_state=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, state = call()
    ends = [0, 1, 190, 300, 300]
    offsets.copy_(torch.tensor(ends))
    graph.replay()
    for b, (begin, end) in enumerate(itertools.pairwise(ends)):
        want, last = ta.linear_attention(*(tensor[:, :, begin:end] for tensor in tensors), causal=causal, return_state=True)
        assert torch.equal(out[:, :, begin:end], want) and torch.equal(state.kv[b], last.kv[0])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_forward_and_backward(backend: str) -> None:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        exact = ta.attention(query, key, value, mask=ta.Causal(), softcap=20.0)
        return exact + ta.linear_attention(query, key, value, causal=True)

    leaves = [torch.randn(2, 4, 70, 64, device="cuda", requires_grad=True) for _ in range(3)]
    torch._dynamo.reset()
    results = []
    for function in (torch.compile(run, fullgraph=True, backend=backend), run):
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for compiled, eager in zip(*results, strict=True):
        assert compiled.stride() == eager.stride()
        torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=1e-4)


def test_another_stream() -> None:
    query = torch.randn(2, 4, 130, 64, device="cuda")
    want = ta.attention(query, query, query)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = query * 1.0
        got = ta.attention(late, late, late)
    stream.synchronize()
    assert torch.equal(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_second_device() -> None:
    query = torch.randn(2, 4, 130, 64, device="cuda:1", requires_grad=True)
    out = ta.attention(query, query, query)
    (grad,) = torch.autograd.grad(out.sum(), query)
    assert out.device == grad.device == query.device
    near = query.detach().to("cuda:0")
    assert torch.equal(out.cpu(), ta.attention(near, near, near).cpu())


def test_tensors_of_two_devices() -> None:
    query = torch.randn(1, 2, 9, 8, device="cuda")
    with pytest.raises((ValueError, RuntimeError), match="key"):
        ta.attention(query, query.cpu(), query)


@pytest.mark.parametrize("shape", [(1, 1, 70000, 16), (70000, 1, 3, 16), (1, 70000, 3, 16)], ids=str)
def test_grids_beyond_65535(shape: tuple[int, ...]) -> None:
    query = torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True)
    mask = ta.SlidingWindow(3, 0)
    out = ta.attention(query, query, query, mask=mask)
    out.backward(torch.ones_like(out))
    near = query.detach()[..., -9:, :] if shape[-2] > 9 else query.detach()[-2:, -2:]
    want = ta.attention(near.cpu(), near.cpu(), near.cpu(), mask=mask)
    got = out[..., -3:, :] if shape[-2] > 9 else out[-2:, -2:]
    torch.testing.assert_close(got.detach().cpu(), want[..., -3:, :], atol=2e-2, rtol=2e-2)
    assert query.grad is not None and query.grad.isfinite().all() and query.grad[..., -1, :].any()
