"""Calls of torch's own attention, as this package's operators would be given them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import Arguments
from .call import prepare, without_autocast
from .masks import And, KeyLengths
from .multihead_attention import Columns, InProjection, merge_masks, pad_columns
from .observers import Call
from .sdpa import as_attention


class ForwardArguments(NamedTuple):
    """The signature of F.multi_head_attention_forward."""

    query: Tensor
    key: Tensor
    value: Tensor
    embed_dim_to_check: int
    num_heads: int
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    add_zero_attn: bool
    dropout_p: float
    out_proj_weight: Tensor
    out_proj_bias: Tensor | None
    training: bool = True
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    use_separate_proj_weight: bool = False
    q_proj_weight: Tensor | None = None
    k_proj_weight: Tensor | None = None
    v_proj_weight: Tensor | None = None
    static_k: Tensor | None = None
    static_v: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False

    def in_projection(self) -> InProjection:
        if self.use_separate_proj_weight:
            return InProjection(None, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight, self.in_proj_bias)
        return InProjection(self.in_proj_weight, None, None, None, self.in_proj_bias)


def of_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Call:
    """aten::scaled_dot_product_attention, called with these."""

    def arguments() -> Arguments:
        heads_q, heads_k, _, mask, bias = as_attention(query, key, value, attn_mask, is_causal, enable_gqa)
        with without_autocast(query):  # the kernel is given what autocast has cast
            return _prepare(heads_q, heads_k, mask, bias, scale=scale)

    return Call(query, key, arguments)


def of_heads(
    query: Tensor,
    key: Tensor,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor,
    mask: Tensor | None,
    mask_type: int | None,
) -> Call:
    """aten::_native_multi_head_attention, called with these."""

    def arguments() -> Arguments:
        rows_q, rows_k = query, key
        visible: Any = None
        bias = None
        if query.is_nested:
            lengths_q, lengths_k = query._nested_tensor_size()[:, 0], key._nested_tensor_size()[:, 0]
            rows_q = query.to_padded_tensor(0.0)
            rows_k = rows_q if key is query else key.to_padded_tensor(0.0)
            there = torch.arange(rows_q.shape[1], device=lengths_q.device) < lengths_q[:, None]
            visible = And(KeyLengths(lengths_k.to(query.device)), there[:, None, :, None].to(query.device))
        elif mask is not None:
            attn_mask, padding = (None, mask) if mask_type == 1 else (mask, None)
            visible, bias = merge_masks(attn_mask, padding, query.shape[0], num_heads, query.dtype)
        heads_q, heads_k = InProjection(in_proj_weight, None, None, None, in_proj_bias).project_scores(rows_q, rows_k, num_heads)
        return _prepare(heads_q.transpose(1, 2), heads_k.transpose(1, 2), visible, bias)

    return Call(query, key, arguments)


def of_forward(given: ForwardArguments) -> Call:
    """F.multi_head_attention_forward, called with these: it computes the weights for itself."""
    query, key = given.query, given.key
    columns = Columns(given.bias_k, given.bias_v, given.add_zero_attn)

    def arguments() -> Arguments:
        batch = None if query.dim() == 2 else query.shape[1]
        order = (1, 0, 2) if batch is None else (1, 2, 0, 3)
        heads_q, heads_k = (x.permute(order) for x in given.in_projection().project_scores(query, key, given.num_heads))
        if given.static_k is not None:
            heads_k = given.static_k.view(*heads_k.shape[:-2], *given.static_k.shape[1:])
        mask, bias = merge_masks(given.attn_mask, given.key_padding_mask, batch, given.num_heads, query.dtype)
        width = columns.width()
        if width:
            heads_k, _ = columns.prepend(heads_k, heads_k)
            mask, bias = pad_columns(mask, width), pad_columns(bias, width)
        with without_autocast(query):
            return _prepare(heads_q, heads_k, mask, bias)

    return Call(query, key, arguments, columns=columns.width())


def _prepare(query: Tensor, key: Tensor, mask: Any, bias: Tensor | None, scale: float | None = None) -> Arguments:
    return prepare(query, key, None, mask, bias, scale, None, None, None, 0.0, None, None)
