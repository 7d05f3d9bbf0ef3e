"""The definitions, in plain PyTorch: every operator's result and, through autograd, its derivatives of any order.

Computed in the dtype of the inputs (16-bit inputs in float32), so float64 inputs make it the float64 oracle. Memory is
O(seqlen_q x seqlen_kv), and seqlen_q x seqlen_kv x head_dim where an input holds NaN or infinity, or linear attention has a decay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .masks import Mask

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
    return _per_head(tensor, query.shape[-3], -3)


def _distance(seqlen_q: int, seqlen_kv: int, query_offset: int | Tensor | None, device: torch.device) -> Tensor:
    """|p - j|: (seqlen_q, seqlen_kv), or (batch..., 1, seqlen_q, seqlen_kv)."""
    offset = seqlen_kv - seqlen_q if query_offset is None else query_offset
    if isinstance(offset, Tensor):
        offset = offset[..., None, None, None]
    return (torch.arange(seqlen_q, device=device)[:, None] + offset - torch.arange(seqlen_kv, device=device)).abs()


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


FeatureMap = str | Callable[[Tensor], Tensor]
State = tuple[Tensor, Tensor]  # S (..., heads, head_dim, head_dim_v), z (..., heads, head_dim)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    causal: bool = False,
    normalize: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    initial_state: State | None = None,
) -> tuple[Tensor, State]:
    """The parallel form: out = weights @ value, divided by the row sums (normalize) or times scale.

        weights_ij = sum_c phi(query_i)_c phi(key_j)_c exp(sum of log_decay_tc over j < t <= i)     for visible j; causal: j <= i

    Args:
        query: (..., num_heads, seqlen_q, head_dim); key, value with num_heads_kv heads, a divisor of num_heads.
        feature_map: "identity", "elu" (elu(x) + 1), "relu", "exp", a callable, or a pair (query map, key map).
        key_mask: bool, broadcastable to (..., seqlen_kv), True = the key counts.
        log_decay: (..., num_heads or num_heads_kv, n), or (..., n, head_dim) more; with num_heads each query head has a state of its own.
        initial_state: (S, z), decayed by all log_decay_t with t <= i; with num_heads heads likewise.

    Returns:
        out (..., num_heads, seqlen_q, head_dim_v), 0 where the row sum is 0, and the state after the last key.
    """
    phi_q, phi_k, value, visible, gate, (kv, k_sum) = _linear_inputs(query, key, value, feature_map, key_mask, log_decay, initial_state)
    heads, n = query.shape[-3], key.shape[-2]
    pairs = torch.ones(query.shape[-2], n, dtype=torch.bool, device=key.device)
    visible = visible & (pairs.tril() if causal else pairs)
    phi_k_heads, value_heads = _per_head(phi_k, heads, -3), _per_head(value, heads, -3)
    until_end: Tensor | float
    if gate is None:
        weights, since, until_end, total = phi_q @ phi_k_heads.mT, phi_k.new_ones(1, 1), 1.0, phi_k.new_ones(1, 1)
    else:
        after = pairs.tril(-1)[..., None]
        between = torch.where(after, gate[..., None, :], 0.0).cumsum(-3).exp()  # (..., heads, i, j, head_dim)
        weights = (phi_q[..., :, None, :] * phi_k_heads[..., None, :, :] * _per_head(between, heads, -4)).sum(-1)
        since, total = _per_head(gate.cumsum(-2).exp(), heads, -3), gate.sum(-2, keepdim=True).exp()
        until_end = between[..., -1, :, :] if n else 1.0
    weights = torch.where(visible, weights, 0.0)
    decayed, k_sum_heads = phi_q * since, _per_head(k_sum, heads, -2)[..., None]
    numerator = weights @ value_heads + decayed @ _per_head(kv, heads, -3)
    denominator = weights.sum(-1, keepdim=True) + decayed @ k_sum_heads
    out = _divide(numerator, denominator, normalize, scale).to(query.dtype)
    added = phi_k * until_end
    return out, (_forget(kv, total.mT) + added.mT @ value, _forget(k_sum, total[..., 0, :]) + added.sum(-2))


def linear_attention_recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    normalize: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    initial_state: State | None = None,
) -> tuple[Tensor, State]:
    """`linear_attention` with causal=True, token by token (Katharopoulos et al., 2020, section 3.4):

    S = exp(log_decay_t) S + phi(key_t) value_t^T;  z = exp(log_decay_t) z + phi(key_t);  out_t = phi(query_t) S / (phi(query_t) . z)
    """
    phi_q, phi_k, value, _, gate, (kv, k_sum) = _linear_inputs(query, key, value, feature_map, key_mask, log_decay, initial_state)
    heads, outs = query.shape[-3], []
    for t in range(key.shape[-2]):
        phi, q = phi_k[..., t, :], phi_q[..., t : t + 1, :]
        if gate is not None:
            decay = gate[..., t, :].exp()
            kv, k_sum = _forget(kv, decay[..., None]), _forget(k_sum, decay)
        kv, k_sum = kv + phi[..., :, None] * value[..., t, None, :], k_sum + phi
        outs.append(_divide(q @ _per_head(kv, heads, -3), q @ _per_head(k_sum, heads, -2)[..., None], normalize, scale))
    shape = (*query.shape[:-1], value.shape[-1])
    return torch.cat(outs, -2).to(query.dtype) if outs else query.new_zeros(shape), (kv, k_sum)


def _linear_inputs(query: Tensor, key: Tensor, value: Tensor, feature_map: Any, key_mask: Any, log_decay: Any, state: Any) -> Any:
    """(phi(query), phi(key), value, visible, log_decay, (S, z)) in at least float32; all but phi(query) with the heads of the state.

    What is hidden is 0 in phi(key) and value. The state is 0 where there is none.
    """
    real = torch.promote_types(query.dtype, torch.float32)
    heads, rank = query.shape[-3], query.dim()
    map_q, map_k = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    visible = torch.ones(*key.shape[:-3], key.shape[-2], dtype=torch.bool, device=key.device)
    visible = (visible if key_mask is None else visible & key_mask)[..., None, None, :]  # (..., 1, 1, seqlen_kv)
    key, value = (torch.where(visible.mT, x, 0.0).to(real) for x in (key, value))
    phi_q, phi_k = _feature(map_q, query.to(real)), torch.where(visible.mT, _feature(map_k, key), 0.0)
    if log_decay is not None and log_decay.dim() < rank:
        log_decay = log_decay[..., None]
    if any(x is not None and x.shape[-3] == heads for x in (log_decay, None if state is None else state[0])):
        phi_k, value = _per_head(phi_k, heads, -3), _per_head(value, heads, -3)
    per_state = phi_k.shape[-3]
    if log_decay is not None:
        log_decay = log_decay if log_decay.shape[-3] == 1 else _per_head(log_decay, per_state, -3)
        log_decay = log_decay.to(real).expand(phi_k.shape)
    if state is None:
        shape = (*phi_k.shape[:-2], phi_k.shape[-1])
        state = phi_k.new_zeros(*shape, value.shape[-1]), phi_k.new_zeros(shape)
    state = _per_head(state[0].to(real), per_state, -3), _per_head(state[1].to(real), per_state, -2)
    return phi_q, phi_k, value, visible, log_decay, state


def _feature(feature_map: Any, x: Tensor) -> Tensor:
    if feature_map == "identity":
        return x
    if feature_map == "elu":
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    return {"relu": torch.relu, "exp": torch.exp}.get(feature_map, feature_map)(x)


def _per_head(tensor: Tensor, heads: int, dim: int) -> Tensor:
    return tensor.repeat_interleave(heads // max(tensor.shape[dim], 1), dim)


def _forget(state: Tensor, decay: Tensor) -> Tensor:
    """decay * state; 0 where decay is 0, whatever the state is."""
    return torch.where(decay == 0, 0.0, decay * state)


def _divide(numerator: Tensor, denominator: Tensor, normalize: bool, scale: float | None) -> Tensor:
    if not normalize:
        return numerator * (1.0 if scale is None else scale)
    dead = denominator == 0
    return torch.where(dead, 0.0, numerator / torch.where(dead, 1.0, denominator))
