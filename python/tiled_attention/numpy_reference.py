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


def additive_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, score_weight: ArrayLike, mask: ArrayLike | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """softmax(sum_d score_weight_d tanh(query_id + key_jd)) value, over the visible keys (Bahdanau et al., 2015, appendix A.1.2).

    Args:
        query: (..., seqlen_q, head_dim). key: (..., seqlen_kv, head_dim). value: (..., seqlen_kv, head_dim_v).
        score_weight: (head_dim,), or (num_heads, head_dim) where the third dimension from the end of query is that of heads.
        mask: bool, broadcastable to (..., seqlen_q, seqlen_kv), True = attend.

    Returns:
        out (..., seqlen_q, head_dim_v) and the weights (..., seqlen_q, seqlen_kv); both 0 where a query sees no key.
    """
    query, key, value, score_weight = (np.asarray(x, dtype=np.float64) for x in (query, key, value, score_weight))
    if score_weight.ndim == 2:
        score_weight = score_weight[:, None, None, :]
    scores = (score_weight * np.tanh(query[..., :, None, :] + key[..., None, :, :])).sum(axis=-1)
    weights = softmax_rows(scores if mask is None else np.where(np.asarray(mask, dtype=bool), scores, -np.inf))
    return weights @ value, weights


def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> NDArray[np.float64]:
    """Attention of each sequence for itself, where sequences lie one after the other (Krell et al., 2021).

    Args:
        query: (total_q, num_heads, head_dim). key: (total_kv, num_heads, head_dim). value: (total_kv, num_heads, head_dim_v).
        cu_seqlens_q, cu_seqlens_kv: (num_sequences + 1,), where sequence b begins and b + 1 follows.
        causal, scale: as in `scaled_dot_product_attention`.

    Returns:
        out (total_q, num_heads, head_dim_v).
    """
    query, key, value = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
    rows, keys = np.asarray(cu_seqlens_q), np.asarray(cu_seqlens_kv)
    out = np.zeros((*query.shape[:2], value.shape[2]))
    for b in range(len(rows) - 1):
        here, there = slice(rows[b], rows[b + 1]), slice(keys[b], keys[b + 1])
        heads_first = (x.swapaxes(0, 1) for x in (query[here], key[there], value[there]))
        out[here] = scaled_dot_product_attention(*heads_first, causal=causal, scale=scale)[0].swapaxes(0, 1)
    return out


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


def gaussian_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bandwidth: float, mask: ArrayLike | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(out, weights): values averaged with weights proportional to exp(-|query - key|^2 / (2 bandwidth^2)) (Nadaraya, 1964; Watson, 1964).

    Shapes and mask as in `scaled_dot_product_attention`.
    """
    query, key, value = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
    scores = -((query[..., :, None, :] - key[..., None, :, :]) ** 2).sum(-1) / (2 * bandwidth**2)
    weights = softmax_rows(scores if mask is None else np.where(np.asarray(mask), scores, -np.inf))
    return weights @ value, weights


def luong_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    score: str = "dot",
    weight: Any = None,
    mask: ArrayLike | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(out, weights) of the score "dot", "general" (W (head_dim_q, head_dim_k)) or "concat" (the pair (W, v)) of Luong et al. (2015).

    Shapes and mask as in `scaled_dot_product_attention`.
    """
    query, key, value = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
    scores = np.empty((*query.shape[:-1], key.shape[-2]))
    for i in range(query.shape[-2]):
        for j in range(key.shape[-2]):
            q, k = query[..., i, :], key[..., j, :]
            if score == "concat":
                scores[..., i, j] = np.tanh(np.concatenate([q, k], -1) @ np.asarray(weight[0]).T) @ np.asarray(weight[1])
            else:
                scores[..., i, j] = (q * (k if score == "dot" else k @ np.asarray(weight).T)).sum(-1)
    weights = softmax_rows(scores if mask is None else np.where(np.asarray(mask), scores, -np.inf))
    return weights @ value, weights


def lsh_attention(
    query_key: ArrayLike,
    value: ArrayLike,
    rotations: list[ArrayLike],
    bucket_size: int,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(out, weights) of one head of Reformer's attention (Kitaev et al., 2020, section 2): keys are queries divided by their norm.

    Args:
        query_key: (seqlen, head_dim). value: (seqlen, head_dim_v).
        rotations: per round (head_dim, buckets / 2): a token's hash is the largest of [x R; -x R]. Sorted by it, and then by position, the
            tokens are cut into buckets of bucket_size; each sees its own and the one before, and itself only where it sees nothing else.
        scale: None: head_dim ** -0.5.
    """
    query_key, value = np.asarray(query_key, dtype=np.float64), np.asarray(value, dtype=np.float64)
    seqlen, head_dim = query_key.shape
    seen: list[set[int]] = [set() for _ in range(seqlen)]
    for rotation in rotations:
        rotated = query_key @ np.asarray(rotation)
        order = np.argsort(np.concatenate([rotated, -rotated], -1).argmax(-1), kind="stable")
        buckets = order.reshape(-1, bucket_size)
        for at, bucket in enumerate(buckets):
            near = {*bucket.tolist(), *(buckets[at - 1].tolist() if at else [])}
            for i in bucket:
                seen[i] |= {j for j in near if j < i or (j > i and not causal)}
    mask = np.zeros((seqlen, seqlen), dtype=bool)
    for i, keys in enumerate(seen):
        mask[i, list(keys) or [i]] = True
    key = query_key / np.linalg.norm(query_key, axis=-1, keepdims=True)
    return scaled_dot_product_attention(query_key, key, value, mask, scale=scale)


def sinusoidal_embedding(positions: ArrayLike, dim: int, base: float = 10000.0) -> NDArray[np.float64]:
    """(..., dim): sin(position / base ** (2 i / dim)) at 2 i, the cosine at 2 i + 1 (Vaswani et al., 2017, section 3.5)."""
    columns = np.arange(dim)
    angles = np.asarray(positions, dtype=np.float64)[..., None] / base ** ((columns - columns % 2) / dim)
    return np.where(columns % 2 == 0, np.sin(angles), np.cos(angles))


def rotary_embedding(x: ArrayLike, positions: ArrayLike, base: float = 10000.0, interleaved: bool = False) -> NDArray[np.float64]:
    """Row t of x (..., seqlen, head_dim) by a matrix of 2 x 2 rotations by positions[t] * base ** (-2 i / head_dim) (Su et al., 2021,
    section 3.2.2). Pair i is (i, i + head_dim / 2), or (2 i, 2 i + 1) if interleaved."""
    x = np.asarray(x, dtype=np.float64)
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for t, position in enumerate(np.asarray(positions)):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            angle = position * base ** (-i / half)
            rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            out[..., t, [a, b]] = x[..., t, [a, b]] @ rotation.T
    return out


def alibi_slopes(num_heads: int) -> NDArray[np.float64]:
    """The slopes of ALiBi (Press et al., 2022): 2 ** (-8 / m), its square, ...; the next power of two below m fills up with every other
    slope of the next above."""

    def geometric(m: int) -> list[float]:
        return [(2.0 ** (-8.0 / m)) ** h for h in range(1, m + 1)]

    m = 2 ** int(np.log2(num_heads))
    return np.array(geometric(m) + geometric(2 * m)[::2][: num_heads - m])


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
