"""transformers' attn_implementation="flash_attention_2", served here, without flash_attn installed.

transformers looks attention functions and mask functions up by name, and models that are written for flash attention call them with what
flash_attn needs: a padding mask (batch, seqlen_kv) or none, a sliding window, offsets of packed sequences. Both are replaced. What asks
whether the package is there, before a model of that name is made, is told that it is.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..attention import attention
from ..attention_varlen import attention_varlen
from ..masks import And, Mask
from ..observers import Shared
from .functions import flash_attn_func
from .kvcache import flash_attn_with_kvcache
from .options import pattern_of
from .varlen import flash_attn_varlen_func

NAME = "flash_attention_2"


class Registration:
    """What `register` returns: `remove()`, or the end of a `with` block, gives the name back to what had it before."""

    def __init__(self) -> None:
        self._active = True
        _shared.enter()

    @property
    def name(self) -> str:
        """The name that is served, "flash_attention_2"."""
        return NAME

    def remove(self) -> None:
        """Undo. Where `register` was called several times, the last one to be removed undoes it."""
        if self._active:
            self._active = False
            _shared.leave()

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def register() -> Registration:
    """Serve `attn_implementation="flash_attention_2"` of Hugging Face transformers here, on CPU and CUDA, without flash_attn.

    Models that exist, and those made afterwards, call the attention and the masks of this package: float32, float64, bfloat16 and float16,
    padding on either side, sliding windows, softcap, dropout, packed sequences (`position_ids` that restart, or offsets), dynamic and
    static caches, and models that call transformers' `_flash_attention_forward` themselves. Padding and windows become mask values: nothing
    is unpadded. The name stays refused for models that do not support it, or that list other flash implementations (gpt-oss does).

    Returns:
        A handle with `remove()`, which is also a context manager. A model made under it, if it outlives it, needs flash_attn or another
        `set_attn_implementation`.

    Raises:
        ImportError: without transformers.
        RuntimeError: for a version of transformers before 5, or one whose checks of the package are not known here.
    """
    return Registration()


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it under a name of flash attention.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim).
        key, value: (batch, num_heads_kv, seqlen_kv, head_dim or head_dim_v).
        attention_mask: from the mask function of this package; or (batch, seqlen), nonzero where a key is no padding; or None. In the last
            two cases is_causal, or else the module's attribute, and sliding_window say the rest, aligned to the bottom right. A key behind
            a mask that is shorter is not seen.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: of packed sequences, all or none.

    Returns:
        (batch, seqlen_q, num_heads, head_dim_v) and None, or the weights if asked for.
    """
    from ..integrations import transformers as integration

    if kwargs.get("block_table") is not None and kwargs.get("k_cache") is not None:
        kwargs.update(cu_seq_lens_q=cu_seq_lens_q, cu_seq_lens_k=cu_seq_lens_k, max_length_q=max_length_q, max_length_k=max_length_k)
        kwargs.update(dropout=dropout, scaling=scaling, sliding_window=sliding_window, softcap=softcap, is_causal=is_causal, s_aux=s_aux)
        return _over_pages(module, query, key, value, attention_mask, **kwargs)
    packed = not any(given is None for given in (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k))
    is_pattern = isinstance(attention_mask, (integration.PatternMask, integration.TracedPattern))
    is_padding = attention_mask is not None and not is_pattern and attention_mask.dim() == 2
    packed = packed and not is_padding
    if not packed and attention_mask is not None and not is_padding:
        return integration.attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, softcap, s_aux=s_aux, **kwargs
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    pattern = pattern_of(causal, window).mask
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout}
    if not packed and attention_mask is None:
        cu_seq_lens_q = cu_seq_lens_k = _restarts(position_ids, query, key)
        packed = cu_seq_lens_q is not None
        max_length_q = max_length_k = query.shape[2]
    if packed:
        rows, places = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)], (cu_seq_lens_q, cu_seq_lens_k)
        call: Any = attention_varlen
        out = call(*rows, *places, int(max_length_q), int(max_length_k), mask=pattern, **options)
        return out.unflatten(0, (query.shape[0], query.shape[2])), None
    mask: Mask | Tensor | None = pattern
    if attention_mask is not None:
        seen = attention_mask.shape[1]
        if key.shape[2] > seen:  # a static cache, whose slots behind the mask are empty
            key, value = key[:, :, :seen], value[:, :, :seen]
        padding = attention_mask.to(torch.bool)[:, None, None, -key.shape[2] :]
        mask = padding if pattern is None else And(pattern, padding)
    out = attention(query, key, value, mask=mask, **options)
    return out.transpose(1, 2).contiguous(), None


def attention_mask(*, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **kwargs: Any) -> Any:
    """The mask function: that of this package, which may leave a causal mask out only where both alignments are the same."""
    from ..integrations import transformers as integration

    may_skip = allow_is_causal_skip and q_length in (1, kv_length)
    return integration.attention_mask(q_length=q_length, kv_length=kv_length, allow_is_causal_skip=may_skip, **kwargs)


def _restarts(position_ids: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The offsets of packed sequences, if positions start again inside a single row of tokens."""
    if position_ids is None or torch.compiler.is_compiling() or position_ids.dim() != 2:
        return None
    if query.shape[0] != 1 or query.shape[2] != key.shape[2] or tuple(position_ids.shape) != (1, query.shape[2]):
        return None
    starts = (position_ids[0].diff() != 1).nonzero()[:, 0] + 1
    if starts.numel() == 0:
        return None
    ends = starts.new_tensor([query.shape[2]])
    return torch.cat([starts.new_zeros(1), starts, ends])


def _over_pages(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, s_aux: Any, **kwargs: Any) -> Any:
    """Continuous batching over pages: transformers arranges the call of flash_attn_with_kvcache."""
    from transformers.integrations.flash_attention import flash_attention_forward

    if s_aux is not None:
        raise RuntimeError("s_aux must be None over pages: flash_attn_with_kvcache has no sinks")
    return flash_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _install(undo: ExitStack) -> None:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers import modeling_flash_attention_utils as flash

    if int(transformers.__version__.split(".")[0]) < 5:
        raise RuntimeError(f"register: expected transformers >= 5, got {transformers.__version__}")
    for place, name in (
        (flash, "_lazy_imports"),
        (flash, "_loaded_implementation"),
        (flash, "FLASH_ATTENTION_COMPATIBILITY_MATRIX"),
        (PreTrainedModel, "_flash_attn_can_dispatch"),
    ):
        if not hasattr(place, name):
            raise RuntimeError(
                f"register: transformers {transformers.__version__} has no {place.__name__}.{name}, which it is known to check"
            )

    for interface, function in ((AttentionInterface, attention_forward), (AttentionMaskInterface, attention_mask)):
        undo.callback(interface.register, NAME, interface._global_mapping[NAME])
        interface.register(NAME, function)

    can_dispatch, lazy_imports = PreTrainedModel._flash_attn_can_dispatch, flash._lazy_imports
    checks = flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]

    def served(model: Any, flash_attn_version: int, is_init_check: bool = False) -> bool:
        return (flash_attn_version == 2 and model._supports_flash_attn) or can_dispatch(model, flash_attn_version, is_init_check)

    def functions(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation == NAME:
            return flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, flash._pad_input, flash._unpad_input
        return lazy_imports(implementation, *args, **kwargs)

    def forget() -> None:
        if flash._loaded_implementation == NAME:
            flash._loaded_implementation = None

    undo.callback(setattr, PreTrainedModel, "_flash_attn_can_dispatch", can_dispatch)
    undo.callback(setattr, flash, "_lazy_imports", lazy_imports)
    undo.callback(checks.update, general_availability_check=checks["general_availability_check"])
    undo.callback(forget)
    PreTrainedModel._flash_attn_can_dispatch = served
    flash._lazy_imports = functions
    checks["general_availability_check"] = lambda *args, **kwargs: True
    forget()


_shared = Shared(_install)
