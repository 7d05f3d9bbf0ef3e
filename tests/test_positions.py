"""Embeddings of positions, ALiBi's slopes and relative biases: their formulas, T5's buckets, and what attention is with and without."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import functional_call

import tiled_attention as ta

F64 = torch.float64


def randn(*shape: int, dtype=F64) -> Tensor:
    return torch.randn(shape, dtype=F64).to(dtype)


# Sinusoids


@pytest.mark.parametrize("dim", (1, 2, 7, 64))
def test_sinusoids(dim):
    positions = torch.tensor([[0, 1, 5], [17, 1023, 1_000_000]])
    expected = ta.reference.sinusoidal_embedding(positions, dim, 500.0)
    ours = ta.SinusoidalEmbedding(dim, 500.0)(positions)
    assert ours.dtype == torch.float32 and torch.equal(ours, expected.float())
    assert torch.allclose(torch.from_numpy(ta.numpy_reference.sinusoidal_embedding(positions.numpy(), dim, 500.0)), expected, atol=1e-9)
    assert expected[0, 1, 0] == math.sin(1) and (dim == 1 or expected[0, 1, 1] == math.cos(1))


def test_sinusoids_take_fractions_and_a_dtype():
    embedding = ta.SinusoidalEmbedding(6, dtype=torch.bfloat16)
    ours = embedding(torch.tensor([0.5, 2.25]))
    assert ours.dtype == torch.bfloat16 and not embedding.state_dict()
    assert torch.equal(ours, ta.reference.sinusoidal_embedding(torch.tensor([0.5, 2.25]), 6).bfloat16())
    assert embedding(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 6)


# Learned


def test_learned_embedding_is_a_table():
    embedding = ta.LearnedEmbedding(7, 3, dtype=F64)
    positions = torch.tensor([[0, 6], [2, 2]])
    out = embedding(positions)
    assert torch.equal(out, embedding.weight[positions])
    out.backward(torch.ones_like(out))
    assert torch.equal(embedding.weight.grad[:, 0], torch.tensor([1.0, 0, 2, 0, 0, 0, 1], dtype=F64))
    wide = ta.LearnedEmbedding(500, 40).weight
    assert wide.dtype == torch.float32 and abs(float(wide.detach().std()) - 0.02) < 1e-3


@pytest.mark.parametrize("outside", (-1, 7))
def test_learned_embedding_names_what_is_outside(outside):
    with pytest.raises(IndexError, match=rf"positions.*\[0, 7\), got {outside}"):
        ta.LearnedEmbedding(7, 3)(torch.tensor([0, outside]))


# ALiBi


@pytest.mark.parametrize("num_heads", (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 20, 33, 48, 112))
def test_alibi_slopes(num_heads):
    slopes = ta.alibi_slopes(num_heads, dtype=F64)
    assert slopes.shape == (num_heads,) and torch.allclose(slopes, torch.from_numpy(ta.numpy_reference.alibi_slopes(num_heads)), rtol=1e-13)
    if num_heads == 8:
        assert torch.equal(slopes, torch.tensor([0.5**h for h in range(1, 9)], dtype=F64))
    if num_heads == 12:  # of the paper's own code
        assert torch.allclose(slopes[8:], torch.tensor([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], dtype=F64))
    assert len(set(slopes.tolist())) == num_heads and ((slopes > 0) & (slopes < 1)).all()


def test_alibi_slopes_of_no_heads():
    assert ta.alibi_slopes(0).shape == (0,) and ta.alibi_slopes(3).dtype == torch.float32


def test_l11_slopes_of_any_head_count_act_by_absolute_position(isa):
    slopes, length = ta.alibi_slopes(6), 9
    query, key, value = torch.randn(1, 6, length, 8), torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    full = ta.attention(query, key, value, mask=ta.Causal(), alibi_slopes=slopes)
    i = torch.arange(length)
    bias = -slopes[:, None, None].double() * (i[:, None] - i)
    expected = ta.reference.attention(query.double(), key.double(), value.double(), mask=i[:, None] >= i, bias=bias)
    torch.testing.assert_close(full, expected.float(), rtol=1e-5, atol=2e-6)
    for t in range(length):
        step = ta.attention(query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1], alibi_slopes=slopes)
        assert torch.equal(step, full[:, :, t : t + 1])
        assert t == 0 or not torch.allclose(step, ta.attention(query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1]))


# Relative biases


@pytest.mark.parametrize("bidirectional", (True, False))
@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (32, 20), (4, 2), (8, 1000), (64, 4096), (320, 800)])
def test_buckets_are_those_of_t5(num_buckets, max_distance, bidirectional):
    modeling_t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    if max_distance <= num_buckets // (4 if bidirectional else 2):
        with pytest.raises(ValueError, match="max_distance"):
            ta.RelativeBias(2, max_distance, num_buckets=num_buckets, bidirectional=bidirectional)
        return
    bias = ta.RelativeBias(2, max_distance, num_buckets=num_buckets, bidirectional=bidirectional)
    distances = torch.arange(-3 * max_distance, 3 * max_distance)
    theirs = modeling_t5.T5Attention._relative_position_bucket(distances, bidirectional, num_buckets, max_distance)
    assert torch.equal(bias.index(distances), theirs)
    formula = torch.tensor([ta.reference.relative_bucket(int(d), num_buckets, max_distance, bidirectional) for d in distances])
    assert ((formula - theirs).abs() <= 1).all() and (formula != theirs).double().mean() < 0.01


@pytest.mark.parametrize("query_offset", (None, 2))
def test_the_weight_of_t5_gives_the_bias_of_t5(query_offset):
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=24, d_kv=8, num_heads=3, relative_attention_num_buckets=8, relative_attention_max_distance=11)
    for is_decoder in (False, True):
        config.is_decoder = is_decoder
        theirs = transformers.models.t5.modeling_t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
        ours = ta.RelativeBias(3, 11, num_buckets=8, bidirectional=not is_decoder)
        ours.load_state_dict(theirs.relative_attention_bias.state_dict())
        row = ours(7, 30, query_offset=query_offset)
        assert row.shape == (3, 36)
        expected = theirs.compute_bias(30, 30)[0, :, 23:] if query_offset is None else theirs.compute_bias(9, 30)[0, :, 2:]
        assert torch.equal(ta.reference.relative_bias(row, 7, 30), expected)


@pytest.mark.parametrize("bidirectional", (True, False))
def test_plain_distances_are_clipped(bidirectional):
    bias = ta.RelativeBias(2, 3, num_buckets=None, bidirectional=bidirectional, dtype=F64)
    dense = ta.reference.relative_bias(bias(5, 9), 5, 9)
    for i, j in itertools.product(range(5), range(9)):
        distance = min(max(j - (i + 4), -3), 3)
        at = distance + 3 if bidirectional else max(-distance, 0)
        assert torch.equal(dense[:, i, j], bias.weight[at])


def test_relative_bias_has_a_row_per_offset():
    bias = ta.RelativeBias(2, 5, num_buckets=8)
    offsets = torch.tensor([[0, 3], [-2, 9]])
    rows = bias(4, 6, query_offset=offsets)
    assert rows.shape == (2, 2, 2, 9)
    for at in itertools.product(range(2), range(2)):
        assert torch.equal(rows[at], bias(4, 6, query_offset=int(offsets[at])))
    assert bias(0, 6).shape == bias(4, 0).shape == bias(0, 0).shape == (2, 0) and bias(1, 1).shape == (2, 1)


OFFSETS = {"default": None, "number": 3, "list": [0, 7], "tensor": torch.tensor([-2, 4])}


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("bidirectional", (True, False))
def test_attention_reads_the_row(bidirectional, offset, isa):
    bias = ta.RelativeBias(4, 6, num_buckets=8, bidirectional=bidirectional, dtype=F64)
    query, key, value = randn(2, 4, 5, 8), randn(2, 2, 11, 8), randn(2, 2, 11, 3)
    given = OFFSETS[offset]
    options = dict(mask=ta.Causal(), query_offset=given)
    row = bias(5, 11, query_offset=torch.tensor(given) if isinstance(given, list) else given)
    dense = ta.reference.relative_bias(row, 5, 11)
    out = ta.attention(query, key, value, bias=bias, **options)
    torch.testing.assert_close(out, ta.attention(query, key, value, bias=dense, **options), rtol=1e-12, atol=1e-12)
    weights = ta.attention_weights(query, key, bias=bias, **options)
    torch.testing.assert_close(weights, ta.attention_weights(query, key, bias=dense, **options), rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(out.square().sum(), bias.weight)
    again = ta.attention(query, key, value, bias=dense, **options).square().sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(again, bias.weight)[0], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("seqlen_q, seqlen_kv", [(0, 5), (5, 0), (0, 0), (1, 1), (1, 6), (6, 1)])
def test_relative_bias_of_empty_and_single_rows(seqlen_q, seqlen_kv):
    bias = ta.RelativeBias(2, 6, num_buckets=8)
    query, key = torch.randn(1, 2, seqlen_q, 4), torch.randn(1, 2, seqlen_kv, 4)
    out = ta.attention(query, key, key, bias=bias)
    out.sum().backward()
    row = bias(seqlen_q, seqlen_kv)
    dense = ta.reference.relative_bias(row, seqlen_q, seqlen_kv) if row.shape[-1] else None
    torch.testing.assert_close(out, ta.attention(query, key, key, bias=dense))


def test_relative_bias_has_exact_derivatives_in_attention():
    bias = ta.RelativeBias(2, 6, num_buckets=8, dtype=F64)
    query, key, value = (x.requires_grad_() for x in (randn(1, 2, 4, 3), randn(1, 2, 5, 3), randn(1, 2, 5, 3)))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = bias

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return ta.attention(query, key, value, bias=self.bias)

    model = Model()

    def run(weight: Tensor, *tensors: Tensor) -> Tensor:
        return functional_call(model, {"bias.weight": weight}, tensors)

    assert gradcheck(run, (bias.weight, query, key, value), check_forward_ad=True)
    dense = ta.reference.relative_bias(bias(4, 5), 4, 5)
    torch.testing.assert_close(model(query, key, value), ta.reference.attention(query, key, value, bias=dense))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = [torch.autograd.grad(function(query, key, value).square().sum(), bias.weight)[0] for function in (compiled, model)]
    torch.testing.assert_close(*results)


def test_relative_bias_of_other_heads_is_refused():
    query = torch.zeros(1, 3, 4, 8)
    with pytest.raises(ValueError, match="bias.*3.*RelativeBias of 2"):
        ta.attention(query, query, query, bias=ta.RelativeBias(2))


# What positions are for


def permuted(function, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """function of permuted tokens, and the permuted function of tokens."""
    order = torch.randperm(tokens.shape[-2])
    while torch.equal(order, torch.arange(len(order))):
        order = torch.randperm(len(order))

    def call(x: Tensor) -> Tensor:
        torch.manual_seed(1)  # the same tables
        return function(x)

    return call(tokens[..., order, :]), call(tokens)[..., order, :]


def self_attention(tokens: Tensor, **options) -> Tensor:
    return ta.attention(tokens, tokens, tokens, **options)


def test_attention_without_positions_is_permutation_equivariant(isa):
    torch.testing.assert_close(*permuted(self_attention, randn(2, 2, 37, 8)), rtol=1e-12, atol=1e-12)


WITH_POSITIONS = {
    "sinusoids": lambda x: self_attention(x + ta.SinusoidalEmbedding(8, dtype=F64)(torch.arange(37))),
    "learned": lambda x: self_attention(x + 50 * ta.LearnedEmbedding(37, 8, dtype=F64)(torch.arange(37))),
    "rotary": lambda x: self_attention(x, rotary=ta.RotaryEmbedding(8)),
    "alibi": lambda x: self_attention(x, alibi_slopes=ta.alibi_slopes(2)),
    "relative": lambda x: self_attention(x, bias=50 * ta.RelativeBias(2, dtype=F64)(37, 37)[:, None]),
    "causal": lambda x: self_attention(x, mask=ta.Causal()),
}


@pytest.mark.parametrize("name", WITH_POSITIONS)
def test_attention_with_positions_is_not(name):
    ours, moved = permuted(WITH_POSITIONS[name], randn(2, 2, 37, 8))
    assert (ours - moved).abs().max() > 0.01


# Compiling, errors


def test_embeddings_compile():
    sinusoids, learned, bias = ta.SinusoidalEmbedding(8), ta.LearnedEmbedding(64, 8), ta.RelativeBias(2, 20, num_buckets=8)

    def run(positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return sinusoids(positions), learned(positions), bias(positions.shape[-1], 5)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for length in (4, 9, 13):
        for ours, expected in zip(compiled(torch.arange(length)), run(torch.arange(length))):
            torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: ta.SinusoidalEmbedding(0), "dim"),
        (lambda: ta.SinusoidalEmbedding(4, base=0.0), "base"),
        (lambda: ta.SinusoidalEmbedding(4, base="x"), "base"),
        (lambda: ta.SinusoidalEmbedding(4)([0, 1]), "positions"),
        (lambda: ta.SinusoidalEmbedding(4)(torch.tensor([True])), "positions"),
        (lambda: ta.LearnedEmbedding(0, 4), "max_len"),
        (lambda: ta.SinusoidalEmbedding(4, dtype=torch.int32), "dtype.*int32"),
        (lambda: ta.LearnedEmbedding(4, 2.5), "dim"),
        (lambda: ta.LearnedEmbedding(4, 2)(torch.zeros(3)), "positions"),
        (lambda: ta.alibi_slopes(-1), "num_heads"),
        (lambda: ta.alibi_slopes(2.0), "num_heads"),
        (lambda: ta.RelativeBias(0), "num_heads"),
        (lambda: ta.RelativeBias(2, 0), "max_distance"),
        (lambda: ta.RelativeBias(2, num_buckets=7), "num_buckets"),
        (lambda: ta.RelativeBias(2, num_buckets=2), "num_buckets"),
        (lambda: ta.RelativeBias(2, 8), "max_distance"),
        (lambda: ta.RelativeBias(2)(-1, 3), "seqlen_q"),
        (lambda: ta.RelativeBias(2)(1, 3, query_offset=0.5), "query_offset"),
        (lambda: ta.RelativeBias(2)(1, 3, query_offset=torch.zeros(2)), "query_offset"),
    ],
)
def test_errors_name_the_argument(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()
