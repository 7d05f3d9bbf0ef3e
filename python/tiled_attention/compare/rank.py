"""The program of one rank: `python -m tiled_attention.compare.rank JOB FOLDER`, which torchrun starts; without it, the one process.

JOB, as JSON: threads, timeout (seconds that a rank waits for another before it is lost), parity (a length, or null: the calls of
`sharded.cases` are made, and their results written), measured (rows of operator, n: memory, time and traffic of one call).
FOLDER receives `RANK.pt`, the results of this rank: parity, a list of tensors by name, and measured, the rows with what was found.
"""

import contextlib
import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

import tiled_attention as ta

from . import sharded
from .memory import baseline, peak
from .ranks import sent_bytes

MEASURED_HEADS, MEASURED_DIM = 4, 64
TIMED_CALLS = 3
SMALL = 64  # positions of a rank in the call that warms up
# glibc, malloc.h and malloc/malloc.c: the bounds of the block size from which memory is mapped for itself
M_MMAP_THRESHOLD, LEAST_KEPT, MOST_KEPT = -3, 2**17, 2**25


def _meet(timeout: timedelta) -> None:
    """Waits for all ranks; rank 0 names the ones that do not come."""
    if dist.is_initialized():
        dist.monitored_barrier(timeout=timeout, wait_all_ranks=True)


def _call(operator: str, leaves: Sequence[Tensor]) -> Tensor:
    found: Any
    if operator == "linear":
        linear = ta.distributed.linear_attention if dist.is_initialized() else ta.linear_attention
        found = linear(*leaves, causal=True)
    elif dist.is_initialized():
        found = ta.distributed.ring_attention(*leaves, mask=ta.Causal(), layout="zigzag")
    else:
        found = ta.attention(*leaves, mask=ta.Causal())
    return found


def _leaves(rows: int) -> list[Tensor]:
    """query, key, value and grad_out, (1, MEASURED_HEADS, rows, MEASURED_DIM) float32."""
    return [torch.randn(1, MEASURED_HEADS, rows, MEASURED_DIM).requires_grad_(index < 3) for index in range(4)]


def _keep_freed_memory(keep: bool) -> None:
    """Whether the C library keeps what is freed, as it learns to do with large blocks, or gives it back at once; glibc's alone is told."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, MOST_KEPT if keep else LEAST_KEPT)
        library.malloc_trim(0)


def measure(operator: str, n: int, timeout: timedelta) -> dict[str, Any]:
    """One call over n positions, forward and backward, causal, float32: of this rank's part of them, or of all.

    bytes: the most that this process held above what it held before its inputs existed; inputs, grad_out, out and gradients are in it.
    seconds: of forward and backward, TIMED_CALLS times. sent: bytes to other ranks, of the two directions, or None.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1

    def step(leaves: Sequence[Tensor]) -> tuple[int | None, int | None]:
        before = sent_bytes()
        out = _call(operator, leaves[:3])
        _meet(timeout)
        between = sent_bytes()
        torch.autograd.grad(out, leaves[:3], leaves[3])
        _meet(timeout)
        after = sent_bytes()
        if before is None or between is None or after is None:
            return None, None
        return between - before, after - between

    step(_leaves(SMALL))
    _keep_freed_memory(False)
    _meet(timeout)
    before = baseline()
    leaves = _leaves(n // num_ranks)
    sent = step(leaves)
    extra_bytes = peak() - before
    _keep_freed_memory(True)
    seconds = []
    for _ in range(TIMED_CALLS):
        _meet(timeout)
        start = time.perf_counter()
        torch.autograd.grad(_call(operator, leaves[:3]), leaves[:3], leaves[3])
        seconds.append(time.perf_counter() - start)
    return {"bytes": extra_bytes, "seconds": seconds, "sent": dict(zip(("forward", "backward"), sent))}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The job, in a process whose group of ranks is up, if there is one."""
    torch.set_num_threads(job["threads"])
    timeout = timedelta(seconds=job["timeout"])
    found: dict[str, Any] = {"parity": [], "measured": []}
    for row in job["measured"]:
        found["measured"].append(row | measure(row["operator"], row["n"], timeout))
    if job["parity"]:
        for case in sharded.cases(job["parity"], dist.get_world_size()):
            _meet(timeout)
            found["parity"].append(sharded.shared(case))
    return found


@record
def main(arguments: Sequence[str]) -> None:
    """Runs the job of the command line."""
    job, folder = json.loads(arguments[0]), Path(arguments[1])
    if "RANK" not in os.environ:
        torch.save(run(job), folder / "0.pt")
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=job["timeout"]))
    torch.save(run(job), folder / f"{dist.get_rank()}.pt")
    _meet(timedelta(seconds=job["timeout"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
