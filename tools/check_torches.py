"""Runs tests of one wheel under the oldest torch that the project supports and under the newest that there is.

    python tools/check_torches.py WHEEL [--python PYTHON ...] [--install] [--newest VERSION]

Each torch is that of an environment: those of --python, which are only read, and build/torches/<version>, which --install makes where they
are missing (torch as pip finds it: several GB where no index of CPU builds is set). The wheel and pytest lie in a folder beside, so that no
environment needs them and none changes. A torch without an environment is a failure, not a skip. Prints a line per torch; exits with 1
unless every one was there and passed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/torches"
# Where torch's interfaces are met: raw operators, the compiler and its caches (there inductor too), the override of torch's own attention,
# the drop-ins, vmap, ranks.
TESTS = (
    *("library", "compile", "compile_cache", "override", "sdpa", "vmap", "linear_compile"),
    *("multihead_attention", "flash_attn", "flash_attn_packed", "distributed_linear", "tensor_parallel"),
)
CHOICE = ("-m", "not slow", "-k", "not inductor")
DISK_GB = 12


def run(command: list[str | Path], **environment: str) -> str:
    """Standard output; RuntimeError with the end of what the command said when it fails."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command[:6]))} exited with {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return done.stdout


def oldest() -> str:
    """The lower bound of the dependency."""
    found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text().partition("\ndependencies")[2])
    if found is None:
        raise RuntimeError("pyproject.toml: expected a dependency torch>=VERSION")
    return found[1]


def newest() -> str:
    """The newest release for this Python that pip knows of, whatever it may install here."""
    listed = run([sys.executable, "-m", "pip", "index", "versions", "torch"])
    found = re.match(r"torch \(([\d.]+)", listed)
    if found is None:
        raise RuntimeError(f"pip names no release of torch: {listed[:200]}; say which with --newest")
    return found[1]


def series(version: str) -> str:
    """2.13.0+cpu -> 2.13"""
    return ".".join(version.split(".")[:2])


def torch_of(python: Path) -> str:
    return run([python, "-c", "import torch; print(torch.__version__)"], PYTHONPATH="").strip()


def install(version: str) -> Path:
    """The Python of a new environment with the last torch of this series."""
    place = FOLDER / series(version)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(FOLDER).free / 1e9) < DISK_GB:
        raise RuntimeError(f"{place} may need {DISK_GB} GB of disk, {free:.1f} GB are free")
    shutil.rmtree(place, ignore_errors=True)
    run([sys.executable, "-m", "venv", place])
    exact = version if version.count(".") > 1 else f"{version}.*"
    # Not the caller's constraints: this torch is another one.
    pip: list[str | Path] = [place / "bin/python", "-m", "pip", "install", "-q", "--no-input"]
    run([*pip, f"torch=={exact}", "numpy"], PIP_CONSTRAINT="", PYTHONNOUSERSITE="1")
    return place / "bin/python"


def check(python: Path, wheel: Path) -> str:
    """Installs the wheel beside the environment and runs the tests. What pytest says last; RuntimeError with its end if they fail."""
    site = FOLDER / f"site-{series(torch_of(python))}"
    shutil.rmtree(site, ignore_errors=True)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-input", "--target", site]
    run([*pip, "pytest", "expecttest"], PIP_CONSTRAINT="")
    run([*pip, "--no-deps", wheel])
    with_site = {"PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    used = run([python, "-c", "import tiled_attention; print(tiled_attention.__file__)"], **with_site).strip()
    if not Path(used).is_relative_to(site):
        raise RuntimeError(f"the wheel is not what is imported: {used}")
    tests = [ROOT / f"tests/test_{name}.py" for name in TESTS]
    said = run([python, "-m", "pytest", "-p", "no:cacheprovider", *CHOICE, *tests], **with_site)
    return said.strip().splitlines()[-1].strip("= ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", type=Path, action="append", default=[], help="an environment that has a torch; may be repeated")
    parser.add_argument("--install", action="store_true", help="make the environments that are missing")
    parser.add_argument("--newest", metavar="VERSION", help="the newest torch; what pip finds by default")
    arguments = parser.parse_args()
    if not arguments.wheel.is_file():
        parser.error(f"{arguments.wheel}: no such wheel; `make dist` builds one")
    pythons = {series(torch_of(python)): python for python in [*sorted(FOLDER.glob("*/bin/python")), *arguments.python]}
    wanted = [*dict.fromkeys([oldest(), *sorted(set(pythons), key=lambda version: [int(part) for part in version.split(".")])])]
    last = arguments.newest or newest()
    wanted = [version for version in wanted if version != series(last)] + [last]
    failed = 0
    for version in wanted:
        try:
            python = pythons.get(series(version))
            if python is None and not arguments.install:
                raise RuntimeError("no environment has it: name one with --python, or make it with --install")
            python = python or install(version)
            said = check(python, arguments.wheel.resolve())
            print(f"ok    torch {torch_of(python)}: {said}", flush=True)
        except RuntimeError as problem:
            failed += 1
            print(f"FAIL  torch {version}: {problem}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
