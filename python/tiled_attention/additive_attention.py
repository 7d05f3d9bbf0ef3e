"""Additive attention: the public functions `additive_attention` and `additive_attention_weights`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import additive_compiled  # noqa: F401  (registrations)
from .additive_autograd import AdditiveAttention, AdditiveWeights
from .arguments import AdditiveArguments, real_dtype, without_empty_lists
from .call import check_float, is_one_operator, needs_derivatives, prepare
from .library import below_autograd, ops
from .masks import Mask
from .observers import Call, observers, tell
from .weights import check_rows


@overload
def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_weight: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_weight: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_weight: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose score is a small network of query and key, exact, in memory linear in the sequence lengths.

    For query row i and key j::

        score = sum_d score_weight_d * tanh(query_id + key_jd)
        score = -inf                                        where mask hides j
        lse = log(sum_j exp(score))
        out = sum_j dropout(exp(score - lse)) * value_j

    Nothing of size seqlen_q x seqlen_kv x head_dim, or seqlen_q x seqlen_kv, exists, in backward neither. Scores, softmax and sums are
    float32 (float64 for float64 inputs). A row that sees no key gives zeros and lse = -inf; what stands in hidden keys and values reaches
    neither results nor gradients. Query head h uses key/value head h // (num_heads / num_heads_kv).

    Args:
        query: (..., num_heads, seqlen_q, head_dim), float32, float64, bfloat16 or float16, already projected. Any strides, no copies; any
            sizes, 0 included. Three-dimensional tensors are (num_heads or batch, seqlen_q, head_dim).
        key: (..., num_heads_kv, seqlen_kv, head_dim), already projected, where num_heads_kv divides num_heads; dtype and leading
            dimensions of query.
        value: (..., num_heads_kv, seqlen_kv, head_dim_v).
        score_weight: (head_dim,), or (num_heads, head_dim) for one per query head; float, used in float32 or float64.
        mask, dropout_p, generator, query_offset: as in `attention`.
        return_lse: also return lse.

    Returns:
        out (..., num_heads, seqlen_q, head_dim_v), dtype of query, dense in the dimension order of query; with `return_lse` (out, lse),
        lse (..., num_heads, seqlen_q), float32 or float64, the natural logarithm.

    Differentiable in query, key, value and score_weight, through out and lse: any number of times, in reverse and forward mode, under
    torch.func; inside torch.compile once in reverse mode. Autocast casts query, key and value.

    Raises:
        ValueError, TypeError, RuntimeError: naming the argument, what was expected and what came.

    Source: Bahdanau, Cho and Bengio, Neural machine translation by jointly learning to align and translate (2015), section 3.1 and
    appendix A.1.2.
    """
    args = _prepare(query, key, value, score_weight, mask, dropout_p, generator, query_offset)
    out, lse = forward_additive(args)
    if not torch.compiler.is_compiling() and observers:
        tell(Call(query, key, partial(_prepare, query, key, None, score_weight, mask, 0.0, None, query_offset), lse))
    return (out, lse) if return_lse else out


def additive_attention_weights(
    query: Tensor,
    key: Tensor,
    score_weight: Tensor,
    *,
    rows: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
) -> Tensor:
    """The probabilities that `additive_attention` multiplies the values with, after dropout: exp(score - lse).

    Args:
        query, key, score_weight, mask, dropout_p, generator, query_offset: as in `additive_attention`.
        rows: int64 (num_rows,), indices in [0, seqlen_q) of the query rows that are wanted, in any order; None: all. Nothing is computed
            or stored for the other rows beyond their lse.

    Returns:
        (..., num_heads, num_rows or seqlen_q, seqlen_kv), float32 (float64 for float64 inputs); 0 exactly where masked.

    Differentiable as `additive_attention` is.

    Raises:
        ValueError, TypeError, RuntimeError: naming the argument, what was expected and what came.
    """
    args = _prepare(query, key, None, score_weight, mask, dropout_p, generator, query_offset)
    if rows is not None:
        rows = check_rows(rows, args.query)
    _, lse = forward_additive(args._replace(value=args.key[..., :0], dropout_seed=None, dropout_p=0.0))
    return weights_of_additive(args, lse, rows)


def additive_attention_with_weights(
    query: Tensor, key: Tensor, value: Tensor, score_weight: Tensor, *, mask: Mask | Tensor | None = None, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(out, weights) where the weights are those that made out: the same seed of dropout, one pass over the scores for each."""
    args = _prepare(query, key, value, score_weight, mask, dropout_p, None, None)
    out, lse = forward_additive(args)
    if not torch.compiler.is_compiling() and observers:
        tell(Call(query, key, partial(_prepare, query, key, None, score_weight, mask, 0.0, None, None), lse))
    return out, weights_of_additive(args, lse)


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    score_weight: Tensor,
    mask: Mask | Tensor | None,
    dropout_p: float,
    generator: torch.Generator | None,
    query_offset: int | Sequence[int] | Tensor | None,
) -> AdditiveArguments:
    """The operator's arguments, with everything checked that the operator does not check; draws the seed of dropout."""
    check_float("score_weight", score_weight)
    call = prepare(query, key, value, mask, None, 1.0, None, None, None, dropout_p, generator, query_offset, block_lists=False)
    head_dim, num_heads = call.query.shape[-1], call.query.shape[-3]
    if score_weight.shape not in ((head_dim,), (num_heads, head_dim)):
        raise ValueError(
            f"score_weight must have shape ({head_dim},), or ({num_heads}, {head_dim}) for one per query head, "
            f"got {tuple(score_weight.shape)}"
        )
    return AdditiveArguments(
        call.query,
        call.key,
        call.value,
        score_weight.to(real_dtype(call.query.dtype)),
        call.mask,
        call.key_lengths,
        call.documents,
        call.query_offset,
        call.dropout_seed,
        call.dropout_p,
        call.intervals,
        call.dropout_offsets,
    )


def forward_additive(args: AdditiveArguments) -> tuple[Tensor, Tensor]:
    """(out, lse) by the operator that the situation asks for."""
    if torch.compiler.is_compiling():
        out, lse, _ = ops.additive_attention(*without_empty_lists(args), torch.is_grad_enabled())
    elif needs_derivatives(args):
        out, lse, _ = AdditiveAttention.apply(*args)
    else:
        with below_autograd():
            out, lse, _ = ops.additive_attention_fwd(*args, False)
    return out, lse


def weights_of_additive(args: AdditiveArguments, lse: Tensor, rows: Tensor | None = None) -> Tensor:
    """The weights of a call whose lse is known."""
    whole = is_one_operator(args.query)
    query, key, _, *others = without_empty_lists(args) if whole else args
    flat: tuple[Any, ...] = (query, key, *others, lse, rows)
    return AdditiveWeights.apply(*flat) if not whole and needs_derivatives(flat) else ops.additive_attention_weights(*flat)
