"""Heads of a sentence model on one sentence: the picture of the README.

    python docs/figures/heatmap.py [--out docs/pictures/heatmap.png]

Prints where the words of the picture look.
"""

import argparse
from pathlib import Path

import matplotlib
import torch

import tiled_attention as ta
from tiled_attention.compare.models import sentence_model

TEXT = "The animal did not cross the street because it was too tired."
LAYERS, HEADS = (0, 1, 2), (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "pictures/heatmap.png")
    arguments = parser.parse_args()
    matplotlib.use("Agg")
    tokenizer, model = sentence_model()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    tokens = tokenizer.convert_ids_to_tokens(ids[0])
    with torch.no_grad(), ta.record_attention(model) as recording:
        model(ids)
    weights = torch.stack([call.weights()[0] for call in recording])
    grid = ta.plot.heatmap(weights, tokens=tokens, layers=LAYERS, heads=HEADS, title=f"all-MiniLM-L6-v2: {TEXT}")
    figure = grid[0, 0].figure
    figure.set_size_inches(11, 7.6)
    figure.savefig(arguments.out, dpi=100)
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")
    query = tokens.index("it")
    for layer in LAYERS:
        for head in HEADS:
            row = weights[layer, head, query]
            key = int(row.argmax())
            neighbours = [float(weights[layer, head].diagonal(shift).mean()) for shift in (-1, 0, 1)]
            means = ", ".join(f"{mean:.2f}" for mean in neighbours)
            print(f"layer {layer}, head {head}: 'it' looks at {tokens[key]!r} with {row[key]:.2f}; previous, own, next token: {means}")


if __name__ == "__main__":
    main()
