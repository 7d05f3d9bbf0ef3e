"""The definitions of attention with other scores than the scaled product, in plain PyTorch; part of `tiled_attention.reference`.

Arguments as in `tiled_attention.reference.attention`; memory O(seqlen_q x seqlen_kv x head_dim).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .masks import Mask

_INF = float("inf")


def attention_of_scores(
    score: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    dropout_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    query_offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(softmax(score) @ value, lse) over the visible keys; score (..., num_heads, seqlen_q, seqlen_kv), -inf: hidden."""
    visible = torch.ones(score.shape, dtype=torch.bool)
    if isinstance(mask, Mask):
        visible = visible & mask.dense(*score.shape[-2:], query_offset=query_offset)
    elif mask is not None:
        visible = visible & mask
    visible = visible & (score != -_INF)
    top = torch.where(visible, score, -_INF).detach().amax(-1, keepdim=True) if score.shape[-1] else score.new_zeros(*score.shape[:-1], 1)
    top = torch.where(top == -_INF, 0.0, top)
    weights = torch.where(visible, torch.exp(torch.where(visible, score, 0.0) - top), 0.0)
    total = weights.sum(-1, keepdim=True)
    dead = total == 0
    total = torch.where(dead, 1.0, total)
    weights = weights / total
    if dropout_mask is not None:
        weights = torch.where(dropout_mask, weights / (1 - int(dropout_p * 65536 + 0.5) / 65536), 0.0)
    value = per_query_head(value.to(weights.dtype), score)
    out = (weights[..., None] * torch.where(visible[..., None], value[..., None, :, :], 0.0)).sum(-2)
    return out, torch.where(dead, -_INF, top + total.log())[..., 0]


def per_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[-3] // max(tensor.shape[-3], 1), -3)


def pairs(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """(..., num_heads, seqlen_q, 1, head_dim) and (..., num_heads, 1, seqlen_kv, head_dim), at least float32."""
    real = torch.promote_types(query.dtype, torch.float32)
    return query.to(real)[..., :, None, :], per_query_head(key, query).to(real)[..., None, :, :]


def gaussian_attention(query: Tensor, key: Tensor, value: Tensor, bandwidth: float | Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of score = -|query_i - key_j|^2 / (2 bandwidth^2), where the differences are taken first (Nadaraya, 1964)."""
    q, k = pairs(query, key)
    if isinstance(bandwidth, Tensor):
        bandwidth = bandwidth.to(q.dtype).reshape(-1, 1, 1)
    out, lse = attention_of_scores(-(q - k).square().sum(-1) / (2 * bandwidth**2), value, **options)
    return out.to(query.dtype), lse


def luong_attention(
    query: Tensor, key: Tensor, value: Tensor, score: str = "dot", weight: Any = None, *, scale: float = 1.0, **options: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) of dot: query . key; general: query . (W key); concat: v . tanh(W [query; key]) (Luong et al., 2015, section 3.1)."""
    q, k = pairs(query, key)
    if score == "general":
        k = (weight if weight.dim() == 2 else weight[:, None, None]).to(k.dtype) @ k[..., None]
        scores = (q * k[..., 0]).sum(-1)
    elif score == "concat":
        shape = torch.broadcast_shapes(q.shape[:-1], k.shape[:-1])
        both = torch.cat([q.expand(*shape, -1), k.expand(*shape, -1)], -1)
        scores = torch.tanh(both @ weight[0].to(q.dtype).mT) @ weight[1].to(q.dtype)
    else:
        scores = (q * k).sum(-1)
    out, lse = attention_of_scores(scores * scale, value, **options)
    return out.to(query.dtype), lse
