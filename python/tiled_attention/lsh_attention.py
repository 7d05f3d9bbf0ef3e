"""Reformer's attention: each query sees the keys that random rotations hash near it, in several rounds, each key once.

A round sorts the tokens by their hash and cuts them into buckets; within it, attention over the own bucket and the one before is one call
of `attention`, where a bucket takes the place of a head. A pair that an earlier round has shown is hidden, so that the rounds see disjoint
sets of keys and merge exactly.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import real_dtype
from .attention import attention
from .call import autocast_active, cast_for_autocast, check_float, check_number, default_scale
from .mask_checks import check_broadcasts, number
from .reference import philox

_TAG = 0x4C5348  # in the counters of the rotations; those of dropout have a batch item there
_ONE_FACTOR = 16  # more buckets than this are numbered by a pair of hashes: hashing then takes n sqrt(buckets) numbers, not n buckets


@overload
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
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
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
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


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
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over the keys that share a bucket with the query, or stand in the bucket before, in one of the rounds.

    Queries are keys: key_j = query_key_j / |query_key_j|. In each round the tokens are sorted by a hash (the coordinate of largest
    magnitude, and its sign, after a random rotation) and then by position, and cut into buckets of `bucket_size`. Query i sees key j if, in
    any round, j stands in the bucket of i or in the one before. It sees itself only where it sees nothing else. The result is exact
    softmax attention over these pairs, each counted once however many rounds show it, and so are the gradients, the pairs being given.

    Memory is O(seqlen * num_hashes * (bucket_size + head_dim)), time O(seqlen * num_hashes * bucket_size * head_dim).

    Args:
        query_key: (..., num_heads, seqlen, head_dim), float32, float64, bfloat16 or float16.
        value: (..., num_heads, seqlen, head_dim_v), dtype of query_key.
        num_hashes: rounds, >= 1. More rounds find more of the nearest keys.
        bucket_size: >= 1, divides seqlen.
        causal: whether key j is seen by i only if j < i (j = i as above). Which tokens share a bucket depends on all tokens even so.
        seed: of the rotations, any 64-bit integer, with or without a sign. Rotations are Philox numbers, the same on every device, for all
            heads and items.
        key_mask: bool, broadcasts to (..., seqlen), True = the token counts. A hidden one is seen by none and sees none, and what stands in
            it changes nothing.
        scale: multiplies query . key; None: head_dim ** -0.5.
        return_lse: also return lse.

    Returns:
        out (..., num_heads, seqlen, head_dim_v), contiguous, dtype of value; with `return_lse` (out, lse), lse (..., num_heads, seqlen),
        float32 or float64. 0 and -inf where nothing is seen.

    Differentiable in query_key and value, as `attention` is; hashes have no gradient.

    Raises:
        ValueError, TypeError: naming the argument.

    Source: Kitaev, Kaiser and Levskaya, Reformer: The Efficient Transformer (2020), section 2.
    """
    if autocast_active():
        query_key, value = cast_for_autocast(query_key), cast_for_autocast(value)
    scale = _check(query_key, value, num_hashes, bucket_size, causal, seed, key_mask, scale)
    seqlen = query_key.shape[-2]
    real = real_dtype(query_key.dtype)
    if key_mask is not None:
        key_mask = key_mask.expand(*query_key.shape[:-3], query_key.shape[-2])[..., None, :].expand(query_key.shape[:-1])
        query_key, value = (torch.where(key_mask[..., None], tensor, 0.0) for tensor in (query_key, value))
    key = _normalize(query_key.to(real)).to(query_key.dtype)
    if seqlen == 0:
        out, lse = value, query_key.sum(-1, dtype=real)
        return (out, lse) if return_lse else out
    with torch.no_grad():
        orders = hash_orders(query_key.detach(), num_hashes, bucket_size, seed, key_mask)  # (num_hashes, ..., num_heads, seqlen)
        places = orders.argsort(-1)
        buckets = places.div(bucket_size, rounding_mode="floor").to(_smallest_integer(seqlen // bucket_size))
    parts, lses = [], []
    for round_ in range(num_hashes):
        visible = _visible_pairs(orders[round_], buckets[:round_], bucket_size, causal, key_mask)
        part, lse = _attend(query_key, key, value, orders[round_], places[round_], visible, bucket_size, scale)
        parts.append(part.to(real))
        lses.append(lse)
    return _see_oneself(query_key, key, value, *_merge(parts, torch.stack(lses)), key_mask, scale, return_lse)


def hash_orders(tokens: Tensor, num_hashes: int, bucket_size: int, seed: int, key_mask: Tensor | None) -> Tensor:
    """The tokens in the order of their hashes, per round: int64 (num_hashes, ..., num_heads, seqlen). Hidden ones come last."""
    head_dim, buckets = tokens.shape[-1], tokens.shape[-2] // bucket_size
    halves = hash_sizes(buckets)
    rotations = rotation_numbers(seed, num_hashes * head_dim * sum(halves), tokens.device).view(num_hashes, head_dim, sum(halves))
    tokens = tokens.to(torch.float64)  # rounding decides no hash
    orders = []
    for rotation in rotations:
        number_of = torch.zeros((), dtype=torch.int64, device=tokens.device)
        for part in rotation.split(halves, -1):
            rotated = tokens @ part
            most, least = rotated.max(-1), rotated.min(-1)
            coordinate = torch.where(most.values >= -least.values, most.indices, least.indices + part.shape[-1])
            number_of = number_of * (2 * part.shape[-1]) + coordinate
        if key_mask is not None:
            number_of = torch.where(key_mask, number_of, math.prod(2 * half for half in halves))
        orders.append(number_of.argsort(stable=True, dim=-1))
    return torch.stack(orders)


def hash_sizes(buckets: int) -> list[int]:
    """Columns of the rotations of one round: each gives twice as many hashes, and their product is at least `buckets`."""
    if buckets <= _ONE_FACTOR:
        return [max((buckets + 1) // 2, 1)]
    half = (math.isqrt(buckets - 1) + 2) // 2
    return [half, half]


def rotation_numbers(seed: int, count: int, device: torch.device) -> Tensor:
    """(count,) normal numbers in float64: Philox4x32-10 with counters (k, 0, 0, _TAG), each four words two pairs of Box-Muller."""
    counter = torch.arange((count + 3) // 4, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = torch.stack(philox((counter, zero, zero, zero + _TAG), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)), -1)
    uniform = ((words.to(torch.float64) + 0.5) * 2.0**-32).view(-1, 2)
    radius, angle = (-2 * uniform[:, 0].log()).sqrt(), 2 * math.pi * uniform[:, 1]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).view(-1)[:count]


def _visible_pairs(order: Tensor, earlier: Tensor, bucket_size: int, causal: bool, key_mask: Tensor | None) -> Tensor:
    """bool (..., num_heads, buckets, bucket_size, 2 * bucket_size): what the sorted queries of a bucket see of the bucket before and of
    their own, less what the rounds whose bucket numbers are `earlier` (rounds, ..., num_heads, seqlen) have shown."""
    seqlen = order.shape[-1]
    index = order.to(torch.int32)
    counted = index if key_mask is None else torch.where(key_mask.gather(-1, order), index, seqlen)
    of_query, of_key = _by_bucket(index, bucket_size)[..., None], _with_bucket_before(counted, bucket_size, seqlen)[..., None, :]
    visible = of_key < of_query if causal else (of_key != of_query) & (of_key < seqlen)
    if key_mask is not None:
        visible &= _by_bucket(counted, bucket_size)[..., None] < seqlen
    for buckets in earlier:
        sorted_buckets = buckets.gather(-1, order)
        behind = _by_bucket(sorted_buckets, bucket_size)[..., None] - _with_bucket_before(sorted_buckets, bucket_size, 0)[..., None, :]
        # 0 or 1: seen before. Differences wrap around in uint8, with fewer buckets than it has numbers.
        visible &= behind >= 2 if behind.dtype == torch.uint8 else behind.bitwise_right_shift_(1) != 0
    return visible


def _attend(
    query: Tensor, key: Tensor, value: Tensor, order: Tensor, places: Tensor, visible: Tensor, bucket_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one round, in the order of the tokens."""
    rows = torch.arange(math.prod(order.shape[:-1]), device=order.device).view(*order.shape[:-1], 1) * order.shape[-1]
    back = (rows + places).view(-1)

    def sort(tensor: Tensor, order: Tensor) -> Tensor:
        sorted_rows = tensor.flatten(0, -2).index_select(0, (rows + order).view(-1))
        return sorted_rows.view(*order.shape, tensor.shape[-1])

    def overlapping(tensor: Tensor) -> Tensor:
        # A view: rows of one bucket serve as its own and as those before the next. Before the first, where all is hidden, it stands itself.
        padded = sort(tensor, torch.cat([order[..., :bucket_size], order], -1))
        return padded.unfold(-2, 2 * bucket_size, bucket_size).mT

    by_bucket = sort(query, order).unflatten(-2, (-1, bucket_size))
    out, lse = attention(by_bucket, overlapping(key), overlapping(value), mask=visible, scale=scale, return_lse=True)
    out, lse = out.flatten(0, -2).index_select(0, back), lse.flatten().index_select(0, back)
    return out.view(value.shape), lse.view(value.shape[:-1])


def _merge(parts: list[Tensor], lses: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_attention` of all rounds, lses (num_hashes, ...), at once. Rows that saw nothing are 0 in their part."""
    dead = (lses.detach() == -math.inf).all(0)
    lses = torch.where(dead, 0.0, lses)
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp()[..., None]
    out = parts[0] * weights[0]
    for part, weight in zip(parts[1:], weights[1:]):
        out = torch.addcmul(out, part, weight)
    return out, torch.where(dead, -math.inf, lse)


def _see_oneself(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, key_mask: Tensor | None, scale: float, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """The token itself where it sees no other."""
    alone = lse.detach() == -math.inf
    if key_mask is not None:
        alone = alone & key_mask
    out = torch.where(alone[..., None], value, out.to(value.dtype))
    if not return_lse:
        return out
    own = (torch.where(alone[..., None], query, 0.0).to(lse.dtype) * torch.where(alone[..., None], key, 0.0).to(lse.dtype)).sum(-1)
    return out, torch.where(alone, own * scale, lse)


def _normalize(tokens: Tensor) -> Tensor:
    """Of norm 1; zero stays zero, with gradient 0."""
    square = tokens.square().sum(-1, keepdim=True)
    zero = square == 0
    return torch.where(zero, 0.0, tokens * torch.where(zero, 1.0, square).rsqrt())


def _by_bucket(tensor: Tensor, bucket_size: int) -> Tensor:
    return tensor.unflatten(-1, (-1, bucket_size))


def _with_bucket_before(tensor: Tensor, bucket_size: int, before_first: int) -> Tensor:
    """(..., seqlen) -> (..., buckets, 2 * bucket_size)"""
    return F.pad(tensor, (bucket_size, 0), value=before_first).unfold(-1, 2 * bucket_size, bucket_size)


def _smallest_integer(buckets: int) -> torch.dtype:
    return torch.uint8 if buckets < 256 else torch.int16 if buckets < 2**15 else torch.int32


def _check(query_key: Any, value: Any, num_hashes: Any, bucket_size: Any, causal: Any, seed: Any, key_mask: Any, scale: Any) -> float:
    check_float("query_key", query_key)
    check_float("value", value)
    if query_key.dim() < 3:
        raise ValueError(f"query_key must have shape (..., num_heads, seqlen, head_dim), got {tuple(query_key.shape)}")
    if value.dtype != query_key.dtype or value.device != query_key.device:
        wanted = f"{query_key.dtype} on {query_key.device}"
        raise ValueError(f"value must be like query_key, {wanted}, got {value.dtype} on {value.device}")
    if value.shape[:-1] != query_key.shape[:-1]:
        raise ValueError(f"value must have shape {(*query_key.shape[:-1], 'head_dim_v')}, got {tuple(value.shape)}")
    number("num_hashes", num_hashes, 1)
    number("bucket_size", bucket_size, 1)
    if query_key.shape[-2] % bucket_size:
        raise ValueError(f"bucket_size must divide seqlen ({query_key.shape[-2]}), got {bucket_size}")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {causal!r}")
    if number("seed", seed, -(2**63)) >= 2**64:
        raise ValueError(f"seed: expected an integer of 64 bits, below 2 ** 64, got {seed}")
    if key_mask is not None:
        if not isinstance(key_mask, Tensor):
            raise TypeError(f"key_mask must be a bool tensor (True = counts), got {type(key_mask).__name__}")
        if key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask must be a bool tensor (True = counts), got {key_mask.dtype}")
        if key_mask.device != query_key.device:
            raise ValueError(f"key_mask must be on the device of query_key ({query_key.device}), got {key_mask.device}")
        check_broadcasts("key_mask", key_mask, (*query_key.shape[:-3], query_key.shape[-2]))
    if scale is None:
        return default_scale(query_key.shape[-1])
    return check_number("scale", scale, "a finite number", lambda x: -math.inf < x < math.inf)
