"""Cases of attention over a cache: inputs in contiguous caches or scattered over pages, NaN in every slot that no key is in."""

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

import tiled_attention as ta
from oracle import _limit, attention, plain_inputs
from tiled_attention.testing import DTYPES, SHORT_NAMES, Case, error, lay_out, real_dtype

F32, F64, BF16, F16 = DTYPES
# One below, at and above the ends of tiles, blocks and splits.
LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 1100)


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One call of `ta.attention_decode`; `mask` is an expression as in `Case`."""

    lengths: tuple[int, ...] = (0, 5, 70)  # keys of each batch item, the new ones included
    num_new: int = 0  # of them, appended by the call
    num_heads: int = 4
    num_heads_kv: int = 2
    seqlen_q: int = 1
    head_dim: int = 16
    head_dim_v: int | None = None
    capacity: int | None = None  # None: seven slots more than the longest item
    page_size: int | None = None
    dtype: torch.dtype = F32
    mask: str | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    layout: str = "contiguous"  # of the caches
    hidden: float = math.nan  # stands in unused slots and in keys that nobody sees
    seed: int = 0

    @property
    def id(self) -> str:
        words = [SHORT_NAMES[self.dtype]]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "dtype" and value != field.default:
                words.append(f"{field.name}={value}".replace(" ", ""))
        return "-".join(words)

    def multiply_adds(self) -> int:
        """Of the emulated kernel: tiles of 8 rows, 64 keys and 64 columns."""
        tiles = sum(-(-n // 64) for n in self.lengths) * self.num_heads_kv * -(-self.num_heads // self.num_heads_kv * self.seqlen_q // 8)
        return tiles * 8 * 64 * 128 * -(-max(self.head_dim, self.head_dim_v or 0) // 64)

    def replace(self, **changes: object) -> "DecodeCase":
        return dataclasses.replace(self, **changes)

    def inputs(self) -> tuple[dict[str, object], list[tuple[Tensor, Tensor]]]:
        """The arguments of the call, and each batch item's keys and values, new ones included."""
        generator = torch.Generator().manual_seed(self.seed)
        batch, value_dim = len(self.lengths), self.head_dim_v if self.head_dim_v is not None else self.head_dim
        slots = self.capacity or max(self.lengths) + 7
        normal = lambda *shape: torch.randn(shape, generator=generator).to(self.dtype)
        items = [(normal(self.num_heads_kv, n, self.head_dim), normal(self.num_heads_kv, n, value_dim)) for n in self.lengths]
        for b in range(batch):
            seen = self.visible(b).any(0)
            for tensor in items[b]:
                tensor.masked_fill_(~seen[:, None], self.hidden)
        arguments: dict[str, object] = {"query": normal(batch, self.num_heads, self.seqlen_q, self.head_dim)}
        before = [n - self.num_new for n in self.lengths]
        table = None
        if self.page_size is not None:
            pages = -(-slots // self.page_size)
            table = torch.randperm(2 * batch * pages, generator=generator)[: batch * pages].view(batch, pages).int()
            arguments["page_table"] = table.masked_fill(torch.arange(pages) * self.page_size >= torch.tensor(self.lengths)[:, None], -7)
        for name, at, dim in (("key_cache", 0, self.head_dim), ("value_cache", 1, value_dim)):
            if table is None:
                cache = torch.full((batch, self.num_heads_kv, slots, dim), math.nan, dtype=self.dtype)
                for b, n in enumerate(before):
                    cache[b, :, :n] = items[b][at][:, :n]
            else:
                cache = torch.full((2 * table.numel(), self.num_heads_kv, self.page_size, dim), math.nan, dtype=self.dtype)
                for b, n in enumerate(before):
                    for j in range(n):
                        cache[table[b, j // self.page_size], :, j % self.page_size] = items[b][at][:, j]
            arguments[name] = lay_out(cache, self.layout)
        arguments["cache_seqlens"] = torch.tensor(before, dtype=torch.int32 if self.seed % 2 else torch.int64)
        if self.num_new:
            for name, at in (("new_key", 0), ("new_value", 1)):
                arguments[name] = torch.stack([item[at][:, -self.num_new :] for item in items])
        real = real_dtype(self.dtype)
        options = {
            "mask": None if self.mask is None else eval(self.mask, vars(ta)),
            "scale": self.scale,
            "softcap": self.softcap,
            "alibi_slopes": (torch.rand(self.num_heads, generator=generator) * 0.3).to(real) if self.alibi else None,
            "sinks": (2 * torch.randn(self.num_heads, generator=generator)).to(real) if self.sinks else None,
        }
        return arguments | {name: option for name, option in options.items() if option is not None}, items

    def visible(self, item: int) -> Tensor:
        """bool (seqlen_q, length) of a batch item, by the definitions of tiled_attention.testing."""
        length = self.lengths[item]
        plain = Case(batch=(), num_heads=1, seqlen_q=self.seqlen_q, seqlen_kv=length, mask=self.mask).visible()
        shape = (self.seqlen_q, length)
        return torch.ones(shape, dtype=torch.bool) if plain is None else plain.expand(shape)


@lru_cache(maxsize=4)
def expected(case: DecodeCase) -> tuple[Tensor, Tensor, float, float]:
    """float64 (out, lse), and how far float32 PyTorch is from each."""
    arguments, items = case.inputs()
    options = {name: arguments.get(name) for name in ("scale", "softcap", "alibi_slopes", "sinks")}
    exact, own = [], [0.0, 0.0]
    for b, (key, value) in enumerate(items):
        x = plain_inputs(arguments["query"][b], key, value, case.visible(b), **options)
        exact.append(attention(x))
        for order in (0, 7, 1, 4):
            results = attention(x, None, torch.float32, order)
            own = [max(before, error(result, want)) for before, result, want in zip(own, results, exact[-1], strict=True)]
    out, lse = (torch.stack(parts) for parts in zip(*exact, strict=True))
    return out, lse, own[0], own[1]


def limits(case: DecodeCase, dot: bool) -> tuple[float, float]:
    """How far out and lse may be from the exact ones."""
    out, lse, own_out, own_lse = expected(case)
    real = real_dtype(case.dtype)
    return _limit("out", out, own_out, case.dtype, case.dtype, dot), _limit("lse", lse, own_lse, case.dtype, real, dot)


STREAMING = "Causal() & (SlidingWindow(20, 0) | Sinks(5))"
MASKS = (
    "Causal()",
    "SlidingWindow(30, 0)",
    "SlidingWindow(0, 0)",
    "SlidingWindow(700, 2)",
    "Chunked(48)",
    "Sinks(40)",
    "PrefixLM(9)",
    STREAMING,
    "Causal() & Chunked(600)",
)
BASE = DecodeCase(lengths=(3, 64, 129, 700), seqlen_q=3)

LENGTH_CASES = [
    DecodeCase(lengths=LENGTHS, dtype=dtype, page_size=page_size, seqlen_q=seqlen_q, seed=k)
    for k, dtype in enumerate(DTYPES)
    for page_size, seqlen_q in ((None, 1), (16, 1), (None, 3))
]
FEATURES = [
    *(BASE.replace(mask=mask, dtype=DTYPES[k % 4], seed=k) for k, mask in enumerate(MASKS)),
    *(BASE.replace(mask=mask, page_size=(5, 16, 64)[k % 3], dtype=DTYPES[(k + 1) % 4], seed=k) for k, mask in enumerate(MASKS)),
    *(
        BASE.replace(mask=STREAMING, alibi=True, softcap=3.0, sinks=True, page_size=page_size, dtype=dtype)
        for dtype in DTYPES
        for page_size in (None, 7)
    ),
    *(BASE.replace(**option, dtype=dtype) for option in ({"alibi": True}, {"softcap": 1.5}, {"sinks": True}) for dtype in DTYPES),
    *(BASE.replace(scale=scale, dtype=dtype) for scale in (-0.4, 0.0) for dtype in (F32, BF16)),
    *(
        BASE.replace(layout=layout, dtype=dtype)
        for layout in ("heads_last", "strided", "gapped", "offset", "dim_first")
        for dtype in (F32, BF16)
    ),
    BASE.replace(layout="heads_last", page_size=16, dtype=F16),
    # Head sizes: below, at and above vectors, lanes of a warp, and what a block holds.
    *(
        DecodeCase(lengths=(0, 33, 150), head_dim=d, head_dim_v=dv, dtype=DTYPES[k % 4], seed=k)
        for k, (d, dv) in enumerate(
            ((1, 1), (3, 7), (8, 16), (17, 33), (64, 64), (65, 40), (80, 96), (128, 128), (129, 257), (257, 5), (16, 300), (0, 4))
        )
    ),
    # Rows of a kv head: one, a few, as many as a tile and more.
    *(
        DecodeCase(lengths=(9, 300), num_heads=h, num_heads_kv=hk, seqlen_q=n, mask="Causal()", dtype=DTYPES[k % 4], head_dim=32, seed=k)
        for k, (h, hk, n) in enumerate(((1, 1, 1), (3, 3, 2), (5, 1, 1), (6, 2, 3), (8, 1, 1), (9, 3, 5), (16, 2, 5)))
    ),
    # More queries than keys: rows before the first key.
    *(
        DecodeCase(lengths=(0, 2, 9), seqlen_q=5, mask="Causal()", sinks=sinks, dtype=dtype)
        for sinks in (False, True)
        for dtype in (F32, F16)
    ),
    # New keys.
    *(BASE.replace(num_new=3, mask="Causal()", page_size=page_size, dtype=dtype) for page_size in (None, 4) for dtype in DTYPES),
    BASE.replace(num_new=1, seqlen_q=1, layout="heads_last", alibi=True),
    BASE.replace(num_new=2, seqlen_q=1, layout="strided", page_size=3),
    # What nobody sees.
    *(BASE.replace(mask="SlidingWindow(9, 0)", hidden=bad, dtype=dtype) for bad in (math.inf, -math.inf) for dtype in (F32, BF16)),
]
