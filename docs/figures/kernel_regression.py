"""Draws how far softmax attention is from Gaussian kernel regression when the norms of the keys vary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _common import BLACK, BLUE, GREEN, ORANGE, pyplot, save, start

import tiled_attention as ta

ROWS = 256
DIMS = (16, 64, 256)
SPREADS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def error(head_dim: int, spread: float) -> float:
    """Root mean square of the difference between the two, over that of softmax attention. Norms are sqrt(head_dim) (1 + spread z)."""
    generator = torch.Generator().manual_seed(head_dim)
    query, key, value = (torch.randn(4, ROWS, head_dim, generator=generator, dtype=torch.float64) for _ in range(3))
    stretch = 1 + spread * torch.randn(4, ROWS, 1, generator=generator, dtype=torch.float64)
    key = key / key.norm(dim=-1, keepdim=True) * head_dim**0.5 * stretch
    softmax, kernel = ta.attention(query, key, value), ta.gaussian_attention(query, key, value, head_dim**0.25)
    return ((softmax - kernel).norm() / softmax.norm()).item()


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    errors = {head_dim: [error(head_dim, spread) for spread in SPREADS] for head_dim in DIMS}

    figure, axes = pyplot.subplots(1, 2, figsize=(7.4, 3.1), sharey=True)
    for head_dim, color, marker in zip(DIMS, (ORANGE, GREEN, BLUE), "s^o", strict=True):
        style = {"color": color, "marker": marker, "markersize": 4, "label": f"d = {head_dim}"}
        axes[0].loglog(SPREADS, errors[head_dim], **style)
        axes[1].loglog([spread * head_dim**0.5 for spread in SPREADS], errors[head_dim], **style)
    axes[1].loglog([1e-3, 1], [1e-3, 1], ":", color=BLACK, linewidth=1, label="first order: ε√d")
    axes[1].axvline(0.5**0.5, color=BLACK, linewidth=0.7)
    axes[1].annotate("standard\nnormal keys", (0.5**0.5, 4e-3), xytext=(-4, 0), textcoords="offset points", ha="right")
    axes[0].set(xlabel="ε, relative spread of |k|", ylabel="relative difference of the outputs")
    axes[1].set(xlabel="ε√d, spread of |k|² / (2h²)")
    for panel in axes:
        panel.legend(loc="upper left")
    save(figure, out / "kernel_regression.svg")

    print("relative difference of the outputs, by the relative spread of |k|")
    print("spread  " + "  ".join(f"{spread:7}" for spread in SPREADS))
    for head_dim in DIMS:
        print(f"d {head_dim:4}  " + "  ".join(f"{value:7.3g}" for value in errors[head_dim]))


if __name__ == "__main__":
    main()
