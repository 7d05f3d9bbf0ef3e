"""`override_sdpa`: PyTorch's own entry points of attention run here while it is on.

Three things change, and change back, for it and for `record_attention`, which only looks on: the kernel of
aten::scaled_dot_product_attention under CompositeImplicitAutograd (which eager, scripted, compiled and exported callers all reach), the
kernels of aten::_native_multi_head_attention (the inference fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer), and
F.multi_head_attention_forward (whose need_weights=True computes for itself).
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import stock_calls
from .context_parallel import attend_sharded, inside_context_parallel, is_sharded
from .multihead_attention import Columns, InProjection, check_arguments, merge_masks, nested_attention, project_and_attend
from .observers import Shared, observers, tell
from .sdpa import scaled_dot_product_attention
from .stock_calls import ForwardArguments

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class override_sdpa:
    """Run F.scaled_dot_product_attention and nn.MultiheadAttention here while it is on.

    A context manager, or `enable()` and `disable()`. It acts on the whole process, all threads, and counts its uses: nested and
    overlapping ones are fine, the last to end restores torch. Served are calls on CPU in float32, float64, bfloat16 and float16 from eager
    code, TorchScript, `torch.compile` and `torch.export`, nn.MultiheadAttention with and without weights, nn.TransformerEncoder with its
    inference fast path, and whatever else calls scaled_dot_product_attention (Hugging Face models on "sdpa").

    Passed on to torch: other devices and dtypes, nested tensors given to scaled_dot_product_attention, tensor subclasses such as DTensor,
    and every call where the enabled backends are MATH alone (`sdpa_kernel(SDPBackend.MATH)`). Not reached: `torch.vmap` over
    scaled_dot_product_attention, and the slow path with weights of an nn.MultiheadAttention that was scripted. What torch refuses is
    refused with its own errors.

    Compiled code of the process is dropped when it turns on and off (`torch._dynamo.reset()`), and compile caches are kept apart.

    Attributes:
        calls: attention calls served since this object turned it on, by all threads; a call in compiled code counts when it is traced.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._base = 0
        self._served = 0

    @property
    def calls(self) -> int:
        return self._served + (_switch.calls - self._base if self._depth else 0)

    def enable(self) -> override_sdpa:
        """Turn it on, until as many `disable`. Returns this object."""
        _service.enter()
        if not self._depth:
            self._base = _switch.calls
        self._depth += 1
        return self

    def disable(self) -> None:
        """Undo one `enable`.

        Raises:
            RuntimeError: where there is none to undo.
        """
        if not self._depth:
            raise RuntimeError("override_sdpa: disable() without enable()")
        self._depth -= 1
        if not self._depth:
            self._served += _switch.calls - self._base
        _service.leave()

    def __enter__(self) -> override_sdpa:
        return self.enable()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.disable()


class _Switch:
    """Whether the entries serve, and how many calls they served."""

    def __init__(self) -> None:
        self._calls: defaultdict[int, int] = defaultdict(int)  # per thread: no lock that a fork could leave held
        self.serves = False

    @property
    def calls(self) -> int:
        return sum(list(self._calls.values()))

    def count(self) -> None:
        self._calls[threading.get_ident()] += 1


_switch = _Switch()


def _install_entries(undo: ExitStack) -> None:
    stock_attention = torch.library.get_kernel("aten::scaled_dot_product_attention", "AutogradCPU")
    keys = ["CPU", "NestedTensorCPU"] + (["CUDA", "NestedTensorCUDA"] if torch.backends.cuda.is_built() else [])
    stock_heads = {key: torch.library.get_kernel("aten::_native_multi_head_attention", key) for key in keys}
    stock_forward = F.multi_head_attention_forward

    library = torch.library.Library("aten", "IMPL")
    undo.callback(library._destroy)
    with warnings.catch_warnings():  # overriding a kernel of torch warns, and is what this is for
        warnings.simplefilter("ignore")
        library.impl("scaled_dot_product_attention", functools.partial(_attention_kernel, stock_attention), "CompositeImplicitAutograd")
        for key, stock in stock_heads.items():
            library.impl("_native_multi_head_attention", functools.partial(_heads_kernel, stock), key)

    F.multi_head_attention_forward = _forward_over(stock_forward)
    undo.callback(setattr, F, "multi_head_attention_forward", stock_forward)


def _install_service(undo: ExitStack) -> None:
    entries.enter()
    undo.callback(entries.leave)
    undo.callback(setattr, _switch, "serves", False)
    _switch.serves = True
    tag = torch.compiler.config.cache_key_tag
    torch.compiler.config.cache_key_tag = f"{tag}+tiled_attention"
    undo.callback(setattr, torch.compiler.config, "cache_key_tag", tag)
    _forget_compiled()
    undo.callback(_forget_compiled)


entries = Shared(_install_entries)
_service = Shared(_install_service)


def _forget_compiled() -> None:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _attention_kernel(
    stock: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    def run_stock(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
        keys = torch._C._dispatch_keys(query)
        return stock.call_boxed(keys, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    if _switch.serves and is_sharded(query, key, value) and query.device.type == "cpu":
        _switch.count()
        return attend_sharded(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not _serves(query, key, value):
        out = run_stock(query, key, value, attn_mask)
        if observers:
            tell(stock_calls.of_attention(query, key, value, attn_mask, is_causal, scale, enable_gqa))
        return out
    try:
        out = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    except (TypeError, ValueError, RuntimeError):
        # Raises torch's own error where torch refuses it too. Without memory: its CPU kernel reads past the end of some of what it should
        # refuse.
        meta = [x.detach().to("meta") for x in (query, key, value)]
        run_stock(meta[0], meta[1], meta[2], None if attn_mask is None else attn_mask.detach().to("meta"))
        raise
    _switch.count()
    return out


def _heads_kernel(
    stock: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The inference fast path: batch first. mask_type 0: (L, S), 1: (batch, S), 2: (batch, num_heads, L, S); bool True = ignore."""
    tensors = (query, key, value, in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias)
    nested = query.is_nested
    if not _serves(*tensors, nested=nested) or (nested and (mask is not None or not key.is_nested or not value.is_nested)):
        weights_and_mask = (
            in_proj_weight,
            in_proj_bias,
            out_proj_weight,
            out_proj_bias,
            mask,
            need_weights,
            average_attn_weights,
            mask_type,
        )
        result = stock.call_boxed(torch._C._dispatch_keys(query), query, key, value, embed_dim, num_heads, *weights_and_mask)
        if observers:
            tell(stock_calls.of_heads(query, key, num_heads, in_proj_weight, in_proj_bias, mask, mask_type))
        return result
    _switch.count()

    def attend(query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> tuple[Tensor, Tensor | None]:
        return project_and_attend(
            query,
            key,
            value,
            num_heads,
            InProjection(in_proj_weight, None, None, None, in_proj_bias),
            lambda out: F.linear(out, out_proj_weight, out_proj_bias),
            batch_first=True,
            need_weights=need_weights,
            average_weights=average_attn_weights,
            **masks,
        )

    with torch.no_grad():
        if nested:
            return nested_attention(query, key, value, attend)
        attn_mask, padding = (None, mask) if mask_type == 1 else (mask, None)
        bool_mask, bias = merge_masks(attn_mask, padding, query.shape[0], num_heads, query.dtype)
        return attend(query, key, value, mask=bool_mask, bias=bias)


def _forward_over(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        given = ForwardArguments(*args, **kwargs)
        if not _serves_forward(given):
            result = stock(*args, **kwargs)
            if (
                not torch.compiler.is_compiling() and observers and given.need_weights
            ):  # without weights it calls scaled_dot_product_attention
                tell(stock_calls.of_forward(given))
            return result
        _count_forward()
        return _forward(given)

    # torch.jit.script compiles the functions it meets from their source: here it is to compile torch's.
    multi_head_attention_forward.__prepare_scriptable__ = lambda: stock  # type: ignore[attr-defined]
    return multi_head_attention_forward


def _count_forward() -> None:
    _switch.count()


_count_forward._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result without its imports


def _serves_forward(given: ForwardArguments) -> bool:
    tensors = [x for x in given if isinstance(x, Tensor)]
    floats = [x for x in tensors if x is not given.attn_mask and x is not given.key_padding_mask]
    if has_torch_function(tensors) or torch.jit.is_tracing() or inside_context_parallel() is not None or not _serves(*floats):
        return False
    if given.is_causal and given.attn_mask is None:
        return False
    weights = given.in_projection()
    embed_dim = kdim = vdim = given.embed_dim_to_check
    if weights.packed is None:
        if weights.query is None or weights.key is None or weights.value is None:
            return False
        kdim, vdim = weights.key.shape[1], weights.value.shape[1]
    if (given.bias_k is None) != (given.bias_v is None):
        return False
    masks = (given.key_padding_mask, given.attn_mask)
    try:
        check_arguments(given.query, given.key, given.value, embed_dim, kdim, vdim, given.num_heads, *masks, False)
    except (TypeError, ValueError):
        return False
    heads = (given.num_heads if given.query.dim() == 2 else given.query.shape[1] * given.num_heads, given.key.shape[0])
    static = [x for x in (given.static_k, given.static_v) if x is not None]
    return all(given.bias_k is None and tuple(x.shape[:2]) == heads for x in static)


def _forward(given: ForwardArguments) -> tuple[Tensor, Tensor | None]:
    query, key, value = given.query, given.key, given.value
    batch = None if query.dim() == 2 else query.shape[1]
    mask, bias = merge_masks(given.attn_mask, given.key_padding_mask, batch, given.num_heads, query.dtype)
    batch_first = batch is not None and not query.is_contiguous() and query.transpose(0, 1).is_contiguous()
    if batch_first:  # nn.MultiheadAttention transposed it: projecting it as it lies saves a copy
        query = query.transpose(0, 1)
        key = query if given.key is given.query else key.transpose(0, 1)
        value = key if given.value is given.key else value.transpose(0, 1)

    def out_projection(out: Tensor) -> Tensor:
        # Dense in torch's order, (seqlen, batch, features): dropout that follows draws its mask in memory order.
        out = out.transpose(0, 1).contiguous() if batch_first else out
        return F.linear(out, given.out_proj_weight, given.out_proj_bias)

    return project_and_attend(
        query,
        key,
        value,
        given.num_heads,
        given.in_projection(),
        out_projection,
        batch_first=batch_first,
        static_key=given.static_k,
        static_value=given.static_v,
        mask=mask,
        bias=bias,
        is_causal=given.is_causal,
        columns=Columns(given.bias_k, given.bias_v, given.add_zero_attn),
        dropout_p=given.dropout_p if given.training else 0.0,
        need_weights=given.need_weights,
        average_weights=given.average_attn_weights,
    )


def _serves(*tensors: Tensor, nested: bool = False) -> bool:
    if not _switch.serves:
        return False
    for x in tensors:
        if x.device.type != "cpu" or x.dtype not in _DTYPES or (x.is_nested and not nested):
            return False
        if type(x) is not Tensor and is_traceable_wrapper_subclass(x):
            return False
    return not _math_alone()


def _math_alone() -> bool:
    """Whether a `sdpa_kernel` context or the like leaves only torch's math."""
    return not (
        torch._C._get_flash_sdp_enabled()
        or torch._C._get_mem_efficient_sdp_enabled()
        or torch._C._get_cudnn_sdp_enabled()
        or torch._C._get_overrideable_sdp_enabled()
    )
