"""Packed sequences beside the padded batch and torch's nested tensors; decoding over a cache beside SDPA."""

import itertools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tiled_attention as ta

from .comparison import Comparison, Peer, Size, Tensors
from .speed import naive_attention

# What a cache is asked for token by token, timed or not.
MAX_TOKENS = 128
RING_WINDOW, RING_SINKS = 16, 2


def grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Plain math with a key head per group of query heads; a row that sees nothing gives 0."""
    group = query.shape[-3] // key.shape[-3]
    out = naive_attention(query, key.repeat_interleave(group, -3), value.repeat_interleave(group, -3), mask)
    return out if mask is None else torch.where(mask.any(-1, keepdim=True), out, 0.0)


def sequence_lengths(n: int) -> tuple[int, ...]:
    """Mixed, the longest n."""
    return tuple(max(1, n // part) for part in (1, 32, 2, 8, 64, 4, 16, 3))


def varlen(size: Size, seed: int) -> list[Comparison]:
    """Sequences of mixed lengths up to the size's; leaves (total, heads, dim)."""
    lengths = sequence_lengths(size.seqlen)
    generator = torch.Generator().manual_seed(seed)
    heads = {"query": size.num_heads, "key": size.num_heads_kv, "value": size.num_heads_kv}
    leaves = {name: torch.randn(sum(lengths), count, size.head_dim, generator=generator) for name, count in heads.items()}
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]

    def padded(tensors: Tensors) -> Tensors:
        split = {name: tensor.split(lengths) for name, tensor in tensors.items()}
        pad = torch.nn.utils.rnn.pad_sequence
        return {name: pad(parts, batch_first=True).transpose(1, 2).contiguous() for name, parts in split.items()}

    def jagged(tensors: Tensors) -> Tensors:
        split = {name: list(tensor.split(lengths)) for name, tensor in tensors.items()}
        return {name: torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2) for name, parts in split.items()}

    comparisons = []
    for causal in (False, True):
        # Of the ways to tell SDPA of the padding the fastest: where queries see no later key, real ones see no padding.
        keys = None if causal else real[:, None, None]

        mask = ta.Causal() if causal else None

        def tiled(query: Tensor, key: Tensor, value: Tensor, mask: Any = mask) -> Tensor:
            return ta.attention_varlen(query, key, value, cu_seqlens, cu_seqlens, max(lengths), max(lengths), mask=mask)

        def definition(query: Tensor, key: Tensor, value: Tensor, causal: bool = causal) -> Tensor:
            outs = []
            for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths)):
                visible = torch.ones(len(q), len(k), dtype=torch.bool).tril() if causal else None
                outs.append(grouped(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), visible).transpose(0, 1))
            return torch.cat(outs)

        def sdpa(query: Tensor, key: Tensor, value: Tensor, causal: bool = causal, keys: Tensor | None = keys) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, keys, is_causal=causal, enable_gqa=key.shape[1] != query.shape[1])

        peers = {"SDPA, padded": Peer(sdpa, padded, lambda out: out.transpose(1, 2)[real])}
        if not causal and size.num_heads == size.num_heads_kv:
            peers["nested tensors"] = Peer(_nested, jagged, lambda out: out.transpose(1, 2).values())
        comparisons.append(Comparison(f"attention_varlen{', causal' if causal else ''}", leaves, tiled, definition, peers))
    return comparisons


def _nested(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        return F.scaled_dot_product_attention(query, key, value)


def decode(size: Size, seed: int) -> list[Comparison]:
    """One new token over caches of seqlen slots, of which later batch items use a part; without gradients."""
    leaves = size.tensors(seed)
    leaves["query"] = leaves["query"][:, :, -1:].contiguous()
    seqlens = torch.tensor([max(1, size.seqlen // (item + 1)) for item in range(size.batch)])
    used = None if size.batch == 1 else (torch.arange(size.seqlen) < seqlens[:, None])[:, None, None]

    def tiled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ta.attention_decode(query, key, value, cache_seqlens=seqlens)

    def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, used, enable_gqa=True)

    def definition(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return grouped(query, key, value, used)

    return [Comparison("attention_decode", leaves, tiled, definition, {"SDPA, enable_gqa": Peer(sdpa)}, differentiable=False)]


def caches(size: Size, seed: int) -> list[Comparison]:
    """All tokens of a text through `KVCache.attend`, one at a time, beside causal attention over the whole text."""
    tokens = min(size.seqlen, MAX_TOKENS)
    leaves = Size(size.batch, size.num_heads, size.num_heads_kv, tokens, size.head_dim).tensors(seed)
    ring = ta.Causal() & (ta.SlidingWindow(RING_WINDOW - 1, 0) | ta.Sinks(RING_SINKS))
    kinds: dict[str, tuple[dict[str, Any], ta.Mask]] = {
        "contiguous": ({"capacity": tokens}, ta.Causal()),
        "paged": ({"capacity": tokens, "page_size": 16}, ta.Causal()),
        "ring": ({"capacity": RING_WINDOW + RING_SINKS, "window": RING_WINDOW, "num_sinks": RING_SINKS}, ring),
    }
    comparisons = []
    for kind, (options, mask) in kinds.items():
        visible = mask.dense(tokens, tokens)

        def tiled(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any] = options) -> Tensor:
            cache = ta.KVCache(size.batch, size.num_heads_kv, head_dim=size.head_dim, dtype=query.dtype, **options)
            parts = [tensor.split(1, 2) for tensor in (query, key, value)]
            return torch.cat([cache.attend(*token) for token in zip(*parts)], 2)

        def growing(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = visible if kind == "ring" else None) -> Tensor:
            """SDPA over keys that are concatenated at each token, as models keep them."""
            outs, keys, values = [], key[:, :, :0], value[:, :, :0]
            for at, (q, k, v) in enumerate(zip(query.split(1, 2), key.split(1, 2), value.split(1, 2))):
                keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
                seen = None if visible is None else visible[at : at + 1, : at + 1]
                outs.append(F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=True))
            return torch.cat(outs, 2)

        def definition(query: Tensor, key: Tensor, value: Tensor, visible: Tensor = visible) -> Tensor:
            return grouped(query, key, value, visible)

        peers = {"SDPA, growing": Peer(growing)}
        comparisons.append(Comparison(f"KVCache, {kind}", leaves, tiled, definition, peers, differentiable=False))
    return comparisons
