"""Tangents and second derivatives of linear attention in plain PyTorch, exact, in memory that is linear in the sequence lengths.

The formula is written once, for a block of the sequence and in pairs of a value and its tangent; the state is carried from block to
block. `tangents` sweeps forwards through the blocks. Second derivatives commute: the tangents of the gradients in a direction are the
gradients of the tangents in that direction. So `gradient_tangents` keeps the state before each block and sweeps backwards, with the
reverse derivative of one block at a time; it gives the transpose of the backward formula as well. Everything is made of differentiable
operators: higher orders work too.

Inside, heads are split into (num_heads_kv, group), and the state is one matrix (..., num_heads_kv, 1, head_dim, head_dim_v + 1): value
has a column of ones appended, whose sum is k_sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .arguments import LinearArguments, LinearGradients, real_dtype

BLOCK = 128  # rows: a state per block and some 20 buffers of (BLOCK, BLOCK) are of the size of the inputs at n = 8192, head_dim 64
BLOCK_ELEMENTS = 1 << 16  # of (rows, rows, head_dim), which a decay per feature needs
BLOCK_APART = 1024  # rows where queries and keys do not meet (not causal)

Step = tuple[slice | None, slice | None]  # queries and keys of a block
Results = tuple[Tensor | None, Tensor | None, Tensor | None]  # out, kv, k_sum, or what belongs to them


@dataclass(frozen=True)
class Moving:
    """A value and its tangent (None: it does not move)."""

    value: Tensor
    tangent: Tensor | None = None

    def map(self, linear: Callable[[Tensor], Tensor]) -> Moving:
        return Moving(linear(self.value), None if self.tangent is None else linear(self.tangent))

    def __add__(self, other: Moving) -> Moving:
        return Moving(self.value + other.value, _sum(self.tangent, other.tangent))

    def __mul__(self, other: Moving) -> Moving:
        return self._product(other, torch.mul)

    def __matmul__(self, other: Moving) -> Moving:
        return self._product(other, torch.matmul)

    def _product(self, other: Moving, multiply: Callable[[Tensor, Tensor], Tensor]) -> Moving:
        left = None if self.tangent is None else multiply(self.tangent, other.value)
        right = None if other.tangent is None else multiply(self.value, other.tangent)
        return Moving(multiply(self.value, other.value), _sum(left, right))

    def exp(self) -> Moving:
        value = self.value.exp()
        return Moving(value, None if self.tangent is None else value * self.tangent)

    @property
    def mT(self) -> Moving:
        return self.map(lambda x: x.mT)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _feature(x: Moving, code: int) -> Moving:
    if code == 0:
        return x
    if code == 1:
        below = x.value.clamp(max=0).exp()
        positive = x.value > 0
        value, slope = torch.where(positive, x.value + 1, below), torch.where(positive, 1.0, below)
    elif code == 2:
        value, slope = x.value.relu(), (x.value > 0).to(x.value.dtype)
    else:
        value = slope = x.value.exp()
    return Moving(value, None if x.tangent is None else slope * x.tangent)


def _hide(x: Moving, keep: Tensor | None) -> Moving:
    return x if keep is None else x.map(lambda part: torch.where(keep, part, 0.0))


def _with_ones(value: Moving) -> Moving:
    shape = (*value.value.shape[:-1], 1)
    tangent = None if value.tangent is None else torch.cat([value.tangent, value.tangent.new_zeros(shape)], -1)
    return Moving(torch.cat([value.value, value.value.new_ones(shape)], -1), tangent)


def _decay_between(gate: Moving) -> Moving:
    """exp of the sum of the gates after j up to i: (..., i, j, 1 or head_dim), each sum taken by itself; 1 where j >= i."""
    rows = gate.value.shape[-2]
    after = torch.ones(rows, rows, dtype=torch.bool, device=gate.value.device).tril(-1)[..., None]
    return gate.map(lambda x: torch.where(after, x.unsqueeze(-2), 0.0).cumsum(-3)).exp()


class Sweep:
    """The blocks of one call, and the formula of a block."""

    def __init__(self, args: LinearArguments, directions: LinearGradients) -> None:
        query, key = args.query, args.key
        self.args, self.directions = args, directions
        self.real = real_dtype(query.dtype)
        num_heads, num_heads_kv = query.shape[-3], key.shape[-3]
        group = num_heads // num_heads_kv if num_heads_kv else 1
        self.query_shape = (*query.shape[:-3], num_heads_kv, group, *query.shape[-2:])
        self.keep = None if args.key_mask is None else args.key_mask.expand(*args.key_mask.shape[:-1], key.shape[-2]).mT.unsqueeze(-3)
        self.steps: list[Step] = []
        if args.causal:
            per_feature = args.log_decay is not None and args.log_decay.shape[-1] != 1
            size = min(BLOCK, max(8, math.isqrt(BLOCK_ELEMENTS // key.shape[-1]))) if per_feature else BLOCK
            self.steps += [(part, part) for part in _slices(key.shape[-2], size)]
        else:
            self.steps += [(None, part) for part in _slices(key.shape[-2], BLOCK_APART)]
            self.steps += [(part, None) for part in _slices(query.shape[-2], BLOCK_APART)]

    def state(self, kv: Tensor | None, k_sum: Tensor | None) -> Tensor:
        """kv and k_sum, or what belongs to them, as one matrix; None is 0."""
        key, head_dim_v = self.args.key, self.args.value.shape[-1]
        shape = (*key.shape[:-2], key.shape[-1])
        parts = [
            key.new_zeros((*shape, size), dtype=self.real) if part is None else part
            for part, size in ((kv, head_dim_v), (None if k_sum is None else k_sum.unsqueeze(-1), 1))
        ]
        return torch.cat(parts, -1).unsqueeze(-3)

    def start(self) -> Moving:
        value = self.state(self.args.initial_kv, self.args.initial_k_sum)
        return Moving(value, self.state(self.directions.initial_kv, self.directions.initial_k_sum))

    def rows(self, tensor: Tensor, rows: slice) -> Tensor:
        """Of a tensor like query (or out): (..., num_heads_kv, group, rows, any)."""
        heads = tensor.reshape(*self.query_shape[:-1], tensor.shape[-1])
        return _take(heads, rows).to(self.real)

    def inputs(self, source: Any, step: Step) -> dict[str, Tensor]:
        """The block's part of what `source`, the arguments or tangents of theirs, has."""
        rows, keys = step
        parts = {}
        if rows is not None and source.query is not None:
            parts["query"] = self.rows(source.query, rows)
        for name in ("key", "value", "log_decay"):
            tensor = getattr(source, name)
            if keys is not None and tensor is not None:
                parts[name] = _take(tensor, keys).unsqueeze(-3).to(self.real)
        return parts

    def block(self, step: Step, inputs: dict[str, Tensor], state: Moving) -> tuple[Moving | None, Moving]:
        """(out, state after the block). out is None for a block without queries."""
        rows, keys = step
        tangents = self.inputs(self.directions, step)
        moving = {name: Moving(part, tangents.get(name)) for name, part in inputs.items()}
        args = self.args
        if rows is not None:
            query = _feature(moving["query"], args.query_map)
        if keys is None:
            return self._divide(query @ state), state

        keep = None if self.keep is None else _take(self.keep, keys)
        key = _hide(_feature(_hide(moving["key"], keep), args.key_map), keep)
        value = _with_ones(_hide(moving["value"], keep))
        if rows is None:
            return None, state + key.mT @ value

        gate = moving.get("log_decay")
        if gate is None:
            sums = query @ state + (query @ key.mT).map(torch.tril) @ value
            return self._divide(sums), state + key.mT @ value

        between = _decay_between(gate)
        since = gate.map(lambda x: x.cumsum(-2)).exp()
        if gate.value.shape[-1] == 1:
            weights = query @ key.mT * between.map(lambda x: x.select(-1, 0))
        else:
            pairs = query.map(lambda x: x.unsqueeze(-2)) * key.map(lambda x: x.unsqueeze(-3))
            weights = (pairs * between).map(lambda x: x.sum(-1))
        sums = query * since @ state + weights.map(torch.tril) @ value
        total = since.map(lambda x: x.narrow(-2, -1, 1).mT)
        kept = (total * state).map(lambda x: torch.where(total.value == 0, 0.0, x))
        until_end = between.map(lambda x: x.select(-3, -1))
        return self._divide(sums), kept + (key * until_end).mT @ value

    def _divide(self, sums: Moving) -> Moving:
        numerator = sums.map(_columns)
        if not self.args.normalize:
            return numerator.map(lambda x: x * self.args.scale)
        denominator = sums.map(lambda x: x.narrow(-1, -1, 1))
        dead = denominator.value == 0
        safe = torch.where(dead, 1.0, denominator.value)
        out = torch.where(dead, 0.0, numerator.value / safe)
        if numerator.tangent is None or denominator.tangent is None:
            return Moving(out)
        return Moving(out, torch.where(dead, 0.0, (numerator.tangent - out * denominator.tangent) / safe))


def _take(tensor: Tensor, rows: slice) -> Tensor:
    return tensor.narrow(-2, rows.start, rows.stop - rows.start)


def _columns(matrix: Tensor) -> Tensor:
    """Without the last column."""
    return matrix.narrow(-1, 0, matrix.shape[-1] - 1)


def _kv_and_k_sum(state: Any) -> tuple[Tensor, Tensor]:
    """The inverse of `Sweep.state`."""
    kv, k_sum = _columns(state).squeeze(-3), state.select(-1, -1).squeeze(-2)
    return kv.contiguous(), k_sum.contiguous()


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _join(blocks: Sequence[Tensor], like: Tensor, last: int) -> Tensor:
    """The blocks along the sequence, in the shape of `like` but for the last size."""
    shape = (*like.shape[:-1], last)
    return torch.cat(list(blocks), -2).reshape(shape) if blocks else like.new_zeros(shape)


def _in_real(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Without autocast, which would take products in 16 bits."""

    @functools.wraps(formula)
    def run(args: LinearArguments, *others: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return formula(args, *others)
        with torch.autocast(args.query.device.type, enabled=False):
            return formula(args, *others)

    return run


@_in_real
def tangents(args: LinearArguments, directions: LinearGradients) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of (out, kv, k_sum), where the inputs move in `directions` (None: that one does not)."""
    sweep = Sweep(args, directions)
    state, blocks = sweep.start(), []
    for step in sweep.steps:
        out, state = sweep.block(step, sweep.inputs(args, step), state)
        if out is not None and out.tangent is not None:
            blocks.append(out.tangent.to(args.query.dtype))
    return _join(blocks, args.query, args.value.shape[-1]), *_kv_and_k_sum(state.tangent)


@_in_real
def gradient_tangents(
    args: LinearArguments, grads: Results, directions: LinearGradients, grads_t: Results, wanted: Sequence[bool]
) -> LinearGradients:
    """Tangents of the wanted gradients, where the inputs and the gradients of the results move in the given directions."""
    sweep = Sweep(args, directions)
    state, before = sweep.start(), []
    for step in sweep.steps:
        before.append(state)
        _, state = sweep.block(step, sweep.inputs(args, step), state)

    # What the results and their tangents, then the state after a block and its tangent, are weighted with.
    by_state, by_state_t = sweep.state(*grads_t[1:]), sweep.state(*grads[1:])
    blocks: dict[str, list[Tensor]] = {name: [] for name in ("query", "key", "value", "log_decay")}
    for step, state in zip(reversed(sweep.steps), reversed(before)):
        inputs: dict[str, Any] = sweep.inputs(args, step)
        weights = {"state": by_state, "state_t": by_state_t}
        for name, grad in (("out", grads_t[0]), ("out_t", grads[0])):
            if step[0] is not None and grad is not None:
                weights[name] = sweep.rows(grad, step[0])

        def block(inputs: dict[str, Tensor], step: Step = step, names: Sequence[str] = tuple(weights)) -> dict[str, Tensor]:
            out, after = sweep.block(step, inputs, Moving(inputs["state"], inputs["state_t"]))
            results: dict[str, Any] = {"state": after.value, "state_t": after.tangent}
            if out is not None:
                results.update(out=out.value, out_t=out.tangent)
            return {name: results[name] for name in names}

        inputs |= {"state": state.value, "state_t": state.tangent}
        (gradients,) = torch.func.vjp(block, inputs)[1](weights)
        by_state, by_state_t = gradients.pop("state"), gradients.pop("state_t")
        for name, gradient in gradients.items():
            blocks[name].append(gradient.to(getattr(args, name).dtype))

    of_initial = dict(zip(("initial_kv", "initial_k_sum"), _kv_and_k_sum(by_state)))
    results: list[Tensor | None] = []
    for name, on in zip(LinearGradients._fields, wanted):
        if not on:
            results.append(None)
        elif name in blocks:
            like = getattr(args, name)
            results.append(_join(blocks[name][::-1], like, like.shape[-1]))
        else:
            results.append(of_initial[name])
    return LinearGradients(*results)
