"""The attention probabilities: `attention_weights`, and attention together with the weights that made its result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .arguments import Arguments, without_empty_lists
from .autograd import AttentionWeights
from .call import forward, is_one_operator, needs_derivatives, prepare
from .library import ops
from .masks import Mask
from .observers import Call, observers, tell
from .relative_bias import RelativeBias
from .rotary import RotaryEmbedding


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    rows: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    bias: Tensor | RelativeBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    rotary: RotaryEmbedding | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
) -> Tensor:
    """The probabilities that `attention` multiplies the values with, after dropout: exp(score - lse).

    Args:
        query, key, mask, bias, scale, softcap, alibi_slopes, sinks, rotary, dropout_p, generator, query_offset: as in `attention`.
        rows: int64 (num_rows,), indices in [0, seqlen_q) of the query rows that are wanted, in any order; None: all. Nothing is computed
            or stored for the other rows beyond their lse.

    Returns:
        (..., num_heads, num_rows or seqlen_q, seqlen_kv), float32 (float64 for float64 inputs); 0 exactly where masked. With sinks, rows
        sum to less than 1.

    Differentiable as `attention` is.

    Raises:
        ValueError, TypeError, RuntimeError: naming the argument, what was expected and what came.
    """
    args = prepare(query, key, None, mask, bias, scale, softcap, alibi_slopes, sinks, dropout_p, generator, query_offset, rotary)
    if rows is not None:
        rows = check_rows(rows, args.query)
    without_value = args._replace(value=args.key[..., :0], dropout_seed=None, dropout_p=0.0)
    _, lse = forward(without_value)
    return weights_of(args, lse, rows=rows)


def attention_with_weights(
    query: Tensor, key: Tensor, value: Tensor, *, average: bool = False, rows: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """(out, weights) where the weights are those that made out: the same seed of dropout, one pass over the scores for each.

    Args:
        query, key, value, options: as in `attention`, without return_lse.
        average: the mean over heads, in memory of one head.
        rows: as in `attention_weights`.

    Returns:
        out as `attention` returns it; weights (..., num_heads, seqlen_q, seqlen_kv), or (..., seqlen_q, seqlen_kv) with `average`.
    """
    names = ("mask", "bias", "scale", "softcap", "alibi_slopes", "sinks", "rotary")
    values: Any = [options.pop(name, None) for name in names]
    dropout_p, generator, query_offset = options.pop("dropout_p", 0.0), options.pop("generator", None), options.pop("query_offset", None)
    if options:
        raise TypeError(f"attention_with_weights has no argument {next(iter(options))!r}")
    mask, bias, scale, softcap, alibi_slopes, sinks, rotary = values
    args = prepare(query, key, value, mask, bias, scale, softcap, alibi_slopes, sinks, dropout_p, generator, query_offset, rotary)
    if rows is not None:
        rows = check_rows(rows, args.query)
    out, lse = forward(args)
    if not torch.compiler.is_compiling() and observers:
        scores = (mask, bias, scale, softcap, alibi_slopes, sinks, 0.0, None, query_offset, rotary)
        tell(Call(query, key, partial(prepare, query, key, None, *scores), lse))
    return out, weights_of(args, lse, rows=rows, average=average)


def weights_of(args: Arguments, lse: Tensor, *, rows: Tensor | None = None, average: bool = False) -> Tensor:
    """The weights of a call whose lse is known; with `average` their mean over heads, without the dimension of heads."""
    whole = is_one_operator(args.query)
    query, key, _, mask, bias, alibi_slopes, _, *others = without_empty_lists(args) if whole else args
    flat = (query, key, mask, bias, alibi_slopes, *others, lse, rows, average)
    weights = AttentionWeights.apply(*flat) if not whole and needs_derivatives(flat) else ops.attention_weights(*flat)
    return weights.squeeze(-3) if average else weights


def columns_last(weights: Tensor, width: int) -> Tensor:
    """weights (..., seqlen_kv) with the first `width` columns behind the others."""
    # Not roll, which DTensors of torch 2.10 do not have.
    return torch.cat([weights[..., width:], weights[..., :width]], -1) if width else weights


def check_rows(rows: Any, query: Tensor) -> Tensor:
    if not isinstance(rows, Tensor) or rows.dtype.is_floating_point or rows.dtype in (torch.bool, torch.complex64, torch.complex128):
        came = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"rows must be an integer tensor (num_rows,), got {came}")
    if rows.dim() != 1:
        raise ValueError(f"rows must have shape (num_rows,), got {tuple(rows.shape)}")
    if rows.device != query.device:
        raise ValueError(f"rows must be on the device of query ({query.device}), got {rows.device}")
    return rows.to(torch.int64)
