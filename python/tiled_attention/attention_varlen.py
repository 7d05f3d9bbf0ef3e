"""Exact attention over packed sequences: the public function `attention_varlen`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import varlen_compiled  # noqa: F401  (registrations)
from .arguments import Arguments, VarlenArguments, real_dtype, without_empty_lists
from .call import (
    autocast_active,
    cast_for_autocast,
    check_dropout_p,
    check_number,
    check_per_head,
    default_scale,
    needs_derivatives,
    prepare,
)
from .library import below_autograd, ops
from .lowering import Lowered, lower
from .mask_rules import make_plan
from .masks import And, KeyLengths, Mask
from .observers import Call, observers, tell
from .rotary import RotaryEmbedding, check_rotary
from .rotate import rotate
from .seeds import draw_seed
from .varlen_autograd import record_attention_varlen


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    rotary: RotaryEmbedding | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    rotary: RotaryEmbedding | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    rotary: RotaryEmbedding | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over sequences of different lengths that lie one after the other in the same tensors, without padding.

    Sequence b holds the rows cu_seqlens_q[b] <= i < cu_seqlens_q[b + 1] of query and cu_seqlens_kv[b] <= j < cu_seqlens_kv[b + 1] of key
    and value, and is what `attention` gives for it alone: masks and ALiBi count positions inside it, aligned to its bottom right.
    Scores, softmax and results are those of `attention`; on the CPU they have the same bits.

    Args:
        query: (total_q, num_heads, head_dim), float32, float64, bfloat16 or float16. Any strides, no copies; any sizes, 0 included.
        key: (total_kv, num_heads_kv, head_dim), where num_heads_kv divides num_heads; dtype of query.
        value: (total_kv, num_heads_kv, head_dim_v).
        cu_seqlens_q: (num_sequences + 1,), int32 or int64, on the device of query: 0, then the sum of the lengths so far, up to total_q.
            A sequence may have no rows.
        cu_seqlens_kv: likewise for key and value, up to total_kv. Lengths may differ from those of the queries.
        max_seqlen_q, max_seqlen_kv: integers, at least the length of every sequence. On CUDA the kernels are sized by them: larger numbers
            cost time.
        mask: a mask of `tiled_attention` that is made of intervals, acting inside each sequence (KeyLengths: one length per sequence).
            None: every key of its sequence is seen. A dense bool mask or bias has no form here; what is wider than a sequence is padding.
        scale, softcap, alibi_slopes, sinks: as in `attention`.
        rotary: turns query and key at their positions inside their sequence.
        dropout_p: as in `attention`, where the batch index is that of the sequence and query and key count inside it: the mask is that of
            the padded batch, `dropout_mask(num_sequences, num_heads, max_seqlen_q, max_seqlen_kv, dropout_p)`.
        generator: as in `attention`.
        return_lse: also return lse.

    Returns:
        out (total_q, num_heads, head_dim_v), dtype of query, dense in the dimension order of query; with `return_lse` (out, lse),
        lse (num_heads, total_q), float32 or float64, the natural logarithm.

    Differentiable in query, key, value, alibi_slopes and sinks, through out and lse: any number of times, in reverse and forward mode,
    under torch.func; inside torch.compile once in reverse mode. Keys of a sequence without queries have gradient 0. Beyond the first
    backward pass the offsets are read, which on CUDA waits for the device. Autocast casts query, key and value.

    Raises:
        ValueError, TypeError, RuntimeError: naming the argument, what was expected and what came. On CUDA the values of the offsets
            are not read: kernels act as if offsets were limited to [0, total] and sequences to the maximum, and what rows outside every
            sequence hold is not defined.

    Source: Dao, FlashAttention-2 (2023); Krell et al., Efficient Sequence Packing without Cross-contamination (2021).
    """
    args = _prepare(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_kv,
        max_seqlen_q,
        max_seqlen_kv,
        mask,
        scale,
        softcap,
        alibi_slopes,
        sinks,
        rotary,
        dropout_p,
        generator,
    )
    out, lse = forward_varlen(args)
    if not torch.compiler.is_compiling() and observers:
        tell(Call(query, key, partial(_padded, args, mask)))
    return (out, lse) if return_lse else out


def _padded(args: VarlenArguments, mask: Mask | None) -> Arguments:
    """The padded batch that a packed call stands for, without its values and dropout."""
    lengths, batches = [], []
    for rows, table, offsets in ((args.query, args.query_table, args.cu_seqlens_q), (args.key, args.key_table, args.cu_seqlens_kv)):
        rows = rows.transpose(0, 1) if table is None else rotate(rows.transpose(0, 1), table, args.interleaved)
        length = offsets.diff()
        most = int(length.max()) if length.numel() else 0
        index = offsets[:-1, None] + torch.arange(most, device=offsets.device)
        padded = rows.index_select(1, index.clamp(max=max(0, rows.shape[1] - 1)).flatten())
        batches.append(padded.unflatten(1, index.shape).transpose(0, 1))
        lengths.append(length)
    (query, key), (length_q, length_kv) = batches, lengths
    there = torch.arange(query.shape[2], device=query.device) < length_q[:, None]
    visible: Mask = And(KeyLengths(length_kv), there[:, None, :, None])
    visible = visible if mask is None else And(mask, visible)
    scores = (None, args.scale, args.softcap or None, args.alibi_slopes, args.sinks, 0.0, None, length_kv - length_q)
    return prepare(query, key, None, visible, *scores)


def forward_varlen(args: VarlenArguments) -> tuple[Tensor, Tensor]:
    """(out, lse) by the operator that the situation asks for."""
    if torch.compiler.is_compiling():
        out, lse, _ = ops.attention_varlen(*without_empty_lists(args), torch.is_grad_enabled())
    elif needs_derivatives(args):
        out, lse, _ = record_attention_varlen(args)
    else:
        with below_autograd():
            out, lse, _ = ops.attention_varlen_fwd(*args, False)
    return out, lse


def _prepare(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    max_seqlen_q: Any,
    max_seqlen_kv: Any,
    mask: Any,
    scale: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    rotary: Any,
    dropout_p: Any,
    generator: Any,
) -> VarlenArguments:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have shape (total, heads, dim), got {tuple(tensor.shape)}")
    if not query.dtype.is_floating_point:
        raise TypeError(f"query must be float32, float64, bfloat16 or float16, got {query.dtype}")
    cu_seqlens_q, cu_seqlens_kv = _offsets("cu_seqlens_q", cu_seqlens_q), _offsets("cu_seqlens_kv", cu_seqlens_kv)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_kv", max_seqlen_kv)):
        if not isinstance(length, (int, torch.SymInt)) or isinstance(length, bool):
            raise TypeError(f"{name} must be an integer >= 0, got {length!r}")
        if length < 0:
            raise ValueError(f"{name} must be an integer >= 0, got {length}")
    if autocast_active():
        query, key, value = (cast_for_autocast(tensor) for tensor in (query, key, value))
    if scale is None:
        scale = default_scale(query.shape[-1])
    else:
        scale = check_number("scale", scale, "a finite number", lambda x: -math.inf < x < math.inf)
    softcap = 0.0 if softcap is None else check_number("softcap", softcap, "a finite number > 0", lambda x: 0 < x < math.inf)
    dropout_p = check_dropout_p(dropout_p)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    real, num_heads = real_dtype(query.dtype), query.shape[1]
    if alibi_slopes is not None:
        alibi_slopes = check_per_head("alibi_slopes", alibi_slopes, num_heads, real)
    if sinks is not None:
        sinks = check_per_head("sinks", sinks, num_heads, real)
    lowered = _lower(mask, cu_seqlens_q.shape[0] - 1, num_heads, max_seqlen_q, max_seqlen_kv, query.device)
    query_table = key_table = None
    if rotary is not None:
        query_table, key_table = _tables(rotary, query, key, cu_seqlens_q, cu_seqlens_kv)
    seed = draw_seed(query, key, value, generator) if dropout_p > 0 else None
    return VarlenArguments(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_kv,
        alibi_slopes,
        sinks,
        lowered.key_lengths,
        lowered.documents,
        lowered.query_offset,
        seed,
        query_table,
        key_table,
        max_seqlen_q,
        max_seqlen_kv,
        scale,
        softcap,
        dropout_p,
        lowered.intervals,
        (),
        rotary is not None and rotary.interleaved,
    )


def _tables(rotary: Any, query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(total, rotary_dim) for the positions inside the sequences; offsets are not read here."""
    check_rotary(rotary, query=query.transpose(0, 1), key=key.transpose(0, 1))
    if cu_seqlens_q.shape != cu_seqlens_kv.shape or cu_seqlens_q.shape[0] < 2:
        return None, None  # no sequences, or what the operator refuses
    sequences, places = [], []
    for tensor, offsets in ((query, cu_seqlens_q), (key, cu_seqlens_kv)):
        row = torch.arange(tensor.shape[0], device=offsets.device)
        sequence = torch.searchsorted(offsets[1:], row, right=True).clamp(max=offsets.shape[0] - 2)
        sequences.append(sequence)
        places.append(row - offsets[sequence])
    before = cu_seqlens_kv.diff() - cu_seqlens_q.diff()  # of each sequence, how many positions lie in front of its queries
    dtypes = real_dtype(query.dtype), real_dtype(key.dtype)
    of_query, of_key = rotary.tables_at(places[0] + before[sequences[0]], places[1], dtypes)
    return of_query[0], of_key[0]


def _offsets(name: str, offsets: Any) -> Tensor:
    """int64; the operators check the values."""
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {type(offsets).__name__}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {offsets.dtype}")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name} must have shape (num_sequences + 1,), got {tuple(offsets.shape)}")
    return offsets.long()


def _lower(mask: Any, num_sequences: int, num_heads: int, max_seqlen_q: int, max_seqlen_kv: int, device: torch.device) -> Lowered:
    if isinstance(mask, Tensor):
        raise TypeError(f"mask must be a mask of tiled_attention, which acts inside each sequence, or None, got a tensor of {mask.dtype}")
    if isinstance(mask, Mask):
        plan = make_plan(mask._rule()) if mask._cached is None else mask._cached[0]
        if plan.rest or plan.bands:
            raise ValueError(f"mask must be made of intervals in packed sequences, got {mask!r}")
    return lower(mask, batch_shape=(num_sequences,), num_heads=num_heads, seqlen_q=max_seqlen_q, seqlen_kv=max_seqlen_kv, device=device)
