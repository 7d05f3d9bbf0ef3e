"""Loads the operator library. `ops` are its raw operators: fixed arity, no defaults; the public functions call them."""

from pathlib import Path

import torch

path = Path(__file__).with_name("_cpu.abi3.so")
if not path.is_file():
    raise ImportError(f"the operator library {path} is missing: build it with `pip install --no-build-isolation -e .`")
torch.ops.load_library(path)

ops = torch.ops.tiled_attention
