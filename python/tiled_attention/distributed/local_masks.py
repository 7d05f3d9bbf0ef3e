"""What a mask of the whole sequence means to some of its queries and some of its keys.

A block is the queries [row_begin, row_end) and the keys [key_begin, key_end) of the whole. Inside it, query and key count from 0, and the
query offset is the whole's plus row_begin - key_begin: windows, strides and ALiBi mean the same there. What counts positions is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mask_checks import check_bool
from ..mask_grid import Bounds, Grid
from ..mask_rules import UNBOUNDED, Rule, make_plan
from ..masks import And, Causal, Chunked, Documents, KeyLengths, Mask, Or, PrefixLM, Sinks, SlidingWindow, register_mask
from ..sparse_masks import Dilated, Strided


class Block(NamedTuple):
    row_begin: int
    row_end: int
    key_begin: int
    key_end: int
    row_at: int  # where the rows stand among those of the rank
    seqlen_q: int  # of the whole
    seqlen_kv: int
    query_offset: int | None  # of the whole; None: one per batch item

    def is_before_keys(self) -> bool:
        """Whether some query may stand before the first key."""
        return self.query_offset is None or self.row_begin + self.query_offset < self.key_begin


@dataclass(frozen=True)
class Moved(Mask):
    """`mask` of the whole, at the queries and keys of a block. `united`: it is part of a union."""

    mask: Mask
    block: Block
    united: bool = False

    def _visible(self, grid: Grid) -> Tensor:
        block = self.block
        return self.mask._visible(
            grid._replace(
                rows=grid.rows + block.row_begin,
                positions=grid.positions + block.key_begin,
                keys=grid.keys + block.key_begin,
                lengths=(block.seqlen_q, block.seqlen_kv),
            )
        )

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        block = self.block

        def moved(pair: tuple[Tensor, Tensor], by: int) -> tuple[Tensor, Tensor]:
            return pair[0] + by, pair[1] + by

        lengths = (block.seqlen_q, block.seqlen_kv)
        places = (moved(at.rows, block.row_begin), moved(at.positions, block.key_begin), moved(at.keys, block.key_begin))
        some, every = self.mask._bounds(Bounds(*places, lengths))
        return some, every

    def _rule(self) -> Rule:
        block = self.block
        if isinstance(self.mask, Causal) and block.query_offset is not None:  # top left: j <= i, and p = i + query_offset
            right = -block.query_offset
            if -UNBOUNDED < right < UNBOUNDED and not (self.united and right < 0):  # unions take windows around p
                return Rule(limit=(UNBOUNDED, right))
        # Boundaries below the first key are taken as 0: right where no query stands there.
        if isinstance(self.mask, Chunked) and not block.is_before_keys():
            first, size = block.key_begin // self.mask.size, self.mask.size
            last = -(-max(block.key_end, block.row_end + (block.query_offset or 0)) // size)
            if last - first < 1 << 20:
                boundaries = torch.arange(first, last + 1, dtype=torch.int64).mul_(size).sub_(block.key_begin).clamp_(min=0)
                return Rule(documents=(boundaries,))
        if isinstance(self.mask, Documents) and not block.is_before_keys():
            return Rule(documents=((self.mask.cu_seqlens.long() - block.key_begin).clamp(min=0),))
        return Rule(rest=(self,))


register_mask(Moved, ("mask",))


def localize(mask: Mask | Tensor | None, block: Block, device: torch.device, united: bool = False) -> Any:
    """The mask of a block. Bool tensors hold the rows of the rank, or one that stands for all, and all keys of the whole."""
    if mask is None or isinstance(mask, (SlidingWindow, Strided, Dilated)):
        return mask
    if isinstance(mask, Tensor):
        check_bool(mask, device)
        return block_of(mask, block)
    if isinstance(mask, (And, Or)):
        united = united or isinstance(mask, Or)
        return type(mask)(localize(mask.left, block, device, united), localize(mask.right, block, device, united))
    if isinstance(mask, PrefixLM):
        return PrefixLM(max(0, mask.prefix - block.key_begin))
    if isinstance(mask, Sinks):
        return Sinks(max(0, mask.n - block.key_begin))
    if isinstance(mask, KeyLengths):
        return KeyLengths((mask.lengths.long() - block.key_begin).clamp(min=0))
    if isinstance(mask, Causal):
        return Moved(mask, block, united) if mask.align == "top_left" else mask
    if isinstance(mask, Chunked):
        return mask if block.key_begin % mask.size == 0 else _on_device(Moved(mask, block), device)
    return Moved(mask, block)


def _on_device(mask: Moved, device: torch.device) -> Mask:
    """Chunks as documents whose boundaries lie on the device."""
    documents = mask._rule().documents
    return _Listed(documents[0].to(device)) if documents else mask


class _Listed(Documents):
    """Documents by boundaries that were checked."""

    def __post_init__(self) -> None:
        pass


register_mask(_Listed, ("cu_seqlens",))


def block_of(tensor: Tensor, block: Block) -> Tensor:
    """Of a tensor (..., rows of the rank or 1, keys of the whole or 1), the part that the block reads. A view."""
    if tensor.dim() > 0 and tensor.shape[-1] != 1:
        tensor = tensor.narrow(-1, block.key_begin, block.key_end - block.key_begin)
    if tensor.dim() > 1 and tensor.shape[-2] != 1:
        tensor = tensor.narrow(-2, block.row_at, block.row_end - block.row_begin)
    return tensor


def band_of(tensor: Tensor, block: Block) -> Tensor:
    """Of a bias by distance (..., 1, seqlen_q + seqlen_kv - 1) of the whole, the part that the block reads, of the same kind."""
    rows, keys = block.row_end - block.row_begin, block.key_end - block.key_begin
    return tensor.narrow(-1, block.key_begin - block.row_begin + block.seqlen_q - rows, rows + keys - 1)


class Sight(NamedTuple):
    """What can be said about a mask of the whole in numbers: a block that does not pass is empty."""

    intervals: tuple[int, ...]  # as in Arguments
    query_offset: int | None  # None: not known
    documents: tuple[tuple[int, ...], ...] = ()  # boundaries

    def sees(self, row_begin: int, row_end: int, key_begin: int, key_end: int) -> bool:
        """False where no query of the rows sees any of the keys."""
        if row_begin >= row_end or key_begin >= key_end:
            return False
        if not self.intervals and not self.documents:
            return True
        left = right = limit_left = limit_right = UNBOUNDED
        prefix, chunk, end, num_sinks, top_left = -1, 0, UNBOUNDED, 0, 0
        if self.intervals:
            _, left, right, limit_left, limit_right, prefix, chunk, end, num_sinks, top_left = self.intervals
        last_key = min(key_end, end) - 1
        if last_key < key_begin or (top_left and key_begin > row_end - 1):
            return False
        if self.query_offset is None:
            return True
        first, last = row_begin + self.query_offset, row_end - 1 + self.query_offset  # positions
        if last_key < first - limit_left or key_begin > last + limit_right:
            return False
        if (last_key < first - left or key_begin > last + right) and key_begin >= num_sinks:
            return False
        if prefix >= 0 and key_begin >= prefix and key_begin > last:
            return False
        if chunk and (last < 0 or key_begin // chunk > last // chunk or last_key // chunk < max(first, 0) // chunk):
            return False
        return all(_meet(boundaries, first, last, key_begin, last_key) for boundaries in self.documents)


def _meet(boundaries: Sequence[int], first: int, last: int, key_begin: int, last_key: int) -> bool:
    """Whether a document has positions in both ranges, ends included."""
    for begin, end in pairwise(boundaries):
        if begin > last or begin > last_key:
            return False
        if end > first and end > key_begin and begin < end:
            return True
    return False


def sight_of(mask: Any, query_offset: int | None) -> Sight:
    """Of a mask of the whole. Tensors on CUDA are not read."""
    if not isinstance(mask, Mask):
        return Sight((), query_offset)
    plan = make_plan(mask._rule())
    documents = tuple(tuple(boundaries.tolist()) for boundaries in plan.documents if boundaries.device.type == "cpu")
    return Sight(tuple(plan.intervals), query_offset, documents)


def text_of(mask: Any) -> str:
    """What all ranks must agree on. Bool tensors differ between ranks; only their ranks must be equal. Vectors on the CPU are read."""
    if mask is None:
        return "None"
    if isinstance(mask, Tensor):
        return f"bool tensor of {mask.dim()} dimensions" if mask.dtype == torch.bool else str(mask.dtype)
    if isinstance(mask, (And, Or)):
        return f"({text_of(mask.left)} {'&' if isinstance(mask, And) else '|'} {text_of(mask.right)})"
    if isinstance(mask, Mask):
        values = ((field.name, getattr(mask, field.name)) for field in fields(mask))  # type: ignore[arg-type]
        return f"{type(mask).__name__}({', '.join(f'{name}={_value(value)}' for name, value in values)})"
    return type(mask).__name__


def _value(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    if value.device.type != "cpu":
        return f"tensor of {tuple(value.shape)}"
    return str(value.tolist())
