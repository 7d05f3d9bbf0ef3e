"""Attention with other scores, and with positions, beside the same formulas in PyTorch's operators."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import tiled_attention as ta

from .comparison import Comparison, Peer, Size
from .speed import naive_attention

T5_BUCKETS, T5_DISTANCE = 32, 128


def additive_composite(query: Tensor, key: Tensor, value: Tensor, score_weight: Tensor) -> Tensor:
    """As one writes it: with a (seqlen, seqlen, head_dim) tensor per head."""
    score = torch.tanh(query[..., :, None, :] + key[..., None, :, :]) @ score_weight
    return score.softmax(-1) @ value


def other_scores(size: Size, seed: int) -> list[Comparison]:
    """Additive, Luong's, and Gaussian."""
    leaves, dim = size.tensors(seed, kv_like_query=True), size.head_dim
    generator = torch.Generator().manual_seed(1000 + seed)
    square, hidden = torch.randn(dim, dim, generator=generator) / dim, torch.randn(dim, 2 * dim, generator=generator) / dim**0.5
    vector = torch.randn(dim, generator=generator)
    bandwidth = math.sqrt(dim) * (1 + torch.rand(size.num_heads, generator=generator))

    def concat(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, vector: Tensor) -> Tensor:
        """v . tanh(W [query; key]) of every pair."""
        shape = (*query.shape[:-1], key.shape[-2], dim)
        both = torch.cat([query[..., :, None, :].expand(shape), key[..., None, :, :].expand(shape)], -1)
        return (torch.tanh(both @ weight.mT) @ vector).softmax(-1) @ value

    def concat_composite(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, vector: Tensor) -> Tensor:
        return additive_composite(query @ weight[:, :dim].mT, key @ weight[:, dim:].mT, value, vector)

    def gaussian(query: Tensor, key: Tensor, value: Tensor, bandwidth: Tensor) -> Tensor:
        distance = (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)
        return (distance / (-2 * bandwidth[:, None, None] ** 2)).softmax(-1) @ value

    def gaussian_composite(query: Tensor, key: Tensor, value: Tensor, bandwidth: Tensor) -> Tensor:
        distance = torch.cdist(query, key).square()
        return (distance / (-2 * bandwidth[:, None, None] ** 2)).softmax(-1) @ value

    return [
        Comparison(
            "additive_attention",
            leaves | {"score_weight": vector},
            ta.additive_attention,
            additive_composite,
            {"composite": Peer(additive_composite)},
        ),
        Comparison(
            "luong_attention, dot",
            leaves | {"query": leaves["query"] / dim**0.5},
            ta.luong_attention,
            lambda query, key, value: (query @ key.mT).softmax(-1) @ value,
            {"SDPA": Peer(lambda query, key, value: F.scaled_dot_product_attention(query, key, value, scale=1.0))},
        ),
        Comparison(
            "luong_attention, general",
            leaves | {"weight": square},
            lambda query, key, value, weight: ta.luong_attention(query, key, value, "general", weight),
            lambda query, key, value, weight: (query @ weight @ key.mT).softmax(-1) @ value,
            {"SDPA": Peer(lambda query, key, value, weight: F.scaled_dot_product_attention(query @ weight, key, value, scale=1.0))},
            rounds=True,
        ),
        Comparison(
            "luong_attention, concat",
            leaves | {"weight": hidden, "vector": vector},
            lambda query, key, value, weight, vector: ta.luong_attention(query, key, value, "concat", (weight, vector)),
            concat,
            {"composite": Peer(concat_composite)},
            rounds=True,
        ),
        Comparison(
            "gaussian_attention",
            leaves | {"bandwidth": bandwidth},
            ta.gaussian_attention,
            gaussian,
            {"composite": Peer(gaussian_composite)},
        ),
    ]


def turned(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary embedding of halves at positions 0, 1, ...: x cos + [-x_b, x_a] sin, with cosines and sines in the dtype of x."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequencies
    cos, sin = (table.to(x.dtype).repeat(1, 2) for table in (angles.cos(), angles.sin()))
    a, b = x.split(half, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def t5_buckets(n: int) -> Tensor:
    """(n, n): the bucket of key j for query i, both ways (Raffel et al., 2020; single precision, as T5 computes it)."""
    distance = torch.arange(n) - torch.arange(n)[:, None]
    side = T5_BUCKETS // 2
    exact = side // 2
    far = exact + (torch.log(distance.abs().clamp(min=1).float() / exact) / math.log(T5_DISTANCE / exact) * (side - exact)).long()
    bucket = torch.where(distance.abs() < exact, distance.abs(), far.clamp(max=side - 1))
    return bucket + side * (distance > 0)


def positions(size: Size, seed: int) -> list[Comparison]:
    """Rotary, ALiBi and T5's bias, the first two causal."""
    leaves, n = size.tensors(seed, kv_like_query=True), size.seqlen
    rotary = ta.RotaryEmbedding(size.head_dim)
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    slopes = ta.alibi_slopes(size.num_heads)
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    buckets = t5_buckets(n)
    table = torch.randn(T5_BUCKETS, size.num_heads, generator=torch.Generator().manual_seed(1000 + seed))
    relative = ta.RelativeBias(size.num_heads, T5_DISTANCE, num_buckets=T5_BUCKETS)

    def alibi(dtype: torch.dtype) -> Tensor:
        return -slopes.to(dtype)[:, None, None] * distance

    def with_table(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        bias = torch.func.functional_call(relative, {"weight": weight}, (n, n))
        return ta.attention(query, key, value, bias=bias[:, None], scale=1.0)

    def t5(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        return (query @ key.mT + weight[buckets].movedim(-1, 0)).softmax(-1) @ value

    def t5_composite(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, weight[buckets].movedim(-1, 0)[None], scale=1.0)

    return [
        Comparison(
            "attention, rotary, causal",
            leaves,
            lambda query, key, value: ta.attention(query, key, value, rotary=rotary, mask=ta.Causal()),
            lambda query, key, value: naive_attention(turned(query), turned(key), value, visible),
            {
                "composite": Peer(
                    lambda query, key, value: F.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True)
                )
            },
            rounds=True,
        ),
        Comparison(
            "attention, ALiBi, causal",
            leaves,
            lambda query, key, value: ta.attention(query, key, value, alibi_slopes=slopes, mask=ta.Causal()),
            lambda query, key, value: naive_attention(query, key, value, visible, alibi(query.dtype)),
            {
                "SDPA, float mask": Peer(
                    lambda query, key, value: F.scaled_dot_product_attention(
                        query, key, value, alibi(query.dtype).masked_fill(~visible, -torch.inf)[None]
                    )
                )
            },
        ),
        Comparison(
            "attention, RelativeBias",
            leaves | {"query": leaves["query"] / size.head_dim**0.5, "weight": table},
            with_table,
            t5,
            {"SDPA, float mask": Peer(t5_composite)},
            rounds=True,
        ),
    ]
