"""Draws how far a layer is from commuting with a permutation of its tokens, and with a shift of all positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from _common import BLUE, RED, pyplot, save, start
from torch import Tensor

import tiled_attention as ta

SEQLEN, EMBED_DIM, HEADS, SHIFT = 64, 32, 4, 100


def attend(x: Tensor, weights: Sequence[Tensor], shift: int, options: dict[str, Any]) -> Tensor:
    """Multi-head self-attention of x (seqlen, embed_dim) whose tokens stand at shift, shift + 1, ..: hidden tokens stand before them."""
    query, key, value = ((x @ weight).unflatten(-1, (HEADS, -1)).transpose(0, 1) for weight in weights)
    key, value = (torch.nn.functional.pad(tensor, (0, 0, shift, 0)) for tensor in (key, value))
    real = torch.arange(shift + SEQLEN) >= shift
    mask = real if options.get("mask") is None else options["mask"] & real
    return ta.attention(query, key, value, **{**options, "mask": mask}).transpose(0, 1).flatten(1)


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    torch.manual_seed(0)
    x = torch.randn(SEQLEN, EMBED_DIM, dtype=torch.float64)
    weights = [torch.randn(EMBED_DIM, EMBED_DIM, dtype=torch.float64) * EMBED_DIM**-0.5 for _ in range(3)]
    learned, relative = ta.LearnedEmbedding(SEQLEN + SHIFT, EMBED_DIM).double(), ta.RelativeBias(HEADS, max_distance=SEQLEN).double()
    torch.nn.init.normal_(learned.weight)
    torch.nn.init.normal_(relative.weight)
    kinds: dict[str, tuple[torch.nn.Module | None, dict[str, Any]]] = {
        "no positions": (None, {}),
        "sinusoidal": (ta.SinusoidalEmbedding(EMBED_DIM).double(), {}),
        "learned": (learned, {}),
        "rotary": (None, {"rotary": ta.RotaryEmbedding(EMBED_DIM // HEADS)}),
        "ALiBi": (None, {"alibi_slopes": ta.alibi_slopes(HEADS)}),
        "relative bias": (None, {"bias": relative}),
        "causal mask": (None, {"mask": ta.Causal()}),
        "window mask": (None, {"mask": ta.SlidingWindow(8, 8)}),
    }
    order = torch.randperm(SEQLEN)

    def layer(tokens: Tensor, embedding: torch.nn.Module | None, options: dict[str, Any], shift: int = 0) -> Tensor:
        added = 0.0 if embedding is None else embedding(torch.arange(shift, shift + SEQLEN))
        return attend(tokens + added, weights, shift, options).detach()

    print("kind           tokens permuted  positions shifted")
    rows = []
    for name, (embedding, options) in kinds.items():
        plain = layer(x, embedding, options)
        permuted = ((layer(x[order], embedding, options) - plain[order]).norm() / plain.norm()).item()
        shifted = ((layer(x, embedding, options, SHIFT) - plain).norm() / plain.norm()).item()
        rows.append((name, permuted, shifted))
        print(f"{name:13}  {permuted:15.3g}  {shifted:17.3g}")

    figure, axes = pyplot.subplots(figsize=(6.4, 2.9))
    least = 1e-17  # where 0 is drawn
    for index, label, color, marker in ((1, "tokens permuted", RED, "s"), (2, f"positions shifted by {SHIFT}", BLUE, "o")):
        axes.plot([max(row[index], least) for row in rows], range(len(rows)), marker, color=color, label=label)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=(least / 3, 10), xlabel="relative change of the output (float64)")
    axes.set_xticks([least] + [10.0**k for k in range(-16, 1, 4)], ["0", "1e-16", "1e-12", "1e-8", "1e-4", "1"])
    axes.minorticks_off()
    axes.grid(axis="y", linewidth=0.4)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    save(figure, out / "permutation.svg")


if __name__ == "__main__":
    main()
