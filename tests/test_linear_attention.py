"""`ta.linear_attention` and its one-token step against the definition in float64, on every instruction set of the machine."""

import functools
import itertools
import math

import pytest
import torch
from torch import Tensor

import tiled_attention as ta
from checks import same_bits
from tiled_attention.linear_testing import LinearCase, check, leaves_of, results, with_leaves
from tiled_attention.testing import DTYPES, LAYOUTS, SHORT_NAMES

pytestmark = pytest.mark.usefixtures("poisoned")
F32, F64, BF16, F16 = DTYPES
LENGTHS = (1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)
DIMS = (1, 2, 5, 8, 15, 16, 17, 31, 33, 64, 65, 130)
MAPS = ("elu", "relu", "exp", "identity", ("elu", "exp"))
attention = functools.partial(ta.linear_attention, return_state=True)


def cases() -> list[LinearCase]:
    found = [LinearCase(dtype=dtype, causal=causal) for dtype in DTYPES for causal in (False, True)]
    for k, n in enumerate(LENGTHS):
        decay = (None, "token", "feature")[k % 3]
        found.append(LinearCase(seqlen_q=n, dtype=DTYPES[k % 4], decay=decay, state=k % 2 == 0, seed=k))
        found.append(LinearCase(seqlen_q=n, decay=(None, "token", "feature")[(k + 1) % 3], masked=0.3, head_dim=17, head_dim_v=35, seed=k))
        found.append(
            LinearCase(seqlen_q=(1, 33, 130)[k % 3], seqlen_kv=n, causal=False, dtype=DTYPES[(k + 1) % 4], masked=0.2 * (k % 2), seed=k)
        )
    for k, d in enumerate(DIMS):
        for decay in (None, "token", "feature"):
            found.append(LinearCase(batch=(1,), head_dim=d, head_dim_v=DIMS[(k * 5 + 3) % len(DIMS)], seqlen_q=37, decay=decay, seed=k))
        found.append(
            LinearCase(batch=(1,), head_dim=d, head_dim_v=DIMS[(k * 7 + 1) % len(DIMS)], dtype=DTYPES[k % 4], causal=False, seed=k)
        )
    for feature_map, decay in itertools.product(MAPS, (None, "token", "feature")):
        # A difference of features does not divide well: not normalised where they may be negative.
        found.append(
            LinearCase(feature_map=feature_map, decay=decay, normalize=feature_map != "identity", scale=0.3, state=True, dtype=F64)
        )
    for heads, decay in itertools.product(((4, 1), (6, 2), (3, 3)), (None, "token", "feature")):
        found.append(LinearCase(num_heads=heads[0], num_heads_kv=heads[1], seqlen_q=70, decay=decay, state=decay != "token", masked=0.2))
    for layout, decay in itertools.product(LAYOUTS, (None, "feature")):
        found.append(LinearCase(layout=layout, decay=decay, seqlen_q=45, dtype=F64 if layout == "negated" else F16))
    for rate, decay in itertools.product((1e-4, 1.0, 5.0, 20.0, 88.0, 200.0), ("token", "feature")):
        found.append(LinearCase(rate=rate, decay=decay, seqlen_q=70, state=True))
    for decay in ("token", "feature"):
        found.append(LinearCase(resets=True, decay=decay, seqlen_q=150, masked=0.2, state=True, num_heads=4, num_heads_kv=2))
    for hidden, decay, causal in ((math.nan, None, True), (math.inf, "token", True), (math.nan, "feature", True), (math.nan, None, False)):
        found.append(LinearCase(masked=0.4, hidden=hidden, decay=decay, causal=causal, seqlen_q=50))
    found += [
        LinearCase(batch=(), seqlen_q=20),
        LinearCase(batch=(2, 3), seqlen_q=20, decay="token"),
        LinearCase(normalize=False, scale=-2.0),
    ]
    found += [LinearCase(batch=(1,), num_heads=1, seqlen_q=1025, head_dim=16, decay=decay) for decay in (None, "token", "feature")]
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_values_and_gradients(case: LinearCase, isa: str):
    check(case, attention)


@pytest.mark.parametrize("empty", ("batch", "heads", "seqlen", "keys", "head_dim", "head_dim_v"))
@pytest.mark.parametrize("decay", (None, "token", "feature"))
def test_empty_sizes(empty: str, decay: str | None, isa: str):
    causal = empty != "keys"
    case = LinearCase(state=causal, causal=causal, decay=decay if causal else None)
    sizes = {"batch": {"batch": (0,)}, "heads": {"num_heads": 0}, "seqlen": {"seqlen_q": 0}, "keys": {"seqlen_kv": 0}}
    case = case.replace(**sizes.get(empty, {empty: 0}))
    inputs = case.inputs()
    grads = {name: torch.ones_like(t) for name, t in results(ta.reference.linear_attention, inputs).items()}
    got, want = (results(function, inputs, None, grads) for function in (attention, ta.reference.linear_attention))
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=name)


def explicit(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """tril(phi(Q) phi(K)^T) V over its row sums."""
    phi_q, phi_k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (query, key))
    weights = (phi_q @ phi_k.mT).tril()
    return weights @ value / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("n", (1, 2, 31, 33, 64, 129, 1025))
def test_equals_the_explicit_lower_triangle(n: int, isa: str):
    query, key, value = (torch.randn(1, 2, n, 24, dtype=F64) for _ in range(3))
    torch.testing.assert_close(ta.linear_attention(query, key, value, causal=True), explicit(query, key, value), rtol=0, atol=1e-13)


@pytest.mark.parametrize("decay", (None, "token", "feature"))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_one_give_exactly_one(dtype: torch.dtype, causal: bool, decay: str | None, isa: str):
    """An average of ones: numerator and denominator take the same steps."""
    for n, d in ((1, 5), (33, 64), (300, 40)):
        case = LinearCase(
            seqlen_q=n, head_dim=d, head_dim_v=37, dtype=dtype, causal=causal, decay=decay if causal else None, num_heads=4, num_heads_kv=2
        )
        inputs = case.inputs()
        inputs["value"] = torch.ones_like(inputs["value"])
        out, state = attention(**inputs)
        assert (out == 1).all()
        if not causal:
            continue
        log_decay = inputs["log_decay"][:, :, -1:] if decay is not None else None
        rows = (inputs[name][:, :, -1:] for name in ("query", "key", "value"))
        assert (ta.linear_attention_step(*rows, state, log_decay=log_decay)[0] == 1).all()


@pytest.mark.parametrize("dtype", (F16, BF16), ids=str)
def test_seventy_thousand_ones_stay_one(dtype: torch.dtype):
    ones = torch.ones(1, 1, 70_000, 8, dtype=dtype)
    out, state = ta.linear_attention(ones, ones, ones, causal=True, return_state=True)
    assert (out == 1).all() and (state.k_sum == 140_000).all() and state.kv.dtype == F32


CUTS = ([97], [0, 97], [1] * 97, [1, 2, 94], [31, 1, 65], [32, 32, 33], [64, 0, 33], [96, 1])


@pytest.mark.parametrize("decay", (None, "token", "feature"))
@pytest.mark.parametrize("dtype", (F64, F32), ids=str)
def test_every_cut_gives_the_whole(dtype: torch.dtype, decay: str | None, isa: str):
    case = LinearCase(seqlen_q=97, head_dim=9, head_dim_v=20, dtype=dtype, decay=decay, state=True, masked=0.2, num_heads=4, num_heads_kv=2)
    inputs = case.inputs()
    whole, last = attention(**inputs)
    atol = 1e-12 if dtype == F64 else 1e-5
    for cuts in CUTS:
        state, outs, begin = inputs["initial_state"], [], 0
        before = [part.clone() for part in state]
        for n in cuts:
            piece = {name: inputs[name][:, :, begin : begin + n] for name in ("query", "key", "value")}
            piece["key_mask"] = inputs["key_mask"][:, begin : begin + n]
            if decay:
                piece["log_decay"] = inputs["log_decay"][:, :, begin : begin + n]
            call = ta.linear_attention_step if n == 1 else functools.partial(ta.linear_attention, causal=True, return_state=True)
            out, state = call(**piece, state=state) if n == 1 else call(**piece, initial_state=state)
            outs.append(out)
            begin += n
        torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=0, atol=atol, msg=str(cuts))
        for ours, right in zip(state, last):
            torch.testing.assert_close(ours, right, rtol=atol, atol=atol, msg=str(cuts))
        assert all(torch.equal(a, b) for a, b in zip(inputs["initial_state"], before)), "the given state was changed"


def test_a_step_in_place_is_the_step(isa: str):
    case = LinearCase(seqlen_q=1, state=True, decay="token", num_heads=4, num_heads_kv=2, head_dim=19, head_dim_v=70)
    inputs = case.inputs()
    state, rows = inputs["initial_state"], [inputs[name] for name in ("query", "key", "value")]
    out, after = ta.linear_attention_step(*rows, state, log_decay=inputs["log_decay"])
    places = [part.data_ptr() for part in state]
    out_in_place, same = ta.linear_attention_step(*rows, state, log_decay=inputs["log_decay"], inplace=True)
    assert torch.equal(out, out_in_place) and [part.data_ptr() for part in same] == places
    assert all(torch.equal(a, b) for a, b in zip(same, after))


@pytest.mark.parametrize("decay", (None, "token", "feature"))
@pytest.mark.parametrize("heads", ((1, 1), (2, 1), (4, 2)))
@pytest.mark.parametrize("causal", (True, False))
def test_every_number_of_threads_gives_the_same_bits(heads: tuple[int, int], decay: str | None, causal: bool, isa: str):
    """Fewer heads than threads are shared among them along the sequence."""
    decay = decay if causal else None
    for dtype, n in ((F32, 1500), (F64, 600), (BF16, 1111)):
        case = LinearCase(batch=(1,), num_heads=heads[0], num_heads_kv=heads[1], seqlen_q=n, head_dim=40, head_dim_v=72, causal=causal)
        inputs = case.replace(dtype=dtype, decay=decay, state=causal, masked=0.1).inputs()
        grads = {name: torch.randn_like(t) for name, t in results(attention, inputs).items()}
        torch.set_num_threads(1)
        want = results(attention, inputs, None, grads)
        for count in (2, 3, 7):
            torch.set_num_threads(count)
            got = results(attention, inputs, None, grads)
            assert not [name for name in want if not torch.equal(got[name], want[name])], f"{count} threads"


@pytest.mark.parametrize("decay", (None, "token", "feature"))
@pytest.mark.parametrize("where", (0, 31, 40, 299))
def test_what_is_not_finite_is_seen_from_its_token_on(where: int, decay: str | None, isa: str):
    """NaN in a key or value reaches no earlier row, also where threads share the head."""
    inputs = LinearCase(batch=(1,), num_heads=1, seqlen_q=300, decay=decay).inputs()
    clean = attention(**inputs)[0]
    for name, count in itertools.product(("key", "value"), (1, 7)):
        torch.set_num_threads(count)
        dirty = inputs[name].clone()
        dirty[:, :, where] = math.nan
        leaves = leaves_of(inputs) | {name: dirty}
        out = attention(**with_leaves(inputs, leaves))[0]
        torch.testing.assert_close(out[:, :, :where], clean[:, :, :where], rtol=0, atol=1e-6)
        assert out[:, :, where:].isnan().all()


@pytest.mark.parametrize("decay", (None, "token", "feature"))
def test_threads_agree_on_what_is_not_finite(decay: str | None, isa: str):
    """Also where the threads that share a head learn of it only on the way."""
    inputs = LinearCase(batch=(1,), num_heads=1, seqlen_q=1500, head_dim=20, decay=decay, state=True).inputs()
    inputs["value"][:, :, 1100, 3] = math.inf
    grads = {name: torch.randn_like(t) for name, t in results(attention, inputs).items()}
    grads["out"][:, :, 1200] = math.nan
    found = []
    for count in (1, 2, 7):
        torch.set_num_threads(count)
        found.append(results(attention, inputs, None, grads))
    assert all(same_bits(a, b) for got in found[1:] for a, b in zip(got.values(), found[0].values(), strict=True))
    assert found[0]["out"][:, :, :1100].isfinite().all() and found[0]["value"][:, :, 1201:].isfinite().all()


@pytest.mark.parametrize("decay", ("token", "feature"))
@pytest.mark.parametrize("reset", (-math.inf, -3e37))
def test_a_reset_forgets_everything(decay: str, reset: float, isa: str):
    """Even what is not finite: after it the call equals one that starts there."""
    inputs = LinearCase(seqlen_q=80, decay=decay, rate=0.7, state=True).inputs()
    inputs["log_decay"][:, :, 50] = reset
    inputs["value"][:, :, 20] = math.inf
    grads = {name: torch.randn_like(t) for name, t in results(attention, inputs).items()}
    grads["out"][:, :, :50] = 0
    got = results(attention, inputs, None, grads)
    names = ("query", "key", "value", "log_decay")
    tail = {name: inputs[name][:, :, 50:] for name in names} | {"causal": True}
    want = results(attention, tail, None, grads | {"out": grads["out"][:, :, 50:]})
    torch.testing.assert_close(got["out"][:, :, 50:], want["out"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["final_kv"], want["final_kv"], rtol=1e-5, atol=1e-5)
    for name in names:
        torch.testing.assert_close(got[name][:, :, 51:], want[name][:, :, 1:], rtol=1e-4, atol=1e-5, msg=name)
    assert (got["log_decay"][:, :, 50] == 0).all() and (got["kv"] == 0).all()


def test_a_denominator_of_zero_gives_zero(isa: str):
    """No feature is active: out and all gradients are 0."""
    query, key, value = torch.randn(1, 2, 40, 8), -torch.rand(1, 2, 40, 8) - 0.1, torch.randn(1, 2, 40, 8)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    for causal in (False, True):
        out = ta.linear_attention(*leaves, feature_map="relu", causal=causal)
        assert (out == 0).all()
        assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), leaves))


def test_features_far_below_zero_do_not_vanish(isa: str):
    """elu(x) + 1 rounds to 0 from -17 on; e^x does not until -104."""
    query, key, value = torch.full((1, 1, 40, 8), 3.0), torch.full((1, 1, 40, 8), -30.0), torch.randn(1, 1, 40, 8)
    want = value.cumsum(2) / torch.arange(1, 41)[:, None]
    torch.testing.assert_close(ta.linear_attention(query, key, value, causal=True), want)
    for x in (-60.0, -86.0, -100.0, -103.0):
        for feature_map, y in (("elu", x), ("exp", x), ("exp", -math.floor(x * 0.85))):
            _, state = attention(query[:, :, :1], torch.full((1, 1, 1, 8), float(y)), value[:, :, :1], feature_map=feature_map)
            torch.testing.assert_close(state.k_sum, torch.full((1, 1, 8), math.exp(y)), rtol=1e-6, atol=2e-45)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: SHORT_NAMES[dtype])
def test_results_lie_as_query_lies(dtype: torch.dtype, causal: bool):
    query, key, value = (torch.randn(2, 10, 3, 8).to(dtype).transpose(1, 2) for _ in range(3))
    out, state = ta.linear_attention(query, key, value, causal=causal, return_state=True)
    assert out.stride() == query.stride() and out.dtype == dtype
    assert all(part.is_contiguous() and part.dtype == (F64 if dtype == F64 else F32) for part in state)
