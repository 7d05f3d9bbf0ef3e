"""Multi-head attention with the parameters, arguments and results of torch.nn.MultiheadAttention, over the exact operator.

Masks reach the operator as the caller gave them (a mask per query and key, a vector per batch item, causality as an interval), never
expanded over batch and heads. Heads are views of the projections, and the output comes back in their memory order, so that merging is a
view too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .arguments import real_dtype
from .attention import attention
from .context_parallel import refuse_shards
from .mask_checks import is_readable
from .masks import And, Causal, KeyLengths, Mask
from .observers import columns_first, observers
from .weights import attention_with_weights, columns_last

_CAUSAL = Causal()


class InProjection(NamedTuple):
    """Weights of the query, key and value projections: packed, or one each."""

    packed: Tensor | None  # (3 * embed_dim, embed_dim), rows of query, key, value
    query: Tensor | None  # (embed_dim, embed_dim)
    key: Tensor | None  # (embed_dim, kdim)
    value: Tensor | None  # (embed_dim, vdim)
    bias: Tensor | None  # (3 * embed_dim,)

    def project(self, query: Tensor, key: Tensor, value: Tensor, num_heads: int) -> list[Tensor]:
        """Three tensors (..., num_heads, head_dim). Inputs that are one tensor are projected by one product."""
        bias = self.bias
        if bias is not None and bias.dtype != query.dtype:  # torch adds it in either dtype to inputs that are not contiguous
            bias = bias.to(query.dtype)
        if self.packed is not None and key is value:
            if query is key:
                return _split(F.linear(query, self.packed, bias), 3, num_heads)
            embed_dim = self.packed.shape[1]
            weight_q, weight_kv = self.packed.split([embed_dim, 2 * embed_dim])
            bias_q, bias_kv = (None, None) if bias is None else bias.split([embed_dim, 2 * embed_dim])
            return _split(F.linear(query, weight_q, bias_q), 1, num_heads) + _split(F.linear(key, weight_kv, bias_kv), 2, num_heads)
        weights = (self.query, self.key, self.value) if self.packed is None else self.packed.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return [
            _split(F.linear(x, weight, bias), 1, num_heads)[0]  # type: ignore[arg-type]
            for x, weight, bias in zip((query, key, value), weights, biases)
        ]

    def project_scores(self, query: Tensor, key: Tensor, num_heads: int) -> list[Tensor]:
        """Of query and key alone, two tensors (..., num_heads, head_dim)."""
        weights = (self.query, self.key) if self.packed is None else self.packed.chunk(3)[:2]
        biases = (None, None) if self.bias is None else self.bias.to(query.dtype).chunk(3)[:2]
        return [_split(F.linear(x, weight, bias), 1, num_heads)[0] for x, weight, bias in zip((query, key), weights, biases)]  # type: ignore[arg-type]


class Columns(NamedTuple):
    """Key and value columns that stand before the others and that no mask hides."""

    bias_key: Tensor | None = None  # embed_dim elements
    bias_value: Tensor | None = None
    zero: bool = False

    def width(self) -> int:
        return (self.bias_key is not None) + self.zero

    def prepend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key, value (..., num_heads, seqlen_kv, head_dim) with `width()` more columns."""
        parts = [(key, value)]
        if self.zero:
            parts.insert(0, (_zero_column(key), _zero_column(value)))
        if self.bias_key is not None and self.bias_value is not None:
            parts.insert(0, (_bias_column(self.bias_key, key), _bias_column(self.bias_value, value)))
        if len(parts) == 1:
            return key, value
        keys, values = zip(*parts)
        return torch.cat(keys, -2), torch.cat(values, -2)


_NO_COLUMNS = Columns()


def heads_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    columns: Columns = _NO_COLUMNS,
    dropout_p: float = 0.0,
    need_weights: bool = False,
    average_weights: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attention of heads (..., num_heads, seqlen, head_dim), with the module's columns. `is_causal` is aligned to the top left.

    Returns:
        out, and the weights (..., seqlen_q, seqlen_kv + columns.width()), per head unless averaged, the columns last; or None.
    """
    options: dict[str, Any] = {"dropout_p": dropout_p}
    width = columns.width()
    if width:
        key, value = columns.prepend(key, value)
        mask, bias = pad_columns(mask, width), pad_columns(bias, width)
    if is_causal:
        mask = _CAUSAL if mask is None else And(_CAUSAL, mask)
        options["query_offset"] = width
    told = width and not torch.compiler.is_compiling() and observers
    with columns_first(width) if told else contextlib.nullcontext():
        if not need_weights:
            return cast(Tensor, attention(query, key, value, mask=mask, bias=bias, **options)), None
        out, weights = attention_with_weights(query, key, value, mask=mask, bias=bias, average=average_weights, **options)
    return out, columns_last(weights.to(query.dtype), width)


def merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int | None, num_heads: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The module's masks as the operator's bool mask (True = attend) and bias, neither expanded.

    Args:
        attn_mask: (seqlen_q, seqlen_kv), (batch * num_heads, seqlen_q, seqlen_kv) or 4-D, bool (True = ignore) or floating (added).
        key_padding_mask: (batch, seqlen_kv), or (seqlen_kv,) with batch None; bool or floating likewise.
        dtype: of query, which the precision of sums follows.
    """
    mask = bias = None
    real = real_dtype(dtype)
    if attn_mask is not None:
        if attn_mask.dim() == 3 and batch is not None:
            attn_mask = attn_mask.unflatten(0, (batch, num_heads))
        if attn_mask.dtype == torch.bool:
            mask = _shrink(attn_mask).logical_not()
        else:
            bias = attn_mask
    if key_padding_mask is not None:
        padding = key_padding_mask if batch is None else key_padding_mask[:, None, None, :]
        if bias is not None and padding.dtype != torch.bool and _only_hides(padding):
            padding = padding != 0
        if padding.dtype == torch.bool:
            if mask is None:
                mask = padding.logical_not()
            else:
                bias = torch.zeros_like(padding, dtype=real).masked_fill(padding, float("-inf"))
        else:
            bias = padding if bias is None else bias.to(real) + padding
    return mask, bias


def check_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    kdim: int,
    vdim: int,
    num_heads: int,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    batch_first: bool,
) -> None:
    """Raise a ValueError or TypeError that names the argument."""
    rank = query.dim()
    if rank not in (2, 3):
        raise ValueError(f"query: expected 2 (unbatched) or 3 dimensions, got shape {tuple(query.shape)}")
    for name, x, width in (("query", query, embed_dim), ("key", key, kdim), ("value", value, vdim)):
        if x.dim() != rank:
            raise ValueError(f"{name}: expected {rank} dimensions, as query has, got shape {tuple(x.shape)}")
        if x.shape[-1] != width:
            raise ValueError(f"{name}: expected {width} features, got shape {tuple(x.shape)}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"value: expected the length and batch of key {tuple(key.shape[:-1])}, got {tuple(value.shape[:-1])}")
    sequence = 1 if rank == 3 and batch_first else 0
    batch = query.shape[1 - sequence] if rank == 3 else None
    if batch is not None and key.shape[1 - sequence] != batch:
        raise ValueError(f"key: expected batch {batch}, as query has, got shape {tuple(key.shape)}")
    seqlen_q, seqlen_kv = query.shape[sequence], key.shape[sequence]
    check_mask("attn_mask", attn_mask, [(seqlen_q, seqlen_kv), (num_heads if batch is None else batch * num_heads, seqlen_q, seqlen_kv)])
    check_mask("key_padding_mask", key_padding_mask, [(seqlen_kv,) if batch is None else (batch, seqlen_kv)])


def check_mask(name: str, mask: Tensor | None, shapes: list[tuple[int, ...]]) -> None:
    """Raise unless `mask` is None, or bool or floating and of one of the shapes."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(
            f"{name}: expected a bool or floating-point tensor, got {mask.dtype if isinstance(mask, Tensor) else type(mask).__name__}"
        )
    if not any(tuple(mask.shape) == shape for shape in shapes):
        raise ValueError(f"{name}: expected shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")


def project_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    in_projection: InProjection,
    out_projection: Callable[[Tensor], Tensor],
    *,
    batch_first: bool,
    static_key: Tensor | None = None,
    static_value: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Project, attend, merge the heads, project. The options are those of `heads_attention`.

    Args:
        query, key, value: (seqlen, features), or with a batch before (batch_first) or after the length.
        static_key, static_value: (batch * num_heads, seqlen_kv, head_dim) in the place of the projected key or value, or None.
    """
    refuse_shards("MultiheadAttention", query, key, value)
    order = (1, 0, 2) if query.dim() == 2 else (0, 2, 1, 3) if batch_first else (1, 2, 0, 3)
    back = (1, 0, 2) if query.dim() == 2 else (0, 2, 1, 3) if batch_first else (2, 0, 1, 3)
    heads_q, heads_k, heads_v = (x.permute(order) for x in in_projection.project(query, key, value, num_heads))
    if static_key is not None:
        heads_k = static_key.view(*heads_k.shape[:-2], *static_key.shape[1:])
    if static_value is not None:
        heads_v = static_value.view(*heads_v.shape[:-2], *static_value.shape[1:])
    out, weights = heads_attention(heads_q, heads_k, heads_v, **options)
    return out_projection(out.permute(back).flatten(-2)), weights


def nested_attention(
    query: Tensor, key: Tensor, value: Tensor, attend: Callable[..., tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """`attend(query, key, value, mask=...)` over padded copies of nested tensors (batch, seqlen*, features), its output nested again.

    Weights come back padded with zeros, (batch, ..., max seqlen_q, max seqlen_kv).
    """
    if any(not x.is_nested or x.layout != torch.strided for x in (query, key, value)):
        raise ValueError("query, key, value: expected all nested with the strided layout, or none nested")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise ValueError(f"{name}: expected a nested tensor of 3 dimensions, got {x.dim()} (one without items has 1)")
    lengths_q, lengths_kv = query._nested_tensor_size()[:, 0], key._nested_tensor_size()[:, 0]
    padded_query = query.to_padded_tensor(0.0)
    padded_key = padded_query if key is query else key.to_padded_tensor(0.0)
    padded_value = padded_key if value is key else value.to_padded_tensor(0.0)
    out, weights = attend(padded_query, padded_key, padded_value, mask=KeyLengths(lengths_kv))
    if weights is not None:
        padding = torch.arange(weights.shape[-2]) >= lengths_q[:, None]
        weights = weights.masked_fill(padding.view(len(lengths_q), *[1] * (weights.dim() - 3), -1, 1), 0.0)
    return torch.nested.as_nested_tensor([item[:length] for item, length in zip(out, lengths_q.tolist())]), weights


class MultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention (Vaswani et al., 2017, section 3.2.2): the parameters, state_dict and results of `torch.nn.MultiheadAttention`.

    There is one answer over train and eval, grad and no_grad, and `need_weights`: query rows that see no key add 0 before `out_proj`
    (and their weights are 0) where torch's module gives NaN. Memory is O(seqlen) unless weights are asked for; averaged weights take O(L x
    S). `out_proj` is called as a module: hooks, adapters and parametrizations of it act. Dropout follows `self.training` and draws its
    mask as `ta.dropout_mask` does. Under CPU autocast the projections and the attention run in the autocast dtype, floating masks stay as
    they are.

    Inside `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer` this module is always called, also in inference. It is not
    scriptable.

    Args:
        embed_dim: features of query and of the output.
        num_heads: heads of `embed_dim // num_heads` features.
        dropout: probability with which a weight is dropped in training. Default 0.
        bias: whether the projections have biases. Default True.
        add_bias_kv: append one learned key and value, which no mask hides. Default False.
        add_zero_attn: append one key and value of zeros, which no mask hides. Default False.
        kdim, vdim: features of key and value. Default `embed_dim`.
        batch_first: whether inputs are (batch, seqlen, features) rather than (seqlen, batch, features). Default False.
        device, dtype: of the parameters.

    Raises:
        ValueError: for sizes that are not positive, an `embed_dim` that `num_heads` does not divide, a dropout outside [0, 1].
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim, num_heads: expected positive numbers, the first a multiple of the second, got {embed_dim} and {num_heads}"
            )
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout: expected a probability in [0, 1], got {dropout}")
        nn.Module.__init__(self)
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        packed = self.kdim == embed_dim and self.vdim == embed_dim
        self.register_parameter("in_proj_weight", parameter(3 * embed_dim, embed_dim) if packed else None)
        for name, width in (("q_proj_weight", embed_dim), ("k_proj_weight", self.kdim), ("v_proj_weight", self.vdim)):
            self.register_parameter(name, None if packed else parameter(embed_dim, width))
        self.register_parameter("in_proj_bias", parameter(3 * embed_dim) if bias else None)
        self.out_proj = NonDynamicallyQuantizableLinear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.bias_k = parameter(1, 1, embed_dim) if add_bias_kv else None
        self.bias_v = parameter(1, 1, embed_dim) if add_bias_kv else None
        self._reset_parameters()

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False: nn.TransformerEncoderLayer asks this before it takes the weights and goes past `forward`."""
        return False

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = value

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: (seqlen_q, batch, embed_dim), (batch, seqlen_q, embed_dim) with `batch_first`, or (seqlen_q, embed_dim).
                Nested tensors (strided layout) too, without masks.
            key, value: likewise, with seqlen_kv and `kdim` or `vdim` features.
            key_padding_mask: (batch, seqlen_kv), or (seqlen_kv,) unbatched. bool: True = ignore that key; floating: added to the scores.
            need_weights: whether to return the weights. Default True.
            attn_mask: (seqlen_q, seqlen_kv) or (batch * num_heads, seqlen_q, seqlen_kv), bool (True = ignore) or floating (added).
            average_attn_weights: whether the weights are averaged over the heads. Default True.
            is_causal: query i sees keys j <= i (aligned to the top left), besides what the masks say. Default False.

        Returns:
            out, like query, and the weights that made it, dropout included and differentiable: (batch, seqlen_q, seqlen_kv), or
            (batch, num_heads, seqlen_q, seqlen_kv) if not averaged, without batch where the input has none; or None. The columns of
            `add_bias_kv` and `add_zero_attn` are the last ones.

        Raises:
            ValueError: naming the argument whose shape does not fit.
            TypeError: naming a mask that is neither bool nor floating.
        """
        options: dict[str, Any] = {
            "is_causal": is_causal,
            "columns": Columns(self.bias_k, self.bias_v, self.add_zero_attn),
            "dropout_p": self.dropout if self.training else 0.0,
            "need_weights": need_weights,
            "average_weights": average_attn_weights,
        }
        in_projection = InProjection(self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight, self.in_proj_bias)

        def attend(query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> tuple[Tensor, Tensor | None]:
            return project_and_attend(
                query, key, value, self.num_heads, in_projection, self.out_proj, batch_first=self.batch_first, **masks, **options
            )

        if query.is_nested or key.is_nested or value.is_nested:
            if attn_mask is not None or key_padding_mask is not None or not self.batch_first:
                raise ValueError("query: expected no masks and batch_first=True with a nested tensor")
            return nested_attention(query, key, value, attend)
        check_arguments(
            query, key, value, self.embed_dim, self.kdim, self.vdim, self.num_heads, key_padding_mask, attn_mask, self.batch_first
        )
        batch = None if query.dim() == 2 else query.shape[0 if self.batch_first else 1]
        mask, bias = merge_masks(attn_mask, key_padding_mask, batch, self.num_heads, query.dtype)
        return attend(query, key, value, mask=mask, bias=bias)


def _split(x: Tensor, parts: int, num_heads: int) -> list[Tensor]:
    """(..., parts * embed_dim) -> `parts` views (..., num_heads, head_dim)."""
    return list(x.unflatten(-1, (parts, num_heads, x.shape[-1] // (parts * num_heads))).unbind(-3))


def _zero_column(x: Tensor) -> Tensor:
    return x.new_zeros((*x.shape[:-2], 1, x.shape[-1]))


def _bias_column(bias: Tensor, x: Tensor) -> Tensor:
    """(num_heads * head_dim elements) -> (..., num_heads, 1, head_dim), like x (..., num_heads, seqlen_kv, head_dim)."""
    return bias.to(x.dtype).reshape(x.shape[-3], 1, x.shape[-1]).expand(*x.shape[:-2], 1, -1)


def pad_columns(mask: Any, count: int) -> Any:
    """A mask (True = attend) or bias with `count` visible columns before the others."""
    return None if mask is None else F.pad(mask, (count, 0), value=True if mask.dtype == torch.bool else 0.0)


def _shrink(mask: Tensor) -> Tensor:
    """Without the repetitions of an expanded view, its last dimension apart."""
    for dim in range(mask.dim() - 1):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _only_hides(padding: Tensor) -> bool:
    """Whether a floating padding mask holds nothing but 0 and -inf, where that can be read without a trace to break."""
    if padding.requires_grad or not is_readable(padding):
        return False
    return not bool(padding.masked_fill(padding == float("-inf"), 0.0).any())
