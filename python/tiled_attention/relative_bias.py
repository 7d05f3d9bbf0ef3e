"""Biases of relative positions: one learned value per head and per (bucket of) distance."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mask_checks import check_integers, number
from .mask_rules import UNBOUNDED


class RelativeBias(nn.Module):
    """A learned bias b[head, distance], distance = j - p for key j and a query at position p, held as one row per head.

    With buckets (T5: Raffel et al., "Exploring the Limits of Transfer Learning", 2020, section 2.1) the smaller half of the distances have
    one bucket each, further ones share logarithmically growing buckets, and everything from max_distance on has the last. Their limits
    are those of the single-precision formula that T5 models were trained with. `bidirectional` halves the buckets over the two sides;
    otherwise keys after the query share the bucket of distance 0. `weight` (num_buckets, num_heads) is T5's
    `relative_attention_bias.weight`, and loads from the state_dict of that module.

    Without (num_buckets=None) each distance has its own value, those beyond max_distance share the one of max_distance (clipping, Shaw et
    al., "Self-Attention with Relative Position Representations", 2018, section 3.2). weight is (2 * max_distance + 1, num_heads), from
    -max_distance on; not bidirectional: (max_distance + 1, num_heads), from distance 0 back.

    `attention(..., bias=RelativeBias(...))` reads the row inside the kernel: no matrix of seqlen_q x seqlen_kv exists, forward or backward.

    Args:
        num_heads: of the query.
        max_distance: see above. Default 128.
        num_buckets: even if bidirectional, with fewer exact distances than max_distance; None: no buckets. Default 32.
        bidirectional: whether keys after the query have values of their own. Default True.
        device, dtype: of `weight`, which starts normal with standard deviation 0.02.

    Raises:
        ValueError, TypeError: naming the argument.
    """

    def __init__(
        self,
        num_heads: int,
        max_distance: int = 128,
        *,
        num_buckets: int | None = 32,
        bidirectional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.max_distance = number("num_heads", num_heads, 1), number("max_distance", max_distance, 1)
        self.bidirectional = bool(bidirectional)
        self.num_buckets = None if num_buckets is None else number("num_buckets", num_buckets, 4 if bidirectional else 2)
        if self.num_buckets is None:
            num_values = 2 * self.max_distance + 1 if self.bidirectional else self.max_distance + 1
        else:
            if self.bidirectional and self.num_buckets % 2:
                raise ValueError(f"num_buckets must be even with bidirectional=True, got {num_buckets}")
            num_values = self.num_buckets
        self._limits = self._bucket_limits()
        self.weight = nn.Parameter(torch.empty(num_values, self.num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal, standard deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, seqlen_q: int, seqlen_kv: int, *, query_offset: int | Tensor | None = None) -> Tensor:
        """The values of all distances of a call, in memory linear in its lengths.

        Args:
            seqlen_q, seqlen_kv: of the call.
            query_offset: as in `attention`: where query row 0 stands; a number, or an integer tensor (batch...,). None: seqlen_kv -
                seqlen_q.

        Returns:
            row (num_heads, seqlen_q + seqlen_kv - 1), or (batch..., num_heads, seqlen_q + seqlen_kv - 1); empty where either length is 0.
            The bias of query i and key j is row[..., j - i + seqlen_q - 1]. Differentiable in `weight`.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        for name, size in (("seqlen_q", seqlen_q), ("seqlen_kv", seqlen_kv)):
            number(name, size, 0)
        size = seqlen_q + seqlen_kv - 1 if seqlen_q and seqlen_kv else 0
        distances = torch.arange(size, device=self.weight.device) - (seqlen_q - 1)  # j - i
        if query_offset is None:
            query_offset = seqlen_kv - seqlen_q
        if isinstance(query_offset, Tensor):
            check_integers("query_offset", query_offset, self.weight.device)
            distances = distances - query_offset.long()[..., None]
        else:
            distances = distances - number("query_offset", query_offset, -UNBOUNDED + 1)
        return F.embedding(self.index(distances), self.weight).movedim(-1, -2)

    def for_call(self, query: Tensor, key: Tensor, query_offset: int | Tensor | None) -> Tensor:
        """The row as `attention` takes a bias by distance: (..., num_heads, 1, seqlen_q + seqlen_kv - 1)."""
        if query.shape[-3] != self.num_heads:
            raise ValueError(f"bias must have a value per query head ({query.shape[-3]}), got RelativeBias of {self.num_heads}")
        if query.shape[-2] == 0 or key.shape[-2] == 0:
            return self.weight[0, :1].expand(key.shape[-2])  # of no pair
        return self(query.shape[-2], key.shape[-2], query_offset=query_offset)[..., None, :]

    def index(self, distances: Tensor) -> Tensor:
        """Which rows of `weight` hold the values of distances.

        Args:
            distances: j - p, an integer tensor of any shape.

        Returns:
            int64, of the same shape.

        Raises:
            TypeError: naming `distances`.
        """
        check_integers("distances", distances)
        if self.num_buckets is None:
            least = -self.max_distance
            return distances.clamp(least, self.max_distance) - least if self.bidirectional else (-distances).clamp(0, self.max_distance)
        limits = torch.tensor(self._limits, device=distances.device)
        if not self.bidirectional:
            return torch.bucketize((-distances).clamp(min=0), limits, right=True)
        return torch.bucketize(distances.abs(), limits, right=True) + (distances > 0) * (self.num_buckets // 2)

    def _bucket_limits(self) -> list[int]:
        """The least distance of every bucket of one side but the first."""
        if self.num_buckets is None:
            return []
        buckets = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        exact = buckets // 2
        if self.max_distance <= exact:
            raise ValueError(
                f"max_distance must be more than the {exact} distances that have buckets of their own, got {self.max_distance}"
            )
        far = torch.arange(exact, self.max_distance + 1, device="cpu")
        share = torch.log(far.float() / exact) / math.log(self.max_distance / exact)
        bucket = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
        least = exact + torch.searchsorted(bucket, torch.arange(exact, buckets, device="cpu"))
        return [*range(1, exact), *least.tolist()]

    def extra_repr(self) -> str:
        return f"{self.num_heads}, {self.max_distance}, num_buckets={self.num_buckets}, bidirectional={self.bidirectional}"
