"""Builds the operator libraries; everything static is in pyproject.toml.

The CPU kernels are compiled once per instruction set; the extension links all of them and chooses at run time. The CUDA kernels are a
second extension, from the same operators. Objects of kernels stay in build/kernels-<platform> and build/cuda-<platform>-<targets>, so that
editable installs rebuild only what changed.
Environment:
    MAX_JOBS                    how many compilers may run at a time
    TILED_ATTENTION_ISAS        the instruction sets of the CPU kernels, such as "baseline avx2"; all of them by default
    TILED_ATTENTION_CUDA        auto (default): build the CUDA kernels where nvcc and a torch with the same CUDA are, and go on without them
                                where that fails; 1: stop where it fails; 0: leave them out
    TILED_ATTENTION_CUDA_ARCHS  their targets, such as "80 90"; PTX of the last one serves later devices
"""

import copy
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(
        f"tiled-attention does not support free-threaded Python, and {sys.executable} is one: it takes no wheel of the limited API (abi3), "
        "and nothing here is tested without the GIL. Use the ordinary build of the same Python."
    )

import torch
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError
from torch.utils.cpp_extension import CUDA_HOME, include_paths, library_paths

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
ISA_FLAGS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    ISA_FLAGS |= {"avx2": AVX2, "avx512": AVX512, "avx512bf16": [*AVX512, "-mavx512bf16"]}

ISAS = (os.environ.get("TILED_ATTENTION_ISAS") or " ".join(ISA_FLAGS)).split()
KERNEL_SOURCES = ["csrc/cpu/kernels.cpp", *sorted(glob("csrc/cpu/instances/*.cpp"))]
KERNEL_FLAGS = [
    "-std=gnu++17",
    "-O3",
    "-g0",
    "-fno-wrapv",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fPIC",
]

OPERATORS = sorted({*glob("csrc/*.cpp")} - {"csrc/library.cpp", "csrc/cuda_library.cpp"})
# Stable ABI of torch 2.10 and later; no symbol of Python is used.
MACROS = [("TORCH_TARGET_VERSION", "0x020a000000000000"), ("TORCH_STABLE_ONLY", None), ("Py_LIMITED_API", "0x030a0000")]

CUDA = os.environ.get("TILED_ATTENTION_CUDA") or "auto"
CUDA_ARCHS = re.findall(r"\d+[af]?", (os.environ.get("TILED_ATTENTION_CUDA_ARCHS") or "80 90 100 120").replace(".", ""))
CUDA_KERNELS = sorted(glob("csrc/cuda/instances/*.cu"))
CUDA_FLAGS = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Icsrc"]


class CudaMissing(Exception):
    """Why the CUDA kernels cannot be built here."""


def nvcc() -> str:
    """The compiler, if it is there and its code can be linked with this torch."""
    if torch.version.cuda is None:
        raise CudaMissing(f"torch {torch.__version__} has no CUDA")
    found = shutil.which(os.path.join(CUDA_HOME or "", "bin", "nvcc")) or shutil.which("nvcc")
    if found is None:
        raise CudaMissing("nvcc was not found: set CUDA_HOME, or put it on the PATH")
    release = re.search(r"release (\d+)\.(\d+)", subprocess.run([found, "--version"], capture_output=True, text=True).stdout)
    if release is None or release[1] != torch.version.cuda.split(".")[0]:
        raise CudaMissing(
            f"{found} is of CUDA {release[0] if release else 'unknown'}, torch {torch.__version__} of CUDA {torch.version.cuda}"
        )
    return found


def cuda_folders() -> list[str]:
    """Where nvcc links from: it may be a script anywhere that calls the one in its toolkit."""
    commands = subprocess.run([nvcc(), "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    return re.findall(r'"-L([^"]+)"', next((line for line in commands.splitlines() if line.startswith("#$ LIBRARIES=")), ""))


def gencode() -> list[str]:
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in CUDA_ARCHS]
    return [*targets, f"-gencode=arch=compute_{CUDA_ARCHS[-1]},code=compute_{CUDA_ARCHS[-1]}"]


def up_to_date(target: str) -> bool:
    """Whether an object is newer than all it was made of, which the compiler listed beside it."""
    try:
        with open(target.removesuffix(".o") + ".d") as listed:
            made_of = listed.read().replace("\\\n", " ").partition(": ")[2].split()
        age = os.path.getmtime(target)
        return all(os.path.getmtime(path) < age for path in [*made_of, "setup.py"])
    except OSError:
        return False


def compile_objects(commands: dict[str, list[str]]) -> None:
    """Runs the compilers side by side, each for its object where that is out of date; CompileError with what the first one to fail said."""

    def compiled(item: tuple[str, list[str]]) -> None:
        target, command = item
        if not up_to_date(target):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            command = [*command, "-MMD", "-MF", target.removesuffix(".o") + ".d", "-o", target]
            print(" ".join(command), flush=True)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                if os.path.exists(target):
                    os.remove(target)
                raise CompileError(f"{target} cannot be made:\n{done.stdout}{done.stderr}")

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        try:
            list(pool.map(compiled, commands.items()))
        except CompileError:
            pool.shutdown(cancel_futures=True)
            raise


def object_of(folder: str, source: str) -> str:
    return os.path.join(folder, os.path.splitext(os.path.basename(source))[0] + ".o")


def compile_kernels(compiler: list[str], folder: str) -> list[str]:
    """The objects of the CPU kernels, one folder for each instruction set."""
    commands = {}
    for isa in ISAS:
        for source in KERNEL_SOURCES:
            target = object_of(os.path.join(folder, isa), source)
            commands[target] = [*compiler, *KERNEL_FLAGS, *ISA_FLAGS[isa], f"-DKERNEL_ISA={isa}", "-c", source]
    compile_objects(commands)
    return list(commands)


def compile_cuda(folder: str) -> list[str]:
    """The objects of the CUDA kernels."""
    names = " ".join([*(f"sm_{arch}" for arch in CUDA_ARCHS), f"compute_{CUDA_ARCHS[-1]}"])
    command = [nvcc(), *CUDA_FLAGS, *gencode(), f'-DTILED_ATTENTION_CUDA_ARCHS="{names}"', "-c"]
    commands = {object_of(folder, source): [*command, source] for source in CUDA_KERNELS}
    compile_objects(commands)
    return list(commands)


def cuda_extension() -> list[Extension]:
    """The extension of the CUDA kernels, if it is to be built; CudaMissing where it has to be and cannot."""
    if CUDA not in ("auto", "0", "1"):
        sys.exit(f"TILED_ATTENTION_CUDA must be auto, 0 or 1, got {CUDA}")
    if not CUDA_ARCHS:
        sys.exit(f"TILED_ATTENTION_CUDA_ARCHS must name targets such as 80 or 9.0, got {os.environ['TILED_ATTENTION_CUDA_ARCHS']}")
    if CUDA == "0":
        return []
    try:
        folders = cuda_folders()
    except CudaMissing as missing:
        if CUDA == "1":
            sys.exit(f"TILED_ATTENTION_CUDA=1, but {missing}")
        print(f"building without CUDA: {missing}", flush=True)
        return []
    extension = Extension(
        "tiled_attention._cuda",
        sources=["csrc/cuda_library.cpp", *OPERATORS],
        depends=[*sorted(glob("csrc/*.h")), *glob("csrc/core/*.h"), *glob("csrc/cuda/*"), *CUDA_KERNELS, "setup.py"],
        include_dirs=include_paths(),
        define_macros=[*MACROS, ("TILED_ATTENTION_BACKEND_CUDA", None), ("USE_CUDA", None)],
        extra_compile_args=["-O2", "-g0", "-fvisibility=hidden"],
        library_dirs=[*library_paths(), *folders],
        libraries=["torch", "torch_cuda", "torch_cpu", "c10_cuda", "c10", "cudart"],
        py_limited_api=True,
        language="c++",
    )
    return [extension]


class BuildOperators(build_ext):
    """Compiles the kernels first, then links each library with its own. Asks for C++17 where the compiler's default is older, and otherwise
    leaves the standard to the compiler and to torch's headers. A failure of the CUDA extension costs only that extension, unless
    TILED_ATTENTION_CUDA=1."""

    def build_extensions(self) -> None:
        compiler = getattr(self.compiler, "compiler_so_cxx", None) or self.compiler.compiler_so
        macros = subprocess.run([*compiler, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, check=True).stdout
        standard = next(line.split()[-1] for line in macros.splitlines() if line.startswith("#define __cplusplus "))
        if int(standard.rstrip("L")) < 201703:
            for extension in self.extensions:
                extension.extra_compile_args.append("-std=gnu++17")
        super().build_extensions()

    def build_extension(self, extension: Extension) -> None:
        folder = os.path.join(self.get_finalized_command("build").build_base, f"kernels-{sysconfig.get_platform()}")
        if not extension.name.endswith("._cuda"):
            compiler = getattr(self.compiler, "compiler_so_cxx", None) or self.compiler.compiler_so
            extension.extra_objects = compile_kernels(compiler, folder)
            extension.depends += extension.extra_objects
            return super().build_extension(extension)
        # The operators are compiled a second time, beside the objects of the first.
        command = copy.copy(self)
        command.build_temp = os.path.join(self.build_temp, "cuda")
        try:
            extension.extra_objects = compile_cuda(folder.replace("kernels-", "cuda-") + f"-{'-'.join(CUDA_ARCHS)}")
            extension.depends += extension.extra_objects
            super(BuildOperators, command).build_extension(extension)
        except (CudaMissing, CCompilerError) as problem:
            if CUDA == "1":
                raise
            print(f"WARNING: going on without CUDA: {problem}", file=sys.stderr, flush=True)
            self.extensions.remove(extension)


if unknown := sorted(set(ISAS) - set(ISA_FLAGS)):
    sys.exit(f"TILED_ATTENTION_ISAS must name instruction sets of {', '.join(ISA_FLAGS)}, got {' '.join(unknown)}")

setup(
    ext_modules=[
        Extension(
            "tiled_attention._cpu",
            sources=["csrc/library.cpp", *OPERATORS, "csrc/cpu/select.cpp"],
            depends=[*sorted(glob("csrc/*.h")), *glob("csrc/core/*.h"), *glob("csrc/cpu/*"), *KERNEL_SOURCES, "setup.py"],
            include_dirs=include_paths(),
            define_macros=[*MACROS, *((f"TILED_ATTENTION_ISA_{isa.upper()}", None) for isa in ISAS)],
            extra_compile_args=["-O2", "-g0", "-fvisibility=hidden"],
            library_dirs=library_paths(),
            libraries=["torch", "torch_cpu", "c10"],
            py_limited_api=True,
            language="c++",
        ),
        *cuda_extension(),
    ],
    cmdclass={"build_ext": BuildOperators},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
