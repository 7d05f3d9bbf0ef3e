"""The algebra behind mask lowering: a mask as a conjunction of row intervals, in plain numbers.

Tensors and masks pass through it untouched. U = 2 ** 40 stands for unbounded, as in csrc/core/params.h.
"""

from __future__ import annotations

from typing import Any, NamedTuple

UNBOUNDED = 1 << 40

Band = tuple[int, int, int]  # left, right, sinks: p - left <= j <= p + right, or j < sinks

# query_offset, window_left, window_right, limit_left, limit_right, prefix, chunk, key_end, num_sinks, top_left
NO_INTERVALS = [UNBOUNDED, UNBOUNDED, UNBOUNDED, UNBOUNDED, UNBOUNDED, -1, 0, UNBOUNDED, 0, 0]


class Rule(NamedTuple):
    """Key j is visible to position p (query i) where all of these hold."""

    limit: tuple[int, int] = (UNBOUNDED, UNBOUNDED)  # left, right: p - left <= j <= p + right
    bands: tuple[Band, ...] = ()
    chunks: tuple[int, ...] = ()  # each: j // chunk == p // chunk, p >= 0
    key_end: int = UNBOUNDED  # j < key_end
    top_left: bool = False  # j <= i
    lengths: tuple[Any, ...] = ()  # integer tensors, each: j < lengths[b]
    documents: tuple[Any, ...] = ()  # boundary tensors, each: p and j in the same document
    rest: tuple[Any, ...] = ()  # masks and bool tensors that have no other form


class Plan(NamedTuple):
    """A rule as the operators take it; independent of shapes."""

    intervals: list[int]  # [] or numbers as in NO_INTERVALS
    lengths: tuple[Any, ...] = ()
    documents: tuple[Any, ...] = ()
    spans: tuple[int, ...] = ()  # chunk sizes to be written as document boundaries
    bands: tuple[Band, ...] = ()  # for which the numbers have no place
    rest: tuple[Any, ...] = ()

    def is_numbers(self) -> bool:
        return len(self.lengths) + len(self.documents) + len(self.spans) + len(self.bands) + len(self.rest) == 0


def make_plan(rule: Rule) -> Plan:
    prefix, (window_left, window_right, num_sinks), left_over = _place_bands(rule)
    chunks: list[int] = []
    for size in rule.chunks:  # chunks of n lie inside chunks of a multiple of n
        if not any(size % kept == 0 for kept in chunks):
            chunks = [kept for kept in chunks if kept % size != 0] + [size]
    chunk = chunks[0] if chunks else 0
    numbers = [UNBOUNDED, window_left, window_right, *rule.limit, prefix, chunk, rule.key_end, num_sinks, int(rule.top_left)]
    intervals = [] if numbers == NO_INTERVALS else numbers
    return Plan(intervals, rule.lengths, rule.documents, tuple(chunks[1:]), tuple(left_over), rule.rest)


def intersect(a: Rule, b: Rule) -> Rule:
    return Rule(
        limit=(min(a.limit[0], b.limit[0]), min(a.limit[1], b.limit[1])),
        bands=a.bands + b.bands,
        chunks=a.chunks + b.chunks,
        key_end=min(a.key_end, b.key_end),
        top_left=a.top_left or b.top_left,
        lengths=a.lengths + b.lengths,
        documents=a.documents + b.documents,
        rest=a.rest + b.rest,
    )


def unite(a: Rule, b: Rule) -> Rule | None:
    """`a | b` where that is a rule again: both are windows and sinks, under the same further conditions."""
    if a.top_left != b.top_left or a.chunks != b.chunks:
        return None
    for x, y in ((a.lengths, b.lengths), (a.documents, b.documents), (a.rest, b.rest)):
        if len(x) != len(y) or any(p is not q for p, q in zip(x, y, strict=True)):
            return None
    few, many = _streaming_form(a), _streaming_form(b)
    if few is None or many is None:
        return None
    if few.n > many.n:
        few, many = many, few
    left, right = max(few.inner[0], many.inner[0]), max(few.inner[1], many.inner[1])
    outer = (max(few.outer[0], many.outer[0]), max(few.outer[1], many.outer[1]))
    if 0 < few.n < many.n and outer != many.outer:
        return None  # sinks that end at two places
    if left < 0:  # no window on either side
        return a._replace(limit=outer if many.n else (UNBOUNDED, UNBOUNDED), bands=(), key_end=many.n)
    # W(inner) or (W(outer) and S) = W(outer) and (W(inner) or S): what the right side adds to S lies in W(inner).
    return a._replace(limit=outer, bands=((left, right, many.n),), key_end=UNBOUNDED)


class _Streaming(NamedTuple):
    """(p - outer[0] <= j <= p + outer[1]) and (p - inner[0] <= j <= p + inner[1] or j < n); outer covers inner; (-1, -1) is empty."""

    outer: tuple[int, int]
    inner: tuple[int, int]
    n: int


def _streaming_form(rule: Rule) -> _Streaming | None:
    prefix, (left, right, n), left_over = _place_bands(rule)
    if left_over or (prefix >= 0 and n > 0):
        return None
    if prefix > 0:
        left, right, n = rule.limit[0], 0, prefix
    if n > 0:
        return _Streaming(rule.limit, (left, right), n) if rule.key_end >= UNBOUNDED else None
    window = (min(left, rule.limit[0]), min(right, rule.limit[1] if prefix < 0 else 0))
    if rule.key_end >= UNBOUNDED:
        return _Streaming(window, window, 0)
    return _Streaming(window, (-1, -1), rule.key_end) if rule.key_end > 0 else _Streaming((-1, -1), (-1, -1), 0)


def _place_bands(rule: Rule) -> tuple[int, Band, list[Band]]:
    """(prefix or -1, the one band with its own numbers, bands that find no place), given that the rest of the rule holds."""
    left_limit, right_limit = rule.limit
    bands: list[Band] = []
    for left, right, n in rule.bands:
        left, right = min(left, left_limit), min(right, right_limit)
        if (left >= left_limit and right >= right_limit) or n >= rule.key_end:
            continue  # hides nothing more
        same = [band for band in bands if band[2] == n]
        bands = [band for band in bands if band[2] != n]
        for band in same:  # (A or S) and (B or S) = (A and B) or S
            left, right = min(left, band[0]), min(right, band[1])
        bands.append((left, right, n))
    bands = [band for band in bands if not any(other is not band and _covers(band, other) for other in bands)]
    prefixes = [band for band in bands if _is_prefix(band, left_limit)]
    others = [band for band in bands if not _is_prefix(band, left_limit)]
    return prefixes[0][2] if prefixes else -1, others[0] if others else (UNBOUNDED, UNBOUNDED, 0), others[1:]


def _is_prefix(band: Band, left_limit: int) -> bool:
    return band[0] >= left_limit and band[1] == 0


def _covers(a: Band, b: Band) -> bool:
    return a[0] >= b[0] and a[1] >= b[1] and a[2] >= b[2]
