"""Linear attention over packed sequences: each one is a call of its own on its rows, with a state of its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .linear_call import LinearState


def check_cu_seqlens(cu_seqlens: Any, query: Any, key: Any) -> list[int]:
    """The offsets as numbers: this reads them, which on CUDA waits for the device."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"cu_seqlens must be an int32 or int64 tensor, got {cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else cu_seqlens!r}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape (num_sequences + 1,), got {tuple(cu_seqlens.shape)}")
    for name, tensor in (("query", query), ("key", key)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4 or tensor.shape[0] != 1:
            raise ValueError(f"{name} must have shape (1, heads, total, head_dim) with cu_seqlens, got {tuple(tensor.shape)}")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"key must have the total length of query with cu_seqlens ({query.shape[2]}), got {key.shape[2]}")
    offsets: list[int] = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {offsets[0]}")
    for at, (before, after) in enumerate(pairwise(offsets)):
        if after < before:
            raise ValueError(f"cu_seqlens must not decrease, got {before} before {after} at {at}")
    if offsets[-1] != query.shape[2]:
        raise ValueError(f"cu_seqlens must end at the total length ({query.shape[2]}), got {offsets[-1]}")
    return offsets


def by_sequence(
    call: Callable[..., tuple[Tensor, LinearState]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Any,
    key_mask: Any,
    log_decay: Any,
    initial_state: Any,
) -> tuple[Tensor, LinearState]:
    """(out, state) from `call(query, key, value, key_mask=, log_decay=, initial_state=)` of each sequence; states along dimension 0."""
    offsets = check_cu_seqlens(cu_seqlens, query, key)
    num_sequences = len(offsets) - 1
    if initial_state is not None:
        for name, tensor in zip(LinearState._fields, initial_state):
            if tensor.shape[:1] != (num_sequences,):
                raise ValueError(
                    f"initial_state.{name} must have one state for each of {num_sequences} sequences, got {tuple(tensor.shape)}"
                )
    outs, states = [], []
    # Without sequences, a call without tokens says what the shapes are.
    for at, (begin, end) in enumerate(pairwise(offsets) if num_sequences else [(0, 0)]):
        rows = slice(begin, end)
        out, state = call(
            query[:, :, rows],
            key[:, :, rows],
            value[:, :, rows],
            key_mask=_cut(key_mask, -1, rows),
            log_decay=_cut(log_decay, -1 if isinstance(log_decay, Tensor) and log_decay.dim() == 3 else -2, rows),
            initial_state=None
            if initial_state is None or not num_sequences
            else LinearState(*(part[at : at + 1] for part in initial_state)),
        )
        outs.append(out)
        states.append(state)
    # Dense in the order of query's dimensions.
    strides = query.stride()
    order = sorted(range(4), key=lambda dim: -strides[dim])
    out = torch.cat([part.permute(order) for part in outs], order.index(2)).permute([order.index(dim) for dim in range(4)])
    return out, LinearState(*(torch.cat(parts)[:num_sequences] for parts in zip(*states)))


def _cut(tensor: Any, dim: int, rows: slice) -> Any:
    """The part of `tensor`, whole where it is broadcast along `dim`."""
    if not isinstance(tensor, Tensor) or tensor.dim() < -dim or tensor.shape[dim] == 1:
        return tensor
    return tensor.narrow(dim, rows.start, rows.stop - rows.start) if dim == -1 else tensor[..., rows, :]
