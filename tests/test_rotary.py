"""Rotary embedding: the formula, its scaling variants beside transformers', and its place in attention."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, jvp, vmap

import tiled_attention as ta
from tiled_attention.testing import DTYPES, LAYOUTS, lay_out
from tiled_attention.weights import attention_with_weights

F64 = torch.float64
PAIRINGS = pytest.mark.parametrize("interleaved", (False, True))


def randn(*shape: int, dtype=F64) -> Tensor:
    return torch.randn(shape, dtype=F64).to(dtype)


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn as in DeepSeek": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 0.7,
    },
    "yarn as in gpt-oss": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False, "rope_theta": 10000.0,
    },
    "yarn with its factor": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.9},
}  # fmt: skip


# The formula


@PAIRINGS
@pytest.mark.parametrize("head_dim", (2, 6, 64))
def test_pairs_turn_by_the_position(head_dim, interleaved):
    rotary = ta.RotaryEmbedding(head_dim, 500.0, interleaved)
    query, key = randn(2, 4, 5, head_dim), randn(2, 2, 9, head_dim)
    ours = rotary(query, key)
    for x, turned, positions in ((query, ours[0], torch.arange(4, 9)), (key, ours[1], torch.arange(9))):
        torch.testing.assert_close(turned, ta.reference.rotary_embedding(x, positions, 500.0, interleaved), rtol=1e-13, atol=1e-13)
        other = ta.numpy_reference.rotary_embedding(x.numpy(), positions.numpy(), 500.0, interleaved)
        torch.testing.assert_close(turned, torch.from_numpy(other), rtol=1e-12, atol=1e-12)


@PAIRINGS
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_as_exact_as_their_dtype_at_a_million(dtype, interleaved):
    x = randn(1, 2, 4, 8, dtype=dtype)
    positions = torch.tensor([0, 999_999, 1_000_000, 1_048_575])
    ours, _ = ta.RotaryEmbedding(8, interleaved=interleaved)(x, x, positions)
    exact = ta.reference.rotary_embedding(x.double(), positions, interleaved=interleaved)
    assert ours.dtype == dtype
    assert (ours.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * x.double().abs().max()


@PAIRINGS
def test_scores_depend_on_differences_alone(interleaved):
    rotary = ta.RotaryEmbedding(8, interleaved=interleaved)
    query, key = randn(1, 1, 3, 8), randn(1, 1, 4, 8)
    scores = []
    for shift in (0, 1, 77, -5, 100_000):
        turned = rotary(query, key, (torch.tensor([3, 4, 9]) + shift, torch.tensor([0, 1, 2, 5]) + shift))
        scores.append(turned[0] @ turned[1].mT)
    assert all(torch.allclose(other, scores[0], rtol=0, atol=1e-9) for other in scores[1:])


def test_positions_of_every_shape():
    rotary = ta.RotaryEmbedding(4)
    query, key = randn(2, 3, 2, 5, 4), randn(2, 3, 1, 5, 4)
    for shape in ((5,), (3, 5), (2, 3, 5), (2, 1, 5), (1, 5)):
        positions = torch.randint(-50, 50, shape)
        for x, turned in zip((query, key), rotary(query, key, positions)):
            expected = ta.reference.rotary_embedding(x, positions.expand(2, 3, 5)[..., None, :])
            torch.testing.assert_close(turned, expected)
    fractions = torch.linspace(0, 2, 5)
    torch.testing.assert_close(rotary(query, key, fractions)[0], ta.reference.rotary_embedding(query, fractions))


@PAIRINGS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_order_in_memory(layout, interleaved):
    x = lay_out(randn(2, 3, 5, 6, dtype=torch.float32), layout)
    ours, _ = ta.RotaryEmbedding(6, interleaved=interleaved)(x, x)
    torch.testing.assert_close(ours, ta.reference.rotary_embedding(x, torch.arange(5), interleaved=interleaved), rtol=1e-6, atol=1e-6)
    if layout == "heads_last":
        assert ours.transpose(-3, -2).is_contiguous()


@PAIRINGS
def test_empty_sizes(interleaved):
    rotary = ta.RotaryEmbedding(4, interleaved=interleaved, scaling=SCALINGS["dynamic"])
    for batch, heads, seqlen in itertools.product((0, 1), (0, 2), (0, 3)):
        x = randn(batch, heads, seqlen, 4)
        assert rotary(x, x)[0].shape == x.shape


@PAIRINGS
def test_only_the_first_features_turn(interleaved):
    query, key = randn(2, 4, 5, 10), randn(2, 2, 9, 10)
    whole = ta.RotaryEmbedding(6, interleaved=interleaved)
    for rotary in (
        ta.RotaryEmbedding(10, interleaved=interleaved, rotary_dim=6),
        ta.RotaryEmbedding(10, interleaved=interleaved, scaling={"rope_type": "default", "partial_rotary_factor": 0.6}),
    ):
        expected = whole(query[..., :6].contiguous(), key[..., :6].contiguous())
        for x, ours, first in zip((query, key), rotary(query, key), expected):
            torch.testing.assert_close(ours, torch.cat([first, x[..., 6:]], -1))
    static = {"rope_type": "ntk", "factor": 3.0, "partial_rotary_factor": 0.5}
    partial = ta.RotaryEmbedding(8, scaling=static).tables(torch.arange(9))
    torch.testing.assert_close(partial, ta.RotaryEmbedding(4, scaling={"rope_type": "ntk", "factor": 3.0}).tables(torch.arange(9)))


def test_nothing_is_lost_with_the_module():
    rotary = ta.RotaryEmbedding(8, scaling=SCALINGS["yarn"])
    x = randn(1, 1, 3, 8)
    expected = rotary(x, x)[0]
    for other in (copy.deepcopy(rotary).half(), pickle.loads(pickle.dumps(rotary))):
        assert not other.state_dict() and torch.equal(other(x, x)[0], expected)


def test_a_kept_table_changes_nothing():
    rotary = ta.RotaryEmbedding(8, scaling=SCALINGS["yarn"])
    tensors = {length: randn(1, 2, length, 8, dtype=torch.float32) for length in (300, 5, 700, 1, 0)}
    for length, x in tensors.items():
        fresh = ta.RotaryEmbedding(8, scaling=SCALINGS["yarn"])
        assert torch.equal(rotary(x, x)[0], fresh(x, x)[0])
        assert torch.equal(rotary(x, x)[0], fresh(x, x, torch.arange(length))[0])
    assert torch.equal(rotary(x.double(), x.double())[0], fresh(x.double(), x.double())[0])
    x = tensors[700].clone().requires_grad_()
    other = ta.RotaryEmbedding(8)
    with torch.inference_mode():
        expected, _ = other(tensors[700], tensors[700])
    out, _ = other(x, x)
    out.sum().backward()
    assert torch.equal(out, expected) and x.grad.isfinite().all()
    grad = torch.func.grad(lambda x: other(x, x)[0].square().sum())(tensors[5])
    torch.testing.assert_close(grad, 2 * tensors[5])


# Scaling


def _of_transformers(config: dict, head_dim: int, length: int) -> tuple[Tensor, float]:
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    parameters = {"rope_theta": 10000.0, **config}
    longest = config.get("original_max_position_embeddings", 64)
    llama = transformers.LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=longest, rope_parameters=parameters
    )
    return rope.ROPE_INIT_FUNCTIONS[config["rope_type"]](llama, None, seq_len=length)


@pytest.mark.parametrize("length", (4, 16, 17, 50))
@pytest.mark.parametrize("head_dim", (4, 64, 128))
@pytest.mark.parametrize("name", SCALINGS)
def test_scaling_is_that_of_transformers(name, head_dim, length):
    frequencies, factor = _of_transformers(SCALINGS[name], head_dim, length)
    positions = torch.arange(length)
    cos, sin = ta.RotaryEmbedding(head_dim, scaling=SCALINGS[name]).tables(positions)
    angles = positions[:, None] * frequencies.double()
    torch.testing.assert_close(cos, (angles.cos() * factor).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin, (angles.sin() * factor).float(), rtol=1e-5, atol=1e-5)
    if name != "dynamic" or length > 16:
        plain, _ = ta.RotaryEmbedding(head_dim).tables(positions)
        assert (cos - plain).abs().max() > 1e-3


def test_turning_is_that_of_llama_and_of_gptj():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    query, key = randn(2, 4, 6, 8), randn(2, 2, 6, 8)
    halves = ta.RotaryEmbedding(8)
    cos, sin = (torch.cat([table, table], -1)[None] for table in halves.tables(torch.arange(6), dtype=F64))
    torch.testing.assert_close(halves(query, key), llama.apply_rotary_pos_emb(query, key, cos, sin))
    cos, sin = (table[None] for table in halves.tables(torch.arange(6), dtype=F64))
    theirs = gptj.apply_rotary_pos_emb(query.transpose(1, 2), sin, cos).transpose(1, 2)
    torch.testing.assert_close(ta.RotaryEmbedding(8, interleaved=True)(query, key)[0], theirs)


@pytest.mark.parametrize("factor", (1.0, 8.0))
def test_ntk_leaves_the_fastest_pair_and_slows_the_slowest_by_factor(factor):
    ours = ta.RotaryEmbedding(16, scaling=ta.RotaryScaling("ntk", factor))
    frequencies = ours.tables(torch.tensor([1.0]), dtype=F64)[1].asin()[0]
    plain = 10000.0 ** (-torch.arange(8, dtype=F64) / 8)
    torch.testing.assert_close(frequencies[0], plain[0])
    torch.testing.assert_close(frequencies[-1], plain[-1] / factor)
    dynamic = ta.RotaryEmbedding(16, scaling=ta.RotaryScaling("dynamic", 1.0, 32))
    static = ta.RotaryEmbedding(16, scaling=ta.RotaryScaling("ntk", 3.0))
    for table, other in zip(dynamic.tables(torch.arange(96)), static.tables(torch.arange(96))):  # 96 / 32 = 3
        torch.testing.assert_close(table, other)


def test_dynamic_scaling_has_one_length_for_query_and_key():
    rotary = ta.RotaryEmbedding(8, scaling=SCALINGS["dynamic"])
    query, key, value = randn(1, 2, 3, 8), randn(1, 2, 40, 8), randn(1, 2, 40, 8)
    longer = torch.cat([torch.zeros(1, 2, 37, 8, dtype=F64), query], 2)
    ours = ta.attention(query, key, value, rotary=rotary)
    torch.testing.assert_close(ours, ta.attention(longer, key, value, rotary=rotary)[:, :, 37:])
    ends = rotary(query, key, (torch.tensor([0, 1, 2]), torch.arange(40)))[0]
    cos, sin = rotary.tables(torch.arange(3), length=40, dtype=F64)
    torch.testing.assert_close(ends, rotary.turn(query, cos, sin))


# In attention

OFFSETS = {"default": None, "number": 3, "list": [0, 7], "tensor": torch.tensor([-2, 4])}


def turned(rotary: ta.RotaryEmbedding, query: Tensor, key: Tensor, query_offset) -> tuple[Tensor, Tensor]:
    offset = key.shape[-2] - query.shape[-2] if query_offset is None else query_offset
    offset = torch.as_tensor(offset).reshape(-1, 1, 1)
    query = ta.reference.rotary_embedding(query, torch.arange(query.shape[-2]) + offset, rotary.base, rotary.interleaved)
    return query, ta.reference.rotary_embedding(key, torch.arange(key.shape[-2]), rotary.base, rotary.interleaved)


@PAIRINGS
@pytest.mark.parametrize("offset", OFFSETS)
def test_attention_turns_query_and_key(offset, interleaved, isa):
    rotary = ta.RotaryEmbedding(8, interleaved=interleaved)
    query, key, value = randn(2, 4, 5, 8), randn(2, 2, 11, 8), randn(2, 2, 11, 3)
    options = dict(mask=ta.Causal(), query_offset=OFFSETS[offset], alibi_slopes=ta.alibi_slopes(4), dropout_p=0.25)
    by_hand = turned(rotary, query, key, OFFSETS[offset])
    torch.manual_seed(3)
    out, lse = ta.attention(query, key, value, rotary=rotary, return_lse=True, **options)
    torch.manual_seed(3)
    torch.testing.assert_close((out, lse), ta.attention(*by_hand, value, return_lse=True, **options), rtol=1e-12, atol=1e-12)
    torch.manual_seed(3)
    weights = ta.attention_weights(query, key, rotary=rotary, **options)
    torch.manual_seed(3)
    torch.testing.assert_close(weights, ta.attention_weights(*by_hand, **options), rtol=1e-12, atol=1e-12)
    torch.manual_seed(3)
    both = attention_with_weights(query, key, value, rotary=rotary, **options)
    torch.testing.assert_close(both, (out, weights))


def test_a_cache_of_turned_keys_gives_what_the_whole_gives():
    rotary = ta.RotaryEmbedding(8)
    query, key, value = randn(1, 2, 9, 8), randn(1, 2, 9, 8), randn(1, 2, 9, 8)
    whole = ta.attention(query, key, value, mask=ta.Causal(), rotary=rotary)
    for t in range(9):
        step = ta.attention(query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1], rotary=rotary)
        torch.testing.assert_close(step, whole[:, :, t : t + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_output_keeps_dtype_and_order(dtype):
    query = randn(2, 5, 4, 8, dtype=dtype).transpose(1, 2)
    out = ta.attention(query, query, query, rotary=ta.RotaryEmbedding(8))
    assert out.dtype == dtype and out.transpose(1, 2).is_contiguous()
    exact = ta.attention(*turned(ta.RotaryEmbedding(8), query.double(), query.double(), None), query.double())
    assert (out.double() - exact).abs().max() <= {4: 1e-5, 8: 1e-12}.get(dtype.itemsize, 8 * torch.finfo(dtype).eps)


def test_hidden_keys_may_hold_nan():
    rotary = ta.RotaryEmbedding(8)
    query, key, value = randn(1, 2, 5, 8), randn(1, 2, 9, 8), randn(1, 2, 9, 8)
    mask = ta.KeyLengths(torch.tensor([6]))
    expected = ta.attention(query, key, value, mask=mask, rotary=rotary, query_offset=1)
    key[:, :, 6:] = math.nan
    value[:, :, 6:] = math.nan
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out = ta.attention(*leaves, mask=mask, rotary=rotary, query_offset=1)
    out.square().sum().backward()
    assert torch.equal(out, expected) and all(leaf.grad.isfinite().all() for leaf in leaves)
    assert all((leaf.grad[:, :, 6:] == 0).all() for leaf in leaves[1:])


@PAIRINGS
@pytest.mark.parametrize("scaling", (None, "dynamic", "yarn"))
def test_derivatives_are_exact(scaling, interleaved):
    rotary = ta.RotaryEmbedding(4, interleaved=interleaved, scaling=SCALINGS.get(scaling))
    leaves = [x.requires_grad_() for x in (randn(1, 2, 3, 4), randn(1, 1, 4, 4), randn(1, 1, 4, 2))]
    run = lambda *x: ta.attention(*x, rotary=rotary, mask=ta.Causal(), return_lse=True)
    assert gradcheck(run, leaves, check_forward_ad=True) and gradgradcheck(run, leaves)


def test_transforms():
    rotary = ta.RotaryEmbedding(4, scaling=SCALINGS["dynamic"])
    tensors = [randn(3, 2, 5, 4) for _ in range(3)]
    run = lambda *x: ta.attention(*x, rotary=rotary)
    torch.testing.assert_close(vmap(run)(*tensors), run(*tensors))
    out, tangent = jvp(run, tuple(tensors), tuple(torch.ones_like(x) for x in tensors))
    eps = 1e-6
    ahead, behind = (run(*(x + sign * eps for x in tensors)) for sign in (1, -1))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * eps), rtol=1e-6, atol=1e-7)
    assert torch.equal(functional_call(rotary, {}, (tensors[0], tensors[1]))[0], rotary(tensors[0], tensors[1])[0])


@pytest.mark.parametrize("scaling, interleaved", [(None, False), ("dynamic", True)])
def test_compiled_calls_are_one_graph(scaling, interleaved):
    torch._dynamo.reset()
    rotary = ta.RotaryEmbedding(8, interleaved=interleaved, scaling=SCALINGS.get(scaling))

    def run(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        out = ta.attention(query, key, value, rotary=rotary, mask=ta.Causal())
        return out, *rotary(query, key), ta.attention_weights(query, key, rotary=rotary)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for length in (5, 20):
        leaves = [torch.randn(2, 2, length, 8, requires_grad=True) for _ in range(3)]
        results = []
        for function in (compiled, run):
            outs = function(*leaves)
            results.append([*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), leaves)])
        for ours, expected in zip(*results):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_inductor_keeps_the_accuracy_of_angles():
    torch._dynamo.reset()
    rotary = ta.RotaryEmbedding(8)
    x = torch.randn(1, 1, 4, 8)
    positions = torch.tensor([0, 999_999, 1_000_000, 1_048_575])
    ours, _ = torch.compile(rotary, fullgraph=True)(x, x, positions)
    torch.testing.assert_close(ours, rotary(x, x, positions)[0], rtol=1e-6, atol=1e-6)


def test_autocast_casts_first():
    rotary = ta.RotaryEmbedding(8)
    tensors = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        out = ta.attention(*tensors, rotary=rotary)
    assert torch.equal(out, ta.attention(*(x.bfloat16() for x in tensors), rotary=rotary))


# Errors


X = torch.zeros(1, 2, 3, 8)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: ta.RotaryEmbedding(7), "head_dim must be even.*7"),
        (lambda: ta.RotaryEmbedding(0), "head_dim"),
        (lambda: ta.RotaryEmbedding(8.0), "head_dim"),
        (lambda: ta.RotaryEmbedding(8, base=-1.0), "base"),
        (lambda: ta.RotaryEmbedding(8, scaling=2.0), "scaling"),
        (lambda: ta.RotaryEmbedding(8, scaling={"rope_type": "llama3", "factor": 2.0}), "rope_type.*llama3"),
        (lambda: ta.RotaryEmbedding(8, scaling={"rope_type": "linear"}), "factor"),
        (lambda: ta.RotaryEmbedding(8, scaling={"rope_type": "linear", "factor": 2.0, "low_freq_factor": 0.5}), "low_freq_factor"),
        (lambda: ta.RotaryEmbedding(8, scaling={"partial_rotary_factor": 0.4}), "rotary_dim must be even.*3"),
        (lambda: ta.RotaryEmbedding(8, rotary_dim=10), "rotary_dim.*8.*10"),
        (lambda: ta.RotaryEmbedding(8, rotary_dim=3), "rotary_dim must be even"),
        (lambda: ta.RotaryEmbedding(8, rotary_dim=0), "rotary_dim"),
        (lambda: ta.RotaryEmbedding(8, scaling={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}), "base.*500"),
        (lambda: ta.RotaryScaling("cubic", 2.0), "kind"),
        (lambda: ta.RotaryScaling("linear", 0.5), "factor"),
        (lambda: ta.RotaryScaling("linear", "2"), "factor"),
        (lambda: ta.RotaryScaling("linear", math.nan), "factor"),
        (lambda: ta.RotaryScaling("yarn", 2.0), "original_max_len"),
        (lambda: ta.RotaryScaling("dynamic", 2.0, 0), "original_max_len"),
        (lambda: ta.RotaryScaling("yarn", 2.0, 8, attention_factor=0.0), "attention_factor"),
        (lambda: ta.RotaryScaling("yarn", 2.0, 8, beta_fast=0.5), "beta_fast"),
        (lambda: ta.RotaryEmbedding(6)(X, X), "query.*6"),
        (lambda: ta.RotaryEmbedding(8)(X, X[..., :4]), "key"),
        (lambda: ta.RotaryEmbedding(8)(X.long(), X), "query"),
        (lambda: ta.RotaryEmbedding(8)(X[0, 0], X), "query"),
        (lambda: ta.RotaryEmbedding(8)(X, X, torch.arange(4)), "positions"),
        (lambda: ta.RotaryEmbedding(8)(X, X, torch.zeros(2, 3)), "positions"),
        (lambda: ta.RotaryEmbedding(8)(X, X, torch.tensor(1)), "positions"),
        (lambda: ta.RotaryEmbedding(8)(X, X, [0, 1, 2]), "positions"),
        (lambda: ta.RotaryEmbedding(8)(X, X, torch.tensor([True] * 3)), "positions"),
        (lambda: ta.RotaryEmbedding(8)(X, X[:, :, :2], torch.arange(3)), "positions.*key"),
        (lambda: ta.RotaryEmbedding(8)(X, X, torch.arange(3, device="meta")), "positions.*cpu.*meta"),
        (lambda: ta.RotaryEmbedding(8).tables([1, 2]), "positions"),
        (lambda: ta.attention(X, X, X, rotary=10000.0), "rotary"),
        (lambda: ta.attention(X, X, X, rotary=ta.RotaryEmbedding(6)), "query.*rotary"),
        (lambda: ta.attention_weights(X, X, rotary=ta.RotaryEmbedding(6)), "query.*rotary"),
    ],
)
def test_errors_name_the_argument(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()
