"""Masks beyond intervals: strided, dilated, global, random blocks, and blocks given one by one. They combine as those of `masks` do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .mask_checks import check_integers, check_number, is_readable, number
from .mask_grid import Bounds, Grid, marks_in_bounds
from .mask_rules import UNBOUNDED, Rule
from .masks import Mask, register_mask
from .reference import philox


@dataclass(frozen=True)
class Strided(Mask):
    """(p - j) % stride == 0: every stride-th key. `Causal() & (Strided(s) | SlidingWindow(s - 1, 0))` is the strided pattern of the Sparse
    Transformer (Child et al., 2019, section 4.2).

    Args:
        stride: distance of the keys, >= 1.

    Raises:
        ValueError, TypeError: naming `stride`.
    """

    stride: int

    def __post_init__(self) -> None:
        check_number(self, "stride", 1)

    def _visible(self, grid: Grid) -> Tensor:
        return (grid.positions - grid.keys) % self.stride == 0

    def _rule(self) -> Rule:
        return Rule() if self.stride == 1 else Rule(rest=(self,))

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        return at.everywhere, at.everywhere if self.stride == 1 else at.nowhere()


@dataclass(frozen=True)
class Dilated(Mask):
    """|p - j| <= window * dilation and (p - j) % dilation == 0: a window of 2 * window + 1 keys with gaps (Longformer, Beltagy et al.,
    2020, section 3.1).

    Args:
        window: keys on either side, >= 0.
        dilation: distance of the keys, >= 1.

    Raises:
        ValueError, TypeError: naming the field.
    """

    window: int
    dilation: int

    def __post_init__(self) -> None:
        check_number(self, "window", 0)
        check_number(self, "dilation", 1)

    @property
    def reach(self) -> int:
        """The distance of the farthest key that is seen."""
        return min(min(self.window, UNBOUNDED) * self.dilation, UNBOUNDED)

    def _visible(self, grid: Grid) -> Tensor:
        ahead = grid.keys - grid.positions
        return (ahead.abs() <= self.reach) & (ahead % self.dilation == 0)

    def _rule(self) -> Rule:
        window = Rule(limit=(self.reach, self.reach))
        return window if self.dilation == 1 else window._replace(rest=(self,))

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        (first, last), (begin, end) = at.positions, at.keys
        some = (end >= first - self.reach) & (begin <= last + self.reach)
        whole = (begin >= last - self.reach) & (end <= first + self.reach)
        return some, whole if self.dilation == 1 else at.nowhere()


@dataclass(frozen=True)
class Global(Mask):
    """p in positions or j in positions: some tokens see all and are seen by all (Longformer, Beltagy et al., 2020, section 3.1).

    Args:
        positions: integers >= 0, kept as a tuple; or an integer tensor (num_positions,), compared by identity, whose values are checked
            where they can be read (CPU, eager).

    Raises:
        ValueError, TypeError: naming `positions`.
    """

    positions: Sequence[int] | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.positions, Tensor):
            self._check()
            if is_readable(self.positions) and bool((self.positions < 0).any()):
                raise ValueError(f"Global: positions: expected integers >= 0, got {int(self.positions.min())}")
            return
        if isinstance(self.positions, (str, bytes)) or not isinstance(self.positions, Sequence):
            raise TypeError(f"Global: positions: expected integers or an integer tensor, got {type(self.positions).__name__}")
        object.__setattr__(self, "positions", tuple(number("Global: positions", position, 0) for position in self.positions))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Global):
            return NotImplemented
        tensors = isinstance(self.positions, Tensor) or isinstance(other.positions, Tensor)
        return self.positions is other.positions if tensors else self.positions == other.positions

    def __hash__(self) -> int:
        return hash((Global, self.positions))

    def _check(self, device: torch.device | None = None) -> None:
        check_integers("Global: positions", self.positions, device)
        if isinstance(self.positions, Tensor) and self.positions.dim() != 1:
            raise ValueError(f"Global: positions: expected shape (num_positions,), got {tuple(self.positions.shape)}")

    def _tensor(self, device: torch.device) -> Tensor:
        if isinstance(self.positions, Tensor):
            self._check(device)
            return self.positions.long()
        return torch.tensor(self.positions, dtype=torch.int64, device=device)

    def _visible(self, grid: Grid) -> Tensor:
        chosen = self._tensor(grid.keys.device)
        return torch.isin(grid.positions, chosen) | torch.isin(grid.keys, chosen)

    def _rule(self) -> Rule:
        return Rule(rest=(self,))

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        chosen = self._tensor(at.keys[0].device).unique()
        found = []
        for first, last in (at.positions, at.keys):
            count = torch.searchsorted(chosen, last.contiguous(), right=True) - torch.searchsorted(chosen, first.contiguous())
            found.append((count > 0, count == last - first + 1))
        (some_q, all_q), (some_kv, all_kv) = found
        return some_q | some_kv, all_q | all_kv


@dataclass(frozen=True)
class RandomBlocks(Mask):
    """Each block of queries sees `num_blocks` blocks of keys, drawn without replacement, the same for all heads and batch items (BigBird,
    Zaheer et al., 2020, section 2).

    Query block a = p // block_size (none for p < 0) and key block b = j // block_size draw word b % 4 of Philox4x32-10 with the two halves
    of `seed` as its key and the counter (b // 4, a, 0, 0). Of the ceil(seqlen_kv / block_size) key blocks, a sees the `num_blocks` with
    the smallest words, the first ones where words are equal. The same on every device.

    Args:
        num_blocks: key blocks that a query block sees, all where there are no more.
        block_size: queries and keys of a block.
        seed: in [0, 2 ** 64).

    Raises:
        ValueError, TypeError: naming the field.
    """

    num_blocks: int
    block_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_number(self, "num_blocks", 0)
        check_number(self, "block_size", 1)
        check_number(self, "seed", 0)
        if self.seed >= 1 << 64:
            raise ValueError(f"RandomBlocks: seed: expected an integer below 2 ** 64, got {self.seed}")

    def blocks(self, query_blocks: Tensor, seqlen_kv: int) -> Tensor:
        """bool (..., ceil(seqlen_kv / block_size)): which key blocks the query blocks (...,) see."""
        count = -(-seqlen_kv // self.block_size)
        key_blocks = torch.arange(count, dtype=torch.int64, device=query_blocks.device)
        if self.num_blocks == 0 or count <= self.num_blocks:
            seen = torch.full((*query_blocks.shape, count), self.num_blocks > 0, dtype=torch.bool, device=query_blocks.device)
            return seen & (query_blocks >= 0)[..., None]
        zero = torch.zeros_like(key_blocks)
        words = philox((key_blocks // 4, query_blocks[..., None], zero, zero), (self.seed & 0xFFFFFFFF, self.seed >> 32))
        word = torch.stack(words).gather(0, (key_blocks % 4).expand(1, *words[0].shape))[0]
        rank = (word << 31) | key_blocks
        last = rank.sort(-1).values[..., self.num_blocks - 1 : self.num_blocks]
        return (rank <= last) & (query_blocks >= 0)[..., None]

    def _visible(self, grid: Grid) -> Tensor:
        query_blocks, key_blocks = grid.positions // self.block_size, grid.keys // self.block_size
        if grid.lead is None:
            return self.blocks(query_blocks[..., 0], grid.lengths[1]).index_select(-1, key_blocks)
        used, index = query_blocks.unique(return_inverse=True)
        seen = self.blocks(used, grid.lengths[1])
        return seen[index, key_blocks.clamp(max=seen.shape[-1] - 1)]

    def _rule(self) -> Rule:
        return Rule(rest=(self,))

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        (first, last), keys = ([x // self.block_size for x in pair] for pair in (at.positions, at.keys))
        used, rows = torch.stack([first, last]).unique(return_inverse=True)
        if self.block_size < 64:  # a tile may hold more than the blocks of its ends
            used = torch.arange(int(used[0]), int(used[-1]) + 1, device=used.device)
            rows = torch.stack([first, last]) - used[0]
        seen = self.blocks(used, at.lengths[1])
        lead = first.shape[:-2]
        if not lead:
            return marks_in_bounds(seen, (rows[0, :, 0], rows[1, :, 0]), (keys[0], keys[1]))
        parts = [marks_in_bounds(seen, pair, (keys[0], keys[1])) for pair in rows[..., 0].flatten(1, -2).unbind(1)]
        some, every = (torch.stack(part).view(*lead, *part[0].shape) for part in zip(*parts, strict=True))
        return some, every


@dataclass(frozen=True, eq=False)
class BlockSparse(Mask):
    """block_mask[..., i // block_size, j // block_size]: blocks of queries (by index i, not position) and keys, given one by one.

    Args:
        block_mask: bool (..., ceil(seqlen_q / block_size), ceil(seqlen_kv / block_size)), True = attend; the leading dimensions broadcast
            to (batch..., num_heads): a layout per head is (num_heads, ., .). Compared by identity.
        block_size: queries and keys of a block, any size; lengths need be no multiple of it.

    Raises:
        ValueError, TypeError: naming the field; where it meets query also for a grid of blocks that does not fit, or another device.
    """

    block_mask: Tensor
    block_size: int

    def __post_init__(self) -> None:
        check_number(self, "block_size", 1)
        if not isinstance(self.block_mask, Tensor):
            raise TypeError(f"BlockSparse: block_mask: expected a bool tensor, got {type(self.block_mask).__name__}")
        if self.block_mask.dtype != torch.bool:
            raise TypeError(f"BlockSparse: block_mask: expected a bool tensor (True = attend), got {self.block_mask.dtype}")
        if self.block_mask.dim() < 2:
            raise ValueError(
                "BlockSparse: block_mask: expected shape (..., ceil(seqlen_q / block_size), ceil(seqlen_kv / block_size)), "
                f"got {tuple(self.block_mask.shape)}"
            )

    def _check(self, lengths: tuple[int, int], device: torch.device) -> None:
        expected = tuple(-(-length // self.block_size) for length in lengths)
        if tuple(self.block_mask.shape[-2:]) != expected:
            raise ValueError(
                f"BlockSparse: block_mask: expected shape (..., {expected[0]}, {expected[1]}) for block_size {self.block_size}, "
                f"seqlen_q {lengths[0]} and seqlen_kv {lengths[1]}, got {tuple(self.block_mask.shape)}"
            )
        if self.block_mask.device != device:
            raise ValueError(f"BlockSparse: block_mask: expected a tensor on {device}, got one on {self.block_mask.device}")

    def _visible(self, grid: Grid) -> Tensor:
        self._check(grid.lengths, grid.keys.device)
        seqlen_q, seqlen_kv = grid.lengths
        rows, columns = grid.rows.clamp(max=seqlen_q - 1), grid.keys.clamp(max=seqlen_kv - 1)
        return grid.per_pair(self.block_mask, rows // self.block_size, columns // self.block_size)

    def _rule(self) -> Rule:
        return Rule(rest=(self,))

    def _bounds(self, at: Bounds) -> tuple[Tensor, Tensor]:
        self._check(at.lengths, at.keys[0].device)
        (first, last), (begin, end) = ([x // self.block_size for x in pair] for pair in (at.rows, at.keys))
        return marks_in_bounds(self.block_mask, (first[:, 0], last[:, 0]), (begin, end))


register_mask(Strided, ())
register_mask(Dilated, ())
register_mask(Global, ("positions",))
register_mask(RandomBlocks, ())
register_mask(BlockSparse, ("block_mask",))
