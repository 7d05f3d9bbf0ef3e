"""Derivatives of linear attention in eager mode, any number of times, forward, reverse and under torch.func."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from . import batching
from .arguments import LinearArguments, LinearGradients
from .autograd import is_differentiating, outer_levels, pick, save, saved, saved_primals, spread
from .library import below_autograd, ops
from .linear_derivatives import Results
from .linear_varlen import gradient_tangents, tangents

_functorch_active = torch._C._are_functorch_transforms_active
_NOT_MOVING: Results = (None, None, None)


class LinearAttention(torch.autograd.Function):
    """LinearArguments -> (out, kv, k_sum)."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        with below_autograd():
            return ops.linear_attention_fwd(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, LinearArguments(*inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        args, _ = saved(ctx)
        return tuple(spread(_gradients(grads, args, pick(ctx.needs_input_grad, LinearGradients)), LinearArguments))

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        args, _ = saved_primals(ctx)
        with outer_levels():
            return tangents(args, pick(directions, LinearGradients))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return batching.map_linear(LinearAttention.apply, info.batch_size, in_dims, args)


_record = super(torch.autograd.Function, LinearAttention).apply  # as for attention


def record_linear_attention(args: LinearArguments) -> tuple[Tensor, Tensor, Tensor]:
    """LinearAttention.apply, the shorter way where there is one."""
    return LinearAttention.apply(*args) if _functorch_active() else _record(*unwrap_dead_wrappers(args))


def linear_bwd_arguments(grads: Any, args: LinearArguments, wanted: Any) -> tuple[Any, ...]:
    """The arguments of linear_attention_bwd; `grads` of (out, kv, k_sum), each may be None."""
    grad_out, *by_state = grads
    if grad_out is None:
        grad_out = args.query.new_zeros(()).expand(*args.query.shape[:-1], args.value.shape[-1])
    bits = sum(bool(want) << at for at, want in enumerate(wanted))
    return grad_out, *(None if grad is None else grad.contiguous() for grad in by_state), *args, bits


def _gradients(grads: Any, args: LinearArguments, wanted: Any) -> LinearGradients:
    """The wanted gradients, themselves differentiable."""
    if all(grad is None for grad in grads):
        return LinearGradients(*(None,) * 6)
    flat = linear_bwd_arguments(grads, args, wanted)
    results = LinearAttentionBackward.apply(*flat) if is_differentiating() else LinearAttentionBackward.forward(*flat)
    return LinearGradients(*(result if want else None for result, want in zip(results, wanted)))


class LinearAttentionBackward(torch.autograd.Function):
    """(grad_out, grad_kv, grad_k_sum, LinearArguments, gradients) -> LinearGradients."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            return ops.linear_attention_bwd(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *grads, gradients = inputs[:3] + inputs[-1:]
        ctx.wanted = tuple(bool(gradients >> at & 1) for at in range(6))
        ctx.mark_non_differentiable(*(result for result, want in zip(output, ctx.wanted) if not want))
        save(ctx, LinearArguments(*inputs[3:-1]), *grads)

    @staticmethod
    def backward(ctx: Any, *directions: Any) -> Any:
        args, grads = saved(ctx)
        needed = ctx.needs_input_grad
        moving = LinearGradients(*directions)
        if all(direction is None for direction in directions):
            return (None,) * len(needed)
        by_grads: Any = tangents(args, moving) if any(needed[:3]) else (None,) * 3
        wanted = pick(needed[3:], LinearGradients)
        cotangents = LinearGradients(*(None,) * 6)
        if any(wanted):
            cotangents = gradient_tangents(args, grads, moving, _NOT_MOVING, wanted)
        return *(part if need else None for part, need in zip(by_grads, needed)), *spread(cotangents, LinearArguments), None

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        args, grads = saved_primals(ctx)
        with outer_levels():
            moving = pick(directions[3:], LinearGradients)
            return tuple(gradient_tangents(args, grads, moving, directions[:3], ctx.wanted))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return batching.map_linear_backward(LinearAttentionBackward.apply, info.batch_size, in_dims, args)
