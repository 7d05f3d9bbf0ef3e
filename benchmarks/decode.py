"""Decoding over a key-value cache: the share of the memory's read bandwidth, and SDPA on the same cache.

One new token, 32 query heads of 128, batch 1. Caches rotate over as much memory as no cache of a processor holds, as the layers of a model
do. The bandwidth is that of torch.sum over as many bytes of float32, in the same process and with the same threads.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from rows import Row

import tiled_attention as ta
from tiled_attention.compare import machine
from tiled_attention.compare.timing import alternate
from tiled_attention.library import ops

HEADS, HEAD_DIM = 32, 128
FOOTPRINT = 768 << 20  # bytes
LENGTHS = (8192, 32768)


def _rotating(function: Callable[..., object], inputs: list[tuple[torch.Tensor, ...]]) -> Callable[[], object]:
    """A call of `function` on the next of the inputs."""
    cycle = itertools.cycle(inputs)
    return lambda: function(*next(cycle))


def _caches(heads_kv: int, length: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As many (key, value) caches as the footprint asks for."""
    bytes_of_one = 2 * heads_kv * length * HEAD_DIM * dtype.itemsize
    first = torch.randn(2, 1, heads_kv, length, HEAD_DIM).to(dtype)
    copies = [first, *(first.clone() for _ in range(math.ceil(FOOTPRINT / bytes_of_one) - 1))]
    return [(pair[0], pair[1]) for pair in copies]


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def _targets(isa: str, dtype: torch.dtype, heads_kv: int) -> tuple[float, float | None]:
    """(share of the bandwidth, ratio to SDPA) to reach."""
    if dtype == torch.float32:
        return (0.75 if heads_kv == 8 else 0.70), 5.0
    if dtype == torch.bfloat16 and isa == "avx512bf16":
        return (0.75 if heads_kv == 8 else 0.55), 15.0
    return (0.50 if heads_kv == 8 else 0.30), None


def decode(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Every dtype, 8 and 4 key heads, short and long caches; float32 and 16 bit on every instruction set with fused multiply-adds."""
    best, available = str(ops._isa()), str(ops._available_isas()).split()
    fused = [isa for isa in available if isa != "baseline"] or available
    with machine.pinned(threads), torch.no_grad():
        for dtype, heads_kv, length in itertools.product((torch.float32, torch.bfloat16, torch.float16), (8, 4), LENGTHS):
            caches = _caches(heads_kv, length, dtype)
            query, seqlens = torch.randn(1, HEADS, 1, HEAD_DIM).to(dtype), torch.tensor([length], dtype=torch.int32)
            ours = partial(ta.attention_decode, query, cache_seqlens=seqlens)
            numel = caches[0][0].numel() * 2 * dtype.itemsize // 4
            memory = torch.randn(FOOTPRINT // 4 // numel * numel + numel).split(numel)[:-1] or (torch.randn(numel),)
            for isa in fused:
                ops._set_isa(isa)
                what = f"(1, {HEADS} / {heads_kv}, {length}, {HEAD_DIM}) {machine.dtype_name(dtype)} {isa}"
                if not torch.allclose(
                    ours(*caches[0]).float(), _sdpa(query.float(), *(c.float() for c in caches[0])), rtol=0.05, atol=2e-3
                ):
                    yield Row("decode", what, wrong=True)
                    continue
                calls = {
                    "ours": _rotating(ours, caches),
                    "theirs": _rotating(partial(_sdpa, query), caches),
                    "read": _rotating(torch.sum, [(part,) for part in memory]),
                }
                if isa != best:
                    del calls["theirs"]
                found = alternate(calls, rounds=rounds, seconds=seconds)
                share, ratio = _targets(isa, dtype, heads_kv)
                row = Row("decode", f"{what} of the read bandwidth", "reading alone", "ms", found["ours"] * 1e3, found["read"] * 1e3)
                yield row.want(at_least=share)
                if isa == best:
                    yield Row("decode", what, "SDPA enable_gqa", "ms", found["ours"] * 1e3, found["theirs"] * 1e3).want(at_least=ratio)
            ops._set_isa(best)


def used_length(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """P8: 128 keys in caches of growing capacity, and a window of 128 keys at the end of a long cache, against 128 keys in 128 slots."""
    with machine.pinned(threads), torch.no_grad():
        query = torch.randn(2, 8, 1, 64)
        caches = {n: (torch.randn(2, 2, n, 64), torch.randn(2, 2, n, 64)) for n in (128, 4096, 65536)}
        calls = {n: partial(ta.attention_decode, query, *cache, cache_seqlens=torch.tensor([128, 128])) for n, cache in caches.items()}
        window = partial(ta.attention_decode, query, *caches[65536], cache_seqlens=torch.tensor([65536] * 2), mask=ta.SlidingWindow(127, 0))
        found = alternate(
            {"ours": calls[128], "capacity 4096": calls[4096], "capacity 65536": calls[65536], "window of 128 in 65536": window},
            rounds=max(rounds, 500),
            seconds=seconds,
        )
        for name, time in found.items():
            if name != "ours":
                row = Row("decode_capacity", f"(2, 8 / 2, 128 keys, 64) {name}", "128 slots", "us", time * 1e6, found["ours"] * 1e6)
                yield row.want(at_most=1.25)


def step(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """One token of a small model: append and attend, with the call."""
    with machine.pinned(threads), torch.no_grad():
        cache = ta.KVCache(1, 2, 4096, 64)
        query, key, value = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64)

        def token() -> None:
            cache.reset()
            cache.attend(query, key, value)

        found = alternate({"ours": token}, rounds=max(rounds, 500), seconds=seconds)
        yield Row("decode_step", "(1, 8 / 2, 64) first token, KVCache.attend", unit="us", ours=found["ours"] * 1e6)


CLAIMS: dict[str, Callable[[int, int, float], Iterator[Row]]] = {
    "decode": decode,
    "decode_capacity": used_length,
    "decode_step": step,
}
