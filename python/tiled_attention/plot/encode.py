"""What a page holds of the weights: 8-bit codes, deflated, within a budget of bytes, and the error that this makes.

A weight w of a row with the largest weight m has the code round(levels * (w / m) ** power) and reads back as
m * (code / levels) ** (1 / power), so a row's largest weight is exact. Where all weights fit with at least 11 levels, all are kept; of
more, each row's largest ones and means over blocks.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .layers import Layer, held, is_causal

# (power, levels), from the finest. The square root keeps small weights apart; the linear scale has the least error for its bytes.
LADDER = ((0.5, 255), (0.5, 127), *((1.0, levels) for levels in (127, 95, 63, 47, 39, 31, 27, 23, 21, 19, 17, 15, 13, 11)))
_BASE64 = 4 / 3
BLOB_BYTES = 64  # of the element around a blob
_LARGEST = 32  # most weights kept of a row where not all are
_SAMPLED_ROWS = 64  # of each map, to estimate sizes
OVERVIEW_BLOCKS, LONG_OVERVIEW_BLOCKS = 64, 128  # a side, where all weights are kept and where not


@dataclass
class Encoded:
    """`header` describes the blobs (base64 of raw deflate); see `decode.js` for the reader."""

    header: dict[str, Any]
    blobs: dict[str, str]  # name -> text

    def size(self) -> int:
        """Bytes in the page."""
        return sum(len(text) + BLOB_BYTES for text in self.blobs.values())


def codes_of(weights: np.ndarray, power: float, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes uint8 (..., rows, keys), largest weight of each row float32 (..., rows, 1))."""
    largest = weights.max(-1, keepdims=True)
    share = weights / np.where(largest > 0, largest, 1)
    if power != 1:
        share **= np.float32(power)
    share *= levels
    return np.rint(share, out=share).astype(np.uint8), largest


def values_of(codes: np.ndarray, largest: np.ndarray, power: float, levels: int) -> np.ndarray:
    """What the codes read back as."""
    table = (np.arange(levels + 1) / levels) ** (1 / power)
    return np.asarray(table.astype(np.float32)[codes] * largest)


def deflate(data: bytes) -> bytes:
    """Raw deflate: Huffman codes alone, which quantised weights call for (matches would only hide their distribution), or with runs."""
    found = []
    for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE):
        packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
        found.append(packer.compress(data) + packer.flush())
    return min(found, key=len)


def _text(data: bytes) -> str:
    return base64.b64encode(deflate(data)).decode("ascii")


def _kept_triangle(seqlen_q: int, seqlen_kv: int) -> np.ndarray:
    """bool (seqlen_q, seqlen_kv): at and below the bottom-right diagonal."""
    return np.tri(seqlen_q, seqlen_kv, seqlen_kv - seqlen_q, dtype=bool)


def _bits(codes: np.ndarray) -> float:
    """Entropy in bits a code, with what Huffman codes and their tables add."""
    counts = np.bincount(codes.ravel(), minlength=1).astype(np.float64)
    share = counts[counts > 0] / counts.sum()
    return max(1.03 * float(-(share * np.log2(share)).sum()), 1.0)


def _estimated_bytes(samples: Sequence[np.ndarray], num_maps: int, pairs: int, power: float, levels: int) -> float:
    """Of all maps in base64; samples (heads, rows, keys), one a layer."""
    bits = [_bits(head) for sample in samples for head in codes_of(sample, power, levels)[0]]
    return _BASE64 * num_maps * pairs * float(np.mean(bits)) / 8


def _sampled(layer: Layer) -> np.ndarray:
    rows = np.unique(np.linspace(0, layer.seqlen_q - 1, _SAMPLED_ROWS).round().astype(int))
    return np.concatenate([layer.rows(int(row), int(row) + 1) for row in rows], 1)


class _Error:
    """Largest and mean distance between weights and what the page shows of them."""

    def __init__(self) -> None:
        self.largest = self.largest_of_row = self.sum = 0.0
        self.count = 0

    def add(self, weights: np.ndarray, shown: np.ndarray, largest: np.ndarray) -> None:
        distance = np.abs(weights - shown)
        self.largest = max(self.largest, float(distance.max()))
        self.sum += float(distance.sum(dtype=np.float64))
        self.count += distance.size
        rows = distance.max(-1, keepdims=True)
        self.largest_of_row = max(self.largest_of_row, float((rows / np.where(largest > 0, largest, 1)).max()))

    def header(self) -> dict[str, float]:
        return {"largest": self.largest, "largest_of_row": self.largest_of_row, "mean": self.sum / max(self.count, 1)}


def _encode_all(layers: Sequence[Layer], causal: bool, power: float, levels: int, budget: float) -> Encoded | None:
    """Every weight; None where that takes more than the budget."""
    kept = _kept_triangle(layers[0].seqlen_q, layers[0].seqlen_kv) if causal else None
    encoded, error, spent = Encoded({}, {}), _Error(), 0
    for index, layer in enumerate(layers):
        for head, weights in enumerate(layer.weights()):
            codes, largest = codes_of(weights, power, levels)
            error.add(weights, values_of(codes, largest, power, levels), largest)
            body = codes if kept is None else codes[kept]
            text = _text(largest.astype("<f4").tobytes() + body.tobytes())
            encoded.blobs[f"map-{index}-{head}"] = text
            spent += len(text) + BLOB_BYTES
            if spent > budget:
                return None
    encoded.header = {"kept": "all", "power": power, "levels": levels, "causal": causal, "error": error.header()}
    return encoded


def _encode_largest(layers: Sequence[Layer], count: int) -> Encoded:
    """The `count` largest weights of each row: codes and positions, the positions' bytes in planes, low ones first."""
    seqlen_kv = layers[0].seqlen_kv
    power, levels = LADDER[0]
    planes, diagonal = _planes(seqlen_kv), seqlen_kv - layers[0].seqlen_q
    header = {"kept": "largest", "power": power, "levels": levels, "causal": False, "count": count, "planes": planes}
    encoded, error = Encoded(header, {}), _Error()
    if count == 0:
        return encoded
    shares, causal = [], min(layers[0].seqlen_q, seqlen_kv) > 1
    for index, layer in enumerate(layers):
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for begin, end in layer.pieces():
            weights = layer.rows(begin, end)
            causal = causal and not any(weights[:, i, max(begin + i + diagonal + 1, 0) :].any() for i in range(end - begin))
            places = np.sort(np.argpartition(weights, seqlen_kv - count, axis=-1)[..., seqlen_kv - count :], -1)
            picked = np.take_along_axis(weights, places, -1)
            codes, largest = codes_of(picked, power, levels)
            error.add(picked, values_of(codes, largest, power, levels), largest)
            shares.append((picked.sum(-1) / np.maximum(weights.sum(-1), np.float32(1e-30))).ravel())
            parts.append((codes, largest, places))
        codes, largest, places = (np.concatenate(part, 1) for part in zip(*parts))
        for head in range(layer.num_heads):
            planar = [((places[head] >> (8 * plane)) & 255).astype(np.uint8) for plane in range(planes)]
            data = largest[head].astype("<f4").tobytes() + codes[head].tobytes() + b"".join(plane.tobytes() for plane in planar)
            encoded.blobs[f"map-{index}-{head}"] = _text(data)
    encoded.header |= {"causal": causal, "error": error.header(), "share": float(np.concatenate(shares).mean())}
    return encoded


def _planes(seqlen_kv: int) -> int:
    """Bytes of a position."""
    return max(1, -(-(seqlen_kv - 1).bit_length() // 8))


def _overviews(layers: Sequence[Layer], blocks: int) -> Encoded:
    """Means over blocks, all heads of a layer in one blob; the maps' largest means in the header."""
    encoded = Encoded({"layers": []}, {})
    for index, layer in enumerate(layers):
        means = layer.means(blocks)
        codes, largest = codes_of(means.reshape(layer.num_heads, -1), *LADDER[0])
        encoded.blobs[f"overview-{index}"] = _text(codes.tobytes())
        largest_mean = [float(f"{value:.6g}") for value in largest[:, 0]]
        encoded.header["layers"].append(
            {"name": layer.name, "heads": layer.heads, "blocks": list(means.shape[1:]), "largest_mean": largest_mean}
        )
    return encoded


def encode(layers: Sequence[Layer], budget: float) -> Encoded:
    """`layers` (of equal lengths) within `budget` bytes, but for the overviews: these are always there."""
    first = layers[0]
    num_maps = sum(layer.num_heads for layer in layers)
    encoded = None
    if _BASE64 * num_maps * first.seqlen_q * first.seqlen_kv / 8 / 2 <= budget:  # a bit for each weight of a triangle
        layers = [held(layer) for layer in layers]
        overview = _overviews(layers, OVERVIEW_BLOCKS)
        left = budget - overview.size()
        causal = all(is_causal(layer.weights()) for layer in layers)
        pairs = int(_kept_triangle(first.seqlen_q, first.seqlen_kv).sum()) if causal else first.seqlen_q * first.seqlen_kv
        fixed = num_maps * (_BASE64 * 4 * first.seqlen_q + BLOB_BYTES)
        samples = [_sampled(layer) for layer in layers]
        for power, levels in LADDER:
            if fixed + _estimated_bytes(samples, num_maps, pairs, power, levels) <= left:
                encoded = _encode_all(layers, causal, power, levels, left)
                if encoded is not None:
                    break
    if encoded is None:
        overview = _overviews(layers, LONG_OVERVIEW_BLOCKS)
        left = budget - overview.size() - num_maps * BLOB_BYTES
        # A byte for the code, one for the lowest plane; the other planes are ascending runs, which deflate well.
        each = 2 + 0.6 * (_planes(first.seqlen_kv) - 1)
        count = int(min(_LARGEST, first.seqlen_kv, (left / _BASE64 / (num_maps * first.seqlen_q) - 4) / each))
        encoded = _encode_largest(layers, max(count, 0))
        while encoded.size() > left and count > 0:
            count = min(count - 1, int(count * left / encoded.size()))
            encoded = _encode_largest(layers, count)
    header = encoded.header | overview.header | {"seqlen_q": first.seqlen_q, "seqlen_kv": first.seqlen_kv}
    return Encoded(header, overview.blobs | encoded.blobs)
