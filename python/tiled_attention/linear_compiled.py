"""Derivatives of the linear attention operators themselves: what torch.compile and torch.export record, and what torch.ops gives.

As for `attention`: one reverse derivative of `linear_attention`, and an error that says so for everything else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import batching
from .arguments import TENSORS, LinearArguments, LinearGradients
from .autograd import pick, spread
from .compiled import ONCE, library, needs_gradient, redispatch, refuse_forward_mode, register_vmap, without_gradient
from .library import ops
from .linear_autograd import linear_bwd_arguments


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        ctx.options = args[TENSORS[LinearArguments] :]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args[: TENSORS[LinearArguments]])
        return redispatch(ops.linear_attention.default, keyset, args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        args = LinearArguments(*ctx.saved_tensors, *ctx.options)
        wanted = pick(ctx.needs_input_grad[1:], LinearGradients)
        results = ops.linear_attention_bwd(*linear_bwd_arguments(grads, args, wanted))
        return (None, *spread([result if want else None for result, want in zip(results, wanted)], LinearArguments))


def _linear_attention(keyset: Any, *args: Any) -> Any:
    refuse_forward_mode("linear_attention", args)
    if needs_gradient("linear_attention", args):
        return _LinearAttention.apply(keyset, *args)
    return redispatch(ops.linear_attention.default, keyset, args)


_EAGER = "call tiled_attention.linear_attention, or the operator tiled_attention::linear_attention"
_STEP = "call tiled_attention.linear_attention_step, or the operator tiled_attention::linear_attention with one token"
_step_in_place = without_gradient("linear_attention_step_", _STEP)


def _linear_attention_step_in_place(keyset: Any, *args: Any) -> Any:
    out = _step_in_place(keyset, *args)
    torch.autograd.graph.increment_version(args[5:7])
    return out


for _name, _kernel in (
    ("linear_attention", _linear_attention),
    ("linear_attention_fwd", without_gradient("linear_attention_fwd", _EAGER)),
    ("linear_attention_bwd", without_gradient("linear_attention_bwd", ONCE)),
    ("linear_attention_step", without_gradient("linear_attention_step", _STEP)),
    ("linear_attention_step_", _linear_attention_step_in_place),
):
    library.impl(_name, _kernel, "Autograd", with_keyset=True)

for _name in ("linear_attention", "linear_attention_fwd", "linear_attention_step"):
    register_vmap(_name, batching.map_linear)
register_vmap("linear_attention_bwd", batching.map_linear_backward)
