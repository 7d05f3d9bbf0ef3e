"""Relative positions: a bias with one element per distance j - i, against the same bias written out."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tiled_attention as ta
from tiled_attention.testing import DTYPES

F32, F64, BF16, _ = DTYPES


def dense(row: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
    """(..., 1, seqlen_q + seqlen_kv - 1) -> (..., seqlen_q, seqlen_kv)"""
    offsets = torch.arange(seqlen_kv) - torch.arange(seqlen_q)[:, None] + seqlen_q - 1
    return row[..., 0, :][..., offsets]


def make(batch: int, heads: tuple[int, int], sizes: tuple[int, int], dim: int, bias_shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(7)
    shapes = ((batch, heads[0], sizes[0], dim), (batch, heads[1], sizes[1], dim), (batch, heads[1], sizes[1], dim))
    tensors = [torch.randn(shape, generator=generator, dtype=F64).to(dtype).requires_grad_() for shape in shapes]
    real = F64 if dtype == F64 else F32
    bias = torch.randn((*bias_shape, 1, sum(sizes) - 1), generator=generator, dtype=F64).to(real).requires_grad_()
    return *tensors, bias


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("causal", {"mask": ta.Causal()}),
    ("window and softcap", {"mask": ta.SlidingWindow(9, 3), "softcap": 4.0}),
    ("dropout", {"dropout_p": 0.3}),
]


@pytest.mark.parametrize("sizes", [(2, 1), (3, 3), (70, 67), (5, 300), (300, 5), (257, 130)], ids=str)
@pytest.mark.parametrize(
    ("heads", "bias_shape"), [((4, 2), (4,)), ((4, 1), (1,)), ((2, 2), (2, 1)), ((2, 2), ()), ((2, 1), (2, 2))], ids=str
)
def test_equals_the_bias_written_out(heads: tuple[int, int], bias_shape: tuple[int, ...], sizes: tuple[int, int]) -> None:
    for dtype in (F64, F32, BF16):
        for name, options in OPTIONS:
            *tensors, bias = make(2, heads, sizes, 16, bias_shape, dtype)
            results = []
            for given in (bias, dense(bias, *sizes)):
                torch.manual_seed(5)
                out, lse = ta.attention(*tensors, bias=given, return_lse=True, **options)
                ((out.float() * torch.linspace(-1, 1, out.shape[-1])).sum() + lse.nan_to_num(neginf=0).sum()).backward()
                results.append((out.detach(), lse.detach(), bias.grad, *(tensor.grad for tensor in tensors)))
                bias.grad = None
                for tensor in tensors:
                    tensor.grad = None
            got, want = results
            for place in (0, 1, 3, 4, 5):
                assert torch.equal(got[place], want[place]), (name, dtype, place)
            # One sum per distance, in another order.
            tolerance = {F64: 1e-12, F32: 2e-5, BF16: 2e-5}[dtype]
            torch.testing.assert_close(
                got[2], want[2], rtol=tolerance, atol=tolerance * want[2].abs().max().item(), msg=lambda m, n=name: f"{n}: {m}"
            )


def test_every_derivative() -> None:
    query, key, value, bias = make(1, (2, 1), (3, 4), 3, (2,), F64)
    call = lambda *args: ta.attention(*args[:3], bias=args[3], mask=ta.Causal(), softcap=3.0)
    torch.autograd.gradcheck(call, (query, key, value, bias), check_forward_ad=True)
    torch.autograd.gradgradcheck(call, (query, key, value, bias), check_fwd_over_rev=True)
    weights = lambda *args: ta.attention_weights(*args[:2], bias=args[2], rows=torch.tensor([2, 0]))
    torch.autograd.gradcheck(weights, (query, key, bias))


def test_weights_of_chosen_rows() -> None:
    query, key, _, bias = make(2, (4, 2), (9, 6), 8, (4,), F32)
    rows = torch.tensor([8, 0, 3])
    got = ta.attention_weights(query, key, bias=bias, rows=rows)
    assert torch.equal(got, ta.attention_weights(query, key, bias=dense(bias, 9, 6), rows=rows))


def test_vmap_and_compile() -> None:
    query, key, value, bias = (tensor.detach() for tensor in make(3, (2, 2), (5, 6), 8, (3, 2), F32))
    got = torch.func.vmap(lambda q, k, v, b: ta.attention(q, k, v, bias=b))(query, key, value, bias)
    want = ta.attention(query, key, value, bias=bias)
    assert torch.equal(got, want)
    compiled = torch.compile(lambda *args: ta.attention(*args[:3], bias=args[3]), fullgraph=True, backend="aot_eager")
    tensors = [tensor.requires_grad_() for tensor in (query, key, value, bias)]
    grads = torch.autograd.grad(compiled(*tensors).sum(), tensors)
    for got, want in zip(grads, torch.autograd.grad(ta.attention(*tensors[:3], bias=tensors[3]).sum(), tensors)):
        assert torch.equal(got, want)


def test_other_lengths_are_refused() -> None:
    query, key, value, _ = make(1, (2, 2), (5, 6), 8, (2,), F32)
    for shape in ((2, 1, 9), (2, 1, 11), (10,), (3, 1, 10), (2, 2, 10)):
        with pytest.raises((ValueError, RuntimeError), match="bias of shape"):
            ta.attention(query.detach(), key.detach(), value.detach(), bias=torch.zeros(shape))
    with pytest.raises(RuntimeError, match="attn_mask must broadcast"):
        ta.scaled_dot_product_attention(query, key, value, attn_mask=torch.zeros(2, 1, 10))
