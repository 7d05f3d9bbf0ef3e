"""Rotary positions inside the kernels: against the rows turned first, and against float64."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import cases
import tiled_attention as ta
from checks import on_dot_path, run, same_bits
from oracle import Expected, attention_and_gradients, expected
from tiled_attention.library import ops
from tiled_attention.rotate import rotate
from tiled_attention.testing import DTYPES, Case, Inputs, assert_accurate, error, real_dtype

F32, F64, BF16, F16 = DTYPES
PAIRINGS = pytest.mark.parametrize("interleaved", (False, True))
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
COVER = dict(mask=cases.STREAMING, softcap=2.0, alibi=True, sinks=True, dropout_p=0.25)
GROUPED = Case(num_heads=6, num_heads_kv=2)
STRIDED = Case(seqlen_q=70, head_dim=66, layout="strided", mask="SlidingWindow(9, 3)")
LENGTHS_OF_ITEMS = Case(seqlen_q=7, seqlen_kv=90, mask="KeyLengths((50, 21))")
# With options of RotaryEmbedding other than those of the case: whole vectors and ragged ones, few queries, many, all options of the scores.
CASES: list[tuple[Case, dict[str, Any]]] = [
    *((Case(num_heads=4, num_heads_kv=2, seqlen_q=5, seqlen_kv=11, mask="Causal()", dtype=dtype), {}) for dtype in DTYPES),
    *((Case(batch=(1,), seqlen_q=130, seqlen_kv=67, head_dim=64, mask="Causal()", dtype=dtype), {"scaling": YARN}) for dtype in DTYPES),
    *((GROUPED.replace(seqlen_q=33, seqlen_kv=70, head_dim=40, dtype=dtype, **COVER), {"rotary_dim": 20}) for dtype in DTYPES),
    *((STRIDED.replace(dtype=dtype), {"rotary_dim": 34}) for dtype in (F32, BF16)),
    *((Case(seqlen_q=9, seqlen_kv=40, query_offset=(3, -2), dtype=dtype, bias=(9, 40)), {"scaling": DYNAMIC}) for dtype in (F64, F16)),
    *((Case(num_heads=4, num_heads_kv=1, seqlen_q=2, seqlen_kv=600, head_dim=16, dtype=dtype), {}) for dtype in DTYPES),
    *((LENGTHS_OF_ITEMS.replace(hidden=hidden, dtype=dtype), {}) for hidden, dtype in ((cases.NAN, F32), (cases.INF, BF16))),
    (Case(batch=(1,), num_heads=1, seqlen_q=3, seqlen_kv=2100, head_dim=6), {"rotary_dim": 2}),
    (Case(batch=(2, 3), seqlen_q=13, layout="heads_last", mask="Bool(2, 1, 1, 13, 13)", head_dim_v=5), {}),
    (Case(batch=(), seqlen_q=17, layout="dim_first", scale=-0.4), {}),
]


def rotary_of(case: Case, options: dict[str, Any], interleaved: bool) -> ta.RotaryEmbedding:
    return ta.RotaryEmbedding(case.head_dim, 100.0, interleaved, **options)


def positions_of(x: Inputs) -> tuple[Tensor, Tensor]:
    """(..., seqlen_q) and (seqlen_kv,)."""
    rows = x.position[..., 0]
    return rows if rows.dim() == 1 else rows[..., 0, :], torch.arange(x.key.shape[-2])


def tables_of(rotary: ta.RotaryEmbedding, x: Inputs, dtype: torch.dtype) -> list[Tensor]:
    places = positions_of(x)
    length = max(int(place.max()) for place in places) + 1
    return [torch.cat(rotary.tables(place[..., None, :], length=length, dtype=dtype), -1) for place in places]


def fused(case: Case, x: Inputs, want: Expected, rotary: ta.RotaryEmbedding) -> dict[str, Tensor]:
    """out, lse and all gradients."""
    x = x.clone().requires_grad_()
    torch.manual_seed(case.seed)
    out, lse = ta.attention(**x.arguments(), rotary=rotary, return_lse=True)
    leaves = x.leaves()
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), [want.grad_out, want.grad_lse])
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}


@PAIRINGS
@pytest.mark.parametrize("case, options", CASES, ids=lambda x: x.id if isinstance(x, Case) else "")
def test_is_attention_of_turned_rows(case: Case, options: dict[str, Any], interleaved: bool, isa: str, poisoned: None) -> None:
    """The bits of `rotate` and then attention; gradients by query and key, which 16 bit rounds once less, within their limits."""
    rotary, x, want = rotary_of(case, options, interleaved), case.inputs(), expected(case)
    tables, real = tables_of(rotary, x, real_dtype(case.dtype)), real_dtype(case.dtype)
    by_hand = x.clone(query=rotate(x.query, tables[0], interleaved), key=rotate(x.key, tables[1], interleaved))
    turned = run(case, by_hand, want.grad_out, want.grad_lse)
    got = fused(case, x, want, rotary)
    for name, tensor in turned.items():
        if name in ("query", "key"):
            tensor = rotate(tensor, tables[name == "key"], interleaved, True)
            if real != case.dtype:
                continue
        assert same_bits(got[name], tensor), f"{name}: not that of the rows turned first"

    exact_tables = tables_of(rotary, x, F64)

    def back(results: dict[str, Tensor], tables: list[Tensor]) -> dict[str, Tensor]:
        pairs = zip(("query", "key"), tables, strict=True)
        return results | {name: rotate(results[name], table.to(results[name].dtype), interleaved, True) for name, table in pairs}

    if case.hidden is None:
        exact = back(attention_and_gradients(by_hand, want.grad_out, want.grad_lse, want.kept), exact_tables)
        plain = [attention_and_gradients(by_hand, want.grad_out, want.grad_lse, want.kept, F32, order) for order in (0, 7)]
        own = {name: max(error(back(result, exact_tables)[name], tensor) for result in plain) for name, tensor in exact.items()}
        limits = Expected(case, exact, own, {}, want.stored, want.grad_out, want.grad_lse, want.kept)
        for name, tensor in exact.items():
            assert_accurate(got[name], tensor, limits.limit(name, on_dot_path(case.dtype)), name)
    else:
        assert all(tensor.isfinite().all() for tensor in got.values())
        assert got["key"].equal(torch.where(got["value"] == 0, 0.0, got["key"]))

    torch.manual_seed(case.seed)
    arguments = x.arguments()
    del arguments["value"]
    rows = torch.tensor([case.seqlen_q - 1, 0])
    weights = ta.attention_weights(**arguments, rotary=rotary, rows=rows)
    torch.manual_seed(case.seed)
    assert same_bits(weights, ta.attention_weights(**arguments | {"query": by_hand.query, "key": by_hand.key}, rows=rows))


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_no_turned_rows_in_memory() -> None:
    query, key, value = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    with Seen() as seen:
        ta.attention(query, key, value, rotary=ta.RotaryEmbedding(8)).sum().backward()
        tensors, offsets = packed(F32)
        ta.attention_varlen(*tensors, *offsets, 70, 67, rotary=ta.RotaryEmbedding(8)).sum().backward()
    assert {"tiled_attention::attention_bwd", "tiled_attention::attention_varlen_bwd"} <= seen.names
    assert "tiled_attention::rotate" not in seen.names


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_bits(dtype: torch.dtype, isa: str) -> None:
    for case in (
        Case(batch=(1,), num_heads=1, seqlen_q=300, head_dim=16, mask="Causal()", dtype=dtype),
        Case(num_heads=4, num_heads_kv=2, seqlen_q=97, seqlen_kv=130, dtype=dtype),
        Case(batch=(1,), num_heads=1, seqlen_q=2, seqlen_kv=4500, dtype=dtype),
    ):
        x, want, rotary = case.inputs(), expected(case), rotary_of(case, {}, False)
        torch.set_num_threads(1)
        one = fused(case, x, want, rotary)
        for count in (2, 3, 7):
            torch.set_num_threads(count)
            assert all(same_bits(tensor, one[name]) for name, tensor in fused(case, x, want, rotary).items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone(dtype: torch.dtype, isa: str) -> None:
    rotary = ta.RotaryEmbedding(8)
    query, key, value = (torch.randn(2, 2, 150, 8).to(dtype) for _ in range(3))
    whole, lse = ta.attention(query, key, value, mask=ta.Causal(), rotary=rotary, return_lse=True)
    for row in (0, 64, 149):
        alone = ta.attention(
            query[1:, :, row : row + 1], key[1:], value[1:], mask=ta.Causal(), rotary=rotary, query_offset=row, return_lse=True
        )
        assert torch.equal(alone[0], whole[1:, :, row : row + 1]) and torch.equal(alone[1], lse[1:, :, row : row + 1])


def test_derivatives_of_weights() -> None:
    rotary = ta.RotaryEmbedding(4, interleaved=True, rotary_dim=2)
    query, key = (torch.randn(1, 1, n, 4, dtype=F64, requires_grad=True) for n in (3, 3))
    for rows in (None, torch.tensor([2, 0])):
        call = lambda q, k, rows=rows: ta.attention_weights(q, k, rotary=rotary, mask=ta.Causal(), rows=rows)
        assert gradcheck(call, (query, key), check_forward_ad=True) and gradgradcheck(call, (query, key))


def test_higher_derivatives() -> None:
    rotary = ta.RotaryEmbedding(4, rotary_dim=2)
    leaves = [torch.randn(1, heads, n, 4, dtype=F64, requires_grad=True) for heads, n in ((2, 2), (1, 3), (1, 3))]
    run = lambda *x: ta.attention(*x, rotary=rotary, query_offset=torch.tensor([1]), return_lse=True)
    assert gradcheck(run, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(run, leaves, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_vmap() -> None:
    rotary = ta.RotaryEmbedding(8)
    query, key, value = torch.randn(3, 2, 4, 5, 8), torch.randn(3, 2, 2, 9, 8), torch.randn(3, 2, 2, 9, 8)
    offsets = torch.tensor([[0, 4], [-1, 7], [2, 2]])
    call = lambda q, k, v, offset: ta.attention(q, k, v, rotary=rotary, mask=ta.Causal(), query_offset=offset)
    loss = lambda *args: call(*args).square().sum()
    each = list(zip(query, key, value, offsets))
    assert torch.equal(torch.func.vmap(call)(query, key, value, offsets), torch.stack([call(*args) for args in each]))
    got = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(query, key, value, offsets)
    want = [torch.func.grad(loss, (0, 1, 2))(*args) for args in each]
    assert all(torch.equal(a, torch.stack(b)) for a, b in zip(got, zip(*want)))
    weights = lambda q, k, offset: ta.attention_weights(q, k, rotary=rotary, query_offset=offset)
    got = torch.func.vmap(weights, (0, None, 0))(query, key[0], offsets)
    assert torch.equal(got, torch.stack([weights(q, key[0], offset) for q, offset in zip(query, offsets)]))


@pytest.mark.parametrize("mask", [ta.Strided(3), ta.Causal() & (ta.Strided(4) | ta.SlidingWindow(5, 0)), ta.Dilated(4, 3)], ids=repr)
def test_patterns_by_residue(mask: ta.masks.Mask) -> None:
    rotary = ta.RotaryEmbedding(8)
    query, key, value = (torch.randn(1, heads, 150, 8, dtype=F64, requires_grad=True) for heads in (4, 2, 2))
    results = []
    for given in (mask, mask.dense(150, 150)):
        out, lse = ta.attention(query, key, value, mask=given, rotary=rotary, return_lse=True)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (query, key, value))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-11)


def test_compiles_with_its_gradient() -> None:
    rotary = ta.RotaryEmbedding(8, interleaved=True, rotary_dim=6)

    def call(query: Tensor, key: Tensor, value: Tensor, offset: Tensor) -> Tensor:
        out = ta.attention(query, key, value, rotary=rotary, mask=ta.Causal(), query_offset=offset)
        return out.square().sum() + ta.attention_weights(query, key, rotary=rotary).square().sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for n in (5, 7):
        leaves = [torch.randn(2, heads, n, 8, requires_grad=True) for heads in (4, 2, 2)]
        offset = torch.tensor([0, 3])
        got, want = (torch.autograd.grad(function(*leaves, offset), leaves) for function in (compiled, call))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_tables_are_constants() -> None:
    x, table = torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(3, 4)
    more = (0.5, 0.0, 0.0, [], [], False, False)
    for tables in ((table.clone().requires_grad_(), table), (table, table.clone().requires_grad_())):
        with pytest.raises(ValueError, match="(query|key)_table must not require grad"):
            ops.attention(x, x, x, *(None,) * 11, *tables, *more, False)
        with pytest.raises(ValueError, match="(query|key)_table must not require grad"):
            ops.attention_weights(x, x, *(None,) * 10, *tables, *more, torch.zeros(1, 2, 3), None, False)
        with pytest.raises(ValueError, match="(query|key)_table must not require grad"):
            ops.attention_varlen(ROWS, ROWS, ROWS, OFFSETS, OFFSETS, *(None,) * 6, *tables, 3, 3, *more[:-1], False)


# Packed sequences

LENGTHS = ([3, 0, 70, 5, 1], [3, 4, 67, 9, 0])


def packed(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """(query, key, value) and their offsets."""
    totals = [sum(lengths) for lengths in LENGTHS]
    shapes = ((totals[0], 4, 8), (totals[1], 2, 8), (totals[1], 2, 6))
    offsets = [torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32) for lengths in LENGTHS]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes], offsets


@PAIRINGS
@pytest.mark.parametrize("scaling", (None, YARN), ids=("plain", "yarn"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences_have_the_bits_that_they_have_alone(dtype: torch.dtype, scaling: Any, interleaved: bool) -> None:
    rotary = ta.RotaryEmbedding(8, interleaved=interleaved, scaling=scaling, rotary_dim=6)
    tensors, offsets = packed(dtype)
    options = dict(mask=ta.Causal(), rotary=rotary, return_lse=True)
    out, lse = ta.attention_varlen(*tensors, *offsets, 70, 67, **options)
    gradients = torch.autograd.grad(out.float().square().sum() + lse.nan_to_num(neginf=0).sum(), tensors)
    for b in range(len(LENGTHS[0])):
        rows, keys = (slice(int(at[b]), int(at[b + 1])) for at in offsets)
        alone = [x[part].detach().transpose(0, 1).requires_grad_() for x, part in zip(tensors, (rows, keys, keys))]
        want, want_lse = ta.attention(*alone, **options)
        assert torch.equal(out[rows].transpose(0, 1), want) and torch.equal(lse[:, rows], want_lse)
        grads = torch.autograd.grad(want.float().square().sum() + want_lse.nan_to_num(neginf=0).sum(), alone)
        for got, part, grad in zip(gradients, (rows, keys, keys), grads):
            assert torch.equal(got[part].transpose(0, 1), grad)


def test_packed_sequences_of_one_length_for_dynamic_scaling() -> None:
    rotary = ta.RotaryEmbedding(8, scaling=DYNAMIC)
    query = torch.randn(40, 2, 8, dtype=F64)
    offsets = torch.tensor([0, 20, 40])
    got = ta.attention_varlen(query, query, query, offsets, offsets, 20, 20, rotary=rotary)
    batched = query.view(2, 20, 2, 8).transpose(1, 2)
    torch.testing.assert_close(got.view(2, 20, 2, 8).transpose(1, 2), ta.attention(batched, batched, batched, rotary=rotary))


def test_packed_derivatives_and_compile() -> None:
    rotary = ta.RotaryEmbedding(4)
    offsets = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 4])
    leaves = [torch.randn(n, heads, 4, dtype=F64, requires_grad=True) for n, heads in ((5, 2), (4, 1), (4, 1))]
    call = lambda *x: ta.attention_varlen(*x, *offsets, 3, 3, rotary=rotary)
    assert gradcheck(call, leaves, check_forward_ad=True) and gradgradcheck(call, leaves)
    compiled = torch.compile(lambda *x: call(*x).square().sum(), fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(function(*leaves), leaves) for function in (compiled, lambda *x: call(*x).square().sum()))
    torch.testing.assert_close(got, want)
    nothing = [x[:0].detach() for x in leaves]
    none = torch.zeros(1, dtype=torch.int64)
    assert ta.attention_varlen(*nothing, none, none, 0, 0, rotary=rotary).shape == (0, 2, 4)


# Caches


@PAIRINGS
@pytest.mark.parametrize("page_size", (None, 4), ids=("contiguous", "pages"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoding_gives_what_the_whole_gives(dtype: torch.dtype, page_size: Any, interleaved: bool) -> None:
    """A prompt, then blocks of 1 and 3 tokens, beside attention over everything so far."""
    rotary = ta.RotaryEmbedding(8, interleaved=interleaved, scaling=YARN, rotary_dim=6)
    query, key, value = (torch.randn(2, heads, 15, 8).to(dtype) for heads in (4, 2, 2))
    cache = ta.KVCache(2, 2, 16, 8, dtype=dtype, page_size=page_size)
    cache.append(key[:, :, :6], value[:, :, :6], rotary=rotary)
    whole = ta.attention(query, key, value, mask=ta.Causal(), rotary=rotary)
    tolerance = {F64: 1e-12, F32: 1e-5}.get(dtype, 4 * torch.finfo(dtype).eps)
    at = 6
    for count in (1, 3, 1, 3, 1):
        part = slice(at, at + count)
        got = cache.attend(query[:, :, part], key[:, :, part], value[:, :, part], rotary=rotary)
        torch.testing.assert_close(got, whole[:, :, part], rtol=tolerance, atol=tolerance)
        at += count
    again = cache.attend(query[:, :, 14:], rotary=rotary)
    torch.testing.assert_close(again, whole[:, :, 14:], rtol=tolerance, atol=tolerance)
    stored = cache.keys if page_size is None else cache.keys[cache.page_table.long()].transpose(1, 2).flatten(2, 3)
    torch.testing.assert_close(stored[:, :, :15], rotary(key, key)[1], rtol=tolerance, atol=tolerance)


def test_decoding_at_the_length_of_each_item() -> None:
    rotary = ta.RotaryEmbedding(8)
    lengths = torch.tensor([0, 5, 11], dtype=torch.int32)
    query, key, value = (torch.randn(3, 2, 14, 8, dtype=F64) for _ in range(3))
    caches = [torch.zeros(3, 2, 16, 8, dtype=F64) for _ in range(2)]
    turned = rotary(key, key)[0]
    for b, length in enumerate(lengths.tolist()):
        caches[0][b, :, :length], caches[1][b, :, :length] = turned[b, :, :length], value[b, :, :length]
    take = lambda x: torch.stack([x[b, :, length : length + 2] for b, length in enumerate(lengths.tolist())])
    got = ta.attention_decode(
        take(query), *caches, cache_seqlens=lengths, new_key=take(key), new_value=take(value), mask=ta.Causal(), rotary=rotary
    )
    for b, length in enumerate(lengths.tolist()):
        end = length + 2
        want = ta.attention(query[b, :, length:end], key[b, :, :end], value[b, :, :end], mask=ta.Causal(), rotary=rotary)
        torch.testing.assert_close(got[b], want)
    assert lengths.tolist() == [0, 5, 11]


def test_a_ring_turns_at_absolute_positions() -> None:
    rotary = ta.RotaryEmbedding(8)
    query, key, value = (torch.randn(1, 2, 40, 8, dtype=F64) for _ in range(3))
    cache = ta.KVCache(1, 2, 8, 8, dtype=F64, window=5)
    mask = ta.Causal() & ta.SlidingWindow(4, 0)
    whole = ta.attention(query, key, value, mask=mask, rotary=rotary)
    for t in range(40):
        part = slice(t, t + 1)
        got = cache.attend(query[:, :, part], key[:, :, part], value[:, :, part], rotary=rotary)
        torch.testing.assert_close(got, whole[:, :, part])


def test_decoding_compiles() -> None:
    rotary = ta.RotaryEmbedding(8)
    query, key, value = (torch.randn(2, 2, 1, 8) for _ in range(3))

    def step(cache_key: Tensor, cache_value: Tensor, lengths: Tensor) -> Tensor:
        return ta.attention_decode(query, cache_key, cache_value, cache_seqlens=lengths, new_key=key, new_value=value, rotary=rotary)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    lengths = torch.tensor([2, 0])
    results = []
    for function in (step, compiled):
        caches = [torch.linspace(-1, 1, 2 * 2 * 4 * 8).view(2, 2, 4, 8) for _ in range(2)]
        results.append((function(*caches, lengths), *caches))
    torch.testing.assert_close(results[0], results[1])


X, OFFSETS = torch.zeros(1, 2, 3, 8), torch.tensor([0, 3])
ROWS = torch.zeros(3, 2, 8)


def decode(**change: Any) -> Tensor:
    query = change.pop("query", X)
    return ta.attention_decode(query, X, X, **{"cache_seqlens": torch.tensor([3]), "rotary": ta.RotaryEmbedding(8), **change})


TABLES = torch.zeros(3, 4), torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ((TABLES[0], None), "query_table and key_table must be given together, got only query_table"),
        ((TABLES[0][:2], TABLES[1]), r"query_table must have shape \(3, rotary_dim\), got \(2, 4\)"),
        ((TABLES[0], TABLES[1][None]), r"key_table must have shape \(3, rotary_dim\), got \(1, 3, 4\)"),
        ((TABLES[0].double(), TABLES[1]), "query_table must be float32, got float64"),
        ((TABLES[0][:, :3], TABLES[1]), "query_table must have an even number of columns"),
        ((TABLES[0], TABLES[1][:, :2]), r"key_table must have the columns of query_table \(4\), got \(3, 2\)"),
    ],
)
def test_tables_of_packed_rows(tables: Any, named: str) -> None:
    for device in ("cpu", "meta"):
        x, offsets, *tables = (None if tensor is None else tensor.to(device) for tensor in (ROWS, OFFSETS, *tables))
        with pytest.raises((ValueError, TypeError, RuntimeError), match=named):
            ops.attention_varlen_fwd(x, x, x, offsets, offsets, *(None,) * 6, *tables, 3, 3, 0.5, 0.0, 0.0, [], [], False, False)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: decode(rotary=10000.0), "rotary must be a RotaryEmbedding, got float"),
        (lambda: decode(rotary=ta.RotaryEmbedding(6)), "query.*6.*rotary"),
        (lambda: decode(rotary=ta.RotaryEmbedding(8, scaling=DYNAMIC)), "rotary must have the same frequencies.*dynamic"),
        (lambda: decode(new_key=X[..., :4], new_value=X), "new_key.*8.*rotary"),
        (lambda: decode(new_key=None, new_value=X), "new_key must be a tensor"),
        (lambda: decode(new_key=3, new_value=X), "new_key must be"),
        (lambda: decode(cache_seqlens=torch.tensor([3.0])), "cache_seqlens must be int32 or int64"),
        (lambda: decode(cache_seqlens=torch.tensor([3, 3])), "cache_seqlens must have shape"),
        (lambda: ta.KVCache(1, 2, 4, 8).append(X, X, rotary=3), "rotary must be a RotaryEmbedding"),
        (lambda: ta.attention_varlen(ROWS, ROWS, ROWS, OFFSETS, OFFSETS, 3, 3, rotary=1), "rotary must be a RotaryEmbedding, got int"),
        (lambda: ta.attention_varlen(ROWS, ROWS, ROWS, OFFSETS, OFFSETS, 3, 3, rotary=ta.RotaryEmbedding(6)), "query.*6.*rotary"),
        (
            lambda: ta.attention_varlen(ROWS, ROWS, ROWS, OFFSETS, OFFSETS[:1], 3, 3, rotary=ta.RotaryEmbedding(8)),
            "cu_seqlens_kv must have shape",
        ),
    ],
)
def test_errors_name_the_argument(call: Any, named: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=named):
        call()
