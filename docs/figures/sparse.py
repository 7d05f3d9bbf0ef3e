"""Draws sparse patterns over 256 tokens, and counts the pairs and tiles that they show of 2048."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _common import pyplot, save, start
from torch import Tensor

import tiled_attention as ta
from tiled_attention.reference import lsh_pairs

DRAWN, COUNTED, TILE = 256, 2048, 64


def lsh(seqlen: int, bucket_size: int, num_hashes: int) -> Tensor:
    """The pairs that Reformer's hashes show of tokens around 16 centers."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(16, 32, generator=generator)
    nearest = torch.randint(16, (seqlen,), generator=generator)
    tokens = centers[nearest] + 0.3 * torch.randn(seqlen, 32, generator=generator)
    return lsh_pairs(tokens[None, None], num_hashes, bucket_size, False, 0)[0, 0]


def patterns(seqlen: int) -> dict[str, ta.Mask | Tensor]:
    """Each pattern at a size that leaves about the same number of keys to a query as the others, where its family can."""
    small = seqlen == DRAWN
    w, s = (16, 16) if small else (64, 64)
    some = tuple(range(4)) + tuple(range(seqlen // 2, seqlen // 2 + 4))
    return {
        "window": ta.SlidingWindow(w, w),
        "causal window, sinks": ta.Causal() & (ta.SlidingWindow(2 * w, 0) | ta.Sinks(4)),
        "strided, causal": ta.Causal() & (ta.Strided(s) | ta.SlidingWindow(s - 1, 0)),
        "dilated window": ta.Dilated(w, 4),
        "window, global tokens": ta.SlidingWindow(w, w) | ta.Global(some),
        "random blocks": ta.RandomBlocks(2, block_size=w),
        "window, global, random": ta.SlidingWindow(w, w) | ta.Global(some[:4]) | ta.RandomBlocks(2, block_size=w),
        "LSH, 2 rounds": lsh(seqlen, w, 2),
    }


def shares(mask: ta.Mask | Tensor, seqlen: int) -> tuple[float, float]:
    """(visible share of the pairs, share of the 64 x 64 tiles that show a pair)."""
    seen = mask if isinstance(mask, Tensor) else mask.dense(seqlen, seqlen)
    tiles = seen.view(seqlen // TILE, TILE, seqlen // TILE, TILE).any(3).any(1)
    return seen.double().mean().item(), tiles.double().mean().item()


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    figure, axes = pyplot.subplots(2, 4, figsize=(9, 4.9), sharex=True, sharey=True)
    for panel, (name, mask) in zip(axes.flat, patterns(DRAWN).items(), strict=True):
        ta.plot.mask(mask, DRAWN, DRAWN, axes=panel)
        panel.set(title=f"{name}\n{shares(mask, DRAWN)[0]:.1%} of the pairs", aspect="equal", xlabel="", ylabel="")
        panel.set_xticks(range(0, DRAWN + 1, TILE))
        panel.set_yticks(range(0, DRAWN + 1, TILE))
        panel.grid(color="#bbbbbb", linewidth=0.5)
        panel.spines[:].set_visible(True)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    save(figure, out / "sparse.png")

    print(f"of {COUNTED} x {COUNTED}          pairs   tiles")
    for name, mask in patterns(COUNTED).items():
        pairs, tiles = shares(mask, COUNTED)
        print(f"{name:24} {pairs:6.2%} {tiles:7.2%}")


if __name__ == "__main__":
    main()
