"""Derivatives of linear attention in eager mode: gradcheck in float64 for every option, through out and state; autocast, memory."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import tiled_attention as ta

F64 = torch.float64


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def inputs(batch=(1,), heads=2, heads_kv=1, n=3, m=None, dim=2, dim_v=2) -> dict[str, Tensor]:
    shapes = {"query": (heads, n, dim), "key": (heads_kv, m or n, dim), "value": (heads_kv, m or n, dim_v)}
    return {name: randn(*batch, *shape).requires_grad_() for name, shape in shapes.items()}


def others(*names: str, heads=1, n=3, dim=2, dim_v=2) -> dict[str, Tensor]:
    made = {
        "log_decay": -torch.rand(1, heads, n, dtype=F64),
        "per feature": -torch.rand(1, heads, n, dim, dtype=F64),
        "kv": randn(1, heads, dim, dim_v),
        "k_sum": torch.rand(1, heads, dim, dtype=F64),
    }
    return {name.replace("per feature", "log_decay"): made[name].requires_grad_() for name in names}


def call(**options):
    """A function of tensors alone, by their names, to (out, kv, k_sum)."""

    def run(names, *tensors, function=ta.linear_attention):
        given = dict(zip(names, tensors))
        if "kv" in given:
            given["initial_state"] = ta.LinearState(given.pop("kv"), given.pop("k_sum"))
        if function is ta.linear_attention:
            out, state = function(**given, **options, return_state=True)
        else:
            out, state = function(**given, **options)
        return out, *state

    return run


MASK = torch.tensor([True, False, True])
STATE = ("kv", "k_sum")

# name: (options, sizes of query, key and value, names and heads of the tensors that are differentiated besides)
OPTIONS = {
    "all keys": (dict(), dict(m=4), (), 1),
    "all keys, masked": (dict(key_mask=torch.tensor([1, 0, 1, 1]).bool()), dict(m=4), (), 1),
    "all keys, not normalised": (dict(normalize=False, scale=-0.6), dict(m=2), (), 1),
    "causal": (dict(causal=True), dict(), (), 1),
    "causal, masked": (dict(causal=True, key_mask=MASK), dict(), (), 1),
    "nothing seen": (dict(causal=True, key_mask=torch.zeros(3).bool()), dict(), (), 1),
    "not normalised": (dict(causal=True, normalize=False, scale=0.6), dict(), (), 1),
    "relu": (dict(causal=True, feature_map="relu"), dict(dim=3), (), 1),
    "exp": (dict(causal=True, feature_map="exp"), dict(), (), 1),
    "identity": (dict(causal=True, feature_map="identity", normalize=False), dict(), (), 1),
    "pair": (dict(causal=True, feature_map=("exp", "elu")), dict(), (), 1),
    "callable": (dict(causal=True, feature_map=torch.nn.functional.softplus), dict(), (), 1),
    "decay": (dict(causal=True), dict(), ("log_decay",), 1),
    "decay per feature": (dict(causal=True, key_mask=MASK), dict(), ("per feature",), 1),
    "decay per query head": (dict(causal=True), dict(), ("log_decay",), 2),
    "state": (dict(causal=True), dict(), STATE, 1),
    "state per query head": (dict(causal=True), dict(), STATE, 2),
    "everything": (dict(causal=True, key_mask=MASK, feature_map="exp"), dict(heads_kv=2), ("per feature", *STATE), 2),
    "everything, not normalised": (dict(causal=True, normalize=False, scale=2.0), dict(), ("log_decay", *STATE), 1),
    "one token": (dict(causal=True), dict(n=1), STATE, 1),
    "no tokens": (dict(causal=True), dict(n=0), STATE, 1),
}


def prepared(name):
    options, sizes, names, heads = OPTIONS[name]
    tensors = {**inputs(**sizes), **others(*names, heads=heads, n=sizes.get("n", 3), dim=sizes.get("dim", 2))}
    run = call(**options)
    return (lambda *values, **more: run(tensors, *values, **more)), tuple(tensors.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_first_derivatives(name):
    run, tensors = prepared(name)
    assert gradcheck(run, tensors, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "no tokens"])
def test_second_derivatives(name):
    run, tensors = prepared(name)
    assert gradgradcheck(run, tensors, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=len(tensors) > 4)


@pytest.mark.parametrize("options", [dict(), dict(log_decay=-torch.rand(1, 1, 1, dtype=F64), key_mask=torch.tensor([True]))])
def test_a_step_is_differentiable(options):
    x, state = inputs(n=1), others(*STATE)

    def step(query, key, value, kv, k_sum):
        out, after = ta.linear_attention_step(query, key, value, ta.LinearState(kv, k_sum), **options)
        return out, *after

    tensors = (*x.values(), *state.values())
    assert gradcheck(step, tensors, check_forward_ad=True) and gradgradcheck(step, tensors, fast_mode=True)
    whole = call(causal=True, **options)((*x, *state), *tensors)
    torch.testing.assert_close(step(*tensors), whole)


@pytest.mark.parametrize("n", [130, 257])
@pytest.mark.parametrize("gates", [(), ("log_decay",), ("per feature",)])
def test_blocks_agree_with_the_definition(n, gates):
    sizes = dict(n=n, dim=6, dim_v=3)
    tensors = {**inputs(heads=4, heads_kv=2, **sizes), **others(*gates, *STATE, heads=2, **sizes)}
    run = call(causal=True, key_mask=torch.rand(n) > 0.1)
    values = tuple(tensors.values())
    directions = tuple(torch.randn_like(x) for x in values)

    def everything(function):
        apply = lambda *values: run(tensors, *values, function=function)
        loss = lambda *values: sum(part.square().sum() for part in apply(*values))
        _, tangent = torch.func.jvp(apply, values, directions)
        gradients, by_direction = torch.func.jvp(torch.func.grad(loss, tuple(range(len(values)))), values, directions)
        first = torch.autograd.grad(loss(*values), values, create_graph=True)
        second = torch.autograd.grad(sum((a * b).sum() for a, b in zip(first, directions)), values)
        return tangent, gradients, by_direction, second

    def reference(causal, **given):
        return ta.reference.linear_attention(causal=causal, **given)

    for ours, exact in zip(everything(ta.linear_attention), everything(reference)):
        for a, b in zip(ours, exact):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8 * b.detach().abs().max().item())


@pytest.mark.parametrize("m", [3, 1500])
def test_blocks_without_order_agree_with_the_definition(m):
    x = inputs(heads=2, heads_kv=2, n=1100 if m == 1500 else 2, m=m)

    def second(attention):
        out, state = attention(**x, return_state=True) if attention is ta.linear_attention else attention(**x)
        loss = out.square().sum() + sum(part.square().sum() for part in state) / m
        first = torch.autograd.grad(loss, tuple(x.values()), create_graph=True)
        return first, torch.autograd.grad(sum(gradient.square().sum() for gradient in first), tuple(x.values()))

    torch.testing.assert_close(second(ta.linear_attention), second(ta.reference.linear_attention), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("orders", ["ff", "fr", "rf", "rr", "ffr", "rfr", "frf", "rrr"])
def test_torch_func(orders):
    x = {name: tensor.detach() for name, tensor in inputs(heads=1, n=2, dim=1, dim_v=1).items()}
    gate, state = -torch.rand(1, 1, 2, dtype=F64), tuple(part.detach() for part in others(*STATE, dim=1, dim_v=1).values())

    def derivative(attention, **options):
        def function(key, gate, kv):
            out, after = attention(**{**x, "key": key}, causal=True, log_decay=gate, initial_state=(kv, state[1]), **options)
            return out.sin().sum() + after[0].square().sum()

        for order in reversed(orders):
            function = (torch.func.jacfwd if order == "f" else torch.func.jacrev)(function, (0, 1, 2))
        return function(x["key"], gate, state[0])

    ours = derivative(ta.linear_attention, return_state=True)
    torch.testing.assert_close(ours, derivative(ta.reference.linear_attention))


def test_forward_mode_levels():
    x = {name: tensor.detach() for name, tensor in inputs().items()}
    tangent = torch.randn_like(x["key"])
    with forward_ad.dual_level():
        out = ta.linear_attention(x["query"], forward_ad.make_dual(x["key"], tangent), x["value"], causal=True)
        ours = forward_ad.unpack_dual(out).tangent
    run = lambda key: ta.reference.linear_attention(x["query"], key, x["value"], causal=True)[0]
    torch.testing.assert_close(ours, torch.func.jvp(run, (x["key"],), (tangent,))[1])


def test_gradients_come_only_where_they_are_asked_for():
    x = inputs()
    expected = torch.autograd.grad(ta.linear_attention(**x, causal=True).sum(), tuple(x.values()))
    for name, gradient in zip(x, expected):
        fixed = {other: tensor if other == name else tensor.detach() for other, tensor in x.items()}
        assert torch.equal(torch.autograd.grad(ta.linear_attention(**fixed, causal=True).sum(), fixed[name])[0], gradient)


def test_gradients_through_the_state_alone():
    x = inputs(heads_kv=2)
    _, state = ta.linear_attention(**x, return_state=True)
    by_query, by_value = torch.autograd.grad(state.kv.sum(), (x["query"], x["value"]), retain_graph=True, allow_unused=True)
    assert by_query is None or (by_query == 0).all()
    phi = torch.nn.functional.elu(x["key"]) + 1
    torch.testing.assert_close(by_value, phi.sum(-1, keepdim=True).expand_as(by_value))
    _, by_value = torch.autograd.grad(state.k_sum.sum(), (x["key"], x["value"]), allow_unused=True)
    assert by_value is None or (by_value == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_second_derivatives_in_other_dtypes(dtype):
    x = [tensor.detach().to(dtype) for tensor in inputs(heads=4, heads_kv=2, n=9, dim=8, dim_v=8).values()]
    directions = [torch.randn_like(tensor) for tensor in x]

    def second(dtype, attention):
        tensors = [tensor.to(dtype).requires_grad_() for tensor in x]
        first = torch.autograd.grad(attention(*tensors).square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum((a * b.to(dtype)).sum() for a, b in zip(first, directions)), tensors)

    exact = second(F64, lambda *tensors: ta.reference.linear_attention(*tensors, causal=True)[0])
    tolerance = 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for ours, expected in zip(second(dtype, lambda *tensors: ta.linear_attention(*tensors, causal=True)), exact):
        assert ours.dtype == dtype
        assert (ours.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("feature_map", ["elu", torch.exp])
@pytest.mark.parametrize("causal", [False, True])
def test_what_hidden_keys_hold_reaches_no_derivative(bad, feature_map, causal):
    x = {name: tensor.detach() for name, tensor in inputs(heads=1).items()}
    polluted = {name: tensor.clone() for name, tensor in x.items()}
    polluted["key"][..., 1, :] = polluted["value"][..., 1, :] = bad
    directions = [torch.randn_like(tensor) for tensor in x.values()]

    def everything(x):
        tensors = tuple(tensor.clone().requires_grad_() for tensor in x.values())
        run = lambda *tensors: ta.linear_attention(*tensors, causal=causal, key_mask=MASK, feature_map=feature_map)
        first = torch.autograd.grad(run(*tensors).square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum((a * b).sum() for a, b in zip(first, directions)), tensors)
        return *first, *second, torch.func.jvp(run, tuple(x.values()), tuple(directions))[1]

    results = everything(polluted)
    assert (results[1][..., 1, :] == 0).all() and (results[2][..., 1, :] == 0).all()
    for ours, clean in zip(results, everything(x)):
        assert torch.equal(ours, clean)


def test_dead_rows_have_zero_derivatives():
    x = inputs()
    with torch.no_grad():
        x["query"].fill_(-1.0)  # relu: every denominator is 0
    out = ta.linear_attention(**x, feature_map="relu", causal=True)
    first = torch.autograd.grad(out.sum(), tuple(x.values()), create_graph=True)
    second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), tuple(x.values()))
    assert (out == 0).all() and all((gradient == 0).all() for gradient in (*first, *second))


@pytest.mark.parametrize("reset", [-math.inf, -3e37])
def test_gates_that_reset_have_finite_derivatives(reset):
    x, gate = inputs(n=5), -torch.rand(1, 1, 5, dtype=F64)
    gate[..., 2] = reset
    gate.requires_grad_()
    tensors = (*x.values(), gate)
    first = torch.autograd.grad(ta.linear_attention(**x, causal=True, log_decay=gate).square().sum(), tensors, create_graph=True)
    second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), tensors)
    assert all(gradient.isfinite().all() for gradient in (*first, *second))
    assert (first[3][..., 2] == 0).all()


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
@pytest.mark.parametrize("decay", [None, 1, 64])
def test_memory_of_second_derivatives_is_linear(order, decay):
    n = 8192
    query, key, value = (torch.randn(1, 1, n, 64, requires_grad=True) for _ in range(3))
    gate = None if decay is None else -torch.rand(1, 1, n, decay)
    run = lambda *tensors: ta.linear_attention(*tensors, causal=True, log_decay=gate)
    result = query.numel() * 4
    if order == "jvp":
        with _Peak() as peak, torch.no_grad():
            torch.func.jvp(run, (query.detach(), key, value), tuple(torch.ones_like(x) for x in (query, key, value)))
        results = 5 * result  # out, its tangent and three directions
    else:
        first = torch.autograd.grad(run(query, key, value).sum(), (query, key, value), create_graph=True)
        with _Peak() as peak:
            torch.autograd.grad(sum(gradient.sum() for gradient in first), (query, key, value))
        results = 3 * result
    assert peak.bytes - results < 64e6


def test_checkpointing():
    x = inputs(n=6)
    run = lambda *tensors: ta.linear_attention(*tensors, causal=True)
    outs = run(*x.values()), torch.utils.checkpoint.checkpoint(run, *x.values(), use_reentrant=False)
    plain, checkpointed = (torch.autograd.grad(out.square().sum(), tuple(x.values())) for out in outs)
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed))


def test_gradients_keep_the_memory_order_of_their_inputs():
    views = [randn(2, 5, 4, 3).transpose(1, 2).requires_grad_() for _ in range(3)]
    out = ta.linear_attention(*views, causal=True)
    assert out.stride() == views[0].stride()
    for view, gradient in zip(views, torch.autograd.grad(out.sum(), views)):
        assert gradient.stride() == view.stride()


def test_gates_of_other_dtypes():
    x = {name: tensor.detach().float() for name, tensor in inputs(n=5).items()}
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        gate = (-torch.rand(1, 1, 5)).to(dtype).requires_grad_()
        exact = gate.detach().double().requires_grad_()
        (ours,) = torch.autograd.grad(ta.linear_attention(**x, causal=True, log_decay=gate).square().sum(), gate)
        doubles = {name: tensor.double() for name, tensor in x.items()}
        (expected,) = torch.autograd.grad(ta.reference.linear_attention(**doubles, causal=True, log_decay=exact)[0].square().sum(), exact)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), expected, rtol=2 * torch.finfo(dtype).eps + 1e-4, atol=1e-4)


# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_query_key_and_value(dtype):
    x = {name: tensor.detach().float() for name, tensor in inputs(heads_kv=2, n=5).items()}
    gate = -torch.rand(1, 2, 5)
    expected = ta.linear_attention(**{name: tensor.to(dtype) for name, tensor in x.items()}, causal=True, log_decay=gate)
    with torch.autocast("cpu", dtype):
        out, state = ta.linear_attention(**x, causal=True, log_decay=gate, return_state=True)
        again, state = ta.linear_attention_step(*(tensor[:, :, :1] for tensor in x.values()), state)
        mapped = ta.linear_attention(**x, causal=True, feature_map=lambda x: x.float().exp())
        exact = ta.linear_attention(*(tensor.double() for tensor in x.values()))
    assert torch.equal(out, expected) and expected.dtype == dtype
    assert again.dtype == mapped.dtype == dtype and exact.dtype == F64
    assert state.kv.dtype == state.k_sum.dtype == torch.float32


def test_autocast_does_not_round_tangents():
    x = tuple(tensor.detach().float() for tensor in inputs(heads_kv=2, n=5, dim=8).values())
    state = ta.LinearState(torch.randn(1, 2, 8, 2), torch.rand(1, 2, 8))
    run = lambda kv: ta.linear_attention(*x, causal=True, initial_state=ta.LinearState(kv, state.k_sum), return_state=True)[1].kv
    with torch.autocast("cpu", torch.bfloat16):
        _, tangent = torch.func.jvp(run, (state.kv,), (state.kv,))
    assert torch.equal(tangent, state.kv)


def test_autocast_leaves_gates_and_states_as_they_are():
    x = {name: tensor.detach().float() for name, tensor in inputs(heads_kv=2, n=1).items()}
    state = ta.LinearState(torch.full((1, 2, 2, 2), 1e6 + 1), torch.full((1, 2, 2), 1e6 + 1))
    gate = torch.full((1, 2, 1), -1e-7)
    with torch.autocast("cpu", torch.bfloat16):
        _, after = ta.linear_attention(**x, causal=True, log_decay=gate, initial_state=state, return_state=True)
    assert (after.kv != after.kv.bfloat16()).any()
    torch.testing.assert_close(after.k_sum, state.k_sum * gate.exp() + torch.nn.functional.elu(x["key"][:, :, 0].bfloat16().float()) + 1)


# What torch.ops cannot differentiate says so.

RAW = (None,) * 5 + (1, 1, True, True, 1.0)


def raw(name: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    op = getattr(torch.ops.tiled_attention, name)
    if name == "linear_attention_bwd":
        return op(torch.ones_like(value), None, None, query, key, value, *RAW, 7)[0]
    if name.startswith("linear_attention_step"):
        state = query.detach().new_zeros(1, 2, 2, 2), query.detach().new_ones(1, 2, 2)
        result = op(query, key, value, None, None, *state, 1, 1, True, 1.0)
        return result if isinstance(result, Tensor) else result[0]
    return op(query, key, value, *RAW)[0]


OPERATORS = ["linear_attention", "linear_attention_fwd", "linear_attention_bwd", "linear_attention_step", "linear_attention_step_"]


@pytest.mark.parametrize("name", OPERATORS)
def test_raw_operators_differentiate_or_say_that_they_do_not(name):
    query, key, value = (tensor.detach() for tensor in inputs(heads_kv=2, n=1).values())
    f = lambda query: raw(name, query, key, value)
    for transform in (lambda: torch.func.jvp(f, (query,), (query,)), lambda: torch.func.jacfwd(f)(query)):
        with pytest.raises(RuntimeError, match=f"tiled_attention::{name} has no"):
            transform()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        f(forward_ad.make_dual(query, query))
    with pytest.raises(RuntimeError, match=f"tiled_attention::{name} has no derivative under torch.func"):
        torch.func.grad(lambda query: f(query).sum())(query)
    query.requires_grad_()
    if name != "linear_attention":
        with pytest.raises(RuntimeError, match=f"tiled_attention::{name} has no derivative"):
            f(query)
        return
    (ours,) = torch.autograd.grad(f(query).square().sum(), query, retain_graph=True)
    (expected,) = torch.autograd.grad(ta.linear_attention(query, key, value, causal=True).square().sum(), query)
    torch.testing.assert_close(ours, expected)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(f(query).square().sum(), query, create_graph=True)
