"""Step 2, speed: the operator against SDPA and plain math, the module against nn.MultiheadAttention."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import tiled_attention as ta

from .machine import dtype_name, free_bytes, pinned
from .timing import alternate, attention_flops

NUM_HEADS, HEAD_DIM = 8, 64
VARIANTS = ("full", "causal", "bool mask", "float mask", "bias gradient", "dropout")
DIRECTIONS = ("forward", "forward+backward")
DROPOUT_P = 0.1
# n x n matrices of all heads alive at once in plain math, forward and backward: scores, weights, their gradients, one temporary.
MATH_MATRICES = 5

Advance = Callable[[str], None]
Calls = Mapping[str, Callable[[], torch.Tensor]]


def naive_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Attention as it is written on a blackboard, in the dtype of its inputs: matmul, softmax, matmul."""
    score = query @ key.mT * query.shape[-1] ** -0.5
    if bias is not None:
        score = score + bias
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    weight = F.dropout(score.softmax(-1), dropout_p) if dropout_p else score.softmax(-1)
    return weight @ value


def math_bytes(seqlen: int, num_heads: int, itemsize: int) -> int:
    """What plain math allocates for n x n matrices, forward and backward."""
    return MATH_MATRICES * num_heads * seqlen * seqlen * itemsize


def _extras(variant: str, n: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(bool mask, bias) of a variant."""
    if variant == "causal":
        return torch.ones(n, n, dtype=torch.bool).tril(), None
    if variant == "bool mask":
        mask = torch.rand(n, n) < 0.7
        mask[:, 0] = True
        return mask, None
    if variant == "float mask":
        return None, torch.randn(n, n).to(dtype)
    if variant == "bias gradient":
        return None, torch.randn(NUM_HEADS, n, n).to(dtype).requires_grad_()
    return None, None


def operator_calls(variant: str, n: int, dtype: torch.dtype) -> tuple[Calls, list[torch.Tensor]]:
    """Forward of each implementation on the same tensors, and those whose gradient is asked."""
    query, key, value = (torch.randn(1, NUM_HEADS, n, HEAD_DIM).to(dtype).requires_grad_() for _ in range(3))
    mask, bias = _extras(variant, n, dtype)
    dropout_p = DROPOUT_P if variant == "dropout" else 0.0
    causal = variant == "causal"
    ours = ta.Causal() if causal else mask
    stock = bias if mask is None or causal else mask
    leaves = [query, key, value] + ([bias] if bias is not None and bias.requires_grad else [])
    tiled: Any = ta.attention
    return {
        "tiled": lambda: tiled(query, key, value, mask=ours, bias=bias, dropout_p=dropout_p),
        "sdpa": lambda: F.scaled_dot_product_attention(query, key, value, stock, dropout_p, causal),
        "math": lambda: naive_attention(query, key, value, mask, bias, dropout_p),
    }, leaves


def module_calls(variant: str, n: int, dtype: torch.dtype, training: bool) -> tuple[Calls, list[torch.Tensor]]:
    """The same for the modules, embed_dim 512; dropout acts in training mode only, so that variant is always in it."""
    embed_dim, dropout = NUM_HEADS * HEAD_DIM, DROPOUT_P if variant == "dropout" else 0.0
    stock = torch.nn.MultiheadAttention(embed_dim, NUM_HEADS, dropout=dropout, batch_first=True, dtype=dtype)
    ours = ta.MultiheadAttention(embed_dim, NUM_HEADS, dropout=dropout, batch_first=True, dtype=dtype)
    ours.load_state_dict(stock.state_dict())
    for module in (stock, ours):
        module.train(training or dropout > 0)
    x = torch.randn(1, n, embed_dim).to(dtype).requires_grad_()
    mask, bias = _extras(variant, n, dtype)
    attn_mask = bias if mask is None else ~mask
    leaves = [x, *stock.parameters(), *ours.parameters()] + ([bias] if bias is not None and bias.requires_grad else [])

    def call(module: torch.nn.Module) -> torch.Tensor:
        return module(x, x, x, attn_mask=attn_mask, is_causal=variant == "causal", need_weights=False)[0]

    return {"tiled": lambda: call(ours), "multihead": lambda: call(stock)}, leaves


def directed(calls: Calls, leaves: list[torch.Tensor], direction: str) -> dict[str, Callable[[], None]]:
    """The calls without gradients, or with a backward after each."""

    def forward(call: Callable[[], torch.Tensor]) -> None:
        with torch.no_grad():
            call()

    def both(call: Callable[[], torch.Tensor]) -> None:
        out = call()
        torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)

    step = forward if direction == "forward" else both
    return {name: partial(step, call) for name, call in calls.items()}


def pairs(variant: str, n: int) -> float:
    """Visible pairs of all heads. A random bool mask counts in full, since it hides no whole tile."""
    return NUM_HEADS * (n * (n + 1) / 2 if variant == "causal" else n * n)


def run(
    plan: Sequence[tuple[torch.dtype, str, int]], threads: int, peaks: Mapping[str, float], seconds: float, slowest: float, advance: Advance
) -> list[dict[str, Any]]:
    """Rows for each (dtype, variant, length) of the plan, lengths increasing, forward and forward+backward.

    seconds: time for one comparison. Another implementation is left out of a length when its time at the one before says that a call takes
    more than `slowest` seconds, plain math also where its n x n matrices pass half the free memory; the row says so.
    """
    rows = []
    last: dict[tuple[str, str, str, str], tuple[int, float]] = {}
    with pinned(threads):
        for dtype, variant, n in plan:
            for direction in DIRECTIONS:
                training = direction != "forward"
                found: dict[str, dict[str, float]] = {}
                skipped: dict[str, str] = {}
                for kind in ("operator", "module"):
                    torch.manual_seed(0)
                    calls, leaves = operator_calls(variant, n, dtype) if kind == "operator" else module_calls(variant, n, dtype, training)
                    chosen = dict(directed(calls, leaves, direction))
                    for name in [name for name in chosen if name != "tiled"]:
                        length, before = last.get((dtype_name(dtype), variant, direction, name + kind), (n, 0.0))
                        too_large = name == "math" and math_bytes(n, NUM_HEADS, dtype.itemsize) > free_bytes() / 2
                        if too_large or before * (n / length) ** 2 > slowest:
                            skipped[name] = "over half the free memory" if too_large else f"more than {slowest:g} s a call"
                            del chosen[name]
                    found[kind] = alternate(chosen, seconds=seconds)
                    for name, value in found[kind].items():
                        last[dtype_name(dtype), variant, direction, name + kind] = (n, value)
                rows.append(_row(dtype, variant, n, direction, found, skipped, peaks))
                advance(f"{dtype_name(dtype)}, {variant}, n = {n}, {direction}")
    return rows


def _row(
    dtype: torch.dtype,
    variant: str,
    n: int,
    direction: str,
    found: Mapping[str, Mapping[str, float]],
    skipped: Mapping[str, str],
    peaks: Mapping[str, float],
) -> dict[str, Any]:
    operator, module = found["operator"], found["module"]
    flops = attention_flops(pairs(variant, n), HEAD_DIM, HEAD_DIM, backward=direction != "forward")
    ours = operator.get("tiled")

    def ratio(theirs: float | None, mine: float | None) -> float | None:
        return None if theirs is None or mine is None else theirs / mine

    return {
        "variant": variant,
        "dtype": dtype_name(dtype),
        "n": n,
        "direction": direction,
        "shape": [1, NUM_HEADS, n, HEAD_DIM],
        "seconds": dict(operator),
        "module_seconds": dict(module),
        "sdpa_ratio": ratio(operator.get("sdpa"), ours),
        "math_ratio": ratio(operator.get("math"), ours),
        "multihead_ratio": ratio(module.get("multihead"), module.get("tiled")),
        "share_of_peak": None if ours is None else flops / ours / (peaks[dtype_name(dtype)] * 1e9),
        "skipped": dict(skipped),
    }
