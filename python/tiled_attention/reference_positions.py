"""The definitions of what knows positions, in plain PyTorch; part of `tiled_attention.reference`."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sinusoidal_embedding(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """(..., dim) in float64: sin(position / base ** (2 i / dim)) at 2 i, the cosine at 2 i + 1 (Vaswani et al., 2017, section 3.5)."""
    columns = torch.arange(dim)
    angles = positions.double()[..., None] / base ** ((columns - columns % 2).double() / dim)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos())


def rotary_embedding(
    x: Tensor, positions: Tensor, base: float = 10000.0, interleaved: bool = False, frequencies: Tensor | None = None
) -> Tensor:
    """Pairs of features as complex numbers, times exp(i * position * frequency) (Su et al., 2021, section 3.2.1).

    x (..., seqlen, head_dim); positions broadcastable to (..., seqlen); pairs are (i, i + head_dim / 2), or (2 i, 2 i + 1) interleaved.
    frequencies: (head_dim / 2,); None: base ** (-2 i / head_dim).
    """
    half = x.shape[-1] // 2
    if frequencies is None:
        frequencies = base ** (-torch.arange(half, dtype=torch.float64) / half)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    real, imaginary = (wide[..., ::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    turned = torch.complex(real, imaginary) * torch.exp(1j * positions.double()[..., None] * frequencies)
    parts = (turned.real, turned.imag)
    return (torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)).to(x.dtype)


def relative_bias(row: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
    """The row of `RelativeBias`, (..., num_heads, seqlen_q + seqlen_kv - 1), as a bias (..., num_heads, seqlen_q, seqlen_kv)."""
    distances = torch.arange(seqlen_kv) - torch.arange(seqlen_q)[:, None]
    return row[..., distances + seqlen_q - 1]


def relative_bucket(distance: int, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> int:
    """T5's bucket of one distance j - p, in double precision (Raffel et al., 2020): at the limits of buckets T5 rounds otherwise."""
    first, far = 0, max(-distance, 0)
    if bidirectional:
        num_buckets //= 2
        first, far = num_buckets * (distance > 0), abs(distance)
    exact = num_buckets // 2
    if far < exact:
        return first + far
    grown = math.log(far / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    return first + min(exact + int(grown), num_buckets - 1)
