"""What calls and layers cost, by formula: floating-point operations, parameters, bytes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import real_dtype
from .linear_fake import CHUNK
from .lowering import lower
from .mask_checks import check_broadcasts, number
from .masks import Mask

OPERATORS = ("attention", "linear_attention", "additive_attention")
Shape = Tensor | Sequence[int]


class Flops(NamedTuple):
    """Multiplications and additions of the products of a call.

    Attributes:
        forward: of the forward.
        backward: of the backward alone, which computes the scores again.
        total: their sum.
    """

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


class Memory(NamedTuple):
    """Bytes of a call.

    Attributes:
        inputs: query, key and value.
        outputs: out and lse, or out and the state.
        saved: for the backward, beyond the inputs: outputs, and with 16-bit inputs the rounding residual of out.
        gradients: of query, key and value.
        dense: what one matrix of all scores would take, which no operator here holds.
    """

    inputs: int
    outputs: int
    saved: int
    gradients: int
    dense: int


def flops(
    query: Shape,
    key: Shape,
    value: Shape,
    *,
    operator: str = "attention",
    mask: Mask | Tensor | None = None,
    query_offset: int | Tensor | None = None,
    causal: bool = False,
) -> Flops:
    """Floating-point operations of one call, a multiplication and an addition counting as two; exponentials and sums of rows do not count.

        attention            forward 2 P (head_dim + head_dim_v), backward 2 P (3 head_dim + 2 head_dim_v), P the visible pairs
        additive_attention   forward P (4 head_dim + 2 head_dim_v), backward P (12 head_dim + 4 head_dim_v): a sum, a hyperbolic tangent,
                             a product and its sum make 4; head_dim is the hidden size
        linear_attention     forward 2 (R + K) head_dim head_dim_v, causal + 64 R (head_dim + head_dim_v) for the pairs within chunks of 64;
                             backward 2.5 times that; R and K are all rows of query and of key

    Without a mask these are the numbers of `torch.utils.flop_counter.FlopCounterMode` for `scaled_dot_product_attention`, and for the
    operators here, whose formulas are registered with it. That counter does not look at masks; this function counts visible pairs only.

    Args:
        query, key, value: tensors (of any device, "meta" included), or their shapes as in `attention`.
        operator: "attention", "linear_attention" or "additive_attention". Default "attention".
        mask, query_offset: as in `attention`; not for "linear_attention".
        causal: of "linear_attention" only.

    Returns:
        `Flops(forward, backward)`, with the property `total`; the backward alone, which computes the scores again.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    q, k, v = _shapes(query, key, value)
    if operator not in OPERATORS:
        raise ValueError(f"operator must be one of {', '.join(OPERATORS)}, got {operator!r}")
    if causal and operator != "linear_attention":
        raise ValueError(f"causal must be False for {operator!r}, which takes mask=Causal(), got {causal}")
    if operator == "linear_attention":
        if mask is not None or query_offset is not None:
            raise ValueError("mask and query_offset must be None for 'linear_attention', got one")
        forward = 2 * (math.prod(q[:-1]) + math.prod(k[:-1])) * q[-1] * v[-1]
        forward += math.prod(q[:-1]) * CHUNK * (q[-1] + v[-1]) if causal else 0
        return Flops(forward, forward * 5 // 2)
    pairs = math.prod(q[:-1]) * k[-2] if mask is None else _visible(mask, q, k, query_offset)
    if operator == "additive_attention":
        return Flops(pairs * (4 * q[-1] + 2 * v[-1]), pairs * (12 * q[-1] + 4 * v[-1]))
    return Flops(2 * pairs * (q[-1] + v[-1]), 2 * pairs * (3 * q[-1] + 2 * v[-1]))


def memory(query: Shape, key: Shape, value: Shape, *, dtype: torch.dtype = torch.float32, operator: str = "attention") -> Memory:
    """Bytes of one call. All but `dense` grow linearly with the sequence.

    Args:
        query, key, value: tensors, or their shapes as in `attention`.
        dtype: of shapes; that of tensors is their own. Default float32.
        operator: "attention", "linear_attention" or "additive_attention". Default "attention".

    Returns:
        `Memory(inputs, outputs, saved, gradients, dense)`.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    q, k, v = _shapes(query, key, value)
    if operator not in OPERATORS:
        raise ValueError(f"operator must be one of {', '.join(OPERATORS)}, got {operator!r}")
    if isinstance(query, Tensor):
        dtype = query.dtype
    elif not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    real = real_dtype(dtype).itemsize
    inputs = (math.prod(q) + math.prod(k) + math.prod(v)) * dtype.itemsize
    out = math.prod(q[:-1]) * v[-1] * dtype.itemsize
    dense = math.prod(q[:-1]) * k[-2] * real
    if operator == "linear_attention":
        state = math.prod(k[:-2]) * k[-1] * (v[-1] + 1) * real
        return Memory(inputs, out + state, 0, inputs, dense)
    lse = math.prod(q[:-1]) * real
    residual = out if dtype.itemsize == 2 and operator == "attention" else 0
    return Memory(inputs, out + lse, out + lse + residual, inputs, dense)


def parameter_count(layer: str, **sizes: Any) -> int:
    """Parameters of a layer, without making it.

        MultiheadAttention(embed_dim, kdim=embed_dim, vdim=embed_dim, bias=True, add_bias_kv=False)
            embed_dim (2 embed_dim + kdim + vdim), + 4 embed_dim with bias, + 2 embed_dim with add_bias_kv; the number of heads is free
        LinearAttention(embed_dim, bias=True)               4 embed_dim^2, + 4 embed_dim with bias
        LuongAttention(query_dim, key_dim, score="general", hidden_dim=query_dim)
            0, query_dim key_dim, or hidden_dim (query_dim + key_dim + 1), for "dot", "general" and "concat"
        AdditiveAttention(query_dim, key_dim, hidden_dim)   hidden_dim (query_dim + key_dim + 2)
        LearnedEmbedding(max_len, dim)                      max_len dim
        RelativeBias(num_heads, max_distance=128, num_buckets=32, bidirectional=True)
            num_heads num_buckets; without buckets num_heads (2 max_distance + 1), or num_heads (max_distance + 1) one-sided

    Args:
        layer: name of the class.
        sizes: its arguments, as above.

    Returns:
        The number of elements of its parameters.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    formulas: dict[str, Callable[..., int]] = {
        "MultiheadAttention": _multihead_parameters,
        "LinearAttention": lambda embed_dim, bias=True: 4 * embed_dim**2 + 4 * embed_dim * bool(bias),
        "LuongAttention": _luong_parameters,
        "AdditiveAttention": lambda query_dim, key_dim, hidden_dim: hidden_dim * (query_dim + key_dim + 2),
        "LearnedEmbedding": lambda max_len, dim: max_len * dim,
        "RelativeBias": _relative_parameters,
    }
    if layer not in formulas:
        raise ValueError(f"layer must be one of {', '.join(formulas)}, got {layer!r}")
    for name, size in sizes.items():
        if name not in ("bias", "add_bias_kv", "bidirectional", "score") and size is not None:
            number(name, size, 0)
    try:
        inspect.signature(formulas[layer]).bind(**sizes)
    except TypeError as error:
        raise TypeError(f"{layer}: {error}") from None
    return int(formulas[layer](**sizes))


def _multihead_parameters(
    embed_dim: int, kdim: int | None = None, vdim: int | None = None, bias: bool = True, add_bias_kv: bool = False
) -> int:
    kdim, vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
    return embed_dim * (2 * embed_dim + kdim + vdim) + 4 * embed_dim * bool(bias) + 2 * embed_dim * bool(add_bias_kv)


def _luong_parameters(query_dim: int, key_dim: int, score: str = "general", hidden_dim: int | None = None) -> int:
    hidden = query_dim if hidden_dim is None else hidden_dim
    counts = {"dot": 0, "general": query_dim * key_dim, "concat": hidden * (query_dim + key_dim + 1)}
    if score not in counts:
        raise ValueError(f"score must be one of {', '.join(counts)}, got {score!r}")
    return counts[score]


def _relative_parameters(num_heads: int, max_distance: int = 128, num_buckets: int | None = 32, bidirectional: bool = True) -> int:
    if num_buckets is not None:
        return num_heads * num_buckets
    return num_heads * (2 * max_distance + 1 if bidirectional else max_distance + 1)


def _shapes(query: Shape, key: Shape, value: Shape) -> list[tuple[int, ...]]:
    shapes = []
    for name, given in (("query", query), ("key", key), ("value", value)):
        if not isinstance(given, (Tensor, Sequence)) or isinstance(given, str):
            raise TypeError(f"{name} must be a tensor or a shape, got {type(given).__name__}")
        shape = tuple(given.shape if isinstance(given, Tensor) else given)
        if len(shape) < 3:
            raise ValueError(f"{name} must have shape (..., num_heads, seqlen, head_dim), got {shape}")
        for size in shape:
            number(name, size, 0)
        shapes.append(shape)
    q, k, v = shapes
    if k[:-3] != q[:-3] or (k[-3] != q[-3] and (k[-3] == 0 or q[-3] % k[-3])) or k[-1] != q[-1]:
        raise ValueError(f"key must fit query, {q}, as in attention, got {k}")
    if v[:-1] != k[:-1]:
        raise ValueError(f"value must have the shape of key, {k}, but for head_dim_v, got {v}")
    return shapes


def _visible(mask: Mask | Tensor, query: tuple[int, ...], key: tuple[int, ...], query_offset: int | Tensor | None) -> int:
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be a bool tensor (True = attend) or a mask, got {mask.dtype}")
    elif not isinstance(mask, Mask):
        raise TypeError(f"mask must be a bool tensor (True = attend) or a mask, got {type(mask).__name__}")
    scores = (*query[:-1], key[-2])
    if not math.prod(scores):
        return 0
    if isinstance(mask, Tensor):
        check_broadcasts("mask", mask, scores)
        visible = mask.expand(*mask.shape[:-2], *scores[-2:])
        return int(visible.sum()) * (math.prod(scores) // visible.numel())
    sizes: dict[str, Any] = dict(num_heads=query[-3], seqlen_q=query[-2], seqlen_kv=key[-2], query_offset=query_offset)
    lower(mask, batch_shape=query[:-3], **sizes)  # checks it
    return round(mask.density(query[-2], key[-2], query_offset=query_offset) * math.prod(scores))
