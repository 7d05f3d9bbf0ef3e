"""What torch's `context_parallel` means for the functions here: it replaces F.scaled_dot_product_attention, and the tensors are shards.

Inside it F.scaled_dot_product_attention is called with DTensors sharded along the sequence, whose rows lie in head-tail order where torch
balances the load. Nothing else is told, so that a function which is called in its place would take a shard for the whole.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

STOCK = torch._C._nn.scaled_dot_product_attention  # F.scaled_dot_product_attention, where nothing replaced it
# Where torch keeps it, newest first.
_MODULES = ("torch.distributed.tensor.experimental._context_parallel._attention", "torch.distributed.tensor.experimental._attention")


def inside_context_parallel() -> Any:
    """torch's module of `context_parallel` while one is entered, else None."""
    current = F.scaled_dot_product_attention
    if current is STOCK:
        return None
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is not None:
            return module if current in getattr(module, "_replaced_functions", ()) else None
    return None


def refuse_shards(name: str, *tensors: Tensor) -> None:
    """Raises inside `context_parallel`, where these plain tensors are shards and nothing would make them whole."""
    if inside_context_parallel() is not None and not any(is_traceable_wrapper_subclass(tensor) for tensor in tensors):
        raise RuntimeError(
            f"{name} inside torch's context_parallel would attend to the shard of this rank alone: call "
            "torch.nn.functional.scaled_dot_product_attention, which context_parallel replaces, or distributed.ring_attention"
        )


def is_sharded(query: Any, key: Any, value: Any) -> bool:
    """Whether these are the DTensors that `context_parallel` makes: shards of the sequence, one mesh dimension."""
    if inside_context_parallel() is None or not all(is_traceable_wrapper_subclass(x) for x in (query, key, value)):
        return False
    from torch.distributed.tensor import DTensor, Shard

    return all(isinstance(x, DTensor) and x.dim() == 4 and x.placements == (Shard(2),) for x in (query, key, value))


def attend_sharded(
    query: Any, key: Any, value: Any, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Any:
    """scaled_dot_product_attention of such tensors, by `ring_attention` over the ranks of their mesh; the result sharded as query."""
    from torch.distributed.tensor import DTensor

    from .distributed import ring_attention
    from .masks import Causal

    if attn_mask is not None:
        raise ValueError(f"attn_mask must be None inside torch's context_parallel, got {tuple(attn_mask.shape)}: use is_causal")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise RuntimeError(f"key must have the heads of query without enable_gqa, got {key.shape[1]} and {query.shape[1]}")
    out = ring_attention(
        *(x.to_local() for x in (query, key, value)),
        group=query.device_mesh.get_group(),
        mask=Causal() if is_causal else None,
        scale=scale,
        dropout_p=dropout_p,
        layout="zigzag" if _is_balanced(query) else "contiguous",
    )
    return DTensor.from_local(out, query.device_mesh, query.placements, run_check=False)


def _is_balanced(query: Any) -> bool:
    """Whether rows lie in head-tail order: rank r of W has chunks r and 2 W - 1 - r of 2 W."""
    return bool(inside_context_parallel()._cp_options.enable_load_balance)
