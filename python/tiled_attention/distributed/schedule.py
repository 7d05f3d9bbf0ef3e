"""Who computes what when, and what travels: the plan of a ring, the same on every rank.

Pieces of keys (with their values) go from rank to rank, as far as some rank sees them: to the next ranks, or, where that is less far, part
of the way to the ones before. At step (direction, distance) rank r has the pieces of rank r - direction * distance. In the backward pass a
gradient starts as zeros at the first rank that sees its piece, takes the same way, and returns from the last one to its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..mask_grid import TILE
from .layout import Run, runs_of
from .local_masks import Sight

Step = tuple[int, int]  # direction +1 or -1, distance >= 1; (1, 0) is the rank's own piece


class Piece(NamedTuple):
    """Keys begin <= j < end of the whole, rows [at, at + end - begin) of their owner."""

    owner: int
    place: int  # among the pieces of the owner
    begin: int
    end: int
    at: int
    ahead: tuple[int, ...]  # distances at which the next ranks see it, increasing
    behind: tuple[int, ...]  # and the ranks before

    @property
    def length(self) -> int:
        return self.end - self.begin

    def seen_at(self, direction: int) -> tuple[int, ...]:
        return self.ahead if direction > 0 else self.behind

    def reach(self, direction: int) -> int:
        """How far it goes that way."""
        seen = self.seen_at(direction)
        return seen[-1] if seen else 0

    def start(self, direction: int) -> int:
        """Where its gradient starts."""
        seen = self.seen_at(direction)
        return seen[0] if seen else 0


class Schedule(NamedTuple):
    rows: tuple[tuple[Run, ...], ...]  # of the queries of every rank
    pieces: tuple[tuple[Piece, ...], ...]  # of the keys of every rank
    steps: tuple[Step, ...]  # after the own piece
    sight: Sight

    @property
    def size(self) -> int:
        return len(self.pieces)

    def at(self, rank: int, step: Step) -> tuple[Piece, ...]:
        """The pieces that `rank` holds at a step."""
        direction, distance = step
        if distance == 0:
            return self.pieces[rank]
        owner = (rank - direction * distance) % self.size
        return tuple(piece for piece in self.pieces[owner] if piece.reach(direction) >= distance)

    def blocks(self, rank: int, piece: Piece) -> tuple[Run, ...]:
        """The rows of `rank` that see some of it."""
        return tuple(run for run in self.rows[rank] if self.sight.sees(run.begin, run.end, piece.begin, piece.end))

    def keys_sent(self, rank: int) -> int:
        """How many keys with their values `rank` sends in one pass."""
        steps = ((step, piece) for step in self.steps for piece in self.at((rank + step[0]) % self.size, step))
        return sum(piece.length for _, piece in steps)

    def gradients_sent(self, rank: int) -> int:
        """Of how many keys with their values `rank` sends gradients."""
        steps = ((step, piece) for step in self.steps for piece in self.at(rank, step))
        return sum(piece.length for (direction, distance), piece in steps if distance >= piece.start(direction))


@lru_cache(maxsize=64)
def make_schedule(lengths_q: Sequence[int], lengths_kv: Sequence[int], layout: str, sight: Sight, halves: bool) -> Schedule:
    """`halves`: a shard of one run is two pieces, so that the gradient of one travels while the other is computed."""
    rows, keys = runs_of(lengths_q, layout, "query"), runs_of(lengths_kv, layout, "key")
    size = len(rows)
    pieces = []
    for owner in range(size):
        runs = _halved(keys[owner][0]) if halves and len(keys[owner]) == 1 else keys[owner]
        seen = [
            {
                (rank - owner) % size
                for rank in range(size)
                if rank != owner and any(sight.sees(row.begin, row.end, run.begin, run.end) for row in rows[rank])
            }
            for run in runs
        ]
        # All pieces of a shard take the same way, so that a step has the work of whole shards: zigzag makes that equal.
        ahead, behind = _ways(sorted(set().union(*seen)), size)
        mine = [
            Piece(
                owner,
                index,
                run.begin,
                run.end,
                run.at,
                tuple(distance for distance in ahead if distance in seen[index]),
                tuple(distance for distance in behind if size - distance in seen[index]),
            )
            for index, run in enumerate(runs)
        ]
        pieces.append(tuple(mine))
    every = [piece for mine in pieces for piece in mine]
    steps = [(way, distance) for way in (1, -1) for distance in range(1, max((p.reach(way) for p in every), default=0) + 1)]
    return Schedule(rows, tuple(pieces), tuple(steps), sight)


def _halved(run: Run) -> tuple[Run, ...]:
    middle = -(-(run.end - run.begin) // (2 * TILE)) * TILE
    if run.begin + middle >= run.end:
        return (run,)
    return Run(run.begin, run.begin + middle, run.at), Run(run.begin + middle, run.end, run.at + middle)


def _ways(distances: list[int], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The distances of those that are reached ahead, and behind, in the fewest hops; ahead where it is the same."""
    best, cut = size, 0
    for ahead in range(len(distances), -1, -1):
        hops = (distances[ahead - 1] if ahead else 0) + (size - distances[ahead] if ahead < len(distances) else 0)
        if hops < best:
            best, cut = hops, ahead
    return tuple(distances[:cut]), tuple(size - distance for distance in reversed(distances[cut:]))
