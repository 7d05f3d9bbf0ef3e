"""flash_attn_with_kvcache, on `attention_decode`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..arguments import real_dtype
from ..attention_decode import NO_RING, attention_decode, write
from ..attention_decode import _run as run_decode
from ..call import default_scale, runs_plain
from ..library import below_views
from ..masks import Mask
from ..rotate import rotate
from .autograd import heads_first
from .options import ERRORS, EVERY_KEY, check_table, explain, is_integer, option_values, pattern_of, refuse


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_decode` behind the signature of flash_attn 2.8: new keys and values are written to the cache, in place, and attended to.

    Item b has n = cache_seqlens[b] keys in the cache, and seqlen_new more with k. Query row i stands at n + seqlen_new - seqlen_q + i.

    Args:
        q: (batch_size, seqlen_q, nheads, headdim), float16, bfloat16, float32 or float64, on CPU or CUDA. Any strides.
        k_cache: (batch_size_cache, seqlen_cache, nheads_k, headdim); with `block_table` (num_blocks, page_block_size, nheads_k, headdim),
            with pages of any size. Any strides, no copies.
        v_cache: likewise, (..., headdim_v).
        k: (batch_size, seqlen_new, nheads_k, headdim), written behind the keys of the cache; they must fit. None: nothing is written.
        v: (batch_size, seqlen_new, nheads_k, headdim_v), given with k.
        rotary_cos: (seqlen_ro, rotary_dim / 2), seqlen_ro at least the capacity of the cache, any float dtype: turns q and k, before k is
            written. Only with k. Row r of k stands at n + r; row i of q at n + i where `causal` or a window is given, or else at n.
        rotary_sin: as rotary_cos.
        cache_seqlens: n: an integer, or int32 or int64 (batch_size,). None: the whole cache, and no k.
        cache_batch_idx: (batch_size,), integers: item b uses item cache_batch_idx[b] of the cache. None: item b. Not with `block_table`.
        cache_leftpad: (batch_size,), integers: where the keys of item b begin in the cache; those before are not seen. Not
            with `block_table`.
        block_table: (batch_size, max_blocks), int32: key j of item b is row j % page_block_size of page
            block_table[b, j // page_block_size].
        softmax_scale, causal, window_size, softcap: as in `flash_attn_func`.
        rotary_interleaved: pairs are columns 2 r and 2 r + 1; if not, r and r + rotary_dim / 2. Default True.
        alibi_slopes: (nheads,); or (batch_size, nheads), which goes item by item.
        num_splits: accepted; how the keys are split follows the shapes.
        return_softmax_lse: also return softmax_lse. Default False.

    Returns:
        out (batch_size, seqlen_q, nheads, headdim_v), dtype of q; with `return_softmax_lse` (out, softmax_lse), softmax_lse (batch_size,
        nheads, seqlen_q), -inf where a row sees no key.

    For inference: an input that requires a gradient is refused where gradients are recorded.

    Raises:
        RuntimeError, TypeError, ValueError: naming the argument. On CUDA the values of lengths and indices are not checked.

    Source: the documented interface of flash_attn 2.8.
    """
    try:
        if q.dim() != 4 or k_cache.dim() != 4 or v_cache.dim() != 4:
            refuse("q and the caches must have 4 dimensions")
        sees_all = causal and q.shape[1] == 1 and window_size[0] < 0
        mask, intervals = EVERY_KEY if sees_all else pattern_of(causal, window_size)
        if block_table is not None:
            check_table("block_table", block_table, q.shape[0])
        if (
            rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is alibi_slopes is None
            and softcap <= 0
            and (softmax_scale is None or (type(softmax_scale) is float and math.isfinite(softmax_scale)))
            and isinstance(cache_seqlens, Tensor)
            and runs_plain(q, k_cache, v_cache)
            and (k is v is None or _may_write(k, v))
        ):
            out, lse = _decode_directly(q, k_cache, v_cache, k, v, cache_seqlens, block_table, softmax_scale, intervals)
            return (out, lse) if return_softmax_lse else out
        query, key_cache, value_cache = heads_first(q, k_cache, v_cache)
        lengths = cache_seqlens if isinstance(cache_seqlens, Tensor) else _lengths(cache_seqlens, q, k_cache, block_table, k)
        if k is None and v is None:
            if rotary_cos is not None or rotary_sin is not None:
                refuse("rotary_cos and rotary_sin turn new keys: k and v must be given with them, got None")
            new_key = new_value = None
        else:
            for name, rows in (("k", k), ("v", v)):
                if rows is None or rows.dim() != 4:
                    refuse(f"{name} must be a tensor (batch_size, seqlen_new, nheads_k, headdim) where the other of k and v is given")
            new_key, new_value = k.transpose(1, 2), v.transpose(1, 2)  # type: ignore[union-attr]
            if rotary_cos is not None or rotary_sin is not None:
                _check_tables(rotary_cos, rotary_sin, query, key_cache, block_table)
                moving = bool(causal) or mask is not None
                query, new_key = (
                    _turn(rows, rotary_cos, rotary_sin, lengths, rotary_interleaved, turning)
                    for rows, turning in ((query, moving), (new_key, True))
                )
        pages = block_table
        if cache_leftpad is not None or cache_batch_idx is not None:
            if block_table is not None:
                refuse("block_table must be None with cache_batch_idx or cache_leftpad")
            index = _index("cache_batch_idx", cache_batch_idx, q, k_cache)
            if cache_leftpad is None:
                pages = index.to(torch.int32)[:, None]  # an item of the cache is a page
            else:
                first = _index("cache_leftpad", cache_leftpad, q, k_cache)
                _check_room(lengths, first, 0 if new_key is None else new_key.shape[2], k_cache.shape[1])
                key_cache, value_cache, pages = _rows_as_pages(k_cache, v_cache, index, first)
                lengths = lengths - first.to(lengths.dtype)
        caches = (key_cache, value_cache, new_key, new_value, lengths, pages)
        out, lse = _decode(query, *caches, mask, softmax_scale, softcap if softcap > 0 else None, alibi_slopes)
        out = out.transpose(1, 2)
        return (out, lse) if return_softmax_lse else out
    except ERRORS as error:
        where = "batch_size_cache seqlen_cache" if block_table is None else "num_blocks page_block_size"
        if block_table is None and cache_batch_idx is None:
            where = "batch_size seqlen_cache"
        shapes: dict[str, tuple[Any, str]] = {
            "q": (q, "batch_size seqlen_q nheads headdim"),
            "k_cache": (k_cache, f"{where} nheads_k headdim"),
            "v_cache": (v_cache, f"{where} nheads_k headdim_v"),
        }
        if k is not None or v is not None:
            shapes["k"] = (k, "batch_size seqlen_new nheads_k headdim")
            shapes["v"] = (v, "batch_size seqlen_new nheads_k headdim_v")
        explain(error, shapes, option_values(None, softmax_scale, window_size, softcap, alibi_slopes))
        raise


def _may_write(k: Any, v: Any) -> bool:
    return isinstance(k, Tensor) and isinstance(v, Tensor) and k.dim() == 4 and v.dim() == 4 and runs_plain(k, v, v)


def _decode_directly(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Any,
    v: Any,
    lengths: Tensor,
    pages: Tensor | None,
    scale: float | None,
    intervals: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The shortest way to (out, softmax_lse), for a plain call; the operators check the rest."""
    if scale is None:
        scale = default_scale(q.shape[-1])
    num_new = 0
    with below_views():
        query, key_cache, value_cache = heads_first(q, k_cache, v_cache)
        if k is not None:
            write(key_cache, value_cache, k.transpose(1, 2), v.transpose(1, 2), lengths, pages, NO_RING)
            increment_version((k_cache, v_cache))
            num_new = k.shape[1]
        out, lse = run_decode(
            query, key_cache, value_cache, lengths, pages, None, None, None, None, scale, 0.0, intervals, num_new, NO_RING
        )
        return out.transpose(1, 2), lse


def _decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    new_key: Tensor | None,
    new_value: Tensor | None,
    lengths: Tensor,
    pages: Tensor | None,
    mask: Mask | None,
    scale: float | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    scores: dict[str, Any] = {"mask": mask, "scale": scale, "softcap": softcap, "return_lse": True}
    if alibi_slopes is None or alibi_slopes.dim() != 2:
        return attention_decode(
            query,
            key_cache,
            value_cache,
            cache_seqlens=lengths,
            page_table=pages,
            new_key=new_key,
            new_value=new_value,
            alibi_slopes=alibi_slopes,
            **scores,
        )
    batch, num_heads = query.shape[:2]
    if tuple(alibi_slopes.shape) != (batch, num_heads):
        raise ValueError(f"alibi_slopes must have shape {(num_heads,)} or {(batch, num_heads)}, got {tuple(alibi_slopes.shape)}")
    if pages is None:
        pages = torch.arange(batch, dtype=torch.int32, device=query.device)[:, None]
    results = []
    for item, slopes in enumerate(alibi_slopes):
        one = slice(item, item + 1)
        place: dict[str, Any] = {"cache_seqlens": lengths[one], "page_table": pages[one]}
        if new_key is not None and new_value is not None:
            place.update(new_key=new_key[one], new_value=new_value[one])
        results.append(attention_decode(query[one], key_cache, value_cache, **place, alibi_slopes=slopes, **scores))
    if not results:
        return query.new_empty((*query.shape[:3], value_cache.shape[-1])), query.new_empty(query.shape[:3], dtype=real_dtype(query.dtype))
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def _lengths(cache_seqlens: Any, q: Tensor, k_cache: Tensor, block_table: Tensor | None, k: Tensor | None) -> Tensor:
    batch = q.shape[0]
    if cache_seqlens is None:
        if k is not None:
            refuse("cache_seqlens must be given with k: they are written behind it, got None")
        cache_seqlens = k_cache.shape[1] if block_table is None else k_cache.shape[1] * block_table.shape[-1]
    if not is_integer(cache_seqlens):
        raise TypeError(f"cache_seqlens must be an integer or an integer tensor (batch_size,), got {cache_seqlens!r}")
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)


def _index(name: str, given: Any, q: Tensor, k_cache: Tensor) -> Tensor:
    """(batch,) integers; without any, the number of each item."""
    batch = q.shape[0]
    if given is None:
        if k_cache.shape[0] != batch:
            refuse(f"k_cache must have the batch_size of q ({batch}) without cache_batch_idx, got {k_cache.shape[0]}")
        return torch.arange(batch, device=q.device)
    if not isinstance(given, Tensor) or given.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{name} must be an int32 or int64 tensor, got {given.dtype if isinstance(given, Tensor) else type(given).__name__}"
        )
    if tuple(given.shape) != (batch,):
        raise ValueError(f"{name} must have shape {(batch,)}, got {tuple(given.shape)}")
    most = k_cache.shape[0] - 1 if name == "cache_batch_idx" else k_cache.shape[1]
    if given.device.type == "cpu" and batch and not torch.compiler.is_compiling():
        low, high = int(given.min()), int(given.max())
        if low < 0 or high > most:
            raise ValueError(f"{name} must lie in [0, {most}], got {low if low < 0 else high}")
    return given


def _check_room(lengths: Tensor, first: Tensor, num_new: int, capacity: int) -> None:
    if lengths.dtype not in (torch.int32, torch.int64) or lengths.shape != first.shape:
        raise ValueError(f"cache_seqlens must be an integer tensor {tuple(first.shape)}, got {lengths.dtype} {tuple(lengths.shape)}")
    if lengths.device.type != "cpu" or torch.compiler.is_compiling() or lengths.numel() == 0:
        return
    if int(lengths.max()) > capacity - num_new:
        raise ValueError(f"cache_seqlens must be at most {capacity - num_new}, for {num_new} new keys to fit, got {int(lengths.max())}")
    if bool((first > lengths).any()):
        raise ValueError(f"cache_leftpad must be at most cache_seqlens, got {first.tolist()} and {lengths.tolist()}")


def _rows_as_pages(k_cache: Tensor, v_cache: Tensor, index: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The caches as pages of one row, and the table (batch, capacity) whose rows start at `first`; -1 behind the capacity."""
    batch_cache, capacity = k_cache.shape[:2]
    steps = set()
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        of_item, of_row = cache.stride()[:2]
        if capacity > 1 and batch_cache > 1:
            if of_row == 0 or of_item % of_row:
                refuse(f"{name} must have a stride of items that is a multiple of that of rows with cache_leftpad, got {cache.stride()}")
            steps.add(of_item // of_row)
    if len(steps) > 1:
        refuse(f"v_cache must lie in memory as k_cache with cache_leftpad, got strides {v_cache.stride()} and {k_cache.stride()}")
    step = steps.pop() if steps else capacity if batch_cache > 1 else 0
    pages = []
    for cache in (k_cache, v_cache):
        of_item, of_row, of_head, of_column = cache.stride()
        of_row = of_row if capacity > 1 else of_item
        rows = max(0, (batch_cache - 1) * step + capacity)
        pages.append(cache.as_strided((rows, cache.shape[2], 1, cache.shape[3]), (of_row, of_head, of_row, of_column)))
    at = first[:, None] + torch.arange(capacity, device=first.device)
    table = torch.where(at < capacity, index[:, None] * step + at, -1)
    return pages[0], pages[1], table.to(torch.int32)


def _check_tables(cos: Any, sin: Any, query: Tensor, key_cache: Tensor, block_table: Tensor | None) -> None:
    capacity = key_cache.shape[2] if block_table is None else key_cache.shape[2] * block_table.shape[-1]
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(table, Tensor) or not table.dtype.is_floating_point:
            raise TypeError(f"{name} must be a float tensor, got {table.dtype if isinstance(table, Tensor) else type(table).__name__}")
        if table.dim() != 2 or table.shape[1] * 2 > query.shape[-1] or table.shape[0] < capacity:
            wanted = f"at least {capacity}, the capacity of the cache, and rotary_dim at most headdim ({query.shape[-1]})"
            raise ValueError(f"{name} must have shape (seqlen_ro, rotary_dim / 2), seqlen_ro {wanted}, got {tuple(table.shape)}")
        if table.device != query.device:
            raise ValueError(f"{name} must be on the device of q ({query.device}), got {table.device}")
    if cos.shape != sin.shape:
        raise ValueError(f"rotary_sin must have the shape of rotary_cos, {tuple(cos.shape)}, got {tuple(sin.shape)}")


def _turn(rows: Tensor, cos: Any, sin: Any, first: Tensor, interleaved: bool, moving: bool) -> Tensor:
    """rows (batch, heads, n, head_dim) turned at first[b] + r, or all at first[b]."""
    positions = first[:, None].long()
    if moving:
        positions = positions + torch.arange(rows.shape[-2], device=rows.device)
    if cos.shape[0]:
        positions = positions.clamp(0, cos.shape[0] - 1)  # what lies beyond is refused, or dropped on CUDA, when it is written
    table = torch.cat([cos[positions], sin[positions]], -1).to(real_dtype(rows.dtype))
    return rotate(rows, table[:, None], bool(interleaved))
