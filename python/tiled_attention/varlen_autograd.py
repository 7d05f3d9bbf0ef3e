"""Derivatives of packed attention in eager mode, any number of times, forward, reverse and under torch.func.

The first backward pass is one operator call. Beyond it every sequence is an attention of its own, and its formulas are those of
`derivatives`: this reads the offsets, which on CUDA waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from . import batching, derivatives
from .arguments import Arguments, Gradients, VarlenArguments
from .autograd import is_differentiating, outer_levels, pick, save, saved, saved_primals, spread
from .library import below_autograd, ops

_functorch_active = torch._C._are_functorch_transforms_active
_RESULTS = (0, 1, 2, 4, 5)  # which fields of Gradients attention_varlen_bwd returns: there is no bias


def wanted_bits(wanted: Any) -> int:
    """`gradients` of attention_varlen_bwd."""
    return sum(bool(wanted[at]) << bit for bit, at in enumerate(_RESULTS))


def as_gradients(results: Any, wanted: Any) -> Gradients:
    """The wanted ones of the results of attention_varlen_bwd by name."""
    by_place = dict(zip(_RESULTS, results))
    return Gradients(*(by_place.get(at) if want else None for at, want in enumerate(wanted)))


class AttentionVarlen(torch.autograd.Function):
    """VarlenArguments -> (out, lse, residual)."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        with below_autograd():
            return ops.attention_varlen_fwd(*args, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[2])
        save(ctx, VarlenArguments(*inputs), *output)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> Any:
        args, (out, lse, residual) = saved(ctx)
        return tuple(spread(_gradients(grad_out, grad_lse, args, out, lse, residual, pick(ctx.needs_input_grad)), VarlenArguments))

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        args, _ = saved_primals(ctx)
        with outer_levels():
            return (*tangents(args, pick(directions)), None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return batching.loop(AttentionVarlen.apply, info.batch_size, in_dims, args)


_record = super(torch.autograd.Function, AttentionVarlen).apply  # as for attention


def record_attention_varlen(args: VarlenArguments) -> tuple[Tensor, Tensor, Tensor]:
    """AttentionVarlen.apply, the shorter way where there is one."""
    return AttentionVarlen.apply(*args) if _functorch_active() else _record(*unwrap_dead_wrappers(args))


def _gradients(
    grad_out: Tensor | None, grad_lse: Tensor | None, args: VarlenArguments, out: Tensor, lse: Tensor, residual: Tensor, wanted: Any
) -> Gradients:
    """The wanted gradients, themselves differentiable."""
    if grad_out is None and grad_lse is None:
        return Gradients(*(None,) * 6)
    if grad_out is None:
        grad_out = out.new_zeros(()).expand(out.shape)
    flat = (grad_out, grad_lse, *args, out, lse, residual, wanted_bits(wanted))
    results = AttentionVarlenBackward.apply(*flat) if is_differentiating() else AttentionVarlenBackward.forward(*flat)
    return as_gradients(results, wanted)


class AttentionVarlenBackward(torch.autograd.Function):
    """(grad_out, grad_lse, VarlenArguments, out, lse, residual, gradients) -> 5 gradients. out and lse are functions of the arguments."""

    @staticmethod
    def forward(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            return ops.attention_varlen_bwd(grad_out, None if grad_lse is None else grad_lse.contiguous(), *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad_out, grad_lse, *args, _, _, _, gradients = inputs
        wanted = [bool(gradients >> bit & 1) for bit in range(5)]
        ctx.wanted = (*wanted[:3], False, *wanted[3:])
        ctx.mark_non_differentiable(*(result for result, want in zip(output, wanted) if not want))
        save(ctx, VarlenArguments(*args), grad_out, grad_lse)

    @staticmethod
    def backward(ctx: Any, *directions: Any) -> Any:
        args, (grad_out, grad_lse) = saved(ctx)
        needed = ctx.needs_input_grad
        wanted: Any = pick(needed[2:])
        if all(direction is None for direction in directions):
            return (None,) * len(needed)
        moving = as_gradients(directions, (True,) * 6)
        grad_out_cotangent = grad_lse_cotangent = None
        if needed[0] or needed[1]:
            grad_out_cotangent, grad_lse_cotangent = tangents(args, moving)
        cotangents = Gradients(*(None,) * 6)
        if any(wanted):
            cotangents = gradient_tangents(args, grad_out, grad_lse, moving, None, None, wanted)
        return (
            grad_out_cotangent if needed[0] else None,
            grad_lse_cotangent if needed[1] else None,
            *spread(cotangents, VarlenArguments),
            *(None,) * 4,
        )

    @staticmethod
    def jvp(ctx: Any, grad_out_t: Tensor | None, grad_lse_t: Tensor | None, *directions: Any) -> Any:
        args, (grad_out, grad_lse) = saved_primals(ctx)
        with outer_levels():
            results = gradient_tangents(args, grad_out, grad_lse, pick(directions), grad_out_t, grad_lse_t, ctx.wanted)
            return tuple(results[at] for at in _RESULTS)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return batching.loop(AttentionVarlenBackward.apply, info.batch_size, in_dims, args)


class _Sequence:
    """One sequence of a packed call."""

    def __init__(self, args: VarlenArguments, index: int, rows: slice, keys: slice) -> None:
        self.rows, self.keys = rows, keys
        offsets = tuple(args.dropout_offsets) or (0, 0, 0, 0)
        item = slice(index, index + 1)
        self.args = Arguments(
            query=args.query[rows].transpose(0, 1),
            key=args.key[keys].transpose(0, 1),
            value=args.value[keys].transpose(0, 1),
            mask=None,
            bias=None,
            alibi_slopes=args.alibi_slopes,
            sinks=args.sinks,
            key_lengths=None if args.key_lengths is None else args.key_lengths[item],
            documents=args.documents,
            query_offset=None if args.query_offset is None else args.query_offset[item],
            dropout_seed=args.dropout_seed,
            block_rows=None,
            block_tiles=None,
            block_bits=None,
            query_table=None if args.query_table is None else args.query_table[rows],
            key_table=None if args.key_table is None else args.key_table[keys],
            scale=args.scale,
            softcap=args.softcap,
            dropout_p=args.dropout_p,
            intervals=args.intervals,
            dropout_offsets=(offsets[0] + index, *offsets[1:]),
            allow_tf32=False,
            interleaved=args.interleaved,
        )

    def of_rows(self, tensor: Any) -> Any:
        return None if tensor is None else tensor[self.rows].transpose(0, 1)

    def of_lse(self, tensor: Any) -> Any:
        return None if tensor is None else tensor[:, self.rows]

    def directions(self, directions: Gradients) -> Gradients:
        key, value = (None if tensor is None else tensor[self.keys].transpose(0, 1) for tensor in (directions.key, directions.value))
        return directions._replace(query=self.of_rows(directions.query), key=key, value=value)


def _sequences(args: VarlenArguments) -> Iterator[_Sequence]:
    offsets_q, offsets_kv = args.cu_seqlens_q.tolist(), args.cu_seqlens_kv.tolist()
    for index in range(len(offsets_q) - 1):
        yield _Sequence(args, index, slice(*offsets_q[index : index + 2]), slice(*offsets_kv[index : index + 2]))


def _packed(parts: list[Tensor], like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(heads, rows, dim) of each sequence as (total, heads, dim)."""
    return torch.cat([part.transpose(0, 1) for part in parts]) if parts else like.new_zeros(shape)


def tangents(args: VarlenArguments, directions: Gradients) -> tuple[Tensor, Tensor]:
    """Tangents of (out, lse), where the inputs move in `directions` (None: that one does not)."""
    parts = [derivatives.tangents(sequence.args, sequence.directions(directions)) for sequence in _sequences(args)]
    total_q, num_heads, _ = args.query.shape
    out_t = _packed([out for out, _ in parts], args.query, (total_q, num_heads, args.value.shape[-1]))
    return out_t, torch.cat([lse for _, lse in parts], 1) if parts else args.query.new_zeros((num_heads, total_q))


def gradient_tangents(
    args: VarlenArguments,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    directions: Gradients,
    grad_out_t: Tensor | None,
    grad_lse_t: Tensor | None,
    wanted: Any,
) -> Gradients:
    """Tangents of the wanted gradients, where the inputs and the two output gradients move in the given directions."""
    parts = [
        derivatives.gradient_tangents(
            sequence.args,
            sequence.of_rows(grad_out),
            sequence.of_lse(grad_lse),
            sequence.directions(directions),
            sequence.of_rows(grad_out_t),
            sequence.of_lse(grad_lse_t),
            tuple(wanted),
        )
        for sequence in _sequences(args)
    ]
    results: list[Tensor | None] = [None] * 6
    for at, name in enumerate(Gradients._fields):
        if not wanted[at]:
            continue
        of_parts = [getattr(part, name) for part in parts]
        like = getattr(args, name)
        if at < 3:
            results[at] = _packed(of_parts, like, tuple(like.shape))
        else:
            results[at] = torch.stack(of_parts).sum(0) if of_parts else torch.zeros_like(like)
    return Gradients(*results)
