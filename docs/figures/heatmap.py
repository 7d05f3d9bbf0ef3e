"""Draws heads of a sentence model on one sentence: the picture of the README."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _common import save, start

import tiled_attention as ta
from tiled_attention.compare.models import sentence_model

TEXT = "The animal did not cross the street because it was too tired."
LAYERS, HEADS = (0, 1, 2), (1, 2, 4, 8)


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    tokenizer, model = sentence_model()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    tokens = tokenizer.convert_ids_to_tokens(ids[0])
    with torch.no_grad(), ta.record_attention(model) as recording:
        model(ids)
    weights = torch.stack([call.weights()[0] for call in recording])
    grid = ta.plot.heatmap(weights, tokens=tokens, layers=LAYERS, heads=HEADS, title=f"all-MiniLM-L6-v2: {TEXT}")
    figure = grid[0, 0].figure
    figure.set_size_inches(11, 7.6)
    save(figure, out / "heatmap.png")

    print(f"layer 0, head 2, mean weight of the previous token: {weights[0, 2].diagonal(-1).mean():.2f}")
    print(f"layer 1, head 8, mean weight of the next token: {weights[1, 8].diagonal(1).mean():.2f}")
    row = weights[2, 1, tokens.index("it")]
    print(f"layer 2, head 1: 'it' looks at {tokens[int(row.argmax())]!r} with {row.max():.2f}")


if __name__ == "__main__":
    main()
