"""Ring attention on local ranks beside one process: error, memory, bytes sent, work and time.

`python benchmarks/distributed.py [--ranks 4] [--n 8192] [--dtype float32] [--method ring] [--layout zigzag]`, forward and backward, causal,
gloo. Ranks are forked from one process that has imported torch, each with one thread. Memory is the most resident memory of a rank
above what it held with the group set up and a small call made; that of one process is measured the same way, in a process of its own. Its
limit is that of one process divided by the ranks, two shards of keys and values, two of their gradients, and 10 %. The exit code is 1 where
an error is more than twice that of one process or of rounding, or a ring takes more memory than its limit.
"""

import argparse
import contextlib
import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tiled_attention as ta
from tiled_attention.compare.memory import baseline, peak
from tiled_attention.distributed import gather_sequence, ring_attention, shard_sequence
from tiled_attention.distributed.layout import lengths_of, runs_of

M_MMAP_THRESHOLD = -3  # of malloc.h


def inputs(options: argparse.Namespace, part: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
    """query, key and value, and grad_out; only `part` of each is kept."""
    gen = torch.Generator().manual_seed(0)

    def make(heads: int) -> Tensor:
        # By heads: no rank ever holds the whole.
        rows = (part(torch.randn(1, 1, options.n, options.head_dim, generator=gen)) for _ in range(heads))
        return torch.cat([*rows], 1).to(getattr(torch, options.dtype))

    tensors = [make(options.heads), make(options.heads_kv), make(options.heads_kv)]
    return [x.requires_grad_() for x in tensors], make(options.heads)


def measured(
    options: argparse.Namespace, part: Callable[[Tensor], Tensor], attend: Callable[..., Tensor]
) -> tuple[dict[str, float], list[Tensor]]:
    small = argparse.Namespace(**{**vars(options), "n": 64 * options.ranks})
    warm, grad = inputs(small, part)
    attend(*warm).backward(grad)
    base = baseline()
    tensors, grad_out = inputs(options, part)
    sent = [0]
    real = dist.batch_isend_irecv

    def counting(ops: list[Any]) -> Any:
        sent[0] += sum(op.tensor.numel() * op.tensor.element_size() for op in ops if op.op is dist.isend)
        return real(ops)

    dist.batch_isend_irecv = counting  # type: ignore[assignment]
    begin = time.perf_counter()
    out = attend(*tensors)
    out.backward(grad_out)
    seconds = time.perf_counter() - begin
    dist.batch_isend_irecv = real
    found: dict[str, float] = {"bytes": peak() - base, "seconds": seconds, "sent": sent[0]}
    return found, [out.detach(), *(x.grad for x in tensors if x.grad is not None)]


def one(options: argparse.Namespace, folder: Path) -> None:
    def attend(*tensors: Tensor) -> Tensor:
        return ta.attention(*tensors, mask=ta.Causal())

    found, results = measured(options, lambda x: x, attend)
    torch.save(results, folder / "one.pt")
    (folder / "one.json").write_text(json.dumps(found))


def exact(options: argparse.Namespace, folder: Path) -> None:
    tensors, grad_out = inputs(options, lambda x: x)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    out = ta.attention(*wide, mask=ta.Causal())
    out.backward(grad_out.double())
    torch.save([out.detach(), *(x.grad for x in wide)], folder / "exact.pt")


def rank_of(options: argparse.Namespace, folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), options.ranks), rank=rank, world_size=options.ranks)

    def attend(*tensors: Tensor) -> Tensor:
        return ring_attention(*tensors, mask=ta.Causal(), layout=options.layout, method=options.method)

    found, results = measured(options, lambda x: shard_sequence(x, layout=options.layout), attend)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    whole = [gather_sequence(x, layout=options.layout) for x in results]
    if rank == 0:
        torch.save(whole, folder / "ranks.pt")
    dist.barrier()
    dist.destroy_process_group()


def forked(*functions: Callable[[], None]) -> None:
    children = []
    for function in functions:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                function()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit("a process failed")


def rms(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).square().mean().sqrt())


def work(options: argparse.Namespace) -> list[int]:
    """Visible pairs of each rank, causal."""
    lengths = lengths_of(options.n, options.ranks, options.layout)
    held = runs_of(lengths, options.layout, "query")
    return [sum((run.begin + run.end + 1) * (run.end - run.begin) // 2 for run in runs) for runs in held]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--heads-kv", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--layout", choices=("contiguous", "zigzag"), default="zigzag")
    parser.add_argument("--method", choices=("ring", "all_to_all", "auto"), default="ring")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    with contextlib.suppress(OSError, AttributeError):  # glibc gives what is freed back at once: resident memory is then what is in use
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        forked(lambda: one(options, folder))
        forked(*(lambda rank=rank: rank_of(options, folder, rank) for rank in range(options.ranks)))
        forked(lambda: exact(options, folder))
        alone = json.loads((folder / "one.json").read_text())
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(options.ranks)]
        results = [torch.load(folder / f"{kind}.pt") for kind in ("exact", "one", "ranks")]
    errors = {}
    for what, want, single, ours in zip(("out", "grad_query", "grad_key", "grad_value"), *results, strict=True):
        errors[what] = {"one": rms(want, single), "ranks": rms(want, ours), "rounding": rms(want, want.to(dtype))}
    shard = options.heads_kv * options.n / options.ranks * options.head_dim * 2 * dtype.itemsize
    gradient = shard * max(4, dtype.itemsize) / dtype.itemsize
    limit = 1.1 * (alone["bytes"] / options.ranks + 2 * shard + 2 * gradient)
    pairs = work(options)
    mean = sum(pairs) / options.ranks
    mib = 2**20
    print(
        f"{options.ranks} ranks, n {options.n}, {options.heads} heads ({options.heads_kv} of keys) of {options.head_dim}, {options.dtype}, "
        f"{options.layout}, {options.method}, causal, forward and backward"
    )
    print(f"{'':12}{'one process':>14}{'ranks':>14}{'rounding':>14}   root mean square error against float64")
    for what, error in errors.items():
        print(f"{what:12}{error['one']:14.3g}{error['ranks']:14.3g}{error['rounding']:14.3g}")
    peaks = [found["bytes"] for found in ranks]
    seconds = max(found["seconds"] for found in ranks)

    def listed(values: list[float], digits: int) -> str:
        return ", ".join(f"{value:.{digits}f}" for value in values)

    print(f"memory      {alone['bytes'] / mib:.1f} MiB in one process")
    print(f"            {listed([x / mib for x in peaks], 1)} MiB in the ranks, limit {limit / mib:.1f}")
    print(f"sent        {listed([found['sent'] / mib for found in ranks], 2)} MiB")
    print(f"work        {listed([count / mean for count in pairs], 3)} of the mean")
    print(f"time        {alone['seconds']:.2f} s in one process, {seconds:.2f} s in the ranks, one thread each")
    good = (max(peaks) <= limit or options.method != "ring") and all(
        error["ranks"] <= 2 * max(error["one"], error["rounding"]) for error in errors.values()
    )
    if options.json:
        rows = {"options": {**vars(options), "json": None}, "errors": errors, "one": alone, "ranks": ranks, "limit": limit, "pairs": pairs}
        options.json.write_text(json.dumps(rows, indent=1))
    sys.exit(not good)


if __name__ == "__main__":
    main()
