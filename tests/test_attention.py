"""`ta.attention`: what the accuracy cases do not say. Layout of results, choice of gradients, patterns of inf and NaN, bits, memory."""

import itertools
import math
import mmap

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cases
import oracle
import tiled_attention as ta
from checks import check, gradients_of, on_dot_path, run
from tiled_attention.testing import DTYPES, LAYOUTS, Case, assert_accurate, lay_out, rounding

INF, NAN = math.inf, math.nan
FULL = Case(
    num_heads=4, num_heads_kv=2, seqlen_q=21, seqlen_kv=40, mask=cases.STREAMING, bias=(4, 21, 40), alibi=True, sinks=True, softcap=4.0
)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# Results: shape, dtype, memory order.


@pytest.mark.parametrize("layout", LAYOUTS)
@by_dtype
def test_out_and_gradients_are_dense_in_the_order_of_their_input(layout: str, dtype: torch.dtype):
    case = Case(batch=(2, 3), num_heads=4, num_heads_kv=2, seqlen_q=5, seqlen_kv=7, layout=layout, dtype=dtype)
    x = case.inputs().requires_grad_()
    out, lse = ta.attention(x.query, x.key, x.value, return_lse=True)
    assert out.dtype == dtype and out.stride() == torch.empty_like(x.query).stride()
    assert lse.is_contiguous() and lse.shape == (2, 3, 4, 5)
    grads = torch.autograd.grad(out.sum(), [x.query, x.key, x.value])
    for name, grad, tensor in zip(("query", "key", "value"), grads, (x.query, x.key, x.value), strict=True):
        assert grad.dtype == dtype and grad.stride() == torch.empty_like(tensor).stride(), name


def test_out_with_another_head_dim_keeps_the_order_of_query():
    query, key, value = torch.randn(2, 5, 3, 8).transpose(1, 2), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 12)
    for grad in (False, True):
        out = ta.attention(query.detach().requires_grad_(grad), key, value)
        assert out.shape == (2, 3, 5, 12) and out.transpose(1, 2).is_contiguous()
    out = ta.attention(query.contiguous().mT.contiguous().mT, key, value)
    assert out.mT.is_contiguous()


def test_merging_heads_again_is_a_view():
    x = torch.randn(2, 5, 3, 8)
    out = ta.attention(*[x.transpose(1, 2)] * 3)
    assert out.transpose(1, 2).view(2, 5, 24).data_ptr() == out.data_ptr()


def test_inputs_are_left_as_they_are():
    x = FULL.inputs()
    before = {name: tensor.clone() for name, tensor in x.leaves().items()}
    run(FULL, x, torch.randn(2, 4, 21, 8))
    assert all(torch.equal(tensor, before[name]) for name, tensor in x.leaves().items())


# Which gradients are asked for.

FIELDS = ("query", "key", "value", "bias", "alibi_slopes", "sinks")


@pytest.mark.parametrize("wanted", [c for n in (1, 2, 5) for c in itertools.combinations(FIELDS, n)], ids="-".join)
def test_a_gradient_is_the_same_whatever_else_is_asked_for(wanted: tuple[str, ...]):
    want = oracle.expected(FULL)
    x = FULL.inputs()
    leaves = [x.leaves()[name].requires_grad_() for name in wanted]
    out, lse = ta.attention(**x.arguments(), return_lse=True)
    grads = torch.autograd.grad([out, lse], leaves, [want.grad_out, want.grad_lse])
    for name, grad in zip(wanted, grads, strict=True):
        assert_accurate(grad, want.exact[name], want.limit(name, False), name)


@by_dtype
def test_gradients_through_out_alone_and_through_lse_alone(dtype: torch.dtype):
    case = FULL.replace(dtype=dtype)
    want = oracle.expected(case)
    x = case.inputs()
    for use_out, use_lse in ((True, False), (False, True)):
        x = x.clone().requires_grad_()
        out, lse = ta.attention(**x.arguments(), return_lse=True)
        leaves = x.leaves()
        if not use_out:
            leaves.pop("value")
        outputs, grads = ([out], [want.grad_out]) if use_out else ([lse], [want.grad_lse])
        got = torch.autograd.grad(outputs, list(leaves.values()), grads)
        exact = oracle.attention_and_gradients(x, want.grad_out * use_out, want.grad_lse * use_lse)
        plain = oracle.attention_and_gradients(x, want.grad_out * use_out, want.grad_lse * use_lse, dtype=torch.float32)
        for name, grad in zip(leaves, got, strict=True):
            own = (plain[name].double() - exact[name]).abs().max().item()
            limit = 3 * own + 4 * rounding(exact[name], dtype) if dtype != torch.float64 else 1e-12
            assert_accurate(grad, exact[name], limit, name)


def test_lse_alone_gives_value_no_gradient():
    x = Case().inputs().requires_grad_()
    _, lse = ta.attention(x.query, x.key, x.value, return_lse=True)
    (grad,) = torch.autograd.grad(lse.sum(), [x.value], allow_unused=True)
    assert grad is None or (grad == 0).all()


def test_non_contiguous_and_expanded_grad_out():
    x = Case(seqlen_q=21).inputs().requires_grad_()
    out = ta.attention(x.query, x.key, x.value)
    leaves = list(x.leaves().values())
    for grad_out in (
        torch.ones(()).expand(out.shape),
        torch.randn(out.shape).mT.contiguous().mT,
        lay_out(torch.randn(out.shape), "strided"),
    ):
        got = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        want = torch.autograd.grad(out, leaves, grad_out.contiguous(), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@by_dtype
def test_gradients_add_up_over_calls(dtype: torch.dtype):
    x = Case(dtype=dtype).inputs().requires_grad_()
    ta.attention(x.query, x.key, x.value).sum().backward()
    once = x.query.grad.clone()
    ta.attention(x.query, x.key, x.value).sum().backward()
    assert torch.equal(x.query.grad, 2 * once)


def test_query_key_and_value_may_be_one_tensor():
    x = torch.randn(1, 2, 33, 8, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(ta.attention(x, x, x, mask=ta.Causal()).square().sum(), x)
    lower = torch.ones(33, 33).tril().bool()
    (want,) = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x, attn_mask=lower).square().sum(), x)
    assert (got - want).abs().max() < 1e-12


# Patterns of inf and NaN.


POISON_MASKS = {"none": None, "causal": "Causal()", "window": "SlidingWindow(20, 0)", "bool": "Bool(2, 1, 70, 70)"}


@pytest.mark.parametrize("bad", (NAN, INF, -INF))
@pytest.mark.parametrize("mask", POISON_MASKS)
@pytest.mark.parametrize("place", ("query", "key", "value", "bias"))
@by_dtype
def test_visible_inf_and_nan_reach_what_sees_them_and_nothing_else(place: str, mask: str, bad: float, dtype: torch.dtype, isa: str):
    case = Case(num_heads=4, num_heads_kv=2, seqlen_q=70, mask=POISON_MASKS[mask], bias=(2, 4, 70, 70), dtype=dtype, seed=3)
    x = case.inputs()
    clean = run(case, x)
    getattr(x, place)[1, 1, 33, 3] = bad
    want_out, want_lse = oracle.attention(x)
    got = run(case, x)
    assert_accurate(got["out"], want_out, 1e-5 + 1.5 * rounding(want_out, dtype), "out")
    assert_accurate(got["lse"], want_lse, 1e-5 + 2.0**-9 * on_dot_path(dtype), "lse")
    sees = torch.zeros(2, 4, 70, dtype=torch.bool)
    if place in ("query", "bias"):
        sees[1, 1, 33] = True
    else:
        sees[1, 2:] = True if x.visible is None else x.visible.expand(case.score_shape)[1, 2:, :, 33]
    for name in ("out", "lse"):
        assert torch.equal(got[name][~sees], clean[name][~sees]), f"{name}: rows that do not see it differ from the call without it"


@pytest.mark.parametrize("bad", (NAN, INF, -INF))
@pytest.mark.parametrize("place", ("key", "value"))
@by_dtype
def test_gradients_of_what_does_not_see_a_bad_key_stay_finite(place: str, bad: float, dtype: torch.dtype, isa: str):
    case = Case(batch=(2,), num_heads=4, num_heads_kv=2, seqlen_q=70, mask="Causal()", dtype=dtype)
    x = case.inputs()
    grad_out = torch.randn(2, 4, 70, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    grad_out[:, :, 33:] = 0
    clean = run(case, x, grad_out)
    getattr(x, place)[1, 1, 33, 3] = bad
    got = run(case, x, grad_out)
    assert torch.equal(got["query"][:, :, :33], clean["query"][:, :, :33])
    for item, head in ((0, 0), (0, 1), (1, 0)):
        for name in ("key", "value"):
            assert torch.equal(got[name][item, head], clean[name][item, head])


@by_dtype
def test_softcap_makes_infinite_scores_finite(dtype: torch.dtype, isa: str):
    query, key, value = (torch.randn(1, 1, 20, 8, generator=torch.Generator().manual_seed(k)).abs().to(dtype) for k in range(3))
    key[..., 7, 2] = INF
    out, lse = ta.attention(query, key, value, softcap=3.0, return_lse=True)
    capped = 3.0 * torch.tanh(query.double() @ key.double().mT / 8**0.5 / 3.0)
    weights = torch.softmax(capped, -1)
    exact = weights @ value.double()
    assert lse.isfinite().all() and (out.double() - exact).abs().max() <= 1e-5 + 1.5 * rounding(exact, dtype)


@by_dtype
def test_a_sink_of_minus_infinity_is_no_sink(dtype: torch.dtype, isa: str):
    x = Case(dtype=dtype, seqlen_q=20).inputs().requires_grad_()
    sinks = torch.full((2,), -INF, dtype=x.query.dtype if dtype == torch.float64 else torch.float32, requires_grad=True)
    out, lse = ta.attention(x.query, x.key, x.value, sinks=sinks, return_lse=True)
    plain, plain_lse = ta.attention(x.query, x.key, x.value, return_lse=True)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    (grad,) = torch.autograd.grad(out.sum() + lse.sum(), sinks)
    assert (grad == 0).all()


@by_dtype
def test_a_large_sink_takes_all_weight(dtype: torch.dtype):
    real = torch.float64 if dtype == torch.float64 else torch.float32
    x = Case(dtype=dtype, seqlen_q=6).inputs()
    out, lse = ta.attention(x.query, x.key, x.value, sinks=torch.tensor([80.0, 1e4], dtype=real), return_lse=True)
    assert (lse[:, 1] == 1e4).all() and (out[:, 1] == 0).all() and (lse[:, 0] - 80).abs().max() < 1e-4


def test_rows_of_equal_finite_minima_are_uniform(isa: str):
    for dtype in DTYPES:
        value = torch.randn(1, 1, 70, 4).to(dtype)
        zero = torch.zeros(1, 1, 3, 4, dtype=dtype)
        bias = torch.full((3, 70), torch.finfo(torch.float32).min)
        out = ta.attention(zero, torch.zeros(1, 1, 70, 4, dtype=dtype), value, bias=bias)
        exact = value.double().mean(-2, keepdim=True).expand(out.shape)
        assert (out.double() - exact).abs().max() <= 1e-6 + 1.5 * rounding(exact, dtype)


# Large offsets and many rows.


def virtual(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor over memory that is reserved and not touched, so that its strides may be as large as one likes."""
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    reserved = mmap.mmap(-1, span * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    return torch.frombuffer(reserved, dtype=dtype).as_strided(shape, stride)


STEP = (1 << 30) + 7  # five rows reach beyond 2^32 elements


@pytest.mark.parametrize(
    "stride", ((0, 0, STEP, 1), (0, STEP, 5, 1), (STEP, 0, 5, 1), (0, 0, 5, STEP)), ids=("rows", "heads", "batch", "columns")
)
@pytest.mark.parametrize("place", ("query", "key", "value", "bias", "mask"))
def test_offsets_beyond_32_bits(place: str, stride: tuple[int, ...]):
    shape = tuple(5 if step == STEP else 1 if step == 0 else 5 for step in stride)
    dtype = {"mask": torch.bool, "bias": torch.bfloat16}.get(place, torch.float16)
    query, key, value = (torch.randn(shape).to(torch.float16) for _ in range(3))
    arguments = {"query": query, "key": key, "value": value, "bias": torch.randn(shape).bfloat16(), "mask": torch.rand(shape) < 0.7}
    want = ta.attention(**arguments)
    arguments[place] = virtual(shape, stride, dtype).copy_(arguments[place])
    assert torch.equal(ta.attention(**arguments), want)
    if place != "mask":
        arguments[place].requires_grad_()
        (grad,) = torch.autograd.grad(ta.attention(**arguments).sum(), arguments[place])
        assert grad.isfinite().all() and grad.any()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_seventy_thousand_rows(dtype: torch.dtype):
    n, left = 70000, 3
    query, key, value, grad_out = (torch.randn(1, 1, n, 8).to(dtype) for _ in range(4))
    leaves = [t.requires_grad_() for t in (query, key, value)]
    got = torch.autograd.grad(ta.attention(*leaves, mask=ta.SlidingWindow(left, 0)), leaves, grad_out)
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    near = lambda t: F.pad(t, (0, 0, left, 0)).unfold(-2, left + 1, 1)  # (1, 1, n, 8, left + 1)
    score = (exact_leaves[0][..., None] * near(exact_leaves[1])).sum(-2) / 8**0.5
    hidden = torch.arange(n)[:, None] - left + torch.arange(left + 1) < 0
    out = (near(exact_leaves[2]) * score.masked_fill(hidden, -INF).softmax(-1)[..., None, :]).sum(-1)
    want = torch.autograd.grad(out, exact_leaves, grad_out.double())
    for name, a, b in zip(("query", "key", "value"), got, want, strict=True):
        limit = 1e-5 if dtype == torch.float32 else (4 if on_dot_path(dtype) else 2) * rounding(b, dtype)
        assert_accurate(a, b, limit, name)


def test_many_batch_items_and_heads():
    x = Case(batch=(70000,), num_heads=1, seqlen_q=2, seqlen_kv=3, head_dim=4).inputs()
    got = run(Case(), x)
    assert torch.equal(got["out"][-3:], ta.attention(x.query[-3:], x.key[-3:], x.value[-3:]))
    x = Case(batch=(1,), num_heads=70000, seqlen_q=2, seqlen_kv=3, head_dim=4).inputs()
    got = run(Case(), x)
    assert torch.equal(got["out"][:, -3:], ta.attention(x.query[:, -3:], x.key[:, -3:], x.value[:, -3:]))


# The same row, the same bits.

STABLE = [
    Case(num_heads=4, num_heads_kv=2, seqlen_q=40, seqlen_kv=300, head_dim=32, dtype=dtype, mask=mask, bias=bias, batch=(3,))
    for dtype in DTYPES
    for mask, bias in (
        (None, None),
        ("KeyLengths((300, 17, 99))", (4, 40, 300)),
        ("SlidingWindow(70, 9)", None),
        ("Bool(1, 4, 40, 300)", (300,)),
    )
]


@pytest.mark.parametrize("case", STABLE, ids=lambda case: case.id)
def test_a_row_does_not_depend_on_its_batch_or_on_other_rows(case: Case, isa: str):
    x = case.inputs()
    full = run(case, x)
    shown = x.visible.expand(case.score_shape) if x.visible is not None else None
    for item, rows in ((0, slice(0, 1)), (1, slice(3, 10)), (2, slice(39, 40)), (0, slice(7, 40)), (1, slice(0, 31)), (2, slice(11, 12))):
        part = {"query": x.query[item : item + 1, :, rows], "key": x.key[item : item + 1], "value": x.value[item : item + 1]}
        if shown is not None and isa == "emulated" and isinstance(x.mask, ta.SlidingWindow):
            # Tensor cores have a kernel without bool masks, whose roundings are its own: the same mask then, at the place of the rows.
            part |= {"mask": x.mask, "query_offset": case.kv_length - case.seqlen_q + rows.start}
        elif shown is not None:
            part["mask"] = shown[item : item + 1, :, rows]
        if x.bias is not None:
            part["bias"] = x.bias[..., rows, :] if x.bias.dim() > 1 else x.bias
        out, lse = ta.attention(**part, return_lse=True)
        assert torch.equal(out[0], full["out"][item, :, rows]) and torch.equal(lse[0], full["lse"][item, :, rows])


FEW = (1, 2, 3, 4, 5, 6, 7, 8, 9)


@pytest.mark.parametrize("head_dim, head_dim_v", ((64, 64), (1, 3), (33, 17), (80, 72), (16, 144)))
@by_dtype
def test_a_few_queries_are_the_bits_that_they_are_among_many(dtype: torch.dtype, head_dim: int, head_dim_v: int, isa: str):
    """Keys and values are read in place for a few rows, and packed for many."""
    for seqlen_kv in (1, 2, 15, 33, 100, 513, 2049):
        x = Case(num_heads=2, seqlen_q=20, seqlen_kv=seqlen_kv, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype).inputs()
        for options in ({}, {"mask": ta.SlidingWindow(100, 0), "query_offset": seqlen_kv // 2}):
            full, full_lse = ta.attention(x.query, x.key, x.value, return_lse=True, **options)
            for count in FEW:
                rows = slice(20 - count - count % 2, 20 - count % 2)
                shifted = options | ({"query_offset": seqlen_kv // 2 + rows.start} if options else {})
                out, lse = ta.attention(x.query[:, :, rows], x.key, x.value, return_lse=True, **shifted)
                assert torch.equal(out, full[:, :, rows]) and torch.equal(lse, full_lse[:, :, rows]), (seqlen_kv, count, options)


@by_dtype
def test_a_few_queries_see_the_same_inf_and_nan_as_among_many(dtype: torch.dtype, isa: str):
    x = Case(num_heads=2, seqlen_q=20, seqlen_kv=700, head_dim=24, dtype=dtype).inputs()
    x.value[0, 0, 3, 5], x.value[0, 1, 600, 7], x.value[1, 0, 699, 1] = INF, NAN, -INF
    mask = ta.KeyLengths(torch.tensor([700, 699]))  # the last of them is hidden
    full = ta.attention(x.query, x.key, x.value, mask=mask)
    assert full[0].isfinite().logical_not().sum() == 40 and full[1].isfinite().all()
    for count in FEW:
        out = ta.attention(x.query[:, :, :count], x.key, x.value, mask=mask)
        torch.testing.assert_close(out, full[:, :, :count], rtol=0, atol=0, equal_nan=True)


@by_dtype
def test_a_row_does_not_depend_on_how_its_position_is_written(dtype: torch.dtype, isa: str):
    x = Case(seqlen_q=33, seqlen_kv=290, head_dim=16, dtype=dtype).inputs()
    mask = ta.Causal() & (ta.SlidingWindow(40, 0) | ta.Sinks(3))
    out = ta.attention(x.query, x.key, x.value, mask=mask)
    for offset in (257, torch.tensor([257, 257])):
        assert torch.equal(ta.attention(x.query, x.key, x.value, mask=mask, query_offset=offset), out)


@by_dtype
def test_padding_changes_no_bits(dtype: torch.dtype, isa: str):
    x = Case(seqlen_q=8, seqlen_kv=640, head_dim=16, dtype=dtype).inputs()
    whole = ta.attention(x.query, x.key, x.value, mask=ta.KeyLengths(torch.tensor([129, 129])))
    assert torch.equal(whole, ta.attention(x.query, x.key[..., :129, :], x.value[..., :129, :]))


@pytest.mark.parametrize("heads_kv", (1, 2, 6))
def test_a_head_does_not_depend_on_its_group(heads_kv: int, isa: str):
    x = Case(num_heads=6, num_heads_kv=heads_kv, seqlen_q=13, seqlen_kv=140, head_dim=24).inputs()
    full = ta.attention(x.query, x.key, x.value)
    for head in range(6):
        pair = slice(head * heads_kv // 6, head * heads_kv // 6 + 1)
        assert torch.equal(full[:, head : head + 1], ta.attention(x.query[:, head : head + 1], x.key[:, pair], x.value[:, pair]))


@pytest.mark.parametrize("case", [FULL.replace(dtype=dtype, seqlen_q=65, bias=(4, 65, 40)) for dtype in DTYPES], ids=lambda case: case.id)
def test_twenty_repeats_are_identical(case: Case, isa: str):
    first = gradients_of(case)
    for _ in range(20):
        for name, tensor in gradients_of(case).items():
            assert torch.equal(tensor, first[name]), name


@by_dtype
def test_uninitialised_memory_reaches_nothing(dtype: torch.dtype, isa: str, poisoned: None):
    for seqlen_q, seqlen_kv, mask in ((5, 0, None), (37, 5, "Causal()"), (130, 67, "SlidingWindow(3, 0)"), (9, 9, "Bool(9, 1, keep=0.3)")):
        check(Case(num_heads=4, num_heads_kv=2, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, mask=mask, dtype=dtype, head_dim=9, head_dim_v=7))
