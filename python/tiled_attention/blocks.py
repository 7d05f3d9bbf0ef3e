"""Scores and weights of attention in plain PyTorch, a block of queries at a time: what derivatives of any order are made of.

Inside a block, heads are split into (num_heads_kv, group), so that rows of a group share their keys without a copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .arguments import NO_INTERVALS, UNBOUNDED, Arguments, is_by_distance, real_dtype
from .library import ops

BLOCK_ELEMENTS = 1 << 18  # scores of a block: some 14 buffers of 1 MB in float32, 2 MB in float64

Index = tuple[slice, ...]
_ALL = slice(None)


@dataclass
class Cut:
    """Which part of (leading..., num_heads_kv, seqlen_q) a block covers. Leading dimensions and heads are one row-major range."""

    leading: Index
    heads_kv: slice
    rows: slice

    @property
    def row_index(self) -> Index:
        """Into (leading..., num_heads_kv, group, seqlen_q, any)."""
        return (*self.leading, self.heads_kv, _ALL, self.rows, _ALL)

    @property
    def key_index(self) -> Index:
        """Into (leading..., num_heads_kv, seqlen_kv, any)."""
        return (*self.leading, self.heads_kv, _ALL, _ALL)

    @property
    def head_index(self) -> Index:
        """Into (num_heads_kv, group, 1, 1)."""
        return (self.heads_kv, _ALL, _ALL, _ALL)


def take(tensor: Tensor, index: Index) -> Tensor:
    """The part of `tensor`, whole along dimensions of size 1."""
    for dim, (part, size) in enumerate(zip(index, tensor.shape)):
        if part is not _ALL and size != 1 and part.stop - part.start != size:
            tensor = tensor.narrow(dim, part.start, part.stop - part.start)
    return tensor


class Problem:
    """The sizes of one call, and the walk over its blocks; rows are the outer loop."""

    def __init__(self, args: Arguments, chosen: Tensor | None = None, seqlen_q: int | None = None) -> None:
        """`chosen`: the row indices that query, lse, mask and bias hold, out of `seqlen_q`; None: all."""
        query, key = args.query, args.key
        self.args, self.chosen = args, chosen
        self.leading = tuple(query.shape[:-3])
        self.num_heads, self.seqlen_q = query.shape[-3], query.shape[-2]
        self.num_heads_kv, self.seqlen_kv = key.shape[-3], key.shape[-2]
        self.group = self.num_heads // self.num_heads_kv if self.num_heads_kv else 1
        self.rows_shape = (*self.leading, self.num_heads_kv, self.group, self.seqlen_q)
        self.real = real_dtype(query.dtype)
        self.intervals = tuple(args.intervals) or NO_INTERVALS
        self.shift = self.intervals[0]
        all_rows = self.seqlen_q if seqlen_q is None else seqlen_q
        if self.shift == UNBOUNDED:
            self.shift = self.seqlen_kv - all_rows
        self.bias_by_distance = args.bias is not None and is_by_distance(args.bias, all_rows, self.seqlen_kv)
        self.last_row = all_rows - 1

    def split(self, tensor: Tensor) -> Tensor:
        """(..., num_heads or 1, rows, cols) with heads as (num_heads_kv, group) or (1, 1), and of full rank."""
        for _ in range(len(self.leading) + 3 - tensor.dim()):
            tensor = tensor.unsqueeze(0)
        heads = (1, 1) if tensor.shape[-3] == 1 != self.num_heads else (self.num_heads_kv, self.group)
        return tensor.reshape(*tensor.shape[:-3], *heads, *tensor.shape[-2:])

    def rows(self, tensor: Tensor, cut: Cut) -> Tensor:
        """The block's part of a (..., num_heads or 1, seqlen_q or 1, any) tensor, split."""
        return take(self.split(tensor), cut.row_index)

    def real_rows(self, tensor: Tensor, cut: Cut) -> Tensor:
        return self.rows(tensor, cut).to(self.real)

    def index(self, cut: Cut) -> Tensor:
        """Indices of the block's rows, (rows, 1)."""
        if self.chosen is not None:
            return self.chosen[cut.rows, None]
        return torch.arange(cut.rows.start, cut.rows.stop, device=self.args.query.device)[:, None]

    def distances(self, cut: Cut) -> Tensor:
        """Places in a bias by distance, (rows, seqlen_kv)."""
        return torch.arange(self.seqlen_kv, device=self.args.query.device) - self.index(cut) + self.last_row

    def bias(self, tensor: Tensor, cut: Cut) -> Tensor:
        """The block's part of a bias or of its tangent, split."""
        part = self.rows(tensor, cut)
        return part[..., 0, :][..., self.distances(cut)] if self.bias_by_distance else part

    def real_keys(self, tensor: Tensor, cut: Cut) -> Tensor:
        """The block's part of a (leading..., num_heads_kv, seqlen_kv, any) tensor."""
        return take(tensor, cut.key_index).to(self.real)

    def per_head(self, vector: Tensor, cut: Cut) -> Tensor:
        """The block's part of a (num_heads,) vector, (heads_kv, group, 1, 1)."""
        return take(vector.to(self.real).view(self.num_heads_kv, self.group, 1, 1), cut.head_index)

    def per_item(self, vector: Tensor, cut: Cut) -> Tensor:
        """The block's part of a (batch,) vector, (leading..., 1, 1, 1, 1)."""
        return take(vector.view(*self.leading, 1, 1, 1, 1), (*cut.leading, _ALL, _ALL, _ALL, _ALL))

    def cuts(self) -> Iterator[Cut]:
        sizes = (*self.leading, self.num_heads_kv, self.seqlen_q)
        budget = max(1, BLOCK_ELEMENTS // max(1, self.group * self.seqlen_kv))
        spans: list[list[slice]] = []
        for size in reversed(sizes):
            step = max(1, min(size, budget))
            budget = budget // step if step == size else 1
            spans.append([slice(start, min(start + step, size)) for start in range(0, size, step)])
        rows, heads_kv, *leading = spans
        for parts in itertools.product(rows, *reversed(leading), heads_kv):
            yield Cut(parts[1:-1], parts[-1], parts[0])


class Scores:
    """Visible pairs, weights and dropout factors of one block, each (leading..., num_heads_kv, group, rows, seqlen_kv)."""

    def __init__(self, problem: Problem, cut: Cut, lse: Tensor | None = None) -> None:
        """With `lse` the weights are exp(score - lse); otherwise they are normalised here, exactly however large the scores are."""
        args, real = problem.args, problem.real
        self.problem, self.cut = problem, cut
        self.query = problem.real_rows(args.query, cut)
        self.key = problem.real_keys(args.key, cut)
        self.value: Any = None if args.value is None else problem.real_keys(args.value, cut)

        # Where the rows stand.
        index = problem.index(cut)
        keys = torch.arange(problem.seqlen_kv, device=args.query.device)
        positions = index + (problem.shift if args.query_offset is None else problem.per_item(args.query_offset, cut))
        visible = self._visible(index, positions, keys)
        self.distance = (positions - keys).abs()

        # Scores, and their slope in scale q . k.
        raw = dot(self.query, self.key) * args.scale
        self.tanh: Any = None  # with softcap alone, as its slope
        self.slope: Any = None
        score = raw
        if args.softcap:
            self.tanh = torch.tanh(raw / args.softcap)
            self.slope = 1 - self.tanh * self.tanh
            score = args.softcap * self.tanh
        if args.alibi_slopes is not None:
            score = score - problem.per_head(args.alibi_slopes, cut) * self.distance
        if args.bias is not None:
            bias = problem.bias(args.bias, cut)
            hidden = bias == -math.inf
            visible = visible & ~hidden
            score = score + torch.where(hidden, 0.0, bias.to(real))
        self.visible = visible.expand(score.shape)

        masked = torch.where(self.visible, score, -math.inf)
        self.sink_weight: Any = None
        if lse is None:
            self._normalise(masked)
        else:
            lse = problem.rows(lse[..., None], cut)
            self.weight = (masked - torch.where(lse == -math.inf, 0.0, lse)).exp()
        self.factor = self._dropout() if args.dropout_p > 0 else None

    def _visible(self, index: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        args, problem = self.problem.args, self.problem
        _, window_left, window_right, limit_left, limit_right, prefix, chunk, key_end, num_sinks, top_left = problem.intervals
        ahead = keys - positions
        visible = ((ahead >= -window_left) & (ahead <= window_right)) | (keys < num_sinks)
        visible = visible & (ahead >= -limit_left) & (ahead <= limit_right) & (keys < key_end)
        if prefix != -1:
            visible = visible & ((keys < prefix) | (ahead <= 0))
        if chunk:
            visible = visible & (keys // chunk == positions // chunk) & (positions >= 0)
        if top_left:
            visible = visible & (keys <= index)
        if args.key_lengths is not None:
            visible = visible & (keys < problem.per_item(args.key_lengths, self.cut))
        if args.documents is not None:
            at_query, at_key = (torch.searchsorted(args.documents, x.contiguous(), right=True) for x in (positions, keys))
            visible = visible & (at_query == at_key) & (at_key > 0) & (at_key < args.documents.shape[-1])
        if args.mask is not None:
            visible = visible & problem.rows(args.mask, self.cut)
        return visible

    def _normalise(self, masked: Tensor) -> None:
        """Sets the weights of keys and sink; 0 in a row without either."""
        problem = self.problem
        top = masked.detach().amax(-1, keepdim=True) if problem.seqlen_kv else masked.new_full((*masked.shape[:-1], 1), -math.inf)
        sink: Any = None
        if problem.args.sinks is not None:
            sink = problem.per_head(problem.args.sinks, self.cut)
            top = torch.maximum(top, sink.detach())
        top = torch.where(top == -math.inf, 0.0, top)
        exponential = (masked - top).exp()
        total = exponential.sum(-1, keepdim=True)
        if sink is not None:
            sink = (sink - top).exp()
            total = total + sink
        total = torch.where(total == 0, 1.0, total)
        self.weight = exponential / total
        self.sink_weight = None if sink is None else sink / total

    def _dropout(self) -> Tensor:
        """What the weights are multiplied with: 0, or the inverse of the probability to be kept."""
        args, problem, cut = self.problem.args, self.problem, self.cut
        items, item = [part.stop - part.start for part in cut.leading], 0
        for part, size in zip(cut.leading, problem.leading):
            item = item * size + part.start
        heads_kv, num_rows = cut.heads_kv.stop - cut.heads_kv.start, cut.rows.stop - cut.rows.start
        offset_batch, offset_head, offset_query, offset_key = tuple(args.dropout_offsets) or (0, 0, 0, 0)

        def kept_rows(start: int, count: int) -> Tensor:
            offsets = [offset_batch + item, offset_head + cut.heads_kv.start * problem.group, offset_query + start, offset_key]
            sizes = (math.prod(items), heads_kv * problem.group, count, problem.seqlen_kv)
            return ops.dropout_mask(args.dropout_seed, args.dropout_p, *sizes, offsets)

        if problem.chosen is None:
            kept = kept_rows(cut.rows.start, num_rows)
        else:
            kept = torch.cat([kept_rows(row, 1) for row in problem.chosen[cut.rows].tolist()], -2)
        dropped = round(args.dropout_p * 65536) / 65536
        scale = 1 / (1 - dropped) if dropped < 1 else 0.0
        return kept.view(*items, heads_kv, problem.group, num_rows, problem.seqlen_kv).to(problem.real) * scale

    def select(self, scores: Tensor) -> Tensor:
        return torch.where(self.visible, scores, 0.0)

    def drop(self, weights: Tensor) -> Tensor:
        return weights if self.factor is None else weights * self.factor

    def to_raw(self, score_grad: Tensor) -> Tensor:
        """What multiplies keys and queries: the derivative by q . k, times scale."""
        return score_grad * self.problem.args.scale if self.slope is None else score_grad * (self.slope * self.problem.args.scale)

    def gather(self, weights: Tensor, columns: Tensor) -> Tensor:
        """sum_j weights_ij columns_j over visible j: (..., heads_kv, group, rows, any). What is hidden may hold nan or inf."""
        return _apart(_product(_together(weights), _together(self.visible), columns), weights)

    def scatter(self, weights: Tensor, rows: Tensor) -> Tensor:
        """sum_i weights_ij rows_i over visible i of all heads of the group: (..., heads_kv, seqlen_kv, any)."""
        return _product(_together(weights).mT, _together(self.visible).mT, _together(rows))


def dot(rows: Tensor, columns: Tensor) -> Tensor:
    """rows (..., heads_kv, group, rows, dim) . columns (..., heads_kv, seqlen_kv, dim)."""
    return _apart(_together(rows) @ columns.mT, rows)


def _together(tensor: Tensor) -> Tensor:
    """(..., group, rows, any) -> (..., group * rows, any)"""
    return tensor.reshape(*tensor.shape[:-3], tensor.shape[-3] * tensor.shape[-2], tensor.shape[-1])


def _apart(tensor: Tensor, like: Tensor) -> Tensor:
    """Back, with the group and rows of `like`."""
    return tensor.reshape(*tensor.shape[:-2], *like.shape[-3:-1], tensor.shape[-1])


def _product(weights: Tensor, visible: Tensor, matrix: Tensor) -> Tensor:
    finite = matrix.isfinite()
    product = weights @ torch.where(finite, matrix, 0.0)
    return torch.where(visible.to(product.dtype) @ (~finite).to(product.dtype) > 0, math.nan, product)


class Sum:
    """Adds up the blocks of one result, in their own dtype as long as the rows stay the same, and keeps it in `dtype`.

    It is allocated from the first block, so that under torch.func it lives on the level of the blocks.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, by_rows: bool) -> None:
        self.shape, self.dtype, self.by_rows = tuple(shape), dtype, by_rows
        self.rows = _ALL
        self.block: Tensor | None = None
        self.total: Tensor | None = None

    def add(self, index: Index, block: Tensor) -> None:
        if self.by_rows:
            if self.rows != index[-2]:
                self._flush()
            self.rows, index = index[-2], (*index[:-2], _ALL, index[-1])
        if self.block is None:
            self.block = block.new_zeros((*self.shape[:-2], block.shape[-2], self.shape[-1]) if self.by_rows else self.shape)
        take(self.block, index).add_(block)

    def _flush(self) -> None:
        if self.block is None:
            return
        if self.total is None:
            self.total = self.block.new_zeros(self.shape, dtype=self.dtype)
        take(self.total, (*(_ALL,) * (len(self.shape) - 2), self.rows, _ALL)).copy_(self.block)
        self.block = None

    def result(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """In `shape`; zeros on the device of `like` where no block came."""
        self._flush()
        total = like.new_zeros(self.shape, dtype=self.dtype) if self.total is None else self.total
        return total.reshape(shape)
