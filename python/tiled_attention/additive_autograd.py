"""Derivatives of additive attention in eager mode, differentiable any number of times, forward, reverse and under torch.func."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import additive_derivatives as derivatives
from . import batching
from .arguments import AdditiveArguments, AdditiveGradients
from .autograd import is_differentiating, outer_levels, save, saved, saved_primals
from .library import below_autograd, ops

_NOTHING = AdditiveGradients(*(None,) * 4)
_FIELDS = len(AdditiveArguments._fields)

# Positions in (query, key, value, score_weight, mask, key_lengths, documents, query_offset, dropout_seed, dropout_p, ...).
FORWARD = batching.Batching(leading={0, 1, 2}, broadcast={4}, vectors={5, 7}, shared={3, 6, 8}, dropout_p=9)
# The same after (grad_out, grad_lse), and out, lse, residual at 14 to 16.
BACKWARD = batching.Batching(leading={0, 1, 2, 3, 4, 14, 15}, broadcast={6}, vectors={7, 9}, shared={5, 8, 10}, dropout_p=11)
# Without value, and lse, rows at 11 and 12.
WEIGHTS = batching.Batching(leading={0, 1, 11}, broadcast={3}, vectors={4, 6}, shared={2, 5, 7, 12}, dropout_p=8)


def map_forward(call: Any, size: int, in_dims: Any, args: Any) -> tuple[Any, Any]:
    """Rule of (..., with_residual) -> (out, lse, residual)."""
    if FORWARD.must_loop(in_dims, args):
        return batching.loop(call, size, in_dims, args)
    out, lse, residual = call(*FORWARD.fold(size, in_dims, args, args[0].dim() - (in_dims[0] is not None)))
    return (out, lse, residual), (0, 0, 0 if residual.dim() > 1 else None)


def map_backward(call: Any, size: int, in_dims: Any, args: Any) -> tuple[Any, Any]:
    """Rule of (grad_out, grad_lse, ..., out, lse, residual, gradients) -> 4 gradients; that of score_weight is one per sample."""
    if BACKWARD.must_loop(in_dims, args) or args[17] & 8:
        return batching.loop(call, size, in_dims, args)
    folded = BACKWARD.fold(size, in_dims, args, args[2].dim() - (in_dims[2] is not None))
    if in_dims[16] is not None or args[16].dim() > 1:
        folded[16] = batching._first(args[16], in_dims[16], size)
    return tuple(call(*folded)), tuple(0 if args[17] >> at & 1 else None for at in range(4))


def map_weights(call: Any, size: int, in_dims: Any, args: Any) -> tuple[Any, Any]:
    """Rule of additive_attention_weights."""
    if WEIGHTS.must_loop(in_dims, args):
        return batching.loop(call, size, in_dims, args)
    return call(*WEIGHTS.fold(size, in_dims, args, args[0].dim() - (in_dims[0] is not None))), 0


class AdditiveAttention(torch.autograd.Function):
    """AdditiveArguments -> (out, lse, residual)."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        with below_autograd():
            return ops.additive_attention_fwd(*args, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[2])
        save(ctx, AdditiveArguments(*inputs), *output)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> Any:
        args, (out, lse, residual) = saved(ctx)
        if grad_out is None and grad_lse is None:
            return (None,) * _FIELDS
        if grad_out is None:
            grad_out = out.new_zeros(()).expand(out.shape)
        wanted = ctx.needs_input_grad[:4]
        bits = sum(bool(want) << at for at, want in enumerate(wanted))
        flat = (grad_out, grad_lse, *args, out, lse, residual, bits)
        results = AdditiveBackward.apply(*flat) if is_differentiating() else AdditiveBackward.forward(*flat)
        return (*(result if want else None for result, want in zip(results, wanted)), *(None,) * (_FIELDS - 4))

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        args, _ = saved_primals(ctx)
        with outer_levels():
            return (*derivatives.tangents(args, AdditiveGradients(*directions[:4])), None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return map_forward(AdditiveAttention.apply, info.batch_size, in_dims, args)


class AdditiveBackward(torch.autograd.Function):
    """(grad_out, grad_lse, AdditiveArguments, out, lse, residual, gradients) -> AdditiveGradients. out and lse count as functions of the
    arguments."""

    @staticmethod
    def forward(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            return ops.additive_attention_bwd(grad_out, None if grad_lse is None else grad_lse.contiguous(), *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad_out, grad_lse, *args, _, _, _, gradients = inputs
        ctx.wanted = tuple(bool(gradients >> at & 1) for at in range(4))
        ctx.mark_non_differentiable(*(result for result, want in zip(output, ctx.wanted) if not want))
        save(ctx, AdditiveArguments(*args), grad_out, grad_lse)

    @staticmethod
    def backward(ctx: Any, *directions: Any) -> Any:
        args, (grad_out, grad_lse) = saved(ctx)
        needed = ctx.needs_input_grad
        wanted = needed[2:6]
        moving = AdditiveGradients(*directions)
        if all(direction is None for direction in directions):
            return (None,) * len(needed)
        by_out = by_lse = None
        if needed[0] or needed[1]:
            by_out, by_lse = derivatives.tangents(args, moving)
        cotangents = derivatives.gradient_tangents(args, grad_out, grad_lse, moving, None, None, wanted) if any(wanted) else _NOTHING
        return (by_out if needed[0] else None, by_lse if needed[1] else None, *cotangents, *(None,) * (len(needed) - 6))

    @staticmethod
    def jvp(ctx: Any, grad_out_t: Tensor | None, grad_lse_t: Tensor | None, *directions: Any) -> Any:
        args, (grad_out, grad_lse) = saved_primals(ctx)
        moving = AdditiveGradients(*directions[:4])
        with outer_levels():
            return tuple(derivatives.gradient_tangents(args, grad_out, grad_lse, moving, grad_out_t, grad_lse_t, ctx.wanted))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return map_backward(AdditiveBackward.apply, info.batch_size, in_dims, args)


class AdditiveWeights(torch.autograd.Function):
    """(AdditiveArguments without value, lse, rows) -> exp(score - lse), dropped; lse counts as an argument of its own."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        with below_autograd():
            return ops.additive_attention_weights(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *args, lse, rows = inputs
        save(ctx, without_value(args), lse, rows)

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor | None) -> Any:
        needed = ctx.needs_input_grad
        if grad_weights is None:
            return (None,) * len(needed)
        args, (lse, rows) = saved(ctx)
        by_score, grad_lse = derivatives.weights_gradients(args, lse, grad_weights, rows, (needed[0], needed[1], False, needed[2]))
        return (by_score.query, by_score.key, by_score.score_weight, *(None,) * 8, grad_lse if needed[11] else None, None)

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        args, (lse, rows) = saved_primals(ctx)
        moving = AdditiveGradients(directions[0], directions[1], None, directions[2])
        with outer_levels():
            return derivatives.weights_tangent(args, lse, moving, directions[11], rows)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return map_weights(AdditiveWeights.apply, info.batch_size, in_dims, args)


def without_value(score_args: Any) -> AdditiveArguments:
    """The score arguments of additive_attention_weights as AdditiveArguments."""
    query, key, *others = score_args
    return AdditiveArguments(query, key, None, *others)
