"""Which attention layers of a model are served by the operators: counted at the dispatcher, layer by layer."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def attention_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Innermost modules whose class is named ...Attention, by their path."""

    def is_attention(module: torch.nn.Module) -> bool:
        return type(module).__name__.endswith("Attention")

    return {
        name: module
        for name, module in model.named_modules()
        if is_attention(module) and not any(is_attention(child) for child in list(module.modules())[1:])
    }


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.layer: str | None = None
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.layer is not None and func.namespace == "tiled_attention" and "attention" in func._opname:
            self.calls[self.layer] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _marked(counter: _Counter, layers: dict[str, torch.nn.Module]) -> Iterator[None]:
    """Tell the counter which layer runs."""
    handles = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counter.layer = name

        return hook

    def leave(*_: Any) -> None:
        counter.layer = None

    for name, module in layers.items():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def count_served(model: torch.nn.Module, run: Callable[[], object]) -> dict[str, int]:
    """Calls of this package's attention operators in each attention layer while `run` runs the model."""
    layers = attention_layers(model)
    counter = _Counter()
    counter.calls = dict.fromkeys(layers, 0)
    with _marked(counter, layers), counter:
        run()
    return counter.calls
