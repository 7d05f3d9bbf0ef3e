"""Times of several implementations of one thing, taken alternately in one process."""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

# A shorter call is repeated inside one sample, so that the clock's own cost disappears.
MIN_SAMPLE_SECONDS = 1e-3


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _repeats(call: Callable[[], object]) -> int:
    """How often a call runs in one sample; warms it up as well."""
    seconds = _seconds(call)
    if seconds < 10 * MIN_SAMPLE_SECONDS:
        seconds = _seconds(call)
    return max(1, round(MIN_SAMPLE_SECONDS / max(seconds, 1e-7)))


def alternate(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 30,
    seconds: float = 1.0,
    min_rounds: int = 3,
    inside: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
) -> dict[str, float]:
    """Median seconds of each call.

    Every round times each call once, in an order that rotates from round to round. At most `rounds` rounds, and none is started after
    `seconds` once `min_rounds` are done. The first, untimed round warms up and sets how often a short call repeats inside one sample.
    A call named in `inside` runs inside that context, whose entry and exit are not timed.
    """
    names = list(calls)
    contexts = {name: (inside or {}).get(name, contextlib.nullcontext) for name in names}
    repeats = {}
    for name in names:
        with contexts[name]():
            repeats[name] = _repeats(calls[name])
    samples: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    for index in range(rounds):
        if index >= min_rounds and time.perf_counter() - begin > seconds:
            break
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            call, repeat = calls[name], repeats[name]
            with contexts[name]():
                start = time.perf_counter()
                for _ in range(repeat):
                    call()
                samples[name].append((time.perf_counter() - start) / repeat)
    return {name: statistics.median(values) for name, values in samples.items()}


def attention_flops(visible_pairs: float, head_dim: int, head_dim_v: int, *, forward: bool = True, backward: bool = False) -> float:
    """Operations of attention over `visible_pairs` (query, key) pairs of all heads: a multiply-add counts 2.

    Forward: scores and output. Backward: scores again, and the gradients of value, weights, query and key. The softmax is not counted.
    """
    products = (head_dim + head_dim_v if forward else 0) + (3 * head_dim + 2 * head_dim_v if backward else 0)
    return 2.0 * visible_pairs * products
