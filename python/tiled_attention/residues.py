"""Strided and dilated attention by residue classes: the positions r, r + s, r + 2 s, ... are a strided view with an interval mask inside.

Such masks touch every tile a little, so neither intervals nor block lists help. With s = step, query p and key j of one residue are row
P = p // s and column b = j // s of the views, and p - j = s (P - b). A union with a window around p is two or three parts: the window, and
what the residue class has outside of it; they are merged by lse, and no pair is counted twice. The gradients of each part follow from the
merged out and lse, as if it were a piece of one softmax: nothing is differentiated through the merge.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .arguments import Arguments, real_dtype
from .call import forward, needs_derivatives
from .derivatives import turned
from .library import below_autograd, ops
from .mask_grid import TILE
from .mask_rules import NO_INTERVALS, UNBOUNDED, Rule
from .masks import Mask, Or
from .parts import adds_in_place, joined, lse_limit
from .sparse_masks import Dilated, Strided


class Pattern(NamedTuple):
    """j - p in [-left, right] and a multiple of step, or j - p in [-window[0], window[1]]."""

    step: int
    left: int
    right: int
    window: tuple[int, int] | None


class _Piece(NamedTuple):
    """One part: j - p in [-left, right], in steps of `step`."""

    step: int
    left: int
    right: int


def pattern_of(mask: Any) -> Pattern | None:
    """The pattern that `mask` is, None where it is another mask."""
    if not isinstance(mask, Mask):
        return None
    if mask._cached is not None and not torch.compiler.is_compiling() and not mask._cached[0].rest:
        return None  # lowered before, to intervals
    rule = mask._rule()
    if len(rule.rest) != 1 or not _is_limit(rule):
        return None
    operand = rule.rest[0]
    if isinstance(operand, (Strided, Dilated)):
        return Pattern(_step(operand), *rule.limit, None)
    if not isinstance(operand, Or):
        return None
    sides = [side._rule() if isinstance(side, Mask) else Rule(rest=(side,)) for side in (operand.left, operand.right)]
    if not all(_is_limit(side) for side in sides):
        return None
    few, window = sides if sides[0].rest else sides[::-1]
    if window.rest or len(few.rest) != 1 or not isinstance(few.rest[0], (Strided, Dilated)):
        return None
    (left, right), (limit_left, limit_right) = rule.limit, few.limit
    near = min(left, window.limit[0]), min(right, window.limit[1])
    return Pattern(_step(few.rest[0]), min(left, limit_left), min(right, limit_right), near)


def _is_limit(rule: Rule) -> bool:
    return rule._replace(rest=(), limit=(UNBOUNDED, UNBOUNDED)) == Rule()


def _step(mask: Strided | Dilated) -> int:
    return mask.stride if isinstance(mask, Strided) else mask.dilation


def serves(pattern: Pattern, args: Arguments) -> bool:
    """Whether the views say all that these arguments (without the mask) mean: dropout counts positions, a bias has a row for each. A
    DTensor takes the block list: views of its shards are no views of the whole, which is written in place here."""
    seqlen_q, seqlen_kv = args.query.shape[-2], args.key.shape[-2]
    if args.dropout_p > 0 or args.bias is not None or args.query_offset is not None or is_traceable_wrapper_subclass(args.query):
        return False
    return seqlen_q >= pattern.step and seqlen_kv >= 4 * pattern.step and seqlen_q * seqlen_kv > TILE * TILE


def attend(args: Arguments, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """(out, lse) of the arguments under the pattern; `args` as `prepare` makes them without a mask."""
    args = turned(args)
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return _composite(args, pattern)
    tensors = (args.query, args.key, args.value, args.alibi_slopes, args.sinks)
    options = (pattern, args.scale, args.softcap, tuple(args.intervals), args.allow_tf32)
    if needs_derivatives(tensors):
        out, lse = _Attention.apply(*tensors, *options)
        return out, lse
    out, lse, _ = _merged(args, pattern, False)
    return out, lse


def _pieces(pattern: Pattern) -> list[_Piece]:
    step = pattern.step
    left, right = pattern.left // step, pattern.right // step
    if pattern.window is None:
        return [_Piece(step, left, right)]
    pieces = [_Piece(1, *pattern.window)]
    near_left, near_right = (side // step for side in pattern.window)
    if left > near_left:
        pieces.append(_Piece(step, left, -near_left - 1))
    if right > near_right:
        pieces.append(_Piece(step, -near_right - 1, right))
    return pieces


def _offset(args: Arguments) -> int:
    """Where query row 0 stands."""
    shift = args.intervals[0] if args.intervals else UNBOUNDED
    return args.key.shape[-2] - args.query.shape[-2] if shift == UNBOUNDED else shift


def _split(x: Tensor, step: int, front: int, fill: float = 0.0) -> Tensor:
    """(..., num_heads, n, d) -> (..., step, num_heads, ceil((front + n) / step), d): residue classes, after `front` more rows."""
    back = -(front + x.shape[-2]) % step
    if front or back:
        x = F.pad(x, (0, 0, front, back), value=fill)
    return x.unflatten(-2, (-1, step)).movedim(-2, -4)


def _join(x: Tensor, front: int, n: int) -> Tensor:
    """Back from `_split`."""
    return x.movedim(-4, -2).flatten(-3, -2).narrow(-2, front, n)


def _arguments(args: Arguments, piece: _Piece, with_sinks: bool) -> tuple[Arguments, int]:
    """Of one piece, and how many rows its queries have in front."""
    offset, step = _offset(args), piece.step
    front = offset % step
    numbers = [(offset - front) // step, *NO_INTERVALS[1:3], min(piece.left, UNBOUNDED), min(piece.right, UNBOUNDED), *NO_INTERVALS[5:]]
    lengths = None
    if step > 1:
        seqlen_kv = args.key.shape[-2]
        if seqlen_kv % step:
            first = torch.arange(step, dtype=torch.int64, device=args.key.device)
            lengths = ((seqlen_kv - first + step - 1) // step).expand(*args.query.shape[:-3], step).reshape(-1)
        query, key, value = _split(args.query, step, front), _split(args.key, step, 0), _split(args.value, step, 0)
        slopes = None if args.alibi_slopes is None else args.alibi_slopes * step
        args = args._replace(query=query, key=key, value=value, alibi_slopes=slopes)
    return args._replace(sinks=args.sinks if with_sinks else None, intervals=numbers, key_lengths=lengths), front


def _composite(args: Arguments, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Made of differentiable operators, for derivatives of any kind."""
    from .attention import merge_attention

    total: tuple[Tensor, Tensor] | None = None
    seqlen_q = args.query.shape[-2]
    for piece in _pieces(pattern):
        part, front = _arguments(args, piece, total is None)
        out, lse = forward(part)
        if piece.step > 1:
            out, lse = _join(out, front, seqlen_q), _join(lse[..., None], front, seqlen_q)[..., 0]
        total = (out, lse) if total is None else merge_attention(total[0], total[1], out, lse)
    assert total is not None
    return total


def _merged(args: Arguments, pattern: Pattern, with_residual: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, residual), below autograd. 16-bit parts are merged with what their rounding took."""
    pieces = _pieces(pattern)
    rounds = args.query.dtype != real_dtype(args.query.dtype) and len(pieces) > 1
    with below_autograd():
        part, front = _arguments(args, pieces[0], True)
        out, lse, residual = ops.attention_fwd(*part, with_residual or rounds)
        if len(pieces) > 1:
            add = _add_in_place if _adds_in_place(args, pattern.step) else _add
            for piece in pieces[1:]:
                out, lse, residual = add(args, piece, out, lse, residual)
        elif pieces[0].step > 1:
            out, residual = (_join(x, front, args.query.shape[-2]) if x.dim() > 1 else x for x in (out, residual))
            lse = _join(lse[..., None], front, args.query.shape[-2])[..., 0].contiguous()
    return out, lse, residual if with_residual else residual.new_empty(0)


def _adds_in_place(args: Arguments, step: int) -> bool:
    """Whether the kernels add to the rows of a residue class where they lie: nothing has to fill the classes up."""
    whole = not any(length % step for length in (_offset(args), args.query.shape[-2], args.key.shape[-2]))
    return whole and adds_in_place(args.query)


def _add_in_place(args: Arguments, piece: _Piece, out: Tensor, lse: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    part, _ = _arguments(args, piece, False)
    by_class = [_split(x, piece.step, 0) if x.dim() > 1 else x for x in (out, residual)]
    lse_by_class = _split(lse[..., None], piece.step, 0)[..., 0].double().contiguous()
    ops._attention_fwd_add_(*part, by_class[0], lse_by_class, by_class[1])
    return out, lse.copy_(_join(lse_by_class[..., None], 0, lse.shape[-1])[..., 0]), residual


def _add(args: Arguments, piece: _Piece, out: Tensor, lse: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    part, front = _arguments(args, piece, False)
    seqlen_q = args.query.shape[-2]
    other, other_lse, other_residual = ops.attention_fwd(*part, residual.dim() > 1)
    other, other_residual = (_join(x, front, seqlen_q) if x.dim() > 1 else x for x in (other, other_residual))
    return joined(out, lse, residual, other, _join(other_lse[..., None], front, seqlen_q)[..., 0], other_residual)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, sinks: Tensor | None, *options: Any) -> Any:
        ctx.options = options
        pattern, *numbers = options
        out, lse, residual = _merged(_plain(query, key, value, slopes, sinks, *numbers), pattern, True)
        ctx.save_for_backward(query, key, value, slopes, sinks, out, lse, residual)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        *tensors, out, lse, residual = ctx.saved_tensors
        pattern, *numbers = ctx.options
        args = _plain(*tensors, *numbers)
        needed = ctx.needs_input_grad[:5]
        nothing = (None,) * len(ctx.options)
        if grad_out is None and grad_lse is None:
            return (None,) * 5 + nothing
        if torch.is_grad_enabled():
            return (*_recorded(args, pattern, grad_out, grad_lse, needed, True), *nothing)
        limit = lse_limit(out.dtype)
        if len(_pieces(pattern)) > 1 and bool((lse.abs() > limit).logical_and_(lse != -math.inf).any()):
            return (*_recorded(args, pattern, grad_out, grad_lse, needed, False), *nothing)
        if grad_out is None:
            grad_out = out.new_zeros(()).expand(out.shape)
        with below_autograd():
            return (*_gradients(args, pattern, grad_out, grad_lse, out, lse, residual, needed), *nothing)


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Any,
    sinks: Any,
    scale: float,
    softcap: float,
    intervals: tuple[int, ...],
    allow_tf32: bool,
) -> Arguments:
    args: Any = (query, key, value, None, None, slopes, sinks, *(None,) * 9, scale, softcap, 0.0, intervals, (), allow_tf32, False)
    return Arguments(*args)


def _recorded(args: Arguments, pattern: Pattern, grad_out: Any, grad_lse: Any, needed: Any, create_graph: bool) -> list[Tensor | None]:
    """Gradients through the composite, themselves differentiable with `create_graph`."""
    tensors: Any = (args.query, args.key, args.value, args.alibi_slopes, args.sinks)
    with torch.enable_grad():
        if not create_graph:
            tensors = [tensor.detach().requires_grad_(need) if need else tensor for tensor, need in zip(tensors, needed, strict=True)]
        query, key, value, slopes, sinks = tensors
        args = args._replace(query=query, key=key, value=value, alibi_slopes=slopes, sinks=sinks)
        results = [(x, grad) for x, grad in zip(_composite(args, pattern), (grad_out, grad_lse), strict=True) if grad is not None]
        leaves = [tensor for tensor, need in zip(tensors, needed, strict=True) if need]
        found = torch.autograd.grad(
            [x for x, _ in results], leaves, [grad for _, grad in results], create_graph=create_graph, allow_unused=True
        )
    each = iter(found)
    return [next(each) if need else None for need in needed]


def _gradients(
    args: Arguments, pattern: Pattern, grad_out: Tensor, grad_lse: Any, out: Tensor, lse: Tensor, residual: Tensor, needed: Any
) -> list[Tensor | None]:
    by_query, by_key, by_value, by_slopes, by_sinks = needed
    in_place = _adds_in_place(args, pattern.step)
    lengths = (args.query.shape[-2], args.key.shape[-2], args.key.shape[-2])
    total: list[Any] = [None] * 5
    for at, piece in enumerate(_pieces(pattern)):
        part, front = _arguments(args, piece, at == 0)
        step, fronts = piece.step, (front, 0, 0)
        results = [grad_out, grad_lse, out, lse, residual]
        if step > 1:
            rows = [_split(x, step, front) if x.dim() > 1 else x for x in (grad_out, out, residual)]
            # A row that only fills up the view saw no key.
            by_row = [(grad_lse, 0.0), (lse, -math.inf)]
            split = [None if x is None else _split(x[..., None], step, front, fill)[..., 0] for x, fill in by_row]
            results = [rows[0], split[0], rows[1], split[1], rows[2]]
        grad_rows, grad_lse_rows, *rest = (None if x is None else x.contiguous() if i in (1, 3) else x for i, x in enumerate(results))
        if at and in_place:
            slopes = torch.zeros_like(total[3]) if by_slopes else None
            grads = [None if grad is None else _split(grad, step, 0) for grad in total[:3]]
            ops._attention_bwd_add_(grad_rows, grad_lse_rows, *part, *rest, *grads, slopes)
            if by_slopes:
                total[3].add_(slopes, alpha=step)
            continue
        wants_sinks = by_sinks and at == 0
        bits = by_query | by_key << 1 | by_value << 2 | by_slopes << 4 | wants_sinks << 5
        found = list(ops.attention_bwd(grad_rows, grad_lse_rows, *part, *rest, bits))
        del found[3]
        if step > 1:
            found[:3] = [_join(x, *place) if need else x for x, need, *place in zip(found[:3], needed[:3], fronts, lengths, strict=True)]
            found[3] = found[3] * step
        for place, grad in enumerate(found):
            if needed[place] and (place < 4 or wants_sinks):
                total[place] = grad if total[place] is None else total[place].add_(grad)
    return total
