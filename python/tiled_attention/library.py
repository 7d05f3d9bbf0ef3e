"""Loads the operator libraries. `ops` are the raw operators: fixed arity, no defaults; the public functions call them."""

import os
from pathlib import Path
from typing import Any, NoReturn

import torch

# TILED_ATTENTION_LIBRARY names another build of the same library: with other tiles, with a sanitizer, with emulated CUDA kernels.
path = Path(os.environ.get("TILED_ATTENTION_LIBRARY") or Path(__file__).with_name("_cpu.abi3.so"))
if not path.is_file():
    raise ImportError(f"the operator library {path} is missing: build it with `pip install --no-build-isolation -e .`")
torch.ops.load_library(path)

ops = torch.ops.tiled_attention
below_autograd = torch._C._AutoDispatchBelowAutograd  # a context: operators in it are not recorded
below_views = torch._C._AutoDispatchBelowADInplaceOrView  # nor are views tied to their base

# The CUDA kernels of the same operators, where they were built.
cuda_path = path.with_name("_cuda.abi3.so")
_OF_EACH_DEVICE = (
    *("attention_decode", "cache_append_"),
    *("additive_attention_fwd", "additive_attention", "additive_attention_bwd", "additive_attention_weights"),
    *("attention_varlen_fwd", "attention_varlen", "attention_varlen_bwd"),
    *("attention_fwd", "attention", "attention_bwd", "attention_weights", "dropout_mask", "_mask_dense", "_blocks_dense"),
    *("linear_attention_fwd", "linear_attention", "linear_attention_bwd", "linear_attention_step", "linear_attention_step_"),
    "rotate",
)


def load_cuda(library: Path) -> str:
    """Loads the CUDA library. What stands in the way otherwise."""
    if not torch.backends.cuda.is_built():
        return f"this torch ({torch.__version__}) has no CUDA"
    if not library.is_file():
        return (
            "tiled_attention was built without CUDA: install it again where nvcc and this torch are, "
            "with TILED_ATTENTION_CUDA=1, which stops at what is missing"
        )
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"tiled_attention was built with CUDA, but {library} cannot be loaded here: {error}"
    return ""


def refuse_cuda(problem: str) -> torch.library.Library:
    """CUDA kernels that raise `problem`, where torch would say that there are none. They stay while the result does."""

    def refusal(name: str) -> Any:
        def refuse(*args: Any) -> NoReturn:
            raise RuntimeError(f"tiled_attention::{name}: {problem}")

        return refuse

    library = torch.library.Library("tiled_attention", "IMPL")
    for name in _OF_EACH_DEVICE:
        library.impl(name, refusal(name), "CUDA")
    return library


cuda_problem = load_cuda(cuda_path)
# Without CUDA in torch there are no CUDA tensors to refuse.
_refusals = refuse_cuda(cuda_problem) if cuda_problem and torch.backends.cuda.is_built() else None
# Types of devices whose tensors the operators take.
devices = ("cpu",) if cuda_problem else ("cpu", "cuda")
