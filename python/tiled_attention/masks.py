"""Masks are values: which keys each query sees, and what that means (`dense`). Here those of intervals; more in `sparse_masks`.

Query row i stands at position p = i + seqlen_kv - seqlen_q (bottom-right aligned), or at i + query_offset where an offset is given.
Every mask names the keys j that p sees. None implies causality; combine with `&` and `|`, also with a bool tensor (True = attend).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from .mask_checks import check_bool, check_boundaries, check_broadcasts, check_integers, check_number, is_readable, number
from .mask_grid import Bounds, Grid, make_grid, marks_in_bounds
from .mask_rules import UNBOUNDED, Rule, intersect, unite


class Mask:
    """Base of all masks. Immutable, hashable, picklable, a pytree node whose leaves are its tensors.

    `a & b` sees what both see, `a | b` what either sees; one side may be a bool tensor that broadcasts to (..., seqlen_q, seqlen_kv).
    """

    _cached: ClassVar[Any] = None  # what lowering keeps
    _block_lists: ClassVar[Any] = None  # what block_list keeps

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

        Raises:
            ValueError, TypeError: naming the argument, or the mask and its field.
        """
        for name, length in (("seqlen_q", seqlen_q), ("seqlen_kv", seqlen_kv)):
            number(name, length, 0)
        grid = make_grid(seqlen_q, seqlen_kv, query_offset, device if device is not None else device_of(self), None)
        visible = self._visible(grid)
        shape = torch.broadcast_shapes(visible.shape, (*grid.positions.shape[:-1], seqlen_kv))
        return visible.expand(shape).contiguous()

    def _visible(self, grid: Grid) -> Tensor:
        """bool, broadcastable to (..., seqlen_q, seqlen_kv)."""
        raise NotImplementedError

    def _rule(self) -> Rule:
        raise NotImplementedError

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        """(some, all): tiles outside `some` see nothing, tiles inside `all` see everything. Both broadcast to (..., tiles_q, tiles_kv)."""
        return at.everywhere, at.nowhere()

    def density(self, seqlen_q: int, seqlen_kv: int, *, query_offset: int | Tensor | None = None) -> float:
        """The share of the pairs that are visible, 0 without pairs; the mean where batch items or heads differ. Never a dense matrix.

        Args:
            seqlen_q, seqlen_kv, query_offset: as of `dense`.

        Returns:
            A number in [0, 1].

        Raises:
            ValueError, TypeError: naming the argument, or the mask and its field.
        """
        from .block_list import density

        for name, length in (("seqlen_q", seqlen_q), ("seqlen_kv", seqlen_kv)):
            number(name, length, 0)
        return density(self, seqlen_q, seqlen_kv, query_offset)

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
    """j <= p. `align="top_left"`: j <= i, whatever the lengths and the query offset (as `is_causal` in torch).

    Args:
        align: "bottom_right", where the last query sees the last key, or "top_left". Default "bottom_right".

    Raises:
        ValueError: naming `align`.
    """

    align: str = "bottom_right"

    def __post_init__(self) -> None:
        if self.align not in ("bottom_right", "top_left"):
            raise ValueError(f"Causal: align: expected 'bottom_right' or 'top_left', got {self.align!r}")

    def _visible(self, grid: Grid) -> Tensor:
        return grid.keys <= (grid.rows if self.align == "top_left" else grid.positions)

    def _rule(self) -> Rule:
        return Rule(top_left=True) if self.align == "top_left" else Rule(limit=(UNBOUNDED, 0))

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        first, last = at.rows if self.align == "top_left" else at.positions
        return at.keys[0] <= last, at.keys[1] <= first


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """p - left <= j <= p + right, both inclusive: `left + 1 + right` keys. `SlidingWindow(w - 1, 0)` is a causal window of w keys.

    Args:
        left: keys before p, >= 0.
        right: keys behind p, >= 0; 0 makes the window causal.

    Raises:
        ValueError, TypeError: naming the field.
    """

    left: int
    right: int

    def __post_init__(self) -> None:
        check_number(self, "left", 0)
        check_number(self, "right", 0)

    def _visible(self, grid: Grid) -> Tensor:
        return (grid.keys >= grid.positions - self.left) & (grid.keys <= grid.positions + self.right)

    def _rule(self) -> Rule:
        return Rule(limit=(_bounded(self.left), _bounded(self.right)))

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        (first, last), (begin, end) = at.positions, at.keys
        left, right = _bounded(self.left), _bounded(self.right)
        return (end >= first - left) & (begin <= last + right), (begin >= last - left) & (end <= first + right)


@dataclass(frozen=True)
class PrefixLM(Mask):
    """j < prefix or j <= p: the first `prefix` keys are seen by all, the others causally.

    Args:
        prefix: number of keys, >= 0.

    Raises:
        ValueError, TypeError: naming `prefix`.
    """

    prefix: int

    def __post_init__(self) -> None:
        check_number(self, "prefix", 0)

    def _visible(self, grid: Grid) -> Tensor:
        return (grid.keys < self.prefix) | (grid.keys <= grid.positions)

    def _rule(self) -> Rule:
        return Rule(bands=((UNBOUNDED, 0, _bounded(self.prefix)),))

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        (first, last), (begin, end) = at.positions, at.keys
        return (begin < self.prefix) | (begin <= last), (end < self.prefix) | (end <= first)


@dataclass(frozen=True)
class Chunked(Mask):
    """p // size == j // size: attention inside chunks of `size` positions. A position before 0 stands in no chunk.

    Args:
        size: positions of a chunk, >= 1.

    Raises:
        ValueError, TypeError: naming `size`.
    """

    size: int

    def __post_init__(self) -> None:
        check_number(self, "size", 1)

    def _visible(self, grid: Grid) -> Tensor:
        return grid.positions // self.size == grid.keys // self.size

    def _rule(self) -> Rule:
        return Rule(chunks=(_bounded(self.size),))

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        (first, last), (begin, end) = ([x // self.size for x in pair] for pair in (at.positions, at.keys))
        return (first <= end) & (begin <= last), (first == end) & (begin == last)


@dataclass(frozen=True)
class Sinks(Mask):
    """j < n: the first n keys. `Causal() & (SlidingWindow(w, 0) | Sinks(n))` is streaming attention (Xiao et al., 2024).

    Args:
        n: number of keys, >= 0.

    Raises:
        ValueError, TypeError: naming `n`.
    """

    n: int

    def __post_init__(self) -> None:
        check_number(self, "n", 0)

    def _visible(self, grid: Grid) -> Tensor:
        return grid.keys < self.n

    def _rule(self) -> Rule:
        return Rule(key_end=_bounded(self.n))

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        return at.keys[0] < self.n, at.keys[1] < self.n


@dataclass(frozen=True, eq=False)
class KeyLengths(Mask):
    """j < lengths[b]: keys beyond the length of their batch item are padding.

    Args:
        lengths: integer tensor that broadcasts to the leading dimensions (batch...) of query. Compared by identity.

    Raises:
        ValueError, TypeError: naming `lengths`; where it meets query also for a shape that does not broadcast, or another device.
    """

    lengths: Tensor

    def __post_init__(self) -> None:
        check_integers("KeyLengths: lengths", self.lengths)

    def _visible(self, grid: Grid) -> Tensor:
        check_integers("KeyLengths: lengths", self.lengths, grid.keys.device)
        if grid.batch_shape is not None:
            check_broadcasts("KeyLengths: lengths", self.lengths, grid.batch_shape)
        return grid.keys < grid.per_item(self.lengths)

    def _rule(self) -> Rule:
        return Rule(lengths=(self.lengths,))

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        lengths = self.lengths[..., None, None, None]
        return at.keys[0] < lengths, at.keys[1] < lengths


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """p and j in the same document: document d holds the positions cu_seqlens[d] <= x < cu_seqlens[d + 1]. Outside all, nothing is seen.

    Args:
        cu_seqlens: integer tensor (num_documents + 1,), non-decreasing from 0 (checked for values on the CPU). Compared by identity.

    Raises:
        ValueError, TypeError: naming `cu_seqlens`.
    """

    cu_seqlens: Tensor

    def __post_init__(self) -> None:
        check_boundaries(self.cu_seqlens)
        if is_readable(self.cu_seqlens) and bool((self.cu_seqlens[0] != 0) | (self.cu_seqlens[1:] < self.cu_seqlens[:-1]).any()):
            raise ValueError(f"Documents: cu_seqlens: expected non-decreasing boundaries from 0, got {self.cu_seqlens}")

    def _visible(self, grid: Grid) -> Tensor:
        check_boundaries(self.cu_seqlens, grid.keys.device)
        boundaries = self.cu_seqlens.long()
        document_q = torch.searchsorted(boundaries, grid.positions, right=True)  # 1 + document; 0 before and num_documents + 1 after all
        document_kv = torch.searchsorted(boundaries, grid.keys, right=True)
        return (document_q == document_kv) & (document_kv > 0) & (document_kv < boundaries.shape[0])

    def _rule(self) -> Rule:
        return Rule(documents=(self.cu_seqlens,))

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        boundaries = self.cu_seqlens.long()
        (first, last), (begin, end) = ([torch.searchsorted(boundaries, x, right=True) for x in pair] for pair in (at.positions, at.keys))
        inside = (begin > 0) & (begin < boundaries.shape[0])
        return (first <= end) & (begin <= last), (first == end) & (begin == last) & inside


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

    def _visible(self, grid: Grid) -> Tensor:
        return visible_of(self.left, grid) & visible_of(self.right, grid)

    def _rule(self) -> Rule:
        return intersect(_rule_of(self.left), _rule_of(self.right))

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        (some_a, all_a), (some_b, all_b) = bounds_of(self.left, at), bounds_of(self.right, at)
        return some_a & some_b, all_a & all_b


class Or(_Pair):
    """What either sees."""

    def _visible(self, grid: Grid) -> Tensor:
        return visible_of(self.left, grid) | visible_of(self.right, grid)

    def _rule(self) -> Rule:
        united = unite(_rule_of(self.left), _rule_of(self.right))
        return Rule(rest=(self,)) if united is None else united

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        (some_a, all_a), (some_b, all_b) = bounds_of(self.left, at), bounds_of(self.right, at)
        return some_a | some_b, all_a | all_b


def visible_of(operand: Mask | Tensor, grid: Grid) -> Tensor:
    """The pairs that a mask or a bool tensor shows, broadcastable as the grid is."""
    if isinstance(operand, Mask):
        return operand._visible(grid)
    check_bool(operand, grid.keys.device)
    seqlen_q, seqlen_kv = grid.lengths
    if grid.lead is not None:
        full = operand.expand(*operand.shape[:-2], seqlen_q, seqlen_kv)
        return grid.per_pair(full, grid.rows.clamp(max=seqlen_q - 1), grid.keys.clamp(max=seqlen_kv - 1))
    if grid.batch_shape is None:
        check_broadcasts("mask", operand, (*operand.shape[:-2], seqlen_q, seqlen_kv))
    return operand


def bounds_of(operand: Mask | Tensor, at: Bounds) -> tuple[Tensor, Tensor]:
    """`Mask._bounds` of a mask or a bool tensor."""
    if isinstance(operand, Mask):
        return operand._bounds(at)
    full = operand.expand(*operand.shape[:-2], *at.lengths)
    first, last = (x[:, 0] for x in at.rows)
    return marks_in_bounds(full, (first, last), at.keys)


def _rule_of(operand: Mask | Tensor) -> Rule:
    return operand._rule() if isinstance(operand, Mask) else Rule(rest=(operand,))


def _bounded(value: int) -> int:
    return min(value, UNBOUNDED)


def device_of(operand: Mask | Tensor) -> torch.device | None:
    if isinstance(operand, Tensor):
        return operand.device
    parts = (getattr(operand, name) for name in _CHILDREN[type(operand)])
    devices = (device_of(part) for part in parts if isinstance(part, (Mask, Tensor)))
    return next((device for device in devices if device is not None), None)


def _same_mask(a: Mask | Tensor, b: Mask | Tensor) -> bool:
    return a is b or (isinstance(a, Mask) and isinstance(b, Mask) and a == b)


def _name_of(operand: Mask | Tensor) -> str:
    return f"tensor(shape={tuple(operand.shape)}, dtype={operand.dtype})" if isinstance(operand, Tensor) else repr(operand)


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


def register_mask(kind: type, children: tuple[str, ...]) -> None:
    """Makes a class of masks a pytree node whose children are these fields, and safe to load."""
    _CHILDREN[kind] = children
    _register(kind)
    torch.serialization.add_safe_globals([kind])


def _register(kind: type) -> None:
    names = tuple(field.name for field in fields(kind))

    def children_of(mask: Mask) -> list[str]:
        # A tuple of numbers in the place of a tensor is a constant.
        return [name for name in _CHILDREN[kind] if not isinstance(getattr(mask, name), tuple)]

    def flatten(mask: Mask) -> tuple[list[Any], list[Any]]:
        children = children_of(mask)
        return [getattr(mask, name) for name in children], [[name, getattr(mask, name)] for name in names if name not in children]

    def flatten_with_keys(mask: Mask) -> tuple[list[Any], list[Any]]:
        values, context = flatten(mask)
        return [(GetAttrKey(name), value) for name, value in zip(children_of(mask), values, strict=True)], context

    def unflatten(values: Any, context: Any) -> Mask:
        # Leaves may be anything while a tree is mapped: checks wait until the mask is used.
        mask: Mask = object.__new__(kind)
        constants = dict(context)
        children = [name for name in names if name not in constants]
        for name, value in (*zip(children, values, strict=True), *constants.items()):
            object.__setattr__(mask, name, tuple(value) if isinstance(value, list) else value)
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
