"""Hugging Face transformers (>= 5): `register()` makes `attn_implementation="tiled_attention"` known.

The mask function says what the model asks for as a mask value (causal, windows, packed documents) and a padding vector per batch item; only
patterns that it does not know become dense. Left padding, right padding, static caches and chunked prefill are all of that form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from ..attention import attention
from ..masks import And, Causal, Chunked, Documents, Mask, SlidingWindow
from ..weights import attention_with_weights

NAME = "tiled_attention"
_TOP_LEFT = Causal(align="top_left")
_UNBOUNDED = 1 << 40


def register() -> str:
    """Make this package an attention implementation of transformers, and return its name, "tiled_attention".

    `AutoModel.from_pretrained(..., attn_implementation="tiled_attention")`, or `model.set_attn_implementation("tiled_attention")`, for
    every model that looks its attention up in transformers' AttentionInterface. Grouped heads, sliding windows, softcap, attention sinks,
    position biases, dropout, packed sequences (`position_ids` that restart) and all caches are served. Query rows that see no key (those
    of left padding) give 0.

    Raises:
        RuntimeError: for transformers before version 5.
    """
    if int(transformers.__version__.split(".")[0]) < 5:
        raise RuntimeError(f"register: expected transformers >= 5, got {transformers.__version__}")
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    return NAME


class PatternMask(Tensor):
    """A bool mask (batch, 1, seqlen_q, seqlen_kv) that takes no memory: what it means stands in `mask` and `query_offset`.

    `attention_forward` reads those. Whoever computes with the tensor instead gets the dense mask.
    """

    mask: Mask  # with the padding, if any
    query_offset: int | Tensor  # position of the first query among the keys

    @staticmethod
    def __new__(cls, mask: Mask, query_offset: int | Tensor, shape: tuple[int, ...], device: torch.device) -> PatternMask:
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.mask, self.query_offset = mask, query_offset
        return self

    def dense(self) -> Tensor:
        visible = self.mask.dense(*self.shape[-2:], query_offset=self.query_offset, device=self.device)
        return visible.expand(self.shape)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PatternMask({self.mask!r}, query_offset={self.query_offset}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = torch.utils._pytree.tree_map_only(PatternMask, PatternMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


class TracedPattern:
    """The same in a trace, where it lives between two places of one graph."""

    def __init__(self, mask: Mask, query_offset: int | Tensor) -> None:
        self.mask = mask
        self.query_offset = query_offset


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | TracedPattern | None:
    """What `mask_function` and the padding mask (batch, seen + q_length) mean, for `attention_forward`.

    Returns:
        None where the module's own `is_causal` says it all, a view (batch, 1, q_length, kv_length) of the padding where nothing else hides
        keys, a `PatternMask` (a `TracedPattern` in a trace), or the dense mask of transformers' own function.
    """
    tracing = masking_utils.is_tracing(attention_mask) or (isinstance(q_offset, Tensor) and masking_utils.is_tracing(q_offset))
    if q_length == 1:
        pattern = None
    elif tracing:
        pattern = _recognise_traced(mask_function, allow_is_causal_skip, **kwargs)
    else:
        pattern = _recognise(mask_function, batch_size, kv_offset)
    if pattern is None:
        return masking_utils.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            device=device,
            **kwargs,
        )

    offset = q_offset - kv_offset
    if isinstance(offset, Tensor) and not tracing:
        offset = int(offset)
    padding = _padding(attention_mask, kv_length, kv_offset, tracing)
    if isinstance(pattern, _Everything):
        if padding is None:
            return (
                None
                if allow_is_bidirectional_skip
                else torch.ones((), dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length)
            )
        return padding.expand(batch_size, 1, q_length, kv_length)
    if padding is None and pattern == Causal() and allow_is_causal_skip and not isinstance(offset, Tensor) and offset == 0:
        return None
    mask = pattern if padding is None else And(pattern, padding)
    if tracing:
        return TracedPattern(mask, offset)
    return PatternMask(mask, offset, (batch_size, 1, q_length, kv_length), torch.device(device))


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | TracedPattern | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim).
        key, value: (batch, num_heads_kv, seqlen_kv, head_dim or head_dim_v).
        attention_mask: from `attention_mask`; or 4-D, bool (True = attend) or floating (added); or None: causal (aligned to the top left)
        where
            there are several queries and `is_causal`, or else the module's attribute of that name (default True), says so.
        softcap, s_aux, position_bias: softcap, sink logits (num_heads,), additive bias.

    Returns:
        (batch, seqlen_q, num_heads, head_dim_v), and the weights (batch, num_heads, seqlen_q, seqlen_kv) if `output_attentions`, or None.
    """
    mask: Mask | Tensor | None = None
    query_offset, bias = None, position_bias
    if isinstance(attention_mask, (PatternMask, TracedPattern)):
        mask, query_offset = attention_mask.mask, attention_mask.query_offset
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if query.shape[2] > 1 and causal:
            mask = _TOP_LEFT
    elif attention_mask.dtype == torch.bool:
        mask = attention_mask
    else:
        bias = attention_mask if bias is None else bias + attention_mask

    if query.shape[0] != key.shape[0]:
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout, "query_offset": query_offset}
    weights = None
    if output_attentions:
        out, weights = attention_with_weights(query, key, value, mask=mask, bias=bias, average=False, **options)
    else:
        out = cast(Tensor, attention(query, key, value, mask=mask, bias=bias, **options))
    return out.transpose(1, 2).contiguous(), weights


class _Everything:
    """Every key is visible."""


def _recognise(function: Callable[..., Any], batch_size: int, kv_offset: int) -> Mask | _Everything | None:
    """The mask value that an index function of transformers stands for, or None.

    The functions are known by their code, and their parameters by their closures. Packed sequences restart `position_ids`, which moves
    positions by one number per sequence: causality and windows inside a sequence stay as they are.
    """
    if function is masking_utils.causal_mask_function:
        return Causal()
    if function is masking_utils.bidirectional_mask_function:
        return _Everything()
    kind = _KINDS.get(getattr(function, "__code__", None))
    if kind is None:
        return None
    given = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))
    if kind == "and":
        return _all_of([_recognise(part, batch_size, kv_offset) for part in given["mask_functions"]])
    if kind == "remap":
        return _recognise(given["mask_function"], batch_size, kv_offset)
    if kind == "window":
        return SlidingWindow(given["sliding_window"] - 1, _UNBOUNDED)
    if kind == "two-sided window":
        return SlidingWindow(given["sliding_window"], given["sliding_window"])
    if kind == "chunk":
        return Chunked(given["chunk_size"]) if kv_offset == 0 and not bool(given["left_padding"].any()) else None
    if batch_size != 1:  # packed: one row of sequence numbers per batch item
        return None
    numbers = given["packed_sequence_mask"][0]
    return Documents(F.pad(torch.unique_consecutive(numbers, return_counts=True)[1].cumsum(0), (1, 0)))


def _recognise_traced(
    function: Callable[..., Any], allow_is_causal_skip: bool, local_size: int | None = None, config: Any = None, **kwargs: Any
) -> Mask | _Everything | None:
    """The same in a trace, which cannot look into closures.

    transformers allows the causal skip only for a causal mask that nothing but `local_size` changes: a window, in models without chunks.
    """
    if function is masking_utils.causal_mask_function:
        return Causal()
    if function is masking_utils.bidirectional_mask_function:
        return _Everything()
    if allow_is_causal_skip and local_size is not None and getattr(config, "attention_chunk_size", None) is None:
        return SlidingWindow(local_size - 1, 0)
    return None


def _all_of(parts: list[Mask | _Everything | None]) -> Mask | _Everything | None:
    result: Mask | _Everything = _Everything()
    for part in parts:
        if part is None:
            return None
        if not isinstance(part, _Everything):
            result = part if isinstance(result, _Everything) else result & part
    return result


def _padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int, tracing: bool) -> Tensor | None:
    """The padding mask of these keys, bool (batch, 1, 1, kv_length), or None where it hides none."""
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        return None
    padding = padding[:, kv_offset : kv_offset + kv_length]
    if not tracing and bool(masking_utils.fast_all(padding)):
        return None
    return padding[:, None, None, :].to(torch.bool)


def _code_of(factory: Callable[..., Callable[..., Any]], *arguments: Any) -> Any:
    return factory(*arguments).__code__


_KINDS = {
    _code_of(masking_utils.and_masks, masking_utils.causal_mask_function): "and",
    _code_of(masking_utils.remap_positions_for_packed_sequence, masking_utils.causal_mask_function, None): "remap",
    _code_of(masking_utils.sliding_window_overlay, 1): "window",
    _code_of(masking_utils.sliding_window_bidirectional_overlay, 1): "two-sided window",
    _code_of(masking_utils.chunked_overlay, 1, None): "chunk",
    _code_of(masking_utils.packed_sequence_mask_function, None): "packed",
}
