"""What the functions share: windows as masks, slopes per batch item, and errors that speak of the caller's arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..arguments import real_dtype
from ..lowering import lower
from ..mask_rules import UNBOUNDED
from ..masks import Causal, Mask, SlidingWindow

# What a wrong argument may raise on its way in.
ERRORS = (ValueError, TypeError, RuntimeError, AttributeError, IndexError)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_is_compiling = torch.compiler.is_compiling


class Pattern(NamedTuple):
    """Causality and a window, for the functions and for the operators."""

    mask: Mask | None
    intervals: Sequence[int]  # as in Arguments


EVERY_KEY = Pattern(None, ())
_kept: dict[tuple[bool, int, int], Pattern] = {}


def pattern_of(causal: bool, window_size: Sequence[int]) -> Pattern:
    """window_size: (left, right), negative for no limit. Causal: aligned to the bottom right, and the window ends at the query."""
    left, right = window_size
    if not causal and left < 0 and right < 0:
        return EVERY_KEY
    key = (bool(causal), left, right)
    if _is_compiling():
        return _pattern(*key)
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= 256:
            _kept.clear()
        found = _kept[key] = _pattern(*key)
    return found


def _pattern(causal: bool, left: int, right: int) -> Pattern:
    mask: Mask | None = None
    if causal:
        mask = Causal() if left < 0 else SlidingWindow(left, 0)
    elif left >= 0 or right >= 0:
        mask = SlidingWindow(UNBOUNDED if left < 0 else left, UNBOUNDED if right < 0 else right)
    return Pattern(mask, lower(mask, batch_shape=(), num_heads=1, seqlen_q=1, seqlen_kv=1).intervals)


def bias_of_slopes(alibi_slopes: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
    """-slope * |p - j| for slopes (batch, num_heads), as a bias by distance (batch, num_heads, 1, seqlen_q + seqlen_kv - 1)."""
    batch, num_heads, seqlen_q, _ = query.shape
    seqlen_kv = key.shape[-2]
    if tuple(alibi_slopes.shape) != (batch, num_heads):
        raise ValueError(f"alibi_slopes must have shape {(num_heads,)} or {(batch, num_heads)}, got {tuple(alibi_slopes.shape)}")
    if seqlen_q == 0 or seqlen_kv == 0:
        return None
    # Element t is for j - i = t - (seqlen_q - 1), which is j - p = t - (seqlen_kv - 1).
    distance = torch.arange(seqlen_q + seqlen_kv - 1, device=query.device) - (seqlen_kv - 1)
    return -alibi_slopes.to(real_dtype(query.dtype)).unflatten(1, (num_heads, 1, 1)) * distance.abs()


# Of `attention` and its kin: their arguments under the names that they have here.
_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "scale": "softmax_scale",
    "key_cache": "k_cache",
    "value_cache": "v_cache",
    "new_key": "k",
    "new_value": "v",
    "page_table": "block_table",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_kv": "max_seqlen_k",
}
_ANY_NAME = re.compile(r"\b(" + "|".join(_NAMES) + r")\b")


def explain(error: BaseException, shapes: dict[str, tuple[Any, str]], options: dict[str, Any], packed: str = "") -> None:
    """Raises what is wrong with the arguments, if anything is; otherwise returns, so that `error` goes on.

    Args:
        error: what came.
        shapes: per tensor argument what was given, and its dimensions by name: equal names are equal sizes.
        options: the other arguments, by name.
        packed: the argument that all of q, k and v come from, if they do.
    """
    sizes: dict[str, tuple[int, str]] = {}
    first = next(iter(shapes))
    for name, (tensor, dimensions) in shapes.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}") from error
        names = dimensions.split()
        if tensor.dim() != len(names):
            raise RuntimeError(f"{name} must have shape ({', '.join(names)}), got {tuple(tensor.shape)}") from error
        if tensor.dtype not in _DTYPES:
            raise RuntimeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}") from error
        start = shapes[first][0]
        for what, ours, theirs in (("dtype", tensor.dtype, start.dtype), ("device", tensor.device, start.device)):
            if ours != theirs:
                raise RuntimeError(f"{name} must have the {what} of {first} ({theirs}), got {ours}") from error
        for size, dimension in zip(tensor.shape, names):
            wanted, where = (int(dimension), "") if dimension.isdigit() else sizes.setdefault(dimension, (size, name))
            if size != wanted:
                given = f" with {dimension} {wanted}, as in {where}" if where else ""
                raise RuntimeError(f"{name} must have shape ({', '.join(names)}){given}, got {tuple(tensor.shape)}") from error
    heads, heads_k = sizes.get("nheads"), sizes.get("nheads_k")
    if heads and heads_k and heads[0] != heads_k[0] and (heads_k[0] == 0 or heads[0] % heads_k[0]):
        raise RuntimeError(
            f"{heads_k[1]} must have a number of heads that divides that of {heads[1]}, got {heads_k[0]} and {heads[0]}"
        ) from error
    _explain_options(error, options)
    if type(error) in (ValueError, TypeError, RuntimeError):
        names_here = {ours: packed if packed and ours in ("query", "key", "value") else theirs for ours, theirs in _NAMES.items()}
        message = _ANY_NAME.sub(lambda match: names_here[match[0]], str(error))
        if message != str(error):
            raise type(error)(message) from error


def option_values(dropout_p: Any, softmax_scale: Any, window_size: Any, softcap: Any, alibi_slopes: Any) -> dict[str, Any]:
    """`options` of `explain`."""
    names = ("dropout_p", "softmax_scale", "window_size", "softcap", "alibi_slopes")
    return dict(zip(names, (dropout_p, softmax_scale, window_size, softcap, alibi_slopes)))


def _explain_options(error: BaseException, options: dict[str, Any]) -> None:
    window = options["window_size"]
    if not isinstance(window, Sequence) or len(window) != 2 or not all(is_integer(side) for side in window):
        raise TypeError(f"window_size must be two integers (left, right), -1 for no limit, got {window!r}") from error
    for name in ("softcap", "dropout_p", "softmax_scale"):
        number: Any = options.get(name)
        if number is None and name != "softcap":
            continue
        if isinstance(number, (bool, str, Tensor)) or not hasattr(number, "__float__"):
            raise TypeError(f"{name} must be a number, got {number!r}") from error
        if not math.isfinite(number):
            raise ValueError(f"{name} must be finite, got {number}") from error
    slopes = options.get("alibi_slopes")
    if slopes is not None and not (isinstance(slopes, Tensor) and slopes.dtype.is_floating_point and slopes.dim() in (1, 2)):
        given = f"{slopes.dtype} {tuple(slopes.shape)}" if isinstance(slopes, Tensor) else type(slopes).__name__
        raise TypeError(f"alibi_slopes must be a float tensor (nheads,) or (batch_size, nheads), got {given}") from error


def is_integer(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_table(name: str, table: Any, batch: int) -> None:
    if not isinstance(table, Tensor) or table.dtype != torch.int32:
        raise TypeError(f"{name} must be an int32 tensor, got {table.dtype if isinstance(table, Tensor) else type(table).__name__}")
    if table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(f"{name} must have shape ({batch}, max_blocks), got {tuple(table.shape)}")


def refuse(message: str) -> NoReturn:
    raise RuntimeError(message)
