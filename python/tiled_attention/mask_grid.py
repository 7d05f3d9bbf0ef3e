"""Where masks are evaluated: over a whole (seqlen_q, seqlen_kv) matrix, at chosen tiles of it, or at the bounds of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .mask_checks import check_integers, number
from .mask_rules import UNBOUNDED

TILE = 64  # queries and keys of one tile of a block list: kListTile of csrc/core/block_list.h


class Grid(NamedTuple):
    """Queries and keys. Everything broadcasts: to (..., seqlen_q, seqlen_kv), or to (tiles, TILE, TILE) where `lead` is given."""

    rows: Tensor  # (seqlen_q, 1) query indices; (tiles, TILE, 1)
    positions: Tensor  # (seqlen_q, 1), or (batch..., 1, seqlen_q, 1) with one offset per item; (tiles, TILE, 1)
    keys: Tensor  # (seqlen_kv,); (tiles, 1, TILE)
    batch_shape: Sequence[int] | None  # leading dimensions that vectors must broadcast to, None: any
    lengths: tuple[int, int]  # seqlen_q, seqlen_kv
    lead_shape: tuple[int, ...] = ()  # (batch..., num_heads) or the end of it, of the tiles
    lead: tuple[Tensor, ...] | None = None  # (tiles, 1, 1) each: where a tile stands in lead_shape

    def per_item(self, vector: Tensor) -> Tensor:
        """A (batch...) tensor beside the pairs."""
        return vector[..., None, None, None] if self.lead is None else self._at_tiles(vector[..., None])

    def per_pair(self, tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """The elements (rows, columns) of a (..., any, any) tensor; both shaped as rows and keys are."""
        if self.lead is not None:
            return self._at_tiles(tensor, (rows, columns))
        return tensor.index_select(-2, rows[:, 0]).index_select(-1, columns)

    def _at_tiles(self, tensor: Tensor, tail: tuple[Tensor, ...] = ()) -> Tensor:
        assert self.lead is not None
        shape = self.lead_shape + tuple(tensor.shape[tensor.dim() - len(tail) :])
        return tensor.expand(shape)[self.lead + tail]


@dataclass
class Bounds:
    """The first and last query, position and key of each tile of some rows of tiles."""

    rows: tuple[Tensor, Tensor]  # (tiles_q, 1)
    positions: tuple[Tensor, Tensor]  # (tiles_q, 1) or (batch..., 1, tiles_q, 1)
    keys: tuple[Tensor, Tensor]  # (tiles_kv,)
    lengths: tuple[int, int]

    def nowhere(self) -> Tensor:
        return torch.zeros((self.rows[0].shape[0], self.keys[0].shape[0]), dtype=torch.bool, device=self.keys[0].device)

    @cached_property
    def everywhere(self) -> Tensor:
        return ~self.nowhere()


def _sums_before(marks: Tensor, dim: int) -> Tensor:
    """Sums before each index along `dim` (negative), one longer than `marks`."""
    return F.pad(marks.cumsum(dim, dtype=torch.int32), (0, 0) * (-1 - dim) + (1, 0))


def marks_in_bounds(marks: Tensor, rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(some, all) of bool (..., any, any) over the rectangles [rows[0], rows[1]] x [columns[0], columns[1]], (tiles_q,) and (tiles_kv,)."""
    sums = _sums_before(_sums_before(marks, -2), -1)
    (top, bottom), (left, right) = rows, columns

    def corner(row: Tensor, column: Tensor) -> Tensor:
        return sums.index_select(-2, row).index_select(-1, column)

    count = corner(bottom + 1, right + 1) - corner(top, right + 1) - corner(bottom + 1, left) + corner(top, left)
    area = (bottom - top + 1)[:, None] * (right - left + 1)
    return count > 0, count == area


def make_grid(
    seqlen_q: int, seqlen_kv: int, query_offset: int | Tensor | None, device: torch.device | str | None, batch_shape: Sequence[int] | None
) -> Grid:
    if device is None and isinstance(query_offset, Tensor):
        device = query_offset.device
    rows = torch.arange(seqlen_q, dtype=torch.int64, device=device)[:, None]
    keys = torch.arange(seqlen_kv, dtype=torch.int64, device=device)
    return Grid(rows, positions_of(rows, (seqlen_q, seqlen_kv), query_offset), keys, batch_shape, (seqlen_q, seqlen_kv))


def positions_of(rows: Tensor, lengths: tuple[int, int], query_offset: int | Tensor | None) -> Tensor:
    """Where the queries `rows` (any, 1) stand."""
    if query_offset is None:
        return rows + (lengths[1] - lengths[0])
    if isinstance(query_offset, Tensor):
        check_integers("query_offset", query_offset, rows.device)
        return rows + query_offset.long()[..., None, None, None] if query_offset.dim() else rows + query_offset.long()
    return rows + number("query_offset", query_offset, -UNBOUNDED + 1)
