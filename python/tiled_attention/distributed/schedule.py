"""Who computes what when, and what travels: the plan of a ring, the same on every rank.

Shards of keys (with their values) are cut where the ranks that see them change. The pieces go from rank to rank, as far as some rank sees
them: to the next ranks, or, where that is less far, part of the way to the ones before. At step (direction, distance) rank r has the pieces
of rank r - direction * distance. In the backward pass a gradient starts as zeros at the first rank that sees its piece, takes the same way,
and returns from the last one to its owner.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

from ..mask_grid import TILE
from .layout import Run, runs_of
from .local_masks import Sight

Step = tuple[int, int]  # direction +1 or -1, distance >= 1; (1, 0) is the rank's own piece


class Piece(NamedTuple):
    """Keys begin <= j < end of the whole, rows [at, at + end - begin) of their owner."""

    owner: int
    place: int  # among what the owner sends, or among its runs
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
    own: tuple[tuple[Piece, ...], ...]  # the runs of the keys of every rank, for itself
    pieces: tuple[tuple[Piece, ...], ...]  # of these, what other ranks see
    steps: tuple[Step, ...]  # after the own piece
    sight: Sight

    @property
    def size(self) -> int:
        return len(self.pieces)

    def at(self, rank: int, step: Step) -> tuple[Piece, ...]:
        """The pieces that `rank` holds at a step."""
        direction, distance = step
        if distance == 0:
            return self.own[rank]
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
    """`halves`: what is sent of a shard is two pieces at least, so that the gradient of one travels while the other is computed."""
    rows, keys = runs_of(lengths_q, layout, "query"), runs_of(lengths_kv, layout, "key")
    size = len(rows)
    own = tuple(tuple(Piece(owner, place, *run, (), ()) for place, run in enumerate(keys[owner])) for owner in range(size))
    pieces = tuple(_pieces(owner, rows, keys[owner], sight, halves) for owner in range(size))
    every = [piece for mine in pieces for piece in mine]
    steps = [(way, distance) for way in (1, -1) for distance in range(1, max((p.reach(way) for p in every), default=0) + 1)]
    return Schedule(rows, own, pieces, tuple(steps), sight)


def _pieces(owner: int, rows: Sequence[Sequence[Run]], keys: Sequence[Run], sight: Sight, halves: bool) -> tuple[Piece, ...]:
    size = len(rows)
    seen: list[tuple[Run, frozenset[int]]] = []  # by the ranks at these distances
    for run in keys:
        views = [
            (distance, *_seen(sight, row, run))
            for distance in range(1, size)
            for row in rows[(owner + distance) % size]
            if sight.sees(row.begin, row.end, run.begin, run.end)
        ]
        cuts = sorted({cut for _, begin, end in views for cut in (begin, end)})
        parts = [(cut, end, frozenset(view[0] for view in views if view[1] <= cut and end <= view[2])) for cut, end in pairwise(cuts)]
        for distances, group in groupby(parts, key=lambda part: part[2]):
            joined = list(group)
            if distances:
                begin, end = joined[0][0], joined[-1][1]
                seen.append((Run(begin, end, run.at + begin - run.begin), distances))
    if halves and len(seen) == 1:
        seen = [(half, seen[0][1]) for half in _halved(seen[0][0])]
    # All pieces of a shard take the same way, so that a step has the work of whole shards: zigzag makes that equal.
    ahead, behind = _ways(sorted({distance for _, distances in seen for distance in distances}), size)
    return tuple(
        Piece(
            owner,
            place,
            *run,
            tuple(distance for distance in ahead if distance in distances),
            tuple(distance for distance in behind if size - distance in distances),
        )
        for place, (run, distances) in enumerate(seen)
    )


def _seen(sight: Sight, row: Run, run: Run) -> tuple[int, int]:
    """Where the keys of the run begin and end that some query of the row sees; there are some."""
    if sight.sees(row.begin, row.end, run.begin, run.begin + 1) and sight.sees(row.begin, row.end, run.end - 1, run.end):
        return run.begin, run.end
    keys = range(run.begin, run.end)
    begin = bisect_left(keys, True, key=lambda last: sight.sees(row.begin, row.end, run.begin, last + 1))
    end = bisect_left(keys, True, key=lambda first: not sight.sees(row.begin, row.end, first, run.end))
    return run.begin + begin, run.begin + end


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
