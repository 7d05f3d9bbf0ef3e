"""torch.vmap: every argument mapped or not, from any dimension, without torch's slow fallback; randomness; nested transforms."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp

import tiled_attention as ta

F64 = torch.float64
SAMPLES = 3


@pytest.fixture(autouse=True)
def _no_fallback():
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def make(name: str) -> Tensor:
    shapes = {
        "query": (2, 4, 5, 3),
        "key": (2, 2, 6, 3),
        "value": (2, 2, 6, 2),
        "bias": (4, 1, 6),
        "alibi_slopes": (4,),
        "sinks": (4,),
    }
    if name == "mask":
        return torch.rand(2, 1, 5, 6) > 0.3
    if name == "lengths":
        return torch.tensor([6, 2])
    if name == "query_offset":
        return torch.tensor([0, 3])
    if name == "documents":
        return torch.tensor([0, 2, 6])
    return randn(*shapes[name])


def mapped(name: str, dim: int) -> Tensor:
    samples = [make(name) for _ in range(SAMPLES)]
    if name == "lengths":
        samples = [torch.tensor([n, 6 - n]) for n in range(SAMPLES)]
    if name == "query_offset":
        samples = [torch.tensor([n, 1 - n]) for n in range(SAMPLES)]
    if name == "documents":
        samples = [torch.tensor([0, n + 1, 5]) for n in range(SAMPLES)]
    return torch.stack(samples, dim)


def run(names):
    def call(*tensors):
        options = dict(zip(names, tensors))
        mask = options.pop("mask", None)
        if "lengths" in options:
            mask = ta.KeyLengths(options.pop("lengths"))
        if "documents" in options:
            mask = ta.Documents(options.pop("documents"))
        if "query_offset" in options:
            mask = ta.Causal()
        return ta.attention(**options, mask=mask, return_lse=True)

    return call


def check(names, dims, function=run):
    tensors = [make(name) if dim is None else mapped(name, dim) for name, dim in zip(names, dims)]
    results = torch.vmap(function(names), in_dims=tuple(dims))(*tensors)
    for n in range(SAMPLES):
        sample = [tensor if dim is None else tensor.select(dim, n) for tensor, dim in zip(tensors, dims)]
        for ours, alone in zip(results, function(names)(*sample)):
            torch.testing.assert_close(ours[n], alone)


BASE = ("query", "key", "value")


@pytest.mark.parametrize("dims", [d for d in itertools.product((None, 0, -1, 2), repeat=3) if d != (None,) * 3])
def test_query_key_and_value(dims):
    check(BASE, dims)


@pytest.mark.parametrize("name", ["mask", "bias", "alibi_slopes", "sinks", "lengths", "query_offset", "documents"])
@pytest.mark.parametrize("base", [(None, None, None), (0, None, 1), (1, 0, 0)])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_other_arguments(name, base, dim):
    if dim is None and base == (None,) * 3:
        dim = 0
    check((*BASE, name), (*base, dim))


def gradients(names):
    floats = [at for at, name in enumerate(names) if name in (*BASE, "bias", "alibi_slopes", "sinks")]

    def call(*tensors):
        loss = lambda *tensors: sum(torch.where(part == -math.inf, 0.0, part).square().sum() for part in run(names)(*tensors))
        return grad(loss, tuple(floats))(*tensors)

    return call


@pytest.mark.parametrize("name", ["mask", "bias", "alibi_slopes", "sinks", "lengths", "query_offset", "documents"])
@pytest.mark.parametrize("dims", [(None, None, None, 0), (0, 1, -1, None), (2, None, 0, -1)])
def test_gradients_per_sample(name, dims):
    check((*BASE, name), dims, gradients)


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
@pytest.mark.parametrize("dims", [(None, None, None, 0), (0, 1, -1, None)])
def test_tangents_and_hessians_per_sample(name, dims):
    def tangents(names):
        def call(*tensors):
            return jvp(run(names), tensors, tuple(torch.ones_like(tensor) for tensor in tensors))[1]

        return call

    def second(names):
        def call(*tensors):
            return (hessian(lambda last: run(names)(*tensors[:-1], last)[0].square().sum())(tensors[-1]),)

        return call

    check((*BASE, name), dims, tangents)
    check((*BASE, name), dims, second)


def test_nested_vmap():
    query, key, value = randn(3, 2, 1, 2, 4, 3), randn(2, 1, 2, 5, 3), randn(1, 2, 3, 5, 2)
    f = lambda q, k, v: ta.attention(q, k, v, mask=ta.Causal())
    ours = torch.vmap(torch.vmap(f, in_dims=(0, 0, None)), in_dims=(0, None, 2))(query, key, value)
    for a, b in itertools.product(range(3), range(2)):
        torch.testing.assert_close(ours[a, b], f(query[a, b], key[b], value[:, :, a]))


@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
def test_jacobians_per_sample(jacobian):
    query, key, value = randn(3, 1, 2, 4, 3), randn(1, 2, 5, 3), randn(1, 2, 5, 2)
    ours = torch.vmap(jacobian(lambda q: ta.attention(q, key, value, mask=ta.Causal())))(query)
    exact = [jacobian(lambda q: ta.reference.attention(q, key, value, mask=ta.Causal()))(sample) for sample in query]
    torch.testing.assert_close(ours, torch.stack(exact))


def test_vmap_inside_of_grad():
    query, key, value = randn(3, 2, 4, 3), randn(3, 2, 5, 3), randn(3, 2, 5, 2)
    batched = lambda f: lambda *tensors: torch.vmap(f)(*(tensor.unsqueeze(1) for tensor in tensors)).square().sum()
    ours = grad(batched(ta.attention), (0, 1, 2))(query, key, value)
    exact = grad(lambda *tensors: ta.reference.attention(*tensors).square().sum(), (0, 1, 2))(query, key, value)
    torch.testing.assert_close(ours, exact)
    query.requires_grad_()
    (plain,) = torch.autograd.grad(batched(ta.attention)(query, key, value), query)
    torch.testing.assert_close(plain, exact[0])


def test_vjp_of_many_cotangents():
    query, key, value = randn(1, 2, 4, 3), randn(1, 2, 5, 3), randn(1, 2, 5, 2)
    sinks = randn(2)
    out, pull = vjp(lambda q, s: ta.attention(q, key, value, sinks=s), query, sinks)
    cotangents = randn(6, *out.shape)
    ours = torch.vmap(pull)(cotangents)
    torch.testing.assert_close(ours, tuple(torch.stack(parts) for parts in zip(*(pull(cotangent) for cotangent in cotangents))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit(dtype):
    query, key, value = (randn(4, 1, 2, 9, 8).to(dtype) for _ in range(3))
    loss = lambda *tensors: ta.attention(*tensors).float().square().sum()
    ours = torch.vmap(grad(loss, (0, 1, 2)))(query, key, value)
    alone = [grad(loss, (0, 1, 2))(*sample) for sample in zip(query, key, value)]
    for a, b in zip(ours, zip(*alone)):
        assert torch.equal(a, torch.stack(b))


def test_no_samples():
    empty = torch.zeros(0, 1, 2, 3, 4)
    assert torch.vmap(ta.attention)(empty, empty, empty).shape == (0, 1, 2, 3, 4)
    sinks = torch.zeros(0, 2)
    full = torch.zeros(1, 2, 3, 4)
    assert torch.vmap(lambda s: ta.attention(full, full, full, sinks=s))(sinks).shape == (0, 1, 2, 3, 4)


# Dropout

DROP = 0.5


def dropped(query, key, value):
    return ta.attention(query, key, value, dropout_p=DROP)


def test_randomness_error_is_the_default():
    query = randn(SAMPLES, 1, 2, 4, 3)
    with pytest.raises(RuntimeError, match="random"):
        torch.vmap(dropped)(query, query, query)


@pytest.mark.parametrize("dims", [(0, None, None), (None, None, 0), (0, 0, 0)])
def test_randomness_same(dims):
    tensors = [mapped(name, 0) if dim == 0 else make(name) for name, dim in zip(BASE, dims)]
    torch.manual_seed(2)
    ours = torch.vmap(dropped, in_dims=dims, randomness="same")(*tensors)
    for n in range(SAMPLES):
        torch.manual_seed(2)
        alone = dropped(*(tensor if dim is None else tensor[n] for tensor, dim in zip(tensors, dims)))
        torch.testing.assert_close(ours[n], alone)


@pytest.mark.parametrize("dims", [(0, None, None), (None, None, 0)])
def test_randomness_different(dims):
    shared = {name: make(name) for name in BASE}
    tensors = [shared[name].expand(64, *shared[name].shape) if dim == 0 else shared[name] for name, dim in zip(BASE, dims)]
    draws = torch.vmap(dropped, in_dims=dims, randomness="different")(*tensors)
    assert not any(torch.equal(draws[n], draws[n + 1]) for n in range(63))
    error = (draws.mean(0) - ta.attention(*shared.values())) / (draws.std(0) / 8)
    assert error.square().mean() < 2


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_see_the_mask_of_the_forward(randomness):
    query, key, value = (mapped(name, 0) for name in BASE)

    def value_and_slope(query, key, value):
        return torch.func.grad_and_value(lambda value: dropped(query, key, value).sum())(value)

    slope, out = torch.vmap(value_and_slope, randomness=randomness)(query, key, value)
    # out is linear in value: <slope, value> = out for one mask and no other
    torch.testing.assert_close((slope * value).sum((1, 2, 3, 4)), out)
    primal, tangent = torch.vmap(lambda q, k, v: jvp(lambda v: dropped(q, k, v).sum(), (v,), (v,)), randomness=randomness)(
        query, key, value
    )
    torch.testing.assert_close(primal, tangent)


def test_dropout_mask_under_vmap():
    draw = lambda _: ta.dropout_mask(1, 2, 3, 4, DROP)
    same = torch.vmap(draw, randomness="same", out_dims=0)(torch.zeros(5))
    assert same.shape == (5, 1, 2, 3, 4) and (same == same[0]).all()
    different = torch.vmap(draw, randomness="different")(torch.zeros(5))
    assert not (different == different[0]).all()


# Weights and merging


@pytest.mark.parametrize("dims", [(0, None), (None, 1), (-1, 0)])
@pytest.mark.parametrize("rows", [None, torch.tensor([4, 0])])
def test_weights(dims, rows):
    tensors = [mapped(name, dim) if dim is not None else make(name) for name, dim in zip(("query", "key"), dims)]
    run = lambda q, k: ta.attention_weights(q, k, rows=rows, mask=ta.Causal())
    ours = torch.vmap(run, in_dims=dims)(*tensors)
    slopes = torch.vmap(grad(lambda q, k: run(q, k).square().sum(), (0, 1)), in_dims=dims)(*tensors)
    for n in range(SAMPLES):
        sample = [tensor if dim is None else tensor.select(dim, n) for tensor, dim in zip(tensors, dims)]
        torch.testing.assert_close(ours[n], run(*sample))
        for a, b in zip(slopes, grad(lambda q, k: run(q, k).square().sum(), (0, 1))(*sample)):
            torch.testing.assert_close(a[n], b)


def test_merge():
    parts = randn(SAMPLES, 2, 4, 3), randn(SAMPLES, 2, 4), randn(SAMPLES, 2, 4, 3), randn(SAMPLES, 2, 4)
    ours = torch.vmap(ta.merge_attention)(*parts)
    torch.testing.assert_close(ours, ta.merge_attention(*parts))


def test_drop_in():
    query, key, value = (randn(SAMPLES, 2, 4, 3) for _ in range(3))
    for options in (dict(), dict(is_causal=True), dict(attn_mask=torch.rand(4, 4) > 0.2)):
        run = partial(ta.scaled_dot_product_attention, **options)
        torch.testing.assert_close(torch.vmap(run)(query, key, value), run(query, key, value))


# The raw operators carry the same rule, for compiled code.


def test_raw_operators():
    query, key, value = (mapped(name, 0) for name in BASE)
    arguments = (None,) * 13 + (0.5, 0.0, 0.0, [], [], False, False)
    for name in ("attention", "attention_fwd"):
        op = getattr(torch.ops.tiled_attention, name)
        ours = torch.vmap(lambda q, k, v, op=op: op(q, k, v, *arguments, False)[:2])(query, key, value)
        torch.testing.assert_close(ours, ta.attention(query, key, value, scale=0.5, return_lse=True))
