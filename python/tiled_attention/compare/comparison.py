"""One operator beside what stands for it in PyTorch, on the same tensors: its errors against float64, and its time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..library import ops
from ..testing import ulp
from . import parity
from .machine import dtype_name
from .speed import DIRECTIONS, directed
from .timing import alternate

# float64 is left out: it would be judged by a definition in the same float64.
PARITY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Tensors = dict[str, Tensor]
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Size:
    """Shapes of a comparison; head_dim is that of value too."""

    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen: int
    head_dim: int

    def tensors(self, seed: int, *, kv_like_query: bool = False) -> Tensors:
        """query (batch, num_heads, seqlen, head_dim), and key and value with num_heads_kv heads, float32."""
        generator = torch.Generator().manual_seed(seed)
        heads = {"query": self.num_heads} | dict.fromkeys(("key", "value"), self.num_heads if kv_like_query else self.num_heads_kv)
        return {name: torch.randn(self.batch, count, self.seqlen, self.head_dim, generator=generator) for name, count in heads.items()}


@dataclass(frozen=True)
class Peer:
    """`call` takes the tensors that `prepare` makes of the leaves, which is not timed; `restore` gives its result the shape of ours."""

    call: Function
    prepare: Callable[[Tensors], Tensors] = dict
    restore: Callable[[Tensor], Tensor] = lambda out: out

    def __call__(self, **leaves: Tensor) -> Tensor:
        return self.restore(self.call(**self.prepare(leaves)))


@dataclass(frozen=True)
class Comparison:
    """`tiled` and `definition` are functions of the leaves by name.

    definition: the formula in PyTorch's operators. On float64 leaves it is what is right, in the dtype of the leaves what limits go by.
    peers: what the operator is timed against. Their gradients are errors that PyTorch itself makes, unless they are `approximated`: then
        they compute what the operator approximates.
    rounds: between its parts the operator rounds to the dtype of its inputs (a projected query, say), as the definition does.
    share: visible share of the pairs; None: all.
    """

    name: str
    leaves: Tensors
    tiled: Function
    definition: Function
    peers: dict[str, Peer]
    differentiable: bool = True
    approximated: bool = False
    rounds: bool = False
    share: float | None = None


def results(function: Function, leaves: Tensors, dtype: torch.dtype, differentiable: bool) -> Tensors:
    """out of `function` on the leaves in `dtype`, and the gradient of every leaf by its name, for numbers that their own dtype holds."""
    given = next(iter(leaves.values())).dtype
    leaves = {name: leaf.detach().to(dtype).requires_grad_(differentiable) for name, leaf in leaves.items()}
    out = function(**leaves)
    if not differentiable:
        return {"out": out}
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(given).to(out.dtype)
    return {"out": out, **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad_out)))}


def _judged(comparison: Comparison, dtype: torch.dtype) -> tuple[dict[str, np.ndarray], Callable[[Function], dict[str, float]]]:
    """The float64 result of each tensor, and what says how far a function in `dtype` is from it."""
    leaves = {name: leaf.to(dtype) for name, leaf in comparison.leaves.items()}
    exact = results(comparison.definition, leaves, torch.float64, comparison.differentiable)
    truth = {name: tensor.detach().numpy() for name, tensor in exact.items()}

    def errors(function: Function) -> dict[str, float]:
        found = results(function, leaves, dtype, comparison.differentiable)
        return {name: parity.error(found[name], truth[name]) for name in truth}

    return truth, errors


def _torch_errors(comparison: Comparison, dtype: torch.dtype, errors: Callable[[Function], dict[str, float]]) -> dict[str, float]:
    """Of the definition; in float32 a gradient's is the worst of PyTorch's own, for the reason that `parity` gives."""
    found = errors(comparison.definition)
    if dtype == torch.float32 and not comparison.approximated:
        for peer in comparison.peers.values():
            theirs = errors(peer)
            found = {name: value if name == "out" else max(value, theirs[name]) for name, value in found.items()}
    return found


def parity_rows(make: Callable[[int], Sequence[Comparison]], dtype: torch.dtype) -> list[dict[str, Any]]:
    """One row per tensor of each comparison that `make(seed)` gives.

    The definition's errors are the largest over a few seeds where limits go by them: in float32, and where the operator rounds.
    """
    rows = []
    for comparison, *others in zip(*(make(seed) for seed in range(parity.MATH_SEEDS))):
        truth, errors = _judged(comparison, dtype)
        ours, definition = errors(comparison.tiled), _torch_errors(comparison, dtype, errors)
        typical = dict(definition)
        for other in others if dtype == torch.float32 or comparison.rounds else ():
            exact, errors = _judged(other, dtype)
            for name, value in _torch_errors(other, dtype, errors).items():
                ratio = float(np.abs(truth[name]).max(initial=0)) / max(float(np.abs(exact[name]).max(initial=0)), 1e-300)
                typical[name] = max(typical[name], value * ratio)
        for tensor, true in truth.items():
            allowed = parity.limit(dtype, tensor, true, typical[tensor], str(ops._isa()))
            if comparison.rounds:
                allowed = max(allowed, parity.MATH_FACTOR * typical[tensor] + ulp(float(np.abs(true).max(initial=0)), dtype))
            rows.append(
                {
                    "case": comparison.name,
                    "dtype": dtype_name(dtype),
                    "tensor": tensor if tensor == "out" else f"grad_{tensor}",
                    "tiled": ours[tensor],
                    "definition": definition[tensor],
                    "limit": allowed,
                    "passed": ours[tensor] <= allowed,
                }
            )
    return rows


def speed_rows(comparison: Comparison, n: int, dtype: torch.dtype, seconds: float) -> list[dict[str, Any]]:
    """One row per direction; without gradients forward alone. ratios: their time over ours."""
    own = {name: leaf.to(dtype).requires_grad_(comparison.differentiable) for name, leaf in comparison.leaves.items()}
    inputs = {"tiled": own}
    for name, peer in comparison.peers.items():
        with torch.no_grad():
            prepared = peer.prepare(own)
        inputs[name] = {key: tensor.detach().requires_grad_(comparison.differentiable) for key, tensor in prepared.items()}
    functions: dict[str, Function] = {"tiled": comparison.tiled} | {name: peer.call for name, peer in comparison.peers.items()}
    rows = []
    for direction in DIRECTIONS if comparison.differentiable else DIRECTIONS[:1]:
        calls: dict[str, Callable[[], object]] = {}
        for name, function in functions.items():

            def call(function: Function = function, tensors: Tensors = inputs[name]) -> Tensor:
                return function(**tensors)

            calls |= directed({name: call}, list(inputs[name].values()), direction)
        found = alternate(calls, seconds=seconds)
        rows.append(
            {
                "case": comparison.name,
                "dtype": dtype_name(dtype),
                "n": n,
                "direction": direction,
                "share": comparison.share,
                "seconds": found,
                "ratios": {name: found[name] / found["tiled"] for name in comparison.peers},
            }
        )
    return rows
