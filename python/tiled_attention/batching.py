"""vmap rules: the mapped dimension becomes one more leading dimension of one call.

What an operator takes once per call, not per batch item (slopes, sinks, documents, a seed), is mapped by one call per sample: so are
calls with dropout, since a sample counts its random numbers from batch item 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor


class Batching:
    """How the arguments of one operator fold. Each set holds positions in its argument list."""

    def __init__(
        self,
        *,
        leading: set[int],
        broadcast: set[int],
        vectors: Collection[int] = (),
        shared: Collection[int] = (),
        dropout_p: int | None = None,
    ) -> None:
        self.leading = leading  # (leading..., ...) tensors: the mapped dimension goes first
        self.broadcast = broadcast  # broadcastable to (leading..., num_heads, rows, cols): likewise, at full rank
        self.vectors = vectors  # (batch,) tensors, where batch is the product of the leading dimensions
        self.shared = shared  # one for all batch items
        self.dropout_p = dropout_p

    def must_loop(self, in_dims: Sequence[Any], args: Sequence[Any]) -> bool:
        return (self.dropout_p is not None and args[self.dropout_p] > 0) or any(in_dims[at] is not None for at in self.shared)

    def fold(self, size: int, in_dims: Sequence[Any], args: Sequence[Any], rank: int) -> list[Any]:
        """The arguments of one call on all samples; `rank`: that of one sample's query."""
        folded = list(args)
        for at, (arg, dim) in enumerate(zip(args, in_dims)):
            if not isinstance(arg, Tensor):
                continue
            if at in self.leading:
                folded[at] = _first(arg, dim, size)
            elif at in self.broadcast and dim is not None:
                folded[at] = _pad(arg.movedim(dim, 0), rank + 1)
            elif at in self.vectors:
                folded[at] = _first(arg, dim, size).reshape(-1)
        return folded


def _first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.movedim(dim, 0) if dim is not None else tensor.expand(size, *tensor.shape)


def _pad(tensor: Tensor, rank: int) -> Tensor:
    """With dimensions of size 1 after the first, up to `rank`."""
    while tensor.dim() < rank:
        tensor = tensor.unsqueeze(1)
    return tensor


def loop(call: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """One call per sample. With no samples, one call on zeros gives the shapes."""

    def sample(n: int) -> list[Any]:
        return [arg.select(dim, n) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims)]

    def empty() -> list[Any]:
        kept = [(arg.shape[:dim] + arg.shape[dim + 1 :]) if isinstance(dim, int) else None for arg, dim in zip(args, in_dims)]
        return [arg if shape is None else arg.new_zeros(shape) for arg, shape in zip(args, kept)]

    results = [call(*sample(n)) for n in range(size)] if size else [call(*empty())]
    if isinstance(results[0], Tensor):
        return torch.stack(results)[:size], 0
    stacked = tuple(torch.stack(parts)[:size] for parts in zip(*results))
    return stacked, (0,) * len(stacked)


# Positions in (query, key, value, mask, bias, alibi_slopes, sinks, key_lengths, documents, query_offset, dropout_seed, block_rows,
# block_tiles, block_bits, query_table, key_table, scale, softcap, dropout_p, ...).
FORWARD = Batching(leading={0, 1, 2}, broadcast={3, 4, 11, 14, 15}, vectors={7, 9}, shared={5, 6, 8, 10, 12, 13}, dropout_p=18)
# The same after (grad_out, grad_lse), and out, lse, residual at 25 to 27.
BACKWARD = Batching(
    leading={0, 1, 2, 3, 4, 25, 26}, broadcast={5, 6, 13, 16, 17}, vectors={9, 11}, shared={7, 8, 10, 12, 14, 15}, dropout_p=20
)
# (query, key, mask, bias, alibi_slopes, key_lengths, documents, query_offset, dropout_seed, block_rows, block_tiles, block_bits,
# query_table, key_table, scale, softcap, dropout_p, intervals, offsets, allow_tf32, interleaved, lse, rows, average)
WEIGHTS = Batching(leading={0, 1, 21}, broadcast={2, 3, 9, 12, 13}, vectors={5, 7}, shared={4, 6, 8, 10, 11, 22}, dropout_p=16)


def map_forward(call: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Rule of (..., with_residual) -> (out, lse, residual)."""
    if FORWARD.must_loop(in_dims, args):
        return loop(call, size, in_dims, args)
    rank = args[0].dim() - (in_dims[0] is not None)
    out, lse, residual = call(*FORWARD.fold(size, in_dims, args, rank))
    return (out, lse, residual), (0, 0, 0 if residual.dim() > 1 else None)


def map_backward(call: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Rule of (grad_out, grad_lse, ..., out, lse, residual, gradients) -> 6 gradients."""
    gradients = args[28]
    if BACKWARD.must_loop(in_dims, args) or gradients & 0b110000:
        return loop(call, size, in_dims, args)
    rank = args[2].dim() - (in_dims[2] is not None)
    folded = BACKWARD.fold(size, in_dims, args, rank)
    if in_dims[27] is not None or args[27].dim() > 1:
        folded[27] = _first(args[27], in_dims[27], size)
    bias = args[6]
    if gradients & 0b1000:
        shape = bias.shape if in_dims[6] is None else bias.movedim(in_dims[6], 0).shape[1:]
        folded[6] = _pad(_first(bias, in_dims[6], size), rank + 1)
    results = list(call(*folded))
    if gradients & 0b1000:
        results[3] = results[3].reshape(size, *shape)
    return tuple(results), tuple(0 if gradients >> at & 1 else None for at in range(6))


def map_weights(call: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Rule of attention_weights."""
    if WEIGHTS.must_loop(in_dims, args):
        return loop(call, size, in_dims, args)
    return call(*WEIGHTS.fold(size, in_dims, args, args[0].dim() - (in_dims[0] is not None))), 0


# Positions in (query, key, value, key_mask, log_decay, initial_kv, initial_k_sum, ...), which is that of a step, too.
LINEAR = Batching(leading={0, 1, 2, 4, 5, 6}, broadcast={3})
# The same after (grad_out, grad_kv, grad_k_sum).
LINEAR_BACKWARD = Batching(leading={0, 1, 2, 3, 4, 5, 7, 8, 9}, broadcast={6})
CU_SEQLENS = 7  # behind those of LINEAR; a step has none. Packed sequences have no further leading dimension: one call per sample


def _fold_linear(rule: Batching, size: int, in_dims: Sequence[Any], args: Sequence[Any], query: int) -> list[Any]:
    """`query`: the position of query. A key_mask stands three places further, and has the rank of query."""
    folded = rule.fold(size, in_dims, args, args[query].dim() - (in_dims[query] is not None))
    if args[query + 3] is not None and in_dims[query + 3] is None:
        folded[query + 3] = args[query + 3].unsqueeze(0)
    return folded


def map_linear(call: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Rule of linear_attention and linear_attention_step, -> (out, kv, k_sum)."""
    if isinstance(args[CU_SEQLENS], Tensor):
        return loop(call, size, in_dims, args)
    return tuple(call(*_fold_linear(LINEAR, size, in_dims, args, 0))), (0, 0, 0)


def map_linear_backward(call: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Rule of (grad_out, grad_kv, grad_k_sum, ..., gradients) -> 6 gradients."""
    if isinstance(args[CU_SEQLENS + 3], Tensor):
        return loop(call, size, in_dims, args)
    results = call(*_fold_linear(LINEAR_BACKWARD, size, in_dims, args, 3))
    return tuple(results), tuple(0 if args[-1] >> at & 1 else None for at in range(6))
