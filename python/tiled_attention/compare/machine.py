"""What a measurement ran on: processor, instruction set, threads, versions, and the peak that times are compared with."""

import contextlib
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tiled_attention.library import ops

# The argument of ops._peak.
PEAK_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
PEAK_READINGS = 3


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()


def clock() -> tuple[float, str] | None:
    """(MHz, where it was read), the highest the system states; None where it states none."""
    with contextlib.suppress(OSError, ValueError):
        path = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
        return int(path.read_text()) / 1000, str(path)
    with contextlib.suppress(OSError):
        found = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return max(map(float, found)), "/proc/cpuinfo"
    return None


def flops_per_cycle(isa: str) -> int | None:
    """Float32 operations of one core in one cycle with both multiply-add pipes busy; None for an unknown instruction set.

    256-bit pipes give 2 pipes * 8 lanes * 2 = 32. With AVX-512 it is 64, except on AMD family 25 (Zen 4), whose pipes are 256 bits wide.
    """
    if isa.startswith("avx512"):
        with contextlib.suppress(OSError):
            info = Path("/proc/cpuinfo").read_text()
            if "AuthenticAMD" in info and re.search(r"^cpu family\s*:\s*25$", info, re.MULTILINE):
                return 32
        return 64
    if isa == "avx2":
        return 32
    return None


def peaks(threads: int) -> dict[str, float]:
    """GFLOP/s of `threads` threads per dtype: the best of a few readings of a loop of multiply-adds, times the threads."""
    return {dtype_name(dtype): max(float(ops._peak(code)) for _ in range(PEAK_READINGS)) * threads for dtype, code in PEAK_CODES.items()}


def clock_peak(isa: str, threads: int) -> float | None:
    """Float32 GFLOP/s that the stated clock allows; the true clock may be higher (turbo) or lower (heat, a shared machine)."""
    read, per_cycle = clock(), flops_per_cycle(isa)
    return None if read is None or per_cycle is None else read[0] * per_cycle * threads / 1000


def free_bytes() -> int:
    """Memory that a new allocation can have, in bytes."""
    with contextlib.suppress(OSError):
        match = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if match:
            return int(match.group(1)) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def usable_cpus() -> list[int]:
    """The processors this process may run on, one of each physical core first."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    cpus = sorted(os.sched_getaffinity(0))
    first, seen = [], set()
    for cpu in cpus:
        core = str(cpu)
        with contextlib.suppress(OSError):
            core = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        if core not in seen:
            seen.add(core)
            first.append(cpu)
    return first + [cpu for cpu in cpus if cpu not in first]


def _thread_ids() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")} if os.path.isdir("/proc/self/task") else set()


@contextlib.contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Run torch with `threads` threads, the caller and each worker that torch starts on a processor of its own.

    Where the system has no affinity, or fewer processors than threads, only the number of threads is set. All of it is undone at the end.
    """
    before_threads, cpus = torch.get_num_threads(), usable_cpus()
    before_ids = _thread_ids()
    torch.set_num_threads(threads)
    torch.ones(1 << 20).add_(1)  # large enough for torch to start its workers
    workers = sorted(_thread_ids() - before_ids)
    moved: dict[int, set[int]] = {}
    if hasattr(os, "sched_setaffinity") and len(cpus) >= threads:
        targets = {0: {cpus[0]}}
        if len(workers) == threads - 1:
            targets |= {worker: {cpu} for worker, cpu in zip(workers, cpus[1:])}
        else:
            targets = {thread: set(cpus[:threads]) for thread in _thread_ids()}
        for thread, target in targets.items():
            with contextlib.suppress(OSError):
                moved[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, target)
    try:
        yield
    finally:
        for thread, target in moved.items():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, target)
        torch.set_num_threads(before_threads)


def describe(threads: int) -> dict[str, Any]:
    """The machine as it stands in every JSON: see `tiled_attention.compare` for the fields."""
    isa = str(ops._isa())
    read = clock()
    return {
        "cpu": cpu_model(),
        "architecture": platform.machine(),
        "logical_cpus": os.cpu_count(),
        "usable_cpus": len(usable_cpus()),
        "threads": threads,
        "isa": isa,
        "isas": str(ops._available_isas()).split(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peak_gflops": peaks(threads),
        "clock_mhz": read[0] if read else None,
        "clock_source": read[1] if read else None,
        "clock_peak_gflops": clock_peak(isa, threads),
    }
