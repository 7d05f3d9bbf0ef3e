"""`import flash_attn` for code that is not ours to change: modules of that name in sys.modules, on request."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

from ..observers import Shared
from . import padding
from .functions import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .kvcache import flash_attn_with_kvcache
from .varlen import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func

# The release whose interface this is. The local part says whose code runs.
VERSION = "2.8.3+tiled.attention"
_FUNCTIONS = (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
_PADDING = (padding.index_first_axis, padding.pad_input, padding.unpad_input)


class Installation:
    """What `install` returns: `remove()`, or the end of a `with` block, takes the modules away."""

    def __init__(self) -> None:
        self._active = True
        _shared.enter()

    def remove(self) -> None:
        """Undo. Where `install` was called several times, the last one to be removed undoes it. What was imported goes on working."""
        if self._active:
            self._active = False
            _shared.leave()

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def install() -> Installation:
    """Make `import flash_attn` give these functions, for code that imports them by that name. Nothing does this unasked.

    `flash_attn` has the seven functions and `__version__`, "2.8.3+tiled.attention"; `flash_attn.flash_attn_interface` has the functions;
    `flash_attn.bert_padding` has `index_first_axis`, `pad_input` and `unpad_input`. Nothing else of flash_attn is there: its layers, losses
    and models raise ModuleNotFoundError. Packages that ask for an installed distribution, as transformers does, do not see it: `register`
    is for these.

    Returns:
        A handle with `remove()`, which is also a context manager.

    Raises:
        RuntimeError: where another flash_attn can be imported.
    """
    return Installation()


def _install(undo: ExitStack) -> None:
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        raise RuntimeError("install: expected no other flash_attn, got one that is installed or imported")
    top = _module("flash_attn", _FUNCTIONS, undo)
    top.__path__ = []
    top.__version__ = VERSION  # type: ignore[attr-defined]
    for name, functions in (("flash_attn_interface", _FUNCTIONS), ("bert_padding", _PADDING)):
        setattr(top, name, _module(f"flash_attn.{name}", functions, undo))


def _module(name: str, functions: tuple[Any, ...], undo: ExitStack) -> ModuleType:
    module = ModuleType(name, f"The interface of {name}, served by tiled_attention.")
    module.__spec__ = ModuleSpec(name, None, origin="tiled_attention", is_package=name == "flash_attn")
    for function in functions:
        setattr(module, function.__name__, function)
    sys.modules[name] = module
    undo.callback(sys.modules.pop, name, None)
    return module


_shared = Shared(_install)
