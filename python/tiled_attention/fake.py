"""What operators return for tensors without data (shapes, dtypes and strides exactly as the kernels'), the same checks, and FLOP counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .arguments import TENSORS, Arguments, is_by_distance, real_dtype
from .compile_cache import register_fake
from .library import ops
from .mask_grid import TILE

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def dense_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Uninitialised and dense, its dimensions in the order of those of `tensor`: torch.empty_like for another last size."""
    if shape[-1] == tensor.shape[-1]:
        return torch.empty_like(tensor)
    if tensor.is_contiguous():
        return tensor.new_empty(shape)
    strides, sizes = tensor.stride(), tensor.shape
    order = list(reversed(range(tensor.dim())))  # fastest dimension first
    for end in range(1, len(order)):
        at = end
        for before in range(end - 1, -1, -1):
            a, b = order[before], order[at]
            if strides[a] == 0 or strides[b] == 0:
                continue
            if strides[a] < strides[b]:
                break
            if strides[a] > strides[b] or sizes[a] > sizes[b]:
                order[before], order[at], at = b, a, before
    result, step = [0] * len(order), 1
    for dim in order:
        result[dim] = step
        step = step * (shape[dim] if shape[dim] > 1 else 1)
    return tensor.new_empty_strided(shape, result)


def check_query_key_value(query: Tensor, key: Tensor, value: Tensor | None) -> None:
    """Dtypes, ranks and the relations of shapes. Raises ValueError or TypeError naming the argument."""
    if query.dtype not in FLOATS:
        raise TypeError(f"query must be float32, float64, bfloat16 or float16, got {dtype_name(query.dtype)}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor is None:
            continue
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query ({dtype_name(query.dtype)}), got {dtype_name(tensor.dtype)}")
        if tensor.dim() < 3 or tensor.dim() != query.dim():
            raise ValueError(f"{name} must have the rank of query, at least 3, got shapes {_shapes(query, key, value)}")
        if any(a != b for a, b in zip(tensor.shape[:-3], query.shape[:-3])):
            raise ValueError(f"{name} must have the leading dimensions of query, got shapes {_shapes(query, key, value)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key must have the head_dim of query, got shapes {_shapes(query, key, value)}")
    if value is not None and (value.shape[-3] != key.shape[-3] or value.shape[-2] != key.shape[-2]):
        raise ValueError(f"value must have num_heads_kv and seqlen_kv of key, got shapes {_shapes(query, key, value)}")
    num_heads, num_heads_kv = query.shape[-3], key.shape[-3]
    if num_heads != num_heads_kv and (num_heads_kv == 0 or num_heads % num_heads_kv != 0):
        raise ValueError(f"key must have num_heads_kv that divides num_heads, got shapes {_shapes(query, key, value)}")


def check(args: Arguments) -> None:
    """The checks of the operators, but those that read values. Raises ValueError or TypeError naming the argument."""
    query, key, value = args.query, args.key, args.value
    check_query_key_value(query, key, value)
    num_heads = query.shape[-3]
    real, scores = real_dtype(query.dtype), (*query.shape[:-1], key.shape[-2])
    if args.mask is not None:
        check_dtype("mask", args.mask, (torch.bool,))
        check_broadcasts("mask", args.mask, scores)
    if args.bias is not None:
        check_dtype("bias", args.bias, (real, torch.bfloat16, torch.float16))
        by_distance = is_by_distance(args.bias, args.query.shape[-2], args.key.shape[-2])
        check_broadcasts("bias", args.bias, (*scores[:-2], 1, args.bias.shape[-1]) if by_distance else scores)
    for name, vector in (("alibi_slopes", args.alibi_slopes), ("sinks", args.sinks)):
        if vector is not None:
            check_vector(name, vector, real, num_heads)
    for name, vector in (("key_lengths", args.key_lengths), ("query_offset", args.query_offset)):
        if vector is not None:
            check_vector(name, vector, torch.int64, math.prod(query.shape[:-3]))
    if args.block_rows is not None:
        _check_blocks(args, scores)
    check_tables(args)
    for name, table, rows in (("query_table", args.query_table, query), ("key_table", args.key_table, key)):
        if table is not None:
            check_table(name, table, rows)
    if args.documents is not None and (args.documents.dtype != torch.int64 or args.documents.dim() != 1 or args.documents.shape[0] < 1):
        raise ValueError(
            f"documents must be int64 (num_documents + 1,), got {dtype_name(args.documents.dtype)} {tuple(args.documents.shape)}"
        )
    if args.dropout_p > 0 and args.dropout_seed is None:
        raise ValueError("dropout_seed must be given when dropout_p > 0, got None")
    if not 0 <= args.dropout_p <= 1:
        raise ValueError(f"dropout_p must be in [0, 1], got {args.dropout_p}")
    if isinstance(args.scale, float) and not -math.inf < args.scale < math.inf:
        raise ValueError(f"scale must be finite, got {args.scale}")
    if isinstance(args.softcap, float) and not 0 <= args.softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, or 0 for none, got {args.softcap}")
    tensors: Any = args[: TENSORS[Arguments]]
    for name, tensor in zip(Arguments._fields, tensors):
        if tensor is not None and tensor.device != query.device:
            raise ValueError(f"{name} must be on the device of query ({query.device}), got {tensor.device}")


def _check_blocks(args: Arguments, scores: tuple[int, ...]) -> None:
    if args.block_rows is None or args.block_tiles is None or args.block_bits is None:
        raise ValueError("block_rows, block_tiles and block_bits must be given together, got only some of them")
    check_dtype("block_rows", args.block_rows, (torch.int32,))
    check_dtype("block_tiles", args.block_tiles, (torch.int32,))
    check_dtype("block_bits", args.block_bits, (torch.int64,))
    check_broadcasts("block_rows", args.block_rows, (*scores[:-2], (scores[-2] + TILE - 1) // TILE, 2))


def check_tables(args: Any) -> None:
    """Rotary positions of query and key: both tables or none, of as many columns."""
    query_table, key_table = args.query_table, args.key_table
    if query_table is None and key_table is None:
        return
    if query_table is None or key_table is None:
        given = "key_table" if query_table is None else "query_table"
        raise ValueError(f"query_table and key_table must be given together, got only {given}")
    check_columns("query_table", query_table, args.query)
    check_columns("key_table", key_table, args.key)
    if key_table.shape[-1] != query_table.shape[-1]:
        raise ValueError(f"key_table must have the columns of query_table ({query_table.shape[-1]}), got {tuple(key_table.shape)}")


def check_columns(name: str, table: Tensor, rows: Tensor) -> None:
    check_dtype(name, table, (real_dtype(rows.dtype),))
    if table.dim() < 2 or table.shape[-1] % 2 or table.shape[-1] > rows.shape[-1]:
        raise ValueError(f"{name} must have an even number of columns, at most head_dim ({rows.shape[-1]}), got {tuple(table.shape)}")


def check_table(name: str, table: Tensor, rows: Tensor) -> None:
    """A table of rotary positions for rows (..., num_heads, seqlen, head_dim)."""
    check_columns(name, table, rows)
    check_broadcasts(name, table, (*rows.shape[:-1], table.shape[-1]))


def check_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} must be {' or '.join(map(dtype_name, allowed))}, got {dtype_name(tensor.dtype)}")


def check_vector(name: str, vector: Tensor, dtype: torch.dtype, size: int) -> None:
    check_dtype(name, vector, (dtype,))
    if vector.dim() != 1 or vector.shape[0] != size:
        raise ValueError(f"{name} must have shape {(size,)}, got {tuple(vector.shape)}")


def check_broadcasts(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    rank = tensor.dim()
    if rank > len(shape) or not all(a == b or a == 1 for a, b in zip(tensor.shape, shape[len(shape) - rank :])):
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} does not broadcast to {tuple(shape)}")


def _shapes(query: Tensor, key: Tensor, value: Tensor | None) -> str:
    named = (("query", query), ("key", key), ("value", value))
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named if tensor is not None)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *inputs, with_residual = args
    call = Arguments(*inputs)
    check(call)
    query = call.query
    out = dense_like(query, (*query.shape[:-1], call.value.shape[-1]))
    lse = query.new_empty(query.shape[:-1], dtype=real_dtype(query.dtype))
    has_residual = with_residual and query.dtype in (torch.bfloat16, torch.float16)
    return out, lse, torch.empty_like(out) if has_residual else query.new_empty(0)


def _backward(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *arguments, _, _, _, gradients = args
    call = Arguments(*arguments)
    inputs: Any = (call.query, call.key, call.value, call.bias, call.alibi_slopes, call.sinks)
    results = []
    for at, tensor in enumerate(inputs):
        if not gradients >> at & 1:
            results.append(call.query.new_empty(0, dtype=real_dtype(call.query.dtype) if tensor is None else tensor.dtype))
        else:
            results.append(dense_like(tensor, tensor.shape) if at < 3 else tensor.new_empty(tensor.shape))
    return tuple(results)


def _weights(*args: Any) -> Tensor:
    query, key, mask, bias, alibi_slopes, *others, lse, rows, average = args
    check(Arguments(query, key, None, mask, bias, alibi_slopes, None, *others))
    num_rows = query.shape[-2] if rows is None else rows.shape[0]
    shape = (*query.shape[:-3], 1 if average else query.shape[-3], num_rows, key.shape[-2])
    return query.new_empty(shape, dtype=real_dtype(query.dtype))


def _weights_backward(grad_weights: Tensor, *args: Any) -> tuple[Tensor, ...]:
    query, key, _, bias, alibi_slopes, *_, lse, _, _, gradients = args
    inputs = (query, key, bias, alibi_slopes, lse)
    wanted = (gradients >> at & 1 for at in range(5))
    return tuple(tensor.new_empty(tensor.shape) if want else query.new_empty(0) for tensor, want in zip(inputs, wanted))


def _dropout_mask(seed: Tensor, dropout_p: float, batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int, offsets: Any) -> Tensor:
    return seed.new_empty((batch, num_heads, seqlen_q, seqlen_kv), dtype=torch.bool)


def _mask_dense(intervals: Any, key_lengths: Any, documents: Any, query_offset: Any, batch: int, seqlen_q: int, seqlen_kv: int) -> Tensor:
    like = next((tensor for tensor in (key_lengths, documents, query_offset) if tensor is not None), None)
    return torch.empty((batch, seqlen_q, seqlen_kv), dtype=torch.bool, device=None if like is None else like.device)


def _blocks_dense(block_rows: Tensor, block_tiles: Tensor, block_bits: Tensor, rows: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
    return block_rows.new_empty((*block_rows.shape[:-2], rows.shape[0], seqlen_kv), dtype=torch.bool)


for _name_of_op, _rule in (
    ("attention_fwd", _forward),
    ("attention", _forward),
    ("attention_bwd", _backward),
    ("attention_weights", _weights),
    ("attention_weights_bwd", _weights_backward),
    ("dropout_mask", _dropout_mask),
    ("_mask_dense", _mask_dense),
    ("_blocks_dense", _blocks_dense),
):
    register_fake(_name_of_op, _rule)


def _pairs(query: Sequence[int], key: Sequence[int]) -> int:
    return math.prod(query[:-1]) * key[-2]


@register_flop_formula([ops.attention_fwd, ops.attention])
def _forward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """As torch counts scaled_dot_product_attention: every pair, visible or not."""
    return 2 * _pairs(query, key) * (query[-1] + value[-1])


@register_flop_formula(ops.attention_bwd)
def _backward_flops(
    grad_out: Sequence[int], grad_lse: Any, query: Sequence[int], key: Sequence[int], value: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    """Five products: scores again, the gradients of weights, value, query and key."""
    return 2 * _pairs(query, key) * (3 * query[-1] + 2 * value[-1])


@register_flop_formula(ops.attention_weights)
def _weights_flops(query: Sequence[int], key: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return 2 * _pairs(query, key) * query[-1]
