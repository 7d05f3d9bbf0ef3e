"""The raw operators: instruction sets, memory layout of results, empty sizes, processes and threads."""

import itertools
import os
import random
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiled_attention.library import ops

UNBOUNDED = 1 << 40
CAUSAL = [UNBOUNDED, UNBOUNDED, UNBOUNDED, UNBOUNDED, 0, -1, 0, UNBOUNDED, 0, 0]
SCORE_ARGUMENTS = ("mask", "bias", "alibi_slopes", "sinks", "key_lengths", "documents", "query_offset", "dropout_seed")
SCORE_ARGUMENTS += ("block_rows", "block_tiles", "block_bits", "query_table", "key_table")


def attention_arguments(query: Tensor, key: Tensor, value: Tensor, **options: object) -> list[object]:
    """ATTENTION_ARGUMENTS of the schemas, with defaults."""
    numbers = {"scale": 0.5, "softcap": 0.0, "dropout_p": 0.0, "intervals": [], "dropout_offsets": []}
    numbers |= {"allow_tf32": False, "interleaved": False}
    return [query, key, value, *(options.pop(name, None) for name in SCORE_ARGUMENTS), *(numbers | options).values()]


def forward(query: Tensor, key: Tensor, value: Tensor, with_residual: bool = False, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    return ops.attention_fwd(*attention_arguments(query, key, value, **options), with_residual)


def backward(query: Tensor, key: Tensor, value: Tensor, gradients: int = 7, grad_lse: Tensor | None = None, **options: object):
    out, lse, residual = forward(query, key, value, with_residual=True, **options)
    grad_out = torch.linspace(-1, 1, out.numel()).to(out.dtype).reshape(out.shape)
    return ops.attention_bwd(grad_out, grad_lse, *attention_arguments(query, key, value, **options), out, lse, residual, gradients)


def inputs(*leading: int, dtype: torch.dtype = torch.float32, head_dim_v: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """4 query heads on 2 key heads, 5 queries on 7 keys."""
    generator = torch.Generator().manual_seed(7)
    sizes = [(*leading, 4, 5, 8), (*leading, 2, 7, 8), (*leading, 2, 7, head_dim_v)]
    query, key, value = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return query, key, value


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    prelude = "import os, torch\nfrom tiled_attention.library import ops\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )


class TestInstructionSets:
    def test_best_is_chosen_and_each_can_be(self) -> None:
        available = ops._available_isas().split()
        order = ["baseline", "avx2", "avx512", "avx512bf16"]
        assert available == order[: len(available)]
        for isa in available:
            ops._set_isa(isa)
            assert ops._isa() == isa

    def test_default_is_the_best(self) -> None:
        done = run_python("assert ops._isa() == ops._available_isas().split()[-1]", TILED_ATTENTION_ISA="")
        assert done.returncode == 0, done.stderr

    def test_environment_variable(self) -> None:
        done = run_python("assert ops._isa() == 'baseline'", TILED_ATTENTION_ISA="baseline")
        assert done.returncode == 0, done.stderr

    def test_wrong_environment_variable_is_an_error_of_every_call(self) -> None:
        code = """
            x = torch.ones(1, 1, 8)
            call = lambda: ops.attention_fwd(x, x, x, *[None] * 13, 1.0, 0.0, 0.0, [], [], False, False, False)
            for attempt in (call, call, ops._isa):
                try:
                    attempt()
                except RuntimeError as error:
                    assert all(word in str(error) for word in ("TILED_ATTENTION_ISA", "baseline", "avx9000")), error
                else:
                    raise AssertionError("no error")
            ops._set_isa("baseline")
            assert call()[0].shape == x.shape
        """
        done = run_python(code, TILED_ATTENTION_ISA="avx9000")
        assert done.returncode == 0, done.stderr

    def test_unknown_name(self) -> None:
        with pytest.raises(RuntimeError, match=r"isa must be one of baseline.*got sse"):
            ops._set_isa("sse")

    def test_peak(self) -> None:
        assert all(ops._peak(dtype) > 0 for dtype in range(4))
        with pytest.raises(RuntimeError, match=r"dtype must be .*got 4"):
            ops._peak(4)


def layouts(sizes: list[int], seed: int, count: int) -> list[Tensor]:
    """Views of `sizes`: permuted, sliced, expanded, with odd strides along dimensions of size 1."""
    rng = random.Random(seed)
    views = []
    for _ in range(count):
        order = rng.sample(range(len(sizes)), len(sizes))
        steps = [rng.choice([1, 1, 2]) for _ in sizes]
        expanded = [rng.random() < 0.2 for _ in sizes]
        storage = torch.randn([1 if expanded[d] else sizes[d] * steps[d] for d in order])
        view = storage.permute([order.index(d) for d in range(len(sizes))])
        view = view[tuple(slice(None, None, step) for step in steps)].expand(sizes)
        strides = [rng.choice([stride, 1, 3, 100]) if size == 1 else stride for size, stride in zip(sizes, view.stride(), strict=True)]
        views.append(view.as_strided(sizes, strides))
    return views


class TestLayout:
    @pytest.mark.parametrize(
        "sizes", [[2, 3, 4], [2, 4, 3, 5], [1, 4, 3, 5], [2, 3, 1, 5], [2, 4, 1, 1], [3, 2, 2, 2, 2], [2, 0, 3, 5], [0, 2, 2, 4]]
    )
    def test_out_and_gradients_lie_as_torch_empty_like(self, sizes: list[int]) -> None:
        for query, key in zip(layouts(sizes, 1, 60), layouts(sizes, 2, 60), strict=True):
            assert forward(query, key, key)[0].stride() == torch.empty_like(query).stride(), (query.shape, query.stride())
            for grad, tensor in zip(backward(query, key, query)[:3], (query, key, query), strict=True):
                assert grad.shape == tensor.shape
                assert grad.stride() == torch.empty_like(tensor).stride(), (tensor.shape, tensor.stride())

    @pytest.mark.parametrize("sizes", [[5, 7], [4, 5, 7], [2, 4, 5, 7], [2, 1, 5, 7], [4, 1, 7], [1, 1, 1, 1], [7], []])
    def test_grad_bias_is_contiguous_and_of_its_dtype(self, sizes: list[int]) -> None:
        query, key, value = inputs(2)
        for bias, dtype in itertools.product(layouts(sizes, 3, 20), (torch.float32, torch.float16)):
            grad = backward(query, key, value, gradients=8, bias=bias.to(dtype))[3]
            assert (grad.shape, grad.dtype) == (bias.shape, dtype)
            assert grad.is_contiguous()
            expected = backward(query, key, value, gradients=8, bias=bias.to(dtype).contiguous())[3]
            assert torch.equal(grad, expected)

    def test_other_last_size_keeps_the_order(self) -> None:
        for query in layouts([2, 4, 3, 5], 4, 60):
            out = forward(query, query, query[..., :2])[0]
            assert 1 + sum((size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True)) == out.numel()
            for a, b in itertools.permutations(range(4), 2):
                if 0 < query.stride(a) < query.stride(b) and 0 not in query.stride():
                    assert out.stride(a) < out.stride(b)

    def test_heads_merge_into_a_view(self) -> None:
        query, key, value = (torch.randn(2, 6, 4, 8).transpose(1, 2) for _ in range(3))
        assert forward(query, key, value)[0].transpose(1, 2).is_contiguous()

    def test_residual_only_for_16_bit_when_asked(self) -> None:
        for dtype, asked in itertools.product((torch.float32, torch.float64, torch.bfloat16, torch.float16), (False, True)):
            out, lse, residual = forward(*inputs(2, dtype=dtype, head_dim_v=3), with_residual=asked)
            assert (out.shape, out.dtype) == ((2, 4, 5, 3), dtype)
            assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float64 if dtype == torch.float64 else torch.float32)
            assert lse.is_contiguous()
            assert residual.shape == (out.shape if asked and dtype.itemsize == 2 else (0,))

    @pytest.mark.parametrize("sizes", [[4, 5, 8], [3, 4, 5, 8], [3, 2, 4, 5, 8], [2, 1, 3, 4, 5, 8]])
    def test_any_strides_and_leading_dimensions(self, sizes: list[int]) -> None:
        key_sizes = [*sizes[:-3], 2, 7, 8]
        for query, key in zip(layouts(sizes, 5, 25), layouts(key_sizes, 6, 25), strict=True):
            dense = [x.contiguous().reshape(-1, *x.shape[-3:]) for x in (query, key)]
            out, lse, _ = forward(query, key, key)
            expected, expected_lse, _ = forward(dense[0], dense[1], dense[1])
            assert torch.equal(out, expected.reshape(out.shape))
            assert torch.equal(lse, expected_lse.reshape(lse.shape))
            for grad, dense_grad in zip(backward(query, key, key)[:3], backward(dense[0], dense[1], dense[1])[:3], strict=True):
                assert torch.equal(grad, dense_grad.reshape(grad.shape))

    @pytest.mark.parametrize("name", ["mask", "bias"])
    def test_broadcasting_is_expanding(self, name: str) -> None:
        query, key, value = inputs(2, 3)
        full = (2, 3, 4, 5, 7)
        for rank in range(6):
            for ones in itertools.product((False, True), repeat=rank):
                sizes = [1 if one else size for one, size in zip(ones, full[len(full) - rank :], strict=True)]
                operand = torch.randn(sizes) if name == "bias" else torch.rand(sizes) < 0.7
                out = forward(query, key, value, **{name: operand})[0]
                assert torch.equal(out, forward(query, key, value, **{name: operand.expand(full).contiguous()})[0]), sizes

    def test_too_many_strided_leading_dimensions(self) -> None:
        # A slice of every dimension leaves no two that merge.
        leading = torch.randn([3] * 9 + [1, 1, 2])[(slice(None, None, 2),) * 9]
        with pytest.raises(RuntimeError, match=r"leading dimensions .* at most 8 are supported"):
            forward(leading, leading, leading)
        fits = leading[0]
        assert torch.equal(forward(fits, fits, fits)[0], forward(*[fits.contiguous()] * 3)[0])

    def test_negative_view(self) -> None:
        query, key, value = inputs(2)
        assert torch.equal(forward(torch._neg_view(query), key, value)[0], forward(-query, key, value)[0])

    def test_storage_offset(self) -> None:
        query, key, value = (torch.cat([torch.full_like(x, torch.nan), x])[2:] for x in inputs(2))
        assert torch.equal(forward(query, key, value)[0], forward(query.clone(), key.clone(), value.clone())[0])

    def test_inputs_stay_as_they_are(self) -> None:
        tensors = inputs(2)
        copies = [x.clone() for x in tensors]
        backward(*tensors, gradients=7)
        assert all(torch.equal(x, copy) for x, copy in zip(tensors, copies, strict=True))


class TestEmptySizes:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("sinks", [None, [0.5, -torch.inf, 2.0, 0.0]])
    def test_no_keys(self, dtype: torch.dtype, sinks: list[float] | None) -> None:
        real = torch.float64 if dtype == torch.float64 else torch.float32
        query, key, value = torch.randn(2, 4, 5, 8, dtype=dtype), torch.empty(2, 2, 0, 8, dtype=dtype), torch.empty(2, 2, 0, 3, dtype=dtype)
        options = {} if sinks is None else {"sinks": torch.tensor(sinks, dtype=real)}
        out, lse, residual = forward(query, key, value, with_residual=True, **options)
        assert torch.equal(out, torch.zeros(2, 4, 5, 3, dtype=dtype))
        assert not residual.any()
        expected = torch.full((4,), -torch.inf, dtype=real) if sinks is None else options["sinks"]
        assert torch.equal(lse, expected[:, None].expand(2, 4, 5))
        grad_lse = torch.ones_like(lse)
        grads = backward(query, key, value, gradients=7 if sinks is None else 39, grad_lse=grad_lse, **options)
        assert torch.equal(grads[0], torch.zeros_like(query))
        assert grads[1].shape == key.shape
        assert grads[2].shape == value.shape
        if sinks is not None:
            assert torch.equal(grads[5], torch.tensor([10.0, 0.0, 10.0, 10.0], dtype=real))

    @pytest.mark.parametrize("zero", ["batch", "num_heads", "seqlen_q", "head_dim", "head_dim_v"])
    def test_other_zero(self, zero: str) -> None:
        size = {"batch": 2, "num_heads": 4, "seqlen_q": 5, "head_dim": 8, "head_dim_v": 3} | {zero: 0}
        query = torch.randn(size["batch"], size["num_heads"], size["seqlen_q"], size["head_dim"])
        key = torch.randn(size["batch"], size["num_heads"] // 2, 7, size["head_dim"])
        value = torch.randn(size["batch"], size["num_heads"] // 2, 7, size["head_dim_v"])
        bias, slopes, sinks = torch.randn(5 * (size["seqlen_q"] > 0), 7), torch.rand(size["num_heads"]), torch.randn(size["num_heads"])
        tensors = [x.requires_grad_() for x in (query, key, value, bias, sinks)]
        scores = 0.5 * query @ key.repeat_interleave(2, 1).mT + bias
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
        expected = scores.softmax(-1)[..., :-1] @ value.repeat_interleave(2, 1)
        grad_lse = torch.ones(scores.shape[:-1])
        grad_out = torch.linspace(-1, 1, expected.numel()).reshape(expected.shape)
        loss = (expected * grad_out).sum() + (scores.logsumexp(-1) * grad_lse).sum()
        expected_grads = torch.autograd.grad(loss, tensors)
        with torch.no_grad():
            out, lse, _ = forward(query, key, value, bias=bias, sinks=sinks)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(lse, scores.logsumexp(-1))
            grads = backward(query, key, value, bias=bias, sinks=sinks, gradients=47, grad_lse=grad_lse)
            for grad, expected_grad in zip([*grads[:4], grads[5]], expected_grads, strict=True):
                torch.testing.assert_close(grad, expected_grad)
            assert torch.equal(
                backward(query, key, value, alibi_slopes=0 * slopes, gradients=16)[4].isfinite(), torch.ones_like(slopes).bool()
            )

    def test_debug_operators(self) -> None:
        assert ops._mask_dense(CAUSAL, None, None, None, 0, 3, 4).shape == (0, 3, 4)
        assert ops._mask_dense([], None, None, None, 2, 3, 0).shape == (2, 3, 0)
        assert ops.dropout_mask(torch.tensor(1), 0.5, 2, 0, 3, 4, []).shape == (2, 0, 3, 4)


class TestProcessesAndThreads:
    def test_thread_counts(self) -> None:
        tensors = inputs(3)
        expected = [*forward(*tensors), *backward(*tensors)]
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert all(torch.equal(a, b) for a, b in zip([*forward(*tensors), *backward(*tensors)], expected, strict=True))

    def test_from_several_threads_at_once(self) -> None:
        torch.set_num_threads(2)
        tensors = inputs(3)
        expected = forward(*tensors)[0]
        with ThreadPoolExecutor(4) as pool:
            for out in pool.map(lambda _: forward(*tensors)[0], range(200)):
                assert torch.equal(out, expected)

    def test_forked_child(self) -> None:
        code = """
            torch.set_num_threads(4)
            x = torch.randn(4, 2, 33, 16)
            call = lambda: ops.attention_fwd(x, x, x, *[None] * 13, 1.0, 0.0, 0.0, [], [], False, False, False)[0]
            big = torch.randn(1 << 20)
            big.exp()  # torch's threads are there before the fork
            out = call()
            pid = os.fork()
            if pid == 0:
                os._exit(0 if torch.equal(call(), out) else 1)
            assert os.waitpid(pid, 0)[1] == 0
            assert torch.equal(call(), out)
        """
        done = run_python(code)
        assert done.returncode == 0, done.stderr

    def test_poison_reaches_every_result(self) -> None:
        ops._poison(True)
        try:
            query, key, value = inputs(2)
            out, lse, _ = forward(query, key, value)
            grads = backward(query, key, value)[:3]
        finally:
            ops._poison(False)
        assert all(x.isfinite().all() for x in (out, lse, *grads))

    def test_reference(self) -> None:
        query, key, value = inputs(2, dtype=torch.float64)
        expected = F.scaled_dot_product_attention(query, key, value, scale=0.5, enable_gqa=True)
        torch.testing.assert_close(forward(query, key, value)[0], expected)
