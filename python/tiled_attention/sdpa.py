"""`scaled_dot_product_attention`: the signature, broadcasting and errors of torch.nn.functional's, computed by `attention`'s operators."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from .arguments import NO_INTERVALS, NO_TENSORS
from .attention_varlen import attention_varlen
from .call import allows_tf32, cast_for_autocast, check_dropout_p, default_scale, forward, prepare, run_forward, runs_plain
from .context_parallel import STOCK, attend_sharded, is_sharded, refuse_shards
from .library import below_autograd, devices
from .masks import And, Causal, Mask
from .observers import Call, observers, tell

_TOP_LEFT, _BOTTOM_RIGHT = Causal(align="top_left"), Causal()
_TOP_LEFT_INTERVALS = (*NO_INTERVALS[:-1], 1)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with every combination of its arguments fused.

    Equivalent to it, with what it refuses or leaves open defined as follows: `attn_mask` and `is_causal` combine in every shape; a query
    row that sees no key gives zeros, with zero gradients; dropout draws from Philox (see `attention`); seqlen_kv or head_dim may be 0.

    Nested tensors (batch, heads, seqlen*, dim) with the jagged layout run packed, by `attention_varlen`, without attn_mask; other nested
    tensors are torch's.

    Args:
        query: (..., seqlen_q, head_dim), at least 2-D; the dimension before seqlen_q counts as heads where it is there.
        key: (..., seqlen_kv, head_dim). Leading dimensions broadcast, without copies.
        value: (..., seqlen_kv, head_dim_v).
        attn_mask: broadcastable to (..., seqlen_q, seqlen_kv): bool, True = attend, or float, added to the scores: the dtype of query or
            float32. May require a gradient. Or a torch.nn.attention.bias.CausalBias.
        dropout_p: in [0, 1]. Applied whatever the mode of the caller, as in torch.
        is_causal: key j is seen by query i where j <= i: the top-left corner, also for seqlen_q != seqlen_kv.
            (`tiled_attention.Causal()` is tied to the bottom right.)
        scale: None: head_dim ** -0.5.
        enable_gqa: key and value may have fewer heads than query, numbers that divide its own. Without it they must broadcast.

    Returns:
        (..., seqlen_q, head_dim_v), dtype of query.

    Raises:
        TypeError, ValueError, RuntimeError: naming the argument, where torch raises. RuntimeError where plain tensors are given inside
            torch's `context_parallel`.
    """
    if F.scaled_dot_product_attention is not STOCK:  # as context_parallel replaces it
        refuse_shards("scaled_dot_product_attention", query, key, value)
    if (
        attn_mask is None
        and dropout_p == 0.0
        and scale is None
        and isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and isinstance(is_causal, bool)
        and runs_plain(query, key, value)
        and not query.is_nested
    ):
        shape = query.shape
        if len(shape) > 2 and key.shape[:-2] == shape[:-2] == value.shape[:-2]:
            # The shortest way for the plain call; the operator checks the rest.
            intervals = _TOP_LEFT_INTERVALS if is_causal else ()
            with below_autograd():
                scale = default_scale(shape[-1])
                allow_tf32 = query.is_cuda and allows_tf32(query)
                return run_forward(query, key, value, *NO_TENSORS, scale, 0.0, 0.0, intervals, (), allow_tf32, False, False)[0]
    return _general(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _general(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(tensor, Tensor) and not (tensor is None and name == "attn_mask"):
            raise TypeError(f"scaled_dot_product_attention(): argument '{name}' must be Tensor, not {type(tensor).__name__}")
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, (bool, torch.SymBool)):
            raise TypeError(f"scaled_dot_product_attention(): argument '{name}' must be bool, not {type(flag).__name__}")
    if query.is_nested or key.is_nested or value.is_nested:
        if _is_packed(query, key, value, attn_mask, enable_gqa):
            return _packed(query, key, value, dropout_p, is_causal, scale)
        return STOCK(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    dropout_p = check_dropout_p(dropout_p)
    query, key, value = cast_for_autocast(query), cast_for_autocast(key), cast_for_autocast(value)
    _check_inputs(query, key, value)
    if F.scaled_dot_product_attention is not STOCK and is_sharded(query, key, value):
        return attend_sharded(query, key, value, attn_mask, dropout_p, bool(is_causal), scale, bool(enable_gqa))
    rank = max(query.dim(), key.dim(), value.dim())
    query, key, value, mask, bias = as_attention(query, key, value, attn_mask, bool(is_causal), enable_gqa)
    out, lse = forward(prepare(query, key, value, mask, bias, scale, None, None, None, dropout_p, None, None))
    if not torch.compiler.is_compiling() and observers:
        tell(Call(query, key, partial(prepare, query, key, None, mask, bias, scale, None, None, None, 0.0, None, None), lse))
    return out[0] if rank == 2 else out


def as_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Mask | Tensor | None, Tensor | None]:
    """(query, key, value, mask, bias) for `attention`, with at least 3 dimensions each."""
    if max(query.dim(), key.dim(), value.dim()) > 2:
        query, key, value = _broadcast(query, key, value, enable_gqa)
    elif enable_gqa:
        raise RuntimeError("enable_gqa: query, key and value must have at least 3 dimensions, got 2")
    else:
        query, key, value = query[None], key[None], value[None]
    return query, key, value, *_split_mask(attn_mask, query, key, is_causal)


def _is_packed(query: Any, key: Any, value: Any, attn_mask: Tensor | None, enable_gqa: bool) -> bool:
    """Whether these are nested tensors whose sequences lie one after the other, (batch, heads, seqlen*, dim) with the jagged layout."""
    if attn_mask is not None:
        return False
    for tensor in (query, key, value):
        if (
            not tensor.is_nested
            or tensor.layout != torch.jagged
            or tensor.dim() != 4
            or tensor._ragged_idx != 2
            or tensor.lengths() is not None
        ):
            return False
        if tensor.device.type not in devices:
            return False
    heads = query.shape[1]
    fits = key.shape[1] == value.shape[1] and (heads == key.shape[1] or (enable_gqa and key.shape[1] > 0 and heads % key.shape[1] == 0))
    return fits and len({query.dtype, key.dtype, value.dtype}) == 1


def _packed(query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    rows_q, rows_k, rows_v = (tensor.transpose(1, 2).values() for tensor in (query, key, value))
    longest = (query._get_max_seqlen(), key._get_max_seqlen())
    mask = _TOP_LEFT if is_causal else None
    out = attention_varlen(
        rows_q, rows_k, rows_v, query.offsets(), key.offsets(), *longest, mask=mask, scale=scale, dropout_p=check_dropout_p(dropout_p)
    )
    nested = torch.nested.nested_tensor_from_jagged(out, query.offsets(), min_seqlen=query._maybe_min_seqlen, max_seqlen=longest[0])
    return nested.transpose(1, 2)


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(f"query, key and value must be at least 2 dimensional, got {shapes}")
    if query.dtype != key.dtype or query.dtype != value.dtype:
        raise RuntimeError(f"query, key and value must have the same dtype, got {query.dtype}, {key.dtype} and {value.dtype}")
    if query.device != key.device or query.device != value.device:
        raise RuntimeError(f"query, key and value must be on the same device, got {query.device}, {key.device} and {value.device}")
    if not query.dtype.is_floating_point:
        raise RuntimeError(f"query must be float32, float64, bfloat16 or float16, got {query.dtype}")
    if query.shape[-1] != key.shape[-1]:
        raise RuntimeError(f"key must have the head_dim of query, got {shapes}")
    if key.shape[-2] != value.shape[-2]:
        raise RuntimeError(f"value must have the seqlen_kv of key, got {shapes}")


def _broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The three with equal leading dimensions, heads aside: key and value have equal numbers of them that divide query's. Expands, and
    copies only
    where enable_gqa meets different numbers of heads in key and value."""
    tensors = [tensor[None] if tensor.dim() == 2 else tensor for tensor in (query, key, value)]
    heads_q, heads_k, heads_v = (tensor.shape[-3] for tensor in tensors)
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
    if enable_gqa:
        if any(heads != heads_q and (heads == 0 or heads_q % heads != 0) for heads in (heads_k, heads_v)):
            raise RuntimeError(f"enable_gqa: the heads of key and value must divide those of query, got {shapes}")
        if heads_k != heads_v:
            most = max(heads_k, heads_v)
            heads_kv = most if most % min(heads_k, heads_v) == 0 else heads_q
            tensors[1:] = [tensor.repeat_interleave(heads_kv // tensor.shape[-3], -3) for tensor in tensors[1:]]
            heads_k = heads_v = heads_kv
    elif heads_q != heads_k or heads_q != heads_v:
        try:
            (heads_q,) = torch.broadcast_shapes((heads_q,), (heads_k,), (heads_v,))
        except RuntimeError:
            raise RuntimeError(f"the heads of query, key and value must broadcast, or divide with enable_gqa, got {shapes}") from None
        if heads_k != heads_v:
            heads_k = heads_v = heads_q
    try:
        leading = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
    except RuntimeError:
        raise RuntimeError(f"the leading dimensions of query, key and value must broadcast, got {shapes}") from None
    heads = (heads_q, heads_k, heads_v)
    query, key, value = (tensor.expand(*leading, count, *tensor.shape[-2:]) for tensor, count in zip(tensors, heads))
    return query, key, value


def _split_mask(attn_mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> tuple[Mask | Tensor | None, Tensor | None]:
    """attn_mask and is_causal as (mask, bias)."""
    causal = _TOP_LEFT if is_causal else None
    if attn_mask is None:
        return causal, None
    if isinstance(attn_mask, CausalBias):
        if is_causal:
            raise ValueError("attn_mask: a CausalBias must not come with is_causal=True")
        if attn_mask.variant == CausalVariant.UPPER_LEFT:
            return _TOP_LEFT, None
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (query.shape[-2], key.shape[-2]):
            expected = (query.shape[-2], key.shape[-2])
            raise RuntimeError(f"attn_mask must be a CausalBias of {expected}, got {(attn_mask.seq_len_q, attn_mask.seq_len_kv)}")
        return _BOTTOM_RIGHT, None
    shape = (*query.shape[:-1], key.shape[-2])
    missing = len(shape) - attn_mask.dim()
    if missing < 0 or any(size != full and size != 1 for size, full in zip(attn_mask.shape, shape[missing:])):
        raise RuntimeError(f"attn_mask must broadcast to {shape}, got {tuple(attn_mask.shape)}")
    if attn_mask.device != query.device:
        raise RuntimeError(f"attn_mask must be on the device of query ({query.device}), got {attn_mask.device}")
    if attn_mask.dtype == torch.bool:
        return attn_mask if causal is None else And(causal, attn_mask), None
    if attn_mask.dtype not in (torch.float32, query.dtype):
        raise RuntimeError(f"attn_mask must be bool, float32 or of the dtype of query ({query.dtype}), got {attn_mask.dtype}")
    return causal, attn_mask
