"""Compiles every CUDA translation unit for every target and says what the compiler made of each kernel.

    python tools/cuda_report.py [--arch 80 90 ...] [--only TEXT] [--json FILE] [--detail] [FILE.cu ...]

Per kernel and target: registers, shared memory, occupancy with what limits it, and of the main loop (see cuda_sass.py) the instructions by
kind, those beside the tensor-core ones, and the global accesses narrower than 16 bytes. Block sizes and dynamic shared memory are those of
the launches that cuda_launches.cpp notes. Exits with 1, naming the kernel, on a compile error, a spill, a stack frame, local memory, more
shared memory than every target has, a kernel that no launch reaches, or a __device__ function called from the host. Needs nvcc and g++;
cuobjdump and nvdisasm (from PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm) for the disassembly.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cuda_sass import LIMITS, Instruction, Occupancy, Resources, count_kinds, main_loop, narrow_accesses, occupancy, parse_ptxas, parse_sass

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/cuda"
INSTANCES = "csrc/cuda/instances"
RECORDER = ROOT / "tools/cuda_launches.cpp"
ARCHS = tuple(LIMITS)
# As in setup.py, and what ptxas says.
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "--ptxas-options=-v"]
SHARED_LIMIT = min(limits.shared_per_block for limits in LIMITS.values())
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def sources() -> list[Path]:
    """The translation units of the CUDA library."""
    return sorted((ROOT / INSTANCES).glob("*.cu"))


def closure(path: Path) -> list[Path]:
    """A file and the project's files that it includes, by way of others too."""
    found = {path.resolve()}
    stack = [path.resolve()]
    while stack:
        here = stack.pop()
        for name in INCLUDE.findall(here.read_text()):
            for folder in (here.parent, ROOT / "csrc"):
                included = (folder / name).resolve()
                if included.is_file():
                    if included not in found:
                        found.add(included)
                        stack.append(included)
                    break
    return sorted(found)


def fingerprint(path: Path, *others: str) -> str:
    """Changes when the file, what it includes, or one of `others` does."""
    digest = hashlib.sha256("\0".join(others).encode())
    for part in closure(path):
        digest.update(part.name.encode() + b"\0" + part.read_bytes())
    return digest.hexdigest()[:16]


def output(command: Sequence[str | Path], **environment: str) -> str:
    """stdout; RuntimeError with what the command said when it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise RuntimeError(f"{command[0]} exited with {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-8000:]}")
    return done.stdout


def nvcc() -> str:
    """Path of nvcc; FileNotFoundError where there is none."""
    candidates = [shutil.which("nvcc"), *(str(Path(os.environ.get(name, "")) / "bin/nvcc") for name in ("CUDA_HOME", "CUDA_PATH"))]
    for candidate in (*candidates, "/usr/local/cuda/bin/nvcc"):
        if candidate and os.access(candidate, os.X_OK) and Path(candidate).is_file():
            return candidate
    raise FileNotFoundError("nvcc not found: install the CUDA toolkit, or set CUDA_HOME")


def disassemblers() -> Path | None:
    """The folder with cuobjdump and nvdisasm: of the packages of PyPI, or one on PATH."""
    spec = importlib.util.find_spec("nvidia")
    packages = list(spec.submodule_search_locations or []) if spec else []
    found = [file.parent for package in packages for file in sorted(Path(package).glob("*/bin/cuobjdump"))]
    on_path = shutil.which("cuobjdump")
    found += [Path(on_path).parent] if on_path else []
    return next((folder for folder in found if (folder / "nvdisasm").is_file()), None)


@dataclass
class Compiled:
    """One translation unit for one target."""

    source: Path
    arch: int
    object: Path
    ptxas: str


def compile_unit(source: Path, arch: int, compiler: str, version: str) -> Compiled:
    """The object from build/cuda where nothing changed, a new one otherwise."""
    folder = BUILD / f"sm_{arch}"
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{source.stem}-{fingerprint(source, version, *NVCC_FLAGS)}"
    result, said = folder / f"{stem}.o", folder / f"{stem}.txt"
    if not (result.is_file() and said.is_file()):
        for old in (*folder.glob(f"{source.stem}-????????????????.*"),):
            old.unlink()
        part = folder / f"{stem}.part.o"
        target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        command = [compiler, *NVCC_FLAGS, target, "-I", str(ROOT / "csrc"), "-c", str(source), "-o", str(part)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{source.name} does not compile for sm_{arch}\n{done.stdout[-2000:]}{done.stderr[-8000:]}")
        said.write_text(done.stdout + done.stderr)
        part.replace(result)
    return Compiled(source, arch, result, said.read_text())


def compile_all(units: Iterable[Path], archs: Iterable[int], jobs: int) -> tuple[list[Compiled], list[str]]:
    """Objects, and what did not compile."""
    compiler = nvcc()
    version = output([compiler, "--version"])
    pairs = [(unit, arch) for unit in units for arch in archs]
    problems: list[str] = []

    def attempt(pair: tuple[Path, int]) -> Compiled | None:
        try:
            return compile_unit(*pair, compiler, version)
        except RuntimeError as error:
            problems.append(str(error))
            return None

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(attempt, pairs))
    return [result for result in results if result], sorted(problems)


def calls_device_functions(compiled: Compiled) -> bool:
    """Whether the host side calls a __device__ function: nvcc does not refuse that in templates, and compiles a call of exit()."""
    return re.search(r"\bU exit$", output(["nm", "-u", compiled.object]), re.MULTILINE) is not None


def record_launches(objects: Sequence[Path]) -> dict[str, list[tuple[int, int]]]:
    """Symbol -> (threads, dynamic shared memory) of its launches; RuntimeError where a problem of cuda_launches.cpp is refused."""
    program = BUILD / "cuda_launches"
    output(["g++", "-std=c++17", "-O1", RECORDER, *objects, "-o", program])
    found: dict[str, list[tuple[int, int]]] = {}
    for line in output([program]).splitlines():
        symbol, threads, shared = line.split()
        found.setdefault(symbol, []).append((int(threads), int(shared)))
    return found


def disassemble(compiled: Compiled, tools: Path) -> dict[str, list[Instruction]]:
    """Symbol -> instructions."""
    path = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
    return parse_sass(output([tools / "cuobjdump", "-sass", compiled.object], PATH=path))


def short_names(symbols: Iterable[str]) -> dict[str, str]:
    """Mangled names -> names as in attention_fwd<bf16, 128>."""
    ordered = sorted(set(symbols))
    if not ordered:
        return {}
    demangled = subprocess.run(["c++filt"], input="\n".join(ordered), capture_output=True, text=True, check=True).stdout.splitlines()
    return {symbol: shorten(name) for symbol, name in zip(ordered, demangled)}


def shorten(name: str) -> str:
    """`void tiled_attention::(anonymous namespace)::f_kernel<tiled_attention::Tile<(int)64, bf16> >(P)` -> f<64, bf16>: without namespaces,
    arguments and the name of a struct of template arguments that is the only one."""
    name = re.sub(r"\(anonymous namespace\)::|\b_(?:GLOBAL__N_|INTERNAL_)\w*::", "", name)
    name = re.sub(r"\b(tiled_attention|cuda|simt|baseline)::", "", name)
    name = re.sub(r"\(bool\)([01])", lambda match: ("false", "true")[int(match[1])], name)
    name = re.sub(r"\([A-Za-z_][\w: ]*\)(?=-?\d)", "", name)
    depth = 0
    for at, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            name = name[:at]
            break
    name = re.sub(r"^\w+ (?=\w)", "", name).strip().replace("> >", ">>")
    name = re.sub(r"_kernel(?=<|$)", "", name, count=1)
    alone = re.fullmatch(r"(\w+)<\w+<([^<>]*)>>", name)
    return f"{alone[1]}<{alone[2]}>" if alone else name


@dataclass
class Row:
    """One kernel on one target under one launch configuration; what comes from the disassembly is None without a disassembler."""

    kernel: str
    arch: int
    sources: list[str]  # files that hold a copy of it
    resources: Resources
    threads: int | None = None  # None: no launch reaches it
    dynamic_shared: int | None = None
    occupancy: Occupancy | None = None
    instructions: int | None = None
    local: int | None = None  # loads and stores of local memory
    narrow: int | None = None  # global accesses below 16 bytes, in the whole kernel
    loop: dict[str, Any] | None = None  # None also where no loop multiplies

    @property
    def shared(self) -> int:
        """Static and dynamic bytes of a block."""
        return self.resources.static_shared + (self.dynamic_shared or 0)

    def problems(self) -> list[str]:
        """What must not be."""
        used = self.resources
        memory = {
            "bytes of stack frame": used.stack_frame,
            "bytes of spill stores": used.spill_stores,
            "bytes of spill loads": used.spill_loads,
            "bytes of local memory": used.local,
            "accesses of local memory": self.local or 0,
        }
        found = [", ".join(f"{count} {name}" for name, count in memory.items() if count)]
        if self.shared > SHARED_LIMIT:
            found.append(f"{self.shared} bytes of shared memory, at most {SHARED_LIMIT} on every target")
        if self.occupancy and self.occupancy.blocks == 0:
            found.append(f"not one block fits ({self.occupancy.limit})")
        return [f"{self.kernel} on sm_{self.arch}: {problem}" for problem in found if problem]


def loop_of(code: Sequence[Instruction]) -> dict[str, Any] | None:
    """Counts of the main loop."""
    main = main_loop(list(code))
    if main is None:
        return None
    return {
        "tensor": main.tensor,
        "products": main.products,
        "path": len(main.path),
        "body": len(main.body),
        "others_per_product": round((len(main.path) - main.products) / main.products, 2),
        "path_kinds": count_kinds(main.path),
        "body_kinds": count_kinds(main.body),
        "path_narrow": narrow_accesses(main.path),
        "body_narrow": narrow_accesses(main.body),
    }


def describe(compiled: Compiled, kernels: dict[str, list[Instruction]], launches: dict[str, list[tuple[int, int]]]) -> list[Row]:
    """The rows of one translation unit, one per kernel and launch configuration."""
    resources = parse_ptxas(compiled.ptxas)
    names = short_names(resources)
    rows = []
    for symbol, used in resources.items():
        seen = Row(names[symbol], compiled.arch, [compiled.source.name], used)
        if symbol in kernels:
            code = kernels[symbol]
            seen.instructions, seen.loop, seen.narrow = len(code), loop_of(code), narrow_accesses(code)
            seen.local = sum(instruction.kind == "local" for instruction in code)
        for threads, shared in launches.get(symbol, []):
            held = occupancy(compiled.arch, threads, used.registers, used.static_shared + shared)
            rows.append(replace(seen, threads=threads, dynamic_shared=shared, occupancy=held))
        if symbol not in launches:
            rows.append(seen)
    return rows


def merge(rows: Iterable[Row]) -> list[Row]:
    """Copies of a kernel in several files as one row, those without a launch with those that have one, in order of names."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.threads is None):
        used = tuple(value for name, value in vars(row.resources).items() if name != "symbol")
        same = found.setdefault((row.kernel, row.arch, row.instructions, used), [])
        copies = [
            other for other in same if row.threads is None or (other.threads, other.dynamic_shared) == (row.threads, row.dynamic_shared)
        ]
        for other in copies:
            other.sources += [source for source in row.sources if source not in other.sources]
        if not copies:
            same.append(replace(row, sources=list(row.sources)))
    merged = [row for same in found.values() for row in same]
    return sorted(merged, key=lambda row: (row.kernel, row.arch, row.threads or 0, row.dynamic_shared or 0))


HEADER = (
    *("kernel", "sm", "regs", "spill", "shared", "threads", "blocks", "warps", "limit"),
    *("code", "loop", "mul", "other/mul", "mufu", "bar", "narrow"),
)


def cells(row: Row) -> list[str]:
    """One line of the table. loop: instructions of the fast path; narrow: on the fast path / in the kernel."""
    known = lambda value: "-" if value is None else str(value)
    held = row.occupancy
    name = row.kernel + (f" ({len(row.sources)} files)" if len(row.sources) > 1 else "")
    line = [name, str(row.arch), str(row.resources.registers), str(row.resources.spill_stores + row.resources.spill_loads)]
    line += [known(row.shared if row.threads else None), known(row.threads)]
    line += [known(held and held.blocks), known(held and held.warps), known(held and held.limit), known(row.instructions)]
    if row.loop is None:
        return [*line, "-", "-", "-", "-", "-", known(row.narrow)]
    kinds = row.loop["path_kinds"]
    product = f"{row.loop['products']} {'mma' if row.loop['tensor'] else 'fma'}"
    line += [str(row.loop["path"]), product, f"{row.loop['others_per_product']:.2f}"]
    return [*line, str(kinds.get("mufu", 0)), str(kinds.get("barrier", 0)), f"{row.loop['path_narrow']}/{known(row.narrow)}"]


def table(rows: Sequence[Row], detail: bool) -> str:
    """The rows under their header; with `detail` the kinds of instructions below each."""
    lines = [list(HEADER), *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    text = []
    for at, line in enumerate(lines):
        text.append(
            "  ".join(
                cell.ljust(width) if column in (0, 8) else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths))
            )
        )
        loop = rows[at - 1].loop if at else None
        if detail and loop:
            for part in ("path", "body"):
                text.append(f"    {part} {loop[part]}: " + ", ".join(f"{kind} {count}" for kind, count in loop[f"{part}_kinds"].items()))
    return "\n".join(line.rstrip() for line in text)


@dataclass
class Report:
    """All rows, and what is wrong."""

    rows: list[Row]
    problems: list[str]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"rows": [asdict(row) for row in self.rows], "problems": self.problems, "notes": self.notes}


def report(units: Sequence[Path], archs: Sequence[int], jobs: int, with_launches: bool) -> Report:
    """Compile, note the launches, disassemble."""
    compiled, problems = compile_all(units, archs, jobs)
    notes: list[str] = []
    launches: dict[str, list[tuple[int, int]]] = {}
    for unit in compiled:
        if unit.arch == archs[0] and calls_device_functions(unit):
            problems.append(f"{unit.source.name}: the host side calls a __device__ function")
    if with_launches and not problems:
        try:
            launches = record_launches([unit.object for unit in compiled if unit.arch == archs[0]])
        except RuntimeError as error:
            problems.append(f"the launches of cuda_launches.cpp fail: {error}")
    tools = disassemblers()
    if tools is None:
        notes.append("no disassembly: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    for unit in compiled:
        if count := len(re.findall(r"warning #|: warning:|ptxas warning", unit.ptxas)):
            notes.append(f"{unit.source.name} on sm_{unit.arch}: {count} warnings")
    rows = merge(row for unit in compiled for row in describe(unit, disassemble(unit, tools) if tools else {}, launches))
    for row in rows:
        problems += row.problems()
    if launches:
        problems += [
            f"{name}: no launch of cuda_launches.cpp reaches it" for name in sorted({row.kernel for row in rows if row.threads is None})
        ]
    return Report(rows, list(dict.fromkeys(problems)), notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.cu", help=f"(default: all of {INSTANCES}; others are not launched)")
    parser.add_argument("--arch", nargs="+", type=int, choices=ARCHS, default=list(ARCHS), metavar="N", help=f"of {ARCHS} (default: all)")
    parser.add_argument("--only", help="show kernels whose name contains this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write {rows, problems, notes} there")
    parser.add_argument("--detail", action="store_true", help="the main loop's instructions by kind")
    parser.add_argument("-j", "--jobs", type=int, default=int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))
    arguments = parser.parse_args()
    units = arguments.files or sources()
    if not units:
        print(f"{INSTANCES}: no translation units", file=sys.stderr)
        return 1
    result = report(units, arguments.arch, arguments.jobs, with_launches=not arguments.files)
    print(table([row for row in result.rows if not arguments.only or arguments.only in row.kernel], arguments.detail))
    for note in result.notes:
        print(note)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result.as_json(), indent=1))
    for problem in result.problems:
        print(problem, file=sys.stderr)
    print(f"{len({row.kernel for row in result.rows})} kernels, {len(arguments.arch)} targets, {len(result.problems)} problems")
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
