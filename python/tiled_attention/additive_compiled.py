"""What torch.compile and torch.export record of additive attention, and what torch.ops gives: shapes, one reverse derivative, vmap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import additive_derivatives as derivatives
from . import batching
from .additive_autograd import map_backward, map_forward, map_weights, without_value
from .arguments import TENSORS, AdditiveArguments, AdditiveGradients, real_dtype
from .compile_cache import register_fake
from .compiled import ONCE, library, needs_gradient, redispatch, refuse_forward_mode, register_vmap, without_gradient
from .fake import check, check_dtype, dense_like
from .library import ops

_WEIGHTS_ARGUMENTS = str(ops.additive_attention_weights.default._schema).partition("(")[2].rpartition(") ->")[0]
library.define(
    f"additive_attention_weights_bwd(Tensor grad_weights, {_WEIGHTS_ARGUMENTS}, int gradients) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_score_weight, Tensor grad_lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class _AdditiveAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, residual = redispatch(ops.additive_attention.default, keyset, args)
        inputs = args[:-1]  # without with_residual
        ctx.options = inputs[TENSORS[AdditiveArguments] :]
        ctx.mark_non_differentiable(residual)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[: TENSORS[AdditiveArguments]], out, lse, residual)
        return out, lse, residual

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> Any:
        *tensors, out, lse, residual = ctx.saved_tensors
        if grad_out is None:
            grad_out = out.new_zeros(()).expand(out.shape)
        needed = ctx.needs_input_grad[1:]
        bits = sum(want << at for at, want in enumerate(needed[:4]))
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        results = ops.additive_attention_bwd(grad_out, grad_lse, *tensors, *ctx.options, out, lse, residual, bits)
        gradients = [result if want else None for result, want in zip(results, needed)]
        return (None, *gradients, *(None,) * (len(needed) - 4))


_WEIGHTS_POSITIONS = (0, 1, 2, 11)  # of query, key, score_weight and lse among the arguments of additive_attention_weights


def _weights_backward(grad_weights: Tensor, *args: Any) -> list[Tensor]:
    """additive_attention_weights_bwd on every device: the composite, a block of queries at a time."""
    *score_args, lse, rows, gradients = args
    wanted = (bool(gradients & 1), bool(gradients & 2), False, bool(gradients & 4))
    by_score, grad_lse = derivatives.weights_gradients(without_value(score_args), lse, grad_weights, rows, wanted)
    results: Any = (by_score.query, by_score.key, by_score.score_weight, grad_lse)
    return [result.contiguous() if gradients >> at & 1 else args[0].new_empty(0) for at, result in enumerate(results)]


class _AdditiveWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Tensor:
        *score_args, lse, rows = args
        ctx.options = score_args[8:]
        ctx.save_for_backward(*score_args[:8], lse, rows)
        return redispatch(ops.additive_attention_weights.default, keyset, args)

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor) -> Any:
        *tensors, lse, rows = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        wanted = [needed[at] for at in _WEIGHTS_POSITIONS]
        bits = sum(want << at for at, want in enumerate(wanted))
        results = ops.additive_attention_weights_bwd(grad_weights, *tensors, *ctx.options, lse, rows, bits)
        gradients: list[Tensor | None] = [None] * len(needed)
        for at, result, want in zip(_WEIGHTS_POSITIONS, results, wanted):
            gradients[at] = result if want else None
        return (None, *gradients)


def _additive_attention(keyset: Any, *args: Any) -> Any:
    refuse_forward_mode("additive_attention", args)
    if needs_gradient("additive_attention", args):
        return _AdditiveAttention.apply(keyset, *args)
    return redispatch(ops.additive_attention.default, keyset, args)


def _additive_weights(keyset: Any, *args: Any) -> Any:
    refuse_forward_mode("additive_attention_weights", args)
    if needs_gradient("additive_attention_weights", args):
        return _AdditiveWeights.apply(keyset, *args)
    return redispatch(ops.additive_attention_weights.default, keyset, args)


library.impl("additive_attention_weights_bwd", _weights_backward, "CompositeExplicitAutograd")
for _name, _kernel in (
    ("additive_attention", _additive_attention),
    ("additive_attention_weights", _additive_weights),
    (
        "additive_attention_fwd",
        without_gradient(
            "additive_attention_fwd", "call tiled_attention.additive_attention, or the operator tiled_attention::additive_attention"
        ),
    ),
    ("additive_attention_bwd", without_gradient("additive_attention_bwd", ONCE)),
    ("additive_attention_weights_bwd", without_gradient("additive_attention_weights_bwd", ONCE)),
):
    library.impl(_name, _kernel, "Autograd", with_keyset=True)

register_vmap("additive_attention", map_forward)
register_vmap("additive_attention_fwd", map_forward)
register_vmap("additive_attention_bwd", map_backward)
register_vmap("additive_attention_weights", map_weights)
register_vmap("additive_attention_weights_bwd", batching.loop)


def _check(args: AdditiveArguments) -> None:
    check(derivatives.masks_of(args))
    query, weight = args.query, args.score_weight
    check_dtype("score_weight", weight, (real_dtype(query.dtype),))
    if weight.shape not in ((query.shape[-1],), (query.shape[-3], query.shape[-1])):
        raise ValueError(
            f"score_weight must have shape (head_dim,) or (num_heads, head_dim) of query {tuple(query.shape)}, got {tuple(weight.shape)}"
        )
    if weight.device != query.device:
        raise ValueError(f"score_weight must be on the device of query ({query.device}), got {weight.device}")


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *inputs, with_residual = args
    call = AdditiveArguments(*inputs)
    _check(call)
    query = call.query
    out = dense_like(query, (*query.shape[:-1], call.value.shape[-1]))
    lse = query.new_empty(query.shape[:-1], dtype=real_dtype(query.dtype))
    has_residual = with_residual and query.dtype in (torch.bfloat16, torch.float16)
    return out, lse, torch.empty_like(out) if has_residual else query.new_empty(0)


def _fake_backward(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *arguments, _, _, _, gradients = args
    inputs = AdditiveGradients(*arguments[:4])
    results = []
    for at, tensor in enumerate(inputs):
        assert tensor is not None
        if not gradients >> at & 1:
            results.append(tensor.new_empty(0))
        else:
            results.append(dense_like(tensor, tensor.shape) if at < 3 else tensor.new_empty(tensor.shape))
    return tuple(results)


def _fake_weights(*args: Any) -> Tensor:
    *score_args, _, rows = args
    call = without_value(score_args)
    _check(call)
    num_rows = call.query.shape[-2] if rows is None else rows.shape[0]
    return call.query.new_empty((*call.query.shape[:-2], num_rows, call.key.shape[-2]), dtype=real_dtype(call.query.dtype))


def _fake_weights_backward(grad_weights: Tensor, *args: Any) -> tuple[Tensor, ...]:
    query, key, score_weight, *_, lse, _, gradients = args
    wanted = (gradients >> at & 1 for at in range(4))
    return tuple(
        tensor.new_empty(tensor.shape) if want else query.new_empty(0) for tensor, want in zip((query, key, score_weight, lse), wanted)
    )


for _name, _rule in (
    ("additive_attention_fwd", _fake_forward),
    ("additive_attention", _fake_forward),
    ("additive_attention_bwd", _fake_backward),
    ("additive_attention_weights", _fake_weights),
    ("additive_attention_weights_bwd", _fake_weights_backward),
):
    register_fake(_name, _rule)


def _pairs(query: Sequence[int], key: Sequence[int]) -> int:
    return math.prod(query[:-1]) * key[-2]


@register_flop_formula([ops.additive_attention_fwd, ops.additive_attention])
def _forward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """A sum, a tanh and a multiply-add per column of a pair count 4; every pair, visible or not."""
    return _pairs(query, key) * (4 * query[-1] + 2 * value[-1])


@register_flop_formula(ops.additive_attention_bwd)
def _backward_flops(
    grad_out: Sequence[int], grad_lse: Any, query: Sequence[int], key: Sequence[int], value: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    """Scores again, 1 - tanh^2 and three sums of its products; two products with the values."""
    return _pairs(query, key) * (4 * query[-1] + 8 * query[-1] + 4 * value[-1])


@register_flop_formula(ops.additive_attention_weights)
def _weights_flops(query: Sequence[int], key: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return 4 * _pairs(query, key) * query[-1]
