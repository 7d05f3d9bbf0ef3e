"""`convert`: the nn.MultiheadAttention modules of a model run here, in place."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .multihead_attention import MultiheadAttention


def convert(model: nn.Module) -> Conversion:
    """Turn every nn.MultiheadAttention in `model`, itself included, into a `ta.MultiheadAttention` in place.

    The module objects stay the same, and with them their parameters, hooks, training flag, device and the references that others hold;
    only their class changes. The inference fast path of an nn.TransformerEncoderLayer around them no longer bypasses them. Subclasses that
    keep `nn.MultiheadAttention.forward` (parametrized modules too) are converted, those with a `forward` of their own are left alone, as
    are modules that run here already.

    Args:
        model: any module.

    Returns:
        A handle with `restore()` and `calls`; as a context manager it restores at the end.

    Raises:
        TypeError: where `model` is no nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    layers = [
        _Layer(name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        and not isinstance(module, MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
    ]
    return Conversion(layers)


class Conversion:
    """What `convert` did. A context manager that restores at its end.

    Attributes:
        calls: layer name -> calls served since the conversion. A module that stands at several places goes by the first name. Calls inside
            compiled code are not counted.
    """

    def __init__(self, layers: list[_Layer]) -> None:
        self._layers = layers

    @property
    def calls(self) -> dict[str, int]:
        return {layer.name: layer.counter.calls for layer in self._layers}

    def restore(self) -> None:
        """Give every module the class it had. Once is enough; more does nothing.

        Raises:
            RuntimeError: naming the layer whose class was changed by others since (a parametrization, for one): nothing is restored
                then.
        """
        for layer in self._layers:
            layer.check()
        for layer in self._layers:
            layer.restore()

    def __enter__(self) -> Conversion:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()


class ConvertedMultiheadAttention(MultiheadAttention):
    """The class of a converted module: counts, and is otherwise `MultiheadAttention`."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        result = super().forward(*args, **kwargs)
        if not torch.compiler.is_compiling() and self in _counters:
            _counters[self].calls += 1
        return result


class _Counter:
    calls = 0


class _Layer:
    """One converted module, and what it was."""

    def __init__(self, name: str, module: nn.MultiheadAttention) -> None:
        self.name = name
        self.counter = _Counter()
        self._module = module
        self._old = type(module)
        self._new = _converted_class(self._old)
        self._converted = True
        module.__class__ = self._new
        _counters[module] = self.counter

    def check(self) -> None:
        if self._converted and type(self._module) is not self._new:
            found, expected = type(self._module).__name__, self._new.__name__
            raise RuntimeError(
                f"restore: layer {self.name!r}: expected the class {expected} of the conversion, got {found}; undo that change first"
            )

    def restore(self) -> None:
        if self._converted:
            self._module.__class__ = self._old
            del _counters[self._module]
            self._converted = False


# Of each converted module. Outside the modules, so that copies and pickles of them carry none of it.
_counters: WeakKeyDictionary[nn.Module, _Counter] = WeakKeyDictionary()


def _converted_class(old: type[nn.MultiheadAttention]) -> type[nn.MultiheadAttention]:
    if old is nn.MultiheadAttention:
        return ConvertedMultiheadAttention
    return type(old.__name__, (ConvertedMultiheadAttention, old), {"__module__": old.__module__})
