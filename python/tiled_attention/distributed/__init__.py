"""Attention over tensors that are divided between the ranks of a torch.distributed process group."""

from typing import Any

from .layout import gather_sequence, shard_sequence
from .linear import linear_attention
from .ring_attention import ring_attention

__all__ = ["HeadwiseParallel", "gather_sequence", "linear_attention", "ring_attention", "shard_sequence"]


def __getattr__(name: str) -> Any:
    if name == "HeadwiseParallel":  # DTensor is imported by who uses it
        from .tensor_parallel import HeadwiseParallel

        return HeadwiseParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
