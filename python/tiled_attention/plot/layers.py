"""What is drawn: weights in any of the accepted forms, as layers whose rows are read when needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..recorded import RecordedAttention

# Rows of one read where a map is too large to hold: about 64 MB of float32 for all heads.
_READ_BYTES = 64 << 20


@dataclass(frozen=True)
class Layer:
    """The maps of one layer: len(heads) x (seqlen_q, seqlen_kv)."""

    name: str
    heads: tuple[int, ...]  # their numbers in the model
    seqlen_q: int
    seqlen_kv: int
    rows: Callable[[int, int], np.ndarray]  # (begin, end) -> (heads, end - begin, seqlen_kv), float32
    means: Callable[[int], np.ndarray]  # blocks -> (heads, <= blocks, <= blocks), means over tiles of equal size

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    def weights(self) -> np.ndarray:
        """(heads, seqlen_q, seqlen_kv)."""
        return self.rows(0, self.seqlen_q)

    def pieces(self) -> list[tuple[int, int]]:
        """(begin, end) of the rows, in reads of bounded size."""
        step = max(1, _READ_BYTES // (4 * max(1, self.num_heads * self.seqlen_kv)))
        return [(begin, min(begin + step, self.seqlen_q)) for begin in range(0, self.seqlen_q, step)]


def block_size(length: int, blocks: int) -> int:
    """Tokens of one block where a length is cut into at most `blocks`."""
    return -(-length // blocks)


def block_means(maps: np.ndarray, blocks: int) -> np.ndarray:
    """(..., L, S) -> (..., ceil(L / b), ceil(S / c)) with b, c the block sizes: means, of fewer pairs at the ends."""
    for axis in (-2, -1):
        length = maps.shape[axis]
        size = block_size(length, blocks)
        starts = np.arange(0, length, size)
        sums = np.add.reduceat(maps, starts, axis=axis, dtype=np.float32)
        counts = np.minimum(size, length - starts).astype(np.float32)
        maps = sums / (counts[:, None] if axis == -2 else counts)
    return maps


def _of_array(name: str, array: np.ndarray, heads: tuple[int, ...] | None = None) -> Layer:
    """(heads, L, S)."""
    numbers = tuple(range(len(array))) if heads is None else heads
    rows = lambda begin, end: array[:, begin:end]
    return Layer(name, numbers, array.shape[1], array.shape[2], rows, lambda blocks: block_means(array, blocks))


def held(layer: Layer) -> Layer:
    """`layer` with its weights in memory."""
    return _of_array(layer.name, layer.weights(), layer.heads)


def _of_recorded(recorded: RecordedAttention) -> Layer:
    """Item 0 of the batch."""
    if recorded.rows is not None:
        raise ValueError(f"weights: {recorded.name!r} was recorded with rows=, which keeps those rows only: record it without rows=")

    def rows(begin: int, end: int) -> np.ndarray:
        wanted = None if (begin, end) == (0, recorded.seqlen_q) else range(begin, end)
        return np.asarray(recorded.weights(rows=wanted)[0].float().cpu().numpy())

    def means(blocks: int) -> np.ndarray:
        return np.asarray(recorded.overview(blocks)[0].float().cpu().numpy())

    return Layer(recorded.name, recorded.heads, recorded.seqlen_q, recorded.seqlen_kv, rows, means)


def _is_recording(weights: Any) -> bool:
    return isinstance(weights, Sequence) and len(weights) > 0 and all(isinstance(part, RecordedAttention) for part in weights)


def _tensor_layers(weights: Any) -> list[Layer]:
    if isinstance(weights, (list, tuple)) and weights and all(isinstance(part, (Tensor, np.ndarray)) for part in weights):
        parts = [torch.as_tensor(part) for part in weights]
        if not all(part.dim() == 3 or (part.dim() == 4 and len(part) > 0) for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise ValueError(f"weights must hold tensors ([batch,] num_heads, seqlen_q, seqlen_kv), one a layer, got {shapes}")
        parts = [part[0] if part.dim() == 4 else part for part in parts]
    elif isinstance(weights, (Tensor, np.ndarray)):
        tensor = torch.as_tensor(weights)
        if tensor.dim() not in (2, 3, 4):
            raise ValueError(
                "weights must be (seqlen_q, seqlen_kv), (num_heads, seqlen_q, seqlen_kv) or (num_layers, num_heads, seqlen_q, seqlen_kv), "
                f"got shape {tuple(tensor.shape)}"
            )
        parts = list(tensor[(None,) * (4 - tensor.dim())])
    else:
        raise TypeError(f"weights must be a tensor, a sequence of tensors or a recording, got {type(weights).__name__}")
    for part in parts:
        if not (part.is_floating_point() or part.dtype == torch.bool) or part.is_complex():
            raise TypeError(f"weights must be floating point, got {part.dtype}")
        if part.numel() and not (bool(torch.isfinite(part).all()) and float(part.amin()) >= 0):
            raise ValueError("weights must be finite and at least 0, as a softmax gives them; scores, infinities or NaN came")
    named = len(parts) > 1 or not hasattr(weights, "ndim") or weights.ndim == 4
    arrays = [np.ascontiguousarray(part.detach().to("cpu", torch.float32).numpy()) for part in parts]
    return [_of_array(f"layer {index}" if named else "", array) for index, array in enumerate(arrays)]


def layers_of(weights: Any) -> list[Layer]:
    """The layers of `weights`; ValueError or TypeError naming it where it has none of the forms."""
    if isinstance(weights, RecordedAttention):
        weights = [weights]
    if isinstance(weights, Sequence) and len(weights) == 0:
        raise ValueError(f"weights must hold at least one layer, got none in {type(weights).__name__}")
    found = [_of_recorded(part) for part in weights] if _is_recording(weights) else _tensor_layers(weights)
    for layer in found:
        if min(layer.num_heads, layer.seqlen_q, layer.seqlen_kv) < 1:
            shape = (layer.num_heads, layer.seqlen_q, layer.seqlen_kv)
            raise ValueError(f"weights must have a head, a query and a key at least, got {shape} (num_heads, seqlen_q, seqlen_kv)")
    return found


def labels_of(
    layers: Sequence[Layer], tokens: Sequence[str] | None, key_tokens: Sequence[str] | None
) -> tuple[list[str] | None, list[str] | None]:
    """(labels of the queries, of the keys), checked against the lengths; None where none were given.

    `tokens` alone names the keys too where the lengths agree.
    """
    seqlen_q, seqlen_kv = layers[0].seqlen_q, layers[0].seqlen_kv
    if key_tokens is None and seqlen_q == seqlen_kv:
        key_tokens = tokens
    found: list[list[str] | None] = []
    for name, labels, length in (("tokens", tokens, seqlen_q), ("key_tokens", key_tokens, seqlen_kv)):
        if labels is None:
            found.append(None)
            continue
        if isinstance(labels, (str, bytes)):
            raise TypeError(f"{name} must be a sequence of strings, one a token, got one string")
        if len(labels) != length:
            raise ValueError(f"{name} must have {length} entries, one a {'query' if name == 'tokens' else 'key'}, got {len(labels)}")
        found.append([str(label) for label in labels])
    return found[0], found[1]


def same_lengths(layers: Sequence[Layer]) -> None:
    """ValueError where layers have different lengths."""
    first = layers[0]
    for layer in layers:
        if (layer.seqlen_q, layer.seqlen_kv) != (first.seqlen_q, first.seqlen_kv):
            raise ValueError(
                f"weights must have the same lengths in every layer, got ({first.seqlen_q}, {first.seqlen_kv}) in {first.name!r} and "
                f"({layer.seqlen_q}, {layer.seqlen_kv}) in {layer.name!r}: give these layers one picture each"
            )


def is_causal(maps: np.ndarray) -> bool:
    """Whether (..., L, S) has weights below its bottom-right diagonal and exact zeros above it."""
    seqlen_q, seqlen_kv = maps.shape[-2:]
    if seqlen_q < 2 or seqlen_kv < 2:
        return False
    above = np.triu(np.ones((seqlen_q, seqlen_kv), bool), k=seqlen_kv - seqlen_q + 1)
    return bool(above.any()) and not maps[..., above].any() and bool(maps.any())
