"""Draws the error of central differences of attention over the step, in float64 and float32, beside that of the gradient itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _common import BLACK, BLUE, ORANGE, pyplot, save, start
from torch import Tensor

import tiled_attention as ta

SEQLEN, HEAD_DIM, DIRECTIONS = 16, 8, 64
STEPS = [10.0**-e for e in range(1, 13)]


def derivatives(dtype: torch.dtype) -> tuple[dict[float, float], float]:
    """Relative error (root mean square over directions) of central differences by step, and of backward, both against float64."""
    generator = torch.Generator().manual_seed(0)
    start, *ways = ([torch.randn(1, 2, SEQLEN, HEAD_DIM, generator=generator).double() for _ in range(4)] for _ in range(DIRECTIONS + 1))
    *inputs, grad_out = start

    def loss(tensors: Sequence[Tensor]) -> float:
        out = ta.attention(*(tensor.to(dtype) for tensor in tensors), mask=ta.Causal())
        return (out.double() * grad_out).sum().item()

    def slopes(kind: torch.dtype) -> Tensor:
        leaves = [tensor.to(kind).requires_grad_() for tensor in inputs]
        found = torch.autograd.grad((ta.attention(*leaves, mask=ta.Causal()).double() * grad_out).sum(), leaves)
        each = [[(grad.double() * way).sum() for grad, way in zip(found, directions)] for directions in ways]
        return torch.tensor(each, dtype=torch.float64).sum(1)

    exact = slopes(torch.float64)
    errors = {}
    for h in STEPS:
        found = []
        for directions in ways:
            ahead, behind = ([x + sign * h * way for x, way in zip(inputs, directions)] for sign in (1, -1))
            found.append((loss(ahead) - loss(behind)) / (2 * h))
        errors[h] = ((torch.tensor(found, dtype=torch.float64) - exact).norm() / exact.norm()).item()
    return errors, ((slopes(dtype) - exact).norm() / exact.norm()).item()


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    figure, axes = pyplot.subplots(figsize=(6.0, 3.4))
    for dtype, color, line in ((torch.float32, ORANGE, "s-"), (torch.float64, BLUE, "o-")):
        errors, backward = derivatives(dtype)
        name = str(dtype).removeprefix("torch.")
        axes.plot(STEPS, list(errors.values()), line, color=color, markersize=4, label=f"differences of {name}")
        if dtype == torch.float32:
            axes.axhline(backward, color=color, linestyle="--", linewidth=1, label="backward in float32")
        if dtype == torch.float32:
            print(f"float32: least error at the step {min(errors, key=errors.__getitem__):.0e}")
        else:
            print("float64, step  " + "".join(f"{h:10.0e}" for h in STEPS[:6]))
            print("error          " + "".join(f"{errors[h]:10.1e}" for h in STEPS[:6]))
            guide = [errors[0.01] * (h / 0.01) ** 2 for h in STEPS[:5]]
            axes.plot(STEPS[:5], guide, ":", color=BLACK, linewidth=1, label="h\u00b2")
    axes.set(xscale="log", yscale="log", xlabel="step h", ylabel="relative error of the derivative", ylim=(1e-12, 1e3))
    axes.invert_xaxis()
    axes.legend(fontsize=8)
    save(figure, out / "gradient_checks.svg")


if __name__ == "__main__":
    main()
