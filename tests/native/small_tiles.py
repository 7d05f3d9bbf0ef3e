"""Derivatives over every tile, split and chunk edge: run by test_small_tiles.py on a library whose tiles are 8 x 16 and whose splits
hold 64 keys.

Lengths of 26 and 150 are then four tiles of queries, four chunks, ten tiles of keys and three splits, each with a ragged end.
"""

import math

import pytest
import torch
from torch import Tensor

import tiled_attention as ta

SEQLEN_Q, SEQLEN_KV = 26, 150


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def qkv(heads: int = 2, heads_kv: int = 1, batch: int = 1) -> list[Tensor]:
    shapes = ((batch, heads, SEQLEN_Q, 3), (batch, heads_kv, SEQLEN_KV, 3), (batch, heads_kv, SEQLEN_KV, 2))
    return [randn(*shape) for shape in shapes]


KEEP = torch.rand(SEQLEN_Q, SEQLEN_KV, generator=torch.Generator().manual_seed(3)) > 0.4
KEEP[5] = False
OPTIONS = {
    "plain": dict(),
    "causal": dict(mask=ta.Causal()),
    "window": dict(mask=ta.SlidingWindow(9, 3)),
    "streaming": dict(mask=ta.Causal() & (ta.SlidingWindow(17, 0) | ta.Sinks(3))),
    "lengths": dict(mask=ta.KeyLengths(torch.tensor([77]))),
    "documents": dict(mask=ta.Documents(torch.tensor([0, 33, 130, 150]))),
    "bool": dict(mask=KEEP),
    "softcap, scale": dict(softcap=1.5, scale=-0.6),
    "dropout": dict(dropout_p=0.4, mask=ta.Causal()),
}
EXTRA = {
    "bias": dict(bias=(2, SEQLEN_Q, SEQLEN_KV)),
    "bias shared by heads": dict(bias=(SEQLEN_Q, SEQLEN_KV)),
    "bias without rows": dict(bias=(2, 1, SEQLEN_KV)),
    "bias of rows": dict(bias=(SEQLEN_Q, 1)),
    "slopes and sinks": dict(alibi_slopes=(2,), sinks=(2,)),
}


def under_one_seed(options: dict, names: tuple[str, ...] = ()):
    def run(query, key, value, *others):
        torch.manual_seed(5)
        out, lse = ta.attention(query, key, value, return_lse=True, **options, **dict(zip(names, others)))
        return out, torch.where(lse == -math.inf, 0.0, lse)

    return run


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_cross_every_edge(name, isa):
    assert torch.autograd.gradcheck(under_one_seed(OPTIONS[name]), qkv(), fast_mode=True)


@pytest.mark.parametrize("name", EXTRA)
def test_gradients_of_the_other_arguments_cross_every_edge(name, isa):
    shapes = EXTRA[name]
    tensors = [*qkv(), *(randn(*shape) for shape in shapes.values())]
    assert torch.autograd.gradcheck(under_one_seed(dict(mask=ta.Causal()), tuple(shapes)), tensors, fast_mode=True)


@pytest.mark.parametrize("name", ["plain", "streaming", "bool", "softcap, scale", "dropout"])
def test_second_derivatives_cross_every_edge(name):
    assert torch.autograd.gradgradcheck(under_one_seed(OPTIONS[name]), qkv(), fast_mode=True)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (9, 9)], ids=str)
def test_values_and_gradients_equal_the_definition(heads, isa):
    """One, few and many heads: each way of sharing the work among threads."""
    for name, options in OPTIONS.items():
        if "dropout_p" in options:
            continue
        tensors = qkv(*heads)
        results = []
        for function in (ta.attention, ta.reference.attention):
            out, lse = function(*tensors, return_lse=True, **options)
            gradients = torch.autograd.grad(out.square().sum() + torch.where(lse == -math.inf, 0.0, lse).sum(), tensors)
            results.append((out, lse, *gradients))
        for ours, right in zip(*results):
            torch.testing.assert_close(ours, right, atol=1e-12, rtol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
