"""Step of linear attention: parity with its definition, speed and memory against the composite, SDPA and exact attention, decoding."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import tiled_attention as ta

from .. import linear_testing
from ..library import ops
from ..linear_testing import LinearCase
from ..testing import DTYPES
from . import favor, linear_peers
from .machine import PEAK_CODES, dtype_name, free_bytes, pinned
from .memory import in_fresh_process
from .speed import DIRECTIONS, directed, math_bytes
from .text import Missing
from .timing import alternate

NUM_HEADS, HEAD_DIM = 8, 64
VARIANTS = ("causal", "not causal", "decay per token", "decay per feature")
MEMORY = ("linear", "chunked", "sdpa")
POSITIONS = (256, 1024, 4096, 16384)

Advance = Callable[[str], None]
Calls = dict[str, Callable[[], torch.Tensor]]


def cases(n: int) -> dict[str, dict[str, Any]]:
    """What differs from causal linear attention over n tokens, by the name of the case."""
    return {
        "causal": {},
        "not causal": {"causal": False},
        "fewer queries than keys, not causal": {"causal": False, "seqlen_kv": n + 37},
        "key mask": {"masked": 0.3},
        "key mask, NaN in hidden keys": {"masked": 0.3, "hidden": float("nan")},
        "relu": {"feature_map": "relu"},
        "exp": {"feature_map": "exp"},
        "identity, not normalised": {"feature_map": "identity", "normalize": False, "scale": 0.125},
        "state in and out": {"state": True},
        "decay per token, with resets": {"decay": "token", "resets": True, "state": True},
        "decay per feature, with resets": {"decay": "feature", "resets": True, "state": True},
        "grouped heads": {"num_heads_kv": 2, "state": True},
        "value narrower": {"head_dim_v": 20},
        "(batch, seqlen, heads, dim)": {"layout": "heads_last"},
    }


def parity(sizes: Sequence[int], advance: Advance) -> list[dict[str, Any]]:
    """One row per tensor of each case and dtype."""
    rows = []
    for n in sizes:
        for dtype in DTYPES:
            for name, options in cases(n).items():
                case = LinearCase(num_heads=4, seqlen_q=n, head_dim=32, dtype=dtype).replace(**options)
                for row in linear_testing.compare(case, functools.partial(ta.linear_attention, return_state=True)):
                    rows.append(
                        {
                            "case": name,
                            "id": case.id,
                            "dtype": dtype_name(dtype),
                            "tensor": row.name if row.name.startswith(("out", "final")) else f"grad_{row.name}",
                            "tiled": row.error,
                            "definition": row.definition_error,
                            "limit": row.limit,
                            "passed": row.error <= row.limit,
                        }
                    )
                advance(f"linear, {dtype_name(dtype)}, {name}")
    return rows


def _calls(variant: str, n: int, dtype: torch.dtype) -> tuple[Calls, list[torch.Tensor]]:
    query, key, value = (torch.randn(1, NUM_HEADS, n, HEAD_DIM).to(dtype).requires_grad_() for _ in range(3))
    causal = variant != "not causal"
    shape = {"decay per token": (1, NUM_HEADS, n), "decay per feature": (1, NUM_HEADS, n, HEAD_DIM)}.get(variant)
    log_decay = None if shape is None else -0.02 * torch.rand(shape)
    calls: Calls = {"linear": lambda: ta.linear_attention(query, key, value, causal=causal, log_decay=log_decay)}
    if log_decay is None:
        composite = linear_peers.chunked if causal else linear_peers.two_products
        calls["composite"] = lambda: composite(query, key, value)
        calls["sdpa"] = lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        calls["exact"] = lambda: ta.attention(query, key, value, mask=ta.Causal() if causal else None)
    return calls, [query, key, value]


def speed(
    plan: Sequence[tuple[torch.dtype, str, int]], threads: int, seconds: float, slowest: float, advance: Advance
) -> list[dict[str, Any]]:
    """Rows for each (dtype, variant, length) of the plan, lengths increasing, forward and forward+backward.

    A peer whose last time, scaled by the square of the length, passes `slowest` seconds is left out.
    """
    rows = []
    last: dict[tuple[Any, ...], tuple[int, float]] = {}
    with pinned(threads):
        for dtype, variant, n in plan:
            calls, leaves = _calls(variant, n, dtype)
            for direction in DIRECTIONS:
                chosen: dict[str, Callable[[], object]] = dict(directed(calls, leaves, direction))
                for name in [name for name in chosen if name != "linear"]:
                    length, before = last.get((dtype, variant, direction, name), (n, 0.0))
                    if before * (n / length) ** 2 > slowest:
                        del chosen[name]
                found = alternate(chosen, seconds=seconds)
                last |= {(dtype, variant, direction, name): (n, value) for name, value in found.items()}
                case = LinearCase(batch=(1,), num_heads=NUM_HEADS, seqlen_q=n, head_dim=HEAD_DIM, causal=variant != "not causal")
                flops = case.flops() + (case.flops(backward=True) if direction != "forward" else 0)
                peak = float(ops._peak(PEAK_CODES[torch.float64 if dtype == torch.float64 else torch.float32])) * threads * 1e9
                row: dict[str, Any] = {"variant": variant, "dtype": dtype_name(dtype), "n": n, "direction": direction, "seconds": found}
                for name in ("composite", "sdpa", "exact"):
                    row[f"{name}_ratio"] = found[name] / found["linear"] if name in found else None
                rows.append(row | {"share_of_peak": flops / found["linear"] / peak if variant in VARIANTS[:2] else None})
                advance(f"linear, {dtype_name(dtype)}, {variant}, n = {n}")
    return rows


def crossover(rows: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    """The first length from which causal linear attention is faster than our exact causal attention, by direction; float32."""
    found: dict[str, int | None] = {}
    for direction in DIRECTIONS:
        chosen = [row for row in rows if (row["variant"], row["dtype"], row["direction"]) == ("causal", "float32", direction)]
        slower = [row["n"] for row in chosen if row["exact_ratio"] is not None and row["exact_ratio"] < 1]
        faster = [row["n"] for row in chosen if row["exact_ratio"] is not None and row["n"] > max(slower, default=0)]
        found[direction] = min(faster, default=None)
    return found


def memory(sizes: Sequence[int], threads: int, advance: Advance) -> list[dict[str, Any]]:
    """Peak beyond the inputs, causal, forward+backward, one head."""
    rows = []
    for n in sizes:
        for implementation in MEMORY:
            row: dict[str, Any] = {"implementation": implementation, "n": n, "bytes": None, "seconds": None}
            if math_bytes(n, 1, 4) < free_bytes() or implementation != "sdpa":
                row |= in_fresh_process(implementation=implementation, n=n, threads=threads)
            rows.append(row)
            advance(f"linear, n = {n}, {implementation}")
    return rows


def decode(positions: Sequence[int], threads: int, seconds: float, advance: Advance) -> list[dict[str, Any]]:
    """One token after so many: time and bytes kept, of the step and of exact attention over all keys and values so far."""
    rows = []
    with pinned(threads), torch.no_grad():
        for position in positions:
            query, key, value = (torch.randn(1, NUM_HEADS, 1, HEAD_DIM) for _ in range(3))
            keys, values = (torch.randn(1, NUM_HEADS, position, HEAD_DIM) for _ in range(2))
            _, state = ta.linear_attention(keys, keys, values, causal=True, return_state=True)
            calls: dict[str, Callable[[], object]] = {
                "linear": functools.partial(ta.linear_attention_step, query, key, value, state, inplace=True),
                "exact": functools.partial(ta.attention, query, keys, values),
            }
            kept = {"linear": sum(part.nbytes for part in state), "exact": keys.nbytes + values.nbytes}
            rows.append({"position": position, "seconds": alternate(calls, seconds=seconds), "bytes": kept})
            advance(f"linear, decoding at {position}")
    return rows


def steps(parity_sizes: Sequence[int], plan: Sequence[Any], memory_sizes: Sequence[int], favor_steps: int) -> int:
    """How often `run` reports."""
    found = len(parity_sizes) * len(DTYPES) * len(cases(1)) + len(plan) * len(DIRECTIONS)
    return found + len(memory_sizes) * len(MEMORY) + len(POSITIONS) + favor_steps


def run(
    parity_sizes: Sequence[int],
    plan: Sequence[tuple[torch.dtype, str, int]],
    memory_sizes: Sequence[int],
    threads: int,
    seconds: float,
    slowest: float,
    features: dict[str, Any],
    advance: Advance,
) -> dict[str, Any]:
    """All of it; `features`: the arguments of favor.sentence_encoder."""
    rows = speed(plan, threads, seconds, slowest, advance)
    found = {
        "num_heads": NUM_HEADS,
        "head_dim": HEAD_DIM,
        "parity": parity(parity_sizes, advance),
        "speed": rows,
        "crossover": crossover(rows),
        "memory": memory(memory_sizes, threads, advance),
        "decode": decode(POSITIONS, threads, seconds, advance),
    }
    try:
        found["favor"] = favor.sentence_encoder(advance=advance, **features)
    except Missing as missing:
        found["favor"] = {"missing": str(missing)}
    return found
