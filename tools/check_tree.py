"""Checks what no compiler checks: include directions, file sizes, and symbols shared between instruction sets.

Prints the size of every part of the tree and each problem found; exits with 1 if there is one.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINE_BUDGET = 500
PARTS = ("csrc/core", "csrc/cpu", "csrc/cuda", "csrc", "python", "tests", "benchmarks", "examples", "tools", "docs", ".")
SUFFIXES = {".cpp", ".h", ".cu", ".cuh", ".py", ".md", ".toml", ".js", ".css", ".html"}

# Path pattern -> includes that it must not have, and why.
FORBIDDEN_INCLUDES = [
    (r"csrc/(core|cpu|cuda)/", r"(torch|ATen|c10|Python\.h|pybind11)\b", "kernels know no tensors and no Python"),
    (r"csrc/core/", r"(\.\./)?(cpu|cuda)/", "core knows no device"),
    (r"csrc/cpu/", r"(\.\./)?cuda/", "devices do not know each other"),
    (r"csrc/cuda/", r"(\.\./)?cpu/", "devices do not know each other"),
    (r"csrc/(core/|cpu/(?!select\.cpp))", r"[a-z_]+$", "a C++ header's weak symbols would be shared between instruction sets"),
    (r"csrc/[^/]+$", r"(Python\.h|pybind11|torch/(extension|python)\.h)", "the operator library has no Python symbol"),
]
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def source_files() -> list[Path]:
    """Every file that counts, relative to the root: tracked ones and new ones that git does not ignore."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(line) for line in sorted(set(listed.stdout.splitlines()))]
    return [path for path in paths if (path.suffix in SUFFIXES or path.name == "Makefile") and (ROOT / path).is_file()]


def check_includes(files: list[Path]) -> list[str]:
    """Arrows point down only: operators -> devices -> core."""
    problems = []
    for path in files:
        if path.suffix not in {".cpp", ".h", ".cu", ".cuh"}:
            continue
        for include in INCLUDE.findall((ROOT / path).read_text()):
            for where, forbidden, why in FORBIDDEN_INCLUDES:
                if re.match(where, path.as_posix()) and re.match(forbidden, include):
                    problems.append(f"{path}: includes {include}: {why}")
    for path in (path for path in files if path.name == "numpy_reference.py"):
        if re.search(r"^\s*(import|from)\s+torch\b", (ROOT / path).read_text(), re.MULTILINE):
            problems.append(f"{path}: imports torch; it is the definition in NumPy alone")
    return problems


def check_sizes(files: list[Path]) -> list[str]:
    """At most LINE_BUDGET lines a file. Prints lines and files per part."""
    lines: Counter[str] = Counter()
    count: Counter[str] = Counter()
    problems = []
    for path in files:
        size = len((ROOT / path).read_text().splitlines())
        part = next(part for part in PARTS if part == "." or path.as_posix().startswith(part + "/"))
        lines[part] += size
        count[part] += 1
        if size > LINE_BUDGET:
            problems.append(f"{path}: {size} lines, at most {LINE_BUDGET}: split it by idea")
    for part in PARTS:
        print(f"{part:12} {lines[part]:6} lines in {count[part]:3} files")
    print(f"{'total':12} {lines.total():6} lines in {count.total():3} files")
    return problems


def symbols(path: Path, *options: str) -> set[str]:
    """Names that `nm` lists for an object, an archive or a library."""
    listed = subprocess.run(["nm", "-C", *options, str(path)], capture_output=True, text=True, check=True).stdout
    return {match[1] for line in listed.splitlines() if (match := re.match(r"^[0-9a-f]*\s+[A-Zuvw]\s+(.+)$", line))}


def check_symbols() -> list[str]:
    """No symbol is defined by the objects of two instruction sets (the linker would keep either copy); the library has none of Python's."""
    folders = sorted({path.parent for path in (ROOT / "build").glob("kernels-*/*/*.o")})
    libraries = sorted((ROOT / "python/tiled_attention").glob("*.so"))
    if not folders or not libraries:
        return ["build/: no objects of kernels or no operator library found; build first (make dev)"]
    owners: dict[str, list[str]] = {}
    for folder in folders:
        for name in set().union(*(symbols(path, "--defined-only", "--extern-only") for path in folder.glob("*.o"))):
            owners.setdefault(name, []).append(folder.name)
    problems = [f"{name}: defined in {', '.join(names)}" for name, names in sorted(owners.items()) if len(names) > 1]
    for library in libraries:
        python = sorted(name for name in symbols(library, "-D", "--undefined-only") if re.match(r"_?Py[A-Z_]", name))
        problems += [f"{library.name}: needs {name}; the operator library has no Python symbol" for name in python]
    print(f"{len(owners)} symbols in the objects of {len(folders)} instruction sets")
    return problems


def main() -> int:
    files = source_files()
    problems = check_includes(files) + check_sizes(files) + check_symbols()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
