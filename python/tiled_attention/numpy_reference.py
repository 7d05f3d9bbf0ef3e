"""Attention from scratch, in NumPy alone: nothing of PyTorch stands behind these numbers. Inputs are computed in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def softmax_rows(scores: ArrayLike) -> NDArray[np.float64]:
    """exp(x_j) / sum_j exp(x_j) along the last axis of scores (..., seqlen_q, seqlen_kv). A row that is all -inf is 0.

    The largest score of the row is taken from all of them first, so that no exponential overflows.
    """
    scores = np.asarray(scores, dtype=np.float64)
    row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    exponentials = np.exp(scores - np.where(row_max == -np.inf, 0.0, row_max))
    row_sum = exponentials.sum(axis=-1, keepdims=True)
    return exponentials / np.where(row_sum == 0.0, 1.0, row_sum)


def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    causal: bool = False,
    bias: ArrayLike | None = None,
    scale: float | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """softmax(scale * query key^T + bias) value, over the visible keys (Vaswani et al., 2017, equation 1).

    Args:
        query: (..., seqlen_q, head_dim). key: (..., seqlen_kv, head_dim). value: (..., seqlen_kv, head_dim_v).
        mask: bool, broadcastable to (..., seqlen_q, seqlen_kv), True = attend.
        causal: query i sees no key after i + seqlen_kv - seqlen_q (bottom-right aligned).
        bias: broadcastable likewise, added to the scores; -inf is the same as masked.
        scale: None: head_dim ** -0.5.

    Returns:
        out (..., seqlen_q, head_dim_v) and the weights (..., seqlen_q, seqlen_kv); both 0 where a query sees no key.
    """
    query, key, value = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
    seqlen_q, seqlen_kv, head_dim = query.shape[-2], key.shape[-2], query.shape[-1]
    scores = query @ np.swapaxes(key, -1, -2) * ((head_dim or 1) ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + np.asarray(bias, dtype=np.float64)
    visible = np.ones((seqlen_q, seqlen_kv), dtype=bool)
    if causal:
        visible = np.tril(visible, seqlen_kv - seqlen_q)
    if mask is not None:
        mask = np.asarray(mask)
        if mask.dtype != bool:
            raise TypeError(f"mask: expected a bool array (True = attend), got {mask.dtype}")
        visible = visible & mask
    weights = softmax_rows(np.where(visible, scores, -np.inf))
    return weights @ value, weights


def attention_decode(
    query: ArrayLike, key_cache: ArrayLike, value_cache: ArrayLike, cache_seqlens: ArrayLike, page_table: ArrayLike | None = None
) -> NDArray[np.float64]:
    """Each batch item's queries over the keys that its cache holds, all of them visible.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim).
        key_cache, value_cache: (batch, num_heads_kv, capacity, ...). With page_table (batch, pages): (num_pages, num_heads_kv, page_size,
            ...), and key j of item b is row j % page_size of page page_table[b, j // page_size].
        cache_seqlens: (batch,), how many keys there are.

    Returns:
        out (batch, num_heads, seqlen_q, head_dim_v), 0 where there is no key.
    """
    query, key_cache, value_cache = (np.asarray(x, dtype=np.float64) for x in (query, key_cache, value_cache))
    outs = []
    for b, length in enumerate(np.asarray(cache_seqlens)):
        if page_table is None:
            key, value = key_cache[b, :, :length], value_cache[b, :, :length]
        else:
            page_size = key_cache.shape[-2]
            pages = np.asarray(page_table)[b, : -(-length // page_size)]
            key, value = (np.concatenate([*x[pages], x[0, :, :0]], axis=-2)[:, :length] for x in (key_cache, value_cache))
        group = query.shape[1] // key.shape[0]
        key, value = np.repeat(key, group, 0), np.repeat(value, group, 0)
        outs.append(scaled_dot_product_attention(query[b], key, value)[0])
    return np.array(outs)


def multi_head_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    num_heads: int,
    in_proj_weight: ArrayLike,
    in_proj_bias: ArrayLike | None,
    out_proj_weight: ArrayLike,
    out_proj_bias: ArrayLike | None,
    mask: ArrayLike | None = None,
    *,
    causal: bool = False,
    bias: ArrayLike | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Concat(head_1 .. head_h) W_o^T, head_i = attention(query W_q,i^T, key W_k,i^T, value W_v,i^T) (Vaswani et al., 2017, section 3.2.2).

    Args:
        query: (batch, seqlen_q, embed_dim). key, value: (batch, seqlen_kv, embed_dim).
        in_proj_weight: (3 * embed_dim, embed_dim), the rows of W_q, W_k and W_v, as in `torch.nn.MultiheadAttention`.
        in_proj_bias: (3 * embed_dim,).
        out_proj_weight: (embed_dim, embed_dim); out_proj_bias: (embed_dim,).
        mask, causal, bias: as in `scaled_dot_product_attention`, broadcastable to (batch, num_heads, seqlen_q, seqlen_kv).

    Returns:
        out (batch, seqlen_q, embed_dim) and the weights (batch, num_heads, seqlen_q, seqlen_kv).
    """
    in_biases = (0.0, 0.0, 0.0) if in_proj_bias is None else np.split(np.asarray(in_proj_bias, dtype=np.float64), 3)
    in_weights = np.split(np.asarray(in_proj_weight, dtype=np.float64), 3)
    heads = []
    for x, weight, shift in zip((query, key, value), in_weights, in_biases, strict=True):
        projected: NDArray[Any] = np.asarray(x, dtype=np.float64) @ weight.T + shift
        batch, seqlen, embed_dim = projected.shape
        heads.append(projected.reshape(batch, seqlen, num_heads, embed_dim // num_heads).transpose(0, 2, 1, 3))
    q, k, v = heads
    out, weights = scaled_dot_product_attention(q, k, v, mask, causal=causal, bias=bias)
    batch, _, seqlen_q, _ = out.shape
    merged = out.transpose(0, 2, 1, 3).reshape(batch, seqlen_q, -1)
    return merged @ np.asarray(out_proj_weight, dtype=np.float64).T + (0.0 if out_proj_bias is None else np.asarray(out_proj_bias)), weights


FEATURE_MAPS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda x: x,
    "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "exp": np.exp,
}


def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    feature_map: str = "elu",
    causal: bool = False,
    normalize: bool = True,
    scale: float = 1.0,
    key_mask: ArrayLike | None = None,
    log_decay: ArrayLike | None = None,
    initial_state: tuple[ArrayLike, ArrayLike] | None = None,
) -> tuple[NDArray[np.float64], tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """S_t = exp(log_decay_t) S_(t-1) + phi(key_t) value_t^T, z_t likewise (Katharopoulos et al., 2020, section 3.4); token by token.

    out_t = phi(query_t) S / (phi(query_t) . z), or scale * phi(query_t) S; with S_t, z_t if causal, else with those after the last key.

    Args:
        query: (..., seqlen_q, head_dim). key: (..., seqlen_kv, head_dim). value: (..., seqlen_kv, head_dim_v).
        feature_map: "identity", "elu" (elu(x) + 1), "relu" or "exp".
        key_mask: bool, broadcastable to (..., seqlen_kv), True = the key counts.
        log_decay: broadcastable to (..., seqlen_kv, head_dim).
        initial_state: S (..., head_dim, head_dim_v), z (..., head_dim).

    Returns:
        out (..., seqlen_q, head_dim_v), 0 where the denominator is 0, and (S, z) after the last key.
    """
    query, key, value = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
    seen = np.broadcast_to(True if key_mask is None else np.asarray(key_mask, dtype=bool), key.shape[:-1])
    decay = np.exp(np.broadcast_to(0.0 if log_decay is None else np.asarray(log_decay, dtype=np.float64), key.shape))
    phi = FEATURE_MAPS[feature_map]
    phi_q = phi(query)
    if initial_state is None:
        s, z = np.zeros((*key.shape[:-2], key.shape[-1], value.shape[-1])), np.zeros((*key.shape[:-2], key.shape[-1]))
    else:
        s, z = (np.asarray(x, dtype=np.float64) for x in initial_state)
    states = []
    for t in range(key.shape[-2]):
        s, z = s * decay[..., t, :, None], z * decay[..., t, :]
        counts = seen[..., t, None]
        phi_k, v = np.where(counts, phi(np.where(counts, key[..., t, :], 0.0)), 0.0), np.where(counts, value[..., t, :], 0.0)
        s, z = s + phi_k[..., :, None] * v[..., None, :], z + phi_k
        states.append((s, z))
    out = np.zeros((*query.shape[:-1], value.shape[-1]))
    for i in range(query.shape[-2]):
        s_i, z_i = states[i] if causal else (s, z)
        numerator = (phi_q[..., i, :, None] * s_i).sum(-2)
        denominator = (phi_q[..., i, :] * z_i).sum(-1, keepdims=True)
        dead = denominator == 0
        out[..., i, :] = np.where(dead, 0.0, numerator / np.where(dead, 1.0, denominator)) if normalize else scale * numerator
    return out, (s, z)
