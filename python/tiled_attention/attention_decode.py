"""Attention over a key-value cache: the public function `attention_decode`, and the append that `KVCache` shares with it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from . import decode_fake  # noqa: F401  (registrations)
from .arguments import NO_INTERVALS, Arguments, real_dtype
from .call import autocast_active, cast_for_autocast, check_number, check_per_head, default_scale, prepare, runs_plain
from .library import below_autograd, ops
from .lowering import lower
from .masks import And, KeyLengths, Mask
from .observers import Call, observers, tell
from .rotary import RotaryEmbedding, check_rotary

NO_RING = -1  # `pinned` of a cache that is no ring

_run = ops.attention_decode.default._op  # past the Python part of OpOverload.__call__
_run_append = ops.cache_append_.default._op
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_functorch_active = torch._C._are_functorch_transforms_active


@overload
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
    rotary: RotaryEmbedding | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
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
    rotary: RotaryEmbedding | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
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
    rotary: RotaryEmbedding | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    rotary: RotaryEmbedding | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of few queries over the keys of a cache, in one pass over those that are visible; the formula of `attention`.

    Batch item b has length_b = cache_seqlens[b] keys, and with new_key the n_new of it too, which are first written to the cache, in
    place, behind the others. Query i stands at position length_b - seqlen_q + i: the last query at the last key. Time and memory follow
    the keys that are visible, not the capacity. What lies behind length_b is never read. For inference: no gradients.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim), float32, float64, bfloat16 or float16, any strides. One row per new token: one in
            ordinary decoding, a few to verify a speculative block.
        key_cache: (batch, num_heads_kv, capacity, head_dim), num_heads_kv a divisor of num_heads, dtype of query, any strides. With
            `page_table`: (num_pages, num_heads_kv, page_size, head_dim).
        value_cache: the same with head_dim_v.
        cache_seqlens: int32 or int64 (batch,), the keys in the cache before `new_key`. 0 is legal. It is not changed.
        page_table: int32 (batch, pages): key j of item b stands in row j % page_size of page page_table[b, j // page_size]. Entries that no
            visible key needs may hold anything.
        new_key: (batch, num_heads_kv, n_new, head_dim), dtype of query, appended before attending. They must fit behind cache_seqlens.
            None: nothing is appended.
        new_value: (batch, num_heads_kv, n_new, head_dim_v), given with new_key.
        mask: a mask of intervals: `Causal`, `SlidingWindow`, `PrefixLM`, `Chunked`, `Sinks`, `KeyLengths`, `Documents` and what `&` and `|`
            make of them without a dense part. None: every query sees all keys, cached and new; several new queries want `Causal()`.
        scale: multiplies query . key; None: head_dim ** -0.5.
        softcap: c of c * tanh(score / c), > 0; None: none.
        alibi_slopes: (num_heads,), adds -slope * |position of the query - position of the key|.
        sinks: (num_heads,), logits that take part in the denominator only.
        rotary: a `RotaryEmbedding` of static frequencies. Turns each query at its position and each new key at its own before it is
            written: the cache holds turned keys, those of before the call included. None: no turning.
        return_lse: also return the log-sum-exp.

    Returns:
        out (batch, num_heads, seqlen_q, head_dim_v), dtype of query, dense in its dimension order. With `return_lse` (out, lse), lse
        (batch, num_heads, seqlen_q) float32 (float64 for float64). A query that sees no key: 0, and -inf or the logit of the sink.

    The same bits for every number of threads. Autocast casts query, new_key and new_value. torch.compile captures it, in-place append
    included. On CUDA nothing waits for the device, so that calls can be captured in a graph.

    Raises:
        ValueError, TypeError, RuntimeError: naming the argument. On CUDA the values of cache_seqlens and page_table are not checked:
            lengths act as if limited to the capacity, new keys behind it are dropped, keys of pages out of range are hidden.

    Source: Dao et al., Flash-Decoding for long-context inference (2023), for the split over keys; Kwon et al., Efficient memory management
    for large language model serving with PagedAttention (2023), for pages.
    """
    if (
        new_key is None
        and new_value is None
        and mask is None
        and scale is None
        and softcap is None
        and alibi_slopes is None
        and sinks is None
        and rotary is None
        and isinstance(query, Tensor)
        and isinstance(key_cache, Tensor)
        and isinstance(value_cache, Tensor)
        and isinstance(cache_seqlens, Tensor)
        and query.dim() == 4
        and runs_plain(query, key_cache, value_cache)
    ):
        # The shortest way for the plain call; the operator checks the rest.
        without = None
        with below_autograd():
            out, lse = _run(
                *(query, key_cache, value_cache, cache_seqlens, page_table, without, without),
                *(without, without, default_scale(query.shape[-1]), 0.0, (), 0, NO_RING),
            )
        return (out, lse) if return_lse else out
    return decode(
        query,
        key_cache,
        value_cache,
        cache_seqlens,
        page_table,
        new_key,
        new_value,
        mask,
        scale,
        softcap,
        alibi_slopes,
        sinks,
        return_lse,
        NO_RING,
        rotary,
    )


def decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    new_key: Tensor | None,
    new_value: Tensor | None,
    mask: Mask | None,
    scale: float | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    return_lse: bool,
    pinned: int,
    rotary: RotaryEmbedding | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_decode`, also over a ring that keeps its first `pinned` keys (NO_RING: over a cache that is none)."""
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache), ("cache_seqlens", cache_seqlens)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if query.dim() != 4:
        raise ValueError(f"query must have shape (batch, num_heads, seqlen_q, head_dim), got {tuple(query.shape)}")
    _refuse_transforms()
    if _is_grad_enabled():
        _refuse_derivatives(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            new_key=new_key,
            new_value=new_value,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
        )
    if autocast_active():
        query, new_key, new_value = (cast_for_autocast(tensor) for tensor in (query, new_key, new_value))
    scale = default_scale(query.shape[-1]) if scale is None else check_number("scale", scale, "a finite number", math.isfinite)
    softcap = 0.0 if softcap is None else check_number("softcap", softcap, "a finite number > 0", lambda x: 0 < x < math.inf)
    real = real_dtype(query.dtype)
    if alibi_slopes is not None:
        alibi_slopes = check_per_head("alibi_slopes", alibi_slopes, query.shape[-3], real)
    if sinks is not None:
        sinks = check_per_head("sinks", sinks, query.shape[-3], real)
    if rotary is not None:
        after = new_key.shape[-2] if isinstance(new_key, Tensor) and new_key.dim() == 4 else 0
        if new_key is not None:
            new_key = turn_new("new_key", new_key, cache_seqlens, rotary)
        query = turn_new("query", query, cache_seqlens + (after - query.shape[-2]), rotary)
    intervals, key_lengths, documents = ((), None, None) if mask is None else _lower(mask, query, key_cache, page_table)
    num_new = 0
    if new_key is not None or new_value is not None:
        num_new = append(key_cache, value_cache, new_key, new_value, cache_seqlens, page_table, pinned)
    if _is_compiling():
        intervals = tuple(intervals) or NO_INTERVALS  # as in without_empty_lists
    args = (
        *(query, key_cache, value_cache, cache_seqlens, page_table, alibi_slopes, sinks),
        *(key_lengths, documents, scale, softcap, intervals, num_new, pinned),
    )
    if _is_compiling():
        out, lse = ops.attention_decode(*args)
    else:
        with below_autograd():
            out, lse = _run(*args)
        if observers:
            lengths, options = cache_seqlens + num_new, (scale, softcap or None, alibi_slopes, sinks)
            tell(Call(query, key_cache, partial(_gathered, query, key_cache, lengths, page_table, mask, pinned, options), lse))
    return (out, lse) if return_lse else out


def _gathered(
    query: Tensor, key_cache: Tensor, lengths: Tensor, page_table: Tensor | None, mask: Mask | None, pinned: int, options: Any
) -> Arguments:
    """The call of `attention` that says the same: keys by their position, those that a ring has overwritten hidden."""
    lengths = lengths.long()
    most = int(lengths.max()) if lengths.numel() else 0
    positions = torch.arange(most, device=lengths.device)
    slots = key_cache.shape[-2] if page_table is None else key_cache.shape[-2] * page_table.shape[-1]
    visible: Mask = KeyLengths(lengths)
    where = positions
    if pinned != NO_RING and most > slots:
        where = torch.where(positions < slots, positions, pinned + (positions - pinned) % (slots - pinned))
        held = (positions < pinned) | (positions >= lengths[:, None] - (slots - pinned))
        visible = And(visible, held[:, None, None, :])
    if page_table is None:
        key = key_cache.index_select(2, where)
    else:
        size = key_cache.shape[2]
        pages = torch.where(positions < lengths[:, None], page_table.long()[:, where // size], 0)
        key = key_cache[pages, :, where % size].transpose(1, 2)
    visible = visible if mask is None else And(mask, visible)
    scores: Any = (visible, None, *options, 0.0, None, lengths - query.shape[-2])
    return prepare(query, key, None, *scores)


def append(
    key_cache: Tensor,
    value_cache: Tensor,
    new_key: Tensor | None,
    new_value: Tensor | None,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    pinned: int,
) -> int:
    """Writes the new keys and values behind those that are there. Returns how many there are of each."""
    if not isinstance(new_key, Tensor) or not isinstance(new_value, Tensor):
        name, tensor = ("new_key", new_key) if not isinstance(new_key, Tensor) else ("new_value", new_value)
        raise TypeError(f"{name} must be a tensor where the other of new_key and new_value is one, got {type(tensor).__name__}")
    args = (key_cache, value_cache, new_key, new_value, cache_seqlens, page_table, pinned)
    if _is_compiling():
        ops.cache_append_(*args)
        return new_key.shape[-2]
    _refuse_transforms()
    if _is_grad_enabled():
        _refuse_derivatives(key_cache=key_cache, value_cache=value_cache, new_key=new_key, new_value=new_value)
    with below_autograd():
        write(*args)
    increment_version((key_cache, value_cache))
    return new_key.shape[-2]


def write(key_cache: Tensor, value_cache: Tensor, *others: Any) -> None:
    """`append` below autograd; the caller tells autograd that the caches changed."""
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if torch._debug_has_internal_overlap(cache) == 1:
            raise ValueError(f"{name} must hold every element by itself to be appended to, got strides {cache.stride()}")
    _run_append(key_cache, value_cache, *others)


def turn_new(name: str, rows: Any, first: Tensor, rotary: Any) -> Tensor:
    """rows (batch, heads, n, head_dim) turned at first[b], first[b] + 1, ..."""
    check_rotary(rotary)
    if rotary.scaling is not None and rotary.scaling.kind == "dynamic":
        raise ValueError("rotary must have the same frequencies at every length, for a cache of turned keys, got dynamic scaling")
    rotary.check(name, rows)
    if first.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cache_seqlens must be int32 or int64, got {first.dtype}")
    if first.shape != rows.shape[:1]:
        raise ValueError(f"cache_seqlens must have shape {tuple(rows.shape[:1])}, got {tuple(first.shape)}")
    positions = first[:, None, None] + torch.arange(rows.shape[-2], device=first.device)
    return rotary.turn(rows, *rotary.tables(positions, dtype=real_dtype(rows.dtype)))


def _refuse_derivatives(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise RuntimeError(
                f"{name} must not require a gradient: attention over a cache is for inference, call it under torch.no_grad() or use "
                "attention()"
            )


def _refuse_transforms() -> None:
    if _functorch_active() or (not _is_compiling() and forward_ad._current_level >= 0):
        raise RuntimeError("attention over a cache is for inference: it has no torch.func transforms and no forward mode, use attention()")


def _lower(mask: Any, query: Tensor, key_cache: Tensor, page_table: Tensor | None) -> tuple[Any, Tensor | None, Tensor | None]:
    """(intervals, key_lengths, documents) of a mask of intervals."""
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a mask of intervals such as Causal() or SlidingWindow(left, 0), or None, got {type(mask).__name__}")
    slots = key_cache.shape[-2] if page_table is None else key_cache.shape[-2] * page_table.shape[-1]
    lowered = lower(
        mask,
        batch_shape=query.shape[:-3],
        num_heads=query.shape[-3],
        seqlen_q=query.shape[-2],
        seqlen_kv=slots,
        device=query.device,
        block_lists=False,
    )
    if lowered.mask is not None:
        raise ValueError(f"mask must be made of intervals (Causal, SlidingWindow, Chunked, Sinks, ...) without a dense part, got {mask!r}")
    return lowered.intervals, lowered.key_lengths, lowered.documents
