"""Inputs on which other implementations failed in public: numerics. Each test carries the id of its case."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import oracle
import tiled_attention as ta
from checks import on_dot_path, run
from oracle import exact, plain_inputs, tolerance
from tiled_attention.testing import DTYPES, Case, assert_accurate, largest, rounding

INF, NAN = math.inf, math.nan
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def dead_masks() -> dict[str, Tensor]:
    """bool (2, 4, 21, 40) with a dead row, a dead head, a dead batch item, everything dead."""
    keep = torch.rand(2, 4, 21, 40, generator=torch.Generator().manual_seed(0)) < 0.6
    row, head, item = keep.clone(), keep.clone(), keep.clone()
    row[..., 5, :], head[:, 2], item[1] = False, False, False
    return {"row": row, "head": head, "item": item, "all": torch.zeros_like(keep)}


@pytest.mark.parametrize("dead", ("row", "head", "item", "all"))
@pytest.mark.parametrize("form", ("bool", "bias", "both"))
@by_dtype
def test_n1_a_row_that_sees_no_key(dead: str, form: str, dtype: torch.dtype, isa: str, poisoned: None):
    keep = dead_masks()[dead]
    case = Case(num_heads=4, num_heads_kv=2, seqlen_q=21, seqlen_kv=40, dtype=dtype)
    x = case.inputs()
    as_bias = torch.zeros(keep.shape).masked_fill(~keep, -INF)
    options = {"bool": {"mask": keep}, "bias": {"bias": as_bias}, "both": {"mask": keep, "bias": as_bias}}[form]
    leaves = [t.requires_grad_() for t in (x.query, x.key, x.value)]
    out, lse = ta.attention(*leaves, **options, return_lse=True)
    want, want_lse = oracle.attention(plain_inputs(*leaves, keep))
    dead_rows = ~keep.any(-1)
    assert (out[dead_rows] == 0).all() and (lse[dead_rows] == -INF).all()
    assert_accurate(out, want, tolerance(dtype, largest(want)), "out")
    assert_accurate(lse, want_lse, 1e-5 + 2.0**-9 * on_dot_path(dtype), "lse")
    grads = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])
    assert all(grad.isfinite().all() for grad in grads) and (grads[0][dead_rows] == 0).all()
    with torch.no_grad():
        assert torch.equal(ta.attention(x.query, x.key, x.value, **options), out)


def test_n1_the_drop_in_agrees():
    query, key, value = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
    keep = torch.zeros(6, 10, dtype=torch.bool)
    keep[:5] = torch.ones(5, 10).tril().bool()
    want = exact(query, key, value, keep)
    for mask in (keep, torch.zeros(6, 10).masked_fill(~keep, -INF)):
        out = ta.scaled_dot_product_attention(query, key, value, mask)
        assert (out - want).abs().max() < 1e-5 and (out[..., 5, :] == 0).all()


@by_dtype
def test_n1_a_row_of_finite_minima_is_the_mean_and_has_its_gradient(dtype: torch.dtype, isa: str):
    query, key, value = (torch.randn(1, 2, n, 8).to(dtype).requires_grad_() for n in (6, 10, 10))
    lowest = torch.zeros(6, 10)
    lowest[5] = torch.finfo(torch.float32).min
    out = ta.attention(query, key, value, bias=lowest)
    want = value.double().mean(-2)
    assert_accurate(out[..., 5, :], want, tolerance(dtype), "out")
    grad_out = torch.zeros_like(out)
    grad_out[..., 5, :] = 1
    (grad,) = torch.autograd.grad(out, value, grad_out)
    assert_accurate(grad, torch.full(grad.shape, 0.1, dtype=torch.float64), 0.1 * tolerance(dtype), "grad_value")


@by_dtype
def test_n2_a_dead_row_adds_nothing_to_any_gradient(dtype: torch.dtype, isa: str):
    keep = dead_masks()["row"]
    case = Case(num_heads=4, num_heads_kv=2, seqlen_q=21, seqlen_kv=40, dtype=dtype, bias=(21, 40))
    x = case.inputs().requires_grad_()
    live = [row for row in range(21) if row != 5]
    grad_out = torch.randn(2, 4, 21, 8).to(dtype)
    grads = torch.autograd.grad(ta.attention(x.query, x.key, x.value, mask=keep, bias=x.bias), list(x.leaves().values()), grad_out)
    without = ta.attention(x.query[..., live, :], x.key, x.value, mask=keep[..., live, :], bias=x.bias[live])
    want = torch.autograd.grad(without, list(x.leaves().values()), grad_out[..., live, :])
    for name, got, expected in zip(("query", "key", "value", "bias"), grads, want, strict=True):
        assert_accurate(got, expected, tolerance(dtype, largest(expected)) * 2, name)
    assert (grads[0][..., 5, :] == 0).all() and (grads[3][5] == 0).all()


@pytest.mark.parametrize("n", (63, 64, 65, 95, 96, 97, 129, 257, 640))
@pytest.mark.parametrize("form", ("bool", "bias", "window"))
@by_dtype
def test_n3_the_first_key_block_is_wholly_hidden(n: int, form: str, dtype: torch.dtype, isa: str):
    x = torch.ones(1, 1, n, 4, dtype=dtype, requires_grad=True)
    i = torch.arange(n)
    keep = (i[:, None] >= i) & (i[:, None] - i < 10)
    as_bias = torch.zeros(n, n).masked_fill(~keep, -INF)
    options = {"bool": {"mask": keep}, "bias": {"bias": as_bias}, "window": {"mask": ta.SlidingWindow(9, 0)}}[form]
    out = ta.attention(x, x, x, **options)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert (out - x).abs().max() <= tolerance(dtype) and grad.isfinite().all()


@by_dtype
def test_n3_left_padding(dtype: torch.dtype, isa: str):
    x = Case(batch=(1,), seqlen_q=9, seqlen_kv=640, dtype=dtype).inputs().requires_grad_()
    keep = torch.arange(640) >= 600
    out, lse = ta.attention(x.query, x.key, x.value, mask=keep, return_lse=True)
    want = ta.attention(x.query, x.key[..., 600:, :], x.value[..., 600:, :])
    assert_accurate(out, want.double(), tolerance(dtype, largest(want)), "out")
    grads = torch.autograd.grad(out.sum() + lse.sum(), list(x.leaves().values()))
    assert all(grad.isfinite().all() for grad in grads) and (grads[1][..., :600, :] == 0).all() and (grads[2][..., :600, :] == 0).all()


# How key `hidden` of n is hidden from all 7 queries.
HIDING = {
    "bool": lambda n, hidden: {"mask": torch.arange(n) != hidden},
    "bool_rows": lambda n, hidden: {"mask": (torch.arange(n) != hidden).expand(7, n)},
    "bias": lambda n, hidden: {"bias": torch.zeros(n).masked_fill(torch.arange(n) == hidden, -INF)},
    "lengths": lambda n, hidden: {"mask": ta.KeyLengths(torch.tensor([hidden, hidden]))},
    "causal": lambda n, hidden: {"mask": ta.Causal(align="top_left")},
    "window": lambda n, hidden: {"mask": ta.SlidingWindow(n - 8 - hidden, 0)},
    "streaming": lambda n, hidden: {"mask": ta.Causal() & (ta.SlidingWindow(n - 8 - hidden, 0) | ta.Sinks(1))},
    "sinks": lambda n, hidden: {"mask": ta.Sinks(3)},
    "documents": lambda n, hidden: {"mask": ta.Documents(torch.tensor([0, n - 7, n]))},
}


@pytest.mark.parametrize("bad", (NAN, INF, -INF))
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("n", (19, 64, 129))
@by_dtype
def test_n4_what_is_hidden_reaches_nothing(hiding: str, bad: float, n: int, dtype: torch.dtype, isa: str):
    hidden = n // 2
    options = HIDING[hiding](n, hidden)
    x = Case(num_heads=4, num_heads_kv=2, seqlen_q=7, seqlen_kv=n, dtype=dtype).inputs()
    base, base_lse = ta.attention(x.query, x.key, x.value, **options, return_lse=True)
    clean = torch.autograd.grad(
        ta.attention(*(t.requires_grad_() for t in (x.query, x.key, x.value)), **options).sum(), [x.query, x.key, x.value]
    )
    x = x.clone()
    x.key[..., hidden, 0], x.value[..., hidden, 0] = bad, bad
    x.requires_grad_()
    out, lse = ta.attention(x.query, x.key, x.value, **options, return_lse=True)
    assert torch.equal(out, base) and torch.equal(lse, base_lse)
    grads = torch.autograd.grad(out.sum(), [x.query, x.key, x.value])
    assert all(torch.equal(got, want) for got, want in zip(grads, clean, strict=True))
    assert (grads[1][..., hidden, :] == 0).all() and (grads[2][..., hidden, :] == 0).all()


@by_dtype
def test_n4_nan_in_hidden_entries_of_a_bias(dtype: torch.dtype, isa: str):
    x = Case(seqlen_q=37, seqlen_kv=65, dtype=dtype, bias=(37, 65)).inputs()
    bias = x.bias
    base = ta.attention(x.query, x.key, x.value, bias=bias, mask=ta.Causal())
    hidden = ~ta.Causal().dense(37, 65)
    for bad in (NAN, INF, -INF):
        for mask in (ta.Causal(), ~hidden):
            poisoned = bias.masked_fill(hidden, bad).requires_grad_()
            out = ta.attention(x.query, x.key, x.value, bias=poisoned, mask=mask)
            (grad,) = torch.autograd.grad(out.sum(), poisoned)
            assert torch.equal(out, base) and (grad[hidden] == 0).all() and grad.isfinite().all()


def test_n8_softcap_with_large_logits_and_its_derivative(isa: str):
    query = (torch.randn(1, 1, 4, 8) * 200).double().requires_grad_()
    key, value = torch.randn(1, 1, 6, 8).double() * 200, torch.randn(1, 1, 6, 8).double()
    out = ta.attention(query, key, value, softcap=50.0)
    assert out.isfinite().all() and (out - exact(query, key, value, softcap=50.0)).abs().max() < 1e-9
    assert (out - ta.attention(query, key, value)).abs().max() > 1e-5
    assert torch.autograd.gradcheck(lambda a: ta.attention(a / 200, key / 200, value, softcap=1.0), (query,))


@by_dtype
def test_n8_softcap_of_enormous_scores_is_the_cap(dtype: torch.dtype, isa: str):
    value = torch.randn(1, 1, 40, 8).to(dtype)
    size = 1e4 if dtype == torch.float16 else 1e15
    query = torch.full((1, 1, 3, 4), size, dtype=dtype)
    key = torch.full((1, 1, 40, 4), size, dtype=dtype)
    key[..., 20:, :] *= -1
    out, lse = ta.attention(query, key, value, softcap=0.5, return_lse=True)
    weights = torch.where(torch.arange(40) < 20, 0.5, -0.5).double().softmax(-1)
    assert_accurate(out, (weights @ value.double())[..., None, :].expand(1, 1, 3, 8), tolerance(dtype), "out")
    assert (lse - math.log(20 * (math.exp(0.5) + math.exp(-0.5)))).abs().max() <= 1e-5 + 2.0**-8 * on_dot_path(dtype)


@pytest.mark.parametrize("shift", (0.0, 3.0))
@pytest.mark.parametrize("spread", (1.0, 5.0))
@pytest.mark.parametrize("mask", (None, "Causal()"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_n10_sixteen_bits_against_exact_math(dtype: torch.dtype, spread: float, shift: float, mask: str | None, isa: str):
    case = Case(batch=(1,), num_heads=4, seqlen_q=256, head_dim=64, dtype=dtype, spread=spread, shift=shift, mask=mask)
    want = oracle.expected(case)
    grad_lse = torch.zeros_like(want.grad_lse)
    x = case.inputs()
    exact_results = oracle.attention_and_gradients(x, want.grad_out, grad_lse)
    got = run(case, x, want.grad_out)
    for name, factor in (("out", 1.5), ("query", 2), ("key", 2), ("value", 2)):
        true = exact_results[name]
        floor = (true.to(dtype).double() - true).abs().max()
        error = (got[name].double() - true).abs().max()
        factor = 4 if name != "out" and on_dot_path(dtype) else factor
        assert error <= factor * floor, f"{name}: {error / floor:.2f} times its own rounding, expected at most {factor}"


@pytest.mark.parametrize("n", (65535, 65536, 65537))
def test_n11_rows_past_65536(n: int):
    x = torch.randn(1, 1, n, 8)
    out = ta.attention(x, x, x, mask=ta.SlidingWindow(3, 0))
    for first in (0, 32760, n - 8):
        left = max(first - 3, 0)
        want = ta.attention(x[..., first : first + 8, :], *[x[..., left : first + 8, :]] * 2, mask=ta.SlidingWindow(3, 0))
        assert (out[..., first : first + 8, :] - want).abs().max() < 1e-5


@by_dtype
def test_n12_the_same_row_in_another_batch(dtype: torch.dtype, isa: str):
    query, key, value = (torch.randn(8, 4, n, 32).to(dtype) for n in (40, 300, 300))
    full = ta.attention(query, key, value)
    for n in (1, 2, 7, 8, 9, 31, 33):
        assert torch.equal(ta.attention(query[:1, :, :n], key[:1], value[:1]), full[:1, :, :n])
        assert torch.equal(ta.attention(query[-1:, :, -n:], key[-1:], value[-1:]), full[-1:, :, -n:])


@by_dtype
def test_l12_the_sink_is_in_the_denominator_alone(dtype: torch.dtype, isa: str):
    for size, mask, n in itertools.product((0.0, 5.0, 60.0), (None, "SlidingWindow(3, 0)"), (5, 65)):
        case = Case(num_heads=4, num_heads_kv=2, seqlen_q=5, seqlen_kv=n, dtype=dtype, mask=mask)
        x = case.inputs()
        real = torch.float64 if dtype == torch.float64 else torch.float32
        x.sinks = torch.tensor([size, -size, 0.5 * size, size], dtype=real)
        want, want_lse = oracle.attention(x)
        got = run(case, x)
        assert_accurate(got["out"], want, tolerance(dtype, largest(want)), "out")
        assert_accurate(got["lse"], want_lse, 1e-5 + 2.0**-9 * on_dot_path(dtype), "lse")


def test_l12_the_gradient_of_the_sink(isa: str):
    query, key, value = (torch.randn(1, 2, 5, 8).double() for _ in range(3))
    sinks = torch.tensor([0.0, 5.0]).double().requires_grad_()
    for mask in (None, ta.SlidingWindow(1, 0)):
        assert torch.autograd.gradcheck(lambda s, mask=mask: ta.attention(query, key, value, mask=mask, sinks=s, return_lse=True), (sinks,))


@by_dtype
def test_l12_a_sink_without_keys(dtype: torch.dtype, isa: str):
    real = torch.float64 if dtype == torch.float64 else torch.float32
    sinks = torch.tensor([0.5, -2.0], dtype=real, requires_grad=True)
    query = torch.randn(1, 2, 5, 8).to(dtype)
    for n, mask in ((0, None), (4, torch.zeros(5, 4, dtype=torch.bool)), (4, ta.KeyLengths(torch.tensor([0])))):
        out, lse = ta.attention(query, *[torch.randn(1, 2, n, 8).to(dtype)] * 2, mask=mask, sinks=sinks, return_lse=True)
        assert (out == 0).all() and torch.equal(lse, sinks[:, None].expand(1, 2, 5))
        (grad,) = torch.autograd.grad(lse.sum(), sinks)
        assert torch.equal(grad, torch.full_like(sinks, 5.0))


@pytest.mark.parametrize("n", (1, 63, 64, 65, 129))
@by_dtype
def test_l14_softcap_and_bias_stand_before_the_mask(n: int, dtype: torch.dtype, isa: str):
    x = Case(batch=(1,), num_heads=1, seqlen_q=n, dtype=dtype).inputs().query
    lower = torch.ones(n, n).tril().bool()
    for visible, options in itertools.product(
        (None, lower), ({"softcap": 1.0}, {"bias": torch.full((n, n), 40.0)}, {"softcap": 1.0, "bias": torch.ones(n)})
    ):
        out = ta.attention(x, x, x, mask=visible, **options)
        want = exact(x, x, x, visible, **options)
        assert_accurate(out, want, max(tolerance(dtype), 1.5 * rounding(want, dtype)), str(options.keys()))


@by_dtype
def test_l14_nothing_leaks_from_behind_the_mask(dtype: torch.dtype, isa: str):
    large = 6e4 if dtype == torch.float16 else 1e6
    for n in (2, 64, 65, 129):
        x, value = torch.zeros(1, 1, n, 8, dtype=dtype), torch.zeros(1, 1, n, 1, dtype=dtype)
        value[..., 1:, :] = large
        slopes = torch.tensor([-100.0], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        for options in ({"softcap": 1.0}, {"alibi_slopes": slopes}, {"bias": torch.full((n, n), 80.0)}, {}):
            for mask in (ta.Causal(), torch.ones(n, n).tril().bool()):
                assert (ta.attention(x, x, value, mask=mask, **options)[..., 0, 0] == 0).all()
