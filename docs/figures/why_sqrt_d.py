"""Draws what the factor 1 / sqrt(head_dim) does: variance of the scores, largest weight, gradient that passes the softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _common import BLACK, BLUE, RED, pyplot, save, start

import tiled_attention as ta

SEQLEN_KV, QUERIES = 64, 2000
DIMS = (4, 8, 16, 32, 64, 128, 256, 512)


def measure(head_dim: int, scale: float) -> tuple[float, float, float]:
    """(variance of the scores, mean of the largest weight, median over rows of the norm of the gradient by the scores)."""
    generator = torch.Generator().manual_seed(head_dim)
    query, key, grad_out = (torch.randn(1, rows, head_dim, generator=generator) for rows in (QUERIES, SEQLEN_KV, QUERIES))
    # Values are unit vectors, one per key, so that the gradient by weight j is component j of grad_out: the same at every head_dim.
    value, grad_out = torch.eye(SEQLEN_KV)[None], torch.randn(1, QUERIES, SEQLEN_KV, generator=generator)
    bias = torch.zeros(1, QUERIES, SEQLEN_KV, requires_grad=True)  # added to the scores: its gradient is theirs
    ta.attention(query, key, value, scale=scale, bias=bias).backward(grad_out)
    assert bias.grad is not None
    variance = ((query @ key.mT) * scale).var().item()
    largest = ta.attention_weights(query, key, scale=scale).amax(-1).mean().item()
    return variance, largest, bias.grad.norm(dim=-1).median().item()


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    plain = [measure(head_dim, 1.0) for head_dim in DIMS]
    scaled = [measure(head_dim, head_dim**-0.5) for head_dim in DIMS]

    figure, axes = pyplot.subplots(1, 3, figsize=(9, 2.9))
    titles = ("variance of the scores", f"largest of {SEQLEN_KV} weights", "median norm of the gradient by the scores")
    for index, (panel, title) in enumerate(zip(axes, titles, strict=True)):
        panel.plot(DIMS, [row[index] for row in plain], "s--", color=RED, label="q · k", markersize=4)
        panel.plot(DIMS, [row[index] for row in scaled], "o-", color=BLUE, label="q · k / √d", markersize=4)
        panel.set_xscale("log", base=2)
        panel.set_xticks(DIMS, [str(head_dim) for head_dim in DIMS])
        panel.set(title=title, xlabel="d (head_dim)")
    axes[0].plot(DIMS, DIMS, ":", color=BLACK, linewidth=1, label="d")
    axes[0].set_yscale("log", base=2)
    axes[1].axhline(1 / SEQLEN_KV, color=BLACK, linestyle=":", linewidth=1, label="equal weights")
    axes[1].set_ylim(0, 1)
    axes[2].set_ylim(0)
    for panel in axes:
        panel.legend()
    save(figure, out / "why_sqrt_d.svg")

    print("   d   variance        largest weight      gradient norm")
    print("       q.k   /sqrt(d)  q.k     /sqrt(d)    q.k     /sqrt(d)")
    for head_dim, one, other in zip(DIMS, plain, scaled, strict=True):
        print(f"{head_dim:4} {one[0]:6.1f} {other[0]:8.2f} {one[1]:8.3f} {other[1]:8.3f} {one[2]:10.3f} {other[2]:8.3f}")


if __name__ == "__main__":
    main()
