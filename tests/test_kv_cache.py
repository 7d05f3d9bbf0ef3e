"""`ta.KVCache`: appending, pages, rings and beams against attention over all keys there ever were; torch.compile, opcheck, FLOP counts."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tiled_attention as ta
from oracle import exact
from tiled_attention.testing import DTYPES

BATCH, HEADS, HEADS_KV, DIM = 2, 6, 2, 16


class Everything:
    """All keys and values so far, (batch, num_heads_kv, length, head_dim)."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.key = self.value = torch.empty(BATCH, HEADS_KV, 0, DIM, dtype=dtype)

    def tokens(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """A query, key and value of n new tokens."""
        query, key, value = (torch.randn(BATCH, heads, n, DIM).to(self.key.dtype) for heads in (HEADS, HEADS_KV, HEADS_KV))
        self.key, self.value = torch.cat([self.key, key], -2), torch.cat([self.value, value], -2)
        return query, key, value

    def expected(self, query: Tensor, window: int | None = None, num_sinks: int = 0, slopes: Tensor | None = None) -> Tensor:
        length, n = self.key.shape[-2], query.shape[-2]
        p, j = torch.arange(length - n, length)[:, None], torch.arange(length)
        visible = j <= p
        if window is not None:
            visible &= (j > p - window) | (j < num_sinks)
        return exact(query, self.key, self.value, visible, alibi_slopes=slopes)


def close(actual: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [None, 1, 5, 16])
def test_tokens_one_after_the_other(page_size, dtype, poisoned):
    cache, past = ta.KVCache(BATCH, HEADS_KV, 64, DIM, dtype=dtype, page_size=page_size), Everything(dtype)
    slopes = torch.rand(HEADS)
    tolerance = 1e-5 if dtype.itemsize > 2 else 3e-2
    for n in (7, 1, 1, 3, 1, 20, 1, 2, 1):
        query, key, value = past.tokens(n)
        close(cache.attend(query, key, value, alibi_slopes=slopes), past.expected(query, slopes=slopes), tolerance)
    assert cache.seqlens.tolist() == [37, 37]


@pytest.mark.parametrize("page_size", [None, 1, 5])
@pytest.mark.parametrize("capacity, window, num_sinks", [(12, 12, 0), (12, 9, 0), (12, 7, 3), (37, 20, 5), (30, 1, 0)])
def test_rings(capacity, window, num_sinks, page_size, isa, poisoned):
    cache = ta.KVCache(BATCH, HEADS_KV, capacity, DIM, page_size=page_size, window=window, num_sinks=num_sinks)
    past, slopes = Everything(), torch.rand(HEADS)
    memory = cache.keys.data_ptr()
    room = capacity - num_sinks - window + 1
    for step in range(3 * capacity):
        query, key, value = past.tokens(1 + step % min(room, 3))
        out = cache.attend(query, key, value, alibi_slopes=slopes)
        close(out, past.expected(query, window, num_sinks, slopes))
    assert cache.keys.data_ptr() == memory


@pytest.mark.parametrize("n", [3, 12, 13, 40])
def test_a_prompt_longer_than_the_ring_leaves_its_end(n, poisoned):
    cache, past = ta.KVCache(BATCH, HEADS_KV, 12, DIM, window=9, num_sinks=2), Everything()
    _, key, value = past.tokens(n)
    cache.append(key, value)
    for _ in range(4):
        query, key, value = past.tokens(1)
        close(cache.attend(query, key, value), past.expected(query, 9, 2))


def test_a_mask_is_combined_with_the_window():
    cache, past = ta.KVCache(BATCH, HEADS_KV, 20, DIM, window=12), Everything()
    for _ in range(50):
        query, key, value = past.tokens(1)
        out = cache.attend(query, key, value, mask=ta.SlidingWindow(4, 0))
        close(out, past.expected(query, 5))
        close(cache.attend(query, mask=None), past.expected(query, 12))


def test_a_cache_is_what_attention_decode_takes():
    cache, past = ta.KVCache(BATCH, HEADS_KV, 50, DIM, page_size=8), Everything()
    query, key, value = past.tokens(5)
    cache.append(key, value)
    options = {"cache_seqlens": cache.seqlens, "page_table": cache.page_table, "mask": ta.Causal(), "return_lse": True}
    for ours, theirs in zip(
        ta.attention_decode(query, cache.keys, cache.values, **options), cache.attend(query, return_lse=True), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_sinks_softcap_scale_and_lse():
    cache, past = ta.KVCache(BATCH, HEADS_KV, 50, DIM), Everything()
    query, key, value = past.tokens(3)
    sinks = torch.randn(HEADS)
    out, lse = cache.attend(query, key, value, scale=0.3, softcap=2.0, sinks=sinks, return_lse=True)
    want = ta.attention(query, key, value, mask=ta.Causal(), scale=0.3, softcap=2.0, sinks=sinks, return_lse=True)
    torch.testing.assert_close((out, lse), want)


@pytest.mark.parametrize("options", [{}, {"page_size": 3}, {"window": 6}, {"window": 6, "page_size": 4, "num_sinks": 1}], ids=str)
@pytest.mark.parametrize("index", [(1, 0), (1, 1), (0, 0)])
def test_beams(index, options, poisoned):
    cache, past = ta.KVCache(BATCH, HEADS_KV, 10, DIM, **options), Everything()
    for step in range(9):
        query, key, value = past.tokens(1)
        close(cache.attend(query, key, value), past.expected(query, options.get("window"), options.get("num_sinks", 0)))
        if step % 3 == 1:
            chosen = torch.tensor(index, dtype=torch.int32)
            cache.reorder(chosen)
            past.key, past.value = past.key[list(index)], past.value[list(index)]


def test_lengths_move_with_their_items():
    cache = ta.KVCache(3, 1, 8, 4)
    cache.seqlens.copy_(torch.tensor([1, 5, 2]))
    cache.reorder(torch.tensor([2, 2, 1]))
    assert cache.seqlens.tolist() == [2, 2, 5]
    cache.reset()
    assert cache.seqlens.tolist() == [0, 0, 0]


def test_value_size_dtype_and_name():
    cache = ta.KVCache(2, 3, 10, 8, 5, dtype=torch.float16, page_size=4)
    assert cache.keys.shape == (6, 3, 4, 8) and cache.values.shape == (6, 3, 4, 5) and cache.page_table.shape == (2, 3)
    assert cache.capacity == 12 and cache.keys.dtype == torch.float16 and cache.seqlens.dtype == torch.int32
    assert "capacity=12" in repr(cache) and "page_size=4" in repr(cache) and "window" not in repr(cache)
    out = cache.attend(torch.randn(2, 3, 2, 8).half(), torch.randn(2, 3, 2, 8).half(), torch.randn(2, 3, 2, 5).half())
    assert out.shape == (2, 3, 2, 5)


def tokens(n: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return Everything().tokens(n)


ERRORS = [
    (lambda: ta.KVCache(-1, 2, 8, 4), "batch", "-1"),
    (lambda: ta.KVCache(1, 2, 8.5, 4), "capacity", "8.5"),
    (lambda: ta.KVCache(1, 2, 8, 4, dtype=torch.int32), "dtype", "int32"),
    (lambda: ta.KVCache(1, 2, 8, 4, page_size=0), "page_size", "0"),
    (lambda: ta.KVCache(1, 2, 8, 4, window=0), "window", "0"),
    (lambda: ta.KVCache(1, 2, 8, 4, window=9), "window", "9"),
    (lambda: ta.KVCache(1, 2, 8, 4, window=7, num_sinks=2), "window", "7"),
    (lambda: ta.KVCache(1, 2, 8, 4, num_sinks=2), "num_sinks", "2"),
    (lambda: ta.KVCache(BATCH, HEADS_KV, 4, DIM).append(*tokens(5)[1:]), "cache_seqlens", "4 - 5"),
    (lambda: ta.KVCache(BATCH, HEADS_KV, 4, DIM).attend(*tokens(5)), "cache_seqlens", "4 - 5"),
    (lambda: ta.KVCache(BATCH, HEADS_KV, 8, DIM).attend([1.0]), "query", "list"),
    (lambda: ta.KVCache(BATCH, HEADS_KV, 8, DIM, window=6).attend(*tokens(4)), "query", "3 queries"),
    (lambda: ta.KVCache(BATCH, HEADS_KV, 8, DIM).append(tokens()[1], None), "new_value", "NoneType"),
    (lambda: ta.KVCache(3, HEADS_KV, 8, DIM).append(*tokens()[1:]), "key_cache|cache_seqlens", "3"),
    (lambda: ta.KVCache(BATCH, HEADS_KV, 8, DIM, dtype=torch.float64).attend(*tokens()), "key_cache", "float64"),
    (lambda: ta.KVCache(BATCH, HEADS_KV, 8, DIM).reorder(torch.tensor([0, 2])), "index", "2"),
    (lambda: ta.KVCache(BATCH, HEADS_KV, 8, DIM).reorder(torch.tensor([0])), "index", r"\(1,\)"),
    (lambda: ta.KVCache(BATCH, HEADS_KV, 8, DIM).reorder(torch.tensor([0.0, 1.0])), "index", "float32"),
    (lambda: ta.KVCache(BATCH, HEADS_KV, 8, DIM).append(tokens()[1].requires_grad_(), tokens()[2]), "new_key", "inference"),
]


@pytest.mark.parametrize("call, name, got", ERRORS)
def test_errors_name_the_argument(call, name, got):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=name) as raised:
        call()
    raised.match(got)


def test_a_refused_append_changes_nothing():
    cache = ta.KVCache(BATCH, HEADS_KV, 4, DIM)
    cache.keys.zero_()
    with pytest.raises(RuntimeError):
        cache.append(*tokens(5)[1:])
    assert cache.seqlens.tolist() == [0, 0] and (cache.keys == 0).all()


class TestCompile:
    @pytest.fixture(autouse=True)
    def _fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    @pytest.mark.parametrize("options", [{"page_size": 4}, {"window": 5, "num_sinks": 1}], ids=str)
    def test_a_decode_step(self, options, backend):
        caches = [ta.KVCache(BATCH, HEADS_KV, 12, DIM, **options) for _ in range(2)]
        slopes = torch.rand(HEADS)

        def step(cache, query, key, value):
            return cache.attend(query * 2, key, value * 0.5, alibi_slopes=slopes) + 1

        compiled = torch.compile(step, fullgraph=True, backend=backend)
        with torch.no_grad():
            for _ in range(10):
                token = tokens()
                torch.testing.assert_close(compiled(caches[0], *token), step(caches[1], *token))
        assert caches[0].seqlens.tolist() == caches[1].seqlens.tolist() == [10, 10]
        for ours, theirs in zip((caches[0].keys, caches[0].values), (caches[1].keys, caches[1].values), strict=True):
            live = ours == theirs
            assert live.float().mean() > 0.6  # what was never written may hold anything

    def test_mutation_inside_the_graph(self):
        def run(query, key_cache, value_cache, key, value, seqlens):
            key_cache = key_cache.clone()
            value_cache = value_cache.clone()
            out = ta.attention_decode(query, key_cache, value_cache, cache_seqlens=seqlens, new_key=key, new_value=value)
            return out, key_cache.sum(-1), value_cache

        arguments = (
            torch.randn(2, 4, 1, 8),
            *(torch.randn(2, 2, 9, 8) for _ in range(2)),
            *(torch.randn(2, 2, 1, 8) for _ in range(2)),
            torch.tensor([3, 8]),
        )
        compiled = torch.compile(run, fullgraph=True, backend="inductor")
        torch.testing.assert_close(compiled(*arguments), run(*arguments))

    def test_gradients_are_refused_when_traced(self):
        cache = ta.KVCache(BATCH, HEADS_KV, 8, DIM)
        with pytest.raises(Exception, match="inference"):
            torch.compile(lambda q: cache.attend(q), fullgraph=True, backend="eager")(torch.randn(BATCH, HEADS, 1, DIM, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("paged", [False, True])
def test_opcheck(paged, dtype):
    ops = torch.ops.tiled_attention
    cache = [torch.randn(4, 2, 8, 16).to(dtype) for _ in range(2)]
    query, key, value = torch.randn(4, 4, 2, 16).to(dtype), *(torch.randn(4, 2, 2, 16).to(dtype) for _ in range(2))
    seqlens, table = torch.tensor([0, 3, 6, 1], dtype=torch.int32), torch.tensor([[2], [0], [1], [3]], dtype=torch.int32) if paged else None
    none = (None,) * 4
    torch.library.opcheck(ops.attention_decode.default, (query, *cache, seqlens, table, *none, 0.25, 0.0, (), 0, -1))
    torch.library.opcheck(ops.cache_append_.default, (*cache, key, value, seqlens, table, -1))


def test_flops():
    cache = ta.KVCache(BATCH, HEADS_KV, 32, DIM)
    with FlopCounterMode(display=False) as counter:
        cache.attend(*tokens(2))
    assert counter.get_total_flops() == 2 * BATCH * HEADS * 2 * 32 * 2 * DIM


def test_an_item_may_be_shared_between_pages_and_threads():
    """Two items that share the pages of a prompt, as servers do: read only, so nothing is copied."""
    cache, past = ta.KVCache(BATCH, HEADS_KV, 16, DIM, page_size=4), Everything()
    _, key, value = past.tokens(4)
    key[1], value[1] = key[0], value[0]
    past.key[1], past.value[1] = past.key[0], past.value[0]
    cache.append(key, value)
    cache.page_table[1, 0] = cache.page_table[0, 0]
    for _ in range(3):
        query, key, value = past.tokens(1)
        close(cache.attend(query, key, value), past.expected(query))


def test_every_layout_of_new_keys():
    for order in itertools.permutations(range(4)):
        cache, past = ta.KVCache(BATCH, HEADS_KV, 8, DIM), Everything()
        query, key, value = past.tokens(2)
        back = [order.index(i) for i in range(4)]
        query, key, value = (x.permute(order).contiguous().permute(back) for x in (query, key, value))
        close(cache.attend(query, key, value), past.expected(query))
