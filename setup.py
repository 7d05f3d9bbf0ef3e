"""Builds the operator library; everything static is in pyproject.toml.

The CPU kernels are one source, compiled once per instruction set into an object library of its own; the extension links all of them and
chooses at run time. Objects stay in build/kernels-<platform>, so that editable installs rebuild only what changed.
Environment: MAX_JOBS, how many compilers may run at a time.
"""

import copy
import os
import platform
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext
from torch.utils.cpp_extension import include_paths, library_paths

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
ISA_FLAGS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    ISA_FLAGS |= {"avx2": AVX2, "avx512": AVX512, "avx512bf16": [*AVX512, "-mavx512bf16"]}

KERNEL_SOURCE = "csrc/cpu/kernels.cpp"
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
KERNEL_HEADERS = sorted([*glob("csrc/core/*.h"), *glob("csrc/cpu/*.h")])


def kernel_library(isa: str, flags: list[str]) -> tuple[str, dict]:
    """One object library for build_clib."""
    return f"tiled_attention_{isa}", {
        "sources": [KERNEL_SOURCE],
        "obj_deps": {"": [*KERNEL_HEADERS, "setup.py"]},
        "macros": [("KERNEL_ISA", isa)],
        "cflags": [*KERNEL_FLAGS, *flags],
    }


class BuildKernels(build_clib):
    """Compiles the object libraries side by side, each in a folder of its own since all have the same source."""

    def finalize_options(self) -> None:
        super().finalize_options()
        build_base = self.get_finalized_command("build").build_base
        self.build_clib = os.path.join(build_base, f"kernels-{sysconfig.get_platform()}")

    def build_libraries(self, libraries: list) -> None:
        def build(library: tuple) -> None:
            command = copy.copy(self)
            command.build_temp = os.path.join(self.build_clib, library[0])
            super(BuildKernels, command).build_libraries([library])

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            list(pool.map(build, libraries))


class BuildOperators(build_ext):
    """Builds the object libraries first. Asks for C++17 where the compiler's default is older, and otherwise leaves the standard to the
    compiler and to torch's headers."""

    def run(self) -> None:
        self.run_command("build_clib")
        super().run()

    def build_extensions(self) -> None:
        compiler = getattr(self.compiler, "compiler_so_cxx", None) or self.compiler.compiler_so
        macros = subprocess.run([*compiler, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, check=True).stdout
        standard = next(line.split()[-1] for line in macros.splitlines() if line.startswith("#define __cplusplus "))
        if int(standard.rstrip("L")) < 201703:
            for extension in self.extensions:
                extension.extra_compile_args.append("-std=gnu++17")
        super().build_extensions()


setup(
    libraries=[kernel_library(isa, flags) for isa, flags in ISA_FLAGS.items()],
    ext_modules=[
        Extension(
            "tiled_attention._cpu",
            sources=["csrc/library.cpp", "csrc/attention.cpp", "csrc/linear_attention.cpp", "csrc/cpu/select.cpp"],
            depends=[*sorted(glob("csrc/*.h")), *KERNEL_HEADERS, KERNEL_SOURCE, "setup.py"],
            include_dirs=include_paths(),
            # Stable ABI of torch 2.10 and later; no symbol of Python is used.
            define_macros=[
                ("TORCH_TARGET_VERSION", "0x020a000000000000"),
                ("TORCH_STABLE_ONLY", None),
                ("Py_LIMITED_API", "0x030a0000"),
            ],
            extra_compile_args=["-O2", "-g0", "-fvisibility=hidden"],
            library_dirs=library_paths(),
            libraries=["torch", "torch_cpu", "c10"],
            py_limited_api=True,
            language="c++",
        )
    ],
    cmdclass={"build_clib": BuildKernels, "build_ext": BuildOperators},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
