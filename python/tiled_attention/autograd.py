"""Derivatives in eager mode: autograd functions that are differentiable any number of times, forward, reverse and under torch.func."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from . import batching, derivatives
from .arguments import POSITIONS, TENSORS, Arguments, Gradients
from .library import below_autograd, ops

_functorch_active = torch._C._are_functorch_transforms_active


def is_differentiating() -> bool:
    """Whether something beyond the first backward pass may be asked of what runs now."""
    return torch.is_grad_enabled() or _functorch_active() or forward_ad._current_level >= 0


def save(ctx: Any, args: Any, *others: Tensor | None) -> None:
    """Keeps `args`, the arguments of an operator, and other tensors for `saved` and `saved_primals`."""
    count = TENSORS[type(args)]
    tensors = (*args[:count], *others)
    ctx.kind, ctx.options = type(args), args[count:]
    ctx.save_for_backward(*tensors)
    if forward_ad._current_level >= 0:
        ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def saved(ctx: Any) -> tuple[Any, tuple[Any, ...]]:
    return _parts(ctx, ctx.saved_tensors)


def saved_primals(ctx: Any) -> tuple[Any, tuple[Any, ...]]:
    """As `saved`, without the tangents of this level of forward mode. Those of outer levels stay, and torch drops them while jvp runs
    unless the formula is computed under `outer_levels()`."""
    return _parts(ctx, [None if tensor is None else forward_ad.unpack_dual(tensor, level=0).primal for tensor in ctx.saved_tensors])


def _parts(ctx: Any, tensors: Sequence[Tensor | None]) -> tuple[Any, tuple[Any, ...]]:
    count = TENSORS[ctx.kind]
    return ctx.kind(*tensors[:count], *ctx.options), tuple(tensors[count:])


def outer_levels() -> Any:
    return forward_ad._set_fwd_grad_enabled(True)


def spread(gradients: Sequence[Tensor | None], kind: Any = Arguments) -> list[Tensor | None]:
    """Per field of `kind`, the arguments of the operator."""
    result: list[Tensor | None] = [None] * len(kind._fields)
    for at, gradient in zip(POSITIONS, gradients):
        result[at] = gradient
    return result


def pick(per_argument: Any, kind: Any = Gradients) -> Any:
    """The entries of the differentiable arguments, as `kind`."""
    return kind(*(per_argument[at] for at in POSITIONS))


class Attention(torch.autograd.Function):
    """Arguments -> (out, lse, residual)."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        with below_autograd():
            return ops.attention_fwd(*args, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[2])
        save(ctx, Arguments(*inputs), *output)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> Any:
        args, (out, lse, residual) = saved(ctx)
        return tuple(spread(attention_gradients(grad_out, grad_lse, args, out, lse, residual, pick(ctx.needs_input_grad))))

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        args, _ = saved_primals(ctx)
        with outer_levels():
            return (*derivatives.tangents(args, pick(directions)), None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return batching.map_forward(Attention.apply, info.batch_size, in_dims, args)


_record = super(torch.autograd.Function, Attention).apply  # what Function.apply comes to without transforms, after binding a signature


def record_attention(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Attention.apply, the shorter way where there is one."""
    return Attention.apply(*args) if _functorch_active() else _record(*unwrap_dead_wrappers(args))


def attention_gradients(
    grad_out: Tensor | None, grad_lse: Tensor | None, args: Arguments, out: Tensor, lse: Tensor, residual: Tensor, wanted: Any
) -> Gradients:
    """The wanted gradients, themselves differentiable."""
    if grad_out is None and grad_lse is None:
        return Gradients(*(None,) * 6)
    if grad_out is None:
        grad_out = out.new_zeros(()).expand(out.shape)
    bits = sum(bool(want) << at for at, want in enumerate(wanted))
    flat = (grad_out, grad_lse, *args, out, lse, residual, bits)
    results = AttentionBackward.apply(*flat) if is_differentiating() else AttentionBackward.forward(*flat)
    return Gradients(*(result if want else None for result, want in zip(results, wanted)))


class AttentionBackward(torch.autograd.Function):
    """(grad_out, grad_lse, Arguments, out, lse, residual, gradients) -> Gradients. out and lse count as functions of the arguments."""

    @staticmethod
    def forward(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            return ops.attention_bwd(grad_out, None if grad_lse is None else grad_lse.contiguous(), *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad_out, grad_lse, *args, _, _, _, gradients = inputs
        ctx.wanted = tuple(bool(gradients >> at & 1) for at in range(6))
        ctx.mark_non_differentiable(*(result for result, want in zip(output, ctx.wanted) if not want))
        save(ctx, Arguments(*args), grad_out, grad_lse)

    @staticmethod
    def backward(ctx: Any, *directions: Any) -> Any:
        args, (grad_out, grad_lse) = saved(ctx)
        needed = ctx.needs_input_grad
        wanted: Any = pick(needed[2:])
        moving = Gradients(*directions)
        grad_out_cotangent = grad_lse_cotangent = None
        if all(direction is None for direction in directions):
            return (None,) * len(needed)
        if needed[0] or needed[1]:
            grad_out_cotangent, grad_lse_cotangent = derivatives.tangents(args, moving)
        cotangents = Gradients(*(None,) * 6)
        if any(wanted):
            cotangents = derivatives.gradient_tangents(args, grad_out, grad_lse, moving, None, None, wanted)
        return (
            grad_out_cotangent if needed[0] else None,
            grad_lse_cotangent if needed[1] else None,
            *spread(cotangents),
            *(None,) * 4,
        )

    @staticmethod
    def jvp(ctx: Any, grad_out_t: Tensor | None, grad_lse_t: Tensor | None, *directions: Any) -> Any:
        args, (grad_out, grad_lse) = saved_primals(ctx)
        with outer_levels():
            return tuple(derivatives.gradient_tangents(args, grad_out, grad_lse, pick(directions), grad_out_t, grad_lse_t, ctx.wanted))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return batching.map_backward(AttentionBackward.apply, info.batch_size, in_dims, args)


class AttentionWeights(torch.autograd.Function):
    """(score arguments, lse, rows, average) -> exp(score - lse), dropped; lse counts as an argument of its own.

    The score arguments are those of the operator: Arguments without value and sinks.
    """

    @staticmethod
    def forward(*args: Any) -> Tensor:
        with below_autograd():
            return ops.attention_weights(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *args, lse, rows, ctx.average = inputs
        save(ctx, without_value(args), lse, rows)

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor | None) -> Any:
        if grad_weights is None:
            return (None,) * 24
        args, (lse, rows) = saved(ctx)
        needed = ctx.needs_input_grad
        wanted = (needed[0], needed[1], False, needed[3], needed[4], False)
        gradients, grad_lse = derivatives.weights_gradients(args, lse, grad_weights, ctx.average, rows, wanted)
        by_score = (gradients.query, gradients.key, None, gradients.bias, gradients.alibi_slopes, *(None,) * 16)
        return (*by_score, grad_lse if needed[21] else None, None, None)

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        args, (lse, rows) = saved_primals(ctx)
        moving = Gradients(directions[0], directions[1], None, directions[3], directions[4], None)
        with outer_levels():
            return derivatives.weights_tangent(args, lse, moving, directions[21], ctx.average, rows)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return batching.map_weights(AttentionWeights.apply, info.batch_size, in_dims, args)


def without_value(score_args: Any) -> Arguments:
    """The score arguments of attention_weights as Arguments."""
    query, key, mask, bias, alibi_slopes, *others = score_args
    return Arguments(query, key, None, mask, bias, alibi_slopes, None, *others)
