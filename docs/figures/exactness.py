"""Draws how far three exact attentions in float32 are from float64, and from each other, over the number of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from _common import BLACK, BLUE, ORANGE, RED, pyplot, save, start
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiled_attention as ta

ROWS, HEADS, HEAD_DIM = 64, 4, 64
SEQLENS = (64, 256, 1024, 4096, 16384)


def sdpa(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value)


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    errors: dict[str, list[float]] = {}
    between: dict[str, list[float]] = {}
    for seqlen in SEQLENS:
        generator = torch.Generator().manual_seed(seqlen)
        tensors = [torch.randn(1, HEADS, rows, HEAD_DIM, generator=generator) for rows in (ROWS, seqlen, seqlen)]
        exact: Any = ta.reference.attention(*(tensor.double() for tensor in tensors))
        found = {
            "SDPA math": sdpa(SDPBackend.MATH, *tensors),
            "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION, *tensors),
            "ta.attention": ta.attention(*tensors),
        }
        for name, result in found.items():
            errors.setdefault(name, []).append(((result - exact).norm() / exact.norm()).item())
        for name in ("SDPA math", "SDPA flash"):
            distance = (found[name] - found["ta.attention"]).norm() / exact.norm()
            between.setdefault(f"{name} to ta.attention", []).append(distance.item())
        distance = (found["SDPA math"] - found["SDPA flash"]).norm() / exact.norm()
        between.setdefault("SDPA math to SDPA flash", []).append(distance.item())
        errors.setdefault("exact, rounded to float32", []).append(((exact.float() - exact).norm() / exact.norm()).item())

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.3))
    for (name, row), (color, line) in zip(errors.items(), ((RED, "s-"), (ORANGE, "^-"), (BLUE, "o-"), (BLACK, ":"))):
        left.plot(SEQLENS, row, line, color=color, markersize=5, label=name)
    left.set(xscale="log", xlabel="keys", ylabel="relative error of the output", ylim=(0, 8e-7))
    left.set_title("distance to float64")
    left.set_xticks(SEQLENS, [str(n) for n in SEQLENS])
    left.minorticks_off()
    left.legend(fontsize=8, ncols=2)
    unit = exact.square().mean().sqrt() * 1e-7
    differences = {
        "SDPA flash \u2212 float64": (found["SDPA flash"] - exact, ORANGE),
        "ta.attention \u2212 float64": (found["ta.attention"] - exact, BLUE),
        "SDPA flash \u2212 ta.attention": (found["SDPA flash"].double() - found["ta.attention"], BLACK),
    }
    bins = torch.linspace(-20, 20, 22).tolist()
    for name, (difference, color) in differences.items():
        right.hist((difference / unit).flatten().tolist(), bins, histtype="step", color=color, linewidth=1.5, label=name)
    right.set(xlabel="difference / root mean square of the output, 1e-7", ylabel="numbers of the output")
    right.set(title=f"{SEQLENS[-1]} keys, {exact.numel()} numbers", ylim=(0, 4200))
    right.legend(fontsize=8, loc="upper left")
    save(figure, out / "exactness.svg")

    print("keys                " + "".join(f"{n:10}" for n in SEQLENS))
    for name, row in (errors | between).items():
        print(f"{name:26}" + "".join(f"{value:10.1e}" for value in row))


if __name__ == "__main__":
    main()
