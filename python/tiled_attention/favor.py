"""Random features of the softmax kernel (FAVOR+): linear attention that estimates softmax attention."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .arguments import real_dtype
from .call import without_autocast

KINDS = ("positive", "hyperbolic", "trigonometric")
# exp(+-64) = 6e27, 2e-28 leave a factor of 5e10 to either end of float32 for sums over keys and products with values.
EXPONENT_LIMIT = {torch.float32: 64.0, torch.float64: 512.0}


class FavorFeatures(nn.Module):
    """Random features phi whose product phi(query) . phi(key) estimates exp(query . key / sqrt(head_dim)) without bias.

    Choromanski et al., "Rethinking Attention with Performers" (ICLR 2021). With x' = x / head_dim ** 0.25 and the m = `num_features`
    rows w of `projection`, each distributed as N(0, I)::

        positive        phi(x) = exp(-|x'|^2 / 2) / sqrt(m)   * [exp(w_1 . x'), ..., exp(w_m . x')]             Lemma 1, section 2.3
        hyperbolic      phi(x) = exp(-|x'|^2 / 2) / sqrt(2 m) * [exp(w_i . x'), ..., exp(-w_i . x'), ...]       Lemma 1, section 2.3
        trigonometric   phi(x) = exp(+|x'|^2 / 2) / sqrt(m)   * [sin(w_i . x'), ..., cos(w_i . x'), ...]        eq. 5, section 2.3

    For independent rows Lemma 2 (section 3) gives the mean squared error relative to the kernel: with z = q' + k', positive
    (exp(|z|^2) - 1) / m, hyperbolic half of it times 1 - exp(-|z|^2); orthogonal rows (section 2.4, Theorem 2) err less. So the error falls
    as 1 / sqrt(m), and grows with exp(|q' + k'|^2 / 2): useful while |query + key|^2 / sqrt(head_dim) is not far above log(m). Kernels
    estimated by trigonometric features can be negative, and so can denominators of attention: the other kinds are the ones to train with.

    `ta.linear_attention(query, key, value, feature_map=features)` estimates softmax attention with the default scale. The estimate of the
    kernel is unbiased, its quotient, attention, is so only in the limit. It calls `map_query` and `map_key`; `forward` is phi itself.

    Stability. A feature is a function of its own token and of `projection`, never of other tokens: nothing looks ahead, padding changes
    nothing, and decoding token by token uses the same features as the whole sequence. What is subtracted to stay in range is:

    - query: the row's own largest exponent (trigonometric: the factor exp(|q'|^2 / 2)), a factor per query, which cancels between numerator
      and denominator. Positive and hyperbolic query features lie in [0, 1], the largest is exactly 1.
    - key and `forward`: nothing, for a factor per key would not cancel. Exponents are clamped to [-64, 64] (float64: [-512, 512]) instead,
      with gradient 0 beyond. exp(w . x' - |x'|^2 / 2) overflows float32 above 88 and loses precision below -87. For a row w ~ N(0, I) that
      does not depend on x, the exponent exceeds 64 with a probability below 1e-29 at any |x'| (w . x' > 64 + |x'|^2 / 2 needs a normal
      variable above sqrt(128)); it falls below -64 from |x'| about 11 on, where the error exp(|z|^2 / 2) is beyond any m. Trigonometric:
      exp(|k'|^2 / 2) is clamped at exp(64), keys of |k'| > 11.3 then weigh less than they should.

    So for finite input every feature is finite, positive and hyperbolic key features are > 0 and denominators of attention too: out is
    always a mean of the values that are seen, and one visible key gives its value, up to rounding.

    Nothing redraws by itself, in training or in eval: the features are frozen until `redraw()`. `projection` is a buffer from the start,
    saved in the state_dict and moved by `.to()`; rows are drawn on the CPU in float64 and then rounded.

    Args:
        head_dim: features of query and key.
        num_features: m, the number of projections. phi has `out_features` = m features (positive) or 2 m (hyperbolic, trigonometric).
        kind: "positive", "hyperbolic" or "trigonometric". Default "positive".
        orthogonal: rows are orthogonal within blocks of `head_dim` (QR of Gaussian blocks, with independent norms distributed as those of
            Gaussian rows), else independent. Default True.
        seed: of the module's own generator, whose numbers are others than those after torch.manual_seed(seed), for the error bounds do not
            hold for inputs drawn with the numbers of the projection; None: draws from torch's generator. Default None.
        device, dtype: of `projection`.

    Raises:
        ValueError: for sizes below 1 or another kind, naming the argument.
        TypeError: for a seed that is no integer.
    """

    projection: Tensor  # (num_features, head_dim)

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        kind: str = "positive",
        orthogonal: bool = True,
        seed: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("head_dim", head_dim), ("num_features", num_features)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}: expected a positive integer, got {size!r}")
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise TypeError(f"seed: expected an integer or None, got {seed!r}")
        self.head_dim = head_dim
        self.num_features = num_features
        self.kind = kind
        self.orthogonal = bool(orthogonal)
        self.seed = seed
        self._generator = None if seed is None else _generator(seed)
        self.register_buffer("projection", torch.empty(num_features, head_dim, device=device, dtype=dtype))
        self.redraw()

    @property
    def out_features(self) -> int:
        """Features of phi: `num_features`, or twice that."""
        return self.num_features * (1 if self.kind == "positive" else 2)

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw `projection` anew, in place: from the module's own generator, which goes on from its seed, or from torch's without a seed.

        States of `ta.linear_attention` made with the old projection do not go with the new one.
        """
        self.projection.copy_(_draw(self.num_features, self.head_dim, self.orthogonal, self._generator))

    def forward(self, x: Tensor) -> Tensor:
        """phi(x): the features whose products estimate the kernel.

        Args:
            x: (..., head_dim), float32, float64, bfloat16 or float16.

        Returns:
            (..., out_features), float64 for float64 and float32 otherwise (the range of float16 does not hold them).

        Raises:
            ValueError, TypeError: naming the argument.
        """
        return self._features("x", x)

    def map_key(self, key: Tensor) -> Tensor:
        """phi(key): the same as `forward`.

        Args:
            key: as x of `forward`.

        Returns:
            As `forward` does.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        return self._features("key", key)

    def map_query(self, query: Tensor) -> Tensor:
        """phi(query) times a positive factor of each row's own, which cancels in normalised attention.

        Without normalisation use `forward` on both sides: `feature_map=(features.forward, features.forward)`.

        Args:
            query: as x of `forward`.

        Returns:
            Shape and dtype as of `forward`.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        projected, _ = self._project("query", query)
        if self.kind == "trigonometric":
            return torch.cat([projected.sin(), projected.cos()], -1)
        return (projected - projected.amax(-1, keepdim=True)).exp()

    def _features(self, name: str, x: Tensor) -> Tensor:
        projected, half_square = self._project(name, x)
        limit = EXPONENT_LIMIT[projected.dtype]
        if self.kind == "trigonometric":
            factor = half_square.clamp(max=limit).exp() * self.num_features**-0.5
            return torch.cat([projected.sin(), projected.cos()], -1) * factor
        return (projected - half_square).clamp(-limit, limit).exp() * self.out_features**-0.5

    def _project(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """w . x' (..., num_features; positive and negative side by side for the hyperbolic kind) and |x'|^2 / 2 (..., 1)."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point tensor, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}")
        if x.dim() == 0 or x.shape[-1] != self.head_dim:
            raise ValueError(f"{name}: expected shape (..., {self.head_dim}), got {tuple(x.shape)}")
        real = real_dtype(x.dtype)
        x = x.to(real)
        with without_autocast(x):
            projected = F.linear(x, self.projection.to(real)) * self.head_dim**-0.25
        half_square = x.square().sum(-1, keepdim=True) * (0.5 * self.head_dim**-0.5)
        if self.kind == "hyperbolic":
            projected = torch.cat([projected, -projected], -1)
        return projected, half_square

    def extra_repr(self) -> str:
        return f"{self.head_dim}, {self.num_features}, kind={self.kind!r}, orthogonal={self.orthogonal}, seed={self.seed}"


def _generator(seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"FavorFeatures {seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _draw(num_features: int, head_dim: int, orthogonal: bool, generator: torch.Generator | None) -> Tensor:
    """(num_features, head_dim) in float64: each row N(0, I), orthogonal within blocks of head_dim rows if wanted."""

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    rows = gaussian(num_features, head_dim)
    if not orthogonal:
        return rows
    directions, triangles = torch.linalg.qr(gaussian(-(-num_features // head_dim), head_dim, head_dim))
    directions = directions * triangles.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]  # uniform over rotations, whatever QR's signs
    return directions.flatten(0, 1)[:num_features] * rows.norm(dim=-1, keepdim=True)
