"""CUDA tensors without a GPU: what is traced for them, and what is said where nothing serves them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tiled_attention as ta
from tiled_attention import library

F32, BF16 = torch.float32, torch.bfloat16
# A torch without CUDA traces operators for CUDA tensors, but refuses to index them, and aborts where one needs a gradient. Without a device
# torch's engine runs no backward pass of them.
has_cuda = torch.backends.cuda.is_built()
has_device = torch.cuda.is_available()
with_cuda = pytest.mark.skipif(not has_cuda, reason="needs a torch that is built with CUDA")


@pytest.fixture
def fake():
    """Tensors without data, on any device, as torch.compile and torch.export make them."""
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        yield mode


def tensors(dtype: torch.dtype = F32, device: str = "cuda", seqlen: int = 40, **options: bool) -> list[Tensor]:
    shapes = ((2, 4, seqlen, 16), (2, 2, seqlen, 16), (2, 2, seqlen, 24))
    return [torch.empty(shape, dtype=dtype, device=device, **options) for shape in shapes]


def on_cuda(*found: Tensor | None) -> bool:
    return all(tensor is not None and tensor.device.type == "cuda" for tensor in found)


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
def test_every_option_of_attention_and_its_gradients(dtype: torch.dtype, fake: FakeTensorMode):
    query, key, value = tensors(dtype, requires_grad=has_device)
    bias = torch.empty(4, 40, 40, device="cuda", requires_grad=has_device)
    slopes, sinks = (torch.empty(4, device="cuda", requires_grad=has_device) for _ in range(2))
    lengths = torch.empty(2, dtype=torch.int64, device="cuda")
    mask = ta.Causal() & ta.KeyLengths(lengths) & (ta.SlidingWindow(7, 0) | ta.Sinks(3))
    options = dict(mask=mask, bias=bias, alibi_slopes=slopes, sinks=sinks, softcap=3.0, dropout_p=0.1, query_offset=2)
    out, lse = ta.attention(query, key, value, return_lse=True, **options)
    assert on_cuda(out, lse) and out.shape == (2, 4, 40, 24) and (out.dtype, lse.dtype) == (dtype, F32)
    leaves = (query, key, value, bias, slopes, sinks)
    if has_device:
        grads = torch.autograd.grad([out.sum(), lse.sum()], leaves)
    else:
        arguments = [query, key, value, None, bias, slopes, sinks, lengths, *[None] * 8, 0.5, 3.0, 0.0, [], [], False, False]
        *results, residual = library.ops.attention_fwd(*arguments, True)
        grads = library.ops.attention_bwd(out, lse, *arguments, *results, residual, 63)
        assert on_cuda(*results, residual)
    assert on_cuda(*grads) and [g.shape for g in grads] == [x.shape for x in leaves]


class Tf32Calls(TorchDispatchMode):
    """What the calls of exact attention say about tf32."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (library.ops.attention_fwd.default, library.ops.attention.default):
            self.said.append(args[-3])
        return func(*args, **kwargs or {})


@pytest.fixture
def matmul_precision():
    """torch's settings, put back after the test."""
    yield torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("highest")


SETTINGS = {
    "highest": (lambda matmul: torch.set_float32_matmul_precision("highest"), False),
    "high": (lambda matmul: torch.set_float32_matmul_precision("high"), True),
    "allow_tf32": (lambda matmul: setattr(matmul, "allow_tf32", True), True),
    "not allow_tf32": (lambda matmul: setattr(matmul, "allow_tf32", False), False),
    "fp32_precision tf32": (lambda matmul: setattr(matmul, "fp32_precision", "tf32"), True),
    "fp32_precision ieee": (lambda matmul: setattr(matmul, "fp32_precision", "ieee"), False),
}


@pytest.mark.parametrize("setting,allowed", SETTINGS.values(), ids=SETTINGS)
def test_products_are_tf32_where_those_of_torch_may_be(setting: Any, allowed: bool, fake: FakeTensorMode, matmul_precision: Any):
    setting(matmul_precision)
    with Tf32Calls() as calls:
        for dtype in (F32, BF16, torch.float64):
            query, key, value = tensors(dtype)
            ta.attention(query, key, value)
            ta.attention(query, key, value, softcap=3.0)
            ta.scaled_dot_product_attention(query, key, value, enable_gqa=True)
            ta.scaled_dot_product_attention(query, query, query)
    assert calls.said == [allowed] * 4 + [False] * 8


def test_products_of_a_cpu_are_never_tf32(matmul_precision: Any):
    matmul_precision.allow_tf32 = True
    with Tf32Calls() as calls:
        query, key, value = tensors(device="cpu")
        ta.attention(query, key, value)
        ta.attention(query.requires_grad_(), key, value, softcap=3.0)
    assert calls.said == [False, False]


def test_a_compiled_call_follows_the_setting(fake: FakeTensorMode, matmul_precision: Any):
    """torch.compile guards it, and compiles again."""
    calls = Tf32Calls()

    def run(graph: Any, inputs: Any) -> Any:
        def ran(*args: Any) -> Any:
            with calls:
                return graph(*args)

        return ran

    attention = torch.compile(lambda query, key, value: ta.attention(query, key, value, softcap=3.0), fullgraph=True, backend=run)
    for setting in ("ieee", "tf32", "ieee"):
        matmul_precision.fp32_precision = setting
        attention(*tensors())
    matmul_precision.allow_tf32 = True
    attention(*tensors())
    assert calls.said == [False, True, False, True]


def test_weights_dropout_masks_and_dense_masks(fake: FakeTensorMode):
    query, key, _ = tensors()
    rows = torch.empty(3, dtype=torch.int64, device="cuda")
    lse = torch.empty(2, 4, 40, device="cuda")
    weights = library.ops.attention_weights(query, key, *[None] * 12, 0.5, 0.0, 0.0, [], [], False, False, lse, rows, False)
    assert on_cuda(weights) and weights.shape == (2, 4, 3, 40)
    if has_cuda:
        assert on_cuda(ta.attention_weights(query, key, mask=torch.empty(40, 40, dtype=torch.bool, device="cuda"), rows=rows))
    assert on_cuda(ta.dropout_mask(2, 4, 5, 6, 0.5, device="cuda"), ta.dropout_mask(2, 4, 5, 6, 0.0, device="cuda"))
    lengths = torch.empty(2, dtype=torch.int64, device="cuda")
    assert on_cuda(library.ops._mask_dense([], lengths, None, None, 2, 5, 6))


@pytest.mark.parametrize("decay", (0, 1, 16))
def test_linear_operators(decay: int, fake: FakeTensorMode):
    query, key, value = tensors()
    log_decay = torch.empty(2, 2, 40, decay, device="cuda") if decay else None
    inputs = (query, key, value, None, log_decay, None, None, None, 1, 1, True, True, 1.0)
    out, kv, k_sum = library.ops.linear_attention_fwd(*inputs)
    grads = library.ops.linear_attention_bwd(out, kv, k_sum, *inputs, 15 if decay else 7)
    assert on_cuda(out, kv, k_sum, *grads) and [g.shape for g in grads[:3]] == [x.shape for x in (query, key, value)]
    assert not decay or grads[3].shape == log_decay.shape
    one = [x.new_empty((*x.shape[:2], 1, x.shape[-1])) for x in (query, key, value)]
    results = library.ops.linear_attention_step(*one, None, None, kv, k_sum, 1, 1, True, 1.0)
    assert on_cuda(*results) and [x.shape for x in results] == [(2, 4, 1, 24), kv.shape, k_sum.shape]


@with_cuda
@pytest.mark.parametrize("decay", (None, "token", "feature"))
def test_linear_attention_its_gradients_and_its_step(decay: str | None, fake: FakeTensorMode):
    query, key, value = tensors(requires_grad=True)
    leaves, given = [query, key, value], {}
    if decay is not None:
        given["log_decay"] = torch.empty(2, 2, 40, *([16] if decay == "feature" else []), device="cuda", requires_grad=True)
        leaves.append(given["log_decay"])
    out, state = ta.linear_attention(query, key, value, causal=True, return_state=True, **given)
    assert on_cuda(out, *state)
    if has_device:
        assert on_cuda(*torch.autograd.grad(out.sum() + state.kv.sum(), leaves))
    one = [x.detach()[:, :, :1] for x in (query, key, value)]
    out, state = ta.linear_attention_step(*one, ta.LinearState(*(x.detach() for x in state)))
    assert on_cuda(out, *state) and out.shape == (2, 4, 1, 24)


def test_autocast_of_cuda_casts_cuda_tensors(fake: FakeTensorMode):
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    try:
        assert ta.attention(*tensors()).dtype == BF16
        if has_cuda:
            assert ta.linear_attention(*tensors()).dtype == BF16
        assert ta.attention(*tensors(device="cpu")).dtype == F32
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def test_flops_are_those_of_the_cpu(fake: FakeTensorMode):
    counts = []
    for device in ("cpu", "cuda"):
        with FlopCounterMode(display=False) as counter:
            query, key, value = tensors(device=device, requires_grad=has_device)
            out = ta.attention(query, key, value)
            if has_device:
                torch.autograd.grad(out.sum(), (query, key, value))
            ta.linear_attention(query, key, value)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("function", (ta.attention, ta.linear_attention), ids=("attention", "linear_attention"))
@pytest.mark.parametrize("device", ("cpu", "cuda:1"))
def test_arguments_on_other_devices_are_named(function, device: str, fake: FakeTensorMode):
    query, key, value = tensors(device="cuda:0")
    with pytest.raises((ValueError, RuntimeError), match=rf"key must be on the device of query \(cuda:0\), got {re.escape(device)}"):
        function(query, key.to(device), value)


def test_where_nothing_serves_cuda_tensors_the_operators_say_why():
    """Called with CPU tensors as torch would call them with CUDA tensors: there are none here."""
    if library.devices != ("cpu",):
        pytest.skip("CUDA is served here")
    x = torch.randn(1, 2, 3, 8)
    on_cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    kept = library.refuse_cuda("the reason")
    for call in (
        lambda: library.ops.attention_fwd.default.redispatch(on_cuda, x, x, x, *[None] * 13, 1.0, 0.0, 0.0, [], [], False, False, False),
        lambda: library.ops.linear_attention_fwd.default.redispatch(on_cuda, x, x, x, *[None] * 5, 0, 0, True, True, 1.0),
        lambda: library.ops.dropout_mask.default.redispatch(on_cuda, torch.tensor(1), 0.5, 1, 1, 1, 1, []),
    ):
        with pytest.raises(RuntimeError, match=r"tiled_attention::\w+: the reason"):
            call()
    kept._destroy()
    assert ta.attention(x, x, x).shape == x.shape


def test_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert library.load_cuda(tmp_path / "_cuda.abi3.so").endswith("has no CUDA")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert "tiled_attention was built without CUDA" in library.load_cuda(tmp_path / "_cuda.abi3.so")
    broken = tmp_path / "_cuda.abi3.so"
    broken.write_bytes(b"")
    assert re.search(r"built with CUDA, but .*_cuda\.abi3\.so cannot be loaded here: ", library.load_cuda(broken))


@with_cuda
def test_what_is_built_on_attention_stays_on_the_device(fake: FakeTensorMode):
    query, key, value = tensors()
    rotary = ta.RotaryEmbedding(16, scaling={"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8})
    yarn = ta.RotaryEmbedding(16, scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8})
    positions = torch.empty(2, 40, dtype=torch.int64, device="cuda")
    assert on_cuda(*rotary(query, key), *yarn(query, key, positions), ta.alibi_slopes(4, device="cuda"))
    assert on_cuda(ta.attention(query, key, value, rotary=rotary), ta.SinusoidalEmbedding(8)(positions))
    relative = ta.RelativeBias(4, device="cuda").requires_grad_(has_device)
    assert on_cuda(relative(7, 9), ta.LearnedEmbedding(64, 8, device="cuda").requires_grad_(has_device)(positions))
    bandwidth = torch.empty(4, device="cuda")
    assert on_cuda(*ta.gaussian_attention(query, key, value, bandwidth, return_lse=True), ta.gaussian_attention(query, key, value, 0.5))
    assert on_cuda(*ta.luong_attention(query, key, value, "general", torch.empty(16, 16, device="cuda"), return_lse=True))
    key_mask = torch.empty(2, 40, dtype=torch.bool, device="cuda")
    for causal in (False, True):
        options = dict(num_hashes=2, bucket_size=8, causal=causal, seed=1, key_mask=key_mask, return_lse=True)
        assert on_cuda(*ta.lsh_attention(query, query, **options))
