"""Linear attention for tensors without data: shapes, dtypes and strides exactly as the kernels', the checks, and FLOP counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .arguments import POSITIONS, TENSORS, LinearArguments, real_dtype
from .compile_cache import register_fake
from .fake import check_broadcasts, check_dtype, check_query_key_value, dense_like
from .library import ops

CHUNK = 64  # rows of a chunk in FLOP counts, whatever the kernel takes


def check(args: LinearArguments) -> None:
    """The checks of the operators, but those that read values. Raises ValueError or TypeError naming the argument."""
    query, key, value = args.query, args.key, args.value
    check_query_key_value(query, key, value)
    if args.causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(f"key must have the length of query with causal=True ({query.shape[-2]}), got {key.shape[-2]}")
    if args.cu_seqlens is not None:
        check_packed(query, key, args.cu_seqlens)
        check_dtype("cu_seqlens", args.cu_seqlens, (torch.int64,))
    if args.key_mask is not None:
        check_dtype("key_mask", args.key_mask, (torch.bool,))
        check_broadcasts("key_mask", args.key_mask, (*key.shape[:-2], 1, key.shape[-2]))
    real = real_dtype(query.dtype)
    if args.log_decay is not None:
        check_dtype("log_decay", args.log_decay, (real,))
        _check_shape("log_decay", args.log_decay, (*key.shape[:-1], 1 if args.log_decay.shape[-1:] == (1,) else key.shape[-1]))
    for name, tensor, shape in (
        ("initial_kv", args.initial_kv, (*_of_state(args), value.shape[-1])),
        ("initial_k_sum", args.initial_k_sum, _of_state(args)),
    ):
        if tensor is not None:
            check_dtype(name, tensor, (real,))
            _check_shape(name, tensor, shape)
    if (args.initial_kv is None) != (args.initial_k_sum is None):
        raise ValueError("initial_kv and initial_k_sum must be given both or neither")
    if not args.causal and (args.log_decay is not None or args.initial_kv is not None):
        name = "log_decay" if args.log_decay is not None else "initial_kv"
        raise ValueError(f"{name} must be None with causal=False, where there is no order of the keys; got a tensor")
    tensors: Any = args[: TENSORS[LinearArguments]]
    for name, tensor in zip(LinearArguments._fields, tensors):
        if tensor is not None and tensor.device != query.device:
            raise ValueError(f"{name} must be on the device of query ({query.device}), got {tensor.device}")


def check_packed(query: Tensor, key: Tensor, cu_seqlens: Tensor) -> None:
    """The shapes of a call with `cu_seqlens`."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape (num_sequences + 1,), got {tuple(cu_seqlens.shape)}")
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dim() != 4 or tensor.shape[0] != 1:
            raise ValueError(f"{name} must have shape (1, heads, total, head_dim) with cu_seqlens, got {tuple(tensor.shape)}")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"key must have the total length of query with cu_seqlens ({query.shape[2]}), got {key.shape[2]}")


def _of_state(args: LinearArguments) -> tuple[int, ...]:
    """The shape of k_sum."""
    key, offsets = args.key, args.cu_seqlens
    return (*(key.shape[:-3] if offsets is None else (offsets.shape[0] - 1,)), key.shape[-3], key.shape[-1])


def _check_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    if tensor.dim() != len(shape) or any(a != b for a, b in zip(tensor.shape, shape)):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = LinearArguments(*args)
    check(call)
    query, head_dim_v, shape, real = call.query, call.value.shape[-1], _of_state(call), real_dtype(call.query.dtype)
    kv, k_sum = query.new_empty((*shape, head_dim_v), dtype=real), query.new_empty(shape, dtype=real)
    return dense_like(query, (*query.shape[:-1], head_dim_v)), kv, k_sum


def _backward(*args: Any) -> tuple[Tensor, ...]:
    _, _, _, *arguments, gradients = args
    call = LinearArguments(*arguments)
    results = []
    for at, position in enumerate(POSITIONS):
        tensor: Any = call[position]
        if not gradients >> at & 1:
            results.append(call.query.new_empty(0, dtype=real_dtype(call.query.dtype) if at > 2 else call.query.dtype))
        else:
            results.append(dense_like(tensor, tensor.shape) if at < 3 else tensor.new_empty(tensor.shape))
    return tuple(results)


def _step(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, query_map, key_map, normalize, scale = args
    for name, tensor in (("query", tensors[0]), ("key", tensors[1])):
        if tensor.shape[-2] != 1:
            raise ValueError(f"{name} must be one token, (..., 1, head_dim), got {tuple(tensor.shape)}")
    return _forward(*tensors, None, query_map, key_map, True, normalize, scale)


for _name, _rule in (
    ("linear_attention_fwd", _forward),
    ("linear_attention", _forward),
    ("linear_attention_bwd", _backward),
    ("linear_attention_step", _step),
    ("linear_attention_step_", lambda *args: _step(*args)[0]),
):
    register_fake(_name, _rule)


def _flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], causal: bool) -> int:
    """What is added to the state, what is read from it, and, causal, half of each chunk's scores and their products with value."""
    head_dim, head_dim_v = query[-1], value[-1]
    rows, keys = math.prod(query[:-1]), math.prod(key[:-1])
    return 2 * (rows + keys) * head_dim * head_dim_v + (rows * CHUNK * (head_dim + head_dim_v) if causal else 0)


@register_flop_formula([ops.linear_attention_fwd, ops.linear_attention])
def _forward_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _flops(query, key, value, args[7])


@register_flop_formula(ops.linear_attention_bwd)
def _backward_flops(grad_out: Any, grad_kv: Any, grad_k_sum: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """2.5 times the forward: five products of its four's sizes, of which the first are those of the forward again."""
    return _flops(query, key, value, args[7]) * 5 // 2


@register_flop_formula([ops.linear_attention_step, ops.linear_attention_step_])
def _step_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(query, key, value, False)
