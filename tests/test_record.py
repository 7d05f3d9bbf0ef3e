"""ta.record_attention: the weights of every kind of attention call, as they are defined."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks

import tiled_attention as ta
from tiled_attention.observers import observers

F64 = torch.float64


@pytest.fixture(autouse=True)
def restored():
    """Whatever happens in a test, torch is as it was after it, and nobody is told of calls."""
    forward = F.multi_head_attention_forward
    yield
    assert F.multi_head_attention_forward is forward and not observers
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks


def randn(*shape: int, dtype=F64) -> Tensor:
    return torch.randn(shape, dtype=F64).to(dtype)


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def record(function, *args, **kwargs) -> ta.RecordedAttention:
    """The one call that `function` makes."""
    model = Calls(function)
    with ta.record_attention(model) as recording:
        model(*args, **kwargs)
    (call,) = recording
    assert call.name == "Calls" and recording.names == ["Calls"]
    return call


def block_means(weights: Tensor, blocks: int) -> Tensor:
    """The definition of `overview`."""
    sizes = [max(1, math.ceil(n / blocks)) for n in weights.shape[-2:]]
    rows = [strip.mean(-2) for strip in weights.split(sizes[0], -2)]
    return torch.stack([torch.stack([part.mean(-1) for part in row.split(sizes[1], -1)], -1) for row in rows], -2)


def check(call: ta.RecordedAttention, exact: Tensor, tolerance: float = 1e-9) -> None:
    """Everything that a call tells, against its weights (batch, num_heads, seqlen_q, seqlen_kv)."""
    assert (call.batch, call.num_heads, call.seqlen_q, call.seqlen_kv) == exact.shape
    assert call.heads == tuple(range(call.num_heads)) and call.rows is None
    near = {"atol": tolerance, "rtol": tolerance, "check_dtype": False}
    weights = call.weights()
    torch.testing.assert_close(weights, exact, **near)
    assert not weights.requires_grad and torch.equal(weights == 0, exact == 0)
    rows, heads = [-1, 0], [call.num_heads - 1]
    torch.testing.assert_close(call.weights(rows=rows, heads=heads), exact[:, heads][:, :, rows], **near)
    for blocks in (1, 3, 128):
        torch.testing.assert_close(call.overview(blocks), block_means(exact.double(), blocks), **near)


def weights_by_definition(function, query: Tensor, key: Tensor, *args, **kwargs) -> Tensor:
    """The output of an attention whose values are the unit vectors."""
    value = torch.eye(key.shape[-2], dtype=key.dtype).expand(*key.shape[:-1], -1)
    out = function(query, key, value, *args, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    return out.reshape(-1, *out.shape[-3:])


OPTIONS = {
    "plain": dict(),
    "causal": dict(mask=ta.Causal()),
    "streaming": dict(mask=ta.Causal() & (ta.SlidingWindow(3, 0) | ta.Sinks(2))),
    "strided": dict(mask=ta.Causal() & ta.Strided(3)),
    "dead rows": dict(mask=torch.rand(17, 23) > 0.8),
    "per head": dict(mask=torch.rand(2, 4, 17, 23) > 0.3),
    "lengths": dict(mask=ta.KeyLengths(torch.tensor([23, 0]))),
    "softcap, scale": dict(softcap=1.5, scale=0.7),
    "sinks": dict(sinks=torch.tensor([0.0, -math.inf, 3.0, 9.0])),
    "slopes, bias": dict(alibi_slopes=torch.rand(4), bias=torch.randn(4, 1, 23)),
    "distances": dict(bias=torch.randn(4, 1, 39)),
    "offsets": dict(mask=ta.Causal(), query_offset=torch.tensor([0, 11])),
    "rotary": dict(mask=ta.Causal(), rotary=ta.RotaryEmbedding(8)),
    "dropout": dict(dropout_p=0.4),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_with_every_option(name):
    query, key = randn(2, 4, 17, 8), randn(2, 2, 23, 8)
    options = dict(OPTIONS[name])
    call = record(ta.attention, query, key, randn(2, 2, 23, 5), **options)
    options.pop("dropout_p", None)
    check(call, ta.attention_weights(query, key, **options))
    if "rotary" not in options:
        check(call, ta.reference.attention_weights(query, key, **options))


@pytest.mark.parametrize("name", ("blocks", "strided", "random"))
def test_masks_beyond_one_tile(name):
    n = 150
    visible = torch.rand(4, 5, 5) > 0.4
    mask = {"blocks": ta.BlockSparse(visible, 32), "strided": ta.Causal() & ta.Strided(7), "random": ta.RandomBlocks(1, 32)}[name]
    query, key, value = (randn(1, 4, n, 8) for _ in range(3))
    call = record(ta.attention, query, key, value, mask=mask)
    check(call, ta.reference.attention_weights(query, key, mask=mask))


def test_leading_dimensions_and_empty_sizes():
    query, key = randn(2, 3, 4, 5, 8), randn(2, 3, 1, 7, 8)
    call = record(ta.attention, query, key, key, bias=torch.randn(3, 1, 5, 7))
    check(call, ta.reference.attention_weights(query, key, bias=call._call.bias).flatten(0, 1))
    for shape_q, shape_k in (((0, 2, 3, 4), (0, 2, 5, 4)), ((1, 2, 0, 4), (1, 2, 5, 4)), ((1, 2, 3, 4), (1, 2, 0, 4))):
        call = record(ta.attention, randn(*shape_q), randn(*shape_k), randn(*shape_k))
        assert call.weights().shape == (shape_q[0], 2, shape_q[2], shape_k[2])
        assert call.overview().shape == (shape_q[0], 2, shape_q[2], shape_k[2])
        assert call.weights(rows=[]).shape == (shape_q[0], 2, 0, shape_k[2])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_dtypes(dtype):
    query, key = randn(1, 4, 40, 16, dtype=dtype), randn(1, 2, 50, 16, dtype=dtype)
    call = record(ta.attention, query, key, key, mask=ta.Causal())
    assert call.weights().dtype == call.overview().dtype == torch.float32
    check(call, ta.reference.attention_weights(query.double(), key.double(), mask=ta.Causal()), 3e-6)


def test_other_scores():
    query, key, value = randn(2, 4, 9, 6), randn(2, 2, 11, 6), randn(2, 2, 11, 3)
    vector, matrix = randn(4, 6), randn(5, 12)
    mask = ta.Causal()
    call = record(ta.additive_attention, query, key, value, vector, mask=mask, dropout_p=0.5)
    check(call, ta.reference.additive_attention_weights(query, key, vector, mask=mask))
    call = record(ta.gaussian_attention, query, key, value, torch.tensor([0.5, 1.0, 2.0, 3.0]), mask=mask)
    wide = key.repeat_interleave(2, 1)
    check(call, weights_by_definition(ta.gaussian_attention, query, wide, torch.tensor([0.5, 1.0, 2.0, 3.0]), mask=mask))
    for score, weight in (("dot", None), ("general", randn(4, 6, 6)), ("concat", (matrix, randn(5)))):
        call = record(ta.luong_attention, query, key, value, score, weight, mask=mask)
        check(call, weights_by_definition(ta.luong_attention, query, wide, score, weight, mask=mask))


@pytest.mark.parametrize("rotary", (None, ta.RotaryEmbedding(8)))
def test_packed_sequences_are_the_padded_batch(rotary):
    query, key = randn(13, 4, 8), randn(17, 2, 8)
    of_query, of_key = torch.tensor([0, 5, 5, 13]), torch.tensor([0, 7, 9, 17])
    options = dict(mask=ta.Causal(), softcap=2.0, sinks=torch.rand(4), rotary=rotary)
    call = record(ta.attention_varlen, query, key, key, of_query, of_key, 8, 8, **options)
    exact = torch.zeros(3, 4, 8, 8, dtype=F64)
    for item in range(3):
        q, k = query[of_query[item] : of_query[item + 1]], key[of_key[item] : of_key[item + 1]]
        exact[item, :, : len(q), : len(k)] = ta.attention_weights(q.transpose(0, 1), k.transpose(0, 1), **options)
    check(call, exact)


@pytest.mark.parametrize("window", (None, 5))
@pytest.mark.parametrize("page_size", (None, 4))
def test_caches(page_size, window):
    cache = ta.KVCache(2, 2, 12, 8, dtype=F64, page_size=page_size, window=window, num_sinks=2 if window else 0)
    mask = ta.Causal() if window is None else ta.Causal() & (ta.SlidingWindow(4, 0) | ta.Sinks(2))
    model, length = Calls(cache.attend), 20 if window else 12
    query, key, rotary = randn(2, 4, length, 8), randn(2, 2, length, 8), ta.RotaryEmbedding(8)
    with ta.record_attention(model) as recording:
        for at in range(0, length, 2):
            new = slice(at, at + 2)
            model(query[:, :, new], key[:, :, new], key[:, :, new], rotary=rotary, softcap=3.0)
    assert recording.names == ["Calls", *(f"Calls#{count}" for count in range(2, length // 2 + 1))]
    for call, end in zip(recording, range(2, length + 1, 2), strict=True):
        exact = ta.attention_weights(query[:, :, end - 2 : end], key[:, :, :end], mask=mask, rotary=rotary, softcap=3.0)
        check(call, exact)


SDPA = {
    "plain": ((2, 4, 5, 8), (2, 4, 7, 8), {}),
    "causal": ((2, 4, 5, 8), (2, 4, 7, 8), dict(is_causal=True)),
    "bool": ((2, 4, 5, 8), (2, 4, 7, 8), dict(attn_mask=torch.rand(2, 1, 5, 7) > 0.4)),
    "float": ((2, 4, 5, 8), (2, 4, 7, 8), dict(attn_mask=torch.randn(4, 5, 7, dtype=F64), scale=0.3)),
    "grouped": ((2, 4, 5, 8), (2, 2, 7, 8), dict(enable_gqa=True, dropout_p=0.5)),
    "without heads": ((5, 8), (7, 8), {}),
    "5-D": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), {}),
    "broadcast": ((2, 4, 5, 8), (1, 1, 7, 8), {}),
}


@pytest.mark.parametrize("way", ("torch", "scripted", "override", "ours"))
@pytest.mark.parametrize("name", SDPA)
def test_scaled_dot_product_attention(name, way):
    shape_q, shape_k, options = SDPA[name]
    query, key = randn(*shape_q), randn(*shape_k)
    function = ta.scaled_dot_product_attention if way == "ours" else F.scaled_dot_product_attention
    if way == "scripted":
        if options:
            return
        function = torch.jit.script(lambda_sdpa)
    with ta.override_sdpa() if way == "override" else contextlib.nullcontext():
        call = record(function, query, key, key, **options)
    options = {name: option for name, option in options.items() if name != "dropout_p"}
    heads = max(shape_q[-3], 1) if len(shape_q) > 2 else 1
    leading = shape_q[:-3] if len(shape_q) > 2 else ()
    wide = key if options.get("enable_gqa") or len(shape_q) == 2 else key.expand(*leading, heads, *key.shape[-2:])
    value = torch.eye(7, dtype=F64).expand(*wide.shape[:-1], 7)
    exact = ta.reference.scaled_dot_product_attention(query, wide, value, **options)
    check(call, exact.reshape(-1, heads, 5, 7))


def lambda_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def test_modules_with_their_own_weights():
    query, key, value = randn(2, 3, 6), randn(2, 5, 6), randn(2, 5, 8)
    modules = [ta.AdditiveAttention(6, 6, 8, num_heads=2, dropout=0.4, dtype=F64)]
    modules += [ta.LuongAttention(6, 6, score, dtype=F64) for score in ("dot", "general", "concat")]
    for module in modules:
        for need_weights in (False, True):
            exact = module.eval()(query, key, value, need_weights=True)[1].detach()
            with ta.record_attention(module.train()) as recording:
                module(query, key, value, need_weights=need_weights)
            check(recording[0], exact if exact.dim() == 4 else exact[:, None])


def test_grouped_heads_of_choice():
    query, key = randn(2, 6, 5, 8), randn(2, 2, 7, 8)
    options = dict(bias=randn(2, 6, 1, 7), alibi_slopes=torch.rand(6), sinks=torch.rand(6), mask=torch.rand(6, 5, 7) > 0.2)
    model = Calls(ta.attention)
    exact = ta.attention_weights(query, key, **options)
    with ta.record_attention(model, heads=[4, 0]) as recording:
        model(query, key, key, **options)
    torch.testing.assert_close(recording[0].weights(), exact[:, [4, 0]])
    torch.testing.assert_close(recording[0].weights(heads=[0]), exact[:, :1])


def test_what_changes_in_place_afterwards():
    model = Calls(ta.attention)
    query, bias = randn(1, 2, 40, 4), randn(1, 2, 40, 40)
    padding = torch.rand(1, 1, 1, 40) > 0.3
    with ta.record_attention(model) as recording:
        model(query, query, query, mask=padding)
        model(query, query, query, bias=bias)
    exact = ta.attention_weights(query, query, mask=padding)
    query.zero_(), padding.zero_()
    torch.testing.assert_close(recording[0].weights(), exact)
    recording[1].weights(rows=0)
    bias.zero_()
    for ask in (recording[1].weights, recording[1].overview):
        with pytest.raises(RuntimeError, match="bias of 'Calls#2' was changed in place since the call"):
            ask()
    with torch.inference_mode():
        query, bias = randn(1, 2, 40, 4), randn(1, 2, 40, 40)
        exact = ta.attention_weights(query, query, bias=bias)
        call = record(ta.attention, query, query, query, bias=bias)
        query.zero_(), bias.zero_()
    torch.testing.assert_close(call.weights(), exact)


def test_memory_is_linear_in_the_length():
    n = 2048
    model, query = Calls(ta.attention), torch.randn(1, 2, n, 16)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        with ta.record_attention(model) as recording:
            model(query, query, query, mask=ta.Causal())
        overview, row = recording[0].overview(32), recording[0].weights(rows=[-1])
    live = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak < n * n * 4 / 4 and recording[0].nbytes == 2 * n * (2 * 16 + 1) * 4
    torch.testing.assert_close(overview[:, :, -1].sum(-1) * 64, torch.ones(1, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(row.sum(-1), torch.ones(1, 2, 1))
