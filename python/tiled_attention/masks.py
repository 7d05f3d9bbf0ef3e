"""Masks are values: which keys each query sees, what that means (`dense`), and how operators take it (`lower`).

Query row i stands at position p = i + seqlen_kv - seqlen_q (bottom-right aligned), or at i + query_offset where an offset is given.
Every mask names the keys j that p sees. None implies causality; combine with `&` and `|`, also with a bool tensor (True = attend).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from .mask_checks import check_bool, check_boundaries, check_broadcasts, check_integers, check_number, is_readable, number
from .mask_rules import NO_INTERVALS, UNBOUNDED, Plan, Rule, intersect, make_plan, unite


class _Grid(NamedTuple):
    """Where masks are evaluated. Everything broadcasts to (..., seqlen_q, seqlen_kv)."""

    rows: Tensor  # (seqlen_q, 1) query indices
    positions: Tensor  # (seqlen_q, 1), or (batch..., 1, seqlen_q, 1) with one offset per item
    keys: Tensor  # (seqlen_kv,)
    batch_shape: Sequence[int] | None  # leading dimensions that vectors must broadcast to, None: any


class Lowered(NamedTuple):
    """A mask as operator arguments. Shared between calls: not to be changed in place."""

    intervals: list[int]  # [] or the 10 numbers that mask_rules.NO_INTERVALS names
    key_lengths: Tensor | None = None  # int64 (batch,) contiguous
    documents: Tensor | None = None  # int64 (num_documents + 1,) non-decreasing boundaries, contiguous
    query_offset: Tensor | None = None  # int64 (batch,) contiguous; replaces intervals[0]
    mask: Tensor | None = None  # bool, broadcastable to (..., num_heads, seqlen_q, seqlen_kv), what the rest does not say


class Mask:
    """Base of all masks. Immutable, hashable, picklable, a pytree node whose leaves are its tensors.

    `a & b` sees what both see, `a | b` what either sees; one side may be a bool tensor that broadcasts to (..., seqlen_q, seqlen_kv).
    """

    _cached: ClassVar[tuple[Plan, Lowered | None] | None] = None  # Lowered where the mask is numbers alone

    def dense(
        self, seqlen_q: int, seqlen_kv: int, *, query_offset: int | Tensor | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """The definition: a bool tensor, True where query i sees key j.

        Args:
            seqlen_q, seqlen_kv: numbers of queries and keys.
            query_offset: an integer, or an integer tensor (batch...) with one per item; None: seqlen_kv - seqlen_q.
            device: of the result; None: that of the tensors.

        Returns:
            (seqlen_q, seqlen_kv), or (batch..., 1, seqlen_q, seqlen_kv) where the mask or the offset differs between batch items.
        """
        grid = _make_grid(seqlen_q, seqlen_kv, query_offset, device if device is not None else _device_of(self), None)
        visible = self._visible(grid)
        shape = torch.broadcast_shapes(visible.shape, (*grid.positions.shape[:-1], seqlen_kv))
        return visible.expand(shape).contiguous()

    def _visible(self, grid: _Grid) -> Tensor:
        """bool, broadcastable to (..., seqlen_q, seqlen_kv)."""
        raise NotImplementedError

    def _rule(self) -> Rule:
        raise NotImplementedError

    def __and__(self, other: Mask | Tensor) -> And:
        return And(self, other) if isinstance(other, (Mask, Tensor)) else NotImplemented

    def __rand__(self, other: Mask | Tensor) -> And:
        return And(other, self) if isinstance(other, (Mask, Tensor)) else NotImplemented

    def __or__(self, other: Mask | Tensor) -> Or:
        return Or(self, other) if isinstance(other, (Mask, Tensor)) else NotImplemented

    def __ror__(self, other: Mask | Tensor) -> Or:
        return Or(other, self) if isinstance(other, (Mask, Tensor)) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Causal(Mask):
    """j <= p. `align="top_left"`: j <= i, whatever the lengths and the query offset (as `is_causal` in torch)."""

    align: str = "bottom_right"

    def __post_init__(self) -> None:
        if self.align not in ("bottom_right", "top_left"):
            raise ValueError(f"Causal: align: expected 'bottom_right' or 'top_left', got {self.align!r}")

    def _visible(self, grid: _Grid) -> Tensor:
        return grid.keys <= (grid.rows if self.align == "top_left" else grid.positions)

    def _rule(self) -> Rule:
        return Rule(top_left=True) if self.align == "top_left" else Rule(limit=(UNBOUNDED, 0))


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """p - left <= j <= p + right, both inclusive: `left + 1 + right` keys. `SlidingWindow(w - 1, 0)` is a causal window of w keys."""

    left: int
    right: int

    def __post_init__(self) -> None:
        check_number(self, "left", 0)
        check_number(self, "right", 0)

    def _visible(self, grid: _Grid) -> Tensor:
        return (grid.keys >= grid.positions - self.left) & (grid.keys <= grid.positions + self.right)

    def _rule(self) -> Rule:
        return Rule(limit=(_bounded(self.left), _bounded(self.right)))


@dataclass(frozen=True)
class PrefixLM(Mask):
    """j < prefix or j <= p: the first `prefix` keys are seen by all, the others causally."""

    prefix: int

    def __post_init__(self) -> None:
        check_number(self, "prefix", 0)

    def _visible(self, grid: _Grid) -> Tensor:
        return (grid.keys < self.prefix) | (grid.keys <= grid.positions)

    def _rule(self) -> Rule:
        return Rule(bands=((UNBOUNDED, 0, _bounded(self.prefix)),))


@dataclass(frozen=True)
class Chunked(Mask):
    """p // size == j // size: attention inside chunks of `size` positions. A position before 0 stands in no chunk."""

    size: int

    def __post_init__(self) -> None:
        check_number(self, "size", 1)

    def _visible(self, grid: _Grid) -> Tensor:
        return grid.positions // self.size == grid.keys // self.size

    def _rule(self) -> Rule:
        return Rule(chunks=(_bounded(self.size),))


@dataclass(frozen=True)
class Sinks(Mask):
    """j < n: the first n keys. `Causal() & (SlidingWindow(w, 0) | Sinks(n))` is streaming attention (Xiao et al., 2024)."""

    n: int

    def __post_init__(self) -> None:
        check_number(self, "n", 0)

    def _visible(self, grid: _Grid) -> Tensor:
        return grid.keys < self.n

    def _rule(self) -> Rule:
        return Rule(key_end=_bounded(self.n))


@dataclass(frozen=True, eq=False)
class KeyLengths(Mask):
    """j < lengths[b]: keys beyond the length of their batch item are padding.

    Args:
        lengths: integer tensor that broadcasts to the leading dimensions (batch...) of query. Compared by identity.
    """

    lengths: Tensor

    def __post_init__(self) -> None:
        check_integers("KeyLengths: lengths", self.lengths)

    def _visible(self, grid: _Grid) -> Tensor:
        check_integers("KeyLengths: lengths", self.lengths, grid.keys.device)
        if grid.batch_shape is not None:
            check_broadcasts("KeyLengths: lengths", self.lengths, grid.batch_shape)
        return grid.keys < self.lengths[..., None, None, None]

    def _rule(self) -> Rule:
        return Rule(lengths=(self.lengths,))


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """p and j in the same document: document d holds the positions cu_seqlens[d] <= x < cu_seqlens[d + 1]. Outside all, nothing is seen.

    Args:
        cu_seqlens: integer tensor (num_documents + 1,), non-decreasing from 0 (checked for values on the CPU). Compared by identity.
    """

    cu_seqlens: Tensor

    def __post_init__(self) -> None:
        check_boundaries(self.cu_seqlens)
        if is_readable(self.cu_seqlens) and bool((self.cu_seqlens[0] != 0) | (self.cu_seqlens[1:] < self.cu_seqlens[:-1]).any()):
            raise ValueError(f"Documents: cu_seqlens: expected non-decreasing boundaries from 0, got {self.cu_seqlens}")

    def _visible(self, grid: _Grid) -> Tensor:
        check_boundaries(self.cu_seqlens, grid.keys.device)
        boundaries = self.cu_seqlens.long()
        document_q = torch.searchsorted(boundaries, grid.positions, right=True)  # 1 + document; 0 before and num_documents + 1 after all
        document_kv = torch.searchsorted(boundaries, grid.keys, right=True)
        return (document_q == document_kv) & (document_kv > 0) & (document_kv < boundaries.shape[0])

    def _rule(self) -> Rule:
        return Rule(documents=(self.cu_seqlens,))


@dataclass(frozen=True, eq=False)
class _Pair(Mask):
    left: Mask | Tensor
    right: Mask | Tensor

    def __post_init__(self) -> None:
        for operand in (self.left, self.right):
            if isinstance(operand, Tensor):
                check_bool(operand)
            elif not isinstance(operand, Mask):
                raise TypeError(f"{type(self).__name__}: mask: expected a mask or a bool tensor, got {type(operand).__name__}")

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return _same_mask(self.left, other.left) and _same_mask(self.right, other.right)

    def __hash__(self) -> int:
        return hash((type(self), self.left, self.right))

    def __repr__(self) -> str:
        return f"({_name_of(self.left)} {'&' if isinstance(self, And) else '|'} {_name_of(self.right)})"


class And(_Pair):
    """What both see."""

    def _visible(self, grid: _Grid) -> Tensor:
        return _visible(self.left, grid) & _visible(self.right, grid)

    def _rule(self) -> Rule:
        return intersect(_rule_of(self.left), _rule_of(self.right))


class Or(_Pair):
    """What either sees."""

    def _visible(self, grid: _Grid) -> Tensor:
        return _visible(self.left, grid) | _visible(self.right, grid)

    def _rule(self) -> Rule:
        united = unite(_rule_of(self.left), _rule_of(self.right))
        return Rule(rest=(self,)) if united is None else united


def lower(
    mask: Mask | Tensor | None,
    *,
    batch_shape: Sequence[int],
    num_heads: int,
    seqlen_q: int,
    seqlen_kv: int,
    query_offset: int | Tensor | None = None,
    device: torch.device | None = None,
) -> Lowered:
    """The operator arguments that mean `mask` for a query (*batch_shape, num_heads, seqlen_q, head_dim) on `device`.

    Numbers and vectors say as much as they can; only what they cannot say becomes a dense bool tensor. Reads no values of tensors.

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

    visible, grid = None, None
    for operand in plan.rest + tuple(Or(SlidingWindow(left, right), Sinks(n)) for left, right, n in plan.bands):
        if isinstance(operand, Tensor):
            check_bool(operand, device)
            part = operand
        else:
            grid = grid or _make_grid(seqlen_q, seqlen_kv, query_offset, device, batch_shape)
            part = operand._visible(grid)
        visible = part if visible is None else visible & part
    if visible is not None:
        check_broadcasts("mask", visible, (*batch_shape, num_heads, seqlen_q, seqlen_kv))
    return Lowered(intervals, lengths, _merge_documents(plan, seqlen_kv, device), offsets, visible)


def visible_pairs(mask: Mask | Tensor, seqlen_q: int, seqlen_kv: int, query_offset: int | Tensor | None = None) -> Tensor:
    """How many pairs of a query and a key a mask shows: int64 (..., 1, 1), with the leading dimensions of the mask.

    A mask without bool tensors is looked at a block of rows at a time.
    """
    if isinstance(mask, Tensor):
        shape = (*mask.shape[:-2], seqlen_q, seqlen_kv)
        check_broadcasts("mask", mask, shape)
        return mask.expand(shape).sum((-2, -1), keepdim=True)
    grid = _make_grid(seqlen_q, seqlen_kv, query_offset, _device_of(mask), None)
    rows = seqlen_q if _holds_bool(mask) else max(_PAIRS_AT_ONCE // max(seqlen_kv, 1), 1)
    total: Any = 0
    for first in range(0, seqlen_q, max(rows, 1)):
        part = slice(first, first + rows)
        block = mask._visible(grid._replace(rows=grid.rows[part], positions=grid.positions[..., part, :].contiguous()))
        size = min(rows, seqlen_q - first)
        total = total + block.expand(*block.shape[:-2], size, seqlen_kv).sum((-2, -1), keepdim=True)
    return total if isinstance(total, Tensor) else torch.zeros(1, 1, dtype=torch.int64)


def _holds_bool(mask: Mask | Tensor) -> bool:
    return isinstance(mask, Tensor) or (isinstance(mask, (And, Or)) and (_holds_bool(mask.left) or _holds_bool(mask.right)))


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


def _visible(operand: Mask | Tensor, grid: _Grid) -> Tensor:
    if isinstance(operand, Mask):
        return operand._visible(grid)
    seqlen_q, seqlen_kv = grid.rows.shape[0], grid.keys.shape[0]
    check_bool(operand, grid.keys.device)
    if grid.batch_shape is None:
        check_broadcasts("mask", operand, (*operand.shape[:-2], seqlen_q, seqlen_kv))
    return operand


def _rule_of(operand: Mask | Tensor) -> Rule:
    return operand._rule() if isinstance(operand, Mask) else Rule(rest=(operand,))


def _make_grid(
    seqlen_q: int, seqlen_kv: int, query_offset: int | Tensor | None, device: torch.device | str | None, batch_shape: Sequence[int] | None
) -> _Grid:
    if device is None and isinstance(query_offset, Tensor):
        device = query_offset.device
    rows = torch.arange(seqlen_q, dtype=torch.int64, device=device)[:, None]
    keys = torch.arange(seqlen_kv, dtype=torch.int64, device=device)
    if query_offset is None:
        positions = rows + (seqlen_kv - seqlen_q)
    elif isinstance(query_offset, Tensor):
        check_integers("query_offset", query_offset, keys.device)
        positions = rows + query_offset.long()[..., None, None, None] if query_offset.dim() else rows + query_offset.long()
    else:
        positions = rows + number("query_offset", query_offset, -UNBOUNDED + 1)
    return _Grid(rows, positions, keys, batch_shape)


def _batch_vector(name: str, vector: Tensor, batch_shape: Sequence[int], device: torch.device | None) -> Tensor:
    check_integers(name, vector, device)
    check_broadcasts(name, vector, batch_shape)
    return vector.long().expand(tuple(batch_shape)).reshape(-1).contiguous()


def _bounded(value: int) -> int:
    return min(value, UNBOUNDED)


def _device_of(operand: Mask | Tensor) -> torch.device | None:
    if isinstance(operand, Tensor):
        return operand.device
    devices = (_device_of(getattr(operand, name)) for name in _CHILDREN[type(operand)])
    return next((device for device in devices if device is not None), None)


def _same_mask(a: Mask | Tensor, b: Mask | Tensor) -> bool:
    return a is b or (isinstance(a, Mask) and isinstance(b, Mask) and a == b)


def _name_of(operand: Mask | Tensor) -> str:
    return f"tensor(shape={tuple(operand.shape)}, dtype={operand.dtype})" if isinstance(operand, Tensor) else repr(operand)


_PAIRS_AT_ONCE = 1 << 24
_EVERY_KEY = Plan([])
_EVERYTHING = Lowered([])

# Fields that are pytree children; the others are numbers and strings, and go into the context.
_CHILDREN: dict[type, tuple[str, ...]] = {
    Causal: (),
    SlidingWindow: (),
    PrefixLM: (),
    Chunked: (),
    Sinks: (),
    KeyLengths: ("lengths",),
    Documents: ("cu_seqlens",),
    And: ("left", "right"),
    Or: ("left", "right"),
}


def _register(kind: type) -> None:
    children = _CHILDREN[kind]
    constants = tuple(field.name for field in fields(kind) if field.name not in children)

    def flatten(mask: Mask) -> tuple[list[Any], list[Any]]:
        return [getattr(mask, name) for name in children], [getattr(mask, name) for name in constants]

    def flatten_with_keys(mask: Mask) -> tuple[list[Any], list[Any]]:
        values, context = flatten(mask)
        return [(GetAttrKey(name), value) for name, value in zip(children, values, strict=True)], context

    def unflatten(values: Any, context: Any) -> Mask:
        # Leaves may be anything while a tree is mapped: checks wait until the mask is used.
        mask: Mask = object.__new__(kind)
        for name, value in (*zip(children, values, strict=True), *zip(constants, context, strict=True)):
            object.__setattr__(mask, name, value)
        return mask

    register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"tiled_attention.{kind.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


for _kind in _CHILDREN:
    _register(_kind)
torch.serialization.add_safe_globals([*_CHILDREN])  # masks inside files that are loaded with weights_only=True
