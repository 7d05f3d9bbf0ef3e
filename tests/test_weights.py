"""attention_weights, the weights that made an output, merge_attention and dropout_mask."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import tiled_attention as ta
from tiled_attention.testing import DTYPES
from tiled_attention.weights import attention_with_weights

F64 = torch.float64


def randn(*shape: int, dtype=F64) -> Tensor:
    return torch.randn(shape, dtype=F64).to(dtype)


# On the bfloat16 dot path, sums add the weights as they were rounded for the product with value.
LSE_TOLERANCE = {torch.bfloat16: 2**-8}
OPTIONS = {
    "plain": dict(),
    "causal": dict(mask=ta.Causal()),
    "streaming": dict(mask=ta.Causal() & (ta.SlidingWindow(3, 0) | ta.Sinks(2))),
    "bool with dead rows": dict(mask=torch.rand(17, 23) > 0.8),
    "lengths": dict(mask=ta.KeyLengths(torch.tensor([23, 0]))),
    "softcap": dict(softcap=1.5, scale=0.7),
    "sinks": dict(sinks=torch.tensor([0.0, -math.inf, 3.0, 9.0])),
    "slopes and bias": dict(alibi_slopes=torch.rand(4), bias=torch.randn(4, 1, 23)),
    "offset": dict(mask=ta.Causal(), query_offset=2),
    "offsets": dict(mask=ta.Causal(), query_offset=torch.tensor([0, 11])),
}
ROWS = {
    "all": None,
    "some": torch.tensor([16, 0, 3, 3]),
    "none": torch.tensor([], dtype=torch.int64),
    "int32": torch.tensor([5, 6], dtype=torch.int32),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", OPTIONS)
def test_values(name, rows):
    options, chosen = OPTIONS[name], ROWS[rows]
    query, key = randn(2, 4, 17, 8), randn(2, 2, 23, 8)
    expected = ta.reference.attention_weights(query, key, **options)
    expected = expected if chosen is None else expected[..., chosen.long(), :]
    ours = ta.attention_weights(query, key, rows=chosen, **options)
    torch.testing.assert_close(ours, expected)
    assert torch.equal(ours == 0, expected == 0)
    recorded = ta.attention_weights(query.requires_grad_(), key, rows=chosen, **options)
    assert recorded.requires_grad and torch.equal(recorded, ours)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    query, key = randn(1, 2, 9, 16, dtype=dtype), randn(1, 2, 11, 16, dtype=dtype)
    weights = ta.attention_weights(query, key, mask=ta.Causal())
    assert weights.dtype == (F64 if dtype == F64 else torch.float32)
    exact = ta.reference.attention_weights(query.double(), key.double(), mask=ta.Causal())
    tolerance = LSE_TOLERANCE.get(dtype, 1e-5)
    torch.testing.assert_close(weights.double(), exact, atol=tolerance, rtol=tolerance)


def test_weights_times_value_is_the_output():
    query, key, value = randn(2, 4, 17, 8), randn(2, 2, 23, 8), randn(2, 2, 23, 5)
    for options in OPTIONS.values():
        out, weights = attention_with_weights(query, key, value, **options)
        torch.testing.assert_close(weights @ value.repeat_interleave(2, 1), out)
        assert torch.equal(out, ta.attention(query, key, value, **options))


def test_the_weights_are_those_that_dropout_left():
    query, key, value = randn(2, 4, 17, 8), randn(2, 2, 23, 8), randn(2, 2, 23, 5)
    torch.manual_seed(3)
    out, weights = attention_with_weights(query, key, value, dropout_p=0.4)
    torch.testing.assert_close(weights @ value.repeat_interleave(2, 1), out)
    torch.manual_seed(3)
    assert torch.equal(weights, ta.attention_weights(query, key, dropout_p=0.4))
    torch.manual_seed(3)
    kept = ta.dropout_mask(2, 4, 17, 23, 0.4)
    assert torch.equal(weights != 0, kept)
    torch.manual_seed(3)
    _, average = attention_with_weights(query, key, value, dropout_p=0.4, average=True)
    torch.testing.assert_close(average, weights.mean(1))


@pytest.mark.parametrize("rows", [None, torch.tensor([2, 0, 2])])
@pytest.mark.parametrize("average", [False, True])
def test_gradients_through_output_and_weights(average, rows):
    tensors = [randn(1, 4, 3, 2), randn(1, 2, 4, 2), randn(1, 2, 4, 2), randn(3, 4), randn(4), randn(4)]
    tensors = [tensor.requires_grad_() for tensor in tensors]

    def run(query, key, value, bias, slopes, sinks):
        torch.manual_seed(1)
        options = dict(mask=ta.SlidingWindow(1, 1), softcap=2.0, dropout_p=0.3)
        return attention_with_weights(query, key, value, bias=bias, alibi_slopes=slopes, sinks=sinks, average=average, rows=rows, **options)

    assert gradcheck(run, tensors, check_forward_ad=True)
    assert gradgradcheck(run, tensors)


def test_a_dead_head_has_zero_weights_and_gradients():
    query, key, value = (randn(1, 2, 5, 4).requires_grad_() for _ in range(3))
    dead = torch.tensor([True, False]).view(2, 1, 1)
    out, weights = attention_with_weights(query, key, value, mask=dead, average=True)
    gradients = torch.autograd.grad(out.sum() + weights.square().sum(), (query, key, value))
    assert all(gradient.isfinite().all() and (gradient[:, 1] == 0).all() for gradient in gradients)
    torch.testing.assert_close(weights, ta.attention_weights(query, key, mask=dead)[:, 0] / 2)


def test_average_holds_one_head_in_memory():
    heads, n = 16, 512
    query, key = (torch.randn(1, heads, n, 16) for _ in range(2))
    value = torch.randn(1, heads, n, 16)
    from torch.profiler import ProfilerActivity, profile

    query.requires_grad_()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        _, weights = attention_with_weights(query, key, value, average=True)
        weights.square().sum().backward()
    live = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    one_head = n * n * 4
    assert peak < heads * one_head


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (torch.tensor([0.5]), TypeError),
        (torch.tensor([True]), TypeError),
        ([0, 1], TypeError),
        (torch.tensor([[0]]), ValueError),
        (torch.tensor([5]), (ValueError, RuntimeError)),
        (torch.tensor([-1]), (ValueError, RuntimeError)),
    ],
)
def test_bad_rows(rows, error):
    query = randn(1, 1, 5, 2)
    with pytest.raises(error, match="rows"):
        ta.attention_weights(query, query, rows=rows)


# merge_attention


def split(query, key, value, at, **options):
    parts = []
    for span in (slice(0, at), slice(at, None)):
        parts += ta.attention(query, key[..., span, :], value[..., span, :], return_lse=True, **options)
    return parts


@pytest.mark.parametrize("at", [0, 1, 7, 13])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_two_parts_is_the_whole(at, dtype):
    query, key, value = (randn(2, 3, length, 8, dtype=dtype) for length in (5, 13, 13))
    out, lse = ta.merge_attention(*split(query, key, value, at))
    whole, whole_lse = ta.attention(query, key, value, return_lse=True)
    assert out.dtype == dtype and lse.dtype == whole_lse.dtype
    tolerance = {F64: 1e-12, torch.float32: 1e-5}.get(dtype, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(out, whole, atol=2 * tolerance, rtol=2 * tolerance)
    tolerance = LSE_TOLERANCE.get(dtype, 1e-5)
    torch.testing.assert_close(lse, whole_lse, atol=tolerance, rtol=tolerance)


def test_merging_stands_far_apart_and_dead_parts():
    out_a, out_b = randn(4, 3), randn(4, 3)
    lse_a = torch.tensor([1000.0, -math.inf, 0.0, -math.inf], dtype=F64)
    lse_b = torch.tensor([-1000.0, 5.0, -math.inf, -math.inf], dtype=F64)
    out_a[1], out_b[2] = math.nan, math.inf  # a part that saw nothing is not read
    out_a[3] = math.nan
    out, lse = ta.merge_attention(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[0], out_a[0]) and torch.equal(out[1], out_b[1]) and torch.equal(out[2], out_a[2]) and (out[3] == 0).all()
    assert torch.equal(lse, torch.tensor([1000.0, 5.0, 0.0, -math.inf], dtype=F64))


def test_merging_has_exact_derivatives():
    tensors = [randn(2, 3).requires_grad_(), randn(2).requires_grad_(), randn(2, 3).requires_grad_(), randn(2).requires_grad_()]
    assert gradcheck(ta.merge_attention, tensors, check_forward_ad=True) and gradgradcheck(ta.merge_attention, tensors)
    query, key, value = (randn(1, 2, 4, 3).requires_grad_() for _ in range(3))
    run = lambda *tensors: ta.merge_attention(*split(*tensors, 2))
    assert gradcheck(run, (query, key, value)) and gradgradcheck(run, (query, key, value))


@pytest.mark.parametrize("dead", ["a", "b", "both"])
def test_merging_dead_parts_has_finite_gradients(dead):
    out_a, out_b = randn(2, 3).requires_grad_(), randn(2, 3).requires_grad_()
    lse_a = torch.full((2,), -math.inf if dead in ("a", "both") else 1.0, dtype=F64).requires_grad_()
    lse_b = torch.full((2,), -math.inf if dead in ("b", "both") else 2.0, dtype=F64).requires_grad_()
    leaves = (out_a, lse_a, out_b, lse_b)
    out, lse = ta.merge_attention(*leaves)
    first = torch.autograd.grad([out.square().sum() + torch.where(lse == -math.inf, 0.0, lse).sum()], leaves, create_graph=True)
    second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), leaves, allow_unused=True)
    assert all(gradient.isfinite().all() for gradient in first)
    assert all(gradient is None or gradient.isfinite().all() for gradient in second)
    for name, out_grad, lse_grad in (("a", first[0], first[1]), ("b", first[2], first[3])):
        if dead in (name, "both"):
            assert (out_grad == 0).all() and (lse_grad == 0).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(out_b=randn(4, 2)), "out_b"),
        (dict(out_b=randn(4, 3, dtype=torch.float32)), "out_b"),
        (dict(lse_a=randn(4, 1)), "lse_a"),
        (dict(lse_b=randn(3)), "lse_b"),
        (dict(lse_b=randn(4, dtype=torch.float32)), "lse_b"),
        (dict(out_a=torch.zeros(4, 3, dtype=torch.long)), "out_a"),
        (dict(lse_b=None), "lse_b"),
    ],
)
def test_merging_names_what_is_wrong(change, named):
    arguments = {**dict(out_a=randn(4, 3), lse_a=randn(4), out_b=randn(4, 3), lse_b=randn(4)), **change}
    with pytest.raises((ValueError, TypeError), match=named):
        ta.merge_attention(**arguments)


# dropout_mask


def test_dropout_mask_draws_the_seed_of_the_call():
    query, key = torch.randn(2, 3, 4, 7, 8), torch.randn(2, 3, 2, 9, 8)
    for generator in (None, torch.Generator()):
        source = torch.default_generator if generator is None else generator
        source.manual_seed(8)
        kept = ta.dropout_mask(6, 4, 7, 9, 0.3, generator)
        state = source.get_state()
        source.manual_seed(8)
        weights = ta.attention_weights(query, key, dropout_p=0.3, generator=generator)
        assert torch.equal((weights != 0).view(6, 4, 7, 9), kept)
        assert torch.equal(source.get_state(), state)


def test_dropout_mask_ends():
    state = torch.get_rng_state()
    assert ta.dropout_mask(2, 3, 4, 5, 0.0).all() and torch.equal(torch.get_rng_state(), state)
    assert not ta.dropout_mask(2, 3, 4, 5, 1.0).any()
    assert ta.dropout_mask(0, 3, 4, 5, 0.5).shape == (0, 3, 4, 5)
    kept = ta.dropout_mask(4, 4, 128, 128, 0.25)
    deviation = (kept.double().mean() - 0.75) / math.sqrt(0.75 * 0.25 / kept.numel())
    assert abs(deviation) < 4.5


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((-1, 1, 1, 1, 0.5), "batch"), ((1, 1.5, 1, 1, 0.5), "num_heads"), ((1, 1, 1, 1, "x"), "dropout_p")],
)
def test_dropout_mask_names_what_is_wrong(arguments, named):
    with pytest.raises((ValueError, TypeError), match=named):
        ta.dropout_mask(*arguments)
