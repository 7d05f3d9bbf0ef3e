"""Compiles the programs of the emulator's tests, each in several ways, into build/native; what has not changed is not compiled again."""

import fcntl
import functools
import hashlib
import os
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
BUILD = PROJECT / "build" / "native"
COMMON = ("-std=c++17", "-Wno-unknown-pragmas", "-pthread", f"-I{HERE / 'simt'}", f"-I{PROJECT / 'csrc'}")
SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
# The ways to build and run a program. `trace` counts the bank conflicts of all accesses of shared memory: simt/bank_conflicts.h.
JOBS = {
    "plain": ("-O2",),
    "asan": (*SANITIZED, "-fsanitize=address,undefined"),
    "tsan": (*SANITIZED, "-fsanitize=thread"),
    "trace": ("-O1", "-g", "-fsanitize=thread", "-fno-tree-sra", "-fno-tree-sink", "-fno-tree-vectorize", "-DSIMT_TRACE_SHARED"),
}
# What a sanitizer ends the process with; a fault that the emulator reports ends a program with 3, a wrong result with 2.
ENVIRONMENT = {"TSAN_OPTIONS": "exitcode=66:halt_on_error=1", "ASAN_OPTIONS": "exitcode=66", "UBSAN_OPTIONS": "print_stacktrace=1"}
WRONG_RESULT, FAULT, SANITIZER = 2, 3, 66


@functools.cache
def version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout


def contents(path: Path, found: dict[Path, bytes]) -> None:
    """The file and all of the project's files that it includes."""
    if path in found or not path.is_file():
        return
    found[path] = path.read_bytes()
    for name in re.findall(rb'^\s*#\s*include\s*"([^"]+)"', found[path], re.MULTILINE):
        for folder in (path.parent, HERE / "simt", PROJECT / "csrc"):
            contents((folder / name.decode()).resolve(), found)


def build(source: str, job: str, *flags: str, compiler: str = "") -> Path:
    """The program tests/native/`source`, built as `job` says."""
    compiler = compiler or os.environ.get("CXX", "g++")
    files: dict[Path, bytes] = {}
    contents(HERE / source, files)
    compiled = [compiler, *COMMON, *JOBS[job], *flags, "-c", str(HERE / source)]
    parts = [version(compiler), " ".join(compiled).encode(), *(files[path] for path in sorted(files))]
    target = BUILD / f"{Path(source).stem}-{job}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}"
    BUILD.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            part = target.with_suffix(f".{os.getpid()}.o")
            linked = [flag for flag in (*JOBS[job], *flags) if job != "trace" and flag.startswith("-fsanitize")]
            for command in ([*compiled, "-o", str(part)], [compiler, "-pthread", *linked, str(part), "-o", f"{part}.out", "-ldl"]):
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
            part.unlink()
            Path(f"{part}.out").rename(target)
    return target


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Standard output holds both streams."""
    return subprocess.run(
        [program, *arguments],
        env=os.environ | ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=900,
    )
