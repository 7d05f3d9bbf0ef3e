"""The definition of attention over a cache, in plain PyTorch; part of `tiled_attention.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .masks import Mask


def attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor | None = None,
    new_key: Tensor | None = None,
    new_value: Tensor | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of each batch item over its own keys: those in the cache, then the new ones. The cache is not changed.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim). key_cache: (batch, num_heads_kv, capacity, head_dim), and with page_table
            (num_pages, num_heads_kv, page_size, head_dim); value_cache likewise.
        cache_seqlens: (batch,). page_table: (batch, pages). new_key, new_value: (batch, num_heads_kv, n_new, ...).
        mask, scale, softcap, alibi_slopes, sinks: as in `attention`.

    Returns:
        out (batch, num_heads, seqlen_q, head_dim_v), and with return_lse the log-sum-exp (batch, num_heads, seqlen_q).
    """
    outs, lses = [], []
    for b, length in enumerate(cache_seqlens.tolist()):
        key, value = (cached_rows(cache, length, b, page_table) for cache in (key_cache, value_cache))
        if new_key is not None and new_value is not None:
            key, value = torch.cat([key, new_key[b]], -2), torch.cat([value, new_value[b]], -2)
        visible = None
        if mask is not None:
            visible = mask.dense(query.shape[-2], key.shape[-2], device=query.device)
            visible = visible[b] if visible.dim() > 2 else visible
        out, lse = reference.attention(
            query[b], key, value, mask=visible, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, return_lse=True
        )
        outs.append(out)
        lses.append(lse)
    out, lse = torch.stack(outs), torch.stack(lses)
    return (out, lse) if return_lse else out


def cached_rows(cache: Tensor, length: int, item: int, page_table: Tensor | None = None) -> Tensor:
    """(num_heads_kv, length, dim): the first `length` rows of a batch item."""
    if page_table is None:
        return cache[item, :, :length]
    pages = page_table[item, : -(-length // cache.shape[-2])]
    return cache[pages.long()].transpose(0, 1).flatten(1, 2)[:, :length]
