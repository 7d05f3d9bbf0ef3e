"""Everything about CUDA that can be checked where there is no GPU.

    python tools/check_cuda.py [--torch] [--arch 80 90 ...]

Every CUDA translation unit compiles for every target without spills, stack frames or local memory (cuda_report.py), and so does the
conformance test of the PTX wrappers. With --torch, in an environment of its own (build/cuda-env, a CUDA build of torch, about 6 GB): the
extension builds, loads, has a CUDA kernel for every operator, traces with fake tensors, compiles, and says what is wrong where there is
no device (check_cuda_operators.py). Prints one line per check; exits with 1 if one fails.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cuda_report

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / "build/cuda-env"
TORCH = "torch==2.14.1"
DISK_GB = 12


def run(command: list[str | Path], **environment: str) -> None:
    """RuntimeError with the end of what the command said when it fails."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command[:6]))} exited with {done.returncode}\n{done.stdout[-6000:]}{done.stderr[-6000:]}")
    if done.stdout.strip():
        print(done.stdout.rstrip())


def check_kernels(archs: list[int], jobs: int) -> None:
    """All kernels on all targets."""
    result = cuda_report.report(cuda_report.sources(), archs, jobs, with_launches=True)
    print(cuda_report.table(result.rows, detail=False))
    for note in result.notes:
        print(note)
    if not result.rows:
        result.problems.append("no kernels")
    if result.problems:
        raise RuntimeError("\n".join(result.problems))


def check_conformance_test(archs: list[int]) -> None:
    """The program that `make gpu` runs first stays valid."""
    cuda_report.BUILD.mkdir(parents=True, exist_ok=True)
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    source, result = ROOT / "tests/native/test_ptx_conformance.cu", cuda_report.BUILD / "test_ptx_conformance"
    run([cuda_report.nvcc(), "-std=c++17", "-O1", *targets, f"-I{ROOT / 'csrc'}", source, "-o", result])


def make_environment() -> Path:
    """The Python of an environment with a CUDA build of torch, made where it is missing."""
    python = ENVIRONMENT / "bin/python"
    probe = "import torch; assert torch.version.cuda, torch.__version__"
    if python.is_file() and subprocess.run([python, "-c", probe], capture_output=True).returncode == 0:
        return python
    ENVIRONMENT.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(ENVIRONMENT.parent).free / 1e9
    if free < DISK_GB:
        raise RuntimeError(f"{ENVIRONMENT} needs {DISK_GB} GB of disk, {free:.1f} GB are free")
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    run([sys.executable, "-m", "venv", ENVIRONMENT])
    # Not the caller's user site or constraints: this torch is another one.
    run([python, "-m", "pip", "install", "-q", "--no-input", TORCH, "numpy", "setuptools>=77"], PIP_CONSTRAINT="", PYTHONNOUSERSITE="1")
    run([python, "-c", probe])
    return python


def build_extension(python: Path, archs: list[int]) -> Path:
    """The folder that holds the package with both libraries, built for `python`."""
    built, library = ROOT / "build/cuda-torch", ROOT / "build/cuda-torch/lib"
    targets = " ".join(map(str, archs))
    command: list[str | Path] = [python, "setup.py", "-q", "build", "--build-base", built, "--build-lib", library]
    # One set of CPU kernels: they are tested elsewhere.
    run(command, TILED_ATTENTION_CUDA="1", TILED_ATTENTION_CUDA_ARCHS=targets, TILED_ATTENTION_ISAS="baseline", PYTHONPATH="")
    found = sorted(path.name for path in library.glob("tiled_attention/_*.so"))
    if [name.partition(".")[0] for name in found] != ["_cpu", "_cuda"]:
        raise RuntimeError(f"{library}: expected _cpu and _cuda, found {found}")
    return library


def check_torch(archs: list[int]) -> None:
    """The extension in a torch with CUDA, without a device."""
    python = make_environment()
    library = build_extension(python, archs)
    run([python, ROOT / "tools/check_cuda_operators.py"], PYTHONPATH=str(library), CUDA_VISIBLE_DEVICES="")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true", help=f"also build and trace with {TORCH}, in {ENVIRONMENT.relative_to(ROOT)}")
    parser.add_argument("--arch", nargs="+", type=int, choices=cuda_report.ARCHS, default=list(cuda_report.ARCHS), metavar="N")
    parser.add_argument("-j", "--jobs", type=int, default=int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))
    arguments = parser.parse_args()
    checks: dict[str, Callable[[], None]] = {
        "kernels": lambda: check_kernels(arguments.arch, arguments.jobs),
        "conformance test compiles": lambda: check_conformance_test(arguments.arch),
    }
    if arguments.torch:
        checks["operators with a CUDA torch"] = lambda: check_torch(arguments.arch)
    failed = 0
    for name, check in checks.items():
        start = time.monotonic()
        try:
            check()
            print(f"ok    {name} ({time.monotonic() - start:.0f} s)", flush=True)
        except (RuntimeError, FileNotFoundError) as problem:
            failed += 1
            print(f"FAIL  {name}: {problem}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
