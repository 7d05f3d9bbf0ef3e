"""Draws what a causal mask after the softmax does, against one before it: who depends on whose key, and what rows sum to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from _common import BLUE, RED, matrix, pyplot, save, start
from matplotlib.colors import LogNorm
from torch import Tensor

import tiled_attention as ta

SEQLEN, HEAD_DIM = 24, 16


def before(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ta.attention(query, key, value, mask=ta.Causal())


def after(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    visible = ta.Causal().dense(query.shape[-2], key.shape[-2])
    return (ta.attention_weights(query, key) * visible) @ value


def sensitivity(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(seqlen, seqlen): the norm of the derivative of output i by key j."""
    jacobian = torch.autograd.functional.jacobian(lambda key: attend(query, key, value)[0], key)[:, :, 0]
    return jacobian.square().sum((1, 3)).sqrt()


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, SEQLEN, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(3))
    hidden = ~ta.Causal().dense(SEQLEN, SEQLEN)
    ones = torch.ones(1, SEQLEN, 1, dtype=torch.float64)

    figure, axes = pyplot.subplots(1, 3, figsize=(9, 2.9), width_ratios=(3, 3, 2.6))
    print("mask     largest derivative by a hidden key  by a visible key  rows sum to, from  to")
    for panel, (name, attend) in zip(axes, (("before", before), ("after", after)), strict=False):
        derivative = sensitivity(attend, query, key, value)
        sums = attend(query, key, ones)[0, :, 0]
        image = matrix(panel, np.ma.masked_equal(derivative.numpy(), 0), vmin=None, vmax=None, norm=LogNorm(1e-3, 1))
        panel.set_facecolor("#dddddd")
        panel.set(title=f"mask {name} the softmax", xlabel="key j", ylabel="out i")
        color, style = (BLUE, "o-") if attend is before else (RED, "s--")
        axes[2].plot(range(SEQLEN), sums, style, color=color, markersize=3, label=name)
        print(
            f"{name:7}  {derivative[hidden].max():34.3f}  {derivative[~hidden].max():16.3f}  {sums.min():17.3f}  {sums.max():.3f}",
        )
    figure.colorbar(image, ax=axes[:2], extend="max", label="|∂ out i / ∂ key j|")
    axes[2].set(title="sum of the weights of row i", xlabel="i", ylim=(0, 1.05))
    axes[2].legend(title="mask", loc="lower right")
    save(figure, out / "where_the_mask_goes.svg")


if __name__ == "__main__":
    main()
