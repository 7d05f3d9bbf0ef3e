"""Ranks for tests: processes that run functions of (rank, size) in a gloo group, and how they compare with one process.

The whole problem is made on every rank from a seed and computed there by one process; the rank's call must give its rows of that.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tiled_attention as ta
from tiled_attention.distributed import ring_attention
from tiled_attention.distributed.layout import lengths_of, runs_of

CASES: dict[str, Callable[[int, int], None]] = {}
NAMES = ("query", "key", "value", "bias", "alibi_slopes", "sinks")


def case(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[function.__name__] = function
    return function


def problem(seqlen_q: int, seqlen_kv: int, *, batch=(2,), heads=(4, 2), dims=(16, 8), dtype=torch.float64, seed=0) -> list[Tensor]:
    gen = torch.Generator().manual_seed(seed)
    shapes = ((heads[0], seqlen_q, dims[0]), (heads[1], seqlen_kv, dims[0]), (heads[1], seqlen_kv, dims[1]))
    return [torch.randn(*batch, *shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


def rows_of(x: Tensor, rank: int, lengths: tuple[int, ...], layout: str, dim: int = -2) -> Tensor:
    runs = runs_of(lengths, layout, "x")[rank]
    return torch.cat([x.narrow(dim, run.begin, run.end - run.begin) for run in runs] or [x.narrow(dim, 0, 0)], dim)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def compare(
    rank: int,
    size: int,
    tensors: list[Tensor],
    *,
    layout: str = "contiguous",
    method: str = "ring",
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    by_rows: dict[str, Tensor] | None = None,
    seed: int | None = None,
    tolerance: float = 1e-12,
    with_lse: bool = True,
    **options: Any,
) -> None:
    """The rows and gradients of this rank beside those of one process. `by_rows`: a mask or bias whose rows are divided too."""
    query, key, value = tensors
    lengths = lengths or (lengths_of(query.shape[-2], size, layout), lengths_of(key.shape[-2], size, layout))
    whole = dict(zip(NAMES, map(leaf, tensors)))
    mine = {name: leaf(rows_of(x, rank, lengths[name != "query"], layout)) for name, x in whole.items()}
    shared, shared_whole = {}, {}
    for name in ("bias", "alibi_slopes", "sinks"):
        if isinstance(options.get(name), Tensor):
            shared_whole[name], shared[name] = leaf(options[name]), leaf(options.pop(name))
    for name, x in (by_rows or {}).items():
        part = rows_of(x, rank, lengths[0], layout)
        if x.dtype != torch.bool:
            shared_whole[name], mine[name] = leaf(x), leaf(part)
        else:
            options[name] = x
    mask = options.pop("mask", None)
    local_mask = rows_of(mask, rank, lengths[0], layout) if by_rows and "mask" in by_rows else mask
    if callable(mask) and not isinstance(mask, (Tensor, ta.Mask)):
        local_mask, mask = mask(lambda x: rows_of(x, rank, lengths[0], layout)), mask(lambda x: x)
    if seed is not None:
        torch.manual_seed(seed)
    out, lse = ta.attention(*list(whole.values()), mask=mask, return_lse=True, **shared_whole, **options)
    if seed is not None:
        torch.manual_seed(seed)
    ours, our_lse = ring_attention(
        mine["query"],
        mine["key"],
        mine["value"],
        mask=local_mask,
        layout=layout,
        method=method,
        return_lse=True,
        **{name: x for name, x in mine.items() if name not in NAMES[:3]},
        **shared,
        **options,
    )
    gen = torch.Generator().manual_seed(7)
    grad_out = torch.randn(out.shape, generator=gen, dtype=torch.float64).to(out.dtype)
    grad_lse = torch.randn(lse.shape, generator=gen, dtype=torch.float64).to(lse.dtype) * with_lse
    grad_lse = torch.where(lse.detach() == -math.inf, 0.0, grad_lse)
    for x, y in ((out, ours), (lse[..., None], our_lse[..., None])):
        close(y, rows_of(x, rank, lengths[0], layout), tolerance, "out or lse")
    roots, ups = ([out, lse], [grad_out, grad_lse]) if with_lse else ([out], [grad_out])
    torch.autograd.backward(roots, ups)
    local = [rows_of(grad_out, rank, lengths[0], layout), rows_of(grad_lse[..., None], rank, lengths[0], layout)[..., 0]]
    torch.autograd.backward([ours, our_lse][: len(roots)], local[: len(roots)])
    for name, x in mine.items():
        want = (whole | shared_whole)[name].grad
        close(x.grad, rows_of(want, rank, lengths[name not in ("query", "bias")], layout), tolerance, name)
    for name, x in shared.items():
        grad = x.grad.clone()
        dist.all_reduce(grad)
        close(grad, shared_whole[name].grad, tolerance, name)


def close(got: Tensor | None, want: Tensor, tolerance: float, name: str) -> None:
    assert got is not None, f"{name}: no gradient"
    assert got.shape == want.shape and got.dtype == want.dtype, (
        f"{name}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    )
    same = (got == want) | (got.isnan() & want.isnan())
    got, want = got.detach(), want.detach()
    error = torch.where(same, 0.0, (got - want).abs().double())
    scale = max(1.0, float(want[want.isfinite()].abs().max()) if want.numel() and bool(want.isfinite().any()) else 1.0)
    assert not error.numel() or float(error.max()) <= tolerance * scale, (
        f"{name}: off by {float(error.max()):.3g} at a scale of {scale:.3g}"
    )


def rms(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).square().mean().sqrt())


@contextlib.contextmanager
def raises(kind: type[Exception], text: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert text in str(error), f"{error!r} without {text!r}"
        return
    raise AssertionError(f"no {kind.__name__} with {text!r}")


class Counted:
    """Bytes that this rank sends, the agreement of ranks apart."""

    def __init__(self) -> None:
        self.sent = 0

    def __enter__(self) -> "Counted":
        self._real = dist.batch_isend_irecv

        def counting(ops: list[Any]) -> Any:
            self.sent += sum(
                op.tensor.numel() * op.tensor.element_size() for op in ops if op.op is dist.isend and op.tensor.dtype != torch.uint8
            )
            return self._real(ops)

        dist.batch_isend_irecv = counting
        return self

    def __exit__(self, *_: Any) -> None:
        dist.batch_isend_irecv = self._real


def run(rank: int, size: int, folder: str, names: list[str]) -> int:
    """In a child: the exit code. What fails is written to RANK.json."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
    for name in names:
        try:
            CASES[name](rank, size)
        except Exception:
            (Path(folder) / f"{rank}.json").write_text(json.dumps({name: traceback.format_exc()}))
            return 1  # the others may wait for messages that this rank never sent
    dist.barrier()
    dist.destroy_process_group()
    return 0


def start(size: int, names: list[str]) -> dict[int, dict[str, str]]:
    """What failed, by rank and case. Forks, so that torch is imported once; the first failure ends all of them a little later."""
    with tempfile.TemporaryDirectory() as folder:
        children: dict[int, int] = {}
        for rank in range(size):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = run(rank, size, folder, names)
                finally:
                    os._exit(code)
            children[child] = rank
        codes: dict[int, int] = {}
        deadline = math.inf
        while children:
            for child in list(children):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
            if any(codes.values()) and deadline == math.inf:
                deadline = time.monotonic() + 5
            time.sleep(0.02)
        found = {rank: Path(folder) / f"{rank}.json" for rank in range(size)}
        failed = {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}
        return failed or {rank: {"exit code": str(code)} for rank, code in codes.items() if code}


def failures(script: str, size: int, names: tuple[str, ...] = ()) -> str:
    """Runs `script`, which calls `main`, and returns what failed as text."""
    command = [sys.executable, str(Path(__file__).parent / script), str(size), *names]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done.stdout + done.stderr if done.returncode else ""


def main() -> None:
    """`SIZE [CASE ...]`; without cases all of them, but for those that are named with a leading underscore."""
    size, names = int(sys.argv[1]), sys.argv[2:]
    failed = start(size, names or [name for name in CASES if name[0] != "_"])
    for rank, cases in failed.items():
        for name, text in cases.items():
            print(f"rank {rank} of {size}, {name}:\n{text}")
    sys.exit(bool(failed))
