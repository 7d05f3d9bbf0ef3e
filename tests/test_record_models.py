"""ta.record_attention in models: the model as if nobody looked, what was asked for, and nothing left behind."""

import contextlib
import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tiled_attention as ta
from test_record import Calls, check, randn, restored  # noqa: F401  (a fixture)
from test_transformers import DECODERS, ENCODERS, build

F64 = torch.float64


HEADS = {
    "plain": ({}, {}),
    "padding": ({}, dict(key_padding_mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2]))),
    "mask": ({}, dict(attn_mask=torch.randn(8, 5, 5, dtype=F64))),
    "both": (
        {},
        dict(attn_mask=torch.ones(5, 5).triu(1).bool(), key_padding_mask=torch.tensor([[False] * 5, [False] * 4 + [True]])),
    ),
    "columns": (dict(add_bias_kv=True, add_zero_attn=True), dict(attn_mask=torch.ones(5, 5).triu(1).bool())),
    "no bias": (dict(bias=False), {}),
    "other sizes": (dict(kdim=6, vdim=7), {}),
}


@pytest.mark.parametrize("kind", ("torch", "override", "convert", "ours"))
@pytest.mark.parametrize("need_weights", (False, True))
@pytest.mark.parametrize("train", (False, True))
@pytest.mark.parametrize("name", HEADS)
def test_multihead_attention(name, train, need_weights, kind):
    options, masks = HEADS[name]
    make = ta.MultiheadAttention if kind == "ours" else nn.MultiheadAttention
    module = make(16, 4, batch_first=True, dropout=0.3, dtype=F64, **options).train(train)
    x = randn(2, 5, 16).requires_grad_(train)
    others = (x, x) if "kdim" not in options else (randn(2, 5, 6), randn(2, 5, 7))
    exact = copy.deepcopy(module).eval()(x, *others, need_weights=True, average_attn_weights=False, **masks)[1].detach()
    if kind == "convert":
        ta.convert(module)
    with contextlib.ExitStack() as stack:
        if not train:
            stack.enter_context(torch.no_grad())
        if kind == "override":
            stack.enter_context(ta.override_sdpa())
        torch.manual_seed(3)
        alone, weights = module(x, *others, need_weights=need_weights, average_attn_weights=False, **masks)
        state = torch.get_rng_state()
        torch.manual_seed(3)
        with ta.record_attention(module) as recording:
            out, seen = module(x, *others, need_weights=need_weights, average_attn_weights=False, **masks)
    assert torch.equal(out, alone) and torch.equal(torch.get_rng_state(), state)
    assert weights is seen is None or torch.equal(weights, seen)
    (call,) = recording
    assert call.name == type(module).__name__
    check(call, exact)


def encoder(**options) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("override", (False, True))
@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("train", (False, True))
def test_encoders_with_their_fast_path(train, padded, override):
    model, x = encoder().train(train), torch.randn(2, 6, 16)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2]) if padded else None
    results = []
    for inside in (contextlib.nullcontext, lambda: ta.record_attention(model)):
        torch.manual_seed(1)
        with ta.override_sdpa() if override else contextlib.nullcontext(), torch.set_grad_enabled(train), inside() as recording:
            out = model(x, src_key_padding_mask=padding)
        results.append([out] + (list(torch.autograd.grad(out.square().sum(), model.parameters())) if train else []))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert recording.names == ["layers.0.self_attn", "layers.1.self_attn"]
    exact = copy.deepcopy(model.layers[0].self_attn).eval()(x, x, x, key_padding_mask=padding, average_attn_weights=False)[1]
    there = torch.ones(2, 6, dtype=torch.bool) if padding is None else ~padding
    weights = recording[0].weights()
    torch.testing.assert_close(weights.transpose(1, 2)[there], exact.transpose(1, 2)[there], atol=1e-6, rtol=1e-5)
    assert padding is None or (weights[1, :, :, 4:] == 0).all()


def test_a_whole_transformer_has_its_cross_attention():
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True, dropout=0.0)
    source, target = torch.randn(2, 7, 16), torch.randn(2, 4, 16)
    causal = model.generate_square_subsequent_mask(4)
    with ta.record_attention(model) as recording:
        model(source, target, tgt_mask=causal)
    assert recording.names == ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]
    assert [(call.seqlen_q, call.seqlen_kv) for call in recording] == [(7, 7), (4, 4), (4, 7)]
    assert (recording[1].weights().triu(1) == 0).all() and (recording[2].weights() > 0).all()


def test_choices_of_layers_heads_and_rows():
    model, x = encoder().eval(), torch.randn(2, 6, 16)
    with ta.record_attention(model) as everything:
        model(x)
    for layers, places in ((1, [1]), ("layers.0.self_attn", [0]), ("layers", [0, 1]), ("*.1", [1]), ([0, "layers.1.*"], [0, 1]), ([], [])):
        with ta.record_attention(model, layers=layers) as recording:
            model(x)
        assert recording.names == [everything.names[place] for place in places]
    with ta.record_attention(model, layers=1, heads=[-1, 1], rows=torch.tensor([-1, 0])) as recording:
        model(x)
    (call,) = recording
    assert (call.heads, call.rows, call.num_heads, call.seqlen_q) == ((3, 1), (5, 0), 4, 6)
    exact = everything[1].weights()
    weights = call.weights()
    torch.testing.assert_close(weights, exact[:, [3, 1]][:, :, [5, 0]])
    assert call.nbytes == weights.numel() * 4 and call._call is None
    torch.testing.assert_close(call.weights(rows=0, heads=1), exact[:, 1:2, :1])
    with ta.record_attention(model, heads=2) as recording:
        model(x)
    torch.testing.assert_close(recording[1].overview(2), everything[1].overview(2)[:, 2:3])
    assert recording[0].nbytes * 3.9 < everything[0].nbytes
    assert "heads=(2,)" in repr(recording) and repr(everything[0]).startswith("RecordedAttention('layers.0.self_attn', batch=2")
    assert [call.name for call in recording[:]] == recording.names and everything[-1] is list(everything)[1]


def test_errors_name_the_argument():
    model, x = encoder(), torch.randn(1, 3, 16)
    for error, text, options in (
        (TypeError, "heads", dict(heads="all")),
        (TypeError, "heads", dict(heads=[True])),
        (TypeError, "rows", dict(rows=[0.5])),
        (TypeError, "rows", dict(rows=torch.tensor([True]))),
        (TypeError, "layers", dict(layers=1.0)),
        (ValueError, "layers", dict(layers=-1)),
        (ValueError, "layers: .*'decoder.*', which none has", dict(layers=["decoder.*"])),
    ):
        with pytest.raises(error, match=text):
            ta.record_attention(model, **options)
    with pytest.raises(TypeError, match="model: expected an nn.Module, got builtin_function_or_method"):
        ta.record_attention(len)
    for options in (dict(heads=4), dict(rows=[-4])):
        message = r"(heads|rows): expected indices in .* for 'layers.0.self_attn', got"
        with pytest.raises(ValueError, match=message), ta.record_attention(model, **options):
            model(x)
    for layers in ([0, 2], ["layers.0.linear1"]):
        message = rf"layers: expected some of the 2 modules that attended, \['layers.0.self_attn', .*\], got {layers[-1]!r}"
        with pytest.raises(ValueError, match=message), ta.record_attention(model, layers=layers):
            model(x)
    with ta.record_attention(model, heads=[1], rows=[0]) as kept, ta.record_attention(model) as recording:
        model(x)
    for call, options in ((recording[0], dict(rows=3)), (kept[0], dict(heads=0)), (kept[0], dict(rows=[1]))):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: expected"):
            call.weights(**options)
    with pytest.raises(RuntimeError, match="overview: 'layers.0.self_attn' was recorded with rows="):
        kept[0].overview()
    for error, blocks in ((ValueError, 0), (TypeError, 2.0)):
        with pytest.raises(error, match="blocks must be an integer >= 1"):
            recording[0].overview(blocks)


def test_an_error_inside_restores_everything():
    def fails(query):
        ta.attention(query, query, query)
        raise KeyError("inside")

    model, query = nn.Sequential(Calls(fails)), randn(1, 2, 3, 4)
    with pytest.raises(KeyError, match="inside"), ta.record_attention(model) as recording:
        with contextlib.suppress(KeyError):
            model(query)
        ta.attention(query, query, query)  # of no module
        model(query)
    assert recording.names == ["0", "0#2"]


def test_nothing_is_kept_of_what_was_not_chosen():
    kept = []

    def attend(query):
        kept.append(weakref.ref(query))
        return ta.attention(query, query, query)

    model = nn.Sequential(Calls(lambda x: attend(x * 2)), Calls(lambda x: attend(x * 3)))
    before = {id(thing) for thing in gc.get_objects() if type(thing) is Tensor}
    with ta.record_attention(model, layers=0, rows=0) as recording:
        model(randn(1, 2, 64, 4))
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) is Tensor and id(thing) not in before]
    assert {tensor.untyped_storage().data_ptr() for tensor in alive} == {recording[0]._weights.untyped_storage().data_ptr()}
    assert recording[0].nbytes == 2 * 64 * 8
    assert all(reference() is None for reference in kept)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and len(recording) == 1


def test_a_compiled_model_runs_in_eager_mode_meanwhile():
    net = nn.Sequential(nn.Linear(8, 8), Calls(lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])))
    traces = []

    def backend(graph, inputs):
        traces.append(graph)
        return graph

    model, x = torch.compile(net, backend=backend, fullgraph=True), torch.randn(2, 5, 8)
    out, count = model(x), len(traces)
    for _ in range(2):
        with ta.record_attention(model) as recording:
            model(x)
        assert recording.names == ["1"]
        torch.testing.assert_close(recording[0].weights(), ta.attention_weights(net[0](x)[:, None], net[0](x)[:, None]))
        assert torch.equal(model(x), out) and len(traces) == count  # what was compiled before still is
    first, second = ta.record_attention(net), ta.record_attention(net)
    first.__enter__()
    recording = second.__enter__()
    model(x)
    first.__exit__(None, None, None)  # overlapping
    model(x)
    second.__exit__(None, None, None)
    model(torch.randn(2, 6, 8))
    assert recording.names == ["1", "1#2"] and len(traces) == count + 1


def test_what_cannot_be_read_is_counted():
    model = Calls(lambda x: ta.attention(x, x, x).sum())
    x = randn(1, 2, 3, 4)
    message = "not all attention calls were recorded: 1 in a trace, a torch.func transform or of a tensor subclass$"
    with pytest.warns(UserWarning, match=message), ta.record_attention(model) as recording:
        gradient = torch.func.grad(model)(x)
        model(x)
    assert recording.names == ["Calls"] and gradient.shape == x.shape
    model = Calls(F.scaled_dot_product_attention)
    with pytest.warns(UserWarning, match="not all attention calls were recorded: 2 on meta$"), ta.record_attention(model) as recording:
        assert model(*3 * [x.to("meta")]).shape == model(*3 * [x.to("meta")]).shape
    assert len(recording) == 0


def test_modes_of_others_see_no_more_than_before():
    model, x = encoder().eval(), torch.randn(2, 6, 16)
    counts = []
    for inside in (contextlib.nullcontext, lambda: ta.record_attention(model)):
        with FlopCounterMode(display=False) as counter, inside() as recording:
            model(x)
        counts.append(counter.get_flop_counts())
    assert counts[0] == counts[1] and len(recording) == 2


def test_recomputation_is_recorded_once():
    model = nn.Sequential(nn.Linear(8, 8), Calls(lambda x: F.scaled_dot_product_attention(x, x, x)))
    for reentrant in (False, True):
        x = torch.randn(1, 2, 5, 8, requires_grad=True)
        (alone,) = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).sum(), x)
        with ta.record_attention(model) as recording:
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        assert recording.names == ["1"] and torch.equal(x.grad, alone)


def test_autocast_and_dtypes_of_torch():
    module, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.randn(1, 5, 16)
    exact = module(x, x, x, average_attn_weights=False)[1]
    for need_weights in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            alone = module(x, x, x, need_weights=need_weights)[0]
            with ta.record_attention(module) as recording:
                out = module(x, x, x, need_weights=need_weights)[0]
        assert torch.equal(out, alone) and recording[0].weights().dtype == torch.float32
        torch.testing.assert_close(recording[0].weights(), exact, atol=2e-2, rtol=0)


def test_recordings_inside_recordings_and_threads():
    inner = nn.Sequential(Calls(lambda x: ta.attention(x, x, x)))
    outer = nn.Sequential(inner, Calls(lambda x: F.scaled_dot_product_attention(x, x, x)))
    other, x = Calls(lambda x: ta.attention(x, x, x)), randn(1, 2, 3, 4)
    same = ta.record_attention(outer)
    with same as first, ta.record_attention(inner, rows=0) as second:
        outer(x)
        with same as third:
            outer(x)
            other(x)
        inner(x)
    assert first.names == ["0.0", "1", "0.0#2", "1#2", "0.0#3"] and third.names == ["0.0", "1"]
    assert second.names == ["0", "0#2", "0#3"]

    with ta.record_attention(outer) as recording:
        threads = [threading.Thread(target=lambda: [outer(x) for _ in range(20)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    counts = [f"{name}{f'#{count}' if count > 1 else ''}" for name in ("0.0", "1") for count in range(1, 81)]
    assert sorted(recording.names) == sorted(counts)


def test_a_model_without_attention_warns():
    with pytest.warns(UserWarning, match="no attention call of Linear was seen$"), ta.record_attention(nn.Linear(2, 2)) as recording:
        pass
    assert len(recording) == 0 and repr(recording) == "Recording([])"


@pytest.mark.parametrize("name", (*DECODERS, *ENCODERS))
def test_hugging_face_models(name):
    model = build(DECODERS if name in DECODERS else ENCODERS, name)
    ids, mask = torch.randint(3, 64, (2, 12)), torch.tensor([[1] * 12, [1] * 8 + [0] * 4])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        exact = model(ids, attention_mask=mask, output_attentions=True).attentions
    message = f'no attention call of {type(model).__name__} was seen: its "eager" attention is not'
    with pytest.warns(UserWarning, match=message), ta.record_attention(model):
        model(ids, attention_mask=mask)
    plain = contextlib.nullcontext
    for implementation, inside in (("sdpa", plain), ("sdpa", ta.override_sdpa), ("tiled_attention", plain)):
        with contextlib.suppress(ValueError):  # gpt_oss has no "sdpa"
            model.set_attn_implementation(implementation)
        if model.config._attn_implementation != implementation:
            continue
        with torch.no_grad(), inside():
            alone = model(ids, attention_mask=mask)[0]
            with ta.record_attention(model) as recording:
                out = model(ids, attention_mask=mask)[0]
        assert torch.equal(out, alone) and len(recording) == len(exact)
        for layer, (call, weights) in enumerate(zip(recording, exact, strict=True)):
            assert f".{layer}." in call.name
            there = mask.bool()[:, None, :, None].expand(*weights.shape[:-1], 1)[..., 0]
            torch.testing.assert_close(call.weights()[there], weights[there], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("override", (False, True))
@pytest.mark.parametrize("cache", ("dynamic", "static"))
def test_generation(cache, override):
    model, ids = build(DECODERS, "llama"), torch.randint(3, 64, (1, 5))
    model.set_attn_implementation("sdpa")
    with (
        ta.override_sdpa() if override else contextlib.nullcontext(),
        ta.record_attention(model, rows=-1, heads=[3, 0]) as recording,
        ta.record_attention(model) as whole,
    ):
        text = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, cache_implementation=cache)
    names = [f"model.layers.{layer}.self_attn{step}" for step in ("", "#2", "#3", "#4") for layer in (0, 1)]
    assert recording.names == whole.names == names
    with torch.no_grad(), ta.record_attention(model, rows=range(4, 8)) as again:
        model(text[:, :-1])
    for place, (call, kept) in enumerate(zip(whole, recording, strict=True)):
        step, layer = divmod(place, 2)
        exact = again[layer].weights(rows=4 + step)[..., : 5 + step]
        assert call.num_heads == 4 and call.seqlen_q == (1 if step else 5)
        weights = call.weights(rows=-1)
        torch.testing.assert_close(weights[..., : 5 + step], exact, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(kept.weights(), weights[:, [3, 0]])
        assert (weights[..., 5 + step :] == 0).all()
