"""Calls over a sequence that several ranks share, and the same calls on one process: what `compare --distributed` compares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tiled_attention as ta

from ..linear_testing import LinearCase
from ..testing import Case

Tensors = dict[str, Tensor]

BATCH, NUM_HEADS, HEAD_DIM = 2, 4, 32
SEQUENCE = 2  # dimension of every leaf and output


@dataclass(frozen=True)
class ShardedCase:
    """One call; the sequence is that of query, key and value."""

    name: str
    case: Case | LinearCase
    layout: str = "zigzag"  # which positions a rank holds; "contiguous": one piece of them
    method: str = "ring"  # of exact attention

    @property
    def linear(self) -> bool:
        """Linear attention rather than exact."""
        return isinstance(self.case, LinearCase)

    def tensors(self) -> tuple[Tensors, dict[str, Any], Tensors]:
        """The leaves (..., n, dim), the options, and the gradients that flow into the outputs by their name: the same on every rank."""
        generator = torch.Generator().manual_seed(self.case.seed + 1)
        inputs = self.case.inputs()
        given = inputs if isinstance(inputs, dict) else inputs.arguments()
        leaves: Tensors = {name: given.pop(name) for name in ("query", "key", "value", "log_decay") if name in given}
        query, value = leaves["query"], leaves["value"]
        shapes = {"out": (*query.shape[:-1], value.shape[-1])} | ({} if self.linear else {"lse": query.shape[:-1]})
        real = torch.float64 if query.dtype == torch.float64 else torch.float32
        grads = {name: torch.randn(shape, generator=generator).to(query.dtype if name == "out" else real) for name, shape in shapes.items()}
        return leaves, given, grads


def cases(n: int, num_ranks: int) -> list[ShardedCase]:
    """Calls over n positions."""
    exact = Case(batch=(BATCH,), num_heads=NUM_HEADS, seqlen_q=n, head_dim=HEAD_DIM)
    linear = LinearCase(batch=(BATCH,), num_heads=NUM_HEADS, seqlen_q=n, head_dim=HEAD_DIM)
    causal = exact.replace(mask="Causal()")
    left = max(1, n // (2 * num_ranks))
    found = {
        "everything": exact,
        "causal": causal,
        "window": exact.replace(mask=f"SlidingWindow({left}, {left // 2})"),
        "causal window": exact.replace(mask=f"Causal() & SlidingWindow({left}, 0)"),
        "grouped heads, causal": causal.replace(num_heads_kv=2),
        "value narrower, causal": causal.replace(head_dim_v=20),
        "dropout": exact.replace(dropout_p=0.1),
        "dropout, causal": causal.replace(dropout_p=0.25),
        "softcap, causal": causal.replace(softcap=5.0),
        "causal, bfloat16": causal.replace(dtype=torch.bfloat16),
    }
    rows = [ShardedCase(name, case) for name, case in found.items()]
    rows.append(ShardedCase("causal, one piece a rank", causal, layout="contiguous"))
    if NUM_HEADS % num_ranks == 0:
        rows.append(ShardedCase("causal, all-to-all", causal, method="all_to_all"))
        rows.append(ShardedCase("dropout, all-to-all", found["dropout"], method="all_to_all"))
    states = {
        "linear, causal": linear,
        "linear, everything": linear.replace(causal=False),
        "linear, decay per token": linear.replace(decay="token"),
        "linear, grouped heads": linear.replace(num_heads_kv=2),
    }
    return rows + [ShardedCase(name, case, layout="contiguous") for name, case in states.items()]


def _differentiated(function: Callable[..., Any], leaves: Tensors, options: dict[str, Any], grads: Tensors, seed: int) -> Tensors:
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    torch.manual_seed(seed)  # draws the dropout
    found = function(**leaves, **options)
    outputs = dict(zip(grads, found if isinstance(found, tuple) else (found,)))
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), list(grads.values()))
    return {name: tensor.detach() for name, tensor in outputs.items()} | {f"grad_{name}": grad for name, grad in zip(leaves, gradients)}


def alone(sharded: ShardedCase, dtype: torch.dtype | None = None) -> Tensors:
    """out, lse and the gradients, of one process; dtype: that the tensors are cast to first."""
    leaves, options, grads = sharded.tensors()
    if dtype is not None:
        leaves, grads = ({name: tensor.to(dtype) for name, tensor in given.items()} for given in (leaves, grads))
    function: Callable[..., Any] = ta.linear_attention if sharded.linear else ta.attention
    return _differentiated(function, leaves, options | ({} if sharded.linear else {"return_lse": True}), grads, sharded.case.seed)


def shared(sharded: ShardedCase) -> Tensors:
    """The part of these that this rank holds, and its `positions`."""
    leaves, options, grads = sharded.tensors()
    positions = ta.distributed.shard_sequence(torch.arange(leaves["query"].shape[SEQUENCE]), dim=0, layout=sharded.layout)

    def mine(given: Tensors) -> Tensors:
        return {name: tensor.index_select(SEQUENCE, positions) for name, tensor in given.items()}

    if sharded.linear:
        function: Callable[..., Any] = ta.distributed.linear_attention
    else:
        function = ta.distributed.ring_attention
        options |= {"return_lse": True, "layout": sharded.layout, "method": sharded.method}
    return _differentiated(function, mine(leaves), options, mine(grads), sharded.case.seed) | {"positions": positions}


def whole(parts: list[Tensors]) -> Tensors:
    """The results of all positions, from those of every rank."""
    positions = torch.cat([part["positions"] for part in parts])
    found = {}
    for name in parts[0]:
        if name != "positions":
            joined = torch.cat([part[name] for part in parts], SEQUENCE)
            found[name] = torch.empty_like(joined).index_copy_(SEQUENCE, positions, joined)
    return found
