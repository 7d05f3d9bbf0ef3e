"""`ta.additive_attention` and its weights against the definition in float64, on every instruction set of the machine."""

import math
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from torch import Tensor

import tiled_attention as ta
from checks import same_bits
from oracle import limit_of
from tiled_attention.testing import DTYPES, LAYOUTS, Case, Inputs, assert_accurate, error, largest, real_dtype, ulp

pytestmark = pytest.mark.usefixtures("poisoned")
F32, F64, BF16, F16 = DTYPES
EMULATED = torch.ops.tiled_attention._isa() == "emulated"
LENGTHS = ((1, 1), (1, 33), (7, 2), (16, 15), (12, 65), (97, 31), (33, 257), (195, 64), (130, 129))
DIMS = (1, 2, 3, 4, 5, 8, 15, 17, 33, 64, 66)
MASKS = (
    "Causal()",
    "SlidingWindow(9, 3)",
    "Causal() & (SlidingWindow(5, 0) | Sinks(2))",
    "KeyLengths((40, 0))",
    "Documents((0, 13, 60, 70))",
    "Bool(2, 1, 37, 70)",
    "Bool(1, 70) & Causal()",
    "Chunked(16) | Bool(37, 70)",
)


def cases() -> list[Case]:
    found = [Case(dtype=dtype, seed=k) for k, dtype in enumerate(DTYPES)]
    for k, (q, n) in enumerate(LENGTHS):
        found.append(Case(batch=(1,), seqlen_q=q, seqlen_kv=n, dtype=DTYPES[k % 4], head_dim=11, head_dim_v=7, seed=k))
        found.append(
            Case(batch=(1,), seqlen_q=q, seqlen_kv=n, mask="Causal()", dtype=DTYPES[(k + 2) % 4], head_dim=6, head_dim_v=20, seed=k)
        )
    for k, d in enumerate(DIMS):
        found.append(Case(batch=(1,), seqlen_q=20, seqlen_kv=37, head_dim=d, head_dim_v=DIMS[(5 * k + 3) % len(DIMS)], seed=k))
        found.append(Case(batch=(1,), seqlen_q=9, head_dim=DIMS[(3 * k + 1) % len(DIMS)], head_dim_v=d, dtype=DTYPES[k % 4], seed=k))
    for k, mask in enumerate(MASKS):
        found.append(Case(seqlen_q=37, seqlen_kv=70, mask=mask, num_heads=4, num_heads_kv=2, hidden=math.nan, dtype=DTYPES[k % 2], seed=k))
        found.append(Case(seqlen_q=37, seqlen_kv=70, mask=mask, dropout_p=0.3, dtype=DTYPES[k % 4], seed=k))
    found += [Case(layout=layout, dtype=DTYPES[k % 4], seqlen_q=15, seqlen_kv=18, seed=k) for k, layout in enumerate(LAYOUTS)]
    found += [
        Case(spread=spread, seqlen_q=20, seqlen_kv=70, head_dim=12, dtype=dtype) for spread in (0.3, 4.0, 15.0, 60.0) for dtype in DTYPES
    ]
    found += [
        Case(batch=(), seqlen_q=5),
        Case(batch=(2, 3), num_heads=6, num_heads_kv=3, seqlen_q=5),
        Case(query_offset=3, mask="Causal()", seqlen_q=5, seqlen_kv=20),
        Case(query_offset=(3, -2), mask="Causal()", seqlen_q=5, seqlen_kv=20),
        Case(dropout_p=1.0),
        Case(batch=(1,), num_heads=9, seqlen_q=40, seqlen_kv=30, dropout_p=0.1, dtype=F64),
    ]
    return found


def weight_of(case: Case) -> Tensor:
    """Of each head, or of all for every second seed."""
    generator = torch.Generator().manual_seed(case.seed + 7)
    shape = (case.num_heads, case.head_dim) if case.seed % 2 else (case.head_dim,)
    return torch.randn(shape, generator=generator).to(real_dtype(case.dtype))


def definition(
    x: Inputs, weight: Tensor, grads: tuple[Tensor, Tensor], kept: Tensor | None, dtype: torch.dtype, flip: bool = False
) -> dict[str, Tensor]:
    """out, lse and gradients by the reference in `dtype`; with `flip` the sums over keys and columns run the other way."""
    leaves = {name: getattr(x, name).detach().to(dtype).requires_grad_() for name in ("query", "key", "value")}
    leaves["score_weight"] = weight.to(dtype).requires_grad_()
    query, key, value, score_weight = leaves.values()
    mask = None if x.visible is None else x.visible.expand(*query.shape[:-1], key.shape[-2])
    if flip:
        query, score_weight, key, value = query.flip(-1), score_weight.flip(-1), key.flip(-1, -2), value.flip(-2)
        mask, kept = (None if t is None else t.flip(-1) for t in (mask, kept))
    options = {"mask": mask, "dropout_mask": kept, "dropout_p": x.dropout_p, "return_lse": True}
    out, lse = ta.reference.additive_attention(query, key, value, score_weight, **options)
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), [grad.to(dtype) for grad in grads])
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}


@dataclass(frozen=True)
class Expected:
    exact: dict[str, Tensor]
    own: dict[str, float]  # error of the definition in float32 over two orders of summation
    grads: tuple[Tensor, Tensor]
    kept: Tensor | None
    terms: float  # of a score gradient that is the difference of two equal sums

    def limit(self, name: str, dtype: torch.dtype, stored: torch.dtype) -> float:
        limit = limit_of(name, self.exact[name], self.own[name], dtype, stored, dot=False)
        if name in ("out", "lse"):
            return limit
        # Weights come again from lse: its rounding, where rows are not normalised again, and that of the exponential are theirs.
        real = real_dtype(dtype)
        relative = 0.5 * ulp(min(largest(self.exact["lse"]), 44.0), real) + torch.finfo(real).eps
        return limit + relative * largest(self.exact[name]) + torch.finfo(real).eps * self.terms


def expect(x: Inputs, weight: Tensor, grads: tuple[Tensor, Tensor], kept: Tensor | None = None) -> Expected:
    exact = definition(x, weight, grads, kept, F64)
    plain = [definition(x, weight, grads, kept, F32, flip) for flip in (False, True)]
    own = {name: max(error(one[name], want) for one in plain) for name, want in exact.items()}
    single = x.key.shape[-2] == 1 or (x.visible is not None and x.visible.sum(-1).max() <= 1)
    terms = largest(grads[0].double().abs().sum(-1)) * largest(x.value) * max(1.0, largest(weight)) if single else 0.0
    return Expected(exact, own, grads, kept, terms)


@lru_cache(maxsize=4)
def expected(case: Case) -> Expected:
    generator = torch.Generator().manual_seed(case.seed + 1)
    grad_out = torch.randn((*case.score_shape[:-1], case.value_dim), generator=generator).to(case.dtype)
    grad_lse = torch.randn(case.score_shape[:-1], generator=generator).to(real_dtype(case.dtype))
    kept = None
    if case.dropout_p:
        torch.manual_seed(case.seed)
        batch = math.prod(case.batch)
        kept = ta.dropout_mask(batch, case.num_heads, case.seqlen_q, case.kv_length, case.dropout_p).view(case.score_shape)
    return expect(case.inputs(), weight_of(case), (grad_out, grad_lse), kept)


def arguments(case: Case) -> dict:
    given = case.inputs().arguments()
    return {name: given[name] for name in ("query", "key", "value", "mask", "query_offset", "dropout_p") if name in given} | {
        "score_weight": weight_of(case)
    }


def run(case: Case, grads: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    given = arguments(case)
    leaves = {name: given[name].detach().requires_grad_() for name in ("query", "key", "value", "score_weight")}
    torch.manual_seed(case.seed)
    out, lse = ta.additive_attention(**(given | leaves), return_lse=True)
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), grads)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_values_and_gradients(case: Case, isa: str):
    want = expected(case)
    got = run(case, want.grads)
    for name, exact in want.exact.items():
        dtype = real_dtype(case.dtype) if name in ("lse", "score_weight") else case.dtype
        assert got[name].dtype == dtype
        assert_accurate(got[name], exact, want.limit(name, case.dtype, dtype), name)
    torch.manual_seed(case.seed)
    with torch.no_grad():
        out, lse = ta.additive_attention(**arguments(case), return_lse=True)
    assert same_bits(out, got["out"]) and same_bits(lse, got["lse"])


@pytest.mark.parametrize("case", [case for case in cases() if case.seqlen_q < 100][::3], ids=lambda case: case.id)
def test_weights_are_those_that_made_out(case: Case, isa: str):
    given = {name: value for name, value in arguments(case).items() if name != "value"}
    rows = torch.tensor([case.seqlen_q - 1, 0, case.seqlen_q // 2])
    kept, x = expected(case).kept, case.inputs()
    options = {"mask": None if x.visible is None else x.visible.expand(case.score_shape), "dropout_mask": kept, "dropout_p": case.dropout_p}
    exact, plain = (
        ta.reference.additive_attention_weights(*(given[name].to(dtype) for name in ("query", "key", "score_weight")), **options)
        for dtype in (F64, F32)
    )
    want = expected(case)
    dtype = real_dtype(case.dtype)
    own = error(plain, exact) * (1 if dtype == F32 else 2.0**-29)
    limit = 4 * own + ulp(largest(exact), dtype) + 0.5 * ulp(min(largest(want.exact["lse"]), 44.0), dtype) * largest(exact)
    for chosen in (None, rows):
        torch.manual_seed(case.seed)
        weights = ta.additive_attention_weights(**given, rows=chosen)
        want = exact if chosen is None else exact.index_select(-2, chosen)
        assert weights.dtype == dtype
        assert_accurate(weights, want, limit, "weights")
        assert torch.equal(weights == 0, want == 0) or case.spread > 1 or case.dtype == F16


@pytest.mark.parametrize("empty", ("batch", "heads", "queries", "keys", "head_dim", "head_dim_v"))
@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
def test_empty_sizes(empty: str, dtype: torch.dtype, isa: str):
    sizes = {"batch": {"batch": (0,)}, "heads": {"num_heads": 0}, "queries": {"seqlen_q": 0, "seqlen_kv": 3}, "keys": {"seqlen_kv": 0}}
    case = Case(dtype=dtype, **sizes.get(empty, {empty: 0}))
    grads = (torch.ones((*case.score_shape[:-1], case.value_dim), dtype=dtype), torch.zeros(case.score_shape[:-1]))
    got, want = run(case, grads), definition(case.inputs(), weight_of(case), grads, None, F64)
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-2, atol=1e-5, msg=name)


# Numbers that exponentials cannot hold


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "a, b", ((60.0, -60.5), (-60.0, 60.5), (60.0, 1.0), (-200.0, 199.0), (500.0, -499.5), (1e4, -1e4), (39.0, -39.25), (11.0, 11.0))
)
def test_large_arguments(a: float, b: float, dtype: torch.dtype, isa: str):
    """One row and one key stand far out, the others do not."""
    calls = []
    for seed in range(4):
        case = Case(batch=(1,), num_heads=1, seqlen_q=9, seqlen_kv=20, head_dim=6, dtype=dtype, seed=2 * seed)
        x, weight = case.inputs(), weight_of(case)
        x.query[..., 3, ::2] = a
        x.key[..., 5, :4] = b
        x.key[..., 5, 5] = a
        calls.append((x, weight))
    check(calls, dtype)


def check(calls: list[tuple[Inputs, Tensor]], dtype: torch.dtype) -> None:
    """Everything against the definition, within what the definition itself loses in these calls together."""
    generator = torch.Generator().manual_seed(3)
    wanted = []
    for x, weight in calls:
        shape = (*x.query.shape[:-1], x.value.shape[-1])
        grads = (torch.randn(shape, generator=generator).to(dtype), torch.randn(shape[:-1], generator=generator).to(real_dtype(dtype)))
        wanted.append(expect(x, weight, grads))
    for (x, weight), want in zip(calls, wanted, strict=True):
        leaves = [t.detach().clone().requires_grad_() for t in (x.query, x.key, x.value, weight)]
        out, lse = ta.additive_attention(*leaves, return_lse=True)
        got = (out, lse, *torch.autograd.grad([out, lse], leaves, want.grads))
        for (name, exact), tensor in zip(want.exact.items(), got, strict=True):
            limit = max(one.limit(name, dtype, tensor.dtype) for one in wanted)
            assert_accurate(tensor, exact, limit, name)


def test_infinities_saturate(isa: str):
    """tanh(inf + x) = 1, with gradient 0; inf - inf is NaN, in its own row alone."""
    query, key, value, weight = (
        t.requires_grad_() for t in (torch.randn(1, 4, 5), torch.randn(1, 7, 5), torch.randn(1, 7, 3), torch.randn(5))
    )
    with torch.no_grad():
        query[0, 1, 2], key[0, 3, 0], query[0, 2, 0] = math.inf, -math.inf, math.inf
    out = ta.additive_attention(query, key, value, weight)
    want = ta.reference.additive_attention(*(t.detach().double() for t in (query, key, value)), weight.detach().double())
    torch.testing.assert_close(out.detach().double(), want, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert out[0, 2].isnan().all() and not out[0, [0, 1, 3]].isnan().any()
    grad = torch.autograd.grad(out[:, [0, 1, 3]].sum(), query)[0]
    assert grad[0, 1, 2] == 0 and grad[0, [0, 1, 3]].isfinite().all()


@pytest.mark.parametrize(
    "weight",
    (
        [0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 3.0, 0.0, -1.0],
        [1e3, 1.0, -1e3, 0.0, 1e-20],
        [1e-40, 1e-41, 0, 1, 2],
        [1e-40, -1e-40, 1e-41, 1e-42, 0],
        [1e20, 1.0, -1e20, 0.0, 1e-20],
        [-1e20, -3e20, -1e20, -2e20, -1e20],
        [1e20, -1e20, 3e20, -3e20, 1e36],
        [-1e37, 2e37, 3e37, -1e37, 5.0],
    ),
)
@pytest.mark.parametrize("spread", (0.01, 1.0))
@pytest.mark.parametrize("dtype", (F32, F64), ids=str)
def test_any_weight(dtype: torch.dtype, spread: float, weight: list[float], isa: str):
    cases = [Case(seqlen_q=4, seqlen_kv=7, head_dim=5, head_dim_v=3, spread=spread, dtype=dtype, seed=seed) for seed in range(4)]
    check([(case.inputs(), torch.tensor(weight, dtype=dtype)) for case in cases], dtype)


@pytest.mark.parametrize("value", (math.inf, -math.inf, math.nan))
def test_weights_that_are_not_finite(value: float, isa: str):
    """The pattern of inf and NaN is that of the formula."""
    query, key, values = torch.randn(2, 4, 5), torch.randn(2, 7, 5), torch.randn(2, 7, 3)
    for weight in ([value, 1.0, 0.0, 0.0, 0.0], [1.0, 2.0, value, 3.0, -value], [value] * 5):
        tensors = (query, key, values, torch.tensor(weight))
        want = ta.reference.additive_attention(*(t.double() for t in tensors), return_lse=True)
        for got, exact in zip(ta.additive_attention(*tensors, return_lse=True), want, strict=True):
            assert_accurate(got, exact, 1e-6, "out or lse")


@pytest.mark.parametrize("hidden", (math.nan, math.inf, 70.0, -1e30))
@pytest.mark.parametrize("mask", ("causal", "lengths", "bool"))
@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
def test_what_stands_in_hidden_slots_reaches_no_bit(mask: str, hidden: float, dtype: torch.dtype, isa: str):
    masks = {
        "causal": ta.Causal(align="top_left"),
        "lengths": ta.KeyLengths(torch.tensor([19])),
        "bool": (torch.arange(40) < 19).view(1, 40),
    }
    results = []
    for filler in (0.5, hidden):
        torch.manual_seed(1)
        query, key, value, weight = torch.randn(1, 2, 19, 9), torch.randn(1, 2, 40, 9), torch.randn(1, 2, 40, 8), torch.randn(9)
        key[..., 19:, :] = value[..., 19:, :] = filler
        leaves = [t.requires_grad_() for t in (query.to(dtype), key.to(dtype), value.to(dtype), weight)]
        out, lse = ta.additive_attention(*leaves, mask=masks[mask], return_lse=True)
        gradients = torch.autograd.grad([out.float().sum() + lse.sum()], leaves)
        assert (gradients[1][..., 19:, :] == 0).all() and (gradients[2][..., 19:, :] == 0).all()
        results.append([out, lse, *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.skipif(EMULATED, reason="bits of the CPU kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_bits_alone_and_among_others(dtype: torch.dtype, isa: str):
    query, key, value = (torch.randn(2, 3, n, 21).to(dtype) for n in (230, 300, 300))
    query[:, :, 5], key[:, :, 7] = 90, 45
    weight = torch.randn(3, 21, dtype=real_dtype(dtype))
    out, lse = ta.additive_attention(query, key, value, weight, return_lse=True)
    for row in (0, 1, 5, 13, 191, 192, 229):
        one, one_lse = ta.additive_attention(*(t[1:, :] for t in (query[:, :, row : row + 1], key, value)), weight, return_lse=True)
        assert torch.equal(one, out[1:, :, row : row + 1]) and torch.equal(one_lse, lse[1:, :, row : row + 1])


@pytest.mark.skipif(EMULATED, reason="the emulator runs one kernel at a time")
@pytest.mark.parametrize(
    "case", [Case(batch=(1,), num_heads=1, seqlen_q=450, seqlen_kv=70, mask="Causal()", dropout_p=0.2), Case(num_heads=5, seqlen_q=40)]
)
def test_every_number_of_threads_gives_the_same_bits(case: Case, isa: str):
    grads = expected(case).grads
    torch.set_num_threads(1)
    want = run(case, grads)
    for count in (2, 3, 7):
        torch.set_num_threads(count)
        got = run(case, grads)
        assert all(torch.equal(got[name], want[name]) for name in want), f"{count} threads"


# Against other definitions


def test_numpy_reference():
    query, key, value, weight = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 7), torch.randn(3, 4)
    mask = torch.rand(2, 3, 5, 6) > 0.4
    out, weights = ta.numpy_reference.additive_attention(query, key, value, weight, mask)
    torch.testing.assert_close(
        ta.additive_attention(query, key, value, weight, mask=mask).double(), torch.from_numpy(out), rtol=1e-5, atol=1e-5
    )
    got = ta.additive_attention_weights(query, key, weight, mask=mask).double()
    torch.testing.assert_close(got, torch.from_numpy(weights), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("batch, n, m", ((2, 3, 5), (1, 1, 5), (1, 1, 1), (2, 3, 3)))
def test_l17_no_dimension_is_squeezed_and_the_weight_counts(batch: int, n: int, m: int, isa: str):
    query, key, value, weight = torch.randn(batch, n, 4), torch.randn(batch, m, 4), torch.randn(batch, m, 6), torch.randn(4)
    keep = torch.ones(batch, 1, m).bool()
    keep[0, :, -1:] = m == 1
    score = (torch.tanh(query[:, :, None].double() + key[:, None].double()) * weight).sum(-1)
    want = score.masked_fill(~keep, -math.inf).softmax(-1) @ value.double()
    out = ta.additive_attention(query, key, value, weight, mask=keep)
    assert out.shape == (batch, n, 6)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)


def test_l17_padding_of_any_content_reaches_nothing(isa: str):
    query, key, value, weight = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.randn(2, 5, 6), torch.randn(4)
    keep = torch.tensor([True, True, True, False, False]).expand(2, 1, 5)
    want = ta.additive_attention(query, key[:, :3], value[:, :3], weight)
    key[:, 3:] = value[:, 3:] = math.nan
    assert torch.equal(ta.additive_attention(query, key, value, weight, mask=keep), want)


def test_dead_rows_are_zero(isa: str):
    leaves = [t.requires_grad_() for t in (torch.randn(1, 2, 4), torch.randn(1, 3, 4), torch.randn(1, 3, 6), torch.randn(4))]
    out, lse = ta.additive_attention(*leaves, mask=torch.zeros(2, 3, dtype=torch.bool), return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.skipif(EMULATED, reason="a large call")
def test_memory_is_linear():
    """A composite would hold 2048 x 2048 x 64 numbers, 1 GB, and the scores 16 MB."""
    leaves = [torch.randn(1, 1, 2048, 64, requires_grad=True) for _ in range(3)] + [torch.randn(64, requires_grad=True)]
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        ta.additive_attention(*leaves).sum().backward()
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert 0 < peak < 14e6
