"""The day of the GPU: builds, validates and times everything on CUDA, once and unattended, in under 10 minutes.

    python benchmarks/gpu.py [--json FILE] [--minutes 9.5] [--only PART ...]

Parts, each in a process of its own with its own time limit; what fails or cannot run says so and the next part goes on:
    machine      what is here
    build        the extension for the targets of the GPUs here
    conformance  every wrapper of PTX against plain arithmetic
    tests        the named lists of cases on CUDA against the float64 oracle, and what only a device shows
    suite        the tests of the operators' raw and public functions on the CPU, with the library that was built
    sanitizer    compute-sanitizer's memcheck and racecheck over a few cases, where it is installed
    speed        against F.scaled_dot_product_attention's backends (gpu_speed.py)
The JSON is written anew after every part. Exits with 1 if a part failed, or none could run.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "build/gpu/lib"
SANITIZED = "test_exact and f16 and q9 or test_linear_step or grids_beyond"


@dataclass
class Part:
    """What one part came to: ok, failed, timeout, or skipped with the reason."""

    status: str
    seconds: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)
    tail: str = ""  # the end of what it printed, where it is not ok


class Skip(Exception):
    """Why a part cannot run here."""


def run(command: list[str], log: Path, limit: float, **environment: str) -> int | None:
    """Exit code, None past the limit; both streams go to `log`. The process and its children end with the limit."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout=max(limit, 1.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def built() -> dict[str, str]:
    """The environment in which Python finds what `build` built."""
    return {"PYTHONPATH": os.pathsep.join([str(LIBRARY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def need_device() -> None:
    if not torch.cuda.is_available():
        raise Skip(f"no CUDA device: torch {torch.__version__}, CUDA {torch.version.cuda}")


def need_build() -> None:
    need_device()
    if not list(LIBRARY.glob("tiled_attention/_cuda*.so")):
        raise Skip("the extension was not built")


def finished(code: int | None, log: Path, detail: dict[str, Any] | None = None) -> Part:
    """The part that a process was."""
    status = "timeout" if code is None else "ok" if code == 0 else "failed"
    tail = "" if status == "ok" else log.read_text(errors="replace")[-6000:]
    return Part(status, detail={"exit": code, **(detail or {})}, tail=tail)


def machine(log: Path, limit: float) -> Part:
    detail: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    detail["processors"] = os.cpu_count()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    detail["commit"] = commit.stdout.strip()
    for name, command in (("nvcc", ["nvcc", "--version"]), ("nvidia-smi", ["nvidia-smi", "-q", "-d", "CLOCK,POWER"])):
        path = shutil.which(command[0]) or (f"/usr/local/cuda/bin/{command[0]}" if name == "nvcc" else "")
        found = subprocess.run([path, *command[1:]], capture_output=True, text=True) if path and Path(path).is_file() else None
        detail[name] = found.stdout[-3000:] if found else "not found"
    if not torch.cuda.is_available():
        return Part("skipped", detail=detail | {"reason": "no CUDA device"})
    detail["devices"] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        detail["devices"].append(f"{properties.name}, {capability}, {properties.multi_processor_count} multiprocessors, {memory}")
    detail["cudnn"] = torch.backends.cudnn.version()
    return Part("ok", detail=detail)


def build(log: Path, limit: float) -> Part:
    need_device()
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    targets = " ".join(sorted(f"{major}{minor}" for major, minor in capabilities))
    command = [sys.executable, "setup.py", "build", "--build-base", str(LIBRARY.parent), "--build-lib", str(LIBRARY)]
    code = run(command, log, limit, TILED_ATTENTION_CUDA="1", TILED_ATTENTION_CUDA_ARCHS=targets)
    if code == 0:
        code = run([sys.executable, "-m", "tiled_attention", "info"], log, 60, **built())
        return finished(code, log, {"targets": targets, "info": log.read_text()})
    return finished(code, log, {"targets": targets})


def pytest(log: Path, limit: float, *arguments: str, workers: int = 0, prefix: tuple[str, ...] = (), **environment: str) -> Part:
    """A pytest run; its tests are counted from the log, so that a run past its limit also says how far it came."""
    spread = ["-n", str(workers), "--dist", "worksteal"] if workers else ["-n", "0"]
    command = [*prefix, sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *spread, *arguments]
    code = run(command, log, limit, OMP_NUM_THREADS="1", **built(), **environment)
    text = log.read_text(errors="replace")
    counts: Counter[str] = Counter(re.findall(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b(?= +\S+::| +\[)", text))
    failures = sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+.*)$", text, re.MULTILINE)))
    part = finished(code, log, {**counts, "failures": failures[:100]})
    if part.status == "ok" and not counts["PASSED"]:
        part.status, part.tail = "failed", f"no test passed\n{text[-2000:]}"
    return part


def conformance(log: Path, limit: float) -> Part:
    need_device()
    return pytest(log, limit, "tests/native/test_ptx_conformance.py", "-k", "test_device")


def workers() -> int:
    """Processes that share the GPU and the processors."""
    return min(os.cpu_count() or 1, 8)


def tests(log: Path, limit: float) -> Part:
    need_build()
    return pytest(log, limit, "tests/native/test_cuda_device.py", workers=workers())


def suite(log: Path, limit: float) -> Part:
    need_build()
    return pytest(log, limit, "tests", "-m", "not slow", "--ignore=tests/native", workers=os.cpu_count() or 1)


def sanitizer(log: Path, limit: float) -> Part:
    need_build()
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).is_file():
        raise Skip("compute-sanitizer is not installed")
    parts = {}
    for tool in ("memcheck", "racecheck"):
        prefix = (found, f"--tool={tool}", "--error-exitcode=86", "--target-processes=all")
        command = ("tests/native/test_cuda_device.py", "-k", SANITIZED, "--maxfail=5")
        parts[tool] = pytest(log, limit / 2, *command, prefix=prefix, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    status = next((part.status for part in parts.values() if part.status != "ok"), "ok")
    return Part(status, detail={tool: asdict(part) for tool, part in parts.items()})


def speed(log: Path, limit: float) -> Part:
    need_build()
    code = run([sys.executable, "benchmarks/gpu_speed.py", "--seconds", str(max(limit - 25, 10))], log, limit, **built())
    rows = [json.loads(line) for line in log.read_text(errors="replace").splitlines() if line.startswith("{") and line.endswith("}")]
    ratios = [row["ratio"] for row in rows if row.get("ratio")]
    detail = {
        "rows": rows,
        "wrong": sum(bool(row.get("wrong")) for row in rows),
        "faster": sum(ratio > 1 for ratio in ratios),
        "compared": len(ratios),
    }
    return finished(code, log, detail)


# Seconds at most, less than 10 minutes in all.
PARTS: dict[str, tuple[Callable[[Path, float], Part], float]] = {
    "machine": (machine, 10),
    "build": (build, 170),
    "conformance": (conformance, 40),
    "tests": (tests, 110),
    "speed": (speed, 120),
    "sanitizer": (sanitizer, 60),
    "suite": (suite, 50),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "build/gpu/gpu.json", metavar="FILE")
    parser.add_argument("--minutes", type=float, default=9.5, help="all parts together (default: 9.5)")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help="of " + ", ".join(PARTS))
    arguments = parser.parse_args()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    start, results = time.monotonic(), {}
    for name, (part, limit) in PARTS.items():
        if arguments.only and name not in arguments.only:
            continue
        left = arguments.minutes * 60 - (time.monotonic() - start)
        began = time.monotonic()
        try:
            if left < 5:
                raise Skip("no time left")
            result = part(LIBRARY.parent / f"{name}.log", min(limit, left))
        except Skip as reason:
            result = Part("skipped", detail={"reason": str(reason)})
        except Exception as error:
            result = Part("failed", tail=f"{type(error).__name__}: {error}")
        result.seconds = round(time.monotonic() - began, 1)
        results[name] = result
        document = {"seconds": round(time.monotonic() - start, 1), "parts": {key: asdict(value) for key, value in results.items()}}
        whole = arguments.json.with_suffix(".part")
        whole.write_text(json.dumps(document, indent=1))
        whole.replace(arguments.json)
        reason = result.detail.get("reason") or (result.tail.strip().splitlines() or [""])[-1][:150]
        print(f"{result.status:8} {name:12} {result.seconds:6.1f} s  {reason}", flush=True)
    print(arguments.json)
    statuses = [result.status for result in results.values()]
    return 1 if "failed" in statuses or "timeout" in statuses or "ok" not in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
