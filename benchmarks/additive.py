"""Additive attention against the same formula in PyTorch's operators, and its memory."""

from collections.abc import Callable, Iterator

import torch
from rows import Row
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import tiled_attention as ta
from tiled_attention.compare import machine
from tiled_attention.compare.scores import additive_composite as composite
from tiled_attention.compare.timing import alternate
from tiled_attention.testing import largest, ulp


def _inputs(seqlen: int, head_dim: int) -> list[Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(1, 8, seqlen, head_dim) for _ in range(3)] + [torch.randn(head_dim)]
    return [tensor.requires_grad_() for tensor in tensors]


def _call(function: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> Callable[[], object]:
    """What the clock sees."""
    if backward:
        return lambda: torch.autograd.grad(function(*inputs).sum(), inputs)

    def forward() -> None:
        with torch.no_grad():
            function(*inputs)

    return forward


def _results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and all gradients, float64."""
    out = function(*inputs)
    return [t.detach().double() for t in (out, *torch.autograd.grad(out.square().sum(), inputs))]


def _exact(inputs: list[Tensor]) -> list[Tensor]:
    """The composite in float64, head by head: all heads at once would hold 2 GB in each of several tensors."""
    query, key, value, weight = (t.detach().double() for t in inputs)
    heads = [
        _results(composite, [t.requires_grad_() for t in (*(x[:, h : h + 1].clone() for x in (query, key, value)), weight.clone())])
        for h in range(query.shape[1])
    ]
    return [*(torch.cat(parts, 1) for parts in list(zip(*heads, strict=True))[:4]), sum(head[4] for head in heads)]


def _is_right(inputs: list[Tensor]) -> bool:
    """Errors against float64 at most twice those of the composite, plus one ulp of the largest element."""
    exact = _exact(inputs)
    checked = zip(exact, _results(ta.additive_attention, inputs), _results(composite, inputs), strict=True)
    return all(largest(ours - want) <= 2 * largest(theirs - want) + ulp(largest(want), torch.float32) for want, ours, theirs in checked)


def additive_speed(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """n 512, head_dim 64 and 128, forward and forward+backward."""
    with machine.pinned(threads):
        for head_dim in (64, 128):
            inputs = _inputs(512, head_dim)
            right = _is_right(inputs)
            for backward in (False, True):
                what = f"(1, 8, 512, {head_dim}) float32 forward{'+backward' if backward else ''}"
                row = Row("additive", what, "composite", "ms", wrong=not right)
                calls = {"ours": _call(ta.additive_attention, inputs, backward), "theirs": _call(composite, inputs, backward)}
                times = alternate(calls, rounds=min(rounds, 10), seconds=seconds)
                row.ours, row.theirs = times["ours"] * 1e3, times["theirs"] * 1e3
                yield row.want(at_least=20 if backward else 50)


def additive_memory(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """n 2048: the composite would hold 8.6 GB for one tensor, and each (8, 2048, 2048) tensor of scores has 134 MB."""
    call = _call(ta.additive_attention, _inputs(2048, 64), True)
    with machine.pinned(threads), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    yield Row("additive_memory", "(1, 8, 2048, 64) float32 forward+backward, allocated", unit="MB", ours=peak / 1e6).want_value(at_most=64)


CLAIMS = {"additive": additive_speed, "additive_memory": additive_memory}
