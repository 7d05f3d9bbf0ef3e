"""ta.FavorFeatures: an unbiased estimate of the softmax kernel with the stated error, frozen, in range, and blind to other tokens."""

import copy
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiled_attention as ta
from tiled_attention.compare.favor import Replacement

KINDS = ("positive", "hyperbolic", "trigonometric")
STABLE = KINDS[:2]
HEAD_DIM = 8
LIMIT = 64.0


def normal(*shape: int, norm: float, head_dim: int = HEAD_DIM, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows with |x'| = norm, where x' = x / head_dim ** 0.25."""
    x = torch.randn(*shape, head_dim, dtype=torch.float64)
    return (x * (norm * head_dim**0.25 / x.norm(dim=-1, keepdim=True))).to(dtype)


def kernel(query: Tensor, key: Tensor) -> Tensor:
    return (query.double() @ key.double().mT / math.sqrt(query.shape[-1])).exp()


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    weights = kernel(query, key)
    weights = weights.tril() if causal else weights
    return weights @ value.double() / weights.sum(-1, keepdim=True)


def estimates(query: Tensor, key: Tensor, kind: str, orthogonal: bool, num_features: int, count: int) -> Tensor:
    """phi(query) . phi(key) / kernel, for `count` seeds: (count, queries, keys)."""
    found = []
    for seed in range(count):
        phi = ta.FavorFeatures(query.shape[-1], num_features, kind, orthogonal, seed, dtype=torch.float64)
        found.append(phi(query) @ phi(key).mT)
    return torch.stack(found) / kernel(query, key)


@pytest.mark.parametrize("orthogonal", (True, False))
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_estimate_is_unbiased(kind: str, orthogonal: bool):
    ratio = estimates(normal(4, norm=0.6), normal(4, norm=0.6), kind, orthogonal, num_features=12, count=1000)
    standard_error = ratio.std(0) / len(ratio) ** 0.5
    assert ((ratio.mean(0) - 1).abs() <= 4.5 * standard_error).all()  # of 16 dependent pairs; 4.5 sigma: 7e-6 each
    assert (standard_error < 0.03).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_squared_error_is_that_of_lemma_2(kind: str):
    query, key, m = normal(4, norm=0.5), normal(4, norm=0.5), 12
    error = (estimates(query, key, kind, False, m, 2000) - 1).square().mean(0)
    sums = (query[:, None] + key).square().sum(-1) / HEAD_DIM**0.5
    differences = (query[:, None] - key).square().sum(-1) / HEAD_DIM**0.5
    positive = (sums.exp() - 1) / m
    stated = {
        "positive": positive,
        "hyperbolic": 0.5 * (1 - (-sums).exp()) * positive,
        "trigonometric": sums.exp() * (1 - (-differences).exp()) ** 2 / (2 * m * kernel(query, key) ** 4),
    }
    assert torch.allclose(error, stated[kind], rtol=0.3) and abs(float((error / stated[kind]).mean()) - 1) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_orthogonal_rows_err_less(kind: str):
    query, key = normal(4, norm=0.6), normal(4, norm=0.6)
    orthogonal, independent = ((estimates(query, key, kind, o, HEAD_DIM, 400) - 1).square().mean() for o in (True, False))
    assert orthogonal < 0.9 * independent


def attention_errors(kind: str, orthogonal: bool, norm: float, counts: tuple[int, ...], causal: bool = False) -> list[float]:
    """Relative error of attention for each number of features, mean over seeds."""
    torch.manual_seed(1)
    query, key = (normal(1, 2, 64, norm=norm, head_dim=32) for _ in range(2))
    value = torch.randn(1, 2, 64, 32, dtype=torch.float64)
    exact = softmax_attention(query, key, value, causal)
    found = []
    for m in counts:
        maps = [ta.FavorFeatures(32, m, kind, orthogonal, seed).eval() for seed in range(8)]
        outs = [ta.linear_attention(query, key, value, feature_map=phi, causal=causal) for phi in maps]
        found.append(sum(float((out - exact).norm() / exact.norm()) for out in outs) / len(outs))
    return found


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("kind, orthogonal", [("positive", True), ("positive", False), ("hyperbolic", True), ("trigonometric", True)])
def test_the_error_of_attention_falls_as_the_root_of_the_number_of_features(kind: str, orthogonal: bool, causal: bool):
    counts = (64, 128, 256, 512, 1024)
    errors = attention_errors(kind, orthogonal, 0.8, counts, causal)
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (counts, errors))
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    assert -0.65 < slope < -0.35, errors


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_attention_grows_with_the_norms(kind: str):
    errors = [attention_errors(kind, True, norm, (256,))[0] for norm in (0.3, 0.6, 0.9, 1.2, 1.5)]
    assert errors == sorted(errors) and errors[-1] > 8 * errors[0]


def test_rows_are_standard_normal_and_orthogonal_within_blocks():
    draws = torch.stack([ta.FavorFeatures(6, 15, seed=seed, dtype=torch.float64).projection for seed in range(2000)])
    for block in draws.split(6, dim=1):
        products = block @ block.mT
        assert products.masked_fill(torch.eye(block.shape[1], dtype=torch.bool), 0.0).abs().max() < 1e-12
    bound = 5 / len(draws) ** 0.5
    norms = draws.square().sum(-1)
    assert draws.mean(0).abs().max() < bound
    for row in draws.unbind(1):
        assert (row.mT @ row / len(draws) - torch.eye(6)).abs().max() < 2 * bound
    assert (norms.mean(0) - 6).abs().max() < bound * 12**0.5  # chi squared with 6 degrees: mean 6, variance 12
    assert (norms.var(0) / 12 - 1).abs().max() < 0.3
    assert torch.corrcoef(norms.T).fill_diagonal_(0.0).abs().max() < bound


def test_seeds():
    def drawn(seed: int | None, **options) -> Tensor:
        return ta.FavorFeatures(4, 6, seed=seed, **options).projection

    assert torch.equal(drawn(3), drawn(3)) and not torch.equal(drawn(3), drawn(4))
    torch.manual_seed(5)
    first = drawn(None)
    torch.manual_seed(5)
    assert torch.equal(first, drawn(None)) and not torch.equal(first, drawn(None))
    state = torch.get_rng_state()
    ta.FavorFeatures(4, 6, seed=3).redraw()
    assert torch.equal(state, torch.get_rng_state())


def test_inputs_drawn_with_the_same_seed_are_independent_of_the_projection():
    for seed, dtype in itertools.product((0, 3), (torch.float32, torch.float64)):
        projection = ta.FavorFeatures(16, 64, orthogonal=False, seed=seed, dtype=dtype).projection
        torch.manual_seed(seed)
        inputs = torch.randn(64, 16, dtype=dtype)
        assert F.cosine_similarity(projection[:, None], inputs, dim=-1).max() < 0.95


@pytest.mark.parametrize("seed", (None, 7))
def test_redraw_is_in_place_and_goes_on_with_the_generator(seed: int | None):
    def sequence() -> list[Tensor]:
        torch.manual_seed(0)
        phi = ta.FavorFeatures(4, 6, seed=seed)
        place, found = phi.projection, [phi.projection.clone()]
        for _ in range(2):
            phi.redraw()
            found.append(phi.projection.clone())
        assert phi.projection is place
        return found

    first, again = sequence(), sequence()
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(first, 2))


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))), ids=("deepcopy", "pickle"))
def test_copies_are_equal_and_redraw_equally(copied):
    phi = ta.FavorFeatures(4, 6, "hyperbolic", seed=2)
    other, x = copied(phi), torch.randn(3, 4)
    assert torch.equal(phi(x), other(x)) and repr(phi) == repr(other)
    phi.redraw()
    assert not torch.equal(phi.projection, other.projection)
    other.redraw()
    assert torch.equal(phi.projection, other.projection)


def test_features_are_frozen_and_in_the_state_dict():
    query, key, value = (torch.randn(1, 2, 64, 32) * 0.5 for _ in range(3))
    for training in (True, False):
        a, b = (ta.FavorFeatures(32, 256, seed=seed).train(training) for seed in (0, 1))

        def attend(features: ta.FavorFeatures) -> Tensor:
            return ta.linear_attention(query, key, value, feature_map=features)

        assert torch.equal(attend(a), attend(a)) and not torch.equal(attend(a), attend(b))
        fresh = ta.FavorFeatures(32, 256).train(training)
        for module in (b, fresh):  # after a forward, and before any
            module.load_state_dict(a.state_dict())
            assert torch.equal(attend(a), attend(module))
    assert list(a.state_dict()) == ["projection"]
    with pytest.raises(RuntimeError, match="projection"):
        a.load_state_dict(ta.FavorFeatures(32, 128).state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_is_computed_in_float32(kind: str):
    phi = ta.FavorFeatures(HEAD_DIM, 12, kind, seed=0)
    for dtype, real in {torch.float64: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}.items():
        x = torch.randn(5, HEAD_DIM).to(dtype)
        for function in (phi, phi.map_query, phi.map_key):
            assert function(x).dtype == real and torch.equal(function(x), function(x.to(real)))
            assert function(x).shape == (5, phi.out_features)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(function(x), function(x.to(real)))
            assert torch.equal(function(x), function(x.to(real)))


def test_the_projection_moves_with_the_module():
    phi, x = ta.FavorFeatures(4, 6, seed=0), torch.randn(2, 4)
    projection, features = phi.projection.clone(), phi(x)
    assert torch.equal(phi.double().projection, projection.double()) and phi(x.double()).dtype == torch.float64
    assert torch.equal(phi.bfloat16().projection, projection.bfloat16()) and torch.allclose(phi(x), features, rtol=0.1)
    phi.redraw()
    assert phi.projection.dtype == torch.bfloat16
    meta = ta.FavorFeatures(4, 6, device="meta", dtype=torch.float64)
    assert meta.projection.is_meta and meta.projection.dtype == torch.float64 and meta(torch.empty(3, 4, device="meta")).shape == (3, 6)
    meta.to_empty(device="cpu").redraw()
    assert meta.projection.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_query_and_key_maps_are_the_features_but_for_a_factor_per_query(kind: str):
    phi, x = ta.FavorFeatures(HEAD_DIM, 12, kind, seed=0), torch.randn(5, HEAD_DIM, dtype=torch.float64)
    assert torch.equal(phi.map_key(x), phi(x))
    factors = phi.map_query(x) / phi(x)
    assert (factors > 0).all() and torch.allclose(factors, factors[:, :1].expand_as(factors), rtol=1e-12)
    if kind in STABLE:
        assert (phi.map_query(x).amax(-1) == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_blind_to_the_others(kind: str):
    phi, x = ta.FavorFeatures(HEAD_DIM, 12, kind, seed=0), torch.randn(2, 3, 9, HEAD_DIM)
    others = torch.tensor([1e4, 0.0, math.nan, math.inf]).view(4, 1, 1, 1, 1) * torch.randn(2, 3, 8, HEAD_DIM)
    for function in (phi, phi.map_query, phi.map_key):
        for other in others:
            assert torch.equal(function(torch.cat([x[:, :, :1], other], 2))[:, :, 0], function(x)[:, :, 0])
        assert torch.allclose(function(x[1:, 2:, 4:5])[0, 0], function(x)[1, 2, 4:5], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_causal_attention_is_blind_to_the_future_and_decodes_to_the_same(kind: str):
    phi = ta.FavorFeatures(HEAD_DIM, 64, kind, seed=0).eval()
    query, key, value = (torch.randn(2, 3, 20, HEAD_DIM) * 0.5 for _ in range(3))
    full = ta.linear_attention(query, key, value, feature_map=phi, causal=True)
    later = key.clone()
    later[:, :, 11:] = 1e3 * torch.randn(2, 3, 9, HEAD_DIM)
    assert torch.equal(ta.linear_attention(query, later, value, feature_map=phi, causal=True)[:, :, :11], full[:, :, :11])
    out, state = ta.linear_attention(*(x[:, :, :1] for x in (query, key, value)), feature_map=phi, causal=True, return_state=True)
    outs = [out]
    for t in range(1, 20):
        out, state = ta.linear_attention_step(*(x[:, :, t : t + 1] for x in (query, key, value)), state, feature_map=phi)
        outs.append(out)
    assert torch.allclose(torch.cat(outs, 2), full, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", (1, 64, 256))
def test_finite_input_gives_finite_features(head_dim: int, kind: str, dtype: torch.dtype):
    phi = ta.FavorFeatures(head_dim, 40, kind, seed=0)
    for size in (0.0, 1e-6, 1.0, 1e1, 1e2, 1e4, 1e15):
        if size > torch.finfo(dtype).max / 8:
            continue
        x = (size * torch.randn(7, head_dim)).to(dtype)
        for function in (phi, phi.map_query, phi.map_key):
            features = function(x)
            wide = x.to(features.dtype).requires_grad_()
            (grad,) = torch.autograd.grad(function(wide).sum(), wide)
            assert features.isfinite().all() and grad.isfinite().all(), (size, function)
            if kind in STABLE:
                assert (features >= 0).all()
                assert (features > 0).all() if function != phi.map_query else (features.amax(-1) == 1).all()


def test_exponents_are_clamped_at_the_stated_limits():
    for kind in STABLE:
        phi = ta.FavorFeatures(1, 2, kind)
        phi.projection.copy_(torch.tensor([[20.0], [11.0]]))
        x = torch.tensor([[11.0], [-40.0]], requires_grad=True)  # exponents 159.5, 60.5 and below -1000
        for features, size in ((phi(x), 1.0), (phi(x.double()), math.exp(159.5 - LIMIT))):
            features = features.detach() * phi.out_features**0.5
            assert math.isclose(float(features[0, 0]) / math.exp(LIMIT), size, rel_tol=1e-4)
            assert math.isclose(float(features[0, 1]), math.exp(60.5), rel_tol=1e-4)
        assert torch.allclose(phi(x)[1, :2].log(), torch.full((2,), -LIMIT - 0.5 * math.log(phi.out_features)))
        assert torch.autograd.grad(phi(x)[:, 0].sum(), x)[0].eq(0).all()
    phi = ta.FavorFeatures(1, 1, "trigonometric")
    assert torch.allclose(phi(torch.tensor([[10.0], [30.0]])).double().norm(dim=-1).log(), torch.tensor([50.0, LIMIT]).double())


@pytest.mark.parametrize("kind", STABLE)
def test_out_is_a_mean_of_the_values_at_any_size(kind: str):
    phi = ta.FavorFeatures(16, 32, kind, seed=0)
    for size_q, size_k in itertools.product((0.0, 1.0, 30.0, 1e4), repeat=2):
        query, key, value = size_q * torch.randn(1, 2, 12, 16), size_k * torch.randn(1, 2, 12, 16), torch.randn(1, 2, 12, 16)
        key[:, 1, 3] = 0.0
        inputs = [x.requires_grad_() for x in (query, key, value)]
        out = ta.linear_attention(query, key, value, feature_map=phi)
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sin().sum(), inputs))
        low, high = value.amin(2, keepdim=True), value.amax(2, keepdim=True)
        assert ((out >= low - 1e-4) & (out <= high + 1e-4)).all()
        one = ta.linear_attention(query, key[:, :, :1], value[:, :, :1], feature_map=phi)
        assert torch.allclose(one, value[:, :, :1].expand_as(one), rtol=1e-4, atol=1e-5)


def test_hidden_keys_count_nowhere_whatever_they_hold():
    phi = ta.FavorFeatures(HEAD_DIM, 32, seed=0)
    query, key, value = (torch.randn(2, 3, 9, HEAD_DIM) for _ in range(3))
    want = ta.linear_attention(query, key[:, :, :6], value[:, :, :6], feature_map=phi)
    mask = (torch.arange(9) < 6).expand(2, 9)
    for junk in (0.0, 1e4, math.nan, math.inf):
        hidden = key.clone()
        hidden[:, :, 6:] = junk
        hidden.requires_grad_()
        out = ta.linear_attention(query, hidden, value, feature_map=phi, key_mask=mask)
        (grad,) = torch.autograd.grad(out.sin().sum(), hidden)
        assert torch.allclose(out, want, atol=1e-6) and (grad[:, :, 6:] == 0).all() and grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_without_normalisation_the_plain_features_give_the_kernel_sum(kind: str):
    phi = ta.FavorFeatures(HEAD_DIM, 32, kind, seed=0)
    query, key, value = (torch.randn(2, 3, 9, HEAD_DIM, dtype=torch.float64) for _ in range(3))
    out = ta.linear_attention(query, key, value, feature_map=(phi.forward, phi.forward), normalize=False)
    assert torch.allclose(out, phi(query) @ phi(key).mT @ value)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str):
    phi = ta.FavorFeatures(3, 5, kind, seed=0, dtype=torch.float64)
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    for function in (phi, phi.map_query, phi.map_key):
        assert torch.autograd.gradcheck(function, (x,), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, (x,))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ta.linear_attention(query, key, value, feature_map=phi, causal=True)

    assert torch.autograd.gradcheck(attend, tuple(torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)))


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_over_inputs_and_over_projections(kind: str):
    phi, x = ta.FavorFeatures(4, 6, kind, seed=0), torch.randn(3, 5, 2, 4)
    for function in (phi, phi.map_query, phi.map_key):
        assert torch.allclose(torch.vmap(function)(x), function(x), atol=1e-6)
        assert torch.allclose(torch.vmap(function, in_dims=2, out_dims=2)(x), function(x), atol=1e-6)
    maps = [ta.FavorFeatures(4, 6, kind, seed=seed) for seed in range(3)]
    stacked = {"projection": torch.stack([one.projection for one in maps])}
    found = torch.vmap(lambda state, x: torch.func.functional_call(phi, state, (x,)))(stacked, x)
    assert torch.allclose(found, torch.stack([one(row) for one, row in zip(maps, x)]), atol=1e-6)


def test_compiles_in_one_graph():
    torch.compiler.reset()
    x = torch.randn(2, 5, 4, requires_grad=True)
    for kind in KINDS:
        phi = ta.FavorFeatures(4, 6, kind, seed=0)

        def both(x: Tensor, phi: ta.FavorFeatures = phi) -> Tensor:
            return phi.map_query(x) * phi.map_key(x)

        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            out, want = compiled(x), both(x)
            assert torch.allclose(out, want, atol=1e-6)
            assert torch.allclose(*(torch.autograd.grad(o.sin().sum(), x)[0] for o in (out, want)), atol=1e-6)
            phi.redraw()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.allclose(compiled(x), both(x), atol=1e-6)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("head_dim", {"head_dim": 0}),
        ("head_dim", {"head_dim": 2.0}),
        ("num_features", {"num_features": -1}),
        ("kind", {"kind": "cosine"}),
        ("seed", {"seed": 0.5}),
    ],
)
def test_constructor_errors_name_the_argument(name: str, arguments: dict):
    with pytest.raises((ValueError, TypeError), match=f"^{name}:"):
        ta.FavorFeatures(**{"head_dim": 4, "num_features": 6} | arguments)


def test_errors_name_the_argument():
    phi = ta.FavorFeatures(4, 6)
    for function, name in ((phi, "x"), (phi.map_query, "query"), (phi.map_key, "key")):
        for bad in (torch.randn(2, 5), torch.tensor(1.0)):
            with pytest.raises(ValueError, match=rf"^{name}: expected shape \(\.\.\., 4\), got"):
                function(bad)
        for bad in (torch.zeros(2, 4, dtype=torch.long), [[0.0] * 4]):
            with pytest.raises(TypeError, match=f"^{name}: expected a floating-point tensor"):
                function(bad)


@pytest.mark.parametrize("masked", (False, True))
def test_replacement_in_a_model_scales_as_the_model_does_and_hides_padding(masked: bool):
    query, key, value = (torch.randn(2, 3, 7, HEAD_DIM) for _ in range(3))
    kept = torch.arange(7) < torch.tensor([[7], [4]])
    mask = kept[:, None, None].expand(2, 1, 7, 7) if masked else None
    replacement, layer = Replacement(), torch.nn.Identity()

    def outs(kind: str, num_features: int = 0, seed: int = 0, value: Tensor = value) -> Tensor:
        replacement.use(kind, num_features, seed)
        return replacement(layer, query, key, value, mask, scaling=0.3, dropout=0.0)[0].transpose(1, 2)

    exact = outs("exact")
    assert torch.allclose(exact, F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3), atol=1e-6)
    pairs = 3 * (49 + 16 if masked else 98)
    assert torch.cat(replacement.measured, 1).shape == (2, pairs)
    kept = kept if masked else torch.ones_like(kept)
    mean = (value * kept[:, None, :, None]).sum(2, keepdim=True) / kept.sum(1)[:, None, None, None]
    assert torch.allclose(outs("uniform"), mean.expand_as(value), atol=1e-6)
    few, many = (sum((outs("positive", m, seed) - exact).norm() for seed in range(4)) for m in (16, 1024))
    assert many < 0.5 * few
    if masked:
        junk = value.masked_fill(~kept[:, None, :, None], 1e9)
        assert torch.allclose(outs("positive", 16, value=junk), outs("positive", 16), atol=1e-5)
