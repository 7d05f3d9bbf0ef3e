"""`record_attention`: the weights of every attention inside a model."""

from __future__ import annotations

import fnmatch
import threading
import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from .library import devices
from .observers import Call, Shared, observers
from .override import entries
from .recorded import Indices, RecordedAttention, Recording, integers

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class record_attention:
    """Capture the attention weights inside a model while it runs, without changing what it computes.

        with ta.record_attention(model) as recording:
            model(x)
        recording[0].weights(rows=[-1])  # (batch, heads, 1, seqlen_kv)

    Seen are the calls that modules of `model` make, by all threads: F.scaled_dot_product_attention from eager and scripted code (with it
    Hugging Face models on "sdpa"), nn.MultiheadAttention with and without weights, the inference fast path of nn.TransformerEncoderLayer,
    and of this package `attention`, `scaled_dot_product_attention`, `attention_varlen`, `attention_decode` and `KVCache.attend`,
    `additive_attention`, `luong_attention`, `gaussian_attention`, all modules made of them, and "tiled_attention" in Hugging Face models;
    `override_sdpa` and `convert` may be on. A packed call is recorded as the padded batch that it stands for. Weights are those of the
    call's mask, bias, scale and other options, without dropout and without gradient; they follow from the query and key that the call was
    given, and agree with the model's own up to its rounding.

    Not seen: attention that a model computes itself (Hugging Face's "eager", FlexAttention, flash_attn); `linear_attention` and
    `lsh_attention`; `torch.vmap` over F.scaled_dot_product_attention, and the weights of a scripted nn.MultiheadAttention. Other calls
    inside torch.func transforms and traces, and on devices that this package has no kernels for, are counted by a warning at the end.
    Functions of torch.compile run in eager mode meanwhile (`torch.compiler.set_stance("force_eager")`), in all threads. Recomputation in a
    backward pass (`torch.utils.checkpoint`) is not recorded again.

    Args:
        model: any module. Only calls made inside its forward count.
        layers: which modules to record: their place in the order in which modules of the model first attend (0, 1, ...), or their name or
            that of a module around them, or a pattern of it ("decoder.layers.[0-3]", as in fnmatch); one or several. None: all.
        heads: indices of the query heads to record, one or several, negative ones count from the end. None: all.
        rows: indices of queries likewise. Their weights are computed when the call ends, and nothing else is kept. None: a copy of query
            and keys is kept, of size O(seqlen), and any weights can be asked for later.

    `with` gives the `Recording`, which stays after the block. The same object can be used again, also inside itself; each use has its own
    recording.

    Raises:
        TypeError, ValueError: naming model, layers, heads or rows: at once where they cannot be right for any call, out of the model's
            forward where an index is out of range for a call, at the end of the block where `layers` asks for a module that did
            not attend.

    Warns where nothing was recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: int | str | Iterable[int | str] | None = None,
        heads: Indices | None = None,
        rows: Indices | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
        self._model = model
        self._layers = None if layers is None else _check_layers(layers, list(_paths(model).values()))
        self._heads = None if heads is None else integers("heads", heads)
        self._rows = None if rows is None else integers("rows", rows)
        self._running: list[_Recorder] = []

    def __enter__(self) -> Recording:
        recorder = _Recorder(self._model, _paths(self._model), self._layers, self._heads, self._rows)
        recorder.start()
        self._running.append(recorder)
        return recorder.recording

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        recorder = self._running.pop()
        recorder.stop()
        if kind is None:
            recorder.check()


def _install(undo: ExitStack) -> None:
    entries.enter()
    undo.callback(entries.leave)
    undo.enter_context(torch.compiler.set_stance("force_eager"))
    # Compiled modules warn of global hooks: that they run twice, which those of a recording may.
    warnings.filterwarnings("ignore", "Using `torch.compile.* when there are global hooks", UserWarning)
    undo.callback(_forget_filter, warnings.filters[0])


def _forget_filter(added: Any) -> None:
    if added in warnings.filters:  # others may have replaced them all
        warnings.filters.remove(added)  # type: ignore[attr-defined]


_watch = Shared(_install)


class _Recorder:
    """One use: knows which module of the model runs in each thread, and is told of calls."""

    def __init__(self, model: nn.Module, paths: dict[nn.Module, str], layers: Any, heads: Any, rows: Any) -> None:
        self.recording = Recording()
        self._model = model
        self._paths = paths
        self._layers, self._heads, self._rows = layers, heads, rows
        self._inside = threading.local()
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()  # calls by module, in the order of the first ones
        self._left_out: Counter[str] = Counter()  # by reason
        self._undo = ExitStack()

    def start(self) -> None:
        with ExitStack() as undo:
            _watch.enter()
            undo.callback(_watch.leave)
            # Hooks of all modules: one on a module of its own would switch off the fast path of nn.TransformerEncoderLayer.
            undo.callback(register_module_forward_pre_hook(self._begin).remove)
            undo.callback(register_module_forward_hook(self._end, always_call=True).remove)
            observers.append(self._observe)
            undo.callback(observers.remove, self._observe)
            self._undo = undo.pop_all()

    def stop(self) -> None:
        self._undo.close()

    def check(self) -> None:
        """Says what was asked for and not found."""
        if self._left_out:
            counts = ", ".join(f"{count} {reason}" for reason, count in self._left_out.items())
            warnings.warn(f"record_attention: not all attention calls were recorded: {counts}", stacklevel=3)
        if not self._seen:
            if not self._left_out:
                eager = getattr(getattr(self._model, "config", None), "_attn_implementation", None) == "eager"
                hint = ': its "eager" attention is not seen, model.set_attn_implementation("sdpa") is' if eager else ""
                warnings.warn(f"record_attention: no attention call of {type(self._model).__name__} was seen{hint}", stacklevel=3)
            return
        paths = list(self._seen)
        for layer in self._layers or ():
            if not any(_is_meant(layer, path, place) for place, path in enumerate(paths)):
                raise ValueError(f"layers: expected some of the {len(paths)} modules that attended, {paths}, got {layer!r}")

    def _begin(self, module: nn.Module, args: Any) -> None:
        if module in self._paths:
            self._stack().append(module)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        stack = self._stack()
        if module in stack:
            while stack.pop() is not module:
                pass

    def _stack(self) -> list[nn.Module]:
        if not hasattr(self._inside, "stack"):
            self._inside.stack = []
        return self._inside.stack

    def _observe(self, call: Call) -> None:
        stack = self._stack()
        if not stack or torch._C._current_graph_task_id() != -1:  # in a backward pass: recomputation
            return
        module = stack[-1]
        if isinstance(module, nn.TransformerEncoderLayer) and module.self_attn in self._paths:  # its fast path goes past what attends
            module = module.self_attn
        path = self._paths[module]
        reason = _unreadable(call.query) or _unreadable(call.key)
        with self._lock:
            if reason:
                self._left_out[reason] += 1
                return
            self._seen[path] += 1
            count, place = self._seen[path], list(self._seen).index(path)
        if self._layers is not None and not any(_is_meant(layer, path, place) for layer in self._layers):
            return
        with torch.no_grad(), _disable_current_modes():
            name = path if count == 1 else f"{path}#{count}"
            arguments, lse = _one_row_per_query(module, call.arguments(), call.lse)
            recorded = RecordedAttention(name, arguments, lse, call.columns, self._heads, self._rows)
        self.recording._calls.append(recorded)


def _one_row_per_query(module: nn.Module, call: Any, lse: Tensor | None) -> tuple[Any, Tensor | None]:
    """transformers' "sdpa" gives the grouped heads of a single query as the rows of its key/value head: heads again."""
    groups, config = getattr(module, "num_key_value_groups", 1), getattr(module, "config", None)
    *batch, heads, rows, head_dim = call.query.shape
    if groups < 2 or rows != groups or heads * groups != getattr(config, "num_attention_heads", 0) or call.intervals:
        return call, lse
    changes = {"query": call.query.reshape(*batch, heads * groups, 1, head_dim)}
    for name in ("mask", "bias"):
        tensor = getattr(call, name, None)
        if tensor is not None and tensor.shape[-2] > 1:
            changes[name] = tensor.flatten(-3, -2).unsqueeze(-2)
    return call._replace(**changes), None if lse is None else lse.flatten(-2)[..., None]


def _paths(model: nn.Module) -> dict[nn.Module, str]:
    """The names of its modules; that of the model itself is its class. Without what torch.compile puts in between."""
    paths = {}
    for name, module in model.named_modules():
        parts = [part for part in name.split(".") if part not in ("", "_orig_mod")]
        paths[module] = ".".join(parts) or type(module).__name__
    return paths


def _check_layers(layers: Any, paths: list[str]) -> tuple[int | str, ...]:
    if isinstance(layers, (int, str)):
        layers = (layers,)
    if not isinstance(layers, Iterable):
        raise TypeError(f"layers: expected indices, names or patterns, got {layers!r}")
    layers = tuple(layers)
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, (int, str)):
            raise TypeError(f"layers: expected indices, names or patterns, got {layer!r}")
        if isinstance(layer, int) and layer < 0:
            raise ValueError(f"layers: expected indices >= 0, got {layer}")
        if isinstance(layer, str) and not fnmatch.filter(paths, layer):
            raise ValueError(f"layers: expected the name of a module, or a pattern of names, got {layer!r}, which none has")
    return layers


def _is_meant(layer: int | str, path: str, place: int) -> bool:
    """By its place, or by a pattern of its path or of that of a module around it."""
    if isinstance(layer, int):
        return layer == place
    return fnmatch.fnmatchcase(path, layer) or fnmatch.fnmatchcase(path, f"{layer}.*")


def _unreadable(tensor: Tensor) -> str:
    """Why weights cannot be computed from it; "" where they can."""
    if tensor.is_nested and type(tensor) is Tensor:
        tensor = tensor._nested_tensor_size()
    elif tensor.device.type not in devices:
        return f"on {tensor.device.type}"
    elif tensor.dtype not in _DTYPES:
        return f"in {tensor.dtype}"
    plain = type(tensor) in (Tensor, nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    plain = plain and not torch._C._is_tracing()
    return "" if plain else "in a trace, a torch.func transform or of a tensor subclass"
