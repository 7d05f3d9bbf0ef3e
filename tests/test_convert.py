"""ta.convert: modules run here in place, counted per layer, and are as they were after restore."""

import copy
import gc
import itertools
import pickle
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn

import tiled_attention as ta

MODES = list(itertools.product((False, True), repeat=3))  # train, grad, need_weights


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, atol=1e-5, rtol=1e-5)


def encoder(**options) -> nn.TransformerEncoder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **options), 2)


def fingerprint(model: nn.Module) -> list:
    """All that a restore must bring back: classes, attributes, and the identity of parameters, buffers and hooks."""
    parts = []
    for name, module in model.named_modules():
        values = {
            key: value if isinstance(value, (int, float, str, bool, type(None))) else id(value) for key, value in vars(module).items()
        }
        tables = {key: [(k, id(v)) for k, v in value.items()] for key, value in vars(module).items() if isinstance(value, dict)}
        parts.append((name, type(module), id(module), values, tables))
    return parts


@pytest.mark.parametrize("batch_first", (False, True))
@pytest.mark.parametrize("options", ({}, {"kdim": 10, "vdim": 12}, {"add_bias_kv": True, "add_zero_attn": True, "bias": False}))
def test_results_counts_and_restoration(batch_first: bool, options: dict):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.MultiheadAttention(16, 2, batch_first=batch_first, **options)
            self.blocks = nn.ModuleList([nn.MultiheadAttention(16, 4, batch_first=batch_first)])

        def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool):
            x, weights = self.first(query, key, value, need_weights=need_weights)
            return self.blocks[0](x, x, x)[0], weights

    model = Model()
    model.first.register_forward_hook(lambda module, args, out: (2 * out[0], out[1]))
    x = [torch.randn(4, 4, width) for width in (16, model.first.kdim, model.first.vdim)]
    before = fingerprint(model)
    handle = ta.convert(model)
    assert isinstance(model.first, ta.MultiheadAttention) and isinstance(model.blocks[0], ta.MultiheadAttention)
    assert handle.calls == {"first": 0, "blocks.0": 0}
    results = []
    for count, (train, grad, need_weights) in enumerate(MODES, 1):
        model.train(train)
        with torch.set_grad_enabled(grad):
            results.append(model(*x, need_weights))
        assert handle.calls == {"first": count, "blocks.0": count}
    model.train(before[0][3]["training"])
    handle.restore()
    assert fingerprint(model) == before
    for (train, grad, need_weights), (out, weights) in zip(MODES, results):
        model.train(train)
        with torch.set_grad_enabled(grad):
            expected, right = model(*x, need_weights)
        assert close(out, expected) and (not need_weights or close(weights, right))
    assert handle.calls == {"first": 8, "blocks.0": 8}
    handle.restore()


@pytest.mark.parametrize("norm_first", (False, True))
@pytest.mark.parametrize("padded", (False, True))
def test_the_encoders_fast_path_does_not_bypass_it(norm_first: bool, padded: bool):
    model, x = encoder(norm_first=norm_first), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for train, grad in itertools.product((False, True), repeat=2):
            model.train(train)
            with torch.set_grad_enabled(grad):
                expected = model(x, src_key_padding_mask=padding)
                with ta.convert(model) as handle:
                    assert close(model(x, src_key_padding_mask=padding), expected)
                    assert handle.calls == {"layers.0.self_attn": 1, "layers.1.self_attn": 1}


def test_whole_transformer_trains_alike():
    torch.manual_seed(1)
    model = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)
    source, target = torch.randn(2, 6, 16), torch.randn(2, 5, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    losses = []
    for convert in (False, True):
        copied = copy.deepcopy(model)
        optimizer, handle = torch.optim.SGD(copied.parameters(), 0.1), ta.convert(copied) if convert else None
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = copied(source, target, tgt_mask=causal, tgt_is_causal=True).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert list(handle.calls.values()) == [3] * 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_model_itself_and_a_module_at_two_places():
    m, x = nn.MultiheadAttention(16, 2), torch.randn(4, 2, 16)
    with ta.convert(m) as handle:
        m(x, x, x)
        assert type(m).__name__ == "ConvertedMultiheadAttention" and handle.calls == {"": 1}
    assert type(m) is nn.MultiheadAttention
    pair = nn.ModuleDict({"a": m, "b": m})
    with ta.convert(pair) as handle:
        pair["b"](x, x, x)
        assert handle.calls == {"a": 1} and pair["a"] is pair["b"] is m
    assert type(m) is nn.MultiheadAttention


def test_subclasses():
    class WithForward(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Renamed(nn.MultiheadAttention):
        pass

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    parametrized = nn.MultiheadAttention(16, 2)
    nn.utils.parametrize.register_parametrization(parametrized, "in_proj_weight", Doubled())
    model = nn.ModuleList([WithForward(16, 2), Renamed(16, 2), parametrized, ta.MultiheadAttention(16, 2)])
    classes, x = [type(m) for m in model], torch.randn(4, 2, 16)
    expected = [m(x, x, x)[0] for m in model]
    with ta.convert(model) as handle:
        assert all(close(m(x, x, x)[0], right) for m, right in zip(model, expected))
        assert handle.calls == {"1": 1, "2": 1}
        assert isinstance(model[1], Renamed) and isinstance(model[1], ta.MultiheadAttention)
    assert [type(m) for m in model] == classes


def test_converting_twice_counts_in_the_first_handle():
    m, x = nn.MultiheadAttention(16, 2), torch.randn(4, 2, 16)
    with ta.convert(m) as outer, ta.convert(m) as inner:
        m(x, x, x)
        assert outer.calls == {"": 1} and inner.calls == {}
    assert type(m) is nn.MultiheadAttention


def test_a_class_changed_in_between_is_named():
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model = nn.ModuleDict({"plain": nn.MultiheadAttention(16, 2), "changed": nn.MultiheadAttention(16, 2)})
    handle = ta.convert(model)
    nn.utils.parametrize.register_parametrization(model["changed"], "in_proj_weight", Doubled())
    with pytest.raises(RuntimeError, match="changed"):
        handle.restore()
    assert isinstance(model["plain"], ta.MultiheadAttention)
    nn.utils.parametrize.remove_parametrizations(model["changed"], "in_proj_weight")
    handle.restore()
    assert type(model["plain"]) is type(model["changed"]) is nn.MultiheadAttention


@pytest.mark.parametrize("duplicate", (lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy), ids=("pickle", "deepcopy"))
def test_copies_run_here_and_count_for_themselves(duplicate):
    model, x = encoder().eval(), torch.randn(2, 5, 16)
    with ta.convert(model) as handle:
        copied = duplicate(model)
        assert close(copied(x), model(x)) and isinstance(copied.layers[0].self_attn, ta.MultiheadAttention)
        assert handle.calls == {"layers.0.self_attn": 1, "layers.1.self_attn": 1}


def test_state_and_dtype_follow():
    model, x = encoder(), torch.randn(2, 5, 16, dtype=torch.float64)
    state = copy.deepcopy(model.state_dict())
    with ta.convert(model) as handle:
        assert list(model.state_dict()) == list(state)
        model.load_state_dict(state)
        out = model.double()(x)
        assert handle.calls["layers.0.self_attn"] == 1
    assert close(out, model(x)) and out.dtype == torch.float64


def test_compiled_model():
    model, x = encoder(), torch.randn(2, 5, 16)
    expected = model(x)
    with ta.convert(model):
        assert close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)


def test_nothing_keeps_the_model_alive():
    m = nn.MultiheadAttention(16, 2)
    reference = weakref.ref(m)
    ta.convert(m)
    del m
    gc.collect()
    assert reference() is None


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="model"):
        ta.convert([nn.MultiheadAttention(16, 2)])
