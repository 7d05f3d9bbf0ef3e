"""From the arguments of the public functions of linear attention to those of its operators: checks, feature maps, and which one runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import linear_compiled, linear_fake  # noqa: F401  (registrations)
from .arguments import LinearArguments, real_dtype
from .call import autocast_active, cast_for_autocast, check_float, check_number, needs_derivatives
from .fake import check_broadcasts, check_query_key_value
from .library import below_autograd, ops
from .linear_autograd import record_linear_attention
from .mask_checks import is_readable

FEATURE_MAPS = {"identity": 0, "elu": 1, "relu": 2, "exp": 3}
FeatureMap = str | Callable[[Tensor], Tensor]

run_step = ops.linear_attention_step.default._op  # past the Python part of OpOverload.__call__
run_step_in_place = ops.linear_attention_step_.default._op
_run_forward = ops.linear_attention_fwd.default._op
_is_compiling = torch.compiler.is_compiling


class LinearState(NamedTuple):
    """What linear attention keeps of the keys and values that it has seen.

    Each term of the sums is decayed by the gates after it. float32, and float64 for float64 inputs. head_dim is that of the features.
    Where log_decay or the initial state is per query head there are num_heads heads.

    Attributes:
        kv: (..., num_heads_kv, head_dim, head_dim_v), the sum of phi(key) value^T.
        k_sum: (..., num_heads_kv, head_dim), the sum of phi(key).
    """

    kv: Tensor
    k_sum: Tensor


def forward(args: LinearArguments) -> tuple[Tensor, Tensor, Tensor]:
    """(out, kv, k_sum) by the operator that the situation asks for."""
    if _is_compiling():
        return ops.linear_attention(*args)
    if needs_derivatives(args):
        return record_linear_attention(args)
    with below_autograd():
        return _run_forward(*args)


def step(args: LinearArguments) -> tuple[Tensor, Tensor, Tensor]:
    """The same for one token."""
    if _needs_gradients(args):
        return forward(args)
    if _is_compiling():
        return ops.linear_attention_step(*_of_step(args))
    with below_autograd():
        return run_step(*_of_step(args))


def step_in_place(args: LinearArguments, state: Any) -> Tensor:
    """out; `state` becomes the state after the token."""
    if _needs_gradients(args):
        raise RuntimeError(
            "inplace must be False where the call is differentiated or transformed (an input that requires a gradient, forward mode, "
            "torch.func), got True: use torch.no_grad(), or the state that is returned"
        )
    if args.initial_kv is not state[0] or args.initial_k_sum is not state[1]:
        raise ValueError(
            f"state must have one state per query head ({args.query.shape[-3]} heads) with inplace=True where log_decay has, "
            f"got kv {tuple(state[0].shape)}"
        )
    if _is_compiling():
        return ops.linear_attention_step_(*_of_step(args))
    for name, tensor in zip(LinearState._fields, state):
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(f"state.{name} must hold every element by itself with inplace=True, got strides {tensor.stride()}")
    with below_autograd():
        out = run_step_in_place(*_of_step(args))
    increment_version(state)
    return out


def _needs_gradients(args: LinearArguments) -> bool:
    if _is_compiling():
        return torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    return needs_derivatives(args)


def _of_step(args: LinearArguments) -> tuple[Any, ...]:
    return *args[:7], args.query_map, args.key_map, args.normalize, args.scale


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap],
    causal: bool,
    normalize: bool,
    scale: float | None,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    state: LinearState | None,
    state_name: str,
    cu_seqlens: Any = None,
) -> LinearArguments:
    """The operator's arguments, with everything checked. Where a decay or the state is per query head, so are key and value then."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    for name, flag in (("causal", causal), ("normalize", normalize)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    if query.dim() < 3:
        raise ValueError(f"query must have shape (..., num_heads, seqlen_q, head_dim), got {tuple(query.shape)}")
    if cu_seqlens is not None:
        cu_seqlens = _offsets(cu_seqlens, query, key)
    if autocast_active():
        query, key, value = (cast_for_autocast(tensor) for tensor in (query, key, value))
    check_query_key_value(query, key, value)
    for name, tensor in (("key", key), ("value", value)):
        _check_device(name, tensor, query)
    if causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(f"key must have the length of query with causal=True, got key {tuple(key.shape)} and query {tuple(query.shape)}")
    if key_mask is not None:
        key_mask = _full_mask(key_mask, key)

    maps = feature_map if isinstance(feature_map, (tuple, list)) else (feature_map, feature_map)
    if len(maps) != 2:
        raise ValueError(f"feature_map must be one map or a pair (query map, key map), got {len(maps)} of them")
    query, query_map = _apply_map(maps[0], query, "query", None, normalize)
    key, key_map = _apply_map(maps[1], key, "key", key_mask, normalize)
    if not query.dtype == key.dtype == value.dtype:
        wide = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"feature_map must give query and key one head_dim, got {query.shape[-1]} and {key.shape[-1]}")

    scale = 1.0 if scale is None else check_number("scale", scale, "a finite number", lambda x: -math.inf < x < math.inf)
    for name, given in (("log_decay", log_decay), (state_name, state)):
        if given is not None and not causal:
            raise ValueError(f"{name} must be None with causal=False, where every query sees all keys, got {type(given).__name__}")
    kv, k_sum = (None, None) if state is None else _check_state(state, state_name, query, key, value, cu_seqlens)
    if log_decay is not None:
        log_decay = _full_decay(log_decay, query, key)

    num_heads, num_heads_kv = query.shape[-3], key.shape[-3]
    states = [part for part in (log_decay, kv) if part is not None]
    if num_heads != num_heads_kv and any(part.shape[-3] == num_heads for part in states):
        key, value = (part.repeat_interleave(num_heads // num_heads_kv, -3) for part in (key, value))
        if kv is not None and k_sum is not None and kv.shape[-3] != num_heads:
            kv, k_sum = kv.repeat_interleave(num_heads // num_heads_kv, -3), k_sum.repeat_interleave(num_heads // num_heads_kv, -2)
        if log_decay is not None and log_decay.shape[-3] not in (1, num_heads):
            log_decay = log_decay.repeat_interleave(num_heads // num_heads_kv, -3)
    if log_decay is not None:
        log_decay = log_decay.to(real_dtype(query.dtype)).expand(*key.shape[:-1], log_decay.shape[-1])
    return LinearArguments(
        query,
        key,
        value,
        key_mask,
        log_decay,
        kv,
        k_sum,
        cu_seqlens,
        query_map,
        key_map,
        causal,
        normalize,
        1.0 if normalize else scale,
    )


def out_dtype(query: Tensor) -> torch.dtype:
    """Of out: that of query after autocast, whatever a feature map makes of it."""
    return cast_for_autocast(query[..., :0]).dtype if autocast_active() else query.dtype


def _apply_map(feature_map: Any, tensor: Tensor, name: str, key_mask: Tensor | None, normalize: bool) -> tuple[Tensor, int]:
    """The tensor with a callable applied, and the code of what the operator applies. Hidden keys are not shown to a callable.

    `map_query` may leave out a factor per query, which cancels in the quotient alone.
    """
    if isinstance(feature_map, str):
        if feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map must be one of {', '.join(FEATURE_MAPS)}, a callable or a pair, got {feature_map!r}")
        return tensor, FEATURE_MAPS[feature_map]
    if not callable(feature_map):
        raise TypeError(f"feature_map must be a name, a callable or a pair, got {type(feature_map).__name__}")
    if key_mask is not None:
        tensor = torch.where(key_mask.mT, tensor, 0.0)
    features = (getattr(feature_map, f"map_{name}", feature_map) if normalize else feature_map)(tensor)
    if not isinstance(features, Tensor):
        raise TypeError(f"feature_map must return a tensor, got {type(features).__name__} for {name}")
    if torch.promote_types(features.dtype, tensor.dtype) != features.dtype:
        raise TypeError(f"feature_map must keep the dtype of {name} ({tensor.dtype}) or return a wider one, got {features.dtype}")
    if features.dim() != tensor.dim() or any(a != b for a, b in zip(features.shape[:-1], tensor.shape[:-1])):
        raise ValueError(
            f"feature_map must keep the shape of {name}, {tuple(tensor.shape)}, but for the last size, got {tuple(features.shape)}"
        )
    return features, FEATURE_MAPS["identity"]


def _full_mask(key_mask: Any, key: Tensor) -> Tensor:
    """(..., seqlen_kv) as (..., 1, 1, seqlen_kv), of the rank of key."""
    if not isinstance(key_mask, Tensor):
        raise TypeError(f"key_mask must be a bool tensor (True = the key counts), got {type(key_mask).__name__}")
    if key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask must be a bool tensor (True = the key counts), got {key_mask.dtype}")
    _check_device("key_mask", key_mask, key)
    shape = (*key.shape[:-3], key.shape[-2])
    check_broadcasts("key_mask", key_mask, shape)
    for _ in range(len(shape) - key_mask.dim()):
        key_mask = key_mask.unsqueeze(0)
    return key_mask.unsqueeze(-2).unsqueeze(-2)


def _full_decay(log_decay: Any, query: Tensor, key: Tensor) -> Tensor:
    """(..., heads, n) or (..., heads, n, head_dim) as (..., heads, n, 1 or head_dim), of the rank of query; checks its values."""
    check_float("log_decay", log_decay)
    _check_device("log_decay", log_decay, query)
    rank = query.dim()
    if log_decay.dim() not in (rank - 1, rank):
        raise ValueError(
            f"log_decay must have shape (..., num_heads, seqlen) or (..., num_heads, seqlen, head_dim), rank {rank - 1} or {rank}, "
            f"got {tuple(log_decay.shape)}"
        )
    per_token = log_decay.dim() == rank - 1
    full = log_decay.unsqueeze(-1) if per_token else log_decay
    heads = query.shape[-3] if full.shape[-3] == query.shape[-3] else key.shape[-3]
    shape = (*key.shape[:-3], heads, key.shape[-2])
    check_broadcasts("log_decay", log_decay, shape if per_token else (*shape, key.shape[-1]))
    if is_readable(log_decay) and log_decay.numel():
        largest = log_decay.detach().amax().item()
        if not largest <= 0:
            raise ValueError(f"log_decay must be <= 0 and not NaN, got {largest}")
    return full


def _offsets(cu_seqlens: Any, query: Tensor, key: Tensor) -> Tensor:
    """int64; the operators check the values."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor, got {got}")
    _check_device("cu_seqlens", cu_seqlens, query)
    linear_fake.check_packed(query, key, cu_seqlens)
    return cu_seqlens.long()


def _check_state(state: Any, name: str, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    if not isinstance(state, tuple) or len(state) != 2 or not all(isinstance(part, Tensor) for part in state):
        raise TypeError(f"{name} must be a LinearState(kv, k_sum) of tensors, got {type(state).__name__}")
    kv, k_sum = state
    num_heads, num_heads_kv, real = query.shape[-3], key.shape[-3], real_dtype(query.dtype)
    heads = num_heads if kv.dim() > 2 and kv.shape[-3] == num_heads else num_heads_kv
    leading = key.shape[:-3] if cu_seqlens is None else (cu_seqlens.shape[0] - 1,)
    shape = (*leading, heads, key.shape[-1])
    for field, part, expected in (("kv", kv, (*shape, value.shape[-1])), ("k_sum", k_sum, shape)):
        if part.dtype != real:
            raise TypeError(f"{name}.{field} must be {real} for {query.dtype} inputs, got {part.dtype}")
        if part.dim() != len(expected) or any(a != b for a, b in zip(part.shape, expected)):
            or_more = "" if num_heads == num_heads_kv else f" (or {num_heads} heads)"
            raise ValueError(f"{name}.{field} must have shape {tuple(expected)}{or_more}, got {tuple(part.shape)}")
        _check_device(f"{name}.{field}", part, query)
    return kv, k_sum


def _check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on the device of query ({query.device}), got {tensor.device}")
