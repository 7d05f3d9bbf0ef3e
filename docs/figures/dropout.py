"""Draws one number of the output of attention over 20,000 dropout masks: dropped weights, and dropped outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _common import BLACK, BLUE, ORANGE, RED, pyplot, save, start

import tiled_attention as ta

SEQLEN_KV, HEAD_DIM, MASKS, P = 64, 16, 20_000, 0.2


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 1, rows, HEAD_DIM, generator=generator) for rows in (1, SEQLEN_KV, SEQLEN_KV))
    value = 1 + 0.5 * value
    exact = ta.attention(query, key, value)[0, 0, 0]
    weights = ta.attention_weights(query, key)[0, 0, 0]

    # One batch item per mask: inputs of stride 0 are read where they lie.
    copies = [tensor.expand(MASKS, -1, -1, -1) for tensor in (query, key, value)]
    dropped_weights = ta.attention(*copies, dropout_p=P, generator=generator)[:, 0, 0]
    kept = torch.rand(MASKS, HEAD_DIM, generator=generator) >= P
    dropped_outputs = exact * kept / (1 - P)

    column = 0
    odds = P / (1 - P)
    predicted = {
        "the weights": odds * (weights.square() @ value[0, 0].square())[column].item(),
        "the output": odds * exact[column].square().item(),
    }
    found = {"the weights": dropped_weights[:, column], "the output": dropped_outputs[:, column]}

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 2.9), sharex=True)
    bins = torch.linspace(0, 1.6, 81).tolist()
    for panel, (name, numbers), color in zip(axes, found.items(), (BLUE, ORANGE)):
        panel.hist(numbers.tolist(), bins, weights=[1 / MASKS] * MASKS, color=color)
        panel.axvline(exact[column].item(), color=BLACK, linewidth=1, label="without dropout")
        panel.axvline(numbers.mean().item(), color=RED, linestyle="--", linewidth=1.5, label="mean over the masks")
        panel.set(title=f"dropout on {name}", xlabel="one number of the output", ylabel="share of the masks")
        panel.legend(fontsize=8, loc="upper left")
    save(figure, out / "dropout.svg")

    print(f"without dropout: {exact[column].item():.4f}")
    print("dropout on     mean  variance  by formula  share that is 0")
    for name, numbers in found.items():
        zeros = (numbers == 0).double().mean().item()
        print(f"{name:12} {numbers.mean().item():.4f} {numbers.var().item():9.5f} {predicted[name]:11.5f} {zeros:16.3f}")
    correlation = [torch.corrcoef(numbers.T)[0, 1].item() for numbers in (dropped_weights, dropped_outputs)]
    print(f"correlation of two numbers of one output: {correlation[0]:.2f} and {correlation[1]:.2f}")


if __name__ == "__main__":
    main()
