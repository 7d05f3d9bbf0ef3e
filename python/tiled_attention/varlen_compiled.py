"""Packed attention for torch.compile and torch.export: results without data, the operators' derivatives, FLOP counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import batching
from .arguments import TENSORS, VarlenArguments, real_dtype
from .autograd import pick, spread
from .compile_cache import register_fake
from .compiled import ONCE, library, needs_gradient, redispatch, refuse_forward_mode, refuse_moving_tables, register_vmap, without_gradient
from .fake import check_dtype, check_query_key_value, check_tables, dense_like
from .library import ops
from .varlen_autograd import as_gradients, wanted_bits


def check(args: VarlenArguments) -> None:
    """The checks of the operators, but those that read values. Raises ValueError or TypeError naming the argument."""
    query, key, value = args.query, args.key, args.value
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have shape (total, heads, dim), got {tuple(tensor.shape)}")
    check_query_key_value(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
    real, num_sequences = real_dtype(query.dtype), args.cu_seqlens_q.shape[0] - 1
    for name, vector, dtype, size in (
        ("cu_seqlens_q", args.cu_seqlens_q, torch.int64, num_sequences + 1),
        ("cu_seqlens_kv", args.cu_seqlens_kv, torch.int64, num_sequences + 1),
        ("alibi_slopes", args.alibi_slopes, real, query.shape[1]),
        ("sinks", args.sinks, real, query.shape[1]),
        ("key_lengths", args.key_lengths, torch.int64, num_sequences),
        ("query_offset", args.query_offset, torch.int64, num_sequences),
    ):
        if vector is None:
            continue
        check_dtype(name, vector, (dtype,))
        if vector.dim() != 1 or vector.shape[0] != size:
            raise ValueError(f"{name} must have shape {(size,)}, got {tuple(vector.shape)}")
    check_tables(args)
    for name, table, rows in (("query_table", args.query_table, query), ("key_table", args.key_table, key)):
        if table is not None and (table.dim() != 2 or table.shape[0] != rows.shape[0]):
            raise ValueError(f"{name} must have shape ({rows.shape[0]}, rotary_dim), got {tuple(table.shape)}")
    tensors: Any = args[: TENSORS[VarlenArguments]]
    for name, tensor in zip(VarlenArguments._fields, tensors):
        if tensor is not None and tensor.device != query.device:
            raise ValueError(f"{name} must be on the device of query ({query.device}), got {tensor.device}")


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *inputs, with_residual = args
    call = VarlenArguments(*inputs)
    check(call)
    query = call.query
    out = dense_like(query, (*query.shape[:-1], call.value.shape[-1]))
    lse = query.new_empty((query.shape[1], query.shape[0]), dtype=real_dtype(query.dtype))
    has_residual = with_residual and query.dtype in (torch.bfloat16, torch.float16)
    return out, lse, torch.empty_like(out) if has_residual else query.new_empty(0)


def _backward(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *arguments, _, _, _, gradients = args
    call = VarlenArguments(*arguments)
    inputs: Any = (call.query, call.key, call.value, call.alibi_slopes, call.sinks)
    results = []
    for at, tensor in enumerate(inputs):
        if not gradients >> at & 1:
            results.append(call.query.new_empty(0, dtype=real_dtype(call.query.dtype) if tensor is None else tensor.dtype))
        else:
            results.append(dense_like(tensor, tensor.shape) if at < 3 else tensor.new_empty(tensor.shape))
    return tuple(results)


class _AttentionVarlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, residual = redispatch(ops.attention_varlen.default, keyset, args)
        inputs = args[:-1]  # without with_residual
        ctx.options = inputs[TENSORS[VarlenArguments] :]
        ctx.mark_non_differentiable(residual)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[: TENSORS[VarlenArguments]], out, lse, residual)
        return out, lse, residual

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> Any:
        *tensors, out, lse, residual = ctx.saved_tensors
        args = VarlenArguments(*tensors, *ctx.options)
        if grad_out is None:
            grad_out = out.new_zeros(()).expand(out.shape)
        wanted = pick(ctx.needs_input_grad[1:])
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        results = ops.attention_varlen_bwd(grad_out, grad_lse, *args, out, lse, residual, wanted_bits(wanted))
        return (None, *spread(as_gradients(results, wanted), VarlenArguments), None)


def _attention_varlen(keyset: Any, *args: Any) -> Any:
    refuse_forward_mode("attention_varlen", args)
    if needs_gradient("attention_varlen", args):
        refuse_moving_tables("attention_varlen", args[11:13])
        return _AttentionVarlen.apply(keyset, *args)
    return redispatch(ops.attention_varlen.default, keyset, args)


_EAGER = "call tiled_attention.attention_varlen, or the operator tiled_attention::attention_varlen"
for _name, _kernel, _rule in (
    ("attention_varlen", _attention_varlen, _forward),
    ("attention_varlen_fwd", without_gradient("attention_varlen_fwd", _EAGER), _forward),
    ("attention_varlen_bwd", without_gradient("attention_varlen_bwd", ONCE), _backward),
):
    library.impl(_name, _kernel, "Autograd", with_keyset=True)
    register_vmap(_name, batching.loop)
    register_fake(_name, _rule)


def _pairs(query: Tensor, offsets_q: Tensor, offsets_kv: Tensor, max_seqlen_q: int, max_seqlen_kv: int) -> int:
    """Pairs of rows inside the sequences, over all heads; where the offsets have no values, those of sequences of the greatest length."""
    if isinstance(offsets_q, torch._subclasses.FakeTensor) or offsets_q.device.type == "meta":
        return int((offsets_q.shape[0] - 1) * max_seqlen_q * max_seqlen_kv * query.shape[1])
    return int((offsets_q.diff() * offsets_kv.diff()).sum()) * query.shape[1]


@register_flop_formula([ops.attention_varlen_fwd, ops.attention_varlen], get_raw=True)
def _forward_flops(
    query: Any, key: Any, value: Any, offsets_q: Any, offsets_kv: Any, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    return 2 * _pairs(query, offsets_q, offsets_kv, args[8], args[9]) * (query.shape[-1] + value.shape[-1])


@register_flop_formula(ops.attention_varlen_bwd, get_raw=True)
def _backward_flops(
    grad_out: Any, grad_lse: Any, query: Any, key: Any, value: Any, offsets_q: Any, offsets_kv: Any, *args: Any, **kwargs: Any
) -> int:
    return 2 * _pairs(query, offsets_q, offsets_kv, args[8], args[9]) * (3 * query.shape[-1] + 2 * value.shape[-1])
