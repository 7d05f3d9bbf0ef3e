"""What masks check about their numbers and tensors. Errors name the field, what was expected and what came."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def number(name: str, value: Any, least: int) -> int:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}: expected an integer, got {value!r}")
        value = operator.index(value)
    if value < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {value}")
    return value


def check_number(mask: Any, field: str, least: int) -> None:
    value = getattr(mask, field)
    checked = number(f"{type(mask).__name__}: {field}", value, least)
    if checked is not value:
        object.__setattr__(mask, field, checked)


def check_integers(name: str, tensor: Any, device: torch.device | None = None) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected an integer tensor, got {type(tensor).__name__}")
    if tensor.dtype not in INTEGER_DTYPES:
        raise TypeError(f"{name}: expected an integer tensor, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")


def check_boundaries(cu_seqlens: Any, device: torch.device | None = None) -> None:
    check_integers("Documents: cu_seqlens", cu_seqlens, device)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"Documents: cu_seqlens: expected shape (num_documents + 1,), got {tuple(cu_seqlens.shape)}")


def check_bool(tensor: Tensor, device: torch.device | None = None) -> None:
    if tensor.dtype != torch.bool:
        raise TypeError(f"mask: expected a bool tensor (True = attend), got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"mask: expected a tensor on {device}, got one on {tensor.device}")


def check_broadcasts(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    sizes, rank = tensor.shape, len(shape)
    missing = rank - len(sizes)
    if missing < 0 or any(sizes[k] != 1 and sizes[k] != shape[missing + k] for k in range(len(sizes))):
        raise ValueError(f"{name}: expected a shape that broadcasts to {tuple(shape)}, got {tuple(sizes)}")


def is_readable(tensor: Tensor, device_type: str = "cpu") -> bool:
    """Whether its values can be read without a trace to break, and on the CPU without a device to wait for."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type in ("cpu", device_type)
        and not is_in_torch_dispatch_mode()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
