"""Attention recorded with tokens in front of heads: its tensors are turned below autograd, which sees no views of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from ..arguments import Arguments, Gradients
from ..autograd import attention_gradients, pick, save, saved, spread
from ..call import run_forward
from ..library import below_views


def heads_first(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Views (batch, heads, seqlen, head_dim) of tensors (batch, seqlen, heads, head_dim).

    Without v, k is (batch, seqlen_k, 2, heads, head_dim) and holds both; without k, q is (batch, seqlen, 3, heads, head_dim) and holds all.
    """
    if k is None:
        query, key, value = q.transpose(1, 3).unbind(2)
        return query, key, value
    if v is None:
        key, value = k.transpose(1, 3).unbind(2)
        return q.transpose(1, 2), key, value
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class TokensFirst(torch.autograd.Function):
    """Arguments -> (out, lse), where query, key and value are what `heads_first` takes, and tokens stand in front of heads in out.

    For calls that run directly: transforms and forward mode see the views, and `Attention` behind them.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        with below_views():
            out, lse, residual = run_forward(*heads_first(*args[:3]), *args[3:], True)
            out = out.transpose(1, 2)
        save(ctx, Arguments(*args), out, lse, residual)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        if grad_out is None and grad_lse is None:
            return (None,) * len(Arguments._fields)
        given, (out, lse, residual) = saved(ctx)
        query, key, value = heads_first(*given[:3])
        args = given._replace(query=query, key=key, value=value)
        by_query, by_key, by_value, *others = pick(ctx.needs_input_grad)
        if given.key is None:
            by_key = by_query
        if given.value is None:
            by_value = by_key
        wanted = Gradients(by_query, by_key, by_value, *others)
        grad_out = None if grad_out is None else grad_out.transpose(1, 2)
        gradients = attention_gradients(grad_out, grad_lse, args, out.transpose(1, 2), lse, residual, wanted)
        return tuple(spread(_as_given(given, gradients)))


_record = super(torch.autograd.Function, TokensFirst).apply  # as for attention


def record_tokens_first(*args: Any) -> tuple[Tensor, Tensor]:
    """TokensFirst.apply, the shorter way."""
    return _record(*unwrap_dead_wrappers(args))


def _as_given(given: Arguments, gradients: Gradients) -> Gradients:
    """Tokens in front of heads again, and those of a packed tensor in one."""
    query, key, value = (None if gradient is None else gradient.transpose(1, 2) for gradient in gradients[:3])
    if given.key is None:
        query, key, value = _stack(query, key, value), None, None
    elif given.value is None:
        key, value = _stack(key, value), None
    return gradients._replace(query=query, key=key, value=value)


def _stack(*parts: Any) -> Tensor | None:
    return None if parts[0] is None else torch.stack(parts, 2)
