"""Draws self-attention, causal self-attention and cross-attention over words that stand for one-hot concepts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from _common import matrix, pyplot, save, start

import tiled_attention as ta

ENGLISH = ["the", "white", "house", "is", "a", "white", "house"]
FRENCH = ["la", "maison", "blanche", "est", "une", "belle", "maison", "blanche"]
CONCEPTS = {"the": 0, "la": 0, "white": 1, "blanche": 1, "house": 2, "maison": 2, "is": 3, "est": 3, "a": 4, "une": 4, "belle": 5}


def embed(words: Sequence[str]) -> torch.Tensor:
    """(1, words, 6): equal for words of one concept, orthogonal otherwise."""
    return torch.eye(6)[[CONCEPTS[word] for word in words]][None]


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    english, french = embed(ENGLISH), embed(FRENCH)
    panels = (
        ("self: every token, every token", ta.attention_weights(english, english, scale=4.0), ENGLISH),
        ("causal: itself and what came before", ta.attention_weights(english, english, scale=4.0, mask=ta.Causal()), ENGLISH),
        ("cross: another sequence's keys", ta.attention_weights(english, french, scale=4.0), FRENCH),
    )
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3.2), width_ratios=(7, 7, 8))
    for panel, (title, weights, keys) in zip(axes, panels, strict=True):
        shown = np.ma.masked_equal(weights[0].numpy(), 0)  # hidden pairs have weight 0 exactly, others more
        image = matrix(panel, shown, ENGLISH if panel is axes[0] else [""] * len(ENGLISH), keys)
        panel.set_facecolor("#dddddd")
        panel.set_title(title)
    axes[0].set_ylabel("query")
    figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
    save(figure, out / "self_causal_cross.svg")

    print("weights of the first house")
    for title, weights, keys in panels:
        print(
            f"{title.split(':')[0]:7}" + "  ".join(f"{key} {weight:.3f}" for key, weight in zip(keys, weights[0, 2].tolist(), strict=True))
        )


if __name__ == "__main__":
    main()
