"""Linear attention as a module: projections, heads, feature map, and the state as decode cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import real_dtype
from .favor import FavorFeatures
from .linear_attention import LinearState, linear_attention, linear_attention_step

FEATURE_MAPS = ("elu", "relu", "exp", "identity")


class LinearAttention(nn.Module):
    """Self-attention with a kernel of features in the place of the softmax (Katharopoulos et al., "Transformers are RNNs", ICML 2020).

    `q_proj`, `k_proj`, `v_proj` and `out_proj` are `nn.Linear` modules, called as such: hooks and adapters act. Their weights start
    Xavier-uniform, their biases 0. Between them stands `ta.linear_attention`, normalised, with heads of `embed_dim // num_heads` features.
    Time is linear in the sequence length. With `causal` the state is all that a later call needs to know of the past: its size does not
    grow, and any cut of a sequence into calls gives what one call gives.

    Args:
        embed_dim: features of the input and of the output.
        num_heads: heads of `head_dim = embed_dim // num_heads` features.
        feature_map: "elu" (elu(x) + 1), "relu", "exp", "identity"; or a callable or module on (batch, num_heads, seqlen, head_dim), for all
            heads the same (`ta.FavorFeatures(head_dim, ...)`); or a pair of these for query and key. A module becomes the submodule
            `feature_map`, those of a pair `query_map` and `key_map`. Default "elu".
        causal: whether a token sees no later one. Default True.
        bias: whether the projections have biases. Default True.
        device, dtype: of the parameters.

    Raises:
        ValueError: for sizes that are not positive, an `embed_dim` that `num_heads` does not divide, a feature map that is unknown or made
            for another head_dim.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: Any = "elu",
        causal: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim, num_heads: expected positive numbers, the first a multiple of the second, got {embed_dim} and {num_heads}"
            )
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.causal = bool(causal)
        self.is_pair = isinstance(feature_map, (tuple, list))
        if self.is_pair:
            if len(feature_map) != 2:
                raise ValueError(f"feature_map: expected one map or a pair of maps, got {len(feature_map)}")
            self.query_map, self.key_map = (self._checked(one) for one in feature_map)
        else:
            self.feature_map = self._checked(feature_map)
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, embed_dim, **options)
        self.k_proj = nn.Linear(embed_dim, embed_dim, **options)
        self.v_proj = nn.Linear(embed_dim, embed_dim, **options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **options)
        self.reset_parameters()

    def _checked(self, feature_map: Any) -> str | Callable[[Tensor], Tensor]:
        if not (callable(feature_map) or feature_map in FEATURE_MAPS):
            raise ValueError(f"feature_map: expected one of {', '.join(FEATURE_MAPS)}, a callable, or a pair of these, got {feature_map!r}")
        if isinstance(feature_map, FavorFeatures) and feature_map.head_dim != self.head_dim:
            raise ValueError(f"feature_map: expected features for head_dim {self.head_dim}, got {feature_map.head_dim}")
        return feature_map

    def reset_parameters(self) -> None:
        """Weights Xavier-uniform, biases 0."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self, x: Tensor, *, key_mask: Tensor | None = None, state: LinearState | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, LinearState]:
        """Attend.

        Args:
            x: (batch, seqlen, embed_dim), in the dtype of the parameters unless autocast is on. With a state: the tokens that follow it.
            key_mask: bool (batch, seqlen), True = counts. No token sees a hidden one, itself included. Default None: all count.
            state: of an earlier call; only with `causal`. It is not changed. Default None: the sequence begins here.
            return_state: also return the state after the last token. Default False.

        Returns:
            out (batch, seqlen, embed_dim); with `return_state` (out, state), a `ta.LinearState` of kv (batch, num_heads, features,
            head_dim) and k_sum (batch, num_heads, features), float64 for float64 input and float32 otherwise. A query that sees no key
            adds 0 before `out_proj`.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        self._check(x, key_mask, state)
        query, key, value = (
            projection(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        options: dict[str, Any] = {
            "feature_map": (self.query_map, self.key_map) if self.is_pair else self.feature_map,
            "key_mask": key_mask,
        }
        last: LinearState | None = None
        if state is not None and x.shape[1] == 1:
            out, last = linear_attention_step(query, key, value, LinearState(*state), **options)
        else:
            options |= {"causal": self.causal, "initial_state": None if state is None else LinearState(*state)}
            if return_state:
                out, last = linear_attention(query, key, value, return_state=True, **options)
            else:
                out = linear_attention(query, key, value, **options)
        out = self.out_proj(out.transpose(1, 2).flatten(-2))
        return out if last is None or not return_state else (out, last)

    def _check(self, x: Tensor, key_mask: Tensor | None, state: LinearState | None) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"x: expected a floating-point tensor, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}")
        if x.dim() != 3 or x.shape[-1] != self.embed_dim:
            raise ValueError(f"x: expected shape (batch, seqlen, {self.embed_dim}), got {tuple(x.shape)}")
        if key_mask is not None:
            if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
                got = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
                raise TypeError(f"key_mask: expected a bool tensor (True = counts), got {got}")
            if key_mask.shape != x.shape[:-1]:
                raise ValueError(f"key_mask: expected shape {tuple(x.shape[:-1])}, got {tuple(key_mask.shape)}")
        if state is not None:
            self._check_state(x, state)

    def _check_state(self, x: Tensor, state: LinearState) -> None:
        if not self.causal:
            raise ValueError("state: expected None with causal=False, where every token sees all others")
        if not isinstance(state, tuple) or len(state) != 2 or not all(isinstance(part, Tensor) for part in state):
            raise TypeError(f"state: expected a LinearState (kv, k_sum), got {type(state).__name__}")
        kv, k_sum = state
        features = self._num_features()
        if (
            kv.dim() != 4
            or kv.shape[:2] != (x.shape[0], self.num_heads)
            or kv.shape[3] != self.head_dim
            or features not in (None, kv.shape[2])
            or k_sum.shape != kv.shape[:3]
        ):
            lead = f"{x.shape[0]}, {self.num_heads}, {features or 'features'}"
            raise ValueError(
                f"state: expected kv ({lead}, {self.head_dim}) and k_sum ({lead}), got {tuple(kv.shape)} and {tuple(k_sum.shape)}"
            )
        real = real_dtype(x.dtype)
        for part in state:
            if part.dtype != real or part.device != x.device:
                raise ValueError(f"state: expected {real} on {x.device}, got {part.dtype} on {part.device}")

    def _num_features(self) -> int | None:
        """Features of a mapped key, where that is known without a call."""
        key_map = self.key_map if self.is_pair else self.feature_map
        if isinstance(key_map, FavorFeatures):
            return key_map.out_features
        return self.head_dim if isinstance(key_map, str) else None

    def extra_repr(self) -> str:
        maps = (self.query_map, self.key_map) if self.is_pair else (self.feature_map,)
        named = ", ".join(repr(one) for one in maps if not isinstance(one, nn.Module))
        return f"{self.embed_dim}, {self.num_heads}, causal={self.causal}" + (f", feature_map={named}" if named else "")
