"""`compare --distributed N`: attention over sequences that N ranks share, beside one process: results, memory, time, traffic."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..library import ops
from ..testing import largest
from . import parity, sharded
from .machine import dtype_name
from .rank import MEASURED_DIM, MEASURED_HEADS
from .ranks import launch

SMALL_PARITY, FULL_PARITY = 131, 517  # shards of different lengths
SMALL_MEASURED, FULL_MEASURED = (1024,), (2048, 8192)
OPERATORS = ("linear", "ring")
ROUNDINGS = 2.0  # the distance from one process, in roundings of that one
# Memory is judged from here on: the buffers of sockets and threads do not grow with the sequence.
JUDGED_BYTES = 32 * 2**20
MEMORY_SLACK = 1.1
SENT_SLACK, MEETING_BYTES = 1.01, 1024  # headers; and what one rank sends to another to meet
MOST_WORK = 1.05  # causal pairs of a rank over the mean, in zigzag


def problem() -> str | None:
    """Why this torch cannot start ranks, if it cannot."""
    if not dist.is_available() or not dist.is_gloo_available():
        return "this torch is built without torch.distributed and gloo"
    return None


def _on_ranks(job: Mapping[str, Any], num_ranks: int) -> list[dict[str, Any]]:
    """What each rank found."""
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        launch(["-m", f"{__package__}.rank", json.dumps(job), folder], num_ranks, threads=job["threads"])
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(num_ranks)]


def _on_one(job: Mapping[str, Any]) -> dict[str, Any]:
    """The same of one process without ranks."""
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        done = subprocess.run([sys.executable, "-m", f"{__package__}.rank", json.dumps(job), folder], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"one process with {job} failed with code {done.returncode}:\n{done.stderr}")
        return dict(torch.load(Path(folder) / "0.pt", weights_only=True))


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Differences, float64; infinite where the patterns of finite numbers differ, 0 where neither is finite."""
    a, b = a.double(), b.double()
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return torch.full((1,), torch.inf, dtype=torch.float64)
    return torch.where(b.isfinite(), a - b, 0.0)


def _rms(difference: Tensor) -> float:
    return float(difference.square().mean().sqrt()) if difference.numel() else 0.0


def parity_rows(n: int, found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per tensor of each call: how far the ranks are from one process, beside how far that is from float64.

    The root mean square of the distance is judged, and the largest error against float64, as that of one process is in `parity`.
    """
    rows = []
    for index, case in enumerate(sharded.cases(n, len(found))):
        ranks = sharded.whole([part["parity"][index] for part in found])
        one, exact = sharded.alone(case), sharded.alone(case, torch.float64)
        for name, true in exact.items():
            dtype, own = one[name].dtype, _distance(one[name], true)
            allowed = ROUNDINGS * max(_rms(own), _rms(true - true.to(dtype).double()))
            most = parity.limit(dtype, name, true.numpy(), largest(own), str(ops._isa()))
            distance, worst = _rms(_distance(ranks[name], one[name])), largest(_distance(ranks[name], true))
            rows.append(
                {
                    "case": case.name,
                    "dtype": dtype_name(case.case.dtype),
                    "n": n,
                    "tensor": name,
                    "one_process": _rms(own),
                    "tiled": distance,
                    "limit": allowed,
                    "largest": worst,
                    "largest_limit": most,
                    "passed": distance <= allowed and worst <= most,
                }
            )
    return rows


def work_rows(n: int, found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Causal pairs of each rank over their mean, by how the sequence is shared."""
    rows = []
    cases = sharded.cases(n, len(found))
    for name in ("causal", "causal, one piece a rank"):
        index = next(index for index, case in enumerate(cases) if case.name == name)
        pairs = [int((part["parity"][index]["positions"] + 1).sum()) for part in found]
        mean = sum(pairs) / len(pairs)
        shares = [count / mean for count in pairs]
        allowed = max(MOST_WORK, 1 + n / mean)  # a row more, where lengths differ
        passed = max(shares) <= allowed if cases[index].layout == "zigzag" else None
        rows.append({"layout": cases[index].layout, "n": n, "shares": shares, "limit": allowed, "passed": passed})
    return rows


def _traffic(operator: str, n: int, num_ranks: int) -> dict[str, int]:
    """Bytes that all ranks send together, by formula.

    Linear: a state over each boundary. Ring, zigzag: the first half of each of the W shards passes the W - 1 other ranks, and so does the
    second half, but for that of rank 0, which nobody else sees. Gradients follow from the first rank that sees a half: on W - 1 ways for
    the first half, and on r for the second half of rank r.
    """
    if operator == "linear":
        state = MEASURED_HEADS * MEASURED_DIM * (MEASURED_DIM + 1) * 4
        return dict.fromkeys(("forward", "backward"), (num_ranks - 1) * state)
    shard = MEASURED_HEADS * n // num_ranks * 2 * MEASURED_DIM * 4  # keys and values, or their gradients
    keys = (num_ranks - 1) * (2 * num_ranks - 1) * shard // 2
    return {"forward": keys, "backward": keys + num_ranks * (num_ranks - 1) * shard * 3 // 4}


def _sent_rows(operator: str, n: int, ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for direction, formula in _traffic(operator, n, len(ranks)).items():
        counts = [row["sent"][direction] for row in ranks]
        allowed = formula * SENT_SLACK + MEETING_BYTES * len(ranks) * (len(ranks) - 1)
        row = {"operator": operator, "n": n, "direction": direction, "bytes": None if None in counts else counts}
        passed = None if None in counts else formula <= sum(counts) <= allowed
        rows.append(row | {"formula": formula, "limit": allowed, "passed": passed})
    return rows


def _measured_row(operator: str, n: int, one: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    num_ranks = len(ranks)
    shard = MEASURED_HEADS * (n // num_ranks) * MEASURED_DIM * 4  # of query, key, value or one of their gradients
    most = max(row["bytes"] for row in ranks)
    # Two shards of keys and values, and two of their gradients, are under way.
    allowed = MEMORY_SLACK * (one["bytes"] / num_ranks + 2 * (2 * shard) + 2 * (2 * shard))
    return {
        "operator": operator,
        "n": n,
        "one_bytes": one["bytes"],
        "bytes": [row["bytes"] for row in ranks],
        "limit": allowed,
        "passed": most <= allowed if one["bytes"] >= JUDGED_BYTES else None,
        "one_seconds": sorted(one["seconds"])[len(one["seconds"]) // 2],
        "seconds": sorted(map(max, zip(*(row["seconds"] for row in ranks))))[len(one["seconds"]) // 2],
    }


def failures(results: Mapping[str, Any]) -> list[str]:
    """What breaks a limit, one line each."""
    found = [
        f"parity: {row['case']}, {row['dtype']}, {row['tensor']}: {row['tiled']:.2e} from one process, limit {row['limit']:.2e}; "
        f"largest error {row['largest']:.2e}, limit {row['largest_limit']:.2e}"
        for row in results["parity"]
        if not row["passed"]
    ]
    found += [
        f"work: {row['layout']}, n = {row['n']}: {max(row['shares']):.3f} times the mean on a rank, above {row['limit']:.3f}"
        for row in results["work"]
        if row["passed"] is False
    ]
    found += [
        f"traffic: {row['operator']}, n = {row['n']}, {row['direction']}: {sum(row['bytes'])} bytes, {row['formula']} by formula"
        for row in results["sent"]
        if row["passed"] is False
    ]
    return found + [
        f"memory: {row['operator']}, n = {row['n']}: {max(row['bytes']) / 2**20:.1f} MiB on a rank, above {row['limit'] / 2**20:.1f}"
        for row in results["measured"]
        if row["passed"] is False
    ]


def jobs(quick: bool, sizes: Sequence[int] | None, num_ranks: int, threads: int, timeout: float) -> list[dict[str, Any]]:
    """What one start of the ranks does, and the next: every length is measured in fresh processes, but for `quick`."""
    measured = [
        [{"operator": operator, "n": max(1, n // (2 * num_ranks)) * 2 * num_ranks} for operator in OPERATORS]
        for n in sizes or (SMALL_MEASURED if quick else FULL_MEASURED)
    ]
    compared = max(sizes) if sizes else SMALL_PARITY if quick else FULL_PARITY
    starts = [[row for rows in measured for row in rows]] if quick else measured
    shared = {"threads": max(1, threads // num_ranks), "timeout": timeout}
    return [shared | {"measured": rows, "parity": compared if rows is starts[-1] else None} for rows in starts]


def run(quick: bool, sizes: Sequence[int] | None, num_ranks: int, threads: int, timeout: float, console: Any) -> dict[str, Any]:
    """All of it; the fields of the result are those of the JSON."""
    from rich.progress import Progress

    from .machine import describe

    torch.set_num_threads(threads)
    results: dict[str, Any] = {"version": 1, "quick": quick, "ranks": num_ranks, "machine": describe(threads)}
    results |= {"num_heads": MEASURED_HEADS, "head_dim": MEASURED_DIM, "parity": [], "work": [], "measured": [], "sent": []}
    plan, start = jobs(quick, sizes, num_ranks, threads, timeout), time.perf_counter()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{num_ranks} ranks", total=2 * len(plan) + 1)
        for job in plan:
            found = _on_ranks(job, num_ranks)
            progress.advance(task)
            one = _on_one(job | {"threads": threads, "parity": None})
            progress.advance(task)
            for index, row in enumerate(one["measured"]):
                ranks = [part["measured"][index] for part in found]
                results["measured"].append(_measured_row(row["operator"], row["n"], row, ranks))
                results["sent"] += _sent_rows(row["operator"], row["n"], ranks)
            if job["parity"]:
                results["parity"] = parity_rows(job["parity"], found)
                results["work"] = work_rows(job["parity"], found)
                progress.advance(task)
    results["seconds"] = {"distributed": time.perf_counter() - start}
    results["failures"] = failures(results)
    return results
