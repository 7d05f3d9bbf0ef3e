"""The packed functions and the cache of tiled_attention.flash_attn against what flash_attn's documentation says of them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiled_attention as ta
from flash_attn_formula import formula, turn
from tiled_attention import flash_attn as fa

F64, I32 = torch.float64, torch.int32
LENGTHS_Q, LENGTHS_K = [4, 0, 7, 1], [6, 3, 5, 9]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window_size": (2, 0)},
    "window": {"window_size": (1, 2)},
    "softcap and slopes": {"softcap": 1.5, "alibi_slopes": (4,)},
    "all": {"causal": True, "window_size": (3, -1), "softcap": 2.0, "softmax_scale": 0.4, "alibi_slopes": (4, 4)},
}


def rows(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=F64).requires_grad_(grad)


def offsets_of(lengths: list[int]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(I32)


def chosen(name: str) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(options["alibi_slopes"], dtype=F64)
    return options


def of_item(options: dict[str, Any], item: int) -> dict[str, Any]:
    slopes = options.get("alibi_slopes")
    return {**options, "alibi_slopes": slopes[item]} if slopes is not None and slopes.dim() == 2 else options


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) of each sequence alone."""
    outs, lses = [], []
    for item, part in enumerate(zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), v.split(LENGTHS_K))):
        out, lse, _ = formula(*(x[None] for x in part), **of_item(options, item))
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("name", OPTIONS)
def test_sequences_one_after_the_other(name: str):
    torch.manual_seed(0)
    q, k, v = rows(12, 4, 8, grad=True), rows(23, 2, 8, grad=True), rows(23, 2, 8, grad=True)
    offsets, options = (offsets_of(LENGTHS_Q), offsets_of(LENGTHS_K)), chosen(name)
    out, lse, probabilities = fa.flash_attn_varlen_func(q, k, v, *offsets, 7, 9, **options, return_attn_probs=True)
    wanted, wanted_lse = one_by_one(q, k, v, options)
    assert close(out, wanted) and close(lse, wanted_lse) and probabilities.shape == (0,)
    assert all(close(*pair) for pair in zip(*(torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (out, wanted))))
    longest = torch.tensor(7), torch.tensor(9)  # as transformers passes them
    assert torch.equal(fa.flash_attn_varlen_func(q, k, v, *offsets, *longest, **options), out)
    kv = torch.stack([k, v], 1)
    assert torch.equal(fa.flash_attn_varlen_kvpacked_func(q, kv, *offsets, 7, 9, **options), out)
    qkv = rows(12, 3, 4, 8, grad=True)
    both = (offsets[0], offsets[0], 7, 7)
    results = (
        fa.flash_attn_varlen_qkvpacked_func(qkv, offsets[0], 7, **options),
        fa.flash_attn_varlen_func(*qkv.unbind(1), *both, **options),
    )
    assert torch.equal(*results) and torch.equal(*(torch.autograd.grad(x.sin().sum(), qkv)[0] for x in results))


@pytest.mark.parametrize("one_each", (False, True))
def test_probabilities_of_packed_sequences(one_each: bool):
    torch.manual_seed(0)
    q, k, v = rows(12, 4, 8), rows(23, 2, 8), rows(23, 2, 8)
    options = {"causal": True, "alibi_slopes": torch.rand((4, 4) if one_each else 4, dtype=F64)}
    arguments = (q, k, v, offsets_of(LENGTHS_Q), offsets_of(LENGTHS_K), 8, 10)
    out, lse, s_dmask = fa.flash_attn_varlen_func(*arguments, dropout_p=0.4, **options, return_attn_probs=True)
    assert s_dmask.shape == (4, 4, 8, 10) and close(lse, one_by_one(q, k, v, options)[1])
    kept, start_q, start_k = ~torch.signbit(s_dmask), 0, 0
    for item, (n_q, n_k) in enumerate(zip(LENGTHS_Q, LENGTHS_K)):
        part = (q[None, start_q : start_q + n_q], k[None, start_k : start_k + n_k], v[None, start_k : start_k + n_k])
        here = kept[item : item + 1, :, :n_q, :n_k]
        wanted, _, probabilities = formula(*part, **of_item(options, item), kept=here, dropout_p=0.4)
        assert close(out[None, start_q : start_q + n_q], wanted) and close(s_dmask[item : item + 1, :, :n_q, :n_k].abs(), probabilities)
        assert not s_dmask[item, :, n_q:].any() and not s_dmask[item, :, :, n_k:].any()
        start_q, start_k = start_q + n_q, start_k + n_k
    assert 0.4 < kept[2, :, :7, :5].double().mean() < 0.8


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths_q", ([2, 2, 2, 2], [3, 0, 2, 1]), ids=str)
def test_packed_queries_over_pages(lengths_q: list[int], name: str):
    torch.manual_seed(0)
    q, pages_k, pages_v, options = rows(sum(lengths_q), 4, 8), rows(9, 4, 2, 8), rows(9, 4, 2, 8), chosen(name)
    table = torch.randperm(9)[:8].reshape(4, 2).repeat(1, 2)[:, :3].to(I32)
    out, lse, _ = fa.flash_attn_varlen_func(
        q,
        pages_k,
        pages_v,
        offsets_of(lengths_q),
        offsets_of(LENGTHS_K),
        max(lengths_q),
        9,
        block_table=table,
        return_attn_probs=True,
        **options,
    )
    start = 0
    for item, (n_q, n_k) in enumerate(zip(lengths_q, LENGTHS_K)):
        key, value = (x[table[item].long()].flatten(0, 1)[None, :n_k] for x in (pages_k, pages_v))
        wanted, wanted_lse, _ = formula(q[None, start : start + n_q], key, value, **of_item(options, item))
        assert close(out[None, start : start + n_q], wanted) and close(lse[None, :, start : start + n_q], wanted_lse)
        start += n_q


CACHES: dict[str, dict[str, Any]] = {
    "whole": {},
    "one length": {"cache_seqlens": 7},
    "lengths": {"cache_seqlens": [5, 0, 9]},
    "items": {"cache_seqlens": [5, 2, 9], "cache_batch_idx": [3, 0, 1]},
    "left padding": {"cache_seqlens": [5, 2, 9], "cache_leftpad": [2, 0, 4]},
    "items and left padding": {"cache_seqlens": [5, 2, 9], "cache_batch_idx": [3, 0, 1], "cache_leftpad": [2, 1, 4]},
    "pages": {"cache_seqlens": [5, 2, 9], "block_table": [[4, 1, 7], [2, 0, 0], [5, 6, 3]]},
}


class Case:
    """Three items, caches in each of the forms, and what each item's keys are."""

    def __init__(self, name: str, seqlen_q: int, seqlen_new: int, heads_first: bool = False) -> None:
        torch.manual_seed(len(name) + seqlen_q)
        given = CACHES[name]
        self.q, self.new = rows(3, seqlen_q, 4, 16), [rows(3, seqlen_new, 2, 16) for _ in range(2)] if seqlen_new else [None, None]
        items = 4 if "cache_batch_idx" in given else 3
        shape = (8, 4, 2, 16) if "block_table" in given else (items, 12, 2, 16)
        self.caches = [rows(*shape) for _ in range(2)]
        if heads_first:
            self.caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in self.caches]
        self.given = {key: value if isinstance(value, int) else torch.tensor(value, dtype=I32) for key, value in given.items()}
        lengths = given.get("cache_seqlens", 12)
        self.lengths = [lengths] * 3 if isinstance(lengths, int) else lengths
        self.first = given.get("cache_leftpad", [0] * 3)
        self.seqlen_new = seqlen_new

    def slots(self, item: int) -> list[tuple[int, int]]:
        """Where the keys of an item stand in the cache, as far as it reaches."""
        if "block_table" in self.given:
            return [(int(page), row) for page in self.given["block_table"][item] for row in range(4)]
        where = int(self.given["cache_batch_idx"][item]) if "cache_batch_idx" in self.given else item
        return [(where, row) for row in range(12)]


def keys_at(cache: Tensor, slots: list[tuple[int, int]]) -> Tensor:
    return torch.stack([cache[slot] for slot in slots]) if slots else cache[0, :0]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("cache", "new"), [(cache, new) for cache in CACHES for new in (0, 1, 3) if cache != "whole" or new == 0])
def test_the_cache(cache: str, new: int, options: str):
    case, chosen_options = Case(cache, max(new, 2 if options == "causal" else 1), new, heads_first=options == "window"), chosen(options)
    if "alibi_slopes" in chosen_options:
        chosen_options["alibi_slopes"] = chosen_options["alibi_slopes"][:3] if options == "all" else chosen_options["alibi_slopes"]
    expected = [kept.clone() for kept in case.caches]
    wanted = []
    for item in range(3):
        slots, n = case.slots(item), case.lengths[item]
        for cached, fresh in zip(expected, case.new):
            for row in range(new):
                cached[slots[n + row]] = fresh[item, row]
        key, value = (keys_at(cached, slots[case.first[item] : n + new]) for cached in expected)
        wanted.append(formula(case.q[item : item + 1], key[None], value[None], **of_item(chosen_options, item)))
    out, lse = fa.flash_attn_with_kvcache(case.q, *case.caches, *case.new, **case.given, **chosen_options, return_softmax_lse=True)
    assert close(out, torch.cat([result[0] for result in wanted])) and close(lse, torch.cat([result[1] for result in wanted]))
    assert all(torch.equal(*pair) for pair in zip(case.caches, expected))
    assert torch.equal(fa.flash_attn_with_kvcache(case.q, *case.caches, *case.new, **case.given, **chosen_options, num_splits=3), out)


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("options", ("plain", "causal", "window"))
@pytest.mark.parametrize("cache", ("lengths", "items and left padding", "pages"))
def test_rotary_positions_of_the_cache(cache: str, options: str, interleaved: bool):
    """k at the length of the cache and on; q likewise where causal or local, or else all of it at the length."""
    case, chosen_options = Case(cache, 3, 2), chosen(options)
    angles = torch.rand(14, 4, dtype=F64) * 6
    cos, sin = angles.cos(), angles.sin()
    expected, wanted = [kept.clone() for kept in case.caches], []
    for item in range(3):
        slots, n = case.slots(item), case.lengths[item]
        turned = turn(case.new[0][item], cos, sin, [n, n + 1], interleaved)
        for row in range(2):
            expected[0][slots[n + row]], expected[1][slots[n + row]] = turned[row], case.new[1][item, row]
        key, value = (keys_at(cached, slots[case.first[item] : n + 2]) for cached in expected)
        query = turn(case.q[item], cos, sin, [n] * 3 if options == "plain" else [n, n + 1, n + 2], interleaved)
        wanted.append(formula(query[None], key[None], value[None], **chosen_options)[0])
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    out = fa.flash_attn_with_kvcache(case.q, *case.caches, *case.new, **rotary, **case.given, **chosen_options)
    assert close(out, torch.cat(wanted)) and all(close(*pair) for pair in zip(case.caches, expected))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_the_cache_in_other_dtypes(dtype: torch.dtype):
    torch.manual_seed(0)
    q, k, v, caches = *(rows(2, 1, 4, 16).to(dtype) for _ in range(3)), [rows(2, 40, 4, 16).to(dtype) for _ in range(2)]
    out, lse = fa.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=30, causal=True, return_softmax_lse=True)
    wanted, wanted_lse, _ = formula(q, *(cache[:, :31] for cache in caches))
    assert out.dtype == dtype and close(out.double(), wanted, 3e-2 if dtype == torch.bfloat16 else 4e-3)
    assert close(lse.double(), wanted_lse, 1e-4) and torch.equal(caches[0][:, 30], k[:, 0])


@pytest.mark.parametrize("causal", (False, True))
def test_an_append_counts_as_a_change_of_the_caches(causal: bool):
    q, k, caches, lengths = rows(2, 1, 4, 16), rows(2, 1, 4, 16), [rows(2, 12, 4, 16) for _ in range(2)], torch.tensor([3, 5])
    weight = rows(16, grad=True)
    products = [(cache * weight).sum() for cache in caches]
    fa.flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=lengths, causal=causal)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    before = [cache._version for cache in caches]
    fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, causal=causal)
    assert [cache._version for cache in caches] == before


def test_decoding_compiles():
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k, v, caches = *(rows(2, 1, 4, 16) for _ in range(3)), [rows(2, 12, 4, 16) for _ in range(2)]
    lengths, twins = torch.tensor([3, 5], dtype=I32), [cache.clone() for cache in caches]

    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, window_size=(4, 0))

    with torch.no_grad():
        got = torch.compile(step, backend="aot_eager", fullgraph=True)(q, *caches, k, v, lengths)
        assert close(got, step(q, *twins, k, v, lengths)) and all(torch.equal(*pair) for pair in zip(caches, twins))


Q, CACHE, NEW = torch.zeros(2, 3, 4, 8), torch.zeros(2, 9, 2, 8), torch.zeros(2, 3, 2, 8)
COS, LENGTHS = torch.zeros(9, 4), torch.tensor([1, 2], dtype=I32)
PACKED, OFFSETS = torch.zeros(6, 4, 8), torch.tensor([0, 2, 6], dtype=I32)
ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "cache rank": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE[0], CACHE),
        RuntimeError,
        r"k_cache must have shape \(batch_size, seqlen_cache, nheads_k",
    ),
    "cache batch": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE[:1], CACHE[:1]),
        RuntimeError,
        "k_cache must have shape .* with batch_size 2, as in q",
    ),
    "cache dtype": (lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE.half()), RuntimeError, "v_cache must have the dtype of q"),
    "pages": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=3, block_table=torch.zeros(3, 1, dtype=I32)),
        (ValueError, RuntimeError),
        "block_table must have shape",
    ),
    "lengths": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=torch.tensor([1])),
        (ValueError, RuntimeError),
        "cache_seqlens",
    ),
    "lengths float": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=1.5),
        TypeError,
        "cache_seqlens must be an integer",
    ),
    "no lengths": (lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW, NEW), RuntimeError, "cache_seqlens must be given with k"),
    "no v": (lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW, cache_seqlens=1), TypeError, "v must be a tensor, got NoneType"),
    "new heads": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW[:, :, :1], NEW[:, :, :1], cache_seqlens=1),
        RuntimeError,
        "k must have shape .* with nheads_k 2, as in k_cache",
    ),
    "no room": (lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW, NEW, cache_seqlens=8), (ValueError, RuntimeError), r"k.* 9"),
    "rotary alone": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, rotary_cos=COS, rotary_sin=COS, cache_seqlens=1),
        RuntimeError,
        "k and v must be given",
    ),
    "rotary short": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW, NEW, COS[:8], COS[:8], cache_seqlens=1),
        ValueError,
        "rotary_cos must have shape .* at least 9",
    ),
    "no sin": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW, NEW, COS, cache_seqlens=1),
        TypeError,
        "rotary_sin must be a float tensor",
    ),
    "items": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=1, cache_batch_idx=torch.tensor([0, 2])),
        ValueError,
        r"cache_batch_idx must lie in \[0, 1\], got 2",
    ),
    "items and pages": (
        lambda: fa.flash_attn_with_kvcache(
            Q, CACHE, CACHE, cache_seqlens=1, cache_batch_idx=torch.tensor([0, 1]), block_table=torch.zeros(2, 1, dtype=I32)
        ),
        RuntimeError,
        "block_table must be None with cache_batch_idx",
    ),
    "left padding": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=5, cache_leftpad=torch.tensor([1])),
        ValueError,
        r"cache_leftpad must have shape \(2,\)",
    ),
    "left padding beyond": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=3, cache_leftpad=torch.tensor([4, 0])),
        ValueError,
        "cache_leftpad must be at most cache_seqlens",
    ),
    "left padding without room": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW, NEW, cache_seqlens=7, cache_leftpad=torch.tensor([4, 0])),
        ValueError,
        "cache_seqlens must be at most 6, for 3 new keys to fit, got 7",
    ),
    "table of another type": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=3, block_table=torch.zeros(2, 1)),
        TypeError,
        "block_table must be an int32 tensor, got torch.float32",
    ),
    "gradients": (
        lambda: fa.flash_attn_with_kvcache(Q.clone().requires_grad_(), CACHE, CACHE, cache_seqlens=1),
        RuntimeError,
        "q must not require a gradient",
    ),
    "gradients of k": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW.clone().requires_grad_(), NEW, cache_seqlens=LENGTHS),
        RuntimeError,
        r"\bk must not require a gradient",
    ),
    "no room behind lengths": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW, NEW, cache_seqlens=LENGTHS + 7),
        (ValueError, RuntimeError),
        r"k.* 9",
    ),
    "an expanded cache": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE[:1].expand(2, 9, 2, 8), NEW, NEW, cache_seqlens=LENGTHS),
        ValueError,
        "v_cache must hold every element by itself",
    ),
    "scale of an append": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW + 1, NEW, cache_seqlens=LENGTHS, softmax_scale=float("inf")),
        ValueError,
        "softmax_scale must be finite, got inf",
    ),
    "new rank": (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW[0], NEW, cache_seqlens=LENGTHS),
        RuntimeError,
        "k must have shape",
    ),
    "window": (lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, window_size=None), TypeError, "window_size must be two integers"),
    "offsets": (
        lambda: fa.flash_attn_varlen_func(PACKED, PACKED, PACKED, OFFSETS, OFFSETS.float(), 4, 4),
        TypeError,
        "cu_seqlens_k must be an int32",
    ),
    "offsets end": (
        lambda: fa.flash_attn_varlen_func(PACKED, PACKED, PACKED, OFFSETS, OFFSETS - OFFSETS // 6, 4, 4),
        (ValueError, RuntimeError),
        "cu_seqlens_k",
    ),
    "offsets with slopes": (
        lambda: fa.flash_attn_varlen_func(PACKED, PACKED, PACKED, OFFSETS, OFFSETS + 1, 4, 4, alibi_slopes=torch.ones(2, 4)),
        ValueError,
        "cu_seqlens_k must start at 0",
    ),
    "too short with slopes": (
        lambda: fa.flash_attn_varlen_func(PACKED, PACKED, PACKED, OFFSETS, OFFSETS, 4, 3, alibi_slopes=torch.ones(2, 4)),
        ValueError,
        "max_seqlen_k must be at least the length of every sequence, got 3",
    ),
    "too many keys for the table": (
        lambda: fa.flash_attn_varlen_func(
            PACKED, CACHE, CACHE, OFFSETS, torch.tensor([0, 4, 14]), 4, 10, block_table=torch.zeros(2, 1, dtype=I32)
        ),
        ValueError,
        "cu_seqlens_k must hold at most 9 keys for each sequence, as block_table has, got 10",
    ),
    "longest": (
        lambda: fa.flash_attn_varlen_func(PACKED, PACKED, PACKED, OFFSETS, OFFSETS, 4, "4"),
        TypeError,
        "max_seqlen_k must be an integer",
    ),
    "packed rank": (
        lambda: fa.flash_attn_varlen_func(PACKED[None], PACKED, PACKED, OFFSETS, OFFSETS, 4, 4),
        RuntimeError,
        "q must have shape .*total_q",
    ),
    "packed total": (
        lambda: fa.flash_attn_varlen_func(PACKED, PACKED, PACKED[:5], OFFSETS, OFFSETS, 4, 4),
        RuntimeError,
        "v must have shape .* total_k 6",
    ),
    "packed qkv": (
        lambda: fa.flash_attn_varlen_qkvpacked_func(PACKED[:, None], OFFSETS, 4),
        RuntimeError,
        r"qkv must have shape \(total, 3, nheads",
    ),
    "packed kv": (
        lambda: fa.flash_attn_varlen_kvpacked_func(PACKED, PACKED[:, None], OFFSETS, OFFSETS, 4, 4),
        RuntimeError,
        r"kv must have shape \(total_k, 2, nheads_k",
    ),
    "dropout over pages": (
        lambda: fa.flash_attn_varlen_func(
            PACKED, CACHE, CACHE, OFFSETS, OFFSETS, 4, 4, dropout_p=0.1, block_table=torch.zeros(2, 1, dtype=I32)
        ),
        ValueError,
        "dropout_p must be 0 with block_table",
    ),
    "table": (
        lambda: fa.flash_attn_varlen_func(PACKED, CACHE, CACHE, OFFSETS, OFFSETS, 4, 4, block_table=torch.zeros(3, 1, dtype=I32)),
        ValueError,
        r"block_table must have shape \(2, max_blocks\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str):
    call, kind, message = ERRORS[name]
    before = CACHE.clone()
    with pytest.raises(kind, match=message):
        call()
    assert torch.equal(CACHE, before)


def test_rows_between_padded_and_packed():
    torch.manual_seed(0)
    x, mask = rows(3, 5, 4, 8, grad=True), torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    with fa.install():
        from flash_attn import bert_padding, flash_attn_varlen_func

        packed, indices, offsets, longest, used = bert_padding.unpad_input(x, mask)
        assert offsets.tolist() == [0, 3, 5, 5] and longest == 3 and used.tolist() == [3, 2, 0] and indices.tolist() == [1, 2, 3, 5, 6]
        out = bert_padding.pad_input(flash_attn_varlen_func(packed, packed, packed, offsets, offsets, longest, longest), indices, 3, 5)
    padded = ta.attention(*[x.transpose(1, 2)] * 3, mask=mask.bool()[:, None, None]).transpose(1, 2)
    wanted = torch.where(mask.bool()[:, :, None, None], padded, 0.0)
    assert close(out, wanted)
    assert close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (out, wanted)))
