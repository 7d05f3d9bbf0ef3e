"""scaled_dot_product_attention: torch's own answers where torch has one, the contract where it has none, torch's error types."""

import inspect
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import tiled_attention as ta


def close(ours: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


def tensors(*shapes, dtype=torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def same_as_torch(query, key, value, tolerance=1e-5, **options):
    """Output and gradients."""
    leaves = [tensor for tensor in (query, key, value, options.get("attn_mask")) if tensor is not None and tensor.requires_grad]
    ours = ta.scaled_dot_product_attention(query, key, value, **options)
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    assert ours.shape == expected.shape and ours.dtype == expected.dtype
    close(ours, expected, tolerance)
    grad = torch.randn_like(expected)
    for a, b in zip(torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(expected, leaves, grad)):
        assert a.shape == b.shape
        close(a, b, tolerance)


def test_signature_is_that_of_torch():
    parameters = list(inspect.signature(ta.scaled_dot_product_attention).parameters.values())
    assert [(p.name, p.kind.name, p.default) for p in parameters] == [
        ("query", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("key", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("value", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("attn_mask", "POSITIONAL_OR_KEYWORD", None),
        ("dropout_p", "POSITIONAL_OR_KEYWORD", 0.0),
        ("is_causal", "POSITIONAL_OR_KEYWORD", False),
        ("scale", "KEYWORD_ONLY", None),
        ("enable_gqa", "KEYWORD_ONLY", False),
    ]


SHAPES = {
    "2-D": ((5, 8), (7, 8), (7, 6)),
    "3-D": ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
    "4-D": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "5-D": ((2, 1, 3, 5, 8), (2, 1, 3, 7, 8), (2, 1, 3, 7, 8)),
    "batch broadcast": ((4, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)),
    "query broadcast": ((1, 3, 5, 8), (4, 3, 7, 8), (4, 3, 7, 8)),
    "heads broadcast": ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "key heads broadcast": ((2, 3, 5, 8), (2, 1, 7, 8), (2, 3, 7, 8)),
    "value heads broadcast": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 1, 7, 8)),
    "query heads broadcast": ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "ranks": ((4, 3, 5, 8), (7, 8), (3, 7, 8)),
    "query of lower rank": ((5, 8), (6, 7, 8), (6, 7, 8)),
    "5-D broadcast": ((2, 1, 3, 5, 8), (4, 1, 7, 8), (1, 4, 3, 7, 8)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("options", [dict(), dict(is_causal=True), dict(scale=0.3)], ids=str)
def test_shapes_broadcast_as_in_torch(name, options):
    same_as_torch(*tensors(*SHAPES[name]), **options)


@pytest.mark.parametrize("heads", [(6, 2, 2), (6, 3, 3), (4, 4, 4), (4, 2, 1), (4, 2, 4), (6, 3, 2)])
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_enable_gqa(heads, rank):
    leading = {3: (), 4: (2,), 5: (2, 2)}[rank]
    shapes = [(*leading, count, length, 8) for count, length in zip(heads, (5, 7, 7))]
    same_as_torch(*tensors(*shapes), enable_gqa=True)


def test_gqa_with_a_batch_that_broadcasts():
    same_as_torch(*tensors((5, 4, 3, 8), (1, 2, 7, 8), (1, 2, 7, 8)), enable_gqa=True)


MASKS = [(5, 7), (1, 7), (5, 1), (1, 1), (3, 5, 7), (3, 1, 7), (1, 5, 7), (2, 3, 5, 7), (2, 1, 1, 7), (1, 3, 5, 1), (2, 1, 5, 7)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "float with gradient"])
def test_masks_broadcast_as_in_torch(shape, kind):
    query, key, value = tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    mask = torch.rand(shape) > 0.2 if kind == "bool" else torch.randn(shape)
    if kind == "bool":
        mask |= ~mask.any(-1, keepdim=True) if shape[-1] > 1 else True  # torch gives NaN where nothing is seen
    mask.requires_grad_(kind == "float with gradient")
    same_as_torch(query, key, value, attn_mask=mask)


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_and_is_causal_combine_in_every_shape(rank, kind):
    leading = (2, 1, 3)[5 - rank :] if rank > 2 else ()
    query, key, value = tensors((*leading, 5, 8), (*leading, 7, 8), (*leading, 7, 8))
    keep = torch.rand(5, 7) > 0.2
    keep[:, 0] = True
    mask = keep if kind == "bool" else torch.randn(5, 7)
    both = keep & torch.ones(5, 7).tril().bool() if kind == "bool" else mask.masked_fill(~torch.ones(5, 7).tril().bool(), -math.inf)
    ours = ta.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=True)
    close(ours, F.scaled_dot_product_attention(query, key, value, attn_mask=both))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    query, key, value = tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), dtype=dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 4e-2)
    for mask_dtype in {dtype, torch.float32}:
        same_as_torch(query, key, value, tolerance, attn_mask=torch.randn(5, 7).to(mask_dtype))
    for mask_dtype in {torch.float64, torch.float32, torch.bfloat16, torch.float16} - {dtype, torch.float32}:
        with pytest.raises(RuntimeError, match="attn_mask"):
            ta.scaled_dot_product_attention(query, key, value, attn_mask=torch.randn(5, 7).to(mask_dtype))


@pytest.mark.parametrize("lengths", [(5, 5), (5, 7), (7, 5), (1, 6)])
def test_causal_is_top_left(lengths):
    seqlen_q, seqlen_kv = lengths
    query, key, value = tensors((1, 2, seqlen_q, 8), (1, 2, seqlen_kv, 8), (1, 2, seqlen_kv, 8))
    same_as_torch(query, key, value, is_causal=True)
    close(ta.scaled_dot_product_attention(query, key, value, is_causal=True)[..., 0, :], value[..., 0, :])


def test_causal_bias_of_torch():
    query, key, value = tensors((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    for make, align in ((causal_upper_left, "top_left"), (causal_lower_right, "bottom_right")):
        ours = ta.scaled_dot_product_attention(query, key, value, attn_mask=make(5, 7))
        close(ours, ta.reference.attention(query, key, value, mask=ta.Causal(align=align)))
        close(ours, F.scaled_dot_product_attention(query, key, value, attn_mask=make(5, 7)))
    with pytest.raises(ValueError, match="attn_mask"):
        ta.scaled_dot_product_attention(query, key, value, attn_mask=causal_upper_left(5, 7), is_causal=True)
    with pytest.raises(RuntimeError, match="attn_mask"):
        ta.scaled_dot_product_attention(query, key, value, attn_mask=causal_lower_right(4, 7))


def test_rows_that_see_nothing_are_zero():
    query, key, value = tensors((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    keep = torch.ones(5, 7).bool()
    keep[2] = False
    for mask in (keep, torch.zeros(5, 7).masked_fill(~keep, -math.inf)):
        out = ta.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        gradients = torch.autograd.grad(out.sum(), (query, key, value))
        assert (out[..., 2, :] == 0).all() and (gradients[0][..., 2, :] == 0).all()
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_empty_sizes():
    for sizes in itertools.product((0, 2), (0, 3), (0, 4), (0, 5), (0, 8), (0, 6)):
        batch, heads, seqlen_q, seqlen_kv, dim, dim_v = sizes
        query, key, value = tensors((batch, heads, seqlen_q, dim), (batch, heads, seqlen_kv, dim), (batch, heads, seqlen_kv, dim_v))
        out = ta.scaled_dot_product_attention(query, key, value, is_causal=True)
        assert out.shape == (batch, heads, seqlen_q, dim_v) and out.isfinite().all()
        out.sum().backward()
        assert all(tensor.grad.shape == tensor.shape and tensor.grad.isfinite().all() for tensor in (query, key, value))
    query, key, value = tensors((2, 4, 0), (2, 5, 0), (2, 5, 8))
    close(ta.scaled_dot_product_attention(query, key, value), value.mean(-2, keepdim=True).expand(2, 4, 8))


def test_output_is_laid_out_like_query():
    query, key, value = (torch.randn(2, 5, 3, 8).transpose(1, 2) for _ in range(3))
    out = ta.scaled_dot_product_attention(query, key, value)
    assert out.transpose(1, 2).is_contiguous()
    assert out.stride() == F.scaled_dot_product_attention(query, key, value).stride()


def test_broadcast_dimensions_are_not_copied():
    query = torch.randn(2, 3, 5, 8)
    storage = torch.empty(8).expand(1, 1, 1 << 40, 8)  # 2 ** 43 elements that lie in 8 floats
    with pytest.raises((RuntimeError, ValueError), match="seqlen_kv"):
        ta.scaled_dot_product_attention(query, storage, storage)


def test_dropout():
    query, key, value = tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    torch.manual_seed(1)
    kept = ta.dropout_mask(2, 3, 5, 7, 0.5)
    torch.manual_seed(1)
    ours = ta.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    close(ours, ta.reference.attention(query, key, value, dropout_mask=kept, dropout_p=0.5))
    zeros = ta.scaled_dot_product_attention(query, key, value, dropout_p=1.0)
    assert (zeros == 0).all()
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(zeros.sum(), (query, key, value)))


Q, K, V = (torch.randn(1, 2, 3, 4) for _ in range(3))
ERRORS = {
    "integer mask": (lambda f: f(Q, K, V, attn_mask=torch.zeros(3, 3, dtype=torch.long)), "attn_mask"),
    "mask of another size": (lambda f: f(Q, K, V, attn_mask=torch.ones(3, 4).bool()), "attn_mask"),
    "mask of a larger batch": (lambda f: f(Q, K, V, attn_mask=torch.ones(5, 2, 3, 3).bool()), "attn_mask"),
    "mask of a higher rank": (lambda f: f(Q, K, V, attn_mask=torch.ones(5, 1, 2, 3, 3).bool()), "attn_mask"),
    "mask of a higher rank than 2-D": (lambda f: f(Q[0, 0], K[0, 0], V[0, 0], attn_mask=torch.ones(5, 3, 3).bool()), "attn_mask"),
    "mask rows": (lambda f: f(Q[:, :, :1], K, V, attn_mask=torch.ones(5, 3).bool()), "attn_mask"),
    "mask no tensor": (lambda f: f(Q, K, V, attn_mask=[1]), "attn_mask"),
    "query no tensor": (lambda f: f(1, K, V), "query"),
    "value no tensor": (lambda f: f(Q, K, None), "value"),
    "one dimension": (lambda f: f(Q[0, 0, 0], K, V), "query"),
    "dtypes": (lambda f: f(Q.double(), K, V), "dtype"),
    "integers": (lambda f: f(Q.long(), K.long(), V.long()), "query"),
    "heads without the flag": (lambda f: f(torch.randn(1, 4, 3, 4), K, V), "heads"),
    "heads that do not divide": (lambda f: f(torch.randn(1, 3, 3, 4), K, V, enable_gqa=True), "heads"),
    "fewer query heads": (lambda f: f(Q[:, :1], K, V, enable_gqa=True), "heads"),
    "batches": (lambda f: f(torch.randn(2, 2, 3, 4), torch.randn(3, 2, 3, 4), torch.randn(3, 2, 3, 4)), "leading"),
    "head_dim": (lambda f: f(torch.randn(1, 2, 3, 5), K, V), "key"),
    "device": (lambda f: f(Q, K.to("meta"), V), "device"),
    "p above 1": (lambda f: f(Q, K, V, dropout_p=2.0), "dropout_p"),
    "scale is text": (lambda f: f(Q, K, V, scale="a"), "scale"),
    "is_causal no bool": (lambda f: f(Q, K, V, is_causal=1), "is_causal"),
    "scale by position": (lambda f: f(Q, K, V, None, 0.0, False, 0.5), "positional"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_of_the_types_of_torch(name):
    call, named = ERRORS[name]
    with pytest.raises(Exception) as torchs:
        call(F.scaled_dot_product_attention)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=named) as ours:
        call(ta.scaled_dot_product_attention)
    assert issubclass(ours.type, torchs.type) or (torchs.type, ours.type) == (RuntimeError, ValueError)


@pytest.mark.parametrize("p", [-1.0, 1.5, math.nan])
def test_impossible_probabilities(p):
    for function in (ta.attention, ta.scaled_dot_product_attention):
        with pytest.raises(ValueError, match="dropout_p"):
            function(Q, K, V, dropout_p=p)
    with pytest.raises(ValueError, match="dropout_p"):
        ta.dropout_mask(1, 1, 2, 2, p)


def test_lengths_of_key_and_value_must_agree():
    with pytest.raises(RuntimeError, match="value"):
        ta.scaled_dot_product_attention(Q, K, torch.randn(1, 2, 5, 4))


def test_nested_tensors_are_handed_to_torch():
    parts = [torch.randn(2, n, 4) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts)
    out = ta.scaled_dot_product_attention(nested, nested, nested)
    for ours, part in zip(out.unbind(), parts):
        close(ours, F.scaled_dot_product_attention(part, part, part))


def test_no_grad_and_inference_mode_give_the_same_bits():
    query, key, value = tensors((2, 3, 33, 8), (2, 3, 40, 8), (2, 3, 40, 8))
    for options in (dict(), dict(is_causal=True), dict(attn_mask=torch.randn(33, 40))):
        recorded = ta.scaled_dot_product_attention(query, key, value, **options)
        with torch.no_grad():
            assert torch.equal(ta.scaled_dot_product_attention(query, key, value, **options), recorded)
        with torch.inference_mode():
            assert torch.equal(ta.scaled_dot_product_attention(query, key, value, **options), recorded)
