"""The primitives of csrc/cuda/device.cuh against plain arithmetic: run by the emulator always, compiled for every target where there is
nvcc, and run by the GPU where there is one."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SOURCE = PROJECT / "tests/native/test_ptx_conformance.cu"
ARCHS = (80, 90, 100, 120)
NO_DEVICE = 77


@cache
def nvcc() -> str | None:
    """Path of the compiler."""
    default = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin/nvcc"
    return shutil.which("nvcc") or (str(default) if default.is_file() else None)


def build(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-10000:]


def run(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program], capture_output=True, text=True, timeout=120)


def test_emulator(tmp_path: Path) -> None:
    program = tmp_path / "emulated"
    folders = [f"-I{PROJECT / folder}" for folder in ("csrc", "csrc/cuda", "tests/native/simt")]
    warnings = ["-Wall", "-Wextra", "-Wno-unknown-pragmas"]
    build(["g++", "-x", "c++", "-std=c++17", "-O1", *warnings, *folders, str(SOURCE), "-o", str(program), "-pthread"])
    done = run(program)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert done.stdout.count("ok ") > 20, done.stdout


needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="nvcc not found")


@needs_nvcc
def test_compiles_for_every_target(tmp_path: Path) -> None:
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    build([str(nvcc()), "-std=c++17", "-O1", *targets, f"-I{PROJECT / 'csrc'}", "-c", str(SOURCE), "-o", str(tmp_path / "device.o")])


@needs_nvcc
def test_device(tmp_path: Path) -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no NVIDIA driver")
    program = tmp_path / "device"
    build([str(nvcc()), "-std=c++17", "-O1", "-arch=native", f"-I{PROJECT / 'csrc'}", str(SOURCE), "-o", str(program)])
    done = run(program)
    if done.returncode == NO_DEVICE:
        pytest.skip("no CUDA device")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
