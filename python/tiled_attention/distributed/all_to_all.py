"""The alternative to the ring: an exchange that gives each rank whole sequences of some heads, attention there, and an exchange back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import Arguments
from ..call import forward
from ..lowering import lower
from ..masks import And, Mask, Or
from ..sparse_masks import BlockSparse
from .layout import Run
from .peers import Peers


def refusal(num_heads: int, num_heads_kv: int, size: int, by_rows: bool) -> str | None:
    """Why heads cannot be divided, None where they can."""
    if num_heads % size:
        return f"a number of ranks that divides num_heads, got {size} ranks and {num_heads} heads"
    if num_heads_kv == 0 or (num_heads_kv % size and size % num_heads_kv):
        return f"a number of ranks that divides num_heads_kv or is a multiple of it, got {size} ranks and {num_heads_kv} heads"
    if by_rows:
        return "a bool mask and a bias with one row for all queries, got rows of each rank"
    return None


def numbers_sent(lengths_q: Sequence[int], lengths_kv: Sequence[int], heads: tuple[int, int], dims: tuple[int, int]) -> int:
    """How many numbers all ranks together send in a forward pass without lse, and as many again in a backward pass."""
    size, (num_heads, num_heads_kv), row = len(lengths_q), heads, sum(dims)
    kept = num_heads_kv // size if num_heads_kv % size == 0 else 1
    return (size - 1) * row * (sum(lengths_q) * (num_heads // size) + sum(lengths_kv) * kept)


class Exchange(torch.autograd.Function):
    """(peers, shapes, what goes to each rank) -> what came from each, of these shapes. Differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, peers: Peers, shapes: Sequence[Sequence[int]], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.peers, ctx.shapes = peers, [part.shape for part in parts]
        received = [parts[peers.rank].clone() if rank == peers.rank else parts[0].new_empty(shape) for rank, shape in enumerate(shapes)]
        others = peers.others()
        peers.exchange([(peer, parts[peer].contiguous()) for peer in others], [(peer, received[peer]) for peer in others]).wait()
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, None, *Exchange.apply(ctx.peers, ctx.shapes, *grads))


def to_heads(peers: Peers, x: Tensor, runs: Sequence[Sequence[Run]], lengths: Sequence[int]) -> Tensor:
    """(..., heads, rows of this rank, dim) -> (..., heads of this rank, all rows, dim)."""
    heads, size = x.shape[-3], peers.size
    if heads % size == 0:
        parts = x.split(heads // size, -3)
    else:  # one head serves several ranks
        parts = tuple(x.narrow(-3, rank * heads // size, 1) for rank in range(size))
    shapes = [(*x.shape[:-3], parts[0].shape[-3], length, x.shape[-1]) for length in lengths]
    shards = Exchange.apply(peers, shapes, *(part.contiguous() for part in parts))
    pieces = [(run, shard.narrow(-2, run.at, run.end - run.begin)) for held, shard in zip(runs, shards, strict=True) for run in held]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])] or [shards[0]], -2)


def to_rows(peers: Peers, x: Tensor, runs: Sequence[Sequence[Run]], lengths: Sequence[int]) -> Tensor:
    """Back from `to_heads`."""
    parts = [torch.cat([x.narrow(-2, run.begin, run.end - run.begin) for run in held] or [x.narrow(-2, 0, 0)], -2) for held in runs]
    shape = (*x.shape[:-2], lengths[peers.rank], x.shape[-1])
    return torch.cat(Exchange.apply(peers, [shape] * peers.size, *parts), -3)


def attend_by_heads(
    peers: Peers,
    options: Arguments,
    mask: Mask | Tensor | None,
    query_offset: int | Tensor,
    runs: tuple[Sequence[Sequence[Run]], Sequence[Sequence[Run]]],
    lengths: tuple[Sequence[int], Sequence[int]],
    tensors: Sequence[Any],
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of this rank's rows. `runs` and `lengths` are of queries and of keys, `tensors` query, key, value, bias, slopes, sinks."""
    query, key, value, bias, slopes, sinks = tensors
    first, count = peers.rank * query.shape[-3] // peers.size, query.shape[-3] // peers.size
    query = to_heads(peers, query, runs[0], lengths[0])
    key, value = (to_heads(peers, x, runs[1], lengths[1]) for x in (key, value))
    lowered = lower(
        _of_heads(mask, first, count),
        batch_shape=query.shape[:-3],
        num_heads=count,
        seqlen_q=query.shape[-2],
        seqlen_kv=key.shape[-2],
        query_offset=query_offset,
        device=query.device,
    )
    args = options._replace(
        query=query,
        key=key,
        value=value,
        mask=lowered.mask,
        bias=_narrowed(bias, first, count),
        alibi_slopes=None if slopes is None else slopes.narrow(0, first, count),
        sinks=None if sinks is None else sinks.narrow(0, first, count),
        key_lengths=lowered.key_lengths,
        documents=lowered.documents,
        query_offset=lowered.query_offset,
        block_rows=lowered.block_rows,
        block_tiles=lowered.block_tiles,
        block_bits=lowered.block_bits,
        intervals=lowered.intervals,
        dropout_offsets=(0, first, 0, 0) if options.dropout_p > 0 else (),
    )
    out, lse = forward(args)
    out = to_rows(peers, out, runs[0], lengths[0])
    return out, to_rows(peers, lse[..., None], runs[0], lengths[0])[..., 0] if with_lse else None


def _narrowed(tensor: Tensor | None, first: int, count: int) -> Any:
    """Of a tensor that broadcasts to (..., num_heads, rows, keys)."""
    if tensor is None or tensor.dim() < 3 or tensor.shape[-3] == 1:
        return tensor
    return tensor.narrow(-3, first, count)


def _of_heads(mask: Any, first: int, count: int) -> Any:
    if isinstance(mask, (And, Or)):
        return type(mask)(_of_heads(mask.left, first, count), _of_heads(mask.right, first, count))
    if isinstance(mask, Tensor):
        return _narrowed(mask, first, count)
    if isinstance(mask, BlockSparse):
        return BlockSparse(_narrowed(mask.block_mask, first, count), mask.block_size)
    return mask
