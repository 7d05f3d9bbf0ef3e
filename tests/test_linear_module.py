"""ta.LinearAttention against its definition in float64, and its state as a decode cache: any cut of a sequence gives the same."""

import copy
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiled_attention as ta

EMBED, HEADS = 12, 3
MAPS = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "exp": torch.exp,
    "identity": lambda x: x,
}


class Squares(nn.Module):
    """A learned map with other features than head_dim."""

    def __init__(self, head_dim: int, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(head_dim, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype)).square() + 0.1


def feature_maps() -> dict:
    return {
        "elu": "elu",
        "exp": "exp",
        "pair": ("relu", "elu"),
        "callable": torch.sigmoid,
        "module": Squares(EMBED // HEADS, 6),
        "pair of modules": (Squares(EMBED // HEADS, 6), Squares(EMBED // HEADS, 6)),
        "mixed pair": ["elu", nn.Softplus()],
        "favor": ta.FavorFeatures(EMBED // HEADS, 16, seed=0),
        "hyperbolic favor": ta.FavorFeatures(EMBED // HEADS, 16, "hyperbolic", seed=0),
    }


def definition(m: ta.LinearAttention, x: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, kv, k_sum) in float64, from the explicit matrix of weights."""
    m, x = copy.deepcopy(m).double(), x.double()
    query, key, value = (p(x).unflatten(-1, (m.num_heads, m.head_dim)).transpose(1, 2) for p in (m.q_proj, m.k_proj, m.v_proj))
    pair = (m.query_map, m.key_map) if m.is_pair else (m.feature_map, m.feature_map)
    phi_q, phi_k = (MAPS[one](y) if isinstance(one, str) else one(y) for one, y in zip(pair, (query, key)))
    if key_mask is not None:
        phi_k = phi_k * key_mask[:, None, :, None]
    weights = phi_q @ phi_k.mT
    weights = weights.tril() if m.causal else weights
    total = weights.sum(-1, keepdim=True)
    out = torch.where(total == 0, 0.0, weights @ value / torch.where(total == 0, 1.0, total))
    return m.out_proj(out.transpose(1, 2).flatten(-2)), phi_k.mT @ value, phi_k.sum(-2)


def padding(batch: int, seqlen: int) -> Tensor:
    mask = torch.rand(batch, seqlen) < 0.7
    mask[0] = False
    return mask


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("name", feature_maps())
def test_values_state_and_gradients_are_those_of_the_definition(name: str, bias: bool, causal: bool, masked: bool):
    m = ta.LinearAttention(EMBED, HEADS, feature_map=feature_maps()[name], causal=causal, bias=bias, dtype=torch.float64).double()
    x = torch.randn(3, 7, EMBED, dtype=torch.float64, requires_grad=True)
    key_mask = padding(3, 7) if masked else None
    want = definition(m, x, key_mask)
    out, state = m(x, key_mask=key_mask, return_state=True)
    assert isinstance(state, ta.LinearState) and torch.equal(m(x, key_mask=key_mask), out)
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip((out, *state), want))
    leaves = [x]
    got, right = (torch.autograd.grad(sum(t.sin().sum() for t in found), leaves) for found in ((out, *state), want))
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(got, right))


def test_gradients_of_the_parameters():
    m = ta.LinearAttention(EMBED, HEADS, feature_map=Squares(EMBED // HEADS, 5)).double()
    x = torch.randn(2, 5, EMBED, dtype=torch.float64)
    names, values = zip(*m.named_parameters())

    def run(*parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, state = torch.func.functional_call(m, dict(zip(names, parameters)), (x,), {"return_state": True})
        return out, *state

    assert torch.autograd.gradcheck(run, tuple(p.detach().requires_grad_() for p in values))
    assert {name.split(".")[0] for name in names} == {"q_proj", "k_proj", "v_proj", "out_proj", "feature_map"}


@pytest.mark.parametrize("name", feature_maps())
def test_any_cut_of_the_sequence_gives_the_same(name: str):
    m = ta.LinearAttention(EMBED, HEADS, feature_map=feature_maps()[name]).double().eval()
    x, key_mask = torch.randn(2, 9, EMBED, dtype=torch.float64), padding(2, 9)
    for mask in (None, key_mask):
        full, last = m(x, key_mask=mask, return_state=True)
        for cuts in ([9], [1] * 9, [4, 5], [0, 3, 1, 0, 5], [8, 1]):
            state, outs, start = None, [], 0
            for n in cuts:
                piece = slice(start, start + n)
                before = None if state is None else [part.clone() for part in state]
                given = state
                out, state = m(x[:, piece], key_mask=None if mask is None else mask[:, piece], state=given, return_state=True)
                assert before is None or all(torch.equal(a, b) for a, b in zip(before, given))
                assert torch.equal(m(x[:, piece], key_mask=None if mask is None else mask[:, piece], state=given), out)
                outs.append(out)
                start += n
            assert torch.allclose(torch.cat(outs, 1), full, atol=1e-10)
            assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(state, last))


def test_decoding_in_inference_keeps_a_state_of_constant_size():
    m = ta.LinearAttention(EMBED, HEADS).eval()
    x = torch.randn(2, 40, EMBED)
    with torch.inference_mode():
        full, (out, state) = m(x), m(x[:, :1], return_state=True)
        outs = [out]
        for t in range(1, 40):
            out, state = m(x[:, t : t + 1], state=state, return_state=True)
            outs.append(out)
            assert state.kv.shape == (2, HEADS, EMBED // HEADS, EMBED // HEADS) and state.k_sum.shape == (2, HEADS, EMBED // HEADS)
    assert torch.allclose(torch.cat(outs, 1), full, atol=1e-5)


def test_gradients_flow_through_the_state():
    m = ta.LinearAttention(EMBED, HEADS).double()
    x = torch.randn(2, 6, EMBED, dtype=torch.float64, requires_grad=True)
    whole = torch.autograd.grad(m(x).sin().sum(), x)[0]
    first, state = m(x[:, :4], return_state=True)
    second, state = m(x[:, 4:5], state=state, return_state=True)
    third = m(x[:, 5:], state=state)
    assert torch.allclose(torch.autograd.grad(torch.cat([first, second, third], 1).sin().sum(), x)[0], whole, atol=1e-10)


def test_a_causal_module_is_blind_to_the_future_and_to_padding():
    for name, feature_map in feature_maps().items():
        m = ta.LinearAttention(EMBED, HEADS, feature_map=feature_map)
        x = torch.randn(2, 9, EMBED)
        later = torch.cat([x[:, :5], 10 * torch.randn(2, 4, EMBED)], 1)
        assert torch.allclose(m(x)[:, :5], m(later)[:, :5], atol=1e-5), name
        padded = torch.cat([torch.randn(2, 2, EMBED), x], 1)
        out = m(padded, key_mask=(torch.arange(11) >= 2).expand(2, 11))
        assert torch.allclose(out[:, 2:], m(x), atol=1e-5), name


def test_parameters_buffers_and_initialisation():
    m = ta.LinearAttention(64, 4)
    assert set(m.state_dict()) == {f"{name}.{part}" for name in ("q_proj", "k_proj", "v_proj", "out_proj") for part in ("weight", "bias")}
    for name, p in m.named_parameters():
        bound = math.sqrt(6 / 128)
        assert (p == 0).all() if name.endswith("bias") else 0.9 * bound < p.abs().max() <= bound
    assert not any(name.endswith("bias") for name in ta.LinearAttention(64, 4, bias=False).state_dict())
    assert ta.LinearAttention(8, 2, device="meta", dtype=torch.float64).q_proj.weight.is_meta
    favor = ta.LinearAttention(8, 2, feature_map=ta.FavorFeatures(4, 6))
    assert "feature_map.projection" in favor.state_dict()
    pair = ta.LinearAttention(8, 2, feature_map=("elu", Squares(4, 4)))
    assert {name for name in pair.state_dict() if "map" in name} == {"key_map.linear.weight", "key_map.linear.bias"}


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))), ids=("deepcopy", "pickle"))
@pytest.mark.parametrize("name", feature_maps())
def test_copies_and_state_dicts(name: str, copied):
    x = torch.randn(2, 5, EMBED)
    m = ta.LinearAttention(EMBED, HEADS, feature_map=feature_maps()[name])
    other = copied(m)
    assert torch.equal(m(x), other(x)) and repr(m) == repr(other)
    other.reset_parameters()
    assert not torch.equal(m(x), other(x))
    fresh = ta.LinearAttention(EMBED, HEADS, feature_map=feature_maps()[name])
    fresh.load_state_dict(m.state_dict())
    assert torch.equal(fresh(x), m(x))


def test_projections_are_called_as_modules():
    m, x = ta.LinearAttention(EMBED, HEADS), torch.randn(2, 5, EMBED)
    calls = []
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        getattr(m, name).register_forward_hook(lambda *_, name=name: calls.append(name))
    m(x)
    assert sorted(calls) == ["k_proj", "out_proj", "q_proj", "v_proj"]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", feature_maps())
def test_low_precision_keeps_its_state_in_float32(name: str, dtype: torch.dtype):
    m, x = ta.LinearAttention(EMBED, HEADS, feature_map=feature_maps()[name]), torch.randn(2, 9, EMBED)
    want = definition(m, x)[0]
    low = copy.deepcopy(m).to(dtype)
    out, state = low(x.to(dtype), return_state=True)
    again, state = low(x[:, :1].to(dtype), state=state, return_state=True)
    assert out.dtype == again.dtype == dtype and state.kv.dtype == state.k_sum.dtype == torch.float32
    assert (out.double() - want).abs().max() < 0.06 * want.abs().max()


@pytest.mark.parametrize("name", feature_maps())
def test_autocast(name: str):
    m, x = ta.LinearAttention(EMBED, HEADS, feature_map=feature_maps()[name]), torch.randn(2, 9, EMBED)
    want = definition(m, x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out, state = m(x[:, :8], return_state=True)
        last, state = m(x[:, 8:], state=state, return_state=True)
    assert out.dtype == last.dtype == torch.bfloat16 and state.kv.dtype == torch.float32
    assert (torch.cat([out, last], 1).double() - want).abs().max() < 0.06 * want.abs().max()


def test_zero_sizes():
    m = ta.LinearAttention(EMBED, HEADS)
    for batch, seqlen in itertools.product((0, 2), (0, 3)):
        out, state = m(torch.randn(batch, seqlen, EMBED), return_state=True)
        assert out.shape == (batch, seqlen, EMBED) and state.kv.shape == (batch, HEADS, 4, 4)
        assert seqlen or (state.kv == 0).all()


@pytest.mark.parametrize("name", ("elu", "mixed pair", "module", "favor"))
def test_compiles_in_one_graph(name: str):
    torch.compiler.reset()
    m, x, mask = ta.LinearAttention(EMBED, HEADS, feature_map=feature_maps()[name]), torch.randn(2, 7, EMBED), padding(2, 7)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    (out, state), (want, right) = (module(x, key_mask=mask, return_state=True) for module in (compiled, m))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip((out, *state), (want, *right)))
    found, wanted = (torch.autograd.grad(o.sin().sum(), list(m.parameters())) for o in (out, want))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted))
    with torch.no_grad():
        for n in (1, 3):
            (out, state), (want, right) = (module(x[:, :n], state=right, return_state=True) for module in (compiled, m))
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip((out, *state), (want, *right)))


@pytest.mark.parametrize("name", ("elu", "favor"))
def test_exports_with_a_dynamic_length(name: str):
    m = ta.LinearAttention(EMBED, HEADS, feature_map=feature_maps()[name]).eval()
    shapes = {"x": {1: torch.export.Dim("seqlen", min=2)}}
    exported = torch.export.export(m, (torch.randn(2, 7, EMBED),), dynamic_shapes=shapes).module()
    x = torch.randn(2, 33, EMBED)
    assert torch.allclose(exported(x), m(x), atol=1e-5)


def test_vmap_over_modules():
    models = [ta.LinearAttention(EMBED, HEADS, feature_map=ta.FavorFeatures(4, 8)) for _ in range(3)]
    x = torch.randn(3, 2, 7, EMBED)
    parameters, buffers = torch.func.stack_module_state(models)
    found = torch.vmap(lambda p, b, x: torch.func.functional_call(models[0], (p, b), (x,)))(parameters, buffers, x)
    assert torch.allclose(found, torch.stack([m(one) for m, one in zip(models, x)]), atol=1e-5)


STATE = (torch.zeros(2, HEADS, 4, 4), torch.zeros(2, HEADS, 4))
BAD = {
    "x of rank 2": ("x", {"x": torch.zeros(5, EMBED)}),
    "x of other width": ("x", {"x": torch.zeros(2, 5, EMBED - 1)}),
    "integer x": ("x", {"x": torch.zeros(2, 5, EMBED, dtype=torch.long)}),
    "x that is no tensor": ("x", {"x": [0.0]}),
    "float key_mask": ("key_mask", {"key_mask": torch.ones(2, 5)}),
    "key_mask that is no tensor": ("key_mask", {"key_mask": [True]}),
    "key_mask of other shape": ("key_mask", {"key_mask": torch.ones(2, 6, dtype=torch.bool)}),
    "key_mask of other rank": ("key_mask", {"key_mask": torch.ones(5, dtype=torch.bool)}),
    "state that is no pair": ("state", {"state": torch.zeros(2, 2)}),
    "state of other batch": ("state", {"state": tuple(part[:1] for part in STATE)}),
    "state of other heads": ("state", {"state": tuple(part[:, :2] for part in STATE)}),
    "state of other head_dim": ("state", {"state": (STATE[0][..., :3], STATE[1])}),
    "state of two kinds of features": ("state", {"state": (STATE[0], STATE[1][..., :3])}),
    "state of other features": ("state", {"state": (STATE[0][..., :3, :], STATE[1][..., :3])}),
    "state of other dtype": ("state", {"state": tuple(part.double() for part in STATE)}),
    "state of other device": ("state", {"state": tuple(part.to("meta") for part in STATE)}),
}


@pytest.mark.parametrize("seqlen", (5, 1))
@pytest.mark.parametrize("name, changed", BAD.values(), ids=list(BAD))
def test_errors_name_the_argument(name: str, changed: dict, seqlen: int):
    m = ta.LinearAttention(EMBED, HEADS)
    arguments = {"x": torch.zeros(2, 5, EMBED)} | changed
    if seqlen == 1 and isinstance(arguments["x"], Tensor):
        arguments["x"] = arguments["x"][..., :1, :]
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        m(**arguments)


def test_a_state_belongs_to_causal_attention():
    state = ta.LinearState(*STATE)
    for seqlen in (1, 5):
        with pytest.raises(ValueError, match="^state: expected None with causal=False"):
            ta.LinearAttention(EMBED, HEADS, causal=False)(torch.zeros(2, seqlen, EMBED), state=state)


@pytest.mark.parametrize("sizes", ((0, 1), (8, 0), (8, -2), (8, 3)))
def test_constructor_sizes(sizes: tuple[int, int]):
    with pytest.raises(ValueError, match="^embed_dim, num_heads:"):
        ta.LinearAttention(*sizes)


@pytest.mark.parametrize("bad", ("gelu", None, 3, ("elu",), ("elu", "gelu"), ("elu", "elu", "elu"), ta.FavorFeatures(8, 4)), ids=str)
def test_constructor_feature_maps(bad):
    with pytest.raises(ValueError, match="^feature_map:"):
        ta.LinearAttention(8, 2, feature_map=bad)
