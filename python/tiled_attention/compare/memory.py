"""Step 3, memory: peak extra memory of one head, each measurement in a fresh process.

Run as a program it is that process: `python -m tiled_attention.compare.memory '{"implementation": "tiled", "n": 4096, ...}'`.
"""

import contextlib
import json
import math
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import tiled_attention as ta

from . import linear_peers, scores
from .machine import free_bytes
from .speed import math_bytes, naive_attention

IMPLEMENTATIONS = ("tiled", "sdpa", "math")
HEAD_DIM = 64
QUOTED_SEQLEN = 4096

Advance = Callable[[str], None]


def _resident(name: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    match = re.search(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match.group(1)) * 1024


def peak() -> int:
    """The most resident memory so far, in bytes."""
    with contextlib.suppress(OSError, AssertionError):
        return _resident("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def baseline() -> int:
    """The resident memory now, from which the peak counts anew where the system allows that."""
    with contextlib.suppress(OSError, AssertionError):
        Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmRSS")
    return peak()


def measure(
    implementation: str,
    n: int,
    *,
    num_heads: int = 1,
    head_dim: int = HEAD_DIM,
    dtype: str = "float32",
    backward: bool = True,
    dropout_p: float = 0.0,
    bias: bool = False,
    need_weights: bool | None = None,
    threads: int = 2,
    timed_calls: int = 3,
) -> dict[str, float]:
    """{"bytes", "seconds"} of one call in this process: the peak beyond the inputs (and grad_out), and the median time of
    `timed_calls` more.

    implementation: tiled, sdpa or math; or module, ta.MultiheadAttention of embed_dim num_heads * head_dim with need_weights; or linear,
    causal ta.linear_attention, and chunked, the same by linear_peers.chunked; or additive, ta.additive_attention, and additive composite,
    the same by scores.additive_composite.
    """
    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)

    def make(length: int) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor]:
        tensors = [torch.randn(1, num_heads, length, head_dim).to(kind).requires_grad_(backward) for _ in range(3)]
        extra = torch.randn(num_heads, length, length).to(kind).requires_grad_(backward) if bias else None
        return tensors, extra, torch.randn(1, num_heads, length, head_dim).to(kind)

    module = ta.MultiheadAttention(num_heads * head_dim, num_heads, batch_first=True, dtype=kind) if implementation == "module" else None

    def call(tensors: list[torch.Tensor], extra: torch.Tensor | None, grad_out: torch.Tensor) -> None:
        if module is not None:
            x = tensors[0].detach().view(1, -1, num_heads * head_dim)
            with torch.no_grad():
                module.eval()(x, x, x, need_weights=bool(need_weights))
            return
        query, key, value = tensors
        out: Any
        if implementation == "tiled":
            out = ta.attention(query, key, value, bias=extra, dropout_p=dropout_p)
        elif implementation == "linear":
            out = ta.linear_attention(query, key, value, causal=True)
        elif implementation == "chunked":
            out = linear_peers.chunked(query, key, value)
        elif implementation.startswith("additive"):
            function: Any = ta.additive_attention if implementation == "additive" else scores.additive_composite
            out = function(query, key, value, torch.ones(head_dim, dtype=kind))
        elif implementation == "sdpa":
            out = F.scaled_dot_product_attention(query, key, value, extra, dropout_p)
        else:
            out = naive_attention(query, key, value, bias=extra, dropout_p=dropout_p)
        if backward:
            torch.autograd.grad(out, [*tensors, *([extra] if extra is not None else [])], grad_out)

    call(*make(32))
    problem = make(n)
    base = baseline()
    call(*problem)
    extra_bytes = peak() - base
    seconds = []
    for _ in range(timed_calls):
        start = time.perf_counter()
        call(*problem)
        seconds.append(time.perf_counter() - start)
    return {"bytes": max(0, extra_bytes), "seconds": statistics.median(seconds) if seconds else math.nan}


def in_fresh_process(**options: Any) -> dict[str, float]:
    """`measure(**options)` in a process of its own."""
    command = [sys.executable, "-m", "tiled_attention.compare.memory", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring memory with {options} failed with code {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run(sizes: Sequence[int], threads: int, advance: Advance) -> dict[str, Any]:
    """Rows {implementation, n, bytes, seconds, stopped}; `quoted` is the line at n = 4096 when that is one of the sizes."""
    rows: list[dict[str, Any]] = []
    for n in sizes:
        for implementation in IMPLEMENTATIONS:
            row: dict[str, Any] = {"implementation": implementation, "n": n, "bytes": None, "seconds": None, "stopped": None}
            need, free = math_bytes(n, 1, 4), free_bytes()
            if implementation == "math" and need > free / 2:
                row["stopped"] = f"needs {need / 2**20:.0f} MiB, more than half of the {free / 2**20:.0f} MiB that are free"
            else:
                row |= in_fresh_process(implementation=implementation, n=n, threads=threads)
            rows.append(row)
            advance(f"n = {n}, {implementation}")
    return {"head_dim": HEAD_DIM, "dtype": "float32", "direction": "forward+backward", "rows": rows, "quoted": _quoted(rows)}


def _quoted(rows: list[dict[str, Any]]) -> str | None:
    found = {row["implementation"]: row for row in rows if row["n"] == QUOTED_SEQLEN and row["bytes"] is not None}
    if "tiled" not in found or "math" not in found:
        return None
    tiled, naive = found["tiled"], found["math"]
    return (
        f"n = {QUOTED_SEQLEN}, one head of {HEAD_DIM}, float32, forward+backward: tiled {tiled['seconds'] * 1e3:.0f} ms and "
        f"{tiled['bytes'] / 2**20:.1f} MiB, naive {naive['seconds'] * 1e3:.0f} ms and {naive['bytes'] / 2**20:.1f} MiB: "
        f"{naive['seconds'] / tiled['seconds']:.1f}x the speed in {tiled['bytes'] / max(naive['bytes'], 1):.3f} of the memory"
    )


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
