"""What the operators of a cache return for tensors without data, the same checks, and FLOP counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .arguments import real_dtype
from .compile_cache import register_fake
from .fake import FLOATS, check_dtype, check_vector, dense_like, dtype_name
from .library import ops


def _check_cache(key: Tensor, value: Tensor, like: Tensor, name: str, seqlens: Tensor, table: Tensor | None) -> None:
    """Raises ValueError or TypeError naming the argument. `like`, of that name: what the cache must go with."""
    if like.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, float64, bfloat16 or float16, got {dtype_name(like.dtype)}")
    shape = "(batch, num_heads_kv, capacity, head_dim)" if table is None else "(num_pages, num_heads_kv, page_size, head_dim)"
    for cache_name, cache in (("key_cache", key), ("value_cache", value)):
        if cache.dim() != 4:
            raise ValueError(f"{cache_name} must have shape {shape}, got {tuple(cache.shape)}")
        if cache.dtype != like.dtype:
            raise TypeError(f"{cache_name} must have the dtype of {name} ({dtype_name(like.dtype)}), got {dtype_name(cache.dtype)}")
    if any(a != b for a, b in zip(key.shape[:-1], value.shape[:-1])):
        raise ValueError(f"value_cache must be like key_cache, {tuple(key.shape)}, but for the last size, got {tuple(value.shape)}")
    batch = like.shape[0]
    check_dtype("cache_seqlens", seqlens, (torch.int32, torch.int64))
    check_vector("cache_seqlens", seqlens, seqlens.dtype, batch)
    if table is not None:
        check_dtype("page_table", table, (torch.int32,))
        if table.dim() != 2 or table.shape[0] != batch:
            raise ValueError(f"page_table must have shape ({batch}, pages), got {tuple(table.shape)}")
    elif key.shape[0] != batch:
        raise ValueError(f"key_cache must have the batch of {name} ({batch}), got {tuple(key.shape)}")


def _check_devices(like: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != like.device:
            raise ValueError(f"{name} must be on {like.device} as the other arguments are, got {tensor.device}")


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seqlens: Tensor,
    table: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    lengths: Tensor | None,
    documents: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    if query.dim() != 4:
        raise ValueError(f"query must have shape (batch, num_heads, seqlen_q, head_dim), got {tuple(query.shape)}")
    _check_cache(key, value, query, "query", seqlens, table)
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key_cache must have the head_dim of query ({query.shape[-1]}), got {tuple(key.shape)}")
    heads, heads_kv = query.shape[1], key.shape[1]
    if heads != heads_kv and (heads_kv == 0 or heads % heads_kv != 0):
        raise ValueError(f"key_cache must have num_heads_kv that divides num_heads ({heads}), got {tuple(key.shape)}")
    real = real_dtype(query.dtype)
    for name, vector in (("alibi_slopes", slopes), ("sinks", sinks)):
        if vector is not None:
            check_vector(name, vector, real, heads)
    if lengths is not None:
        check_vector("key_lengths", lengths, torch.int64, query.shape[0])
    _check_devices(query, key_cache=key, value_cache=value, cache_seqlens=seqlens, page_table=table, alibi_slopes=slopes, sinks=sinks)
    _check_devices(query, key_lengths=lengths, documents=documents)
    return dense_like(query, (*query.shape[:-1], value.shape[-1])), query.new_empty(query.shape[:-1], dtype=real)


def _append(key: Tensor, value: Tensor, new_key: Tensor, new_value: Tensor, seqlens: Tensor, table: Tensor | None, pinned: int) -> None:
    for name, tensor in (("new_key", new_key), ("new_value", new_value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have shape (batch, num_heads_kv, n_new, head_dim), got {tuple(tensor.shape)}")
    _check_cache(key, value, new_key, "new_key", seqlens, table)
    check_dtype("new_value", new_value, (new_key.dtype,))
    batch, _, n_new, _ = new_key.shape
    for name, tensor, cache in (("new_key", new_key, key), ("new_value", new_value, value)):
        shape = (batch, cache.shape[1], n_new, cache.shape[3])
        if any(a != b for a, b in zip(tensor.shape, shape)):
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    _check_devices(new_key, key_cache=key, value_cache=value, new_value=new_value, cache_seqlens=seqlens, page_table=table)


register_fake("attention_decode", _decode)
register_fake("cache_append_", _append)


@register_flop_formula(ops.attention_decode)
def _flops(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    seqlens: Sequence[int],
    table: Sequence[int] | None,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """Every slot of the cache, used or not: lengths are values."""
    slots = key[-2] if table is None else key[-2] * table[-1]
    return 2 * math.prod(query[:-1]) * slots * (query[-1] + value[-1])
