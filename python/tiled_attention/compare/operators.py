"""Step of the other operators: parity, speed and memory beside PyTorch, what LSH finds, densities of masks, counts."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import counted, packed, patterns, scores
from .comparison import PARITY_DTYPES, Comparison, Size, parity_rows, speed_rows
from .machine import dtype_name, pinned
from .memory import in_fresh_process

FLOAT32, WIDE_AND_NARROW = (torch.float32,), (torch.float32, torch.bfloat16)
RECALL_ROUNDS = (1, 2, 4, 8)
MEMORY, MEMORY_SEQLEN = ("additive", "additive composite"), 512

Advance = Callable[[str], None]


@dataclass(frozen=True)
class Theme:
    """Comparisons of (size, seed), and the sizes at which they are timed, quick and not."""

    name: str
    comparisons: Callable[[Size, int], list[Comparison]]
    quick: Size
    full: Size
    longest: int = 197  # of the parity
    dtypes: tuple[torch.dtype, ...] = FLOAT32  # timed in the full run; the quick one times float32


# Composites that hold (seqlen, seqlen, head_dim) tensors are timed on short sequences.
THEMES = (
    Theme("packed", packed.varlen, Size(1, 8, 8, 128, 64), Size(1, 8, 8, 512, 64), dtypes=WIDE_AND_NARROW),
    Theme("decode", packed.decode, Size(1, 32, 8, 1024, 128), Size(1, 32, 8, 8192, 128), dtypes=WIDE_AND_NARROW),
    Theme("cache", packed.caches, Size(1, 8, 2, 32, 64), Size(1, 8, 2, 128, 64)),
    Theme("scores", scores.other_scores, Size(1, 2, 2, 128, 64), Size(1, 8, 8, 192, 64), longest=67),
    Theme("positions", scores.positions, Size(1, 4, 4, 256, 64), Size(1, 8, 8, 1024, 64)),
    Theme("sparse", patterns.sparse, Size(1, 2, 2, 512, 64), Size(1, 2, 2, 4096, 64)),
    Theme("LSH", patterns.lsh, Size(1, 2, 2, 1024, 64), Size(1, 2, 2, 4096, 64)),
)
PARITY = Size(2, 4, 2, 0, 32)


def _parity_sizes(theme: Theme, sizes: Sequence[int]) -> list[int]:
    return sorted({min(n, theme.longest) for n in sizes})


def parity(sizes: Sequence[int], advance: Advance) -> list[dict[str, Any]]:
    """One row per tensor of each comparison and dtype, on one thread, as the other parity is."""
    rows = []
    with pinned(1):
        for theme in THEMES:
            for n in _parity_sizes(theme, sizes):
                for dtype in PARITY_DTYPES:
                    found = parity_rows(functools.partial(theme.comparisons, replace(PARITY, seqlen=n)), dtype)
                    rows += [row | {"n": n} for row in found]
                    advance(f"{theme.name}, {dtype_name(dtype)}, n = {n}")
    return rows


def speed(quick: bool, longest: int | None, threads: int, seconds: float, advance: Advance) -> list[dict[str, Any]]:
    """Rows of each comparison, forward and forward+backward; no longer than `longest`."""
    rows = []
    with pinned(threads):
        for theme in THEMES:
            size = theme.quick if quick else theme.full
            size = size if longest is None else replace(size, seqlen=min(size.seqlen, longest))
            for dtype in FLOAT32 if quick else theme.dtypes:
                for comparison in theme.comparisons(size, 0):
                    rows += speed_rows(comparison, size.seqlen, dtype, seconds)
                    advance(f"{comparison.name}, {dtype_name(dtype)}, n = {size.seqlen}")
    return rows


def memory(n: int, threads: int, advance: Advance) -> list[dict[str, Any]]:
    """Peak beyond the inputs of additive attention, forward+backward, one head."""
    rows = []
    for implementation in MEMORY:
        rows.append({"implementation": implementation, "n": n} | in_fresh_process(implementation=implementation, n=n, threads=threads))
        advance(f"{implementation}, n = {n}")
    return rows


def steps(parity_sizes: Sequence[int], quick: bool) -> int:
    """How often `run` reports."""
    timed = sum(len(theme.comparisons(replace(PARITY, seqlen=8), 0)) * len(FLOAT32 if quick else theme.dtypes) for theme in THEMES)
    judged = sum(len(_parity_sizes(theme, parity_sizes)) for theme in THEMES) * len(PARITY_DTYPES)
    return judged + timed + (0 if quick else len(MEMORY))


def run(parity_sizes: Sequence[int], quick: bool, longest: int | None, threads: int, seconds: float, advance: Advance) -> dict[str, Any]:
    """All of it; longest: bound of the lengths that are timed, None: those of the themes."""
    size = PARITY.num_heads
    return {
        "parity": parity(parity_sizes, advance),
        "speed": speed(quick, longest, threads, seconds, advance),
        "memory": [] if quick else memory(min(MEMORY_SEQLEN, longest or MEMORY_SEQLEN), threads, advance),
        "densities": [row for n in parity_sizes for row in patterns.densities(n, size)],
        "recall": patterns.recall(RECALL_ROUNDS[:2] if quick else RECALL_ROUNDS),
        "counts": counted.rows(),
    }
