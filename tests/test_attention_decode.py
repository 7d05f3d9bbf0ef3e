"""`ta.attention_decode` against float64 on every instruction set: caches of both kinds, masks, new keys, bits, errors."""

import itertools
import math
import re

import numpy as np
import pytest
import torch

import decode_cases
import tiled_attention as ta
from checks import on_dot_path
from decode_cases import BF16, DecodeCase, expected, limits
from oracle import attention, exact, plain_inputs
from tiled_attention.testing import DTYPES, assert_accurate, real_dtype

pytestmark = pytest.mark.usefixtures("poisoned")


def check(case: DecodeCase) -> None:
    arguments, items = case.inputs()
    out, lse = ta.attention_decode(**arguments, return_lse=True)
    exact_out, exact_lse, _, _ = expected(case)
    assert out.dtype == case.dtype and lse.dtype == real_dtype(case.dtype)
    out_limit, lse_limit = limits(case, on_dot_path(case.dtype))
    assert_accurate(out, exact_out, out_limit, "out")
    assert_accurate(lse, exact_lse, lse_limit, "lse")
    for b in range(len(case.lengths)):
        assert (out[b][:, ~case.visible(b).any(-1)] == 0).all(), "out: expected 0 where nothing is seen"
    if case.num_new:
        for name, at in (("key_cache", 0), ("value_cache", 1)):
            for b, n in enumerate(case.lengths):
                rows = ta.reference_decode.cached_rows(arguments[name], n, b, arguments.get("page_table"))
                assert torch.equal(rows[:, n - case.num_new :].nan_to_num(), items[b][at][:, n - case.num_new :].nan_to_num()), (
                    f"{name}: wrong keys"
                )


@pytest.mark.parametrize("case", decode_cases.LENGTH_CASES, ids=lambda case: case.id)
def test_lengths(case: DecodeCase, isa: str):
    check(case)


@pytest.mark.parametrize("case", decode_cases.FEATURES, ids=lambda case: case.id)
def test_features(case: DecodeCase, isa: str):
    check(case)


@pytest.mark.parametrize("case", decode_cases.FEATURES[::5], ids=lambda case: case.id)
def test_reference(case: DecodeCase):
    arguments, _ = case.inputs()
    out, lse = ta.reference.attention_decode(
        **{k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in arguments.items()}, return_lse=True
    )
    exact_out, exact_lse, _, _ = expected(case)
    torch.testing.assert_close(out, exact_out)
    torch.testing.assert_close(lse, exact_lse)


@pytest.mark.parametrize("page_size", [None, 4])
def test_numpy_reference(page_size):
    case = DecodeCase(page_size=page_size, seqlen_q=2, dtype=torch.float64, hidden=0.0)
    arguments, _ = case.inputs()
    names = ("query", "key_cache", "value_cache", "cache_seqlens", "page_table")
    out = ta.numpy_reference.attention_decode(*(arguments[name].numpy() if name in arguments else None for name in names))
    assert np.allclose(out, expected(case)[0].numpy())


def test_l11_alibi_by_absolute_positions():
    slopes, n = torch.tensor([0.5, 0.25, 0.7, 0.1, 0.3, 0.02]), 9
    query, key, value = torch.randn(1, 6, n, 8), torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)
    full = ta.attention(query, key, value, mask=ta.Causal(), alibi_slopes=slopes)
    for t in range(n):
        seqlens = torch.tensor([t + 1])
        step = ta.attention_decode(query[:, :, t : t + 1], key, value, cache_seqlens=seqlens, alibi_slopes=slopes)
        torch.testing.assert_close(step, full[:, :, t : t + 1], atol=1e-5, rtol=1e-5)
        without = ta.attention_decode(query[:, :, t : t + 1], key, value, cache_seqlens=seqlens)
        assert t == 0 or (step - without).abs().max() > 1e-3


@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_m11_windows_by_number_of_keys(window: int):
    zeros, value = torch.zeros(1, 1, 16, 8), torch.eye(16)[None, None]
    for t in range(16):
        out = ta.attention_decode(zeros[:, :, :1], zeros, value, cache_seqlens=torch.tensor([t + 1]), mask=ta.SlidingWindow(window, 0))
        assert (out > 0).sum() == min(t + 1, window + 1)


@pytest.mark.parametrize("lengths", [(20, 3), (0, 7)])
def test_key_lengths_and_documents(lengths):
    arguments, items = DecodeCase(lengths=(30, 12), seqlen_q=2, hidden=0.0).inputs()
    boundaries = torch.tensor([0, 9, 11, 40])
    out = ta.attention_decode(**arguments, mask=ta.KeyLengths(torch.tensor(lengths)) & ta.Documents(boundaries))
    for b, (key, value) in enumerate(items):
        n = key.shape[1]
        document = torch.bucketize(torch.arange(n), boundaries, right=True)
        visible = (document[n - 2 :, None] == document) & (torch.arange(n) < lengths[b])
        torch.testing.assert_close(out[b].double(), exact(arguments["query"][b], key, value, visible), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_threads_gives_the_same_bits(dtype, isa: str):
    case = DecodeCase(
        lengths=(2500, 0, 700), num_heads=4, num_heads_kv=1, seqlen_q=2, dtype=dtype, mask="SlidingWindow(2100, 0)", sinks=True
    )
    arguments, _ = case.inputs()
    torch.set_num_threads(1)
    want = ta.attention_decode(**arguments, return_lse=True)
    for count in (2, 3, 7):
        torch.set_num_threads(count)
        got = ta.attention_decode(**arguments, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), f"{count} threads"


def test_a_batch_item_alone_gives_the_same_bits(isa: str):
    arguments, _ = DecodeCase(lengths=(5, 1100, 300), seqlen_q=2, alibi=True).inputs()
    whole = ta.attention_decode(**arguments)
    for b in range(3):
        part = {
            name: x[b : b + 1] if name in ("query", "key_cache", "value_cache", "cache_seqlens") else x for name, x in arguments.items()
        }
        assert torch.equal(ta.attention_decode(**part), whole[b : b + 1])


def test_pages_give_the_bits_of_a_contiguous_cache(isa: str):
    for dtype, page_size in itertools.product(DTYPES, (1, 3, 64)):
        case = DecodeCase(lengths=(5, 600), seqlen_q=2, dtype=dtype, mask="SlidingWindow(550, 0)")
        arguments, items = case.inputs()
        pages = -(-607 // page_size)
        table = torch.randperm(2 * pages).view(2, pages).int()
        caches = {}
        for name, at in (("key_cache", 0), ("value_cache", 1)):
            caches[name] = torch.full((2 * pages, 2, page_size, 16), math.nan, dtype=dtype)
            for b, n in enumerate(case.lengths):
                for j in range(n):
                    caches[name][table[b, j // page_size], :, j % page_size] = items[b][at][:, j]
        assert torch.equal(ta.attention_decode(**(arguments | caches), page_table=table), ta.attention_decode(**arguments)), (
            dtype,
            page_size,
        )


def test_unused_memory_may_hold_anything():
    case = DecodeCase(lengths=(40, 3), capacity=200, mask="Causal()", seqlen_q=2)
    arguments, _ = case.inputs()
    want = ta.attention_decode(**arguments)
    for bad in (math.inf, -math.inf, 1e38, 0.0):
        for name in ("key_cache", "value_cache"):
            for b, n in enumerate(case.lengths):
                arguments[name][b, :, n:] = bad
        assert torch.equal(ta.attention_decode(**arguments), want)


def test_visible_values_that_are_not_finite_reach_their_rows_alone():
    arguments, items = DecodeCase(lengths=(50,), seqlen_q=3, mask="Causal()").inputs()
    for bad in (math.inf, -math.inf, math.nan):
        arguments["value_cache"][0, 0, 49, 3] = items[0][1][0, 49, 3] = bad  # seen by the last query, through the first kv head
        out = ta.attention_decode(**arguments)
        x = plain_inputs(arguments["query"][0], *items[0], torch.arange(50) <= torch.arange(47, 50)[:, None])
        assert_accurate(out[0], attention(x)[0], 1e-5, "out")
        assert (~out[0].isfinite()).nonzero().tolist() == [[0, 2, 3], [1, 2, 3]]


def test_p8_any_capacity():
    query, n = torch.randn(2, 4, 1, 32), 100
    for capacity in (128, 4096):
        key, value = torch.randn(2, 2, capacity, 32), torch.randn(2, 2, capacity, 32)
        out = ta.attention_decode(query, key, value, cache_seqlens=torch.tensor([n, n]))
        torch.testing.assert_close(out.double(), exact(query, key[:, :, :n], value[:, :, :n]), atol=1e-5, rtol=1e-5)


def test_output_has_the_memory_order_of_query():
    arguments, _ = DecodeCase(seqlen_q=2).inputs()
    arguments["query"] = arguments["query"].transpose(1, 2).contiguous().transpose(1, 2)
    assert ta.attention_decode(**arguments).stride() == torch.empty_like(arguments["query"]).stride()


@pytest.mark.parametrize(
    "batch, heads, heads_kv, seqlen_q, capacity, head_dim",
    [(0, 4, 2, 1, 9, 8), (2, 0, 0, 1, 9, 8), (2, 0, 2, 1, 9, 8), (2, 4, 2, 0, 9, 8), (2, 4, 2, 1, 0, 8), (2, 4, 2, 1, 9, 0)],
)
def test_empty_sizes(batch, heads, heads_kv, seqlen_q, capacity, head_dim):
    cache = torch.randn(batch, heads_kv, capacity, head_dim)
    seqlens = torch.full((batch,), capacity)
    out, lse = ta.attention_decode(torch.randn(batch, heads, seqlen_q, head_dim), cache, cache, cache_seqlens=seqlens, return_lse=True)
    assert out.shape == (batch, heads, seqlen_q, head_dim) and lse.shape == (batch, heads, seqlen_q)
    assert (lse == (math.log(capacity) if capacity and not head_dim else -math.inf)).all() or (capacity and head_dim)


def test_autocast_casts_what_is_new():
    cache = torch.randn(2, 2, 9, 8).bfloat16()
    query, new = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = ta.attention_decode(query, cache, cache.clone(), cache_seqlens=torch.tensor([3, 4]), new_key=new, new_value=new)
    assert out.dtype == BF16
    assert torch.equal(cache[0, :, 3], new[0, :, 0].bfloat16())


def test_append_counts_as_a_change():
    arguments, _ = DecodeCase(lengths=(5, 6), num_new=1).inputs()
    versions = [arguments[name]._version for name in ("key_cache", "value_cache")]
    ta.attention_decode(**arguments)
    assert all(arguments[name]._version > before for name, before in zip(("key_cache", "value_cache"), versions, strict=True))


def base(**changes) -> dict[str, object]:
    cache = torch.randn(2, 2, 9, 8)
    return {
        "query": torch.randn(2, 4, 1, 8),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "cache_seqlens": torch.tensor([3, 4]),
    } | changes


def paged(**changes) -> dict[str, object]:
    return base(page_table=torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)) | changes


new = {"new_key": torch.randn(2, 2, 2, 8), "new_value": torch.randn(2, 2, 2, 8)}
ON_CPU = [
    (base(cache_seqlens=torch.tensor([3, 10])), "cache_seqlens", "10"),
    (base(cache_seqlens=torch.tensor([-1, 3])), "cache_seqlens", "-1"),
    (base(cache_seqlens=torch.tensor([3, 8]), **new), "cache_seqlens", "8"),
    (paged(cache_seqlens=torch.tensor([3, 19])), "cache_seqlens", "19"),
    (paged(page_table=torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)), "page_table", r"got 2 at \(1, 0\)"),
    (paged(page_table=torch.tensor([[0, 1], [-1, 0]], dtype=torch.int32)), "page_table", "-1"),
    (paged(page_table=torch.tensor([[0, 5], [1, 0]], dtype=torch.int32), cache_seqlens=torch.tensor([9, 3]), **new), "page_table", "5"),
]
EVERYWHERE = [
    (base(query=torch.randn(4, 1, 8)), "query", r"\(4, 1, 8\)"),
    (base(query=[1.0]), "query", "list"),
    (base(query=torch.randn(2, 4, 1, 8).long()), "query", "int64"),
    (base(query=torch.randn(2, 3, 1, 8)), "num_heads", "3"),
    (base(query=torch.randn(2, 4, 1, 7)), "head_dim", "7"),
    (base(query=torch.randn(3, 4, 1, 8)), "key_cache", r"\(3\)"),
    (base(key_cache=torch.randn(2, 2, 9, 8).bfloat16()), "key_cache", "bfloat16"),
    (base(value_cache=torch.randn(2, 2, 8, 8)), "value_cache", r"\(2, 2, 8, 8\)"),
    (base(key_cache=torch.randn(2, 2, 9)), "key_cache", r"\(2, 2, 9\)"),
    (base(cache_seqlens=torch.tensor([3.0, 4.0])), "cache_seqlens", "float32"),
    (base(cache_seqlens=torch.tensor([3])), "cache_seqlens", r"\(1,\)"),
    (base(cache_seqlens=3), "cache_seqlens", "int"),
    (paged(page_table=torch.tensor([[0, 1], [1, 0]])), "page_table", "int64"),
    (paged(page_table=torch.tensor([0, 1], dtype=torch.int32)), "page_table", r"\(2,\)"),
    (base(new_key=torch.randn(2, 2, 1, 8)), "new_value", "NoneType"),
    (base(new_value=torch.randn(2, 2, 1, 8)), "new_key", "NoneType"),
    (base(new_key=torch.randn(2, 1, 1, 8), new_value=torch.randn(2, 2, 1, 8)), "new_key", r"\(2, 1, 1, 8\)"),
    (base(new_key=torch.randn(2, 2, 1, 8), new_value=torch.randn(2, 2, 2, 8)), "new_value", r"\(2, 2, 2, 8\)"),
    (base(new_key=torch.randn(2, 2, 1, 8).half(), new_value=torch.randn(2, 2, 1, 8)), "new_value|key_cache", "float"),
    (base(mask=torch.ones(1, 9, dtype=torch.bool)), "mask", "Tensor"),
    (base(mask=ta.Causal() & torch.ones(1, 9, dtype=torch.bool)), "mask", "dense"),
    (base(scale=math.inf), "scale", "inf"),
    (base(softcap=-1.0), "softcap", "-1"),
    (base(alibi_slopes=torch.ones(3)), "alibi_slopes", r"\(3,\)"),
    (base(sinks=torch.ones(4, dtype=torch.int64)), "sinks", "int64"),
    (base(query=torch.randn(2, 4, 1, 8, requires_grad=True)), "query", "inference"),
    (base(key_cache=torch.randn(2, 2, 9, 8, requires_grad=True)), "key_cache", "inference"),
    (base(sinks=torch.randn(4, requires_grad=True)), "sinks", "inference"),
    (base(key_cache=torch.randn(1, 2, 9, 8).expand(2, 2, 9, 8), **new), "key_cache", "element by itself"),
]


@pytest.mark.parametrize("arguments, name, got", ON_CPU + EVERYWHERE)
def test_errors_name_the_argument(arguments, name, got):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        ta.attention_decode(**arguments)
    assert re.search(name, str(raised.value)) and re.search(got, str(raised.value)), str(raised.value)


def test_gradients_are_not_asked_for_under_no_grad():
    with torch.no_grad():
        ta.attention_decode(**base(query=torch.randn(2, 4, 1, 8, requires_grad=True)))


def test_transforms_are_refused():
    arguments = base()
    query = arguments.pop("query")
    with pytest.raises(RuntimeError, match="inference"):
        torch.func.vmap(lambda q: ta.attention_decode(q, **arguments))(query[None])
    with pytest.raises(RuntimeError, match="inference"):
        torch.func.jvp(lambda q: ta.attention_decode(q, **arguments), (query,), (query,))


def test_pages_that_no_visible_key_needs_may_hold_anything():
    arguments = base(cache_seqlens=torch.tensor([18, 18]), page_table=torch.tensor([[-1, 1], [99, 0]], dtype=torch.int32))
    out = ta.attention_decode(**arguments, mask=ta.SlidingWindow(4, 0))
    for b, page in enumerate((1, 0)):
        key, value = arguments["key_cache"][page, :, 4:], arguments["value_cache"][page, :, 4:]
        torch.testing.assert_close(out[b].double(), exact(arguments["query"][b], key, value), atol=1e-5, rtol=1e-5)
