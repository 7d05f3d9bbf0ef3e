"""`python -m tiled_attention info`: what is installed here, and what it runs on."""

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from .library import ops


def information() -> dict[str, str]:
    """Lines of the report, by name."""
    from .compare.machine import cpu_model

    try:
        version = importlib.metadata.version("tiled-attention")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed, used from its folder"
    from . import library

    return {
        "tiled-attention": version,
        "operator library": str(getattr(library, "path", "not loaded from a file")),
        "instruction set": str(ops._isa()),
        "instruction sets here": str(ops._available_isas()),
        "forced by TILED_ATTENTION_ISA": os.environ.get("TILED_ATTENTION_ISA", "no"),
        "CUDA": _cuda(),
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda or "none",
        "Python": platform.python_version(),
        "processor": cpu_model(),
        "threads": f"{torch.get_num_threads()} (of {os.cpu_count()} logical processors)",
    }


def _cuda() -> str:
    from . import library

    if not library.cuda_path.is_file():
        return "not built"
    return library.cuda_problem or f"built for {ops._cuda_architectures()}"


def cmake_prefix_path() -> str:
    """Where `find_package(TiledAttention)` finds it and torch: the value of CMAKE_PREFIX_PATH."""
    return f"{Path(__file__).parent};{torch.utils.cmake_prefix_path}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--library", action="store_true", help="print only the path of the operator library, for programs that load it")
    only.add_argument("--cmake-prefix-path", action="store_true", help="print only CMAKE_PREFIX_PATH for find_package(TiledAttention)")


def run(args: argparse.Namespace) -> int:
    """Print the report, or the one line that was asked for; always 0."""
    from . import library

    if args.library or args.cmake_prefix_path:
        print(library.path if args.library else cmake_prefix_path())
        return 0
    rows = information()
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        width = max(map(len, rows))
        for name, value in rows.items():
            print(f"{name:{width}}  {value}")
        return 0
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    return 0
