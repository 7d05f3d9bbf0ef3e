"""What every operator takes besides its tensors of results: one tuple with named fields, in the order of the schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNBOUNDED = 1 << 40
NO_INTERVALS = (UNBOUNDED, UNBOUNDED, UNBOUNDED, UNBOUNDED, UNBOUNDED, -1, 0, UNBOUNDED, 0, 0)


class Arguments(NamedTuple):
    """The arguments of `attention_fwd`, `attention` and `attention_bwd` in schema order."""

    query: Tensor  # (..., num_heads, seqlen_q, head_dim)
    key: Tensor  # (..., num_heads_kv, seqlen_kv, head_dim)
    value: Any  # Tensor (..., num_heads_kv, seqlen_kv, head_dim_v), or None where only scores count
    mask: Tensor | None  # bool, broadcastable to (..., num_heads, seqlen_q, seqlen_kv)
    bias: Tensor | None  # float, broadcastable likewise or by distance (is_by_distance)
    alibi_slopes: Tensor | None  # Real (num_heads,)
    sinks: Tensor | None  # Real (num_heads,)
    key_lengths: Tensor | None  # int64 (batch,)
    documents: Tensor | None  # int64 (num_documents + 1,)
    query_offset: Tensor | None  # int64 (batch,), replaces intervals[0]
    dropout_seed: Tensor | None  # int64 ()
    # A block list: see block_list.Blocks.
    block_rows: Tensor | None
    block_tiles: Tensor | None
    block_bits: Tensor | None
    # Rotary positions: Real (seqlen, rotary_dim) or what broadcasts to (..., heads, seqlen, rotary_dim), cosines and behind them sines.
    query_table: Tensor | None
    key_table: Tensor | None
    scale: float
    softcap: float  # 0: none
    dropout_p: float
    # [] or query_offset, window_left, window_right, limit_left, limit_right, prefix, chunk, key_end, num_sinks, top_left
    intervals: Sequence[int]
    dropout_offsets: Sequence[int]  # [] or batch, head, query, key
    allow_tf32: bool  # float32 on CUDA: products of operands rounded to tf32
    interleaved: bool  # which columns of query and key are a pair for the tables: see `rotate`


class VarlenArguments(NamedTuple):
    """The arguments of `attention_varlen_fwd`, `attention_varlen` and `attention_varlen_bwd` in schema order.

    Fields at POSITIONS are those of Arguments, but for bias, in whose place is a tensor without a gradient.
    """

    query: Tensor  # (total_q, num_heads, head_dim)
    key: Tensor  # (total_kv, num_heads_kv, head_dim)
    value: Tensor  # (total_kv, num_heads_kv, head_dim_v)
    cu_seqlens_q: Tensor  # int64 (num_sequences + 1,)
    cu_seqlens_kv: Tensor  # int64 (num_sequences + 1,)
    alibi_slopes: Tensor | None  # Real (num_heads,)
    sinks: Tensor | None  # Real (num_heads,)
    key_lengths: Tensor | None  # int64 (num_sequences,)
    documents: Tensor | None  # int64 (num_documents + 1,)
    query_offset: Tensor | None  # int64 (num_sequences,), replaces intervals[0]
    dropout_seed: Tensor | None  # int64 ()
    query_table: Tensor | None  # Real (total_q, rotary_dim), as in Arguments
    key_table: Tensor | None  # Real (total_kv, rotary_dim)
    max_seqlen_q: int
    max_seqlen_kv: int
    scale: float
    softcap: float  # 0: none
    dropout_p: float
    intervals: Sequence[int]  # as in Arguments
    dropout_offsets: Sequence[int]
    interleaved: bool


class Gradients(NamedTuple):
    """The results of `attention_bwd`, and tangents of its namesakes."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class AdditiveArguments(NamedTuple):
    """The arguments of `additive_attention_fwd`, `additive_attention` and `additive_attention_bwd` in schema order."""

    query: Tensor  # (..., num_heads, seqlen_q, head_dim)
    key: Tensor  # (..., num_heads_kv, seqlen_kv, head_dim)
    value: Any  # Tensor (..., num_heads_kv, seqlen_kv, head_dim_v), or None where only scores count
    score_weight: Tensor  # Real (head_dim,) or (num_heads, head_dim)
    mask: Tensor | None  # bool, broadcastable to (..., num_heads, seqlen_q, seqlen_kv)
    key_lengths: Tensor | None  # int64 (batch,)
    documents: Tensor | None  # int64 (num_documents + 1,)
    query_offset: Tensor | None  # int64 (batch,), replaces intervals[0]
    dropout_seed: Tensor | None  # int64 ()
    dropout_p: float
    intervals: Sequence[int]  # as in Arguments
    dropout_offsets: Sequence[int]


class AdditiveGradients(NamedTuple):
    """The results of `additive_attention_bwd`, and tangents of its namesakes."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    score_weight: Tensor | None


class LinearArguments(NamedTuple):
    """The arguments of `linear_attention_fwd`, `linear_attention` and `linear_attention_bwd` in schema order."""

    query: Tensor  # (..., num_heads, seqlen_q, head_dim)
    key: Tensor  # (..., num_heads_kv, seqlen_kv, head_dim)
    value: Tensor  # (..., num_heads_kv, seqlen_kv, head_dim_v)
    key_mask: Tensor | None  # bool, full rank, broadcastable to (..., num_heads_kv, 1, seqlen_kv)
    log_decay: Tensor | None  # Real (..., num_heads_kv, seqlen_kv, 1 or head_dim)
    initial_kv: Tensor | None  # Real (..., num_heads_kv, head_dim, head_dim_v)
    initial_k_sum: Tensor | None  # Real (..., num_heads_kv, head_dim)
    cu_seqlens: Tensor | None  # int64 (num_sequences + 1,); the leading size is 1 then, and num_sequences in states
    query_map: int  # 0 identity, 1 elu + 1, 2 relu, 3 exp
    key_map: int
    causal: bool
    normalize: bool
    scale: float


class LinearGradients(NamedTuple):
    """The results of `linear_attention_bwd`, and tangents of its namesakes."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    log_decay: Tensor | None
    initial_kv: Tensor | None
    initial_k_sum: Tensor | None


# Of all operators: the leading arguments that are tensors, and (but for additive attention, where they are the first four) the places of
# those that are differentiable, in the order of the gradients.
TENSORS = {Arguments: 16, AdditiveArguments: 9, VarlenArguments: 13, LinearArguments: 8}
POSITIONS = (0, 1, 2, 4, 5, 6)
NO_TENSORS = (None,) * (TENSORS[Arguments] - 3)  # in the place of those behind value


def without_empty_lists(args: Any) -> Any:
    """The same call, for compiled code: a program that AOTInductor compiled hands the operator None for an empty list of integers, which is
    refused (seen in torch 2.13)."""
    return args._replace(intervals=tuple(args.intervals) or NO_INTERVALS, dropout_offsets=tuple(args.dropout_offsets) or (0, 0, 0, 0))


def is_by_distance(bias: Tensor, seqlen_q: int, seqlen_kv: int) -> bool:
    """Whether `bias` is (..., num_heads or 1, 1, seqlen_q + seqlen_kv - 1), element t for the pairs with j - i = t - (seqlen_q - 1)."""
    return bias.dim() > 1 and seqlen_q > 1 and seqlen_kv > 0 and bias.shape[-2] == 1 and bias.shape[-1] == seqlen_q + seqlen_kv - 1


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, lse, slopes and sinks: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
