"""flash_attn_varlen_func and its packed forms, on `attention_varlen`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention_decode import attention_decode
from ..attention_varlen import _padded, _prepare, attention_varlen, forward_varlen
from ..call import forward
from ..library import ops
from ..weights import weights_of
from .functions import Results, attend
from .options import ERRORS, Pattern, check_table, explain, option_values, pattern_of, refuse


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Results:
    """`attention_varlen` behind the signature of flash_attn 2.8: sequences that lie one after the other, without padding.

    Sequence b is the rows cu_seqlens_q[b] <= i < cu_seqlens_q[b + 1] of q and cu_seqlens_k[b] <= j < cu_seqlens_k[b + 1] of k and v.
    Causality, windows and ALiBi count positions inside it, aligned to its bottom right.

    Args:
        q: (total_q, nheads, headdim), float16, bfloat16, float32 or float64, on CPU or CUDA. Any strides.
        k: (total_k, nheads_k, headdim), where nheads_k divides nheads. With `block_table` (num_blocks, page_block_size, nheads_k, headdim).
        v: (total_k, nheads_k, headdim_v), or in pages likewise.
        cu_seqlens_q, cu_seqlens_k: (batch_size + 1,), int32 or int64: 0, then the sum of the lengths so far.
        max_seqlen_q, max_seqlen_k: at least the longest length; numbers or tensors of one.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic: as in `flash_attn_func`.
        alibi_slopes: (nheads,); or (batch_size, nheads), which goes sequence by sequence and reads the offsets.
        return_attn_probs: also return softmax_lse (nheads, total_q) and S_dmask (batch_size, nheads, max_seqlen_q, max_seqlen_k), which is
            that of `flash_attn_func`, and 0 beyond a sequence.
        block_table: (batch_size, max_blocks), int32: key j of sequence b is row j % page_block_size of page block_table[b, j //
            page_block_size], for as many as cu_seqlens_k says. For inference: no gradients, no dropout. Where lengths of queries differ the
            offsets are read, and sequences go one by one.

    Returns:
        out (total_q, nheads, headdim_v), dtype of q; with `return_attn_probs` (out, softmax_lse, S_dmask).

    Differentiable as `attention_varlen`. Reading offsets waits for the device on CUDA.

    Raises:
        RuntimeError, TypeError, ValueError: naming the argument.

    Source: the documented interface of flash_attn 2.8.
    """
    arguments = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    try:
        if block_table is not None:
            return _paged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, block_table, *arguments)
        return _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *arguments)
    except ERRORS as error:
        tokens = "total_k" if block_table is None else "num_blocks page_block_size"
        shapes = {
            "q": (q, "total_q nheads headdim"),
            "k": (k, f"{tokens} nheads_k headdim"),
            "v": (v, f"{tokens} nheads_k headdim_v"),
        }
        explain(error, shapes, option_values(dropout_p, softmax_scale, window_size, softcap, alibi_slopes))
        raise


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` of q, k and v that lie in one tensor. They are read where they lie, and its gradient is made at once.

    Args:
        qkv: (total, 3, nheads, headdim).
        cu_seqlens: (batch_size + 1,), int32 or int64: 0, then the sum of the lengths so far.
        max_seqlen: at least the longest length.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_varlen_func`.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        RuntimeError, TypeError, ValueError: naming the argument.

    Source: the documented interface of flash_attn 2.8.
    """
    try:
        if qkv.dim() != 4 or qkv.shape[1] != 3:
            refuse("qkv must hold three")
        q, k, v = qkv.unbind(1)
        arguments = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
        return _packed(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments)
    except ERRORS as error:
        options = option_values(dropout_p, softmax_scale, window_size, softcap, alibi_slopes)
        explain(error, {"qkv": (qkv, "total 3 nheads headdim")}, options, packed="qkv")
        raise


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` of k and v that lie in one tensor. They are read where they lie, and its gradient is made at once.

    Args:
        q: (total_q, nheads, headdim).
        kv: (total_k, 2, nheads_k, headdim), where nheads_k divides nheads.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `flash_attn_varlen_func`.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_varlen_func`.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        RuntimeError, TypeError, ValueError: naming the argument.

    Source: the documented interface of flash_attn 2.8.
    """
    try:
        if kv.dim() != 4 or kv.shape[1] != 2:
            refuse("kv must hold two")
        k, v = kv.unbind(1)
        arguments = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
        return _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *arguments)
    except ERRORS as error:
        shapes = {"q": (q, "total_q nheads headdim"), "kv": (kv, "total_k 2 nheads_k headdim")}
        options = option_values(dropout_p, softmax_scale, window_size, softcap, alibi_slopes)
        explain(error, shapes, options)
        raise


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
) -> Results:
    pattern = pattern_of(causal, window_size)
    mask = pattern.mask
    max_seqlen_q, max_seqlen_k = _number(max_seqlen_q), _number(max_seqlen_k)
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        limits = (max_seqlen_q, max_seqlen_k)
        arguments = (dropout_p, softmax_scale, pattern, softcap)
        return _one_by_one(q, k, v, cu_seqlens_q, cu_seqlens_k, limits, arguments, alibi_slopes, return_attn_probs)
    tensors, cap = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), softcap if softcap > 0 else None
    if return_attn_probs and dropout_p > 0:
        args = _prepare(*tensors, mask, softmax_scale, cap, alibi_slopes, None, None, dropout_p, None)
        out, lse = forward_varlen(args)
        with torch.no_grad():
            padded = _padded(args, mask)
            _, padded_lse = forward(padded._replace(value=padded.key[..., :0]))
            weights = weights_of(padded, padded_lse)
            weights = F.pad(weights, (0, max_seqlen_k - weights.shape[-1], 0, max_seqlen_q - weights.shape[-2]))
            kept = ops.dropout_mask(args.dropout_seed, args.dropout_p, *weights.shape, ())
            return out, lse, torch.where(kept, weights, -weights).to(q.dtype)
    out, lse = attention_varlen(
        *tensors, mask=mask, scale=softmax_scale, softcap=cap, alibi_slopes=alibi_slopes, dropout_p=dropout_p, return_lse=True
    )
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    limits: tuple[int, int],
    arguments: tuple[float, float | None, Pattern, float],
    alibi_slopes: Tensor,
    return_attn_probs: bool,
) -> Results:
    """Each sequence with slopes of its own."""
    bounds_q = read_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], limits[0])
    bounds_k = read_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0], limits[1])
    if len(bounds_q) != len(bounds_k):
        raise ValueError(f"cu_seqlens_k must have the length of cu_seqlens_q ({len(bounds_q)}), got {len(bounds_k)}")
    if tuple(alibi_slopes.shape) != (len(bounds_q) - 1, q.shape[1]):
        wanted = f"{(q.shape[1],)} or {(len(bounds_q) - 1, q.shape[1])}"
        raise ValueError(f"alibi_slopes must have shape {wanted}, got {tuple(alibi_slopes.shape)}")
    outs, lses, probabilities = [q.new_empty(0, q.shape[1], v.shape[2])], [], []
    for item, slopes in enumerate(alibi_slopes):
        query = q[None, bounds_q[item] : bounds_q[item + 1]]
        key, value = (x[None, bounds_k[item] : bounds_k[item + 1]] for x in (k, v))
        out, lse, probability = attend(query, key, value, *arguments, slopes, True)
        outs.append(out[0])
        lses.append(lse[0])
        if probability.dim() == 4:
            short_k, short_q = limits[1] - key.shape[1], limits[0] - query.shape[1]
            probabilities.append(F.pad(probability[0], (0, short_k, 0, short_q)))
    out = torch.cat(outs)
    if not return_attn_probs:
        return out
    return out, torch.cat(lses, 1), torch.stack(probabilities) if probabilities else out.new_empty(0)


def _paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    block_table: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
) -> Results:
    if dropout_p != 0:
        raise ValueError(f"dropout_p must be 0 with block_table, which is for inference, got {dropout_p}")
    if q.dim() != 3 or k.dim() != 4 or v.dim() != 4:
        refuse("q, k and v must be packed rows and pages")
    check_offsets("cu_seqlens_q", cu_seqlens_q)
    check_offsets("cu_seqlens_k", cu_seqlens_k)
    lengths = cu_seqlens_k.diff().to(torch.int32)
    batch, longest = lengths.shape[0], _number(max_seqlen_q)
    if cu_seqlens_q.shape[0] != batch + 1:
        raise ValueError(f"cu_seqlens_q must have the length of cu_seqlens_k ({batch + 1}), got {cu_seqlens_q.shape[0]}")
    check_table("block_table", block_table, batch)
    capacity = k.shape[1] * block_table.shape[1]
    if lengths.device.type == "cpu" and batch and int(lengths.max()) > capacity:
        raise ValueError(f"cu_seqlens_k must hold at most {capacity} keys for each sequence, as block_table has, got {int(lengths.max())}")
    key, value = k.transpose(1, 2), v.transpose(1, 2)
    options: dict[str, Any] = {"scale": softmax_scale, "softcap": softcap if softcap > 0 else None}
    options["mask"] = pattern_of(causal, window_size).mask
    one_each = alibi_slopes is not None and alibi_slopes.dim() == 2
    bounds = read_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0]) if q.device.type == "cpu" or batch * longest != q.shape[0] else []
    if len({end - start for start, end in itertools.pairwise(bounds)}) < 2 and batch and not one_each:
        pieces = [(slice(0, batch), q.unflatten(0, (batch, q.shape[0] // batch)))]  # as many queries in every sequence
    else:
        bounds = bounds or read_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0])
        pieces = [(slice(item, item + 1), q[None, bounds[item] : bounds[item + 1]]) for item in range(batch)]
    outs, lses = [q.new_empty(0, q.shape[1], v.shape[-1])], []
    for items, query in pieces:
        slopes = alibi_slopes[items.start] if alibi_slopes is not None and one_each else alibi_slopes
        out, lse = attention_decode(
            query.transpose(1, 2),
            key,
            value,
            cache_seqlens=lengths[items],
            page_table=block_table[items],
            alibi_slopes=slopes,
            return_lse=True,
            **options,
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
        lses.append(lse.transpose(0, 1).flatten(1))
    out = outs[1] if len(outs) == 2 else torch.cat(outs)
    return (out, torch.cat(lses, 1), out.new_empty(0)) if return_attn_probs else out


def check_offsets(name: str, offsets: Any) -> None:
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64):
        came = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {came}")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name} must have shape (batch_size + 1,), got {tuple(offsets.shape)}")


def read_offsets(name: str, offsets: Tensor, total: int, longest: int | None = None) -> list[int]:
    check_offsets(name, offsets)
    bounds: list[int] = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != total or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"{name} must start at 0, never decrease and end at {total}, got {bounds}")
    if longest is not None and any(b - a > longest for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"max_seqlen{name[-2:]} must be at least the length of every sequence, got {longest}")
    return bounds


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
