"""Draws the Jacobian of a softmax for a flat, a middling and a sharp row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _common import BLUE, SIGNED, matrix, pyplot, save, start

SCORE = torch.tensor([0.5, -0.5, 2.0, 1.0, -1.0, 0.0], dtype=torch.float64)
FACTORS = (0.25, 1.0, 4.0)


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    figure, axes = pyplot.subplots(2, 3, figsize=(7.4, 3.1), height_ratios=(1, 2.6), sharex=True)
    keys = [str(j) for j in range(len(SCORE))]
    print("factor  largest weight  trace  largest eigenvalue")
    for (bars, panel), factor in zip(axes.T, FACTORS, strict=True):
        weight = (factor * SCORE).softmax(-1)
        jacobian = torch.autograd.functional.jacobian(lambda score: score.softmax(-1), factor * SCORE)
        bars.bar(range(len(keys)), weight.tolist(), color=BLUE, width=0.7)
        bars.set_ylim(0, 1)
        bars.set_title(f"scores times {factor:g}")
        image = matrix(panel, jacobian.numpy(), keys, keys, cmap=SIGNED, vmin=-0.25, vmax=0.25)
        panel.set_xlabel("score j")
        print(f"{factor:6}  {weight.max():14.3f}  {jacobian.trace():5.3f}  {torch.linalg.eigvalsh(jacobian)[-1]:18.3f}")
    axes[0, 0].set_ylabel("weight")
    axes[1, 0].set_ylabel("weight i")
    figure.colorbar(image, ax=axes[1], label="∂ weight i / ∂ score j", ticks=[-0.25, 0, 0.25])
    save(figure, out / "softmax_jacobian.svg")


if __name__ == "__main__":
    main()
