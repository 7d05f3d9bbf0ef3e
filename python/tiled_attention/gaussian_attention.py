"""Attention whose scores are squared distances: kernel regression with a Gaussian kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .arguments import real_dtype
from .attention import attention
from .call import autocast_active, cast_for_autocast, without_autocast
from .fake import check_query_key_value
from .mask_checks import is_readable
from .masks import Mask

_INF = math.inf


@overload
def gaussian_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bandwidth: float | Tensor,
    *,
    mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    return_lse: Literal[False] = False,
    compute_dtype: torch.dtype | None = None,
) -> Tensor: ...


@overload
def gaussian_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bandwidth: float | Tensor,
    *,
    mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    return_lse: Literal[True],
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...


def gaussian_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bandwidth: float | Tensor,
    *,
    mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Nadaraya-Watson regression with a Gaussian kernel: the mean of the visible values, weighted by nearness, exact, in O(n) memory.

        score = -|query_i - key_j|^2 / (2 bandwidth^2)
        lse = log(sum_j exp(score))
        out = sum_j dropout(exp(score - lse)) * value_j

    Where all keys of a row have the same norm, this is softmax attention with scale bandwidth ** -2.

    The score is computed as (query . key - |key|^2 / 2) / bandwidth^2, large numbers whose difference is small, and therefore in float64
    whatever the inputs are: up to (|query| + |key|) / bandwidth = 10^5 it is exact to 10^-5. `compute_dtype=torch.float32` takes about half
    the time and is exact to 2^-24 (|query| + |key|)^2 / bandwidth^2 only: for data near the origin, compared with the bandwidth.

    Args:
        query, key, value, mask, dropout_p, generator, query_offset: as in `attention`, grouped heads included.
        bandwidth: > 0, a number, or a float tensor () or (num_heads,), per query head; may require a gradient. The values of a tensor are
            checked where they can be read: eager, on the CPU, not under torch.func.
        return_lse: also return lse.
        compute_dtype: torch.float64 or torch.float32; None: float64. Inputs that are wider stay as they are.

    Returns:
        out (..., num_heads, seqlen_q, head_dim_v), dtype of query; with `return_lse` (out, lse), as of `attention`. A row that sees no key
        gives zeros and -inf. A key with an infinite feature is infinitely far away: its weight is 0.

    Differentiable in query, key, value and bandwidth, as `attention` is.

    Raises:
        ValueError, TypeError, RuntimeError: naming the argument.

    Source: Nadaraya, On estimating regression (1964); Watson, Smooth regression analysis (1964).
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if autocast_active():
        query, key, value = (cast_for_autocast(tensor) for tensor in (query, key, value))
    check_query_key_value(query, key, value)
    if compute_dtype not in (None, torch.float64, torch.float32):
        raise ValueError(f"compute_dtype must be torch.float64, torch.float32 or None, got {compute_dtype}")
    wide = torch.promote_types(query.dtype, compute_dtype or torch.float64)
    bandwidth = _check_bandwidth(bandwidth, query, wide)
    dtype = query.dtype
    query, key, value = (tensor.to(wide) for tensor in (query, key, value))

    # An infinite key has distance infinity. A NaN one makes its product with the query NaN, where it is seen, and no gradient elsewhere.
    square = key.detach().square().sum(-1)
    half_square = torch.where(square.isfinite()[..., None], key, 0.0).square().sum(-1) * 0.5
    group = query.shape[-3] // max(key.shape[-3], 1)
    half_square, far = half_square.repeat_interleave(group, -2), (square == _INF).repeat_interleave(group, -2)
    precision: Any  # bandwidth ** -2
    if isinstance(bandwidth, Tensor):
        precision, scale = bandwidth.to(wide).reshape(-1, 1) ** -2, 1.0
        scaled = query * precision[..., None]
    else:
        precision = scale = bandwidth**-2
        scaled = query
    bias = torch.where(far, -_INF, -half_square * precision)[..., None, :]
    with without_autocast(query):
        out, lse = attention(
            scaled,
            key,
            value,
            mask=mask,
            bias=bias,
            scale=scale,
            dropout_p=dropout_p,
            generator=generator,
            query_offset=query_offset,
            return_lse=True,
        )
    out = out.to(dtype)
    if not return_lse:
        return out
    dead = lse == -_INF
    own = torch.where(dead[..., None], 0.0, query).square().sum(-1) * 0.5 * precision
    return out, torch.where(dead, -_INF, lse - own).to(real_dtype(dtype))


def _check_bandwidth(bandwidth: Any, query: Tensor, wide: torch.dtype) -> float | Tensor:
    if isinstance(bandwidth, Tensor):
        if not bandwidth.dtype.is_floating_point:
            raise TypeError(f"bandwidth must be a number or a float tensor, got {bandwidth.dtype}")
        if bandwidth.dim() > 1 or (bandwidth.dim() == 1 and bandwidth.shape[0] != query.shape[-3]):
            raise ValueError(f"bandwidth must have shape () or ({query.shape[-3]},), one per query head, got {tuple(bandwidth.shape)}")
        if bandwidth.device != query.device:
            raise ValueError(f"bandwidth must be on the device of query ({query.device}), got {bandwidth.device}")
        if is_readable(bandwidth) and not bool(((bandwidth > 0) & bandwidth.isfinite()).all()):
            raise ValueError(f"bandwidth must be > 0 and finite, got {bandwidth.detach().tolist()}")
        return bandwidth
    if isinstance(bandwidth, (bool, str)) or not hasattr(bandwidth, "__float__"):
        raise TypeError(f"bandwidth must be a number or a float tensor, got {bandwidth!r}")
    bandwidth = float(bandwidth)
    most = torch.finfo(wide).max ** 0.5
    if not 1 / most < bandwidth < most:
        raise ValueError(f"bandwidth must be > 0 and finite, its square and its reciprocal in the range of {wide}, got {bandwidth}")
    return bandwidth
