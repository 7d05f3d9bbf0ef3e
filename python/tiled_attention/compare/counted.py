"""`ta.flops` and `ta.parameter_count` beside torch's flop counter and the layers themselves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import tiled_attention as ta

SHAPE = (2, 4, 48, 16)


def _counted(function: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[int, int]:
    """Forward and backward operations of a call, by torch's counter."""
    leaves = [tensor.requires_grad_() for tensor in tensors]
    with FlopCounterMode(display=False) as forward:
        out = function(*leaves)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    return forward.get_total_flops(), backward.get_total_flops()


def rows() -> list[dict[str, Any]]:
    """{what, formula, counted, torch (or null), passed}: the formula, torch's counter on our operator, and on PyTorch's own."""
    found: list[dict[str, Any]] = []

    def add(what: str, formula: int, counted: int | None, theirs: int | None) -> None:
        passed = counted in (None, formula) and theirs in (None, formula)
        found.append({"what": what, "formula": formula, "counted": counted, "torch": theirs, "passed": passed})

    weight = torch.randn(SHAPE[-1])
    stock: tuple[int | None, int | None] = sdpa_flop_count(SHAPE, SHAPE, SHAPE), sdpa_backward_flop_count(SHAPE, SHAPE, SHAPE, SHAPE)
    operators: dict[str, tuple[dict[str, Any], Callable[..., Tensor], tuple[int | None, int | None]]] = {
        "attention": ({}, ta.attention, stock),
        "additive_attention": (
            {"operator": "additive_attention"},
            lambda query, key, value: ta.additive_attention(query, key, value, weight),
            (None, None),
        ),
        "linear_attention, causal": (
            {"operator": "linear_attention", "causal": True},
            lambda query, key, value: ta.linear_attention(query, key, value, causal=True),
            (None, None),
        ),
    }
    for name, (options, function, theirs) in operators.items():
        formula = ta.flops(SHAPE, SHAPE, SHAPE, **options)
        counted = _counted(function, [torch.randn(SHAPE) for _ in range(3)])
        for direction in range(2):
            what = f"flops, {name}, {'backward' if direction else 'forward'}"
            add(what, formula[direction], counted[direction], theirs[direction])
    mask = ta.Causal() & (ta.SlidingWindow(7, 0) | ta.Sinks(2))
    pairs = SHAPE[0] * SHAPE[1] * int(mask.dense(SHAPE[2], SHAPE[2]).sum())
    add("flops, window with sinks, forward", ta.flops(SHAPE, SHAPE, SHAPE, mask=mask).forward, 4 * pairs * SHAPE[3], None)

    layers: dict[str, tuple[dict[str, Any], torch.nn.Module, torch.nn.Module | None]] = {
        "MultiheadAttention": ({"embed_dim": 64}, ta.MultiheadAttention(64, 4), torch.nn.MultiheadAttention(64, 4)),
        "LinearAttention": ({"embed_dim": 64}, ta.LinearAttention(64, 4), None),
        "AdditiveAttention": (dict(query_dim=12, key_dim=20, hidden_dim=16), ta.AdditiveAttention(12, 20, 16), None),
        "LuongAttention": (dict(query_dim=12, key_dim=20, score="concat"), ta.LuongAttention(12, 20, "concat"), None),
        "LearnedEmbedding": (dict(max_len=40, dim=8), ta.LearnedEmbedding(40, 8), torch.nn.Embedding(40, 8)),
        "RelativeBias": (dict(num_heads=4), ta.RelativeBias(4), torch.nn.Embedding(32, 4)),
    }
    for name, (sizes, ours, other) in layers.items():
        numbers = [None if layer is None else sum(p.numel() for p in layer.parameters()) for layer in (ours, other)]
        add(f"parameters, {name}", ta.parameter_count(name, **sizes), *numbers)
    return found
