"""Reformer's attention by its definition, a matrix of all pairs; part of `tiled_attention.reference`."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .reference_scores import attention_of_scores


@functools.lru_cache(maxsize=64)
def lsh_rotation(seed: int, round_: int, head_dim: int, columns: int) -> Tensor:
    """The normal numbers (head_dim, columns) of one round, float64.

    Number e of all rounds together, e = (round * head_dim + row) * columns + column, comes from words 0 and 1 (e % 4 < 2) or 2 and 3 of
    Philox4x32-10 with the counter (e // 4, 0, 0, 0x4C5348) and the seed as key: with u, v = (word + 1/2) / 2^32 it is sqrt(-2 log u) times
    cos(2 pi v) for even e, sin(2 pi v) for odd e.
    """
    from .reference import philox

    rotation = torch.empty(head_dim, columns, dtype=torch.float64)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    for row in range(head_dim):
        for column in range(columns):
            e = (round_ * head_dim + row) * columns + column
            counter = [torch.tensor(word) for word in (e // 4, 0, 0, 0x4C5348)]
            words = [int(word) for word in philox((counter[0], counter[1], counter[2], counter[3]), key)]
            u, v = ((word + 0.5) / 2**32 for word in words[e % 4 // 2 * 2 :][:2])
            rotation[row, column] = math.sqrt(-2 * math.log(u)) * (math.sin if e % 2 else math.cos)(2 * math.pi * v)
    return rotation


def lsh_pairs(query_key: Tensor, num_hashes: int, bucket_size: int, causal: bool, seed: int, key_mask: Tensor | None = None) -> Tensor:
    """bool (..., num_heads, seqlen, seqlen): which key each query sees (Kitaev et al., 2020, equation 6 and the paragraphs around it).

    b buckets of tokens have b hashes, made even; more than 16 have pairs of hashes with ceil(sqrt(b)) values each, made even. key_mask
    (..., seqlen).
    """
    seqlen, head_dim = query_key.shape[-2:]
    buckets = seqlen // bucket_size
    values = [buckets] if buckets <= 16 else [math.ceil(math.sqrt(buckets))] * 2
    halves = [max((value + 1) // 2, 1) for value in values]
    seen = torch.zeros(*query_key.shape[:-1], seqlen, dtype=torch.bool)
    counted = (
        torch.ones(query_key.shape[:-1], dtype=torch.bool) if key_mask is None else key_mask[..., None, :].expand(query_key.shape[:-1])
    )
    for round_ in range(num_hashes):
        number = torch.zeros((), dtype=torch.int64)
        for part in lsh_rotation(seed, round_, head_dim, sum(halves)).split(halves, -1):
            rotated = query_key.detach().double() @ part
            number = number * 2 * part.shape[-1] + torch.cat([rotated, -rotated], -1).argmax(-1)
        number = torch.where(counted, number, math.prod(2 * half for half in halves))
        place = (number * seqlen + torch.arange(seqlen)).argsort(-1).argsort(-1)
        bucket = place // bucket_size
        behind = bucket[..., :, None] - bucket[..., None, :]
        seen |= (behind == 0) | (behind == 1)
    seen &= counted[..., None, :] & counted[..., :, None]
    i = torch.arange(seqlen)
    others = seen & (i[:, None] > i if causal else i[:, None] != i)
    alone = ~others.any(-1, keepdim=True)
    return others | (alone & (i[:, None] == i) & counted[..., None, :])


def lsh_attention(
    query_key: Tensor,
    value: Tensor,
    *,
    num_hashes: int,
    bucket_size: int,
    causal: bool,
    seed: int,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse): softmax attention over `lsh_pairs`, with keys of norm 1."""
    real = torch.promote_types(query_key.dtype, torch.float32)
    query = query_key.to(real)
    norm = query.norm(dim=-1, keepdim=True)
    key = torch.where(norm > 0, query / torch.where(norm > 0, norm, 1.0), 0.0)
    scores = (query[..., :, None, :] * key[..., None, :, :]).sum(-1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    out, lse = attention_of_scores(scores, value, mask=lsh_pairs(query_key, num_hashes, bucket_size, causal, seed, key_mask))
    return out.to(value.dtype), lse
