"""How operators take a mask: numbers and vectors for what intervals can say, block lists or a bool tensor for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import block_list
from .mask_checks import check_bool, check_boundaries, check_broadcasts, check_integers, number
from .mask_grid import make_grid
from .mask_rules import NO_INTERVALS, UNBOUNDED, Plan, make_plan
from .masks import Mask, Or, Sinks, SlidingWindow


class Lowered(NamedTuple):
    """A mask as operator arguments. Shared between calls: not to be changed in place."""

    intervals: list[int]  # [] or the 10 numbers that mask_rules.NO_INTERVALS names
    key_lengths: Tensor | None = None  # int64 (batch,) contiguous
    documents: Tensor | None = None  # int64 (num_documents + 1,) non-decreasing boundaries, contiguous
    query_offset: Tensor | None = None  # int64 (batch,) contiguous; replaces intervals[0]
    mask: Tensor | None = None  # bool, broadcastable to (..., num_heads, seqlen_q, seqlen_kv), what the rest does not say
    # What masks say beyond intervals, see block_list.Blocks; all three or none.
    block_rows: Tensor | None = None
    block_tiles: Tensor | None = None
    block_bits: Tensor | None = None


_EVERY_KEY = Plan([])
_EVERYTHING = Lowered([])


def lower(
    mask: Mask | Tensor | None,
    *,
    batch_shape: Sequence[int],
    num_heads: int,
    seqlen_q: int,
    seqlen_kv: int,
    query_offset: int | Tensor | None = None,
    device: torch.device | None = None,
    block_lists: bool = True,
) -> Lowered:
    """The operator arguments that mean `mask` for a query (*batch_shape, num_heads, seqlen_q, head_dim) on `device`.

    Numbers and vectors say as much as they can; what they cannot say becomes block lists, if the operator takes `block_lists`, or a dense
    bool tensor. Reads no values of tensors.

    Errors: TypeError or ValueError naming `mask`, `lengths`, `cu_seqlens` or `query_offset`.
    """
    if mask is None:
        if query_offset is None:
            return _EVERYTHING
        plan = _EVERY_KEY
    elif isinstance(mask, Mask):
        tracing = torch.compiler.is_compiling()  # then the fields are read, so that guards are about them
        if tracing or mask._cached is None:
            plan = make_plan(mask._rule())
            lowered = Lowered(plan.intervals) if plan.is_numbers() else None
            if not tracing:
                object.__setattr__(mask, "_cached", (plan, lowered))
        else:
            plan, lowered = mask._cached
        if lowered is not None and query_offset is None:
            return lowered
    elif isinstance(mask, Tensor):
        plan = Plan([], rest=(mask,))
    else:
        raise TypeError(f"mask: expected a mask, a bool tensor or None, got {type(mask).__name__}")

    intervals, offsets = plan.intervals, None
    if isinstance(query_offset, Tensor):
        offsets = _batch_vector("query_offset", query_offset, batch_shape, device)
    elif query_offset is not None:
        offset = number("query_offset", query_offset, -UNBOUNDED + 1)
        if offset >= UNBOUNDED:
            raise ValueError(f"query_offset: expected an integer below 2 ** 40, got {offset}")
        intervals = [offset, *(intervals or NO_INTERVALS)[1:]]

    lengths = None
    for entry in plan.lengths:
        vector = _batch_vector("KeyLengths: lengths", entry, batch_shape, device)
        lengths = vector if lengths is None else torch.minimum(lengths, vector)

    operands = plan.rest + tuple(Or(SlidingWindow(left, right), Sinks(n)) for left, right, n in plan.bands)
    blocks = None
    listed = tuple(operand for operand in operands if isinstance(operand, Mask))
    if block_lists and listed and block_list.serves(listed, seqlen_q, seqlen_kv, query_offset, device):
        scores = (*batch_shape, num_heads, seqlen_q, seqlen_kv)
        blocks = block_list.of(mask, listed, scores, query_offset, device)
        if blocks is not None:
            operands = tuple(operand for operand in operands if isinstance(operand, Tensor))

    visible, grid = None, None
    for operand in operands:
        if isinstance(operand, Tensor):
            check_bool(operand, device)
            part = operand
        else:
            grid = grid or make_grid(seqlen_q, seqlen_kv, query_offset, device, batch_shape)
            part = operand._visible(grid)
        visible = part if visible is None else visible & part
    if visible is not None:
        check_broadcasts("mask", visible, (*batch_shape, num_heads, seqlen_q, seqlen_kv))
    return Lowered(intervals, lengths, _merge_documents(plan, seqlen_kv, device), offsets, visible, *(blocks or ()))


def _merge_documents(plan: Plan, seqlen_kv: int, device: torch.device | None) -> Tensor | None:
    """Boundaries of the intersection of all documents and chunks, (num_documents + 1,); some of these documents may be empty."""
    parts = []
    for boundaries in plan.documents:
        check_boundaries(boundaries, device)
        parts.append(boundaries.long().contiguous())
    for size in plan.spans:
        parts.append(torch.arange(0, seqlen_kv + size, size, dtype=torch.int64, device=device))
    if len(parts) < 2:
        return parts[0] if parts else None
    end = torch.stack([part[-1] for part in parts]).amin()
    return torch.cat(parts).clamp(max=end).sort().values


def _batch_vector(name: str, vector: Tensor, batch_shape: Sequence[int], device: torch.device | None) -> Tensor:
    check_integers(name, vector, device)
    check_broadcasts(name, vector, batch_shape)
    return vector.long().expand(tuple(batch_shape)).reshape(-1).contiguous()
