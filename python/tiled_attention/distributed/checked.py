"""What a rank checks of its arguments before it talks to others, and what all check together afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import Arguments, is_by_distance, real_dtype
from ..call import check_float, prepare
from ..fake import check_query_key_value
from ..mask_checks import check_bool, check_broadcasts
from ..masks import And, Mask, Or
from ..relative_bias import RelativeBias
from ..rotary import RotaryEmbedding, check_rotary
from .layout import Run
from .local_masks import text_of


class Call(NamedTuple):
    """Checked arguments of this rank."""

    args: Arguments  # query, key and value after autocast; alibi_slopes and sinks in Real; no mask, no bias, no rotary
    mask: Mask | Tensor | None
    bias: Tensor | RelativeBias | None
    rotary: RotaryEmbedding | None
    query_offset: int | Tensor | None


def checked(query: Any, key: Any, value: Any, mask: Any, bias: Any, rotary: Any, options: Sequence[Any]) -> Call:
    """All that needs no other rank. Draws the seed of dropout."""
    args = prepare(query, key, value, None, None, *options)
    check_query_key_value(args.query, args.key, args.value)
    for name, tensor in (("key", args.key), ("value", args.value), ("alibi_slopes", args.alibi_slopes), ("sinks", args.sinks)):
        if tensor is not None and tensor.device != args.query.device:
            raise ValueError(f"{name} must be on the device of query ({args.query.device}), got {tensor.device}")
    offset: int | Tensor | None = None
    if args.query_offset is not None:
        offset = args.query_offset.view(args.query.shape[:-3])
    elif options[-1] is not None:
        offset = int(args.intervals[0])
    if rotary is not None:
        check_rotary(rotary, query=args.query, key=args.key)
    if mask is not None and not isinstance(mask, (Mask, Tensor)):
        raise TypeError(f"mask: expected a mask, a bool tensor or None, got {type(mask).__name__}")
    for tensor in tensors_of(mask):
        if tensor.dtype.is_floating_point:
            raise TypeError(f"mask must be a bool tensor (True = attend) or a mask, got {tensor.dtype}: pass what is added as bias=")
        check_bool(tensor, args.query.device)
        _check_rows("mask", tensor, args.query)
    if isinstance(bias, RelativeBias):
        if bias.num_heads != args.query.shape[-3]:
            raise ValueError(f"bias must have a value per query head ({args.query.shape[-3]}), got RelativeBias of {bias.num_heads}")
    elif bias is not None:
        check_float("bias", bias, " (a bool tensor is passed as mask=)")
        if bias.device != args.query.device:
            raise ValueError(f"bias must be on the device of query ({args.query.device}), got {bias.device}")
        _check_rows("bias", bias, args.query)
        if bias.dtype not in (real_dtype(args.query.dtype), torch.bfloat16, torch.float16):
            bias = bias.to(real_dtype(args.query.dtype))
    return Call(args, mask, bias, rotary, offset)


def _check_rows(name: str, tensor: Tensor, query: Tensor) -> None:
    """All but the keys."""
    if tensor.dim() > 1:
        keys = tensor.shape[-1]
        check_broadcasts(name, tensor, (*query.shape[:-1], keys))
    elif tensor.dim() == 0:
        raise ValueError(f"{name}: expected a shape that broadcasts to (..., num_heads, rows of this rank, all keys), got ()")


def tensors_of(mask: Any) -> Iterator[Tensor]:
    """The bool tensors in a mask that have rows and keys."""
    if isinstance(mask, Tensor):
        yield mask
    elif isinstance(mask, (And, Or)):
        yield from tensors_of(mask.left)
        yield from tensors_of(mask.right)


def has_rows(call: Call) -> bool:
    """Whether a mask or a bias differs between queries."""
    tensors = [*tensors_of(call.mask), *([call.bias] if isinstance(call.bias, Tensor) else [])]
    return any(tensor.dim() > 1 and tensor.shape[-2] != 1 for tensor in tensors)


def said(call: Call, layout: str, method: str, return_lse: bool) -> dict[str, Any]:
    """What must be equal on all ranks, by the names of arguments."""
    query, key, value = call.args.query, call.args.key, call.args.value
    bias: Any = call.bias
    if isinstance(bias, Tensor):
        bias = f"{bias.dtype} ({', '.join(map(str, [*bias.shape[:-2], 'rows', bias.shape[-1]]))})" if bias.dim() > 1 else tuple(bias.shape)
    tensors = (query, key, value, call.bias, call.args.alibi_slopes, call.args.sinks)
    learned = [isinstance(x, Tensor) and x.requires_grad for x in tensors]
    if isinstance(call.bias, RelativeBias):
        learned[3] = call.bias.weight.requires_grad
    offset = call.query_offset
    return dict(
        dtype=query.dtype,
        device=query.device.type,
        batch=tuple(query.shape[:-3]),
        num_heads=query.shape[-3],
        num_heads_kv=key.shape[-3],
        head_dim=query.shape[-1],
        head_dim_v=value.shape[-1],
        mask=text_of(call.mask),
        keys_of_mask=[tensor.shape[-1] for tensor in tensors_of(call.mask)],
        bias=bias,
        scale=call.args.scale,
        softcap=call.args.softcap or None,
        alibi_slopes="given" if call.args.alibi_slopes is not None else None,
        sinks="given" if call.args.sinks is not None else None,
        rotary=call.rotary,
        dropout_p=call.args.dropout_p,
        query_offset=offset.tolist()
        if isinstance(offset, Tensor) and offset.device.type == "cpu"
        else "tensor"
        if isinstance(offset, Tensor)
        else offset,
        return_lse=return_lse,
        layout=layout,
        method=method,
        requires_grad=torch.is_grad_enabled()
        and [name for name, x in zip(("query", "key", "value", "bias", "alibi_slopes", "sinks"), learned) if x],
    )


def check_keys(call: Call, lengths: tuple[int, int]) -> None:
    """Masks and biases beside the whole sequence: the same on all ranks."""
    for tensor in tensors_of(call.mask):
        if tensor.shape[-1] not in (1, lengths[1]):
            raise ValueError(f"mask must have the {lengths[1]} keys of all ranks, or 1, in its last dimension, got {tensor.shape[-1]}")
    bias = call.bias
    if isinstance(bias, Tensor) and bias.shape[-1] not in (1, lengths[1]) and not is_by_distance(bias, *lengths):
        raise ValueError(
            f"bias must have the {lengths[1]} keys of all ranks, or 1, in its last dimension, or be (..., 1, {sum(lengths) - 1}) by "
            f"distance, got {tuple(bias.shape)}"
        )


def tensors_for(
    call: Call, args: Arguments, lengths: tuple[int, int], offset: int | Tensor, runs: Sequence[Sequence[Run]]
) -> tuple[Any, ...]:
    """query, key, value, bias, slopes, sinks; query and key turned, at the positions of this rank's `runs` of rows and keys."""
    query, key, bias = args.query, args.key, call.bias
    if isinstance(bias, RelativeBias):
        bias = bias(*lengths, query_offset=offset)[..., None, :] if min(lengths) else None
    if call.rotary is not None:
        turn: Any = call.rotary
        device, total = query.device, torch.tensor(lengths[1])
        rows, keys = (torch.cat([torch.arange(run.begin, run.end) for run in held] or [torch.arange(0)]).to(device) for held in runs)
        places: Any = offset[..., None].long() + rows if isinstance(offset, Tensor) else rows + offset
        # What dynamic scaling counts: positions of the whole.
        end = (
            offset.amax().long() + lengths[0]
            if isinstance(offset, Tensor) and offset.numel()
            else torch.tensor(lengths[0] + (offset if isinstance(offset, int) else 0))
        )
        length = torch.maximum(end.to(device), total.to(device))
        real = real_dtype(query.dtype)
        query = turn.turn(query, *turn.tables(places[..., None, :], length=length, dtype=real))
        key = turn.turn(key, *turn.tables(keys, length=length, dtype=real))
    return query, key, args.value, bias, args.alibi_slopes, args.sinks
