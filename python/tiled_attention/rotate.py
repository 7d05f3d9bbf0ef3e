"""The operator behind rotary positions: turns the pairs of columns of each row by the angles of its position; linear in the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .compile_cache import register_fake
from .compiled import library, needs_gradient, redispatch, refuse_forward_mode, register_vmap
from .fake import check_dtype, check_table
from .library import below_autograd, ops

_functorch_active = torch._C._are_functorch_transforms_active


def rotate(rows: Tensor, table: Tensor, interleaved: bool = False, transposed: bool = False) -> Tensor:
    """Pairs (a, b) of each row become (a cos - b sin, b cos + a sin).

    Args:
        rows: (..., num_heads, seqlen, head_dim), float32, float64, bfloat16 or float16; any strides. Computed in at least float32.
        table: (seqlen, rotary_dim) or anything that broadcasts to (..., num_heads, seqlen, rotary_dim), float32 (float64 beside float64):
            rotary_dim / 2 columns of cos, then as many of sin. rotary_dim is even, at most head_dim; columns beyond it stay. A constant.
        interleaved: pair k is columns 2 k and 2 k + 1; otherwise k and k + rotary_dim / 2.
        transposed: by -sin; for a table of unit length that is the inverse.

    Returns:
        Of the shape and dtype of rows, dense in its order.

    Source: Su et al., RoFormer (2021), section 3.2.
    """
    if torch.compiler.is_compiling():
        return ops.rotate(rows, table, interleaved, transposed)
    if table.requires_grad:
        raise ValueError("table must not require grad: it is a constant of rotate")
    if _functorch_active() or forward_ad._current_level >= 0 or (torch.is_grad_enabled() and rows.requires_grad):
        return _Rotate.apply(rows, table, interleaved, transposed)
    with below_autograd():
        return ops.rotate(rows, table, interleaved, transposed)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, table: Tensor, interleaved: bool, transposed: bool) -> Tensor:
        with below_autograd():
            return ops.rotate(rows, table, interleaved, transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, table, ctx.interleaved, ctx.transposed = inputs
        ctx.save_for_backward(table)
        ctx.save_for_forward(table)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        back = None if grad is None else rotate(grad, ctx.saved_tensors[0], ctx.interleaved, not ctx.transposed)
        return back, None, None, None

    @staticmethod
    def jvp(ctx: Any, direction: Tensor | None, *_: Any) -> Tensor | None:
        with forward_ad._set_fwd_grad_enabled(True):
            return None if direction is None else rotate(direction, ctx.saved_tensors[0], ctx.interleaved, ctx.transposed)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _map(_Rotate.apply, info.batch_size, in_dims, args)


def _map(call: Any, size: int, in_dims: Any, args: Any) -> Any:
    """The mapped dimension becomes the first leading one."""
    (rows, table, interleaved, transposed), (rows_dim, table_dim, *_) = args, in_dims
    rows = rows.expand(size, *rows.shape) if rows_dim is None else rows.movedim(rows_dim, 0)
    if table_dim is not None:
        table = table.movedim(table_dim, 0)
        table = table.reshape(size, *(1,) * (rows.dim() - table.dim()), *table.shape[1:])
    return call(rows, table, interleaved, transposed), 0


class _CompiledRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: Any, rows: Tensor, table: Tensor, interleaved: bool, transposed: bool) -> Tensor:
        ctx.options = interleaved, transposed
        ctx.save_for_backward(table)
        return redispatch(ops.rotate.default, keyset, (rows, table, interleaved, transposed))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        interleaved, transposed = ctx.options
        return None, ops.rotate(grad, ctx.saved_tensors[0], interleaved, not transposed), None, None, None


def _rotate(keyset: Any, *args: Any) -> Any:
    refuse_forward_mode("rotate", args)
    if needs_gradient("rotate", args):
        if args[1].requires_grad:
            raise ValueError("table must not require grad: it is a constant of rotate")
        return _CompiledRotate.apply(keyset, *args)
    return redispatch(ops.rotate.default, keyset, args)


library.impl("rotate", _rotate, "Autograd", with_keyset=True)
register_vmap("rotate", _map)


def _fake(rows: Tensor, table: Tensor, interleaved: bool, transposed: bool) -> Tensor:
    check_dtype("rows", rows, (torch.float32, torch.float64, torch.bfloat16, torch.float16))
    if rows.dim() < 3:
        raise ValueError(f"rows must have shape (..., num_heads, seqlen, head_dim), got {tuple(rows.shape)}")
    check_table("table", table, rows)
    return torch.empty_like(rows)


register_fake("rotate", _fake)
