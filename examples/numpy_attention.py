"""Attention from scratch in NumPy: forward and backward, masks, several heads; compared with torch and with tiled_attention.

    python examples/numpy_attention.py

The lines between the two rules are the whole of attention; the rest of the file compares. NumPy in float64 is what is right, and each
float32 result is measured against it in units of its last place: the distance, divided by eps = 2^-23 times the largest element.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiled_attention as ta

Array = NDArray[Any]
Inputs = tuple[Array, Array, Array]  # query, key, value

# ---------------------------------------------------------------------------------------------------------------------------------------


def softmax(scores: Array) -> Array:
    """Along the last axis. The largest score is subtracted first, so that no exponential overflows; a row of -inf alone gives 0."""
    row_max = scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(scores - np.where(np.isneginf(row_max), scores.dtype.type(0), row_max))
    row_sum = exponentials.sum(axis=-1, keepdims=True)
    return exponentials / np.where(row_sum == 0, scores.dtype.type(1), row_sum)


def softmax_backward(grad_weights: Array, weights: Array) -> Array:
    """The Jacobian of a row, diag(w) - w w^T, times the gradient: w * (g - w . g)."""
    return weights * (grad_weights - (grad_weights * weights).sum(axis=-1, keepdims=True))


def attention(query: Array, key: Array, value: Array, visible: Array | None = None) -> tuple[Array, Array]:
    """softmax(query key^T / sqrt(head_dim)) value.

    Args:
        query: (..., seqlen_q, head_dim). key: (..., seqlen_kv, head_dim). value: (..., seqlen_kv, head_dim_v).
        visible: bool, broadcastable to (..., seqlen_q, seqlen_kv), True = attend. It acts on the scores, before the softmax: the weights
            of the keys that are left still sum to 1.

    Returns:
        out (..., seqlen_q, head_dim_v), weights (..., seqlen_q, seqlen_kv).
    """
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.dtype.type(query.shape[-1]))
    if visible is not None:
        scores = np.where(visible, scores, scores.dtype.type(-np.inf))
    weights = softmax(scores)
    return weights @ value, weights


def attention_backward(grad_out: Array, query: Array, key: Array, value: Array, weights: Array) -> tuple[Array, Array, Array]:
    """(grad_query, grad_key, grad_value). The mask is in the weights already: where they are 0, the score's gradient is 0."""
    grad_value = weights.swapaxes(-1, -2) @ grad_out
    grad_scores = softmax_backward(grad_out @ value.swapaxes(-1, -2), weights) / np.sqrt(query.dtype.type(query.shape[-1]))
    return grad_scores @ key, grad_scores.swapaxes(-1, -2) @ query, grad_value


def split_heads(x: Array, num_heads: int) -> Array:
    """(batch, seqlen, embed_dim) -> (batch, num_heads, seqlen, head_dim)."""
    batch, seqlen, embed_dim = x.shape
    return x.reshape(batch, seqlen, num_heads, embed_dim // num_heads).swapaxes(1, 2)


def merge_heads(x: Array) -> Array:
    """(batch, num_heads, seqlen, head_dim) -> (batch, seqlen, embed_dim)."""
    batch, num_heads, seqlen, head_dim = x.shape
    return x.swapaxes(1, 2).reshape(batch, seqlen, num_heads * head_dim)


def multi_head(x: Array, parameters: dict[str, Array], num_heads: int, visible: Array | None = None) -> tuple[Array, tuple[Array, ...]]:
    """Self-attention with several heads, with the parameters of nn.MultiheadAttention.

    Args:
        x: (batch, seqlen, embed_dim).
        parameters: in_proj_weight (3 embed_dim, embed_dim), in_proj_bias, out_proj.weight (embed_dim, embed_dim), out_proj.bias.

    Returns:
        out (batch, seqlen, embed_dim), and what backward needs.
    """
    projected = x @ parameters["in_proj_weight"].T + parameters["in_proj_bias"]
    query, key, value = (split_heads(part, num_heads) for part in np.split(projected, 3, axis=-1))
    heads, weights = attention(query, key, value, visible)
    merged = merge_heads(heads)
    return merged @ parameters["out_proj.weight"].T + parameters["out_proj.bias"], (query, key, value, weights, merged)


def multi_head_backward(grad_out: Array, x: Array, parameters: dict[str, Array], saved: tuple[Array, ...]) -> dict[str, Array]:
    """Gradients of x and of the parameters, by name."""
    query, key, value, weights, merged = saved
    grad_heads = split_heads(grad_out @ parameters["out_proj.weight"], query.shape[1])
    grads = attention_backward(grad_heads, query, key, value, weights)
    grad_projected = np.concatenate([merge_heads(grad) for grad in grads], axis=-1)
    return {
        "x": grad_projected @ parameters["in_proj_weight"],
        "in_proj_weight": np.einsum("bto,bti->oi", grad_projected, x),
        "in_proj_bias": grad_projected.sum(axis=(0, 1)),
        "out_proj.weight": np.einsum("bto,bti->oi", grad_out, merged),
        "out_proj.bias": grad_out.sum(axis=(0, 1)),
    }


# ---------------------------------------------------------------------------------------------------------------------------------------

# Results may be this many units of the largest element's last place away. A sum of n products rounds n times; the errors have both signs
# and mostly cancel, so that sqrt(n) units is the size to expect: 16 for rows of 256 keys.
ULPS = 16.0


@dataclass(frozen=True)
class Row:
    """Largest distance of one tensor from NumPy in float64, in units of the last place of its largest element."""

    case: str
    tensor: str
    numpy: float
    torch: float
    tiled: float
    tiled_float64: float  # the operator in float64, in units of float64

    @property
    def passed(self) -> bool:
        return max(self.numpy, self.torch, self.tiled, self.tiled_float64) <= ULPS


@dataclass(frozen=True)
class Outcome:
    rows: list[Row]
    slope_error: float  # backward against central differences of forward, relative, float64
    picture: Path | None

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows) and self.slope_error < 1e-8


def masks(seqlen: int) -> dict[str, tuple[Array | None, ta.Mask | None]]:
    """Which keys each query sees, as an array (seqlen, seqlen) and as the operator's mask."""
    i, j = np.arange(seqlen)[:, None], np.arange(seqlen)[None, :]
    length, left = max(1, seqlen * 2 // 3), max(1, seqlen // 8)
    return {
        "no mask": (None, None),
        "causal": (j <= i, ta.Causal()),
        "window": ((j <= i) & (j >= i - left), ta.SlidingWindow(left, 0)),
        "padding": (np.broadcast_to(j < length, (seqlen, seqlen)), ta.KeyLengths(torch.tensor([length]))),
    }


def units(result: Array, right: Array) -> float:
    """The largest distance, in units of the last place of the largest element."""
    return float(np.abs(result.astype(np.float64) - right).max() / (np.finfo(result.dtype).eps * np.abs(right).max()))


def through_torch(function: Any, inputs: Sequence[Array], grad_out: Array, dtype: torch.dtype) -> list[Array]:
    """The result of function(*inputs), and the gradients of the inputs."""
    tensors = [torch.from_numpy(x).to(dtype).requires_grad_() for x in inputs]
    out = function(*tensors)
    grads = torch.autograd.grad(out, tensors, torch.from_numpy(grad_out).to(dtype))
    return [x.detach().numpy() for x in (out, *grads)]


def compare_attention(case: str, inputs: Inputs, grad_out: Array, visible: Array | None, mask: ta.Mask | None) -> list[Row]:
    """inputs, grad_out: in float64, with values that float32 has."""

    def numpy(dtype: type[np.floating[Any]]) -> list[Array]:
        query, key, value = (x.astype(dtype) for x in inputs)
        out, weights = attention(query, key, value, visible)
        return [out, *attention_backward(grad_out.astype(dtype), query, key, value, weights)]

    def stock(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, None if visible is None else torch.from_numpy(visible.copy()))

    def tiled(*tensors: torch.Tensor) -> torch.Tensor:
        out: Any = ta.attention(*tensors, mask=mask)
        return out

    right = numpy(np.float64)
    results = [
        numpy(np.float32),
        through_torch(stock, inputs, grad_out, torch.float32),
        through_torch(tiled, inputs, grad_out, torch.float32),
        through_torch(tiled, inputs, grad_out, torch.float64),
    ]
    names = ("out", "grad_query", "grad_key", "grad_value")
    return [Row(case, name, *(units(result[k], right[k]) for result in results)) for k, name in enumerate(names)]


def compare_multi_head(case: str, x: Array, grad_out: Array, num_heads: int, visible: Array | None) -> list[Row]:
    """Against nn.MultiheadAttention and ta.MultiheadAttention with the same parameters. Their masks say True = ignore."""
    modules = [kind(x.shape[-1], num_heads, batch_first=True) for kind in (nn.MultiheadAttention, ta.MultiheadAttention)]
    for parameter in modules[0].parameters():
        nn.init.normal_(parameter, std=x.shape[-1] ** -0.5)
    modules[1].load_state_dict(modules[0].state_dict())
    names = [name for name, _ in modules[0].named_parameters()]

    def numpy(dtype: type[np.floating[Any]]) -> list[Array]:
        parameters = {name: tensor.numpy().astype(dtype) for name, tensor in modules[0].state_dict().items()}
        out, saved = multi_head(x.astype(dtype), parameters, num_heads, visible)
        grads = multi_head_backward(grad_out.astype(dtype), x.astype(dtype), parameters, saved)
        return [out, grads["x"], *(grads[name] for name in names)]

    def through(module: nn.Module, dtype: torch.dtype) -> list[Array]:
        module = module.to(dtype)
        ignore = None if visible is None else torch.from_numpy(~visible)
        leaf = torch.from_numpy(x).to(dtype).requires_grad_()
        out = module(leaf, leaf, leaf, attn_mask=ignore, need_weights=False)[0]
        grads = torch.autograd.grad(out, [leaf, *module.parameters()], torch.from_numpy(grad_out).to(dtype))
        return [tensor.detach().numpy() for tensor in (out, *grads)]

    right = numpy(np.float64)
    results = [numpy(np.float32), *(through(module, torch.float32) for module in modules), through(modules[1], torch.float64)]
    labels = ("out", *(f"grad_{name}" for name in ("x", *names)))
    return [Row(case, label, *(units(result[k], right[k]) for result in results)) for k, label in enumerate(labels)]


def slope_error(inputs: Inputs, grad_out: Array, visible: Array | None, rng: np.random.Generator) -> float:
    """Backward against (f(x + h d) - f(x - h d)) / 2h along random directions d, f = sum(grad_out * out), as a part of the largest slope.

    h = 1e-5: the difference is exact up to h^2, 1e-10, and rounding up to 1e-16 / h, 1e-11.
    """
    step = 1e-5

    def total(query: Array, key: Array, value: Array) -> float:
        return float((attention(query, key, value, visible)[0] * grad_out).sum())

    query, key, value = inputs
    grads = attention_backward(grad_out, query, key, value, attention(query, key, value, visible)[1])
    errors, slopes = [], []
    for k, grad in enumerate(grads):
        moves = [np.zeros_like(x) for x in inputs]
        moves[k] = rng.standard_normal(grad.shape)
        ends = [total(*(x + sign * step * move for x, move in zip(inputs, moves))) for sign in (1, -1)]
        slopes.append(float((grad * moves[k]).sum()))
        errors.append(abs((ends[0] - ends[1]) / (2 * step) - slopes[-1]))
    return max(errors) / max(map(abs, slopes))


def draw(inputs: Inputs, path: Path) -> None:
    """The weights of the first head under each mask, at most 24 tokens."""
    query, key, value = (x[0, 0, :24] for x in inputs)
    kinds = masks(len(query))
    seen = [np.ones((len(query), len(query)), dtype=bool) if visible is None else visible for visible, _ in kinds.values()]
    weights = np.stack([attention(query, key, value, visible)[1] for visible in seen])
    figure = Figure(figsize=(14, 3.6), layout="constrained")
    places = figure.subplots(1, len(seen), squeeze=False)
    ta.plot.heatmap(weights, mask=torch.from_numpy(np.stack(seen)), axes=places)
    for place, name in zip(places[0], kinds):
        place.set_title(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def run(
    *,
    batch: int = 2,
    num_heads: int = 4,
    seqlen: int = 256,
    head_dim: int = 64,
    seed: int = 0,
    out: Path | None = None,
    progress: bool = False,
) -> Outcome:
    """Compares all masks, one head function and module; draws the weights into the folder `out`, if there is one.

    Errors: ValueError naming a size that is not positive.
    """
    for name, size in (("batch", batch), ("num_heads", num_heads), ("seqlen", seqlen), ("head_dim", head_dim)):
        if size < 1:
            raise ValueError(f"{name}: expected an integer >= 1, got {size}")
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32).astype(np.float64)

    shape = (batch, num_heads, seqlen, head_dim)
    inputs = (normal(*shape), normal(*shape), normal(*shape))
    x = normal(batch, seqlen, num_heads * head_dim)
    rows: list[Row] = []
    slopes: list[float] = []
    for name, (visible, mask) in track(masks(seqlen).items(), "comparing", disable=not progress, transient=True):
        rows += compare_attention(name, inputs, normal(*shape), visible, mask)
        rows += compare_multi_head(f"{num_heads} heads, {name}", x, normal(*x.shape), num_heads, visible)
        slopes.append(slope_error(inputs, normal(*shape), visible, rng))
    picture = None
    if out is not None:
        picture = out / "numpy_attention.png"
        draw(inputs, picture)
    return Outcome(rows, max(slopes), picture)


def main(argv: Sequence[str] | None = None) -> Outcome:
    parser = argparse.ArgumentParser(description="Attention from scratch in NumPy, compared with torch and tiled_attention.")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("example-results"), help="folder for the picture (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        outcome = run(**vars(arguments), progress=True)
    except ValueError as error:
        parser.error(str(error))
    print("distance from NumPy in float64, in units of the last place of the largest element")
    table = Table()
    for heading in ("case", "tensor", "NumPy float32", "torch float32", "tiled float32", "tiled float64"):
        table.add_column(heading, justify="left" if heading in ("case", "tensor") else "right")
    for row in outcome.rows:
        table.add_row(row.case, row.tensor, *(f"{number:.2f}" for number in (row.numpy, row.torch, row.tiled, row.tiled_float64)))
    Console().print(table)
    worst = {name: max(getattr(row, name) for row in outcome.rows) for name in ("numpy", "torch", "tiled", "tiled_float64")}
    print("largest distance: " + ", ".join(f"{name} {number:.1f}" for name, number in worst.items()) + f" units; {ULPS:g} are allowed")
    print(f"backward against central differences of forward: {outcome.slope_error:.1e} of the largest slope")
    if outcome.picture is not None:
        print(f"picture: {outcome.picture}")
    if not outcome.passed:
        raise SystemExit(f"a result lies more than {ULPS:g} units away, or backward does not fit forward")
    return outcome


if __name__ == "__main__":
    main()
