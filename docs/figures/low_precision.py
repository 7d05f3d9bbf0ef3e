"""Draws the error of attention in bfloat16 over the number of keys: what is rounded, and what is summed in which precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from _common import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, pyplot, save, start
from torch import Tensor

import tiled_attention as ta

ROWS, HEAD_DIM = 256, 64
SEQLENS = (64, 128, 256, 512, 1024, 2048, 4096)


def key_by_key(query: Tensor, key: Tensor, value: Tensor, accumulate: torch.dtype) -> Tensor:
    """Key by key: scores and exponentials are float32, the row sum `accumulate`, and products with the values of bfloat16 in float32."""
    scores = query.float() @ key.float().mT * HEAD_DIM**-0.5
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    row_sum = torch.zeros(query.shape[:-1], dtype=accumulate)
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float32)
    for j in range(key.shape[-2]):
        row_sum += exponentials[..., j].to(accumulate)
        out += exponentials[..., j, None].bfloat16().float() * value[..., j : j + 1, :].float()
    return (out / row_sum[..., None].float()).bfloat16()


def step_by_step(query: Tensor, key: Tensor, value: Tensor, softmax: torch.dtype) -> Tensor:
    """The three operators, each of which reads and writes bfloat16; the softmax may compute and write float32."""
    scores = query @ key.mT * HEAD_DIM**-0.5
    return torch.softmax(scores, -1, dtype=softmax).bfloat16() @ value


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    curves: dict[str, list[float]] = {}
    sums = []
    for seqlen in SEQLENS:
        generator = torch.Generator().manual_seed(seqlen)
        query, key, value = (torch.randn(1, 1, rows, HEAD_DIM, generator=generator).bfloat16() for rows in (ROWS, seqlen, seqlen))
        exact: Any = ta.reference.attention(query.double(), key.double(), value.double())
        scores = query.double() @ key.double().mT * HEAD_DIM**-0.5
        sums.append(torch.exp(scores - scores.amax(-1, keepdim=True)).sum(-1).mean().item())
        results: dict[str, Any] = {
            "row sum in bfloat16": key_by_key(query, key, value, torch.bfloat16),
            "three operators in bfloat16": step_by_step(query, key, value, torch.bfloat16),
            "the same, float32 softmax": step_by_step(query, key, value, torch.float32),
            "bfloat16 weights, float32 sums": key_by_key(query, key, value, torch.float32),
            "ta.attention": ta.attention(query, key, value),
            "exact, rounded to bfloat16": exact.bfloat16(),
        }
        for name, found in results.items():
            curves.setdefault(name, []).append(((found.double() - exact).norm() / exact.norm()).item())

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
    lines = ((RED, "D-"), (ORANGE, "s-"), (PURPLE, "v--"), (GREEN, "^-"), (BLUE, "o-"))
    for (name, errors), (color, line) in zip(curves.items(), lines):
        marker = {"markersize": 9, "markerfacecolor": "none"} if color in (GREEN, ORANGE) else {"markersize": 4}
        axes.plot(SEQLENS, errors, line, color=color, label=name, **marker)
    axes.plot(SEQLENS, curves["exact, rounded to bfloat16"], ":", color=BLACK, label="exact, rounded to bfloat16")
    axes.set(xscale="log", yscale="log", xlabel="keys", ylabel="relative error of the output")
    axes.set_xticks(SEQLENS, [str(n) for n in SEQLENS])
    axes.set_yticks([1e-3, 1e-2, 1e-1, 1], ["0.1 %", "1 %", "10 %", "100 %"])
    axes.legend(fontsize=8)
    save(figure, out / "low_precision.svg")

    print("relative error, %              " + "".join(f"{n:8}" for n in SEQLENS))
    for name, errors in curves.items():
        if name != "ta.attention":  # depends on the instruction set; the tests hold it to 1.5 times the last line
            print(f"{name:31}" + "".join(f"{100 * e:8.3f}" for e in errors))
    print("mean row sum                   " + "".join(f"{s:8.1f}" for s in sums))


if __name__ == "__main__":
    main()
