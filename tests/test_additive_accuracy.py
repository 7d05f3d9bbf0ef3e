"""The accuracy of the contract for additive attention: over many seeds and sizes of inputs and weights, errors at most twice those of the
same formula in PyTorch's operators. The exact values come from NumPy's extended precision, so that float64 is measured too."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiled_attention as ta
from tiled_attention.testing import largest, ulp

SEEDS = range(8)
HEADS = 2
# (seqlen_q, seqlen_kv, head_dim, size of query and key, size of score_weight)
KINDS = (
    *((24, 40, 64, spread, 1.0) for spread in (1e-3, 0.01, 0.1, 0.3, 1.0, 2.0, 5.0, 30.0)),
    *((9, 11, 5, spread, 1.0) for spread in (1e-3, 0.1, 1.0, 5.0)),
    *((20, 300, 8, spread, 1.0) for spread in (1e-3, 0.1, 2.0, 30.0)),
    *((24, 40, 64, spread, size) for spread in (0.01, 1.0) for size in (1e-3, 30.0)),
)
NAMES = ("out", "lse", "query", "key", "value", "score_weight")
Arrays = tuple[np.ndarray[Any, Any], ...]
needs_extended = pytest.mark.skipif(np.finfo(np.longdouble).eps > 2e-19, reason="long double is float64 here")


def composite(query: Tensor, key: Tensor, value: Tensor, score_weight: Tensor) -> tuple[Tensor, Tensor]:
    """As one writes it."""
    score = torch.tanh(query[..., :, None, :] + key[..., None, :, :]) @ score_weight
    return score.softmax(-1) @ value, score.logsumexp(-1)


def ours(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    return ta.additive_attention(*tensors, return_lse=True)


def inputs(kind: tuple[int, int, int, float, float], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """query, key, value, score_weight, grad_out, grad_lse"""
    n, m, dim, spread, size = kind
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, n, dim), (HEADS, m, dim), (HEADS, m, dim), (dim,), (HEADS, n, dim), (HEADS, n))
    scales = (spread, spread, 1.0, size, 1.0, 1.0)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def results(function: Any, tensors: list[Tensor]) -> Arrays:
    leaves = [t.detach().clone().requires_grad_() for t in tensors[:4]]
    out, lse = function(*leaves)
    gradients = torch.autograd.grad([out, lse], leaves, tensors[4:])
    return tuple(t.detach().numpy() for t in (out, lse, *gradients))


def definition(tensors: list[Tensor]) -> Arrays:
    """The same in extended precision, by the derivatives written out."""
    query, key, value, weight, grad_out, grad_lse = (t.numpy().astype(np.longdouble) for t in tensors)
    tanh = np.tanh(query[:, :, None] + key[:, None])
    score = (tanh * weight).sum(-1)
    top = score.max(-1, keepdims=True)
    lse = top + np.log(np.exp(score - top).sum(-1, keepdims=True))
    probs = np.exp(score - lse)
    grad_probs = grad_out @ value.swapaxes(-1, -2)
    grad_score = probs * (grad_probs - (probs * grad_probs).sum(-1, keepdims=True) + grad_lse[..., None])
    slope = grad_score[..., None] * (1 - tanh**2) * weight
    gradients = (slope.sum(2), slope.sum(1), probs.swapaxes(-1, -2) @ grad_out, (grad_score[..., None] * tanh).sum((0, 1, 2)))
    return (probs @ value, lse[..., 0], *gradients)


@cache
def expected(kind: tuple[int, int, int, float, float], dtype: torch.dtype) -> tuple[list[Arrays], list[Arrays]]:
    """The exact results of each seed, and the errors of the composite."""
    cases = [inputs(kind, dtype, seed) for seed in SEEDS]
    exact = [definition(tensors) for tensors in cases]
    return exact, [difference(results(composite, tensors), want) for tensors, want in zip(cases, exact, strict=True)]


def difference(got: Arrays, want: Arrays) -> Arrays:
    return tuple((a - b).astype(np.float64) for a, b in zip(got, want, strict=True))


def rms(errors: list[Arrays], index: int) -> float:
    return float(np.sqrt(np.mean(np.concatenate([one[index].ravel() for one in errors]) ** 2)))


@needs_extended
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(f"{x:g}" for x in kind))
def test_errors_are_at_most_twice_those_of_the_composite(kind: tuple[int, int, int, float, float], dtype: torch.dtype, isa: str):
    """Root mean squares over the seeds, plus that of one ulp of the largest element (ulp / sqrt(12)). Gradients are made of weights that
    come again from lse, and have its rounding, which is one and the same in all rows where all scores are near 0."""
    exact, plain = expected(kind, dtype)
    errors = [difference(results(ours, inputs(kind, dtype, seed)), want) for seed, want in zip(SEEDS, exact, strict=True)]
    wrong, top = {}, max(float(np.abs(want[1]).max()) for want in exact)
    for index, name in enumerate(NAMES):
        size = max(float(np.abs(want[index]).max()) for want in exact)
        error, own = rms(errors, index), rms(plain, index)
        limit = 2 * own + ulp(size, dtype) / math.sqrt(12)
        if name not in ("out", "lse"):
            limit += 0.5 * ulp(top, dtype) * rms(exact, index)
        if not error <= limit:
            wrong[name] = f"{error:.2e}, PyTorch {own:.2e}"
    assert not wrong, f"root mean square errors: {wrong}"


@needs_extended
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("size", (1e3, 1e6))
def test_large_weights_keep_the_accuracy_of_the_scores(size: float, dtype: torch.dtype, isa: str):
    """Probabilities are 0 or 1 then, but for a few: lse is the largest score."""
    kind = (24, 40, 64, 1.0, size)
    exact, plain = expected(kind, dtype)
    errors = [difference(results(ours, inputs(kind, dtype, seed)), want) for seed, want in zip(SEEDS, exact, strict=True)]
    top = max(float(np.abs(want[1]).max()) for want in exact)
    assert rms(errors, 1) <= 2 * rms(plain, 1) + ulp(top, dtype) / math.sqrt(12)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("spread", (1e-3, 0.1, 1.0, 5.0))
def test_16_bit_results_are_those_of_float32_rounded_once(spread: float, dtype: torch.dtype, isa: str):
    """Against float64 on the same inputs: out within 1.5 roundings to 16 bit, gradients within 2, lse as in float32."""
    for seed in range(3):
        tensors = [t.to(dtype) for t in inputs((24, 40, 32, spread, 1.0), torch.float64, seed)]
        tensors[3], tensors[5] = tensors[3].float(), tensors[5].float()
        exact = results(composite, [t.double() for t in tensors])
        plain = results(composite, [t.float() for t in tensors])
        leaves = [t.clone().requires_grad_() for t in tensors[:4]]
        got = ours(*leaves)
        got = (*got, *torch.autograd.grad(got, leaves, tensors[4:]))
        for name, a, want, b in zip(NAMES, got, exact, plain, strict=True):
            error, size = float(np.abs(a.detach().double().numpy() - want).max()), largest(torch.from_numpy(want))
            limit = (1.5 if name == "out" else 2) * 0.5 * ulp(size, dtype)
            if name == "lse":
                limit = 4 * float(np.abs(b - want).max()) + ulp(size, torch.float32)
            assert error <= limit, f"{name}: {error:.2e} above {limit:.2e}"
