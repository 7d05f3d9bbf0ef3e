"""From the arguments of the public functions to those of the operators: checks, lowering, autocast, and which operator runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import compiled, fake  # noqa: F401  (registrations)
from .arguments import Arguments, real_dtype, without_empty_lists
from .autograd import record_attention
from .library import below_autograd, ops
from .lowering import lower
from .masks import Mask
from .observers import observers
from .relative_bias import RelativeBias
from .rotary import RotaryEmbedding, check_rotary
from .seeds import draw_seed

run_forward = ops.attention_fwd.default._op  # past the Python part of OpOverload.__call__
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_functorch_active = torch._C._are_functorch_transforms_active
autocast_active = torch._C._is_any_autocast_enabled


def runs_directly() -> bool:
    """Whether calls are neither traced, transformed, cast nor observed."""
    return not (_is_compiling() or observers or autocast_active() or _functorch_active() or forward_ad._current_level >= 0)


def runs_plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a call with these three tensors alone runs directly and is not recorded."""
    return runs_directly() and not (_is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))


def forward(args: Arguments) -> tuple[Tensor, Tensor]:
    """(out, lse) by the operator that the situation asks for."""
    if _is_compiling():
        out, lse, _ = ops.attention(*without_empty_lists(args), _is_grad_enabled())
    elif needs_derivatives(args):
        out, lse, _ = record_attention(args)
    else:
        with below_autograd():
            out, lse, _ = run_forward(*args, False)
    return out, lse


def needs_derivatives(args: Sequence[Any]) -> bool:
    """Whether an eager call must be recorded or transformed."""
    if _functorch_active() or forward_ad._current_level >= 0:
        return True
    return _is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def is_one_operator(query: Tensor) -> bool:
    """Whether each direction of a call is one operator: where it is compiled, and for subclasses of tensors, such as DTensor."""
    return _is_compiling() or is_traceable_wrapper_subclass(query)


def allows_tf32(query: Tensor) -> bool:
    """Whether products of this CUDA tensor may round what they multiply to tf32: whether those of torch.matmul may."""
    return query.dtype == torch.float32 and _matmul_is_tf32()


@torch.compiler.assume_constant_result
def _matmul_is_tf32() -> bool:
    # torch.backends.cuda.matmul.allow_tf32 raises where it was said by fp32_precision. torch.compile guards the setting itself.
    return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"


def default_scale(head_dim: int) -> float:
    return int(head_dim) ** -0.5 if head_dim else 1.0


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Mask | Tensor | None,
    bias: Tensor | RelativeBias | None,
    scale: float | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    generator: torch.Generator | None,
    query_offset: int | Sequence[int] | Tensor | None,
    rotary: RotaryEmbedding | None = None,
    block_lists: bool = True,
) -> Arguments:
    """The operator's arguments, with everything checked that the operator does not check; draws the seed of dropout. Without `block_lists`
    a mask beyond intervals becomes a bool tensor."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) and not (tensor is None and name == "value"):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if query.dim() < 3:
        raise ValueError(f"query must have shape (..., num_heads, seqlen_q, head_dim), got {tuple(query.shape)}")
    if key.dim() != query.dim():
        raise ValueError(f"key must have the rank of query, got key {tuple(key.shape)} and query {tuple(query.shape)}")
    if not query.dtype.is_floating_point:
        raise TypeError(f"query must be float32, float64, bfloat16 or float16, got {query.dtype}")
    if autocast_active():
        query, key, value = (cast_for_autocast(tensor) for tensor in (query, key, value))
    if scale is None:
        scale = default_scale(query.shape[-1])
    else:
        scale = check_number("scale", scale, "a finite number", lambda x: -math.inf < x < math.inf)
    softcap = 0.0 if softcap is None else check_number("softcap", softcap, "a finite number > 0", lambda x: 0 < x < math.inf)
    dropout_p = check_dropout_p(dropout_p)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")

    if query_offset is not None:
        query_offset = _offsets(query_offset, query)
    real = real_dtype(query.dtype)
    if isinstance(bias, RelativeBias):
        bias = bias.for_call(query, key, query_offset)
    if bias is not None:
        bias = check_float("bias", bias, " (a bool tensor is passed as mask=)")
        if bias.dtype not in (real, torch.bfloat16, torch.float16):
            bias = bias.to(real)
    if alibi_slopes is not None:
        alibi_slopes = check_per_head("alibi_slopes", alibi_slopes, query.shape[-3], real)
    if sinks is not None:
        sinks = check_per_head("sinks", sinks, query.shape[-3], real)
    if isinstance(mask, Tensor) and mask.dtype.is_floating_point:
        raise TypeError(
            f"mask must be a bool tensor (True = attend) or a mask, got {mask.dtype}: pass what is added to the scores as bias="
        )
    lowered = lower(
        mask,
        batch_shape=query.shape[:-3],
        num_heads=query.shape[-3],
        seqlen_q=query.shape[-2],
        seqlen_kv=key.shape[-2],
        query_offset=query_offset,
        device=query.device,
        block_lists=block_lists,
    )
    query_table = key_table = None
    if rotary is not None:
        query_table, key_table = _tables(rotary, query, key, query_offset)
    seed = None
    if dropout_p > 0:
        seed = draw_seed(query, key, value, generator)
    return Arguments(
        query,
        key,
        value,
        lowered.mask,
        bias,
        alibi_slopes,
        sinks,
        lowered.key_lengths,
        lowered.documents,
        lowered.query_offset,
        seed,
        lowered.block_rows,
        lowered.block_tiles,
        lowered.block_bits,
        query_table,
        key_table,
        scale,
        softcap,
        dropout_p,
        lowered.intervals,
        (),
        query.is_cuda and allows_tf32(query),
        rotary is not None and rotary.interleaved,
    )


def cast_for_autocast(tensor: Any) -> Any:
    """As torch's autocast casts the arguments of scaled_dot_product_attention: to the lower precision, float64 excepted."""
    if tensor is None or not tensor.dtype.is_floating_point or tensor.dtype == torch.float64:
        return tensor
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """For products in the dtype that their inputs have."""
    return torch.autocast(tensor.device.type, enabled=False) if autocast_active() else contextlib.nullcontext()


def check_number(name: str, value: Any, expected: str, accepts: Callable[[float], bool]) -> float:
    if not isinstance(value, float):
        if isinstance(value, (bool, Tensor, str)) or not hasattr(value, "__float__"):
            raise TypeError(f"{name} must be {expected}, got {value!r}")
        value = float(value)
    if not accepts(value):
        raise ValueError(f"{name} must be {expected}, got {value}")
    return value


def check_dropout_p(dropout_p: Any) -> float:
    return check_number("dropout_p", dropout_p, "a number in [0, 1]", lambda p: 0 <= p <= 1)


def check_float(name: str, tensor: Any, hint: str = "") -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a float tensor{hint}, got {type(tensor).__name__}")
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name} must be a float tensor{hint}, got {tensor.dtype}")
    return tensor


def check_per_head(name: str, tensor: Any, num_heads: int, real: torch.dtype) -> Tensor:
    check_float(name, tensor)
    if tensor.dim() != 1 or tensor.shape[0] != num_heads:
        raise ValueError(f"{name} must have shape ({num_heads},), one per query head, got {tuple(tensor.shape)}")
    return tensor.to(real).contiguous()


def _tables(rotary: Any, query: Tensor, key: Tensor, query_offset: int | Tensor | None) -> tuple[Tensor, Tensor]:
    check_rotary(rotary, query=query, key=key)
    return rotary.tables_for_call(query, key, query_offset)


def _offsets(query_offset: Any, query: Tensor) -> int | Tensor:
    if isinstance(query_offset, (list, tuple)):
        if not all(isinstance(offset, int) and not isinstance(offset, bool) for offset in query_offset):
            raise TypeError(f"query_offset must be an integer or one per batch item, got {query_offset!r}")
        return torch.tensor(query_offset, dtype=torch.int64, device=query.device)
    return query_offset
