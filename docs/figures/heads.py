"""Draws where the operations of a transformer layer go, and the memory of its attention, over the length of the sequence."""

from __future__ import annotations

from collections.abc import Sequence

from _common import BLACK, BLUE, GREEN, ORANGE, SKY, pyplot, save, start

import tiled_attention as ta

EMBED_DIM, HEADS = 768, 12
LENGTHS = tuple(2**k for k in range(7, 17))


def layer(seqlen: int) -> tuple[int, int, int]:
    """Forward operations of one layer: (pairs, projections of the attention, feed-forward with 4 embed_dim hidden features)."""
    head = (1, HEADS, seqlen, EMBED_DIM // HEADS)
    return ta.flops(head, head, head).forward, 8 * seqlen * EMBED_DIM**2, 16 * seqlen * EMBED_DIM**2


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.1))

    shares = [[part / sum(layer(seqlen)) for part in layer(seqlen)] for seqlen in LENGTHS]
    left.stackplot(LENGTHS, *zip(*shares, strict=True), colors=(BLUE, SKY, ORANGE))
    left.text(2**13.9, 0.3, "pairs\n4 n² d", color="white", ha="center")
    left.text(2**8.7, 0.17, "projections\n8 n d²", ha="center")
    left.text(2**9, 0.7, "feed-forward\n16 n d²", ha="center")
    for length, text in ((2 * EMBED_DIM, "n = 2d"), (6 * EMBED_DIM, "n = 6d")):
        left.axvline(length, color=BLACK, linewidth=0.8, linestyle=":")
        left.annotate(text, (length, 1.01), ha="center", va="bottom", annotation_clip=False)
    left.set(xlim=(LENGTHS[0], LENGTHS[-1]), ylim=(0, 1), xlabel="n (seqlen)", ylabel="share of the operations")

    for heads, color, marker in ((1, GREEN, "^"), (HEADS, ORANGE, "s")):
        sizes = [(1, heads, seqlen, EMBED_DIM // heads) for seqlen in LENGTHS]
        dense = [ta.memory(size, size, size).dense / 2**20 for size in sizes]
        right.plot(LENGTHS, dense, color=color, marker=marker, markersize=4, label=f"weights as a matrix, {heads} head{'s' * (heads > 1)}")
    memories = [ta.memory(size, size, size) for size in ((1, HEADS, seqlen, EMBED_DIM // HEADS) for seqlen in LENGTHS)]
    own = [(memory.inputs + memory.outputs) / 2**20 for memory in memories]
    right.plot(LENGTHS, own, color=BLUE, marker="o", markersize=4, label="query, key, value, out, lse")
    right.set(yscale="log", xlabel="n (seqlen)", ylabel="MiB, float32")
    right.legend(loc="upper left")
    for panel in (left, right):
        panel.set_xscale("log", base=2)
    save(figure, out / "heads.svg")

    print("   n   share of pairs  weights, 12 heads, MiB  inputs and outputs, MiB")
    for seqlen, share, memory, size in zip(LENGTHS, shares, memories, own, strict=True):
        print(f"{seqlen:6}  {share[0]:12.3f}  {memory.dense / 2**20:22.1f}  {size:23.1f}")


if __name__ == "__main__":
    main()
