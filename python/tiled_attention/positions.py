"""Absolute positions: embeddings that are added to tokens, and the slopes of ALiBi."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mask_checks import INTEGER_DTYPES, check_integers, is_readable, number


class SinusoidalEmbedding(nn.Module):
    """Sines and cosines of the position at geometrically spaced frequencies (Vaswani et al., 2017, section 3.5).

        embedding[2 i]     = sin(position / base ** (2 i / dim))
        embedding[2 i + 1] = cos(position / base ** (2 i / dim))

    Angles are float64: at position 10 ** 6 the result still has the accuracy of its dtype. There are no parameters and no buffers.

    Args:
        dim: size of the embedding; if odd, the last element is a sine.
        base: > 0. Default 10000.
        dtype: of the result; None: torch's default dtype when the module is made.

    Raises:
        ValueError, TypeError: naming the argument.
    """

    def __init__(self, dim: int, base: float = 10000.0, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dim = number("dim", dim, 1)
        self.base = check_base(base)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point dtype, got {dtype}")

    def forward(self, positions: Tensor) -> Tensor:
        """The embeddings of positions.

        Args:
            positions: (...,), integer or floating point.

        Returns:
            (..., dim).

        Raises:
            TypeError: naming `positions`.
        """
        angles = angles_of(check_positions("positions", positions), inverse_frequencies(self.dim, self.base, positions.device))
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., : self.dim].to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base:g}, dtype={self.dtype}"


class LearnedEmbedding(nn.Module):
    """One learned vector for each of `max_len` positions (Gehring et al., 2017, section 3.1).

    Args:
        max_len: positions are 0 <= position < max_len.
        dim: size of the embedding.
        device, dtype: of the parameter `weight` (max_len, dim), which starts normal with standard deviation 0.02.

    Raises:
        ValueError, TypeError: naming the argument.
    """

    def __init__(self, max_len: int, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.max_len, self.dim = number("max_len", max_len, 1), number("dim", dim, 1)
        self.weight = nn.Parameter(torch.empty(max_len, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal, standard deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """The embeddings of positions.

        Args:
            positions: (...,), integers in [0, max_len).

        Returns:
            (..., dim).

        Raises:
            TypeError: naming `positions`.
            IndexError: for a position outside, where values can be read (CPU, eager).
        """
        check_integers("positions", positions)
        if is_readable(positions) and positions.numel():
            least, most = (int(end) for end in positions.aminmax())
            if least < 0 or most >= self.max_len:
                raise IndexError(f"positions must be in [0, {self.max_len}), got {least if least < 0 else most}")
        return F.embedding(positions.long(), self.weight)

    def extra_repr(self) -> str:
        return f"{self.max_len}, {self.dim}"


def alibi_slopes(num_heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Slopes of ALiBi, (num_heads,), for `attention(..., alibi_slopes=)` (Press et al., "Train Short, Test Long", 2022, section 3).

    For a power of two: 2 ** (-8 h / num_heads), h = 1 .. num_heads. Otherwise those of the next smaller power of two m, and then every
    second one of those of 2 m, from the first on, as in the authors' code.

    Args:
        num_heads: any number, 0 included.
        device, dtype: of the result. Default float32.

    Returns:
        (num_heads,).

    Raises:
        ValueError, TypeError: naming num_heads.
    """
    num_heads = number("num_heads", num_heads, 0)
    power = 1 << max(num_heads.bit_length() - 1, 0)
    exponents = [8 * h / power for h in range(1, min(power, num_heads) + 1)]
    exponents += [8 * (2 * h + 1) / (2 * power) for h in range(num_heads - power)]
    return torch.tensor([2.0**-exponent for exponent in exponents], device=device, dtype=dtype)


def inverse_frequencies(dim: int, base: float | Tensor, device: torch.device | None) -> Tensor:
    """base ** (-2 i / dim) for i = 0 .. ceil(dim / 2) - 1, float64."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) * (-1 / dim)
    return (base if isinstance(base, Tensor) else torch.full((), base, dtype=torch.float64, device=device)) ** exponents


def angles_of(positions: Tensor, frequencies: Tensor) -> Tensor:
    """(..., number of frequencies), float64: float32 would be off by up to 0.03 at position 10 ** 6."""
    return positions.to(torch.float64)[..., None] * frequencies


def check_positions(name: str, positions: Any) -> Tensor:
    if not isinstance(positions, Tensor):
        raise TypeError(f"{name} must be an integer or float tensor, got {type(positions).__name__}")
    if positions.dtype not in INTEGER_DTYPES and not positions.dtype.is_floating_point:
        raise TypeError(f"{name} must be an integer or float tensor, got {positions.dtype}")
    return positions


def check_base(base: Any) -> float:
    if isinstance(base, (bool, str, Tensor)) or not hasattr(base, "__float__"):
        raise TypeError(f"base must be a number > 0, got {base!r}")
    if not 0 < base < math.inf:
        raise ValueError(f"base must be a number > 0, got {base}")
    return float(base)
