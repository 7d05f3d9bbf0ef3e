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


def _is_right(inputs: list[Tensor]) -> bool:
    """Within what the composite itself loses: its gradient of score_weight, one float32 sum over all pairs, is 1e-4 off."""
    results = []
    for function in (ta.additive_attention, composite):
        out = function(*inputs)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), inputs)))
    return all(bool((a - b).abs().max() <= 1e-3 * b.abs().max()) for a, b in zip(*results))


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
