"""Derivatives of any order in eager mode: gradcheck in float64 for every argument and option, torch.func, memory, checkpointing, errors."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import tiled_attention as ta

F64 = torch.float64


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def inputs(batch=(1,), heads=2, heads_kv=1, seqlen_q=3, seqlen_kv=4, dim=3, dim_v=2) -> list[Tensor]:
    shapes = ((heads, seqlen_q, dim), (heads_kv, seqlen_kv, dim), (heads_kv, seqlen_kv, dim_v))
    return [randn(*batch, *shape).requires_grad_() for shape in shapes]


def lengths(*values: int) -> ta.KeyLengths:
    return ta.KeyLengths(torch.tensor(values))


BOOL = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]]).bool()
DEAD_BIAS = torch.zeros(3, 4, dtype=F64).masked_fill(~BOOL, -math.inf)

# name: (options, tensors that are differentiated as well)
OPTIONS = {
    "plain": (dict(), ()),
    "scale": (dict(scale=-0.7), ()),
    "causal": (dict(mask=ta.Causal()), ()),
    "top left": (dict(mask=ta.Causal(align="top_left")), ()),
    "window": (dict(mask=ta.SlidingWindow(1, 1)), ()),
    "prefix": (dict(mask=ta.PrefixLM(2), query_offset=0), ()),
    "chunk": (dict(mask=ta.Chunked(2)), ()),
    "streaming": (dict(mask=ta.Causal() & (ta.SlidingWindow(0, 0) | ta.Sinks(1))), ()),
    "lengths": (dict(mask=lengths(2)), ()),
    "documents": (dict(mask=ta.Documents(torch.tensor([0, 2, 4]))), ()),
    "bool, dead row": (dict(mask=BOOL), ()),
    "rows broadcast": (dict(mask=torch.tensor([1, 0, 1, 1]).bool()), ()),
    "softcap": (dict(softcap=1.5), ()),
    "slopes": (dict(), ("alibi_slopes",)),
    "slopes, offset": (dict(query_offset=2, mask=ta.Causal()), ("alibi_slopes",)),
    "sinks": (dict(mask=BOOL), ("sinks",)),
    "bias": (dict(), ("bias",)),
    "dead bias": (dict(bias=DEAD_BIAS), ()),
    "everything": (dict(mask=ta.Causal() & BOOL, softcap=2.0, scale=0.9), ("bias", "alibi_slopes", "sinks")),
    "dropout": (dict(dropout_p=0.4), ()),
    "everything, dropout": (dict(mask=BOOL, softcap=2.0, dropout_p=0.3), ("bias", "alibi_slopes", "sinks")),
}


def call(options: dict, names: tuple[str, ...], weights: bool = False):
    """A function of tensors alone, under one seed."""

    def run(query, key, value, *others):
        torch.manual_seed(5)
        arguments = {**options, **dict(zip(names, others))}
        if weights:
            return ta.attention_weights(query, key, **arguments)
        return ta.attention(query, key, value, return_lse=True, **arguments)

    return run


def extra(names: tuple[str, ...]) -> list[Tensor]:
    shapes = {"alibi_slopes": (2,), "sinks": (2,), "bias": (2, 1, 4)}
    return [randn(*shapes[name]).requires_grad_() for name in names]


def finite_lse(run):
    """lse of a dead row is -inf, for which no finite difference exists: 0 in its place."""

    def wrapped(*tensors):
        out, lse = run(*tensors)
        return out, torch.where(lse == -math.inf, 0.0, lse)

    return wrapped


@pytest.mark.parametrize("name", OPTIONS)
def test_first_derivatives(name):
    options, names = OPTIONS[name]
    tensors = inputs() + extra(names)
    assert gradcheck(finite_lse(call(options, names)), tensors, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_second_derivatives(name):
    options, names = OPTIONS[name]
    tensors = inputs(seqlen_q=3, dim=2, dim_v=1) + extra(names)
    assert gradgradcheck(finite_lse(call(options, names)), tensors, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("name", ["plain", "everything", "everything, dropout", "bool, dead row", "lengths"])
def test_derivatives_of_weights(name):
    options, names = OPTIONS[name]
    query, key, _ = inputs()
    run = call(options, names, weights=True)
    tensors = [query, key, *extra(names)]

    def weights(query, key, *others):
        return run(query, key, None, *others)

    assert gradcheck(weights, tensors, check_forward_ad=True)
    assert gradgradcheck(weights, tensors, check_fwd_over_rev=True)


@pytest.mark.parametrize(
    "shape", [(3, 4), (4,), (), (3, 1), (1, 1, 1, 4), (2, 1, 3, 4), (2, 1, 1, 4), (2, 2, 3, 4), (2, 1, 1), (1, 1, 1, 1)]
)
def test_bias_gradient_has_the_shape_of_the_bias(shape):
    query, key, value = (tensor.detach() for tensor in inputs(batch=(2,)))
    bias = randn(*shape).requires_grad_()
    assert gradcheck(lambda bias: ta.attention(query, key, value, bias=bias), (bias,))
    assert gradgradcheck(lambda bias: ta.attention(query, key, value, bias=bias), (bias,))


def test_bias_of_more_leading_dimensions():
    query, key, value = inputs(batch=(2, 3), dim=2, dim_v=1)
    bias = randn(3, 1, 3, 1).requires_grad_()
    tensors = (query, key, value, bias)
    run = lambda query, key, value, bias: ta.attention(query, key, value, bias=bias, mask=ta.KeyLengths(torch.tensor([[4], [2]])))
    assert gradcheck(run, tensors)
    assert gradgradcheck(run, tensors)


def test_gradients_come_only_where_they_are_asked_for():
    query, key, value = inputs()
    for chosen in (query, key, value):
        fixed = [tensor if tensor is chosen else tensor.detach() for tensor in (query, key, value)]
        (gradient,) = torch.autograd.grad(ta.attention(*fixed).sum(), chosen)
        (expected,) = torch.autograd.grad(ta.attention(query, key, value).sum(), chosen)
        assert torch.equal(gradient, expected)


def test_lse_alone():
    query, key, value = inputs()
    run = lambda query, key: ta.attention(query, key, value.detach(), return_lse=True)[1]
    assert gradcheck(run, (query, key)) and gradgradcheck(run, (query, key))
    lse = ta.attention(query, key, value, return_lse=True)[1]
    gradients = torch.autograd.grad(lse.sum(), (query, value), allow_unused=True)
    assert (gradients[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_second_derivatives_in_other_dtypes(dtype):
    query, key, value = (tensor.detach().to(dtype) for tensor in inputs(heads=4, heads_kv=2, seqlen_q=9, seqlen_kv=11, dim=8, dim_v=8))
    directions = [torch.randn_like(tensor) for tensor in (query, key, value)]

    def second(attention, dtype):
        tensors = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]
        out = attention(*tensors, mask=ta.Causal(), softcap=3.0)
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        product = sum((gradient * direction.to(dtype)).sum() for gradient, direction in zip(first, directions))
        return torch.autograd.grad(product, tensors)

    tolerance = 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for ours, exact in zip(second(ta.attention, dtype), second(ta.reference.attention, F64)):
        assert ours.dtype == dtype
        assert (ours.double() - exact).abs().max() <= tolerance * exact.abs().max()


BAD = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])


@BAD
@pytest.mark.parametrize("hide", ["bool", "bias", "lengths", "causal"])
def test_what_hidden_slots_hold_reaches_no_derivative(bad, hide):
    query, key, value = (tensor.detach() for tensor in inputs(heads=1))
    options = {
        "bool": dict(mask=torch.tensor([1, 1, 1, 0]).bool()),
        "bias": dict(bias=torch.tensor([0, 0, 0, -math.inf], dtype=F64)),
        "lengths": dict(mask=lengths(3)),
        "causal": dict(mask=ta.Causal(), query_offset=0),
    }[hide]
    polluted_key, polluted_value = key.clone(), value.clone()
    polluted_key[..., 3, 0], polluted_value[..., 3, 0] = bad, bad
    directions = [randn(*tensor.shape) for tensor in (query, key, value)]

    def everything(key, value):
        tensors = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        out = ta.attention(*tensors, **options)
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum((a * b).sum() for a, b in zip(first, directions)), tensors)
        run = lambda query, key, value: ta.attention(query, key, value, **options)
        _, tangent = torch.func.jvp(run, (query, key, value), tuple(directions))
        return [*first, *second, tangent]

    for ours, clean in zip(everything(polluted_key, polluted_value), everything(key, value)):
        assert torch.equal(ours, clean)


@BAD
def test_a_bad_query_row_that_sees_nothing_reaches_no_second_derivative(bad):
    query, key, value = inputs()
    with torch.no_grad():
        query[..., 1, 0] = bad  # row 1 of BOOL is dead
    out = ta.attention(query, key, value, mask=BOOL)
    first = torch.autograd.grad(out.square().sum(), (query, key, value), create_graph=True)
    second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), (query, key, value))
    assert all(gradient.isfinite().all() for gradient in (*first, *second))
    assert (first[0][..., 1, :] == 0).all() and (second[0][..., 1, :] == 0).all()


def test_tangent_of_a_row_of_equal_lowest_scores():
    query, key, value = inputs()
    lowest = torch.full((3, 4), torch.finfo(F64).min, dtype=F64)

    _, tangent = torch.func.jvp(lambda value: ta.attention(query, key, value, bias=lowest), (value,), (torch.ones_like(value),))
    torch.testing.assert_close(tangent, torch.ones_like(tangent))  # weights sum to 1, though log(4) is lost in lse


def test_dead_rows_have_zero_derivatives():
    query, key, value = inputs()
    out = ta.attention(query, key, value, mask=torch.zeros(3, 4).bool())
    first = torch.autograd.grad(out.sum(), (query, key, value), create_graph=True)
    second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), (query, key, value))
    assert all((gradient == 0).all() for gradient in (*first, *second))


FUNC_OPTIONS = dict(mask=ta.SlidingWindow(2, 1), softcap=2.0)


def test_torch_func_agrees_with_the_definition():
    query, key, value = (tensor.detach() for tensor in inputs(dim=2))
    ours = lambda *tensors: ta.attention(*tensors, **FUNC_OPTIONS)
    exact = lambda *tensors: ta.reference.attention(*tensors, **FUNC_OPTIONS)
    tensors, all_three = (query, key, value), (0, 1, 2)
    tangents = tuple(randn(*tensor.shape) for tensor in tensors)
    torch.testing.assert_close(torch.func.jvp(ours, tensors, tangents), torch.func.jvp(exact, tensors, tangents))
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(ours, all_three)(*tensors), transform(exact, all_three)(*tensors))
    loss = lambda attention: lambda *tensors: attention(*tensors).square().sum()
    for outer in (torch.func.jacrev, torch.func.jacfwd):
        for inner in (torch.func.jacrev, torch.func.jacfwd):
            second = [outer(inner(loss(attention), all_three), all_three)(*tensors) for attention in (ours, exact)]
            torch.testing.assert_close(*second)


@pytest.mark.parametrize("orders", ["fff", "ffr", "frf", "rff", "frr", "rfr", "rrf", "rrr"])
def test_third_derivatives(orders):
    query, key, value = (tensor.detach() for tensor in inputs(seqlen_q=2, seqlen_kv=2, dim=1, dim_v=1))

    def third(attention):
        function = lambda query: attention(query, key, value, softcap=2.0).sin().sum()
        for order in reversed(orders):
            function = (torch.func.jacfwd if order == "f" else torch.func.jacrev)(function)
        return function(query)

    torch.testing.assert_close(third(ta.attention), third(ta.reference.attention))


def test_torch_func_with_dropout_keeps_one_mask():
    query, key, value = (tensor.detach() for tensor in inputs(seqlen_q=5, seqlen_kv=6))
    torch.manual_seed(11)
    kept = ta.dropout_mask(1, 2, 5, 6, 0.4)

    def ours(query):
        torch.manual_seed(11)
        return ta.attention(query, key, value, dropout_p=0.4)

    def exact(query):
        return ta.reference.attention(query, key, value, dropout_mask=kept, dropout_p=0.4)

    jacfwd = lambda f: torch.func.jacfwd(f, randomness="same")
    for transform in (torch.func.jacrev, jacfwd, lambda f: jacfwd(torch.func.jacrev(f)), lambda f: jacfwd(jacfwd(f))):
        tolerance = dict(rtol=1e-4, atol=1e-4)  # the reference divides by 1 - p, the operator by its rounding to 2 ** -16
        torch.testing.assert_close(
            transform(lambda q: ours(q).square().sum())(query), transform(lambda q: exact(q).square().sum())(query), **tolerance
        )


def test_forward_mode_levels():
    query, key, value = (tensor.detach() for tensor in inputs())
    tangent = randn(*query.shape)
    with forward_ad.dual_level():
        out = ta.attention(forward_ad.make_dual(query, tangent), key, value)
        ours = forward_ad.unpack_dual(out).tangent
    _, exact = torch.func.jvp(lambda query: ta.reference.attention(query, key, value), (query,), (tangent,))
    torch.testing.assert_close(ours, exact)


class _Peak:
    """The largest number of bytes that live tensors hold over what lived before, counted at every allocation."""

    def __enter__(self):
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error):
        self._profile.__exit__(*error)
        live = self.bytes = 0
        for event in self._profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                self.bytes = max(self.bytes, live)


@pytest.mark.parametrize("order", ["jvp", "double backward"])
def test_memory_of_second_derivatives_is_linear(order):
    n = 8192
    query, key, value = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3))
    window = ta.SlidingWindow(63, 0)
    result = query.numel() * 4
    if order == "jvp":
        run = lambda query: ta.attention(query, key, value, mask=window)
        with _Peak() as peak, torch.no_grad():
            torch.func.jvp(run, (query.detach(),), (torch.ones_like(query),))
        results = 2 * result
    else:
        out = ta.attention(query, key, value, mask=window)
        first = torch.autograd.grad(out.sum(), (query, key, value), create_graph=True)
        with _Peak() as peak:
            torch.autograd.grad(first[0].sum(), (query, key, value))
        results = 3 * result
    assert peak.bytes - results < 64e6


def test_checkpointing_replays_dropout():
    query, key, value = inputs(seqlen_q=6, seqlen_kv=7)

    def gradients(checkpointed):
        torch.manual_seed(3)
        run = lambda *tensors: ta.attention(*tensors, dropout_p=0.5)
        out = torch.utils.checkpoint.checkpoint(run, query, key, value, use_reentrant=False) if checkpointed else run(query, key, value)
        return [out, *torch.autograd.grad(out.square().sum(), (query, key, value))]

    for ours, plain in zip(gradients(True), gradients(False)):
        assert torch.equal(ours, plain)


def test_gradients_keep_the_memory_order_of_their_inputs():
    base = [randn(2, 3, 4, 5).requires_grad_() for _ in range(3)]
    out = ta.attention(*(tensor.transpose(1, 2) for tensor in base))
    assert out.stride() == torch.empty_like(base[0].transpose(1, 2)).stride()
    views = [tensor.detach().transpose(1, 2).requires_grad_() for tensor in base]
    for view, gradient in zip(views, torch.autograd.grad(ta.attention(*views).sum(), views)):
        assert gradient.stride() == view.stride()


def test_gradients_of_other_dtypes_of_bias_slopes_and_sinks():
    query, key, value = (tensor.detach().float() for tensor in inputs())
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        bias, slopes, sinks = (tensor.detach().to(dtype).requires_grad_() for tensor in extra(("bias", "alibi_slopes", "sinks")))
        out = ta.attention(query, key, value, bias=bias, alibi_slopes=slopes, sinks=sinks)
        gradients = torch.autograd.grad(out.sum(), (bias, slopes, sinks))
        exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (bias, slopes, sinks)]
        exact_out = ta.reference.attention(
            query.double(), key.double(), value.double(), bias=exact_inputs[0], alibi_slopes=exact_inputs[1], sinks=exact_inputs[2]
        )
        for ours, exact in zip(gradients, torch.autograd.grad(exact_out.sum(), exact_inputs)):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.double(), exact, rtol=2 * torch.finfo(dtype).eps + 1e-5, atol=1e-5)


# What torch.ops cannot differentiate says so.

PLAIN = (None,) * 13 + (0.5, 0.0, 0.0, [], [], False, False)


def raw(name: str, query, key, value, **others):
    ops = torch.ops.tiled_attention
    if name == "attention_bwd":
        out, lse, residual = (tensor.detach() for tensor in ops.attention_fwd(query.detach(), key.detach(), value.detach(), *PLAIN, True))
        return ops.attention_bwd(torch.ones_like(out), None, query, key, value, *PLAIN, out, lse, residual, 7)[0]
    if name == "attention_weights":
        lse = ops.attention_fwd(query.detach(), key.detach(), value.detach(), *PLAIN, False)[1].detach()
        return ops.attention_weights(query, key, *(None,) * 12, *PLAIN[13:], lse, None, False)
    return getattr(ops, name)(query, key, value, *PLAIN, False)[0]


ALL_OPS = pytest.mark.parametrize("name", ["attention", "attention_fwd", "attention_bwd", "attention_weights"])


@ALL_OPS
def test_forward_mode_on_raw_operators_is_an_error(name):
    query, key, value = (tensor.detach() for tensor in inputs())
    for transform in (
        lambda f: torch.func.jvp(f, (query,), (torch.ones_like(query),)),
        lambda f: torch.func.jacfwd(f)(query),
        lambda f: torch.func.hessian(lambda q: f(q).sum())(query),
    ):
        with pytest.raises(RuntimeError, match=f"tiled_attention::{name} has no"):
            transform(lambda query: raw(name, query, key, value))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        raw(name, forward_ad.make_dual(query, torch.ones_like(query)), key, value)


def test_reverse_mode_on_raw_operators():
    query, key, value = inputs()
    expected = torch.autograd.grad(ta.attention(query, key, value, scale=0.5).square().sum(), (query, key, value))
    ours = torch.autograd.grad(raw("attention", query, key, value).square().sum(), (query, key, value))
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b)
    for name in ("attention_fwd", "attention_bwd"):
        with pytest.raises(RuntimeError, match=f"tiled_attention::{name} has no derivative"):
            raw(name, query, key, value)
    for name in ("attention", "attention_fwd", "attention_weights"):
        with pytest.raises(RuntimeError, match=f"tiled_attention::{name} has no derivative under torch.func"):
            torch.func.grad(lambda query, name=name: raw(name, query, key.detach(), value.detach()).sum())(query.detach())


def test_second_derivatives_of_raw_operators_are_an_error():
    query, key, value = inputs()
    out = raw("attention", query, key, value)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(out.square().sum(), query, create_graph=True)
    grad_of_grad = torch.func.grad(lambda q: torch.func.grad(lambda q: raw("attention", q, key.detach(), value.detach()).sum())(q).sum())
    with pytest.raises(RuntimeError, match="tiled_attention::attention has no derivative under torch.func"):
        grad_of_grad(query.detach())
