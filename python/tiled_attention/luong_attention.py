"""Attention with the scores of Luong et al.: dot, general and concat; as a function and as a module with its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import attention
from .call import autocast_active, check_float, check_number
from .mask_checks import number
from .masks import Mask
from .weights import attention_with_weights

SCORES = ("dot", "general", "concat")
Score = Literal["dot", "general", "concat"]
Weight = Tensor | tuple[Tensor, Tensor] | None


@overload
def luong_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score = "dot",
    weight: Weight = None,
    *,
    scale: float | None = None,
    mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def luong_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score = "dot",
    weight: Weight = None,
    *,
    scale: float | None = None,
    mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def luong_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score = "dot",
    weight: Weight = None,
    *,
    scale: float | None = None,
    mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention with a score of choice, exact, in O(n) memory.

        dot       score = scale * query . key
        general   score = scale * query . (W key)
        concat    score = scale * v . tanh(W [query; key])

    The projection of "general" is done to the query; that of "concat" to both sides, so that nothing of size seqlen_q x seqlen_kv x hidden
    exists.

    Args:
        query: (..., num_heads, seqlen_q, head_dim_q).
        key: (..., num_heads_kv, seqlen_kv, head_dim_k), num_heads_kv divides num_heads.
        value: (..., num_heads_kv, seqlen_kv, head_dim_v).
        score: "dot" (head_dim_q = head_dim_k), "general" or "concat". Default "dot".
        weight: of "general" W, (head_dim_q, head_dim_k) or (num_heads, head_dim_q, head_dim_k); of "concat" the pair (W, v), (hidden,
            head_dim_q + head_dim_k) and (hidden,); of "dot" None. Dtype of query.
        scale: None: 1.
        mask, dropout_p, generator, query_offset, return_lse: as in `attention`.

    Returns:
        out, or (out, lse), as `attention` does.

    Differentiable in query, key, value and weight, as `attention` is.

    Raises:
        ValueError, TypeError, RuntimeError: naming the argument.

    Source: Luong, Pham and Manning, Effective Approaches to Attention-based Neural Machine Translation (2015), section 3.1.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_float(name, tensor)
        if tensor.dim() < 3:
            raise ValueError(f"{name} must have shape (..., num_heads, seqlen, head_dim), got {tuple(tensor.shape)}")
        _check_like(name, tensor, query)
    check_weight(score, weight, query, key.shape[-1])
    scale = 1.0 if scale is None else check_number("scale", scale, "a finite number", lambda x: abs(x) < float("inf"))
    options: dict[str, Any] = {"mask": mask, "dropout_p": dropout_p, "return_lse": return_lse}
    options |= {} if generator is None else {"generator": generator}
    options |= {} if query_offset is None else {"query_offset": query_offset}
    if score == "concat":
        from .additive_attention import additive_attention

        matrix, vector = cast(tuple[Tensor, Tensor], weight)
        of_query, of_key = matrix.split([query.shape[-1], key.shape[-1]], 1)
        return additive_attention(F.linear(query, of_query), _project_keys(key, of_key), value, vector * scale, **options)
    if score == "general":
        query = query @ cast(Tensor, weight)
    return attention(query, key, value, scale=scale, **options)


def check_weight(score: str, weight: Any, query: Tensor, key_dim: int) -> None:
    """That `weight` is what `score` needs. Raises ValueError or TypeError naming the argument."""
    num_heads, query_dim = query.shape[-3], query.shape[-1]
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, got {score!r}")
    if score == "dot":
        if weight is not None:
            raise ValueError("weight must be None for score 'dot', got one")
        if query_dim != key_dim:
            raise ValueError(f"key must have the head_dim of query ({query_dim}) for score 'dot', got {key_dim}")
        return
    if score == "general":
        _check_part(weight, query)
        if weight.shape not in ((query_dim, key_dim), (num_heads, query_dim, key_dim)):
            heads = f"({num_heads}, {query_dim}, {key_dim})"
            raise ValueError(f"weight must have shape ({query_dim}, {key_dim}) or {heads}, got {tuple(weight.shape)}")
        return
    if not isinstance(weight, (tuple, list)) or len(weight) != 2:
        raise TypeError(f"weight must be a pair (W, v) for score 'concat', got {type(weight).__name__}")
    matrix, vector = (_check_part(part, query) for part in weight)
    if matrix.dim() != 2 or matrix.shape[1] != query_dim + key_dim or vector.shape != matrix.shape[:1]:
        wanted = f"(hidden, {query_dim + key_dim}) and (hidden,)"
        raise ValueError(f"weight must have shapes {wanted}, got {tuple(matrix.shape)} and {tuple(vector.shape)}")


def _check_part(part: Any, query: Tensor) -> Tensor:
    check_float("weight", part)
    _check_like("weight", part, query)
    return cast(Tensor, part)


def _check_like(name: str, tensor: Tensor, query: Tensor) -> None:
    """torch's product with a "meta" tensor is no error: it holds whatever memory did."""
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on the device of query ({query.device}), got {tensor.device}")
    if tensor.dtype != query.dtype and not autocast_active():
        raise ValueError(f"{name} must have the dtype of query ({query.dtype}), got {tensor.dtype}")


def _project_keys(key: Tensor, weight: Tensor) -> Tensor:
    """F.linear, where a key that is not finite reaches no gradient: it may be hidden, and 0 * NaN is NaN."""
    usable = key.detach().isfinite().all(-1, keepdim=True)
    return torch.where(usable, F.linear(torch.where(usable, key, 0.0), weight), F.linear(key.detach(), weight.detach()))


class LuongAttention(nn.Module):
    """The scores of Luong et al. (2015, section 3.1) with their parameters, one head.

        dot       score = query . key                       no parameters
        general   score = query . (weight key)              weight (query_dim, key_dim)
        concat    score = vector . tanh(weight [query; key])     weight (hidden_dim, query_dim + key_dim), vector (hidden_dim,)

    Args:
        query_dim, key_dim: features of query and key; equal for "dot".
        score: "dot", "general" or "concat". Default "general".
        hidden_dim: of "concat" only; None: query_dim.
        dropout: probability that a weight is zeroed in training. Default 0.
        device, dtype: of the parameters, which start Xavier-uniform.

    Raises:
        ValueError, TypeError: naming the argument.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        score: Score = "general",
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.query_dim, self.key_dim = number("query_dim", query_dim, 1), number("key_dim", key_dim, 1)
        if score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}, got {score!r}")
        if score == "dot" and query_dim != key_dim:
            raise ValueError(f"key_dim must be query_dim ({query_dim}) for score 'dot', got {key_dim}")
        if hidden_dim is not None and score != "concat":
            raise ValueError(f"hidden_dim must be None for score {score!r}, got {hidden_dim}")
        self.score = score
        self.hidden_dim = number("hidden_dim", query_dim if hidden_dim is None else hidden_dim, 1) if score == "concat" else None
        self.dropout = check_number("dropout", dropout, "a number in [0, 1]", lambda p: 0 <= p <= 1)
        self.weight: nn.Parameter | None = None
        self.vector: nn.Parameter | None = None
        if score == "general":
            self.weight = nn.Parameter(torch.empty(query_dim, key_dim, device=device, dtype=dtype))
        elif self.hidden_dim is not None:
            self.weight = nn.Parameter(torch.empty(self.hidden_dim, query_dim + key_dim, device=device, dtype=dtype))
            self.vector = nn.Parameter(torch.empty(self.hidden_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform; `vector` as a matrix with one row."""
        if self.weight is not None:
            nn.init.xavier_uniform_(self.weight)
        if self.vector is not None:
            nn.init.xavier_uniform_(self.vector[None])

    def project_keys(self, key: Tensor) -> Tensor:
        """What the score needs of the keys, for `forward(..., projected_key=)`.

        Args:
            key: (..., seqlen_kv, key_dim).

        Returns:
            (..., seqlen_kv, query_dim); of "concat" (..., seqlen_kv, hidden_dim).

        Raises:
            ValueError, TypeError: naming `key`.
        """
        self._check("key", key, self.key_dim)
        if self.weight is None:
            return key
        return _project_keys(key, self.weight if self.score == "general" else self.weight[:, self.query_dim :])

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
            query: (..., seqlen_q, query_dim); one step of a decoder has seqlen_q = 1.
            key: (..., seqlen_kv, key_dim); None with `projected_key`.
            value: (..., seqlen_kv, value_dim).
            mask: a mask, or a bool tensor that broadcasts to (..., seqlen_q, seqlen_kv), True = attend. Default None.
            need_weights: also return the weights that made the output, after dropout. Default False.
            projected_key: `project_keys(key)`, in the place of key. Default None.

        Returns:
            (out, weights): out (..., seqlen_q, value_dim); weights None, or float32 (float64 for float64) (..., seqlen_q, seqlen_kv). Both
            are differentiable: a coverage is the sum of the weights over the steps.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        self._check("query", query, self.query_dim)
        if (key is None) == (projected_key is None):
            raise ValueError(f"key, projected_key: expected one of the two, got {'neither' if key is None else 'both'}")
        if projected_key is None:
            projected_key = self.project_keys(cast(Tensor, key))
        self._check("projected_key", projected_key, self.query_dim if self.hidden_dim is None else self.hidden_dim)
        self._check("value", value, None)
        if isinstance(mask, Tensor) and 2 < mask.dim() <= query.dim():
            mask = mask.unsqueeze(-3)
        options: dict[str, Any] = {"mask": mask, "dropout_p": self.dropout if self.training else 0.0}
        weights: Tensor | None = None
        if self.hidden_dim is not None:
            from .additive_attention import additive_attention, additive_attention_with_weights

            query = F.linear(query, cast(Tensor, self.weight)[:, : self.query_dim])
            one_head: Any = *(tensor.unsqueeze(-3) for tensor in (query, projected_key, value)), self.vector
            if need_weights:
                out, weights = additive_attention_with_weights(*one_head, **options)
            else:
                out = additive_attention(*one_head, **options)
        else:
            query, key, value = (tensor.unsqueeze(-3) for tensor in (query, projected_key, value))
            if need_weights:
                out, weights = attention_with_weights(query, key, value, scale=1.0, **options)
            else:
                out = attention(query, key, value, scale=1.0, **options)
        return out.squeeze(-3), None if weights is None else weights.squeeze(-3)

    def _check(self, name: str, tensor: Any, features: int | None) -> None:
        check_float(name, tensor)
        if tensor.dim() < 2 or (features is not None and tensor.shape[-1] != features):
            raise ValueError(f"{name} must have shape (..., seqlen, {features or 'value_dim'}), got {tuple(tensor.shape)}")
        if self.weight is not None and tensor.device != self.weight.device:
            raise ValueError(f"{name} must be on the device of the parameters ({self.weight.device}), got {tensor.device}")

    def extra_repr(self) -> str:
        hidden = "" if self.hidden_dim is None else f", hidden_dim={self.hidden_dim}"
        return f"{self.query_dim}, {self.key_dim}, score={self.score!r}{hidden}, dropout={self.dropout:g}"
