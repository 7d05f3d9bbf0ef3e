"""Inputs on which other implementations failed in public: masks and shapes. Each test carries the id of its case."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import tiled_attention as ta
from oracle import exact, tolerance
from tiled_attention.testing import DTYPES, LAYOUTS, Case, assert_accurate, largest, lay_out

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
BAD = (ValueError, TypeError, RuntimeError)


def assert_close(actual: Tensor, want: Tensor, size: float = 1.0) -> None:
    """Within what the dtype allows for values of the size of the largest."""
    assert_accurate(actual, want.double(), size * tolerance(actual.dtype, largest(want)), "result")


@by_dtype
def test_m1_true_means_attend(dtype: torch.dtype):
    x = torch.randn(1, 2, 40, 8).to(dtype)
    lower = torch.ones(40, 40).tril().bool()
    changed = x.clone()
    changed[..., -1, :] += 9
    for function in (ta.attention, ta.scaled_dot_product_attention):
        out = function(x, x, x, **{"mask" if function is ta.attention else "attn_mask": lower})
        assert_close(out, exact(x, x, x, lower))
        again = function(x, changed, changed, **{"mask" if function is ta.attention else "attn_mask": lower})
        assert torch.equal(again[..., :-1, :], out[..., :-1, :])


SHAPES = [
    (7,),
    (5, 7),
    (1, 7),
    (5, 1),
    (1, 1),
    (1,),
    (1, 1, 1, 7),
    (2, 1, 1, 7),
    (2, 1, 5, 1),
    (1, 3, 5, 7),
    (3, 1, 7),
    (3, 1, 1),
    (2, 3, 5, 7),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@by_dtype
def test_m5_masks_and_biases_broadcast(shape: tuple[int, ...], dtype: torch.dtype, isa: str, poisoned: None):
    query, key, value = torch.randn(2, 3, 5, 8).to(dtype), torch.randn(2, 3, 7, 8).to(dtype), torch.randn(2, 3, 7, 8).to(dtype)
    keep, bias = torch.rand(shape) > 0.3, torch.randn(shape)
    whole = (2, 3, 5, 7)
    assert_close(ta.attention(query, key, value, mask=keep), exact(query, key, value, keep.expand(whole)))
    assert_close(ta.attention(query, key, value, bias=bias), exact(query, key, value, bias=bias.expand(whole)))
    strided = torch.stack([keep, ~keep], -1)[..., 0]
    assert_close(ta.attention(query, key, value, mask=strided, bias=lay_strided(bias)), exact(query, key, value, keep, bias=bias))


def lay_strided(tensor: Tensor) -> Tensor:
    """The same values, every second element of a buffer whose others are NaN."""
    return tensor.new_full((*tensor.shape, 2), float("nan"))[..., 0].copy_(tensor)


@pytest.mark.parametrize("shape", [(6,), (5, 8), (4, 7), (2, 5, 7), (3, 3, 5, 7), (2, 1, 5, 7, 1), (1, 2, 3, 5, 7), (0,)], ids=str)
def test_m5_other_shapes_raise_and_show_both(shape: tuple[int, ...]):
    query, key, value = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    for name, tensor in (("mask", torch.ones(shape, dtype=torch.bool)), ("bias", torch.ones(shape))):
        with pytest.raises(BAD, match=name) as caught:
            ta.attention(query, key, value, **{name: tensor})
        assert str(tuple(shape)) in str(caught.value).replace("[", "(").replace("]", ")") or f"{list(shape)}" in str(caught.value)
        assert "5, 7" in str(caught.value)


VIEWS = ("dim_first", "heads_last", "strided")


@pytest.mark.parametrize("layouts", list(itertools.product(VIEWS, repeat=3)), ids="-".join)
@pytest.mark.parametrize("n", (1, 31, 32, 33, 65))
def test_m6_views(layouts: tuple[str, str, str], n: int, isa: str):
    tensors = [torch.randn(2, 3, 9, 16), torch.randn(2, 3, n, 16), torch.randn(2, 3, n, 16)]
    bias = torch.randn(n, 9).t()
    plain = [t.clone().requires_grad_() for t in (*tensors, bias.contiguous())]
    views = [lay_out(t, layout).requires_grad_() for t, layout in zip(tensors, layouts, strict=True)] + [bias.requires_grad_()]
    want, got = (ta.attention(q, k, v, bias=b) for q, k, v, b in (plain, views))
    assert_close(got, want.detach())
    grad_out = torch.randn(want.shape)
    for a, b in zip(torch.autograd.grad(got, views, grad_out), torch.autograd.grad(want, plain, grad_out), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@by_dtype
def test_m6_masks_biases_and_gradients_in_any_layout(layout: str, dtype: torch.dtype, isa: str):
    query, key, value = (torch.randn(2, 3, n, 8).to(dtype) for n in (33, 50, 50))
    keep, bias, grad_out = torch.rand(2, 3, 33, 50) < 0.6, torch.randn(2, 3, 33, 50), torch.randn(2, 3, 33, 8).to(dtype)
    if "expanded" in layout:
        first = (slice(0, 1), slice(0, 1)) if layout == "batch_expanded" else (slice(None), slice(None), slice(0, 1))
        keep = keep[first].expand(2, 3, 33, 50)
    elif layout == "heads_last":
        keep = keep.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "dim_first":
        keep = keep.mT.contiguous().mT
    bias, grad_out = lay_out(bias, layout).requires_grad_(), lay_out(grad_out, layout)
    dense = bias.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    got = ta.attention(query, key, value, mask=keep, bias=bias)
    want = ta.attention(query, key, value, mask=keep.contiguous(), bias=dense)
    assert_close(got, want.detach())
    (a,), (b,) = torch.autograd.grad(got, bias, grad_out), torch.autograd.grad(want, dense, grad_out.contiguous())
    assert_close(a, b)


def test_m6_one_packed_tensor(isa: str):
    packed = torch.randn(2, 33, 3, 4, 16, requires_grad=True)  # (batch, seqlen, query / key / value, heads, dim)
    query, key, value = packed.unbind(2)
    out = ta.attention(*(t.transpose(1, 2) for t in (query, key, value)))
    (got,) = torch.autograd.grad(out.square().sum(), packed)
    dense = packed.detach().permute(2, 0, 3, 1, 4).contiguous().requires_grad_()
    want_out = ta.attention(*dense)
    (want,) = torch.autograd.grad(want_out.square().sum(), dense)
    assert_close(out, want_out.detach())
    assert_close(got, want.permute(1, 3, 0, 2, 4))


def test_m7_which_corner_causal_is_tied_to(isa: str):
    query, key, value = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 9, 8), torch.randn(1, 1, 9, 8)
    assert_close(ta.scaled_dot_product_attention(query, key, value, is_causal=True), value[..., :1, :])
    assert_close(ta.attention(query, key, value, mask=ta.Causal()), exact(query, key, value))
    assert_close(ta.attention(query, key, value, mask=ta.Causal(align="top_left")), value[..., :1, :])
    query = torch.randn(1, 1, 5, 8)
    out = ta.attention(query, key[..., :3, :], value[..., :3, :], mask=ta.Causal())
    assert (out[..., :2, :] == 0).all()
    assert_close(out, exact(query, key[..., :3, :], value[..., :3, :], torch.ones(5, 3).tril(-2).bool()))


@pytest.mark.parametrize("n", (8, 65, 130, 300))
@by_dtype
def test_m7_a_prefill_in_pieces_equals_one_call(n: int, dtype: torch.dtype, isa: str):
    x = torch.randn(1, 2, n, 8).to(dtype)
    full = ta.attention(x, x, x, mask=ta.Causal())
    cuts = [0, 3, n // 2, n - 1, n]
    pieces = [ta.attention(x[:, :, a:b], x[:, :, :b], x[:, :, :b], mask=ta.Causal()) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(pieces, 2), full)
    pieces = [ta.attention(x[:, :, a:b], x, x, mask=ta.Causal(), query_offset=a) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(pieces, 2), full)


@pytest.mark.parametrize("heads_kv", (1, 2, 3, 6))
@by_dtype
def test_m8_heads_are_paired_in_blocks(heads_kv: int, dtype: torch.dtype, isa: str):
    query, key, value = (
        torch.randn(2, 6, 3, 8).to(dtype),
        torch.randn(2, heads_kv, 5, 8).to(dtype),
        torch.randn(2, heads_kv, 5, 12).to(dtype),
    )
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out = ta.attention(query, key, value)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    drop_in = ta.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    group = 6 // heads_kv
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    per_head = [exact(exact_leaves[0][:, h], exact_leaves[1][:, h // group], exact_leaves[2][:, h // group]) for h in range(6)]
    want = torch.stack(per_head, 1)
    assert_close(out, want)
    assert_close(drop_in, want)
    for got, true in zip(grads, torch.autograd.grad(want.sum(), exact_leaves), strict=True):
        assert_close(got, true, 4)


def test_m8_other_head_counts_are_refused():
    key, value = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    for heads in (5, 1, 3):
        with pytest.raises(BAD, match="head"):
            ta.attention(torch.randn(1, heads, 3, 8), key, value)
    with pytest.raises(BAD):
        ta.scaled_dot_product_attention(torch.randn(1, 6, 3, 8), key, value)


ZERO_SIZES = """
import itertools, torch, tiled_attention as ta
inf = float("inf")
for isa in torch.ops.tiled_attention._available_isas().split():
    torch.ops.tiled_attention._set_isa(isa)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for B, H, L, S, E, V in itertools.product((0, 1), (0, 2), (0, 3), (0, 4), (0, 8), (0, 8)):
            shapes = (B, H, L, E), (B, H, S, E), (B, H, S, V), (H, L, S), (H,), (H,)
            real = torch.float64 if dtype == torch.float64 else torch.float32
            kinds = (dtype,) * 3 + (real,) * 3
            for extra in (False, True):
                leaves = [torch.zeros(s, dtype=d).fill_(k < 3).requires_grad_() for k, (s, d) in enumerate(zip(shapes, kinds))]
                q, k, v, bias, slopes, sinks = leaves
                options = dict(bias=bias, alibi_slopes=slopes, sinks=sinks) if extra else {}
                out, lse = ta.attention(q, k, v, mask=ta.Causal(), return_lse=True, **options)
                (out.sum() + lse.sum()).backward()
                assert out.shape == (B, H, L, V) and lse.shape == (B, H, L), (out.shape, lse.shape)
                asked = leaves if extra else leaves[:3]
                assert all(t.grad is not None and t.grad.shape == t.shape for t in asked)
                if S == 0:
                    assert (out == 0).all() and (lse == (0 if extra else -inf)).all()
                elif S >= L and not extra:
                    assert (out == 1).all()
                ta.attention(q, k, v, mask=ta.Causal(), dropout_p=0.5, **options)
"""


def test_m9_zero_sizes_do_not_crash():
    done = subprocess.run([sys.executable, "-c", ZERO_SIZES], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@by_dtype
def test_m9_head_dim_zero_is_the_mean_of_the_visible_values(dtype: torch.dtype, isa: str):
    query, key, value = torch.randn(1, 2, 3, 0).to(dtype), torch.randn(1, 2, 70, 0).to(dtype), torch.randn(1, 2, 70, 8).to(dtype)
    assert_close(ta.attention(query, key, value), value.double().mean(-2, keepdim=True).expand(1, 2, 3, 8))
    lower = torch.ones(3, 70).tril(67).double()
    assert_close(ta.attention(query, key, value, mask=ta.Causal()), (lower / lower.sum(-1, keepdim=True)) @ value.double())


def test_m10_a_float32_bias_beside_sixteen_bits_is_used_in_float32(isa: str):
    for dtype in (torch.bfloat16, torch.float16):
        query, key, value = (torch.randn(1, 2, 40, 8).to(dtype) for _ in range(3))
        fine = torch.randn(40, 40) * 30  # rounding these to 16 bits moves the scores by up to 0.25
        assert_close(ta.attention(query, key, value, bias=fine), exact(query, key, value, bias=fine))
        lowest = torch.full((40, 40), torch.finfo(torch.float32).min).triu(1)
        out = ta.attention(query, key, value, bias=lowest)
        assert_close(out, exact(query, key, value, torch.ones(40, 40).tril().bool()))
        out = ta.attention(query, key, value, bias=torch.full((40, 40), torch.finfo(torch.float32).min))
        assert out.isfinite().all() and (out != 0).any()


@pytest.mark.parametrize("autocast", (torch.bfloat16, torch.float16), ids=str)
def test_m10_autocast_casts_query_key_and_value_and_nothing_else(autocast: torch.dtype):
    query, key, value = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))
    bias = (torch.randn(6, 6) * 30).requires_grad_()
    with torch.autocast("cpu", autocast):
        out = ta.attention(query, key.to(autocast), value, bias=bias)
    assert out.dtype == autocast
    assert_close(out, exact(*(t.to(autocast) for t in (query, key, value)), bias=bias))
    grads = torch.autograd.grad(out.float().sum(), [query, key, value, bias])
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_m10_mixed_dtypes_name_the_argument_and_the_dtypes():
    tensors = {name: torch.randn(1, 2, 3, 8) for name in ("query", "key", "value")}
    with pytest.raises(BAD, match=r"(?s)key.*float32|float32.*key") as caught:
        ta.attention(**{**tensors, "query": tensors["query"].bfloat16()})
    assert "bfloat16" in str(caught.value)
    for name in ("key", "value"):
        with pytest.raises(BAD, match=name) as caught:
            ta.attention(**{**tensors, name: tensors[name].half()})
        assert "float16" in str(caught.value) and "float32" in str(caught.value)


def visible_counts(n: int, mask: ta.masks.Mask, seqlen_q: int | None = None) -> list[int]:
    """How many keys each query sees, counted in the output."""
    query, key, value = torch.zeros(1, 1, seqlen_q or n, 8), torch.zeros(1, 1, n, 8), torch.eye(n)[None, None]
    return (ta.attention(query, key, value, mask=mask) > 0).sum(-1)[0, 0].tolist()


@pytest.mark.parametrize("n", (16, 31, 32, 33, 65, 97, 129, 257))
def test_m11_windows_are_inclusive_on_both_sides(n: int, isa: str):
    for width in (0, 3, 16, 95, 96):
        assert visible_counts(n, ta.SlidingWindow(width, 0)) == [min(i, width) + 1 for i in range(n)]
    assert visible_counts(n, ta.SlidingWindow(n, n)) == [n] * n
    assert visible_counts(n, ta.SlidingWindow(2, 1)) == [min(i, 2) + 1 + min(n - 1 - i, 1) for i in range(n)]
    streaming = ta.Causal() & (ta.SlidingWindow(5, 0) | ta.Sinks(2))
    assert visible_counts(n, streaming) == [min(i + 1, 6 + min(2, max(i - 5, 0))) for i in range(n)]
    for seqlen_q in (1, 5, n + 4):
        keep = (ta.SlidingWindow(4, 2)).dense(seqlen_q, n)
        assert visible_counts(n, ta.SlidingWindow(4, 2), seqlen_q) == keep.sum(-1).tolist()
        shown = [max(0, min(p + 2, n - 1) - max(p - 4, 0) + 1) for p in range(n - seqlen_q, n)]
        assert keep.sum(-1).tolist() == shown


@by_dtype
def test_m11_a_wide_window_is_causal(dtype: torch.dtype, isa: str):
    for n in (16, 97, 130):
        x = torch.randn(1, 2, n, 8).to(dtype)
        assert torch.equal(ta.attention(x, x, x, mask=ta.SlidingWindow(n - 1, 0)), ta.attention(x, x, x, mask=ta.Causal()))


@by_dtype
def test_m11_each_decode_step_equals_its_prefill(dtype: torch.dtype, isa: str):
    n = 70
    x = torch.randn(1, 2, n, 8).to(dtype)
    for mask in (ta.SlidingWindow(31, 0), ta.Causal() & (ta.SlidingWindow(9, 0) | ta.Sinks(4)), ta.Causal() & ta.Chunked(16)):
        full = ta.attention(x, x, x, mask=mask)
        steps = [ta.attention(x[:, :, i : i + 1], x[:, :, : i + 1], x[:, :, : i + 1], mask=mask) for i in range(n)]
        assert torch.equal(torch.cat(steps, 2), full)


@pytest.mark.parametrize("d", (1, 2, 3, 7, 8, 15, 17, 72, 80, 257))
@by_dtype
def test_m14_odd_head_sizes(d: int, dtype: torch.dtype, isa: str):
    for dv, mask in itertools.product(sorted({1, 5, d, 2 * d}), (None, ta.SlidingWindow(3, 1))):
        query, key, value = torch.randn(2, 2, 9, d).to(dtype), torch.randn(2, 2, 11, d).to(dtype), torch.randn(2, 2, 11, dv).to(dtype)
        keep = None if mask is None else mask.dense(9, 11)
        assert_close(ta.attention(query, key, value, mask=mask), exact(query, key, value, keep))


def test_any_leading_dimensions(isa: str):
    for batch in ((), (1,), (3,), (2, 3), (2, 1, 3), (1, 2, 1, 2, 1, 2)):
        x = Case(batch=batch, num_heads=4, num_heads_kv=2, seqlen_q=5, seqlen_kv=7, dtype=torch.float64).inputs()
        out, lse = ta.attention(x.query, x.key, x.value, return_lse=True)
        assert out.shape == (*batch, 4, 5, 8) and lse.shape == (*batch, 4, 5)
        flat = ta.attention(x.query.reshape(-1, 4, 5, 8), x.key.reshape(-1, 2, 7, 8), x.value.reshape(-1, 2, 7, 8))
        assert torch.equal(out.reshape(flat.shape), flat)
