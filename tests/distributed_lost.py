"""Three ranks, of which rank 1 gets lost, in several ways: `python tests/distributed_lost.py`. Exits with 0 where the others name it."""

import contextlib
import os
import re
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from distributed_ranks import leaf, problem
from tiled_attention.distributed import ring_attention, shard_sequence

SIZE, LOST, TIMEOUT = 3, 1, 2.0
WAYS = ("absent", "gone", "silent")


def run(rank: int, folder: str, how: str) -> bool:
    """Whether this rank did what it should."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", SIZE), rank=rank, world_size=SIZE)
    query, key, value = (leaf(shard_sequence(x)) for x in problem(48, 48))
    dist.barrier()
    if rank == LOST and how == "absent":
        time.sleep(2 * TIMEOUT)
        return True
    begin = time.monotonic()
    error = ""
    try:
        out = ring_attention(query, key, value, timeout=TIMEOUT)
        if rank == LOST and how == "gone":
            return True
        if rank == LOST:
            time.sleep(2 * TIMEOUT)
            return True
        out.sum().backward()
    except RuntimeError as caught:
        error = str(caught)
    waited = time.monotonic() - begin
    print(f"rank {rank}, {how}, after {waited:.1f} s: {error}", flush=True)
    # Where it is lost in the middle, a rank that waits for another one that waits names that one.
    names = {f"rank {LOST}"} if how == "absent" else {f"rank {other}" for other in range(SIZE) if other != rank}
    said = re.match(r"(rank \d)\b.* (did not answer within 2.0 s: it is lost, or waits|is lost: .*[Cc]onnection)", error)
    return said is not None and any(name in said[0] for name in names) and waited < 60


def main() -> None:
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        children = []
        for how in WAYS:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            for rank in range(SIZE):
                child = os.fork()
                if child == 0:
                    good = False
                    try:
                        good = run(rank, folder, how)
                    finally:
                        os._exit(0 if good else 1)
                children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(codes)
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
