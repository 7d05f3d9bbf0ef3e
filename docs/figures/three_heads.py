"""Draws three heads that are built by hand: on nine tokens they look at the token before, at itself, and at the first one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from _common import matrix, pyplot, save, start

import tiled_attention as ta

WORDS = ["she", "poured", "tea", "into", "the", "cup", "and", "drank", "it"]
STRENGTH = 8.0  # score of the key that is meant; the others have 0


@torch.no_grad()
def build(n: int, strength: float) -> ta.MultiheadAttention:
    """Three heads of n features for tokens (position one-hot, word one-hot, n free features); they return three words one-hot."""
    layer = ta.MultiheadAttention(3 * n, 3, batch_first=True)
    for parameter in layer.parameters():
        parameter.zero_()
    assert layer.in_proj_weight is not None and layer.in_proj_bias is not None
    query, key, value = (part.unflatten(0, (3, n)) for part in layer.in_proj_weight.chunk(3))  # (head, n, 3 n)
    factor = strength * n**0.5  # the layer divides by the root of head_dim
    query[0, :, :n] = factor * torch.diag(torch.ones(n - 1), 1)  # at p, ask for p - 1; at 0 for nothing
    query[1, :, :n] = factor * torch.eye(n)
    layer.in_proj_bias[2 * n] = factor  # head 2 asks for 0, wherever it is
    key[:, :, :n] = torch.eye(n)
    value[:, :, n : 2 * n] = torch.eye(n)
    layer.out_proj.weight.copy_(torch.eye(3 * n))
    return layer


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    n = len(WORDS)
    x = torch.cat((torch.eye(n), torch.eye(n), torch.zeros(n, n)), -1)[None]
    result, weights = build(n, STRENGTH)(x, x, x, average_attn_weights=False, is_causal=True)
    assert weights is not None
    weights = weights[0].detach()  # (3, n, n)

    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3.3), sharey=True)
    titles = ("head 0: the token before", "head 1: itself", "head 2: the first token")
    for panel, head, title in zip(axes, weights, titles, strict=True):
        image = matrix(panel, np.ma.masked_array(head.numpy(), ~np.tri(n, dtype=bool)), WORDS, WORDS)
        panel.set_facecolor("#dddddd")
        panel.set_title(title)
    axes[0].set_ylabel("query")
    figure.colorbar(image, ax=axes, label="weight", shrink=0.85)
    save(figure, out / "three_heads.svg")

    print("head  before  itself  first   what the last token gets")
    for head, attended, words in zip(weights, result[0, -1].detach().view(3, n), ("before", "itself", "first"), strict=True):
        shares = head[1:].diagonal().mean(), head.diagonal()[1:].mean(), head[1:, 0].mean()
        print(
            f"{words:6}" + "  ".join(f"{share:6.3f}" for share in shares) + f"  {attended.max():.3f} of {WORDS[int(attended.argmax())]!r}"
        )


if __name__ == "__main__":
    main()
