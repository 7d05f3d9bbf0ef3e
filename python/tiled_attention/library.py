"""Loads the operator library. `ops` are its raw operators: fixed arity, no defaults; the public functions call them."""

import os
from pathlib import Path

import torch

# TILED_ATTENTION_LIBRARY names another build of the same library: with other tiles, with a sanitizer.
path = Path(os.environ.get("TILED_ATTENTION_LIBRARY") or Path(__file__).with_name("_cpu.abi3.so"))
if not path.is_file():
    raise ImportError(f"the operator library {path} is missing: build it with `pip install --no-build-isolation -e .`")
torch.ops.load_library(path)

ops = torch.ops.tiled_attention
