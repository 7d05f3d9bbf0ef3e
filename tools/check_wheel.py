"""Checks that wheels load in every Python and every torch that they claim to serve: `check_wheel.py WHEEL ...`.

The tag is that of the limited API of Python 3.10, and abi3audit finds nothing outside of it. What a library takes from torch is C functions
of torch's stable ABI, and it has no Python symbol. It links with torch's and CUDA's libraries alone, beside those of every Linux, and
auditwheel names the platform that this serves. Every module of the package is inside. Prints a line per wheel; exits with 1 on a violation.
"""

import argparse
import fnmatch
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from check_tree import ROOT, symbols

# Libraries that are in the process before ours: a wheel neither contains them nor asks the system for them.
OF_TORCH = ("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so", "libcudart.so.*")
# Names without a version that a library may leave open, beside weak ones: torch's C functions, and what libstdc++ and torch both define.
OPEN = re.compile(r"(aoti_torch_|torch_)\w+$|std::|(vtable|VTT|typeinfo|typeinfo name) for std::")
WEAK = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__", "__cxa_finalize"}
PACKAGE = ROOT / "python/tiled_attention"
KEPT = (".py", ".typed", ".css", ".html", ".js")


def output(command: list[str | Path]) -> tuple[int, str]:
    """Exit status and standard output of a tool of this environment."""
    done = subprocess.run([sys.executable, "-m", *map(str, command)], capture_output=True, text=True)
    return done.returncode, done.stdout or done.stderr


def check_names(names: list[str]) -> list[str]:
    """The package is complete: every module and data file that lies in the source tree, and a library."""
    kept = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.suffix in KEPT}
    problems = [f"{name} is missing" for name in sorted(kept - set(names))]
    libraries = [name for name in names if ".so" in Path(name).suffixes]
    problems += [f"{name}: not named *.abi3.so" for name in libraries if not name.endswith(".abi3.so")]
    if "tiled_attention/_cpu.abi3.so" not in names:
        problems.append("tiled_attention/_cpu.abi3.so is missing")
    return problems


def check_symbols(library: Path) -> list[str]:
    """What an ELF library leaves open: of torch only the stable ABI, of Python nothing."""
    open_names = symbols(library, "-D", "--undefined-only")
    unversioned = sorted(name for name in open_names if "@" not in name and name not in WEAK)
    problems = []
    for name in unversioned:
        if re.match(r"_?Py[A-Z_]", name):
            problems.append(f"{library.name}: needs {name}; the operator library has no Python symbol")
        elif not OPEN.match(name):
            problems.append(f"{library.name}: needs {name}, which is not of torch's stable ABI")
    if not any(name.startswith("aoti_torch_") for name in unversioned):
        problems.append(f"{library.name}: takes nothing from torch's stable ABI: not an operator library")
    return problems


def check_limited_api(wheel: Path) -> list[str]:
    """What abi3audit says."""
    status, report = output(["abi3audit", "--strict", "--report", wheel])
    try:
        (spec,) = json.loads(report)["specs"].values()
        results = spec["wheel"]
    except (ValueError, KeyError):
        return [f"abi3audit: {report.strip()[-500:]}"]
    bad = [audit for audit in results if not (audit["result"]["is_abi3"] and audit["result"]["is_abi3_baseline_compatible"])]
    problems = [f"abi3audit: {audit}" for audit in bad]
    if status and not problems:
        problems.append(f"abi3audit exited with {status}: {report.strip()[-500:]}")
    if not results:
        problems.append("abi3audit found no library in the wheel")
    return problems


def check_platform(wheel: Path) -> tuple[list[str], str]:
    """What auditwheel says of the libraries, and the platform tag that the wheel would serve without torch's."""
    status, report = output(["auditwheel", "show", "--json", wheel])
    if status:
        return [f"auditwheel exited with {status}: {report.strip()[-500:]}"], ""
    shown = json.loads(report)
    outside = sorted(name for name in shown["external_libs"] if not any(fnmatch.fnmatch(name, known) for known in OF_TORCH))
    problems = [f"auditwheel: needs {name}, which is neither torch's nor of every Linux" for name in outside]
    if shown["unsupported_isa"]:
        problems.append("auditwheel: needs an instruction set that not every machine of the platform has")
    if not re.match(r"(many|musl)linux_", shown["sym_tag"]):
        problems.append(f"auditwheel: versions of symbols serve no platform but {shown['sym_tag']}")
    return problems, shown["sym_tag"]


def check(wheel: Path) -> tuple[list[str], str]:
    """Problems of one wheel, and what is said of a good one."""
    if not re.fullmatch(r"tiled_attention-[^-]+-cp310-abi3-[^-]+\.whl", wheel.name):
        return ["the name must be tiled_attention-VERSION-cp310-abi3-PLATFORM.whl"], ""
    problems, said = check_limited_api(wheel), "limited API of Python 3.10"
    with zipfile.ZipFile(wheel) as packed, tempfile.TemporaryDirectory() as folder:
        names = packed.namelist()
        problems += check_names(names)
        if "linux" in wheel.name:
            for name in (name for name in names if name.endswith(".so")):
                problems += check_symbols(Path(packed.extract(name, folder)))
            more, platform = check_platform(wheel)
            problems += more
            said += f", torch's stable ABI, symbols of {platform}"
    return problems, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    failed = False
    for wheel in parser.parse_args().wheels:
        problems, said = check(wheel) if wheel.is_file() else (["no such file"], "")
        failed |= bool(problems)
        print(f"{'FAIL' if problems else 'ok  '}  {wheel.name}: {'; '.join(problems) or said}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
