"""Cases of linear attention that the tests, the benchmarks and the comparison share."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import reference
from .linear_call import LinearState
from .testing import SHORT_NAMES, assert_accurate, error, largest, lay_out, real_dtype, rounding, ulp


@dataclass(frozen=True)
class LinearCase:
    """One call of `ta.linear_attention`: shapes, dtype and options. None of a size means that of its neighbour."""

    batch: tuple[int, ...] = (2,)
    num_heads: int = 2
    num_heads_kv: int | None = None
    seqlen_q: int = 40
    seqlen_kv: int | None = None
    head_dim: int = 8
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    feature_map: Any = "elu"
    causal: bool = True
    normalize: bool = True
    scale: float | None = None
    masked: float = 0.0  # share of the keys that key_mask hides
    hidden: float | None = None  # what stands in hidden keys and values
    decay: str | None = None  # "token" or "feature"
    rate: float = 0.1  # mean size of a log decay
    resets: bool = False  # a few decays of -inf and -3e37
    state: bool = False  # an initial state
    layout: str = "contiguous"
    seed: int = 0

    @property
    def id(self) -> str:
        """What differs from the default, short."""
        defaults = LinearCase()
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != getattr(defaults, field.name) and field.name != "seed":
                parts.append(f"{field.name}={SHORT_NAMES.get(value, value) if isinstance(value, torch.dtype) else value}")
        return ",".join(parts) or "default"

    def replace(self, **changes: Any) -> LinearCase:
        """The same case with other fields."""
        return dataclasses.replace(self, **changes)

    def flops(self, backward: bool = False, chunk: int = 32) -> float:
        """Of the chunked form: 4 n d (d + chunk) each head when causal, two products with the state otherwise; 2.5 times that backward."""
        keys, queries = self.seqlen_q if self.seqlen_kv is None else self.seqlen_kv, self.seqlen_q
        dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        forward = 2.0 * self.head_dim * dim_v * (keys + queries) + (4.0 * queries * dim_v * chunk if self.causal else 0.0)
        return forward * math.prod(self.batch) * self.num_heads * (2.5 if backward else 1.0)

    def inputs(self) -> dict[str, Any]:
        """Fresh arguments, the same for every call. float64 inputs are float32 numbers, so that both dtypes can be run on them."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        keys = self.seqlen_q if self.seqlen_kv is None else self.seqlen_kv
        heads_kv = self.num_heads if self.num_heads_kv is None else self.num_heads_kv
        dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        real = real_dtype(self.dtype)
        query = normal(*self.batch, self.num_heads, self.seqlen_q, self.head_dim)
        key, value = normal(*self.batch, heads_kv, keys, self.head_dim), normal(*self.batch, heads_kv, keys, dim_v)
        given: dict[str, Any] = {}
        if self.masked:
            visible = torch.rand((*self.batch, keys), generator=generator) >= self.masked
            given["key_mask"] = visible
            if self.hidden is not None:
                rows = ~visible[..., None, :, None]
                key, value = key.masked_fill(rows, self.hidden), value.masked_fill(rows, self.hidden)
        if self.decay is not None:
            size = (*self.batch, heads_kv, keys) if self.decay == "token" else (*self.batch, heads_kv, keys, self.head_dim)
            log_decay = -self.rate * normal(*size).abs()
            if self.resets:
                log_decay[torch.rand(size, generator=generator) < 0.05] = -math.inf
                log_decay[torch.rand(size, generator=generator) < 0.05] = -3e37
            given["log_decay"] = log_decay.to(real)
        if self.state:
            kv, k_sum = normal(*self.batch, heads_kv, self.head_dim, dim_v), normal(*self.batch, heads_kv, self.head_dim).abs() + 0.1
            given["initial_state"] = LinearState(kv.to(real), k_sum.to(real))
        for name in ("feature_map", "causal", "normalize"):
            given[name] = getattr(self, name)
        if self.scale is not None:
            given["scale"] = self.scale
        return {name: lay_out(t.to(self.dtype), self.layout) for name, t in (("query", query), ("key", key), ("value", value))} | given


def leaves_of(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The float tensors of `LinearCase.inputs`, by name; those of the state as kv and k_sum."""
    found: dict[str, Tensor] = {name: inputs[name] for name in ("query", "key", "value", "log_decay") if name in inputs}
    if "initial_state" in inputs:
        found |= {"kv": inputs["initial_state"][0], "k_sum": inputs["initial_state"][1]}
    return found


def with_leaves(inputs: dict[str, Any], leaves: dict[str, Tensor]) -> dict[str, Any]:
    """The same arguments with other float tensors."""
    given = dict(inputs)
    if "kv" in leaves:
        given["initial_state"] = LinearState(leaves["kv"], leaves["k_sum"])
    return given | {name: leaf for name, leaf in leaves.items() if name not in ("kv", "k_sum")}


def results(
    function: Any, inputs: dict[str, Any], dtype: torch.dtype | None = None, grads: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """out, final_kv and final_k_sum of `function(**inputs) -> (out, (kv, k_sum))`, and with `grads` for them the gradients of all leaves.

    dtype: that the leaves are cast to first, the definition's in float64, say.
    """
    leaves = {name: leaf.detach() if dtype is None else leaf.detach().to(dtype) for name, leaf in leaves_of(inputs).items()}
    for leaf in leaves.values():
        leaf.requires_grad_(grads is not None)
    out, (kv, k_sum) = function(**with_leaves(inputs, leaves))
    found = {"out": out, "final_kv": kv, "final_k_sum": k_sum}
    if grads is not None:
        outputs = [found[name] for name in grads if found[name].requires_grad]
        wanted = [grads[name].to(found[name].dtype) for name in grads if found[name].requires_grad]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), wanted, allow_unused=True)
        found |= {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in zip(leaves.items(), gradients)}
    return {name: tensor.detach() for name, tensor in found.items()}


@dataclass
class Compared:
    """One tensor of one case: out, a final state, or a gradient by the name of its leaf."""

    name: str
    got: Tensor
    exact: Tensor  # float64
    definition_error: float  # largest, of the definition in the same dtype
    limit: float

    @property
    def error(self) -> float:
        """Largest difference; infinite where the patterns of finite numbers differ."""
        same = torch.equal(self.got.isfinite(), self.exact.isfinite())
        return error(self.got, self.exact) if same else math.inf


def compare(case: LinearCase, function: Any) -> list[Compared]:
    """`function` (ta.linear_attention with return_state) beside the definition in float64, with all gradients.

    The limit: four times the error of the definition in the same dtype (float32 for 16-bit inputs), in its parallel form or token by token,
    since the largest error of one sample is a random number, and an ulp of the largest element; for 16-bit results at least 1.5 times
    their rounding for out, and twice for gradients.
    """
    inputs, real = case.inputs(), real_dtype(case.dtype)
    generator = torch.Generator().manual_seed(case.seed + 1)
    grads = {}
    for name, tensor in results(reference.linear_attention, inputs, torch.float64).items():
        grads[name] = torch.randn(tensor.shape, generator=generator).to(case.dtype if name == "out" else real)
    exact = results(reference.linear_attention, inputs, torch.float64, grads)
    definitions: list[Any] = [reference.linear_attention]
    if case.causal:
        recurrent = [name for name in inputs if name != "causal"]
        definitions.append(lambda **given: reference.linear_attention_recurrent(**{name: given[name] for name in recurrent}))
    peers = [results(definition, inputs, real, grads) for definition in definitions]
    if case.decay:
        # The definition's gradient of -inf is undefined: what came before is forgotten, whatever the decay is.
        for found in (exact, *peers):
            found["log_decay"] = torch.where(inputs["log_decay"] == -math.inf, 0.0, found["log_decay"])
    rows = []
    for name, got in results(function, inputs, None, grads).items():
        want = exact[name]
        definition = max(error(peer[name], want) for peer in peers)
        limit = 4 * definition + ulp(largest(want), real)
        if real == torch.float64:
            # The definition is not exact itself: rounding errors of sums of n terms.
            limit = 2**-44 * max(largest(want), 1.0)
        if got.dtype != real:
            limit = max(limit, (1.5 if name == "out" else 2.0) * rounding(want, got.dtype))
        rows.append(Compared(name, got, want, definition, limit))
    return rows


def check(case: LinearCase, function: Any) -> None:
    """Every tensor of `compare` within its limit, with the same patterns of inf and NaN."""
    for row in compare(case, function):
        assert_accurate(row.got, row.exact, row.limit, row.name)
