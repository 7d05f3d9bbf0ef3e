"""Additive attention as a module: the alignment model of a recurrent decoder, and its use with several heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .additive_attention import additive_attention, additive_attention_with_weights
from .call import check_number
from .mask_checks import number
from .masks import Mask


class AdditiveAttention(nn.Module):
    """score = v . tanh(W query + U key + b), softmax over the keys, mean of the values (Bahdanau, Cho and Bengio, 2015, appendix A.1.2).

    `query_proj` (W), `key_proj` (U, with the one bias b that the sum can use) are `nn.Linear` modules, `score_weight` (v) is a parameter
    (num_heads, hidden_dim // num_heads). Values are not projected. Weights start Xavier-uniform, the bias 0.

    The projection of the keys does not change while a decoder runs: `project_keys` makes it once, and `forward(..., projected_key=...)`
    takes it in every step.

    Args:
        query_dim: features of a query.
        key_dim: features of a key.
        hidden_dim: features in which they meet, over all heads.
        num_heads: heads of hidden_dim // num_heads features each, and of as many parts of the features of a value. Default 1.
        dropout: probability in [0, 1] that a weight is zeroed in training. Default 0.0.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: for sizes that are not positive integers, a `hidden_dim` that `num_heads` does not divide, a `dropout`
            outside [0, 1].
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        hidden_dim: int,
        *,
        num_heads: int = 1,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (("query_dim", query_dim), ("key_dim", key_dim), ("hidden_dim", hidden_dim), ("num_heads", num_heads)):
            number(name, size, 1)
        if hidden_dim % num_heads:
            raise ValueError(f"hidden_dim: expected a multiple of num_heads = {num_heads}, got {hidden_dim}")
        dropout = check_number("dropout", dropout, "a number in [0, 1]", lambda p: 0 <= p <= 1)
        super().__init__()
        self.query_dim = query_dim
        self.key_dim = key_dim
        self.hidden_dim = hidden_dim
        self.num_heads = num_heads
        self.dropout = dropout
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query_proj = nn.Linear(query_dim, hidden_dim, bias=False, **options)
        self.key_proj = nn.Linear(key_dim, hidden_dim, **options)
        self.score_weight = nn.Parameter(torch.empty(num_heads, hidden_dim // num_heads, **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights Xavier-uniform, the bias 0."""
        for weight in (self.query_proj.weight, self.key_proj.weight):
            nn.init.xavier_uniform_(weight)
        nn.init.zeros_(self.key_proj.bias)
        bound = (6 / (self.hidden_dim // self.num_heads + 1)) ** 0.5  # of a projection to one number
        nn.init.uniform_(self.score_weight, -bound, bound)

    def project_keys(self, key: Tensor) -> Tensor:
        """U key + b for `forward(..., projected_key=)`.

        Args:
            key: (..., seqlen_kv, key_dim).

        Returns:
            (..., num_heads, seqlen_kv, hidden_dim // num_heads).

        Raises:
            ValueError, TypeError: naming `key`.
        """
        _check_features("key", key, self.key_dim)
        return self._split(self.key_proj(key))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        need_weights: bool = False,
        projected_key: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: (..., seqlen_q, query_dim); one step of a decoder is seqlen_q = 1.
            key: (..., seqlen_kv, key_dim); None with `projected_key`.
            value: (..., seqlen_kv, value_dim), value_dim a multiple of num_heads.
            mask: a mask of `tiled_attention`; or a bool tensor, True = attend, that broadcasts to (..., seqlen_q, seqlen_kv) for all heads
                alike, or with one dimension more than query to (..., num_heads, seqlen_q, seqlen_kv). Default None: every key is seen.
            need_weights: also return the weights that made the result, after dropout. Default False.
            projected_key: `project_keys(key)`, in the place of key. Default None.

        Returns:
            (out, weights): out (..., seqlen_q, value_dim); weights None, or float32 (float64 for float64) (..., seqlen_q, seqlen_kv), with
            more than one head (..., num_heads, seqlen_q, seqlen_kv). Both are differentiable.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        _check_features("query", query, self.query_dim)
        _check_features("value", value, None)
        if (key is None) == (projected_key is None):
            raise ValueError("key, projected_key: expected one of the two, got " + ("both" if key is not None else "neither"))
        if value.shape[-1] % self.num_heads:
            raise ValueError(f"value: expected a last dimension that num_heads = {self.num_heads} divides, got {tuple(value.shape)}")
        if projected_key is None:
            assert key is not None
            projected_key = self.project_keys(key)
        elif not isinstance(projected_key, Tensor) or projected_key.dim() < 3 or projected_key.shape[-3::2] != self.score_weight.shape:
            came = tuple(projected_key.shape) if isinstance(projected_key, Tensor) else type(projected_key).__name__
            wanted = f"(..., {self.num_heads}, seqlen_kv, {self.score_weight.shape[1]})"
            raise ValueError(f"projected_key: expected the result of project_keys, {wanted}, got {came}")
        if isinstance(mask, Tensor) and 2 <= mask.dim() <= query.dim():
            mask = mask.unsqueeze(-3)
        heads = self._split(self.query_proj(query)), projected_key, self._split(value), self.score_weight
        dropout_p = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            out, weights = additive_attention_with_weights(*heads, mask=mask, dropout_p=dropout_p)
            weights = weights.squeeze(-3) if self.num_heads == 1 else weights
        else:
            out = additive_attention(*heads, mask=mask, dropout_p=dropout_p)
        return out.transpose(-3, -2).flatten(-2), weights

    def _split(self, x: Tensor) -> Tensor:
        """(..., seqlen, features) as (..., num_heads, seqlen, features // num_heads)."""
        return x.unflatten(-1, (self.num_heads, x.shape[-1] // self.num_heads)).transpose(-3, -2)

    def extra_repr(self) -> str:
        return f"{self.query_dim}, {self.key_dim}, {self.hidden_dim}, num_heads={self.num_heads}, dropout={self.dropout}"


def _check_features(name: str, x: Any, size: int | None) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}")
    if x.dim() < 2 or (size is not None and x.shape[-1] != size):
        raise ValueError(f"{name}: expected shape (..., seqlen, {'features' if size is None else size}), got {tuple(x.shape)}")
