"""Block lists: per tile of queries, the tiles of keys to visit, and bits for those that are visible in part (csrc/core/block_list.h)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_leaves

from .mask_checks import check_broadcasts, is_readable
from .mask_grid import TILE, Bounds, Grid, positions_of
from .masks import Mask, bounds_of, device_of, visible_of

_GRID = 1 << 22  # tiles whose bounds are looked at together
_TILES = 256  # tiles whose pairs are looked at together
_KEPT = 8  # lists kept per mask
_FULL = -1
_captured: dict[int, Blocks] = {}  # by id of rows: lists that CUDA graphs read, which must not be freed while they may run


class Blocks(NamedTuple):
    """What `attention_fwd` and its kin take. Shared between calls: not to be changed in place."""

    rows: Tensor  # int32 (..., tiles_q, 2): [begin, end) in `tiles` of each tile of queries; (...) broadcasts to (batch..., num_heads)
    tiles: Tensor  # int32 (entries, 2): which tile of keys, in increasing order per row; and where in `bits`, or -1: all of it is visible
    bits: Tensor  # int64 (partial tiles, 64): bit c of row r is key c


def serves(operands: Sequence[Mask], seqlen_q: int, seqlen_kv: int, query_offset: int | Tensor | None, device: torch.device | None) -> bool:
    """Whether these masks become a list: values can be read, the kernels take it, and there is more than a tile."""
    if seqlen_q * seqlen_kv <= TILE * TILE or device is None or device.type not in ("cpu", "cuda"):
        return False
    if torch.compiler.is_compiling():
        return False
    tensors = [leaf for operand in operands for leaf in tree_leaves(operand) if isinstance(leaf, Tensor)]
    if isinstance(query_offset, Tensor):
        tensors.append(query_offset)
    with _outside_transforms():
        probe = torch.empty(0)  # fake inside a fake mode
    return is_readable(probe) and all(is_readable(tensor, device.type) for tensor in tensors)


def of(
    mask: Any, operands: Sequence[Mask], scores: Sequence[int], query_offset: int | Tensor | None, device: torch.device | None
) -> Blocks | None:
    """The list of what all `operands` show of scores (batch..., num_heads, seqlen_q, seqlen_kv); the last ones are kept at `mask`.

    On CUDA a new list waits for the device. While a graph is captured only lists that are kept already can be used: None otherwise.
    """
    leaves = [leaf for operand in operands for leaf in tree_leaves(operand) if isinstance(leaf, Tensor)]
    offset: Any = query_offset
    if isinstance(query_offset, Tensor):
        leaves.append(query_offset)
        offset = id(query_offset)
    keeps = isinstance(mask, Mask) and not any(leaf.is_inference() for leaf in leaves)
    place = (tuple(scores[-2:]), offset, device)
    versions = tuple((id(leaf), leaf._version) for leaf in leaves) if keeps else ()
    kept: dict[Any, Any] = {}
    if keeps:
        kept = mask._block_lists or {}
        found = kept.get(place)
        if found is not None and found[0] == versions:
            return _checked(found[2], scores, device)
    if _captures(device):
        return None
    with _outside_transforms():
        blocks = build(operands, scores[-2], scores[-1], query_offset, device)
    if keeps:
        kept = dict(list(kept.items())[1 - _KEPT :])
        kept[place] = (versions, leaves, blocks)  # `leaves` keeps the tensors alive, so that no id is used again
        object.__setattr__(mask, "_block_lists", kept)
    return _checked(blocks, scores, device)


def _outside_transforms() -> AbstractContextManager[Any]:
    """Tensors made under a transform of torch.func belong to it, and have no values to read; a list is the same for all samples."""
    return temporarily_clear_interpreter_stack() if torch._C._are_functorch_transforms_active() else nullcontext()


def _captures(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _checked(blocks: Blocks, scores: Sequence[int], device: torch.device | None) -> Blocks:
    check_broadcasts("mask", blocks.rows[..., 0, 0], scores[:-2])
    if _captures(device):
        _captured[id(blocks.rows)] = blocks
    elif blocks.rows.is_cuda:  # other streams may read what one has made
        for part in blocks:
            part.record_stream(torch.cuda.current_stream(device))
    return blocks


def build(
    operands: Sequence[Mask], seqlen_q: int, seqlen_kv: int, query_offset: int | Tensor | None, device: torch.device | None
) -> Blocks:
    """Memory: O(visible tiles), and `_GRID` bounds at a time."""
    counts, entries, bits, num_bits, num_entries = [], [], [], 0, 0
    for at, rows, lead_shape in _strips(operands, seqlen_q, seqlen_kv, query_offset, device):
        some, every = reduce(lambda a, b: (a[0] & b[0], a[1] & b[1]), (bounds_of(operand, at) for operand in operands))
        some, every = (part.expand(*lead_shape, rows.numel(), at.keys[0].shape[0]) for part in (some, every))
        state = torch.where(some & every, _FULL, -2).to(torch.int32)
        for where, visible, valid in _partial_tiles(operands, some & ~every, rows, seqlen_q, seqlen_kv, query_offset, lead_shape):
            full = (visible | ~valid).flatten(1).all(1)
            listed = visible.flatten(1).any(1) & ~full
            order = listed.cumsum(0, dtype=torch.int32) - 1 + num_bits
            state[tuple(where.unbind(1))] = torch.where(full, _FULL, torch.where(listed, order, -2)).to(torch.int32)
            bits.append(_pack(visible[listed]))
            num_bits += bits[-1].shape[0]
        shown = state > -2
        entries.append((shown.nonzero(), state[shown]))
        counts.append(shown.sum(-1, dtype=torch.int32))
        num_entries += entries[-1][1].shape[0]
    count = torch.cat(counts, -1)
    if len(entries) == 1:
        tiles = torch.stack([entries[0][0][:, -1].to(torch.int32), entries[0][1]], 1)
    else:  # strips of rows: put those of one list together
        where = torch.cat([place[:, :-1] for place, _ in _shifted(entries, counts)])
        columns = torch.cat([place[:, -1] for place, _ in entries])
        flat = torch.zeros(where.shape[0], dtype=torch.int64, device=columns.device)
        for dim, size in enumerate(count.shape):
            flat = flat * size + where[:, dim]
        order = flat.argsort(stable=True)
        tiles = torch.stack([columns.to(torch.int32), torch.cat([state for _, state in entries])], 1)[order]
    end = count.flatten().cumsum(0, dtype=torch.int32).view(count.shape)
    ranges = torch.stack([end - count, end], -1)
    no_bits = torch.zeros((0, TILE), dtype=torch.int64, device=tiles.device)
    blocks = Blocks(ranges.contiguous(), tiles.contiguous(), torch.cat([*bits, no_bits]))
    if tiles.is_cuda:
        torch.cuda.current_stream(tiles.device).synchronize()
    return blocks


def _shifted(entries: list[tuple[Tensor, Tensor]], counts: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Row indices of the strips made those of the whole."""
    before = 0
    for (place, state), count in zip(entries, counts, strict=True):
        place = place.clone()
        place[:, -2] += before
        before += count.shape[-1]
        yield place, state


def _strips(
    operands: Sequence[Mask], seqlen_q: int, seqlen_kv: int, query_offset: int | Tensor | None, device: torch.device | None
) -> Iterator[tuple[Bounds, Tensor, tuple[int, ...]]]:
    """Bounds of some rows of tiles, their indices, and the leading dimensions of masks."""
    tiles_q, tiles_kv = -(-seqlen_q // TILE), -(-seqlen_kv // TILE)
    first_key = torch.arange(tiles_kv, device=device) * TILE
    keys = (first_key, (first_key + TILE - 1).clamp(max=seqlen_kv - 1))

    def strip(begin: int, end: int) -> tuple[Bounds, Tensor]:
        index = torch.arange(begin, end, device=device)
        rows = (index[:, None] * TILE, (index[:, None] * TILE + TILE - 1).clamp(max=seqlen_q - 1))
        first, last = (positions_of(row, (seqlen_q, seqlen_kv), query_offset) for row in rows)
        return Bounds(rows, (first, last), keys, (seqlen_q, seqlen_kv)), index

    one = strip(0, 1)[0]
    found = [part.shape[:-2] for operand in operands for part in bounds_of(operand, one)]
    lead_shape = tuple(torch.broadcast_shapes(*found, one.positions[0].shape[:-2]))
    size = max(1, _GRID // max(1, tiles_kv * torch.Size(lead_shape).numel()))
    for begin in range(0, tiles_q, size):
        yield (*strip(begin, min(begin + size, tiles_q)), lead_shape)


def _partial_tiles(
    operands: Sequence[Mask],
    chosen: Tensor,
    rows: Tensor,
    seqlen_q: int,
    seqlen_kv: int,
    query_offset: int | Tensor | None,
    lead_shape: tuple[int, ...],
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(indices (tiles, lead + 2), visible, inside the lengths), both bool (tiles, TILE, TILE), of the chosen tiles, a few at a time."""
    inside = torch.arange(TILE, device=chosen.device)
    for where in chosen.nonzero().split(_TILES):
        if where.shape[0] == 0:
            continue
        lead = tuple(index[:, None, None] for index in where[:, :-2].unbind(1))
        queries = (rows[where[:, -2]] * TILE)[:, None, None] + inside[:, None]
        keys = (where[:, -1] * TILE)[:, None, None] + inside
        grid = Grid(queries, queries, keys, None, (seqlen_q, seqlen_kv), lead_shape, lead)
        if isinstance(query_offset, Tensor) and query_offset.dim():
            positions = queries + grid.per_item(query_offset.long())
        else:
            positions = positions_of(queries, (seqlen_q, seqlen_kv), query_offset)
        grid = grid._replace(positions=positions)
        valid = (queries < seqlen_q) & (keys < seqlen_kv)
        visible = reduce(Tensor.__and__, (visible_of(operand, grid) for operand in operands))
        yield where, visible.expand(valid.shape) & valid, valid


def _pack(visible: Tensor) -> Tensor:
    """bool (tiles, TILE, TILE) as int64 (tiles, TILE), key c in bit c."""
    powers = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=visible.device)
    octets = (visible.view(-1, TILE, TILE // 8, 8).to(torch.uint8) * powers).sum(-1, dtype=torch.uint8)
    return octets.contiguous().view(torch.int64).view(-1, TILE)


def shares(mask: Mask, seqlen_q: int, seqlen_kv: int, query_offset: int | Tensor | None) -> Tensor:
    """float64 (..., ceil(seqlen_q / TILE), ceil(seqlen_kv / TILE)): how much of each tile is visible."""
    device = device_of(mask)
    if device is None and isinstance(query_offset, Tensor):
        device = query_offset.device
    strips = []
    for at, rows, lead_shape in _strips([mask], seqlen_q, seqlen_kv, query_offset, device):
        some, every = (part.expand(*lead_shape, rows.numel(), at.keys[0].shape[0]) for part in bounds_of(mask, at))
        share = (some & every).to(torch.float64)
        for where, visible, valid in _partial_tiles([mask], some & ~every, rows, seqlen_q, seqlen_kv, query_offset, lead_shape):
            share[tuple(where.unbind(1))] = visible.sum((1, 2)) / valid.sum((1, 2)).to(torch.float64)
        strips.append(share)
    return torch.cat(strips, -2)


def density(mask: Mask, seqlen_q: int, seqlen_kv: int, query_offset: int | Tensor | None) -> float:
    """`Mask.density`."""
    if seqlen_q == 0 or seqlen_kv == 0:
        return 0.0
    share = shares(mask, seqlen_q, seqlen_kv, query_offset)
    sizes = [torch.full((-(-n // TILE),), float(TILE), dtype=torch.float64, device=share.device) for n in (seqlen_q, seqlen_kv)]
    for size, n in zip(sizes, (seqlen_q, seqlen_kv), strict=True):
        size[-1] -= -n % TILE
    area = sizes[0][:, None] * sizes[1]
    return float((share * area).sum() / (seqlen_q * seqlen_kv * max(1, share[..., 0, 0].numel())))
