"""The definition of linear attention, in plain PyTorch; part of `tiled_attention.reference`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    phi_k_heads, value_heads = per_head(phi_k, heads, -3), per_head(value, heads, -3)
    until_end: Tensor | float
    if gate is None:
        weights, since, until_end, total = phi_q @ phi_k_heads.mT, phi_k.new_ones(1, 1), 1.0, phi_k.new_ones(1, 1)
    else:
        after = pairs.tril(-1)[..., None]
        between = torch.where(after, gate[..., None, :], 0.0).cumsum(-3).exp()  # (..., heads, i, j, head_dim)
        weights = (phi_q[..., :, None, :] * phi_k_heads[..., None, :, :] * per_head(between, heads, -4)).sum(-1)
        since, total = per_head(gate.cumsum(-2).exp(), heads, -3), gate.sum(-2, keepdim=True).exp()
        until_end = between[..., -1, :, :] if n else 1.0
    weights = torch.where(visible, weights, 0.0)
    decayed, k_sum_heads = phi_q * since, per_head(k_sum, heads, -2)[..., None]
    numerator = weights @ value_heads + decayed @ per_head(kv, heads, -3)
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
        outs.append(_divide(q @ per_head(kv, heads, -3), q @ per_head(k_sum, heads, -2)[..., None], normalize, scale))
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
        phi_k, value = per_head(phi_k, heads, -3), per_head(value, heads, -3)
    per_state = phi_k.shape[-3]
    if log_decay is not None:
        log_decay = log_decay if log_decay.shape[-3] == 1 else per_head(log_decay, per_state, -3)
        log_decay = log_decay.to(real).expand(phi_k.shape)
    if state is None:
        shape = (*phi_k.shape[:-2], phi_k.shape[-1])
        state = phi_k.new_zeros(*shape, value.shape[-1]), phi_k.new_zeros(shape)
    state = per_head(state[0].to(real), per_state, -3), per_head(state[1].to(real), per_state, -2)
    return phi_q, phi_k, value, visible, log_decay, state


def _feature(feature_map: Any, x: Tensor) -> Tensor:
    if feature_map == "identity":
        return x
    if feature_map == "elu":
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    return {"relu": torch.relu, "exp": torch.exp}.get(feature_map, feature_map)(x)


def per_head(tensor: Tensor, heads: int, dim: int) -> Tensor:
    """The heads of keys and values, in dimension dim, repeated for the query heads that share them."""
    return tensor.repeat_interleave(heads // max(tensor.shape[dim], 1), dim)


def _forget(state: Tensor, decay: Tensor) -> Tensor:
    """decay * state; 0 where decay is 0, whatever the state is."""
    return torch.where(decay == 0, 0.0, decay * state)


def _divide(numerator: Tensor, denominator: Tensor, normalize: bool, scale: float | None) -> Tensor:
    if not normalize:
        return numerator * (1.0 if scale is None else scale)
    dead = denominator == 0
    return torch.where(dead, 0.0, numerator / torch.where(dead, 1.0, denominator))
