"""Derivatives of the operators themselves: what torch.compile and torch.export record, and what torch.ops gives.

One reverse derivative of `attention` and `attention_weights` is all that can be expressed there. Everything else (forward mode,
torch.func, a second derivative) raises an error that says so: the dispatcher would drop tangents silently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from . import batching, derivatives
from .arguments import POSITIONS, TENSORS, Arguments, Gradients
from .autograd import spread, without_value
from .library import below_autograd, ops

library = torch.library.Library("tiled_attention", "FRAGMENT")
# attention_weights_bwd exists for compiled code alone: one node in place of the composite.
_WEIGHTS_ARGUMENTS = str(ops.attention_weights.default._schema).partition("(")[2].rpartition(") ->")[0]
library.define(
    f"attention_weights_bwd(Tensor grad_weights, {_WEIGHTS_ARGUMENTS}, int gradients) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_bias, Tensor grad_alibi_slopes, Tensor grad_lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_after_autograd = torch._C._after_autograd_keyset


def _has_tangent(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and torch._VF._unpack_dual(tensor, level=0)[1] is not None


def refuse_forward_mode(name: str, args: Any) -> None:
    # A trace would keep what looks for tangents, and inductor cannot take that beside an operator that mutates.
    tracing = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    with disable_proxy_modes_tracing() if tracing else contextlib.nullcontext():
        moving = any(_has_tangent(arg) for arg in args)
    if moving:
        raise RuntimeError(
            f"tiled_attention::{name} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, forward_ad): "
            "call the functions of tiled_attention in eager mode, outside torch.compile"
        )


def refuse_moving_tables(name: str, tables: Any) -> None:
    for table, argument in zip(tables, ("query_table", "key_table"), strict=True):
        if table is not None and table.requires_grad:
            raise ValueError(f"{argument} must not require grad: it is a constant of tiled_attention::{name}")


def needs_gradient(name: str, args: Any) -> bool:
    needs = torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    if needs and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"tiled_attention::{name} has no derivative under torch.func (grad, vjp, jacrev): "
            "call the functions of tiled_attention in eager mode, outside torch.compile"
        )
    return needs


def redispatch(op: Any, keyset: Any, args: Any) -> Any:
    with below_autograd():
        return op.redispatch(keyset & _after_autograd, *args)


def without_gradient(name: str, instead: str) -> Callable[..., Any]:
    """The Autograd kernel of an operator without a derivative of its own."""
    op = getattr(ops, name).default

    def kernel(keyset: Any, *args: Any) -> Any:
        refuse_forward_mode(name, args)
        if needs_gradient(name, args):
            raise RuntimeError(f"tiled_attention::{name} has no derivative: {instead}")
        return redispatch(op, keyset, args)

    return kernel


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, residual = redispatch(ops.attention.default, keyset, args)
        inputs = args[:-1]  # without with_residual
        ctx.options = inputs[TENSORS[Arguments] :]
        ctx.mark_non_differentiable(residual)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[: TENSORS[Arguments]], out, lse, residual)
        return out, lse, residual

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> Any:
        *tensors, out, lse, residual = ctx.saved_tensors
        args = Arguments(*tensors, *ctx.options)
        if grad_out is None:
            grad_out = out.new_zeros(()).expand(out.shape)
        needed = ctx.needs_input_grad[1:]
        wanted = [needed[at] for at in POSITIONS]
        bits = sum(want << at for at, want in enumerate(wanted))
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        results = ops.attention_bwd(grad_out, grad_lse, *args, out, lse, residual, bits)
        return (None, *spread(Gradients(*(result if want else None for result, want in zip(results, wanted)))), None)


_WEIGHTS_POSITIONS = (0, 1, 3, 4, 21)  # of query, key, bias, alibi_slopes and lse among the arguments of attention_weights


def _weights_backward(grad_weights: Tensor, *args: Any) -> list[Tensor]:
    """attention_weights_bwd on every device: the composite, a block of queries at a time."""
    *score_args, lse, rows, average, gradients = args
    by_query, by_key, by_bias, by_slopes, _ = (bool(gradients >> at & 1) for at in range(5))
    wanted = (by_query, by_key, False, by_bias, by_slopes, False)
    by_score, grad_lse = derivatives.weights_gradients(without_value(score_args), lse, grad_weights, average, rows, wanted)
    results: Any = (by_score.query, by_score.key, by_score.bias, by_score.alibi_slopes, grad_lse)
    return [result.contiguous() if gradients >> at & 1 else args[0].new_empty(0) for at, result in enumerate(results)]


class _AttentionWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Tensor:
        *score_args, lse, rows, ctx.average = args
        ctx.options = score_args[14:]
        ctx.save_for_backward(*score_args[:14], lse, rows)
        return redispatch(ops.attention_weights.default, keyset, args)

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor) -> Any:
        *tensors, lse, rows = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        wanted = [needed[at] for at in _WEIGHTS_POSITIONS]
        bits = sum(want << at for at, want in enumerate(wanted))
        results = ops.attention_weights_bwd(grad_weights, *tensors, *ctx.options, lse, rows, ctx.average, bits)
        gradients: list[Tensor | None] = [None] * len(needed)
        for at, result, want in zip(_WEIGHTS_POSITIONS, results, wanted):
            gradients[at] = result if want else None
        return (None, *gradients)


def _attention(keyset: Any, *args: Any) -> Any:
    refuse_forward_mode("attention", args)
    if needs_gradient("attention", args):
        refuse_moving_tables("attention", args[14:16])
        return _Attention.apply(keyset, *args)
    return redispatch(ops.attention.default, keyset, args)


def _attention_weights(keyset: Any, *args: Any) -> Any:
    refuse_forward_mode("attention_weights", args)
    if needs_gradient("attention_weights", args):
        refuse_moving_tables("attention_weights", args[12:14])
        return _AttentionWeights.apply(keyset, *args)
    return redispatch(ops.attention_weights.default, keyset, args)


library.impl("attention_weights_bwd", _weights_backward, "CompositeExplicitAutograd")
_EAGER = "call tiled_attention.attention, or the operator tiled_attention::attention"
ONCE = "second derivatives exist in eager mode only, through the functions of tiled_attention"
for _name, _kernel in (
    ("attention", _attention),
    ("attention_weights", _attention_weights),
    ("attention_fwd", without_gradient("attention_fwd", _EAGER)),
    ("attention_bwd", without_gradient("attention_bwd", ONCE)),
    ("attention_weights_bwd", without_gradient("attention_weights_bwd", ONCE)),
):
    library.impl(_name, _kernel, "Autograd", with_keyset=True)


def register_vmap(name: str, rule: Callable[..., Any]) -> None:
    op = getattr(ops, name).default

    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return rule(op, info.batch_size, in_dims, args)

    torch.library.register_vmap(f"tiled_attention::{name}", vmap)


register_vmap("attention", batching.map_forward)
register_vmap("attention_fwd", batching.map_forward)
register_vmap("attention_bwd", batching.map_backward)
register_vmap("attention_weights", batching.map_weights)
register_vmap("attention_weights_bwd", batching.loop)
register_vmap("dropout_mask", batching.loop)
register_vmap("_blocks_dense", batching.loop)
