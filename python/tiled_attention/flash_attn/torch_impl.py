"""The kernels of torch's own flash attention on CUDA, served here: torch.nn.attention.activate_flash_attention_impl("tiled_attention").

Torch keeps a registry of such implementations. An active one takes the place of aten's flash attention operators, which
F.scaled_dot_product_attention calls where it chooses that backend, and torch.nn.attention.varlen.varlen_attn always.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.attention as registry
from torch import Tensor

from ..arguments import Arguments, VarlenArguments
from ..attention_varlen import _prepare as prepare_varlen
from ..call import prepare
from ..library import ops
from .options import bias_of_slopes, pattern_of

NAME = "tiled_attention"


class Handle:
    """Keeps the kernels in place. remove(), which torch calls, gives torch its own back."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
        self._library = None


def install_kernels(device: str = "CUDA") -> Handle:
    """In the place of torch's for tensors of a device, named as a dispatch key."""
    library = torch.library.Library("aten", "IMPL", device)
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, device)
    return Handle(library)


def register_impl() -> bool:
    """Adds the name to torch's registry, without activating it. Whether torch has one."""
    if not hasattr(registry, "register_flash_attention_impl"):
        return False
    registry.register_flash_attention_impl(NAME, register_fn=install_kernels)
    return True


def _dense(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, dropout_p: float, **options: Any) -> Arguments:
    """For heads in front of tokens; draws the seed of dropout."""
    mask = pattern_of(is_causal, options.get("window", (-1, -1))).mask
    slopes, bias = options.get("alibi_slopes"), None
    if slopes is not None and slopes.dim() == 2:
        bias, slopes = bias_of_slopes(slopes, query, key), None
    return prepare(query, key, value, mask, bias, scale, None, slopes, None, dropout_p, None, None)


def _random_state(args: Arguments | VarlenArguments) -> tuple[Tensor, Tensor]:
    """What torch carries from forward to backward: uint64 (2,) that holds the seed, and uint64 () that holds nothing."""
    seed, device = args.dropout_seed, args.query.device
    state = torch.zeros(2, dtype=torch.int64, device=device)
    if seed is not None:
        state[0] = seed
    return state.view(torch.uint64), torch.zeros((), dtype=torch.uint64, device=device)


def _with_seed(args: Any, dropout_p: float, state: Tensor) -> Any:
    return args._replace(dropout_p=dropout_p, dropout_seed=state.view(torch.int64)[0]) if dropout_p > 0 else args


def _refuse(return_debug_mask: bool, **unserved: Any) -> None:
    if return_debug_mask:
        raise RuntimeError("return_debug_mask must be False: flash_attn_func(return_attn_probs=True) returns the probabilities")
    for name, given in unserved.items():
        if given is not None:
            raise RuntimeError(f"{name} must be None in tiled_attention's flash attention, got {type(given).__name__}")


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse(return_debug_mask)
    args = _dense(query, key, value, is_causal, scale, dropout_p)
    out, lse, _ = ops.attention_fwd(*args, False)
    return out, lse, None, None, query.shape[2], key.shape[2], *_random_state(args), out.new_empty(0)


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    args = _with_seed(_dense(query, key, value, is_causal, scale, 0.0), dropout_p, philox_seed)
    return tuple(ops.attention_bwd(grad_out, None, *args, out, logsumexp, out.new_empty(0), 7)[:3])


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:
    """Tokens in front of heads: (batch, seqlen, num_heads, head_dim), or packed (total, num_heads, head_dim) with offsets."""
    _refuse(return_debug_mask, seqused_k=seqused_k, block_table=block_table)
    window = _window(window_size_left, window_size_right)
    if cum_seq_q is None:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        dense = _dense(query, key, value, is_causal, scale, dropout_p, window=window, alibi_slopes=alibi_slopes)
        out, lse, _ = ops.attention_fwd(*dense, False)
        return out.transpose(1, 2), lse, *_random_state(dense), out.new_empty(0)
    args = _varlen(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window, scale, alibi_slopes, dropout_p)
    out, lse, _ = ops.attention_varlen_fwd(*args, False)
    return out, lse, *_random_state(args), out.new_empty(0)


def _flash_into(out: Tensor, *args: Any, **options: Any) -> Tensor:
    result, lse, *_ = _flash(*args, **options)
    out.copy_(result)
    return lse


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    window = _window(window_size_left, window_size_right)
    if cum_seq_q is None:
        query, key, value, out, grad_out = (x.transpose(1, 2) for x in (query, key, value, out, grad_out))
        args = _with_seed(_dense(query, key, value, is_causal, scale, 0.0, window=window), dropout_p, rng_state)
        grads = ops.attention_bwd(grad_out, None, *args, out, logsumexp, out.new_empty(0), 7)[:3]
        return tuple(grad.transpose(1, 2) for grad in grads)
    packed = _varlen(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window, scale, None, 0.0)
    packed = _with_seed(packed, dropout_p, rng_state)
    return tuple(ops.attention_varlen_bwd(grad_out, None, *packed, out, logsumexp, out.new_empty(0), 7)[:3])


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    window: tuple[int, int],
    scale: float | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
) -> VarlenArguments:
    mask = pattern_of(is_causal, window).mask
    offsets = (cum_seq_q, cum_seq_q if cum_seq_k is None else cum_seq_k)
    return prepare_varlen(query, key, value, *offsets, max_q, max_k, mask, scale, None, alibi_slopes, None, None, dropout_p, None)


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


_KERNELS: dict[str, Any] = {
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_forward_no_dropout_inplace": _flash_into,
    "_flash_attention_backward": _flash_backward,
}
