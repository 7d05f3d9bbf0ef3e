"""The definitions, in plain PyTorch: every operator's result and, through autograd, its derivatives of any order.

Computed in the dtype of the inputs (16-bit inputs in float32), so float64 inputs make it the float64 oracle. Memory is
O(seqlen_q x seqlen_kv), and seqlen_q x seqlen_kv x head_dim where an input holds NaN or infinity, or linear attention has a decay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .masks import Mask
from .reference_decode import attention_decode  # noqa: F401
from .reference_linear import linear_attention, linear_attention_recurrent, per_head  # noqa: F401
from .reference_lsh import lsh_attention, lsh_pairs  # noqa: F401
from .reference_positions import relative_bias, relative_bucket, rotary_embedding, sinusoidal_embedding  # noqa: F401
from .reference_scores import gaussian_attention, luong_attention  # noqa: F401

_INF = float("inf")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    query_offset: int | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out = dropout(softmax(score)) @ value, over the visible keys of each query.

    Args:
        query: (..., num_heads, seqlen_q, head_dim).
        key: (..., num_heads_kv, seqlen_kv, head_dim); num_heads_kv divides num_heads, head h reads h // (num_heads / num_heads_kv).
        value: (..., num_heads_kv, seqlen_kv, head_dim_v).
        mask: a mask, or bool broadcastable to (..., num_heads, seqlen_q, seqlen_kv), True = attend.
        bias: float, broadcastable likewise; -inf is the same as masked. Or by distance, (..., num_heads or 1, 1, seqlen_q + seqlen_kv - 1):
            element t for the keys j of row i with j - i = t - (seqlen_q - 1).
        scale: None: head_dim ** -0.5.
        softcap: c of c * tanh(score / c); None: no cap.
        alibi_slopes: (num_heads,), adds -slope * |p - j| (Press et al., 2022).
        sinks: (num_heads,) logits that take part in the denominator only; -inf is none.
        dropout_mask: bool (..., num_heads, seqlen_q, seqlen_kv), True = kept; needed with dropout_p > 0.
        query_offset: query i stands at p = i + query_offset; an integer or (batch...); None: seqlen_kv - seqlen_q.

    Returns:
        out (..., num_heads, seqlen_q, head_dim_v), and with return_lse the log-sum-exp over the visible scores and the sink,
        (..., num_heads, seqlen_q). A query that sees no key: out 0, lse -inf (the sink's logit), all other gradients 0.
    """
    weights, lse, visible = _softmax_weights(query, key, mask, bias, scale, softcap, alibi_slopes, sinks, query_offset)
    weights = _dropout(weights, dropout_mask, dropout_p)
    out = _mix(weights, _per_query_head(value, query).to(weights.dtype), visible).to(query.dtype)
    return (out, lse) if return_lse else out


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    *,
    dropout_mask: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of each sequence for itself: rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of query (total_q, num_heads, head_dim), and
    likewise of key and value. `dropout_mask`: that of the padded batch, (num_sequences, num_heads, at least max_seqlen_q, max_seqlen_kv).

    Returns:
        out (total_q, num_heads, head_dim_v), and with return_lse lse (num_heads, total_q).
    """
    rows, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_kv.diff().tolist()
    sequences = zip(query.split(rows), key.split(keys), value.split(keys), strict=True)
    outs, lses = [], []
    for b, parts in enumerate(sequences):
        if dropout_mask is not None:
            options["dropout_mask"] = dropout_mask[b, :, : rows[b], : keys[b]]
        out, lse = attention(*(part.transpose(0, 1) for part in parts), return_lse=True, **options)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return (torch.cat(outs), torch.cat(lses, 1)) if return_lse else torch.cat(outs)


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    rows: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    query_offset: int | Tensor | None = None,
) -> Tensor:
    """What `attention` multiplies value with: (..., num_heads, seqlen_q or len(rows), seqlen_kv), at least float32. rows: 1-D indices."""
    weights, _, _ = _softmax_weights(query, key, mask, bias, scale, softcap, alibi_slopes, sinks, query_offset)
    weights = _dropout(weights, dropout_mask, dropout_p)
    return weights if rows is None else weights.index_select(-2, rows)


def _softmax_weights(
    query: Tensor,
    key: Tensor,
    mask: Mask | Tensor | None,
    bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    query_offset: int | Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, lse, visible); visible is bool of the shape of weights."""
    real = torch.promote_types(query.dtype, torch.float32)
    query, key = query.to(real), _per_query_head(key, query).to(real)
    seqlen_q, seqlen_kv, head_dim = query.shape[-2], key.shape[-2], query.shape[-1]

    if bias is not None and bias.dim() > 1 and seqlen_q > 1 and bias.shape[-2] == 1 and bias.shape[-1] == seqlen_q + seqlen_kv - 1:
        keys, rows = torch.arange(seqlen_kv, device=bias.device), torch.arange(seqlen_q, device=bias.device)
        bias = bias[..., 0, :][..., keys - rows[:, None] + seqlen_q - 1]

    visible = torch.ones((*query.shape[:-1], seqlen_kv), dtype=torch.bool, device=query.device)
    if isinstance(mask, Mask):
        visible = visible & mask.dense(seqlen_q, seqlen_kv, query_offset=query_offset, device=query.device)
    elif mask is not None:
        visible = visible & mask
    if bias is not None:
        visible = visible & (bias != -_INF)

    score = _dot(query, key, visible) * ((head_dim or 1) ** -0.5 if scale is None else scale)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if alibi_slopes is not None:
        score = score - alibi_slopes.to(real)[:, None, None] * _distance(seqlen_q, seqlen_kv, query_offset, query.device)
    if bias is not None:
        score = score + torch.where(bias == -_INF, 0.0, bias).to(real)
    score = torch.where(visible, score, -_INF)

    # One more column, which no value belongs to: the sink.
    sink = torch.full((query.shape[-3],), -_INF, dtype=real, device=query.device) if sinks is None else sinks.to(real)
    score = torch.cat([score, sink[:, None, None].expand(*score.shape[:-1], 1)], -1)
    top = score.detach().amax(-1, keepdim=True)
    top = torch.where(top == -_INF, 0.0, top)
    live = score != -_INF
    exponential = torch.where(live, torch.exp(torch.where(live, score, top) - top), 0.0)
    total = exponential.sum(-1, keepdim=True)
    dead = total == 0
    total = torch.where(dead, 1.0, total)
    weights = torch.where(visible, exponential[..., :-1] / total, 0.0)
    return weights, torch.where(dead, -_INF, top + total.log())[..., 0], visible


def _dot(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    """query @ key^T, where what stands in hidden pairs does not even reach a gradient as 0 * NaN."""
    if query.isfinite().all() and key.isfinite().all():
        return torch.where(visible, query @ key.mT, 0.0)
    pair = visible[..., None]
    return (torch.where(pair, query[..., :, None, :], 0.0) * torch.where(pair, key[..., None, :, :], 0.0)).sum(-1)


def _mix(weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """weights @ value, with the same care."""
    if value.isfinite().all():
        return weights @ value
    return (weights[..., None] * torch.where(visible[..., None], value[..., None, :, :], 0.0)).sum(-2)


def _dropout(weights: Tensor, kept: Tensor | None, p: float) -> Tensor:
    if kept is None:
        if p > 0:
            raise ValueError(f"dropout_mask: expected a bool tensor with dropout_p {p}, got None")
        return weights
    dropped = dropped_of_65536(p)
    return torch.where(kept, weights * (65536 / (65536 - dropped) if dropped < 65536 else 0.0), 0.0)


def _per_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    return per_head(tensor, query.shape[-3], -3)


def _distance(seqlen_q: int, seqlen_kv: int, query_offset: int | Tensor | None, device: torch.device) -> Tensor:
    """|p - j|: (seqlen_q, seqlen_kv), or (batch..., 1, seqlen_q, seqlen_kv)."""
    offset = seqlen_kv - seqlen_q if query_offset is None else query_offset
    if isinstance(offset, Tensor):
        offset = offset[..., None, None, None]
    return (torch.arange(seqlen_q, device=device)[:, None] + offset - torch.arange(seqlen_kv, device=device)).abs()


def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_weight: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    dropout_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    query_offset: int | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` with the score sum_d score_weight_d tanh(query_id + key_jd) (Bahdanau et al., 2015); score_weight (head_dim,) or
    (num_heads, head_dim). Memory is O(seqlen_q x seqlen_kv x head_dim)."""
    score = _additive_score(query, key, score_weight, mask, query_offset)
    options: dict[str, Any] = {"dropout_mask": dropout_mask, "dropout_p": dropout_p, "query_offset": query_offset, "return_lse": return_lse}
    return attention(query[..., :0], key[..., :0], value, mask=mask, bias=score, **options)


def additive_attention_weights(
    query: Tensor,
    key: Tensor,
    score_weight: Tensor,
    *,
    rows: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    dropout_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    query_offset: int | Tensor | None = None,
) -> Tensor:
    """What `additive_attention` multiplies value with."""
    score = _additive_score(query, key, score_weight, mask, query_offset)
    options: dict[str, Any] = {"dropout_mask": dropout_mask, "dropout_p": dropout_p, "query_offset": query_offset, "rows": rows}
    return attention_weights(query[..., :0], key[..., :0], mask=mask, bias=score, **options)


def _additive_score(query: Tensor, key: Tensor, score_weight: Tensor, mask: Mask | Tensor | None, query_offset: Any) -> Tensor:
    """0 in hidden pairs."""
    real = torch.promote_types(query.dtype, torch.float32)
    pairs = query.to(real)[..., :, None, :] + _per_query_head(key, query).to(real)[..., None, :, :]
    if isinstance(mask, Mask):
        mask = mask.dense(query.shape[-2], key.shape[-2], query_offset=query_offset, device=query.device)
    if mask is not None:
        pairs = torch.where(mask[..., None], pairs, 0.0)
    weight = score_weight.to(real) if score_weight.dim() == 1 else score_weight.to(real)[:, None, None, :]
    return (torch.tanh(pairs) * weight).sum(-1)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) over both key sets: lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.

    out_* (..., seqlen_q, head_dim_v), lse_* (..., seqlen_q). A part with lse -inf adds nothing, whatever stands in its out.
    """
    top = torch.maximum(lse_a, lse_b).detach()
    top = torch.where(top == -_INF, 0.0, top)
    parts = []
    for lse in (lse_a, lse_b):
        live = lse != -_INF
        parts.append(torch.where(live, torch.exp(torch.where(live, lse, top) - top), 0.0))
    total = parts[0] + parts[1]
    dead = total == 0
    total = torch.where(dead, 1.0, total)
    out = torch.zeros_like(out_a, dtype=lse_a.dtype)
    for part, lse, x in zip(parts, (lse_a, lse_b), (out_a, out_b), strict=True):
        out = out + (part / total)[..., None] * torch.where((lse != -_INF)[..., None], x, 0.0)
    return out.to(out_a.dtype), torch.where(dead, -_INF, top + total.log())


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    dropout_mask: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: bool attn_mask True = attend, float attn_mask added; causal is top-left.

    Leading dimensions broadcast, those of the heads too unless enable_gqa. dropout_mask as in `attention`.
    """
    inputs = [x if x.dim() > 2 else x[None] for x in (query, key, value)]
    lead = torch.broadcast_shapes(*(x.shape[:-3] if enable_gqa else x.shape[:-2] for x in inputs))
    q, k, v = (x.expand(*lead, *x.shape[-3 if enable_gqa else -2 :]) for x in inputs)
    visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
    visible = visible.tril() if is_causal else visible
    mask, bias = visible, attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        mask, bias = visible & attn_mask, None
    out, _ = attention(q, k, v, mask=mask, bias=bias, scale=scale, dropout_mask=dropout_mask, dropout_p=dropout_p, return_lse=True)
    return out if max(query.dim(), key.dim(), value.dim()) > 2 else out[0]


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    in_proj_weight: Tensor | tuple[Tensor, Tensor, Tensor],
    in_proj_bias: Tensor | None,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    bias_k: Tensor | None = None,
    bias_v: Tensor | None = None,
    add_zero_attn: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Concat(head_1 .. head_h) W_o, head_i = attention(query W_q,i, key W_k,i, value W_v,i) (Vaswani et al., 2017, section 3.2.2).

    Args:
        query: (batch, seqlen_q, embed_dim). key: (batch, seqlen_kv, kdim). value: (batch, seqlen_kv, vdim).
        in_proj_weight: (3 * embed_dim, embed_dim), or the three (embed_dim, embed_dim | kdim | vdim).
        in_proj_bias: (3 * embed_dim,). out_proj_weight: (embed_dim, embed_dim). out_proj_bias: (embed_dim,).
        mask, bias: as in `attention`, broadcastable to (batch, num_heads, seqlen_q, seqlen_kv).
        bias_k, bias_v: (embed_dim,), one more projected key and value; add_zero_attn: one more of zeros. No mask hides these.
        dropout_mask: over the keys with those that are added.

    Returns:
        out (batch, seqlen_q, embed_dim) and the weights (batch, num_heads, seqlen_q, seqlen_kv + added).
    """
    w_q, w_k, w_v = in_proj_weight.chunk(3) if isinstance(in_proj_weight, Tensor) else in_proj_weight
    b_q, b_k, b_v = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    linear = torch.nn.functional.linear
    q, k, v = linear(query, w_q, b_q), linear(key, w_k, b_k), linear(value, w_v, b_v)

    batch, seqlen_q, seqlen_kv = q.shape[0], q.shape[1], k.shape[1]
    visible = torch.ones(batch, num_heads, seqlen_q, seqlen_kv, dtype=torch.bool, device=q.device)
    if mask is not None:
        visible = visible & (mask.dense(seqlen_q, seqlen_kv, device=q.device) if isinstance(mask, Mask) else mask)
    added = [(bias_k, bias_v)] if bias_k is not None and bias_v is not None else []
    added += [(torch.zeros_like(k[0, 0]), torch.zeros_like(v[0, 0]))] if add_zero_attn else []
    for extra_k, extra_v in added:
        k, v = torch.cat([k, extra_k.expand(batch, 1, -1)], 1), torch.cat([v, extra_v.expand(batch, 1, -1)], 1)
    visible = torch.nn.functional.pad(visible, (0, len(added)), value=True)
    if bias is not None:
        bias = torch.nn.functional.pad(bias.expand(*bias.shape[:-1], seqlen_kv), (0, len(added)))

    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))  # (batch, num_heads, seqlen, head_dim)
    out, _ = attention(q, k, v, mask=visible, bias=bias, dropout_mask=dropout_mask, dropout_p=dropout_p, return_lse=True)
    weights = attention_weights(q, k, mask=visible, bias=bias, dropout_mask=dropout_mask, dropout_p=dropout_p)
    return linear(out.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias), weights


def dropped_of_65536(p: float) -> int:
    """How many of the 65536 values of 16 random bits drop an element: p rounded, halves up."""
    return int(p * 65536 + 0.5)


def dropout_mask(
    seed: int,
    p: float,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_kv: int,
    offsets: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> Tensor:
    """bool (batch, num_heads, seqlen_q, seqlen_kv), True = kept.

    Philox4x32-10 with the two halves of seed as its key, counted by (key // 4, query // 2, head, batch); each index has its offset of
    (batch, head, query, key) added first. Element (query, key) takes word key % 4, of it the low 16 bits where query is even and the
    high 16 bits where it is odd, and is dropped where these are below round(65536 p).
    """
    item, head, row, column = (
        torch.arange(offset, offset + size) for offset, size in zip(offsets, (batch, num_heads, seqlen_q, seqlen_kv), strict=True)
    )
    item, head, row = item[:, None, None, None], head[:, None, None], row[:, None]
    words = torch.stack(philox((column // 4, row // 2, head, item), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)))
    word = words.gather(0, (column % 4).expand(1, *words.shape[1:]))[0]
    bits = torch.where(row % 2 == 0, word & 0xFFFF, word >> 16)
    return bits >= dropped_of_65536(p)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). int64 tensors that hold 32-bit words."""
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = (word & low for word in torch.broadcast_tensors(*counter))
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # 64 bits: the sign is one of them
        c0, c1, c2, c3 = ((b >> 32) & low) ^ c1 ^ k0, b & low, ((a >> 32) & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3
