"""Draws the error of FAVOR+ attention over the number of features, and the weights of one row by softmax, elu + 1 and FAVOR+."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _common import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, pyplot, save, start
from torch import Tensor

import tiled_attention as ta

HEADS, SEQLEN, HEAD_DIM, DRAWS = 2, 128, 32, 8
FEATURES = (32, 64, 128, 256, 512, 1024)
TOP = 0.15  # of the axis of the weights
NORMS = (0.5, 1.0, 2.0, 4.0)  # |query| |key| / sqrt(head_dim)


def directions(norm: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of equal length in random directions, normal values."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, HEADS, SEQLEN, HEAD_DIM, generator=generator) for _ in range(3))
    length = (norm * HEAD_DIM**0.5) ** 0.5
    return query / query.norm(dim=-1, keepdim=True) * length, key / key.norm(dim=-1, keepdim=True) * length, value


def error(norm: float, num_features: int) -> float:
    """|estimate - exact| / |exact| of the output, mean over draws of the features."""
    query, key, value = directions(norm)
    exact = ta.attention(query, key, value)
    errors = []
    for seed in range(DRAWS):
        features = ta.FavorFeatures(HEAD_DIM, num_features, seed=seed)
        estimate = ta.linear_attention(query, key, value, feature_map=features)
        errors.append(((estimate - exact).norm() / exact.norm()).item())
    return sum(errors) / DRAWS


def row_of_weights() -> tuple[Tensor, dict[str, Tensor]]:
    """The cosines between a query and 41 keys of its length, and the weights of the row, |q| |k| / sqrt(head_dim) = 2."""
    query = directions(2.0)[0][:, :1, :1]
    cosines = torch.linspace(1, -1, 41)[:, None]
    across = torch.randn(1, 1, len(cosines), HEAD_DIM, generator=torch.Generator().manual_seed(2))
    across = across - (across @ query.mT) / query.norm() ** 2 * query
    key = cosines * query + (1 - cosines**2).sqrt() * query.norm() * across / across.norm(dim=-1, keepdim=True)
    eye = torch.eye(len(cosines))[None, None]  # with unit vectors as values the output is the weights
    found = {"softmax": ta.attention(query, key, eye), "elu + 1": ta.linear_attention(query, key, eye, feature_map="elu")}
    for m in (64, 1024):
        found[f"FAVOR+, m = {m}"] = ta.linear_attention(query, key, eye, feature_map=ta.FavorFeatures(HEAD_DIM, m, seed=0))
    return cosines[:, 0], {name: weights[0, 0, 0] for name, weights in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    errors = {norm: [error(norm, m) for m in FEATURES] for norm in NORMS}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for (norm, found), color, marker in zip(errors.items(), (BLUE, GREEN, ORANGE, RED), "os^D"):
        left.plot(FEATURES, found, marker + "-", color=color, markersize=4, label=f"{norm:g}")
    guide = [errors[1.0][0] * (FEATURES[0] / m) ** 0.5 for m in FEATURES]
    left.plot(FEATURES, guide, ":", color=BLACK, linewidth=1, label="slope \u22121/2")
    left.set(xscale="log", yscale="log", xlabel="features m", ylabel="relative error of the output")
    left.set_xticks(FEATURES, [str(m) for m in FEATURES])
    left.set_yticks([0.03, 0.1, 0.3, 1, 2], ["3 %", "10 %", "30 %", "100 %", "200 %"])
    left.minorticks_off()
    left.legend(title="|q| |k| / \u221ad", ncols=2, fontsize=8)
    left.set_title("FAVOR+, positive features")
    cosines, weights = row_of_weights()
    for (name, row), color, line in zip(weights.items(), (BLACK, PURPLE, ORANGE, BLUE), ("-", "--", "-", "-")):
        right.plot(cosines, row, line, color=color, label=name, linewidth=2.2 if name == "softmax" else 1.2)
        for cosine, weight in zip(cosines.tolist(), row.tolist()):
            if weight > TOP:
                right.annotate(f"{weight:.2f}", (cosine, TOP), (-30, -10), textcoords="offset points", color=color, fontsize=8)
    right.set(xlabel="cosine of query and key", ylabel="weight", ylim=(0, TOP), xlim=(-1, 1.02))
    right.set_title("weights of a row of 41 keys, |q| |k| / \u221ad = 2")
    right.legend(fontsize=8)
    save(figure, out / "linear.svg")

    print("relative error of FAVOR+ attention, mean of 8 draws")
    print("|q||k|/sqrt(d)" + "".join(f"{'m=':>4}{m:<5}" for m in FEATURES) + " slope")
    for norm, found in errors.items():
        slope = torch.tensor([found[0], found[-1]]).log().diff().item() / torch.tensor([FEATURES[0], FEATURES[-1]]).log().diff().item()
        print(f"{norm:14.1f}" + "".join(f"{e:9.3f}" for e in found) + f"  {slope:.2f}")
    print("weight of the key at cosine 1: " + ", ".join(f"{name} {row[0].item():.3f}" for name, row in weights.items()))
    name = "FAVOR+, m = 64"
    at = int(weights[name].argmax())
    print(f"largest weight: {name} {weights[name][at].item():.3f}, where softmax has {weights['softmax'][at].item():.3f}")


if __name__ == "__main__":
    main()
