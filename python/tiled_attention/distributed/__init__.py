"""Attention over the ranks of `torch.distributed`: `import tiled_attention.distributed`."""

from typing import Any

from .linear import linear_attention

__all__ = ["HeadwiseParallel", "linear_attention"]


def __getattr__(name: str) -> Any:
    if name == "HeadwiseParallel":  # importing DTensor takes as long as the rest
        from .tensor_parallel import HeadwiseParallel

        return HeadwiseParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
