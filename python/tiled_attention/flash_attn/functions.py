"""flash_attn_func and its packed forms, on the operators of `attention`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..arguments import NO_TENSORS
from ..call import allows_tf32, check_number, default_scale, forward, needs_derivatives, prepare, run_forward, runs_directly
from ..library import below_views, ops
from ..observers import Call, observers, tell
from ..weights import weights_of
from .autograd import heads_first, record_tokens_first
from .options import ERRORS, Pattern, bias_of_slopes, explain, option_values, pattern_of, refuse

Results = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`attention` behind the signature of flash_attn 2.8: heads behind tokens, masks as flags. No tensor is copied.

    Query row i stands at position p = i + seqlen_k - seqlen_q, so that causal masks and windows are aligned to the bottom right.

    Args:
        q: (batch_size, seqlen_q, nheads, headdim), float16, bfloat16, float32 or float64, on CPU or CUDA. Any strides.
        k: (batch_size, seqlen_k, nheads_k, headdim), where nheads_k divides nheads; query head h uses head h // (nheads / nheads_k).
        v: (batch_size, seqlen_k, nheads_k, headdim_v); flash_attn wants headdim_v = headdim.
        dropout_p: probability in [0, 1] that a weight is zeroed; applied whatever the mode of a module. Default 0.
        softmax_scale: multiplies q . k. None: headdim ** -0.5.
        causal: key j is seen where j <= p. Default False.
        window_size: (left, right): p - left <= j <= p + right, both ends included; a negative number is no limit. With `causal` right is 0.
        softcap: c of c * tanh(score / c) where > 0; otherwise none. Default 0.
        alibi_slopes: (nheads,) or (batch_size, nheads): adds -slope * |p - j|. Default None.
        deterministic: accepted; results are the same bits from run to run without it.
        return_attn_probs: also return softmax_lse and S_dmask. Default False.

    Returns:
        out (batch_size, seqlen_q, nheads, headdim_v), dtype of q. With `return_attn_probs` (out, softmax_lse, S_dmask): softmax_lse
        (batch_size, nheads, seqlen_q), float32 or float64, natural logarithm, -inf where a row sees no key; S_dmask (batch_size, nheads,
        seqlen_q, seqlen_k), dtype of q, the probabilities before dropout, with the sign bit set where dropout zeroes; without dropout it is
        empty, (0,).

    Differentiable in q, k, v and alibi_slopes, through out and softmax_lse; S_dmask is a constant.

    Raises:
        RuntimeError: naming the tensor whose dtype, shape or device does not fit.
        TypeError, ValueError: naming the argument, where another one is of the wrong type or out of range.

    Source: the documented interface of flash_attn 2.8 (Dao, FlashAttention-2, 2023).
    """
    try:
        if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
            refuse("q, k and v must have 4 dimensions")
        pattern = pattern_of(causal, window_size)
        return attend(q, k, v, dropout_p, softmax_scale, pattern, softcap, alibi_slopes, return_attn_probs)
    except ERRORS as error:
        shapes = {
            "q": (q, "batch_size seqlen_q nheads headdim"),
            "k": (k, "batch_size seqlen_k nheads_k headdim"),
            "v": (v, "batch_size seqlen_k nheads_k headdim_v"),
        }
        explain(error, shapes, option_values(dropout_p, softmax_scale, window_size, softcap, alibi_slopes))
        raise


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` of q, k and v that lie in one tensor. They are read where they lie, and its gradient is made at once.

    Args:
        qkv: (batch_size, seqlen, 3, nheads, headdim).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in `flash_attn_func`.

    Returns:
        As `flash_attn_func`.

    Raises:
        RuntimeError, TypeError, ValueError: naming the argument.

    Source: the documented interface of flash_attn 2.8.
    """
    try:
        if qkv.dim() != 5:
            refuse("qkv must have 5 dimensions")
        pattern = pattern_of(causal, window_size)
        return attend(qkv, None, None, dropout_p, softmax_scale, pattern, softcap, alibi_slopes, return_attn_probs)
    except ERRORS as error:
        options = option_values(dropout_p, softmax_scale, window_size, softcap, alibi_slopes)
        explain(error, {"qkv": (qkv, "batch_size seqlen 3 nheads headdim")}, options, packed="qkv")
        raise


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` of k and v that lie in one tensor. They are read where they lie, and its gradient is made at once.

    Args:
        q: (batch_size, seqlen_q, nheads, headdim).
        kv: (batch_size, seqlen_k, 2, nheads_k, headdim), where nheads_k divides nheads.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in `flash_attn_func`.

    Returns:
        As `flash_attn_func`.

    Raises:
        RuntimeError, TypeError, ValueError: naming the argument.

    Source: the documented interface of flash_attn 2.8.
    """
    try:
        if q.dim() != 4 or kv.dim() != 5:
            refuse("q must have 4 dimensions, and kv 5")
        pattern = pattern_of(causal, window_size)
        return attend(q, kv, None, dropout_p, softmax_scale, pattern, softcap, alibi_slopes, return_attn_probs)
    except ERRORS as error:
        shapes = {"q": (q, "batch_size seqlen_q nheads headdim"), "kv": (kv, "batch_size seqlen_k 2 nheads_k headdim")}
        options = option_values(dropout_p, softmax_scale, window_size, softcap, alibi_slopes)
        explain(error, shapes, options)
        raise


def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    pattern: Pattern,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
) -> Results:
    """The three results, or the first alone. q, k and v as `heads_first` takes them."""
    direct = runs_directly()
    if direct and alibi_slopes is None and dropout_p == 0:
        out, lse = _attend_directly(q, k, v, softmax_scale, pattern.intervals, softcap)
        return (out, lse, out.new_empty(0)) if return_attn_probs else out
    with below_views() if direct else contextlib.nullcontext():
        query, key, value = heads_first(q, k, v)
    bias = None
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        bias, alibi_slopes = bias_of_slopes(alibi_slopes, query, key), None
    scores = (pattern.mask, bias, softmax_scale, softcap if softcap > 0 else None, alibi_slopes, None)
    args = prepare(query, key, value, *scores, dropout_p, None, None)
    if direct and needs_derivatives((q, k, v, *args[3:])):
        out, lse = record_tokens_first(q, k, v, *args[3:])
    else:
        out, lse = forward(args)
        out = out.transpose(1, 2)
    if not torch.compiler.is_compiling() and observers:
        tell(Call(query, key, partial(prepare, query, key, None, *scores, 0.0, None, None), lse))
    if not return_attn_probs:
        return out
    if args.dropout_seed is None:
        return out, lse, out.new_empty(0)
    with torch.no_grad():
        weights = weights_of(args._replace(dropout_p=0.0, dropout_seed=None), lse)
        kept = ops.dropout_mask(args.dropout_seed, args.dropout_p, *weights.shape, ())
        return out, lse, torch.where(kept, weights, -weights).to(query.dtype)


def _attend_directly(
    q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None, intervals: Sequence[int], softcap: float
) -> tuple[Tensor, Tensor]:
    """The shortest way to (out, lse), for a call that runs directly; the operator checks the rest."""
    if scale is None:
        scale = default_scale(q.shape[-1])
    elif type(scale) is not float:
        scale = check_number("softmax_scale", scale, "a finite number", math.isfinite)
    cap = check_number("softcap", softcap, "a finite number", math.isfinite) if softcap > 0 else 0.0
    args = (*NO_TENSORS, scale, cap, 0.0, intervals, (), q.is_cuda and allows_tf32(q), False)
    if torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad) or (v is not None and v.requires_grad)):
        return record_tokens_first(q, k, v, *args)
    with below_views():
        out, lse, _ = run_forward(*heads_first(q, k, v), *args, False)
        return out.transpose(1, 2), lse
