"""Attention over some of the keys, added to what others gave: in place on the CPU, by lse elsewhere. Below autograd.

The results over all keys are those of one softmax: the gradients of each part follow from the joined out, lse and residual, and nothing is
differentiated through the joining.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .arguments import Arguments, Gradients, real_dtype
from .library import below_autograd, ops

CPU_ADDS = torch._C._dispatch_has_kernel_for_dispatch_key(
    "tiled_attention::_attention_fwd_add_", "CPU"
)  # not in a build of emulated CUDA kernels


def adds_in_place(query: Tensor) -> bool:
    return CPU_ADDS and query.device.type == "cpu"


def joined(
    out: Tensor, lse: Tensor, residual: Tensor, other: Tensor, other_lse: Tensor, other_residual: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, residual) over the keys of both; lse Real or float64; residuals of 16-bit results or (0,). Changes the first `out`."""
    rounds = residual.dim() > 1
    if rounds:
        real = real_dtype(out.dtype)
        out, other = out.to(real) + residual, other.to(real) + other_residual
    total_lse = torch.logaddexp(lse, other_lse)
    shift = torch.where(total_lse == -math.inf, 0.0, total_lse)
    share, other_share = ((x - shift).exp_().to(out.dtype)[..., None] for x in (lse, other_lse))
    total = out.mul_(share).addcmul_(other, other_share)
    if not rounds:
        return total, total_lse, residual
    out = total.to(residual.dtype)
    return out, total_lse, total.sub_(out).to(residual.dtype)


def add_forward(args: Arguments, out: Tensor, lse: Tensor, residual: Tensor) -> None:
    """Joins `args` to `out`, `lse` (float64, contiguous) and `residual` (of 16-bit results, else (0,)), which start as 0, -inf and 0."""
    with below_autograd():
        if adds_in_place(args.query):
            ops._attention_fwd_add_(*args, out, lse, residual)
            return
        other = ops.attention_fwd(*args, residual.dim() > 1)
        for target, result in zip((out, lse, residual), joined(out.clone(), lse, residual, *other), strict=True):
            if result is not target:
                target.copy_(result)


def add_backward(
    args: Arguments, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, residual: Tensor, grads: Gradients
) -> None:
    """Adds the gradients of `args` to `grads`, in Real; None: not wanted. `out`, `lse` and `residual` are those over all keys."""
    with below_autograd():
        results = (grad_out, grad_lse, *args, out, lse, residual)
        if adds_in_place(args.query) and grads.bias is None and args.query.dtype == real_dtype(args.query.dtype):
            ops._attention_bwd_add_(*results, *grads[:3], grads.alibi_slopes)
            return
        bits = sum((grad is not None) << at for at, grad in enumerate(grads))
        for grad, found in zip(grads, ops.attention_bwd(*results, bits), strict=True):
            if grad is not None:
                grad.add_(found)


def lse_limit(dtype: torch.dtype) -> float:
    """Beyond this, the operator normalises rows again from the keys of its own call: lse_is_coarse() of csrc/cpu/softmax_block.h."""
    return (1024 if dtype in (torch.bfloat16, torch.float16) else 64) * 0.99 * math.log(2)
