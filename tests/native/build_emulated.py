"""Builds the operator library whose kernels are those of csrc/cuda, run on the CPU by the emulator of tests/native/simt.

    python tests/native/build_emulated.py [FLAG ...]     prints the path of the library

It has the schemas and the dispatch key of the CPU library and stands in for it through TILED_ATTENTION_LIBRARY. Every file becomes an
object named by what it is made of, so that a change compiles only what it reaches. FLAGs, such as -fsanitize=undefined, go to the compiler
and to the linker. Environment: CXX, and MAX_JOBS, how many compilers may run at a time.
"""

import fcntl
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import include_paths, library_paths

PROJECT = Path(__file__).resolve().parents[2]
BUILD = PROJECT / "build" / "emulated"
SIMT = PROJECT / "tests" / "native" / "simt"
OPERATORS = ("csrc/library.cpp", "csrc/attention.cpp", "csrc/linear_attention.cpp", "csrc/rotate.cpp")
KERNELS = "csrc/cuda/instances/*.cu"
# Those of setup.py, and what the emulator needs.
FLAGS = ("-std=c++17", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-DTILED_ATTENTION_BACKEND_EMULATED", f"-I{SIMT}", "-pthread")
TORCH = ("-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY", *(f"-isystem{path}" for path in include_paths()))
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def contents(path: Path) -> list[bytes]:
    """The file and all of the project's files that it includes."""
    found: dict[Path, bytes] = {}
    waiting = [path]
    while waiting:
        here = waiting.pop()
        if here in found or not here.is_file():
            continue
        found[here] = here.read_bytes()
        for name in INCLUDE.findall(found[here].decode()):
            waiting += [(folder / name).resolve() for folder in (here.parent, SIMT)]
    return [found[path] for path in sorted(found)]


def named_by(suffix: str, *parts: bytes) -> Path:
    return BUILD / (hashlib.sha256(b"\0".join(parts)).hexdigest()[:16] + suffix)


def run(command: Sequence[str | Path], target: Path) -> None:
    """Makes `target` at once, so that no stopped build leaves a part of it."""
    unfinished = target.with_suffix(f".{os.getpid()}{target.suffix}")
    done = subprocess.run([*command, "-o", unfinished], capture_output=True, text=True)
    if done.returncode:
        unfinished.unlink(missing_ok=True)
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    unfinished.rename(target)


def build(*flags: str) -> Path:
    """The library, built if need be."""
    compiler = os.environ.get("CXX", "g++")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout

    def compiled(source: Path) -> Path:
        kind = ["-x", "c++", source] if source.suffix == ".cu" else [*TORCH, source]
        command = [compiler, *FLAGS, *flags, "-c", *kind]
        while True:
            parts = contents(source)
            target = named_by(f"-{source.stem}.o", version, " ".join(map(str, command)).encode(), *parts)
            if target.is_file():
                return target
            run(command, target)
            if contents(source) != parts:  # somebody edits meanwhile
                target.unlink()

    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sources = [*(PROJECT / name for name in OPERATORS), *sorted(PROJECT.glob(KERNELS))]
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            objects = list(pool.map(compiled, sources))
        folders = [f"-L{folder}" for folder in library_paths()]
        libraries = ["-ltorch", "-ltorch_cpu", "-lc10", *(["-Wl,-z,defs"] if not any("sanitize" in flag for flag in flags) else [])]
        command = [compiler, "-shared", "-pthread", *flags, *objects, *folders, *libraries]
        library = named_by(".so", version, " ".join(map(str, command)).encode())
        if not library.is_file():
            run(command, library)
    return library


if __name__ == "__main__":
    print(build(*sys.argv[1:]))
