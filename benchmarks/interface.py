"""What the interface of flash_attn costs over the functions behind it, in calls that compute next to nothing.

Each function is called on tensors that lie as it wants them: the other side turns nothing. "turned by hand" are calls of the function
behind it on the tensors of the interface, turned to its order of dimensions and back.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from rows import Row

import tiled_attention as ta
from tiled_attention import flash_attn as fa
from tiled_attention.compare import machine
from tiled_attention.compare.timing import alternate

MOST = 5.0  # microseconds
Call = Callable[[], Any]


def flash_attn(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Each function of the interface beside its own, with the mask of the latter made once."""
    with machine.pinned(threads):
        for grad in (False, True):
            for name, ours, theirs in _calls(grad):
                found, wanted = ours(), theirs()
                same = torch.allclose(found, wanted.transpose(1, 2) if wanted.dim() == 4 else wanted, atol=1e-5)
                against = "turned by hand" if name.endswith("by hand") else "its own function"
                what = f"{name.removesuffix(' by hand')}, {'recorded' if grad else 'no gradient'}"
                row = Row("flash_attn", what, against, "us", wrong=not same)
                if same:
                    times = alternate({"ours": ours, "theirs": theirs}, rounds=max(rounds, 100), seconds=seconds)
                    row.ours, row.theirs = times["ours"] * 1e6, times["theirs"] * 1e6
                    row.want_value(at_most=row.theirs + MOST)
                yield row


def _calls(grad: bool) -> Iterator[tuple[str, Call, Call]]:
    causal, offsets = ta.Causal(), torch.tensor([0, 1], dtype=torch.int32)
    q, k, v = (torch.randn(1, 1, 1, 8).requires_grad_(grad) for _ in range(3))
    query, key, value = (x.detach().transpose(1, 2).requires_grad_(grad) for x in (q, k, v))
    rows = [x.detach()[0].requires_grad_(grad) for x in (q, k, v)]
    qkv, kv = (torch.stack(parts, 2).detach().requires_grad_(grad) for parts in ([q, k, v], [k, v]))
    yield "flash_attn_func", lambda: fa.flash_attn_func(q, k, v), lambda: ta.attention(query, key, value)
    yield (
        "flash_attn_func by hand",
        lambda: fa.flash_attn_func(q, k, v),
        lambda: ta.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2),
    )
    yield (
        "flash_attn_func, causal",
        lambda: fa.flash_attn_func(q, k, v, causal=True),
        lambda: ta.attention(query, key, value, mask=causal),
    )
    yield "flash_attn_qkvpacked_func", lambda: fa.flash_attn_qkvpacked_func(qkv), lambda: ta.attention(query, key, value)
    yield "flash_attn_kvpacked_func", lambda: fa.flash_attn_kvpacked_func(q, kv), lambda: ta.attention(query, key, value)
    yield (
        "flash_attn_varlen_func, causal",
        lambda: fa.flash_attn_varlen_func(*rows, offsets, offsets, 1, 1, causal=True),
        lambda: ta.attention_varlen(*rows, offsets, offsets, 1, 1, mask=causal),
    )
    if not grad:
        k_cache, v_cache, length = torch.randn(1, 32, 1, 8), torch.randn(1, 32, 1, 8), torch.tensor([5], dtype=torch.int32)
        key_cache, value_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        yield (
            "flash_attn_with_kvcache",
            lambda: fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length, causal=True),
            lambda: ta.attention_decode(query, key_cache, value_cache, cache_seqlens=length),
        )
        yield (
            "flash_attn_with_kvcache, appending",
            lambda: fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=length, causal=True),
            lambda: ta.attention_decode(query, key_cache, value_cache, cache_seqlens=length, new_key=key, new_value=value),
        )


CLAIMS = {"flash_attn": flash_attn}
