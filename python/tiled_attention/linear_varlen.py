"""Derivatives of linear attention beyond the first backward pass where sequences are packed.

Each sequence is a call of its own then, with the formulas of `linear_derivatives`: this reads the offsets, which on CUDA waits for the
device. What is not packed passes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from . import linear_derivatives
from .arguments import LinearArguments, LinearGradients, real_dtype
from .linear_derivatives import Results


class _Sequence:
    """One sequence of a packed call."""

    def __init__(self, args: LinearArguments, index: int, rows: slice) -> None:
        self.rows, self.item = rows, slice(index, index + 1)
        key_mask = args.key_mask
        self.args: LinearArguments = self.part(args)._replace(
            key_mask=key_mask if key_mask is None or key_mask.shape[-1] == 1 else key_mask[..., rows], cu_seqlens=None
        )

    def part(self, of: Any) -> Any:
        """Of the arguments, or of tangents of theirs."""
        tokens = {name: self.of_rows(getattr(of, name)) for name in ("query", "key", "value", "log_decay")}
        states = {name: self.of_state(getattr(of, name)) for name in ("initial_kv", "initial_k_sum")}
        return of._replace(**tokens, **states)

    def results(self, results: Results) -> Results:
        return self.of_rows(results[0]), self.of_state(results[1]), self.of_state(results[2])

    def of_rows(self, tensor: Any) -> Any:
        return None if tensor is None else tensor[:, :, self.rows]

    def of_state(self, tensor: Any) -> Any:
        return None if tensor is None else tensor[self.item]


def _sequences(args: LinearArguments) -> Iterator[_Sequence]:
    """With offsets as the kernels read them."""
    assert args.cu_seqlens is not None
    total = args.query.shape[2]
    _, *ends = args.cu_seqlens.tolist()
    ends = [min(max(end, 0), total) for end in accumulate(ends, max)][:-1] + [total] * bool(ends)
    for index, rows in enumerate(pairwise([0, *ends])):
        yield _Sequence(args, index, slice(*rows))


def _joined(parts: Sequence[Any], dim: int, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(parts), dim) if parts else like.new_zeros(tuple(shape), dtype=dtype)


def tangents(args: LinearArguments, directions: LinearGradients) -> tuple[Tensor, Tensor, Tensor]:
    """`linear_derivatives.tangents`."""
    if args.cu_seqlens is None:
        return linear_derivatives.tangents(args, directions)
    parts = [linear_derivatives.tangents(sequence.args, sequence.part(directions)) for sequence in _sequences(args)]
    outs, kvs, k_sums = zip(*parts) if parts else ((), (), ())
    query, key, head_dim_v, real = args.query, args.key, args.value.shape[-1], real_dtype(args.query.dtype)
    of_state = (0, *key.shape[1:2], key.shape[-1])
    return (
        _joined(outs, 2, query, (*query.shape[:-1], head_dim_v), query.dtype),
        _joined(kvs, 0, query, (*of_state, head_dim_v), real),
        _joined(k_sums, 0, query, of_state, real),
    )


def gradient_tangents(
    args: LinearArguments, grads: Results, directions: LinearGradients, grads_t: Results, wanted: Sequence[bool]
) -> LinearGradients:
    """`linear_derivatives.gradient_tangents`."""
    if args.cu_seqlens is None:
        return linear_derivatives.gradient_tangents(args, grads, directions, grads_t, wanted)
    parts = [
        linear_derivatives.gradient_tangents(
            sequence.args, sequence.results(grads), sequence.part(directions), sequence.results(grads_t), wanted
        )
        for sequence in _sequences(args)
    ]
    results: list[Tensor | None] = []
    for name, on in zip(LinearGradients._fields, wanted):
        like = getattr(args, name)
        dim = 0 if name.startswith("initial") else 2
        results.append(_joined([getattr(part, name) for part in parts], dim, like, like.shape, like.dtype) if on else None)
    return LinearGradients(*results)
