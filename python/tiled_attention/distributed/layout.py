"""Which rows of a sequence a rank holds: contiguous shards, or two chunks from opposite ends (zigzag)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import agree, reporting
from .peers import Peers

LAYOUTS = ("contiguous", "zigzag")


class Run(NamedTuple):
    """Rows begin <= x < end of the whole sequence, which a rank holds from its row `at` on."""

    begin: int
    end: int
    at: int


def check_layout(layout: Any) -> str:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be 'contiguous' or 'zigzag', got {layout!r}")
    return layout


def lengths_of(length: int, size: int, layout: str) -> tuple[int, ...]:
    """How many of `length` rows each rank gets from `shard_sequence`."""
    if layout == "contiguous":
        return tuple(_sizes(length, size))
    chunks = _sizes(length, 2 * size)
    return tuple(chunks[rank] + chunks[-1 - rank] for rank in range(size))


def runs_of(lengths: Sequence[int], layout: str, name: str) -> tuple[tuple[Run, ...], ...]:
    """The runs of every rank; none is empty. Contiguous shards may have any lengths, zigzag ones those of `lengths_of`."""
    size, total = len(lengths), sum(lengths)
    if layout == "contiguous":
        starts = _starts(lengths)
        return tuple(_joined([(starts[rank], starts[rank] + lengths[rank])]) for rank in range(size))
    expected = lengths_of(total, size, layout)
    if tuple(lengths) != expected:
        raise ValueError(
            f"{name} must have zigzag shards of {list(expected)} rows, as shard_sequence makes them of {total}, got {list(lengths)}: "
            "pad the sequence, or use layout='contiguous', where shards may have any lengths"
        )
    chunks = _sizes(total, 2 * size)
    starts = _starts(chunks)
    pairs = [(rank, 2 * size - 1 - rank) for rank in range(size)]
    return tuple(_joined([(starts[chunk], starts[chunk] + chunks[chunk]) for chunk in pair]) for pair in pairs)


def _sizes(length: int, parts: int) -> list[int]:
    return [length // parts + (part < length % parts) for part in range(parts)]


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:part]) for part in range(len(sizes))]


def _joined(ranges: list[tuple[int, int]]) -> tuple[Run, ...]:
    """Without empty ranges; two that meet are one."""
    runs: list[Run] = []
    at = 0
    for begin, end in ranges:
        if begin == end:
            continue
        if runs and runs[-1].end == begin:
            runs[-1] = runs[-1]._replace(end=end)
        else:
            runs.append(Run(begin, end, at))
        at += end - begin
    return tuple(runs)


def shard_sequence(x: Tensor, group: dist.ProcessGroup | Any | None = None, dim: int = -2, layout: str = "contiguous") -> Tensor:
    """The rows of a whole sequence that this rank holds; nothing is sent.

    contiguous: rank r of W holds the r-th of W pieces. zigzag: the sequence is cut into 2 W chunks, and rank r holds chunks r and 2 W - 1
    - r, so that causal attention is the same work for every rank. Pieces and chunks differ by one row at most, the first ones being longer.

    Args:
        x: any tensor, the same on every rank; `shard_sequence(torch.arange(n), dim=0)` are the positions of this rank's rows.
        group: a process group or a one-dimensional DeviceMesh; None: the default group.
        dim: the dimension of the sequence. Default -2, that of query, key and value.
        layout: "contiguous" or "zigzag". Default "contiguous".

    Returns:
        A copy of these rows, x with another size along `dim`. Differentiable.

    Raises:
        ValueError, TypeError, RuntimeError: naming the argument; RuntimeError without a process group.
    """
    dim = _check_dim(x, dim)
    peers = Peers(group, x.device, None)
    lengths = lengths_of(x.shape[dim], peers.size, check_layout(layout))
    runs = runs_of(lengths, layout, "x")[peers.rank]
    return torch.cat([x.narrow(dim, run.begin, run.end - run.begin) for run in runs] or [x.narrow(dim, 0, 0)], dim)


def gather_sequence(
    x: Tensor, group: dist.ProcessGroup | Any | None = None, dim: int = -2, layout: str = "contiguous", *, timeout: float | None = None
) -> Tensor:
    """The whole sequence from the shards of all ranks: the inverse of `shard_sequence`. Every rank of the group calls it.

    Args:
        x: this rank's shard; its other sizes and its dtype are those of the other ranks' shards. Contiguous shards may differ in length.
        group: as of `shard_sequence`.
        dim: the dimension of the sequence. Default -2.
        layout: "contiguous" or "zigzag". Default "contiguous".
        timeout: seconds to wait for another rank; None: those of the group.

    Returns:
        x whole along `dim`, the same on every rank. Differentiable: the gradient of a shard is the sum of what all ranks have for its rows.

    Raises:
        ValueError, TypeError, RuntimeError: on every rank, naming the argument, or the rank that failed, disagrees or did not answer.
    """
    peers = Peers(group, x.device if isinstance(x, Tensor) else torch.device("cpu"), timeout)
    with reporting(peers, "gather_sequence"):
        dim = _check_dim(x, dim)
        shape = list(x.shape)
        shape[dim] = -1
        facts = dict(dtype=x.dtype, shape=shape, dim=dim, layout=check_layout(layout), requires_grad=_records(x))
    lengths = [length for (length,) in agree(peers, "gather_sequence", facts, (x.shape[dim],))]
    runs = runs_of(lengths, layout, "x")
    shards = _Gather.apply(x, dim, lengths, peers)
    pieces = [(run, shard.narrow(dim, run.at, run.end - run.begin)) for held, shard in zip(runs, shards, strict=True) for run in held]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])] or [x], dim)


def _records(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _check_dim(x: Any, dim: Any) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim must be an integer, got {dim!r}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be a dimension of x {tuple(x.shape)}, got {dim}")
    return dim % x.dim()


class _Gather(torch.autograd.Function):
    """(shard, dim, lengths, peers) -> the shards of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, lengths: Sequence[int], peers: Peers) -> tuple[Tensor, ...]:
        ctx.dim, ctx.lengths, ctx.peers = dim, lengths, peers
        mine = x.contiguous()
        shards = []
        for length in lengths:
            shape = list(x.shape)
            shape[dim] = length
            shards.append(x.new_empty(shape))
        others = peers.others()
        peers.exchange([(peer, mine) for peer in others], [(peer, shards[peer]) for peer in others]).wait()
        shards[peers.rank] = mine.clone()
        return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        peers: Peers = ctx.peers
        if torch.is_grad_enabled():
            raise RuntimeError("gather_sequence cannot be differentiated twice (create_graph=True)")
        mine = grads[peers.rank]
        others = peers.others()
        received = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in others]
        peers.exchange([(peer, grads[peer].contiguous()) for peer in others], list(zip(others, received, strict=True))).wait()
        for part in received:
            mine = mine + part
        return mine, None, None, None
