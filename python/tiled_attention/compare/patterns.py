"""Sparse patterns beside SDPA with the dense mask; LSH attention beside exact attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tiled_attention as ta

from .comparison import Comparison, Peer, Size
from .speed import naive_attention

# Of the recall of LSH: clusters of 32 tokens, and the keys of largest score that a query should find.
CLUSTER, TOP = 32, 16
RECALL_SEQLEN, RECALL_DIM, RECALL_BUCKET = 1024, 32, 32


def masks(n: int, num_heads: int, seed: int) -> dict[str, ta.Mask | Tensor]:
    """One of each kind, with windows and strides that grow with n."""
    window, block = max(n // 32, 2), max(n // 32, 4)
    blocks = -(-n // block)
    generator = torch.Generator().manual_seed(seed)
    layout = (torch.rand(num_heads, blocks, blocks, generator=generator) < 0.1) | torch.eye(blocks, dtype=torch.bool)
    near = ta.SlidingWindow(window, window)
    return {
        "window, sinks, causal": ta.Causal() & (ta.SlidingWindow(2 * window - 1, 0) | ta.Sinks(4)),
        "Strided and its window, causal": ta.Causal() & (ta.Strided(window) | ta.SlidingWindow(window - 1, 0)),
        "Dilated": ta.Dilated(window, 4),
        "Global and a window": ta.Global(tuple(range(0, n, max(n // 4, 1)))) | near,
        "RandomBlocks": ta.RandomBlocks(2, block, seed),
        "RandomBlocks, Global, window": ta.RandomBlocks(2, block, seed) | ta.Global((0, 1)) | near,
        "BlockSparse per head": ta.BlockSparse(layout, block),
        "bool tensor": ta.BlockSparse(layout[0], block).dense(n, n),
    }


def dense(mask: ta.Mask | Tensor, n: int) -> Tensor:
    """(n, n), or one per head."""
    return mask if isinstance(mask, Tensor) else mask.dense(n, n)


def sparse(size: Size, seed: int) -> list[Comparison]:
    """Every mask of `masks`."""
    n, leaves, comparisons = size.seqlen, size.tensors(seed, kv_like_query=True), []
    for name, mask in masks(n, size.num_heads, seed).items():
        visible = dense(mask, n)

        def tiled(query: Tensor, key: Tensor, value: Tensor, mask: Any = mask) -> Tensor:
            return ta.attention(query, key, value, mask=mask)

        def definition(query: Tensor, key: Tensor, value: Tensor, visible: Tensor = visible) -> Tensor:
            return naive_attention(query, key, value, visible)

        def sdpa(query: Tensor, key: Tensor, value: Tensor, visible: Tensor = visible) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, visible)

        share = float(visible.double().mean())
        parts = "Strided and" in name  # computed one by one, their gradients rounded and added
        comparisons.append(Comparison(name, leaves, tiled, definition, {"SDPA, dense mask": Peer(sdpa)}, rounds=parts, share=share))
    return comparisons


def densities(n: int, num_heads: int) -> list[dict[str, Any]]:
    """`Mask.density`, which makes no dense matrix, beside the mean of the dense mask."""
    rows = []
    for name, mask in masks(n, num_heads, 0).items():
        if isinstance(mask, ta.Mask):
            density, counted = mask.density(n, n), float(dense(mask, n).double().mean())
            rows.append({"mask": name, "n": n, "density": density, "dense": counted, "passed": abs(density - counted) < 1e-9})
    return rows


def lsh(size: Size, seed: int) -> list[Comparison]:
    """Against softmax over the pairs that the hashes show; timed against exact attention, which it approximates."""
    n = size.seqlen - size.seqlen % 8
    bucket = 64 if n % 64 == 0 and n >= 512 else 8
    shaped = Size(size.batch, size.num_heads, size.num_heads, n, size.head_dim).tensors(seed)
    leaves = {"query_key": shaped["query"], "value": shaped["value"]}
    comparisons = []
    for causal in (False, True):
        options: dict[str, Any] = {"num_hashes": 2, "bucket_size": bucket, "causal": causal, "seed": seed}

        def tiled(query_key: Tensor, value: Tensor, options: dict[str, Any] = options) -> Tensor:
            return ta.lsh_attention(query_key, value, **options)

        def definition(query_key: Tensor, value: Tensor, options: dict[str, Any] = options) -> Tensor:
            seen = ta.reference.lsh_pairs(query_key, **options)
            return naive_attention(query_key, F.normalize(query_key, dim=-1), value, seen)

        def sdpa(query_key: Tensor, value: Tensor, causal: bool = causal) -> Tensor:
            return F.scaled_dot_product_attention(query_key, F.normalize(query_key, dim=-1), value, is_causal=causal)

        mask = ta.Causal() if causal else None

        def exact(query_key: Tensor, value: Tensor, mask: Any = mask) -> Tensor:
            return ta.attention(query_key, F.normalize(query_key, dim=-1), value, mask=mask)

        name = f"lsh_attention{', causal' if causal else ''}"
        peers = {"SDPA, exact": Peer(sdpa), "exact": Peer(exact)}
        comparisons.append(Comparison(name, leaves, tiled, definition, peers, approximated=True, rounds=True))
    return comparisons


def recall(num_hashes: tuple[int, ...]) -> list[dict[str, Any]]:
    """What LSH attention finds of exact attention's keys, on clusters of tokens in a random order.

    Rows of num_hashes, pairs (share that a query sees), recall (share of the `TOP` keys of largest score that it sees), weight (exact
    attention's on seen keys), error (of out, relative), passed: whether it finds near keys more often than chance would.
    """
    generator = torch.Generator().manual_seed(0)
    n, dim = RECALL_SEQLEN, RECALL_DIM
    centers = torch.randn(1, 1, n // CLUSTER, dim, generator=generator).repeat_interleave(CLUSTER, 2)
    tokens = 8 * (centers + 0.3 * torch.randn(1, 1, n, dim, generator=generator))[:, :, torch.randperm(n, generator=generator)]
    value = torch.randn(1, 1, n, dim, generator=generator)
    weights = ta.attention_weights(tokens, F.normalize(tokens, dim=-1), mask=~torch.eye(n, dtype=torch.bool))
    top, exact = weights.topk(TOP).indices, weights @ value
    rows = []
    for rounds in num_hashes:
        # With the identity as values, the output is the weights.
        found = ta.lsh_attention(tokens, torch.eye(n).view(1, 1, n, n), num_hashes=rounds, bucket_size=RECALL_BUCKET, causal=False, seed=0)
        seen = found > 0
        row = {
            "num_hashes": rounds,
            "pairs": float(seen.double().mean()),
            "recall": float(seen.gather(-1, top).double().mean()),
            "weight": float((weights * seen).sum(-1).double().mean()),
            "error": float((found @ value - exact).norm() / exact.norm()),
        }
        rows.append(row | {"passed": row["recall"] > 2 * row["pairs"]})
    return rows
