"""torch.vmap of linear attention: every argument mapped or not, from any dimension, without torch's slow fallback; nested transforms."""

import itertools

import pytest
import torch
from torch import Tensor

import tiled_attention as ta

F64 = torch.float64


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


@pytest.fixture(autouse=True)
def _no_fallback():
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


SAMPLES = 3
SHAPES = {
    "query": (2, 4, 5, 3),
    "key": (2, 2, 5, 3),
    "value": (2, 2, 5, 2),
    "log_decay": (2, 2, 5),
    "per feature": (2, 1, 5, 3),
    "per query head": (2, 4, 5),
    "key_mask": (5,),
    "kv": (2, 2, 3, 2),
    "k_sum": (2, 2, 3),
}


def make(name: str, dim: int | None) -> Tensor:
    shape = list(SHAPES[name])
    if dim is not None:
        shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, SAMPLES)
    if name == "key_mask":
        return torch.rand(shape) > 0.3
    made = randn(*shape)
    return -made.abs() if name in ("log_decay", "per feature", "per query head") else made.abs() if name == "k_sum" else made


def check_vmap(names, dims, function):
    tensors = [make(name, dim) for name, dim in zip(names, dims)]
    results = torch.vmap(function, in_dims=tuple(dims))(*tensors)
    for n in range(SAMPLES):
        sample = [tensor if dim is None else tensor.select(dim, n) for tensor, dim in zip(tensors, dims)]
        for ours, alone in zip(results, function(*sample)):
            torch.testing.assert_close(ours[n], alone)


def by_name(names, **options):
    plain = [name if name not in ("per feature", "per query head") else "log_decay" for name in names]

    def run(*tensors):
        given = dict(zip(plain, tensors))
        if "kv" in given:
            given["initial_state"] = ta.LinearState(given.pop("kv"), given.pop("k_sum"))
        out, state = ta.linear_attention(**given, **options, return_state=True)
        return out, *state

    return run


BASE = ("query", "key", "value")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", [d for d in itertools.product((None, 0, -1), repeat=3) if d != (None,) * 3])
def test_vmap_of_query_key_and_value(dims, causal):
    check_vmap(BASE, dims, by_name(BASE, causal=causal))


@pytest.mark.parametrize("extra", [("key_mask",), ("log_decay",), ("per feature",), ("per query head",), ("kv", "k_sum")], ids=str)
@pytest.mark.parametrize("base", [(None, None, None), (0, None, 1)])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_vmap_of_other_arguments(extra, base, dim):
    if dim is None and base == (None,) * 3:
        dim = 1
    names = (*BASE, *extra)
    dims = (*base, *(dim for _ in extra))
    run = by_name(names, causal=True)
    check_vmap(names, dims, run)
    floats = tuple(at for at, name in enumerate(names) if name != "key_mask")
    loss = lambda *tensors: sum(part.square().sum() for part in run(*tensors))
    check_vmap(names, dims, torch.func.grad(loss, floats))

    def tangents(*tensors):
        moved = tuple(tensors[at] for at in floats)
        rest = lambda *moved: run(*(moved[floats.index(at)] if at in floats else tensors[at] for at in range(len(names))))
        return torch.func.jvp(rest, moved, tuple(tensor.cos() for tensor in moved))[1]

    check_vmap(names, dims, tangents)


def test_vmap_of_hessians():
    names = (*BASE, "log_decay")
    run = by_name(names, causal=True)
    check_vmap(names, (0, None, 1, -1), lambda q, k, v, g: (torch.func.hessian(lambda g: run(q, k, v, g)[0].square().sum())(g),))


def test_nested_vmap_and_vmap_inside_of_grad():
    query, key, value = randn(3, 2, 1, 2, 4, 3), randn(2, 1, 2, 4, 3), randn(1, 2, 3, 4, 2)
    f = lambda q, k, v: ta.linear_attention(q, k, v, causal=True)
    ours = torch.vmap(torch.vmap(f, in_dims=(0, 0, None)), in_dims=(0, None, 2))(query, key, value)
    for a, b in itertools.product(range(3), range(2)):
        torch.testing.assert_close(ours[a, b], f(query[a, b], key[b], value[:, :, a]))
    x = tuple(randn(3, 1, 2, 4, 3) for _ in range(3))
    total = lambda f: lambda *x: torch.vmap(f)(*x).square().sum()
    reference = lambda *x: ta.reference.linear_attention(*x, causal=True)[0]
    torch.testing.assert_close(torch.func.grad(total(f), (0, 1, 2))(*x), torch.func.grad(total(reference), (0, 1, 2))(*x))


def test_vmap_of_steps():
    query, key, value = (randn(SAMPLES, 2, 4, 1, 3) for _ in range(3))
    state = ta.LinearState(randn(SAMPLES, 2, 4, 3, 3), randn(SAMPLES, 2, 4, 3).abs())
    ours = torch.vmap(ta.linear_attention_step)(query, key, value, state)
    torch.testing.assert_close(ours, ta.linear_attention_step(query, key, value, state))
    raw = lambda *x: torch.ops.tiled_attention.linear_attention_step(*x[:3], None, None, *x[3:], 1, 1, True, 1.0)
    torch.testing.assert_close(torch.vmap(raw)(query, key, value, *state), (ours[0], *ours[1]))
    empty = torch.zeros(0, 2, 3, 4)
    assert torch.vmap(lambda x: ta.linear_attention(x, x, x))(empty).shape == empty.shape
