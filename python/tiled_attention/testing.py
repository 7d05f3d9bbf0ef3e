"""Cases that the tests and the benchmarks share, the accuracy that is asked of them, and poisoned memory.

One frozen `Case` builds the inputs of a call, names itself and counts its visible pairs and FLOPs. What a mask lets through is written
here a second time, from the definitions and without `Mask.dense`, so that the two can be compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import masks

REAL = {torch.float64: torch.float64}  # scores, lse, slopes and sinks of any other dtype are float32
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHORT_NAMES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16", torch.bool: "bool"}
LAYOUTS = (
    "contiguous",
    "heads_last",  # a (..., seqlen, num_heads, head_dim) tensor, transposed
    "dim_first",  # head_dim is the slowest of the last two dimensions
    "strided",  # every second element of the last dimension; NaN between
    "gapped",  # rows further apart than head_dim, storage offset 1; NaN between
    "offset",  # dense, one element into its storage, so aligned to nothing
    "negated",  # a view with the negative bit
    "batch_expanded",  # stride 0 over the leading dimensions and the heads
    "rows_expanded",  # stride 0 over the sequence
)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and lse for inputs of `dtype`: float64 for float64, else float32."""
    return REAL.get(dtype, torch.float32)


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """`tensor` (..., num_heads, seqlen, dim) with the same values in another of LAYOUTS; the expanded ones repeat their first values."""
    if layout == "contiguous":
        return tensor.contiguous()
    if layout == "heads_last":
        return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "dim_first":
        return tensor.mT.contiguous().mT
    if layout == "strided":
        buffer = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), math.nan)
        return buffer[..., ::2].copy_(tensor)
    if layout == "gapped":
        buffer = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), math.nan)
        return buffer[..., 1 : 1 + tensor.shape[-1]].copy_(tensor)
    if layout == "offset":
        return tensor.new_full((tensor.numel() + 1,), math.nan)[1:].view(tensor.shape).copy_(tensor)
    if layout == "negated":
        return torch._neg_view(tensor.neg())
    if layout == "batch_expanded":
        return tensor[(slice(0, 1),) * (tensor.dim() - 2)].contiguous().expand(tensor.shape)
    if layout == "rows_expanded":
        return tensor[..., :1, :].contiguous().expand(tensor.shape)
    raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")


@dataclass
class Inputs:
    """What `Case.inputs` builds: the arguments of `ta.attention`, and what the mask lets through."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any  # a mask value, a bool tensor, or None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    query_offset: int | Tensor | None
    visible: Tensor | None  # bool, broadcastable to (..., num_heads, seqlen_q, seqlen_kv); None: everything
    position: Tensor  # int64 (seqlen_q, 1) or (..., 1, seqlen_q, 1), the key that each query stands at
    scale: float | None
    softcap: float | None
    dropout_p: float

    def leaves(self) -> dict[str, Tensor]:
        """The float tensors that are present, by name of their argument."""
        names = ("query", "key", "value", "bias", "alibi_slopes", "sinks")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `ta.attention`; those that the case does not use are left out."""
        names = ("query", "key", "value", "mask", "bias", "alibi_slopes", "sinks", "query_offset", "scale", "softcap")
        given = {name: item for name in names if (item := getattr(self, name)) is not None}
        return given | ({"dropout_p": self.dropout_p} if self.dropout_p else {})

    def clone(self, **changes: Any) -> Inputs:
        """The same inputs as fresh leaves with the same strides, with the fields in `changes` replaced."""
        fresh = dataclasses.replace(self, **changes)
        for name, tensor in fresh.leaves().items():
            setattr(fresh, name, tensor.detach())
        return fresh

    def requires_grad_(self) -> Inputs:
        """Ask for the gradient of every float tensor."""
        for tensor in self.leaves().values():
            tensor.requires_grad_()
        return self


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `ta.attention`.

    `mask` is an expression over the mask classes and Bool(*shape), a random bool tensor of that shape, for example
    "Causal() & (SlidingWindow(3, 0) | Sinks(2))". KeyLengths and Documents take their numbers as tuples.
    """

    batch: tuple[int, ...] = (2,)  # leading dimensions
    num_heads: int = 2
    num_heads_kv: int | None = None  # None: num_heads
    seqlen_q: int = 9
    seqlen_kv: int | None = None  # None: seqlen_q
    head_dim: int = 8
    head_dim_v: int | None = None  # None: head_dim
    dtype: torch.dtype = torch.float32
    mask: str | None = None
    bias: tuple[int, ...] | None = None  # shape
    bias_dtype: torch.dtype | None = None  # None: Real
    bias_hidden: float = 0.0  # share of the bias that is -inf
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    dropout_p: float = 0.0
    query_offset: int | tuple[int, ...] | None = None  # a tuple: one per batch item
    layout: str | tuple[str, str, str] = "contiguous"  # of query, key and value
    spread: float = 1.0  # standard deviation of query, key and value
    shift: float = 0.0  # added to every key and value
    hidden: float | None = None  # stands in each key and value, and each bias entry, that nobody sees
    seed: int = 0

    @property
    def kv_heads(self) -> int:
        """num_heads_kv with its default."""
        return self.num_heads if self.num_heads_kv is None else self.num_heads_kv

    @property
    def kv_length(self) -> int:
        """seqlen_kv with its default."""
        return self.seqlen_q if self.seqlen_kv is None else self.seqlen_kv

    @property
    def value_dim(self) -> int:
        """head_dim_v with its default."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def score_shape(self) -> tuple[int, ...]:
        """(..., num_heads, seqlen_q, seqlen_kv)"""
        return (*self.batch, self.num_heads, self.seqlen_q, self.kv_length)

    @property
    def id(self) -> str:
        """A name made of the shape and of every field that is not at its default."""
        heads = f"{self.num_heads}" if self.kv_heads == self.num_heads else f"{self.num_heads}over{self.kv_heads}"
        dims = f"{self.head_dim}" if self.value_dim == self.head_dim else f"{self.head_dim}to{self.value_dim}"
        batch = "x".join(map(str, self.batch)) or "none"
        words = [SHORT_NAMES[self.dtype], f"b{batch}", f"h{heads}", f"q{self.seqlen_q}", f"k{self.kv_length}", f"d{dims}"]
        shape = {"batch", "num_heads", "num_heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v", "dtype"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in shape and value != field.default:
                text = SHORT_NAMES.get(value, str(value)) if isinstance(value, torch.dtype) else str(value)
                words.append(field.name if value is True else f"{field.name}={text}")
        return re.sub(r"[^\w.=&|,+()-]", "", "-".join(words))

    def replace(self, **changes: Any) -> Case:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def position(self) -> Tensor:
        """int64 (seqlen_q, 1), or (..., 1, seqlen_q, 1) with an offset per batch item: where each query stands."""
        rows = torch.arange(self.seqlen_q)[:, None]
        if isinstance(self.query_offset, tuple):
            return rows + torch.tensor(self.query_offset).view(*self.batch, 1, 1, 1)
        return rows + (self.kv_length - self.seqlen_q if self.query_offset is None else self.query_offset)

    def visible(self, rows: slice = slice(None)) -> Tensor | None:
        """bool, broadcastable to (..., num_heads, rows, seqlen_kv): the keys that each query sees; None: all of them."""
        return None if self.mask is None else eval(self.mask, _definitions(self, rows))

    def mask_value(self) -> Any:
        """The same mask as the argument of `ta.attention`."""
        return None if self.mask is None else eval(self.mask, _mask_values(self))

    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, over all batch items and query heads."""
        pairs = 0
        for first in range(0, self.seqlen_q, 1024):
            rows = slice(first, min(first + 1024, self.seqlen_q))
            visible = self.visible(rows)
            shape = (*self.batch, self.num_heads, rows.stop - first, self.kv_length)
            pairs += math.prod(shape) if visible is None else int(visible.sum()) * (math.prod(shape) // math.prod(visible.shape))
        return pairs

    def flops(self, backward: bool = False) -> int:
        """Multiplications and additions of the matrix products over visible pairs: 2 products forward, 5 in a backward that recomputes."""
        if backward:
            return 2 * self.visible_pairs() * (3 * self.head_dim + 2 * self.value_dim)
        return 2 * self.visible_pairs() * (self.head_dim + self.value_dim)

    def inputs(self) -> Inputs:
        """Fresh tensors, the same for every call. float64 inputs are float32 numbers, so that both dtypes can be run on them."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        query = normal(*self.batch, self.num_heads, self.seqlen_q, self.head_dim) * self.spread
        key = normal(*self.batch, self.kv_heads, self.kv_length, self.head_dim) * self.spread + self.shift
        value = normal(*self.batch, self.kv_heads, self.kv_length, self.value_dim) * self.spread + self.shift
        real = real_dtype(self.dtype)
        visible = self.visible()
        bias = None
        if self.bias is not None:
            bias = normal(*self.bias)
            bias[torch.rand(self.bias, generator=generator) < self.bias_hidden] = -math.inf
            bias = bias.to(self.bias_dtype or real)
        if self.hidden is not None and visible is not None:
            seen = _seen_keys(visible.expand(self.score_shape), self.num_heads // self.kv_heads)[..., None]
            key, value = key.masked_fill(~seen, self.hidden), value.masked_fill(~seen, self.hidden)
            if bias is not None and bias.numel() == math.prod(self.score_shape):
                bias = bias.masked_fill(~visible.expand(self.score_shape).reshape(bias.shape), self.hidden)
        layouts = (self.layout,) * 3 if isinstance(self.layout, str) else self.layout
        query, key, value = (lay_out(t.to(self.dtype), layout) for t, layout in zip((query, key, value), layouts, strict=True))
        offset = torch.tensor(self.query_offset).view(self.batch) if isinstance(self.query_offset, tuple) else self.query_offset
        return Inputs(
            query=query,
            key=key,
            value=value,
            mask=self.mask_value(),
            bias=bias,
            alibi_slopes=(torch.rand(self.num_heads, generator=generator) * 0.5).to(real) if self.alibi else None,
            sinks=(2 * normal(self.num_heads)).to(real) if self.sinks else None,
            query_offset=offset,
            visible=visible,
            position=self.position(),
            scale=self.scale,
            softcap=self.softcap,
            dropout_p=self.dropout_p,
        )


def _seen_keys(visible: Tensor, group: int) -> Tensor:
    """(..., num_heads, seqlen_q, seqlen_kv) -> (..., num_heads_kv, seqlen_kv): seen by some query of some head of the group."""
    return visible.any(-2).unflatten(-2, (visible.shape[-3] // group, group)).any(-2)


def _random_bool(case: Case) -> Callable[..., Tensor]:
    def build(*shape: int, keep: float = 0.7) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * case.seed + 7 * len(shape) + sum(shape))
        return torch.rand(shape, generator=generator) < keep

    return build


def _mask_values(case: Case) -> dict[str, Any]:
    plain = (masks.Causal, masks.SlidingWindow, masks.PrefixLM, masks.Chunked, masks.Sinks)
    return {mask.__name__: mask for mask in plain} | {
        "KeyLengths": lambda lengths: masks.KeyLengths(torch.tensor(lengths).view(case.batch)),
        "Documents": lambda boundaries: masks.Documents(torch.tensor(boundaries)),
        "Bool": _random_bool(case),
    }


def _definitions(case: Case, rows: slice) -> dict[str, Any]:
    """The masks by their definitions: functions of the positions p of the queries and j of the keys."""
    i = torch.arange(case.seqlen_q)[rows, None]
    j = torch.arange(case.kv_length)
    p = case.position()[..., rows, :]

    def documents(boundaries: tuple[int, ...]) -> Tensor:
        pairs = itertools.pairwise(boundaries)
        return torch.stack([(first <= p) & (p < end) & (first <= j) & (j < end) for first, end in pairs]).any(0)

    def random_bool(*shape: int, keep: float = 0.7) -> Tensor:
        whole = _random_bool(case)(*shape, keep=keep)
        return whole[..., rows, :] if whole.dim() > 1 and whole.shape[-2] != 1 else whole

    return {
        "Causal": lambda align="bottom_right": (j <= i) if align == "top_left" else (j <= p),
        "SlidingWindow": lambda left, right: (p - left <= j) & (j <= p + right),
        "PrefixLM": lambda prefix: (j < prefix) | (j <= p),
        "Chunked": lambda size: (p >= 0) & (p.div(size, rounding_mode="floor") == j.div(size, rounding_mode="floor")),
        "KeyLengths": lambda lengths: j < torch.tensor(lengths).view(*case.batch, 1, 1, 1),
        "Documents": documents,
        "Sinks": lambda count: (j < count).expand(i.shape[0], -1),
        "Bool": random_bool,
    }


def ulp(value: float, dtype: torch.dtype) -> float:
    """The distance from |value| to the next larger number of `dtype`, subnormals included."""
    info = torch.finfo(dtype)
    return max(2.0 ** math.floor(math.log2(abs(value))), info.smallest_normal) * info.eps if value else 0.0


def largest(tensor: Tensor) -> float:
    """The largest finite magnitude in `tensor`, 0 where there is none."""
    magnitudes = tensor.detach().double().abs()
    finite = magnitudes[magnitudes.isfinite()]
    return finite.max().item() if finite.numel() else 0.0


def error(actual: Tensor, exact: Tensor) -> float:
    """The largest |actual - exact| where both are finite."""
    return largest(actual.detach().double() - exact.detach().double())


def rounding(exact: Tensor, dtype: torch.dtype) -> float:
    """What rounding `exact` to `dtype` may cost: half an ulp of the largest element."""
    return 0.5 * ulp(largest(exact), dtype)


def assert_accurate(actual: Tensor, exact: Tensor, limit: float, name: str) -> None:
    """Same shape, the same pattern of inf and NaN, and no finite element further than `limit` from the float64 value."""
    assert actual.shape == exact.shape, f"{name}: expected shape {tuple(exact.shape)}, got {tuple(actual.shape)}"
    got, want = actual.detach().double(), exact.detach().double()
    for pattern in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = pattern(got) != pattern(want)
        assert not wrong.any(), (
            f"{name}: {pattern.__name__} differs at {int(wrong.sum())} of {wrong.numel()} elements, first {wrong.nonzero()[0].tolist()}: "
            f"got {got[wrong][0]}, expected {want[wrong][0]}"
        )
    difference = torch.where(want.isfinite(), (got - want).abs(), 0.0)
    if difference.numel() and difference.max() > limit:
        place = torch.unravel_index(difference.argmax(), difference.shape)
        raise AssertionError(
            f"{name}: error {difference.max():.3e} above {limit:.3e} at {[int(k) for k in place]}: got {got[place]}, expected {want[place]}"
        )


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, every tensor that torch allocates uninitialised holds NaN (integers their maximum, bools True)."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill
