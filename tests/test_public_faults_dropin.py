"""Inputs on which other implementations failed in public: drop-in use and autograd. Each test carries the id of its case."""

import math
import multiprocessing
import zlib

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import tiled_attention as ta
from oracle import exact, tolerance
from tiled_attention.testing import DTYPES, assert_accurate, largest

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("p", (-1.0, -1e-9, 1.0 + 1e-6, 1.5, math.inf, -math.inf, math.nan))
def test_a4_impossible_probabilities_are_refused(p: float):
    query = torch.randn(1, 2, 4, 8)
    for function in (ta.attention, ta.scaled_dot_product_attention):
        with pytest.raises((ValueError, RuntimeError), match="dropout_p"):
            function(query, query, query, dropout_p=p)
    with pytest.raises((ValueError, RuntimeError), match="dropout_p"):
        ta.dropout_mask(1, 2, 4, 4, p)


@by_dtype
def test_a4_p_of_one_gives_zeros_and_finite_gradients(dtype: torch.dtype, isa: str):
    leaves = [torch.randn(1, 2, n, 8).to(dtype).requires_grad_() for n in (4, 40, 40)]
    out, lse = ta.attention(*leaves, dropout_p=1.0, return_lse=True)
    assert (out == 0).all() and torch.equal(lse, ta.attention(*leaves, return_lse=True)[1])
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), leaves))
    assert not ta.dropout_mask(1, 2, 4, 40, 1.0).any()


def test_a4_the_function_follows_p_literally():
    query = torch.randn(1, 2, 30, 8)
    with torch.no_grad():
        assert not torch.equal(ta.attention(query, query, query, dropout_p=0.5), ta.attention(query, query, query))
        assert torch.equal(ta.attention(query, query, query, dropout_p=0.0), ta.attention(query, query, query))


def test_a5_equal_seeds_give_equal_masks(isa: str):
    query, key, value = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    for function in (ta.attention, ta.scaled_dot_product_attention):
        torch.manual_seed(0)
        first = function(query, key, value, dropout_p=0.5)
        second = function(query, key, value, dropout_p=0.5)
        torch.manual_seed(0)
        assert torch.equal(first, function(query, key, value, dropout_p=0.5)) and not torch.equal(first, second)


@pytest.mark.parametrize("p", (0.1, 0.5, 0.9))
def test_a5_dropout_is_unbiased(p: float, isa: str):
    query, key, value = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    draws = torch.stack([ta.attention(query, key, value, dropout_p=p) for _ in range(1000)])
    error = (draws.mean(0) - ta.attention(query, key, value)) / (draws.std(0) / 1000**0.5)
    assert error.abs().max() < 5.5 and error.square().mean() < 2


def test_a5_the_gradient_uses_the_mask_of_the_forward(isa: str):
    query, key, value = (torch.randn(1, 2, n, 8).double().requires_grad_() for n in (6, 9, 9))
    sinks = torch.randn(2).double().requires_grad_()

    def seeded(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor):
        torch.manual_seed(7)
        return ta.attention(query, key, value, sinks=sinks, mask=ta.Causal(), dropout_p=0.3, return_lse=True)

    assert gradcheck(seeded, (query, key, value, sinks))


@by_dtype
def test_a5_checkpoint_replays_the_mask(dtype: torch.dtype):
    leaves = [torch.randn(1, 2, 40, 8).to(dtype).requires_grad_() for _ in range(3)]

    def call(*tensors: Tensor) -> Tensor:
        return ta.attention(*tensors, dropout_p=0.4)

    torch.manual_seed(3)
    want_out = call(*leaves)
    want = torch.autograd.grad(want_out.sum(), leaves)
    torch.manual_seed(3)
    out = checkpoint(call, *leaves, use_reentrant=False)
    torch.manual_seed(99)
    got = torch.autograd.grad(out.sum(), leaves)
    assert torch.equal(out, want_out) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a7_forward_mode_equals_the_finite_difference(isa: str):
    query, key, value, tangent = (torch.randn(1, 2, 5, 4).double() for _ in range(4))
    for mask, options in ((ta.Causal(), {}), (None, {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.1]).double()})):

        def function(a: Tensor, mask=mask, options=options) -> Tensor:
            return ta.attention(a, key, value, mask=mask, **options)

        _, got = torch.func.jvp(function, (query,), (tangent,))
        want = (function(query + 1e-6 * tangent) - function(query - 1e-6 * tangent)) / 2e-6
        assert (got - want).abs().max() < 1e-6


def test_a7_inside_hessian():
    query, key, value = (torch.randn(1, 1, 3, 2).double() for _ in range(3))

    def function(a: Tensor) -> Tensor:
        return ta.attention(a, key, value, mask=ta.Causal()).square().sum()

    hessian = torch.func.hessian(function)(query)
    rows = []
    for k in range(6):
        step = torch.zeros(6).double()
        step[k] = 1e-5
        step = step.view_as(query)
        rows.append((torch.func.grad(function)(query + step) - torch.func.grad(function)(query - step)) / 2e-5)
    assert (hessian.reshape(6, 6) - torch.stack(rows).reshape(6, 6)).abs().max() < 1e-6


@pytest.mark.parametrize("shape", ((5, 6), (1, 3, 5, 6), (2, 1, 1, 6), (3, 1, 1), (2, 3, 5, 1), (6,), (1,)), ids=str)
def test_a9_only_the_bias_needs_a_gradient(shape: tuple[int, ...], isa: str):
    query, key, value = (torch.randn(2, 3, n, 4).double() for n in (5, 6, 6))
    bias = torch.randn(shape).double().requires_grad_()
    assert gradcheck(lambda b: ta.attention(query, key, value, bias=b, return_lse=True), (bias,))


@by_dtype
def test_a9_the_gradient_is_zero_at_minus_infinity(dtype: torch.dtype, isa: str):
    query, key, value = (torch.randn(2, 3, n, 4).to(dtype) for n in (5, 60, 60))
    bias = torch.randn(3, 1, 60)
    hidden = torch.rand(3, 1, 60) < 0.5
    bias = bias.masked_fill(hidden, -math.inf).requires_grad_()
    (grad,) = torch.autograd.grad(ta.attention(query, key, value, bias=bias).square().sum(), bias)
    assert grad.shape == bias.shape and (grad[hidden] == 0).all() and grad.isfinite().all() and (grad[~hidden] != 0).any()


def test_a9_a_table_of_relative_positions():
    query, key, value = (torch.randn(2, 3, n, 4).double() for n in (5, 6, 6))
    table = torch.randn(11).double().requires_grad_()
    index = torch.arange(5)[:, None] - torch.arange(6) + 5
    assert gradcheck(lambda t: ta.attention(query, key, value, bias=t[index]), (table,))


def test_a10_one_graph_for_all_lengths():
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ta.scaled_dot_product_attention(query, key, value, is_causal=query.shape[-2] > 1)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (1, 7, 64, 65):
        query = torch.randn(1, 2, n, 8, requires_grad=True)
        out = compiled(query, query, query)
        (grad,) = torch.autograd.grad(out.sum(), query)
        want = exact(query, query, query, torch.ones(n, n).tril().bool())
        assert_accurate(out, want, tolerance(torch.float32, largest(want)), "out")
        (want_grad,) = torch.autograd.grad(want.sum(), query)
        assert_accurate(grad, want_grad, 1e-5, "gradient")


def checksum(leaves: list[Tensor], grad_out: Tensor) -> int:
    """Of the bytes of a forward and its gradients; with no operator of torch that would share out its work."""
    out = ta.attention(*leaves, mask=ta.Causal())
    results = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
    return zlib.crc32(b"".join(result.numpy().tobytes() for result in results))


@pytest.mark.parametrize("shape", ((1, 1, 8, 64), (4, 8, 256, 64)), ids=str)
def test_a13_a_forked_child_completes(shape: tuple[int, ...]):
    leaves, grad_out = [torch.randn(shape).requires_grad_() for _ in range(3)], torch.randn(shape)
    want = checksum(leaves, grad_out)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: sender.send(checksum(leaves, grad_out)))
    child.start()
    try:
        assert receiver.poll(60), "the child does not answer"
        assert receiver.recv() == want
    finally:
        child.join(10)
        if child.exitcode is None:
            child.kill()
    assert child.exitcode == 0


class Attended(torch.utils.data.Dataset):
    """Items that a worker computes with the operator."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        x = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(index))
        return ta.attention(x, x, x)


def test_a13_data_loader_workers():
    data = Attended()
    want = torch.stack([data[k] for k in range(6)])
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
    assert torch.equal(torch.cat(list(loader)), want)
