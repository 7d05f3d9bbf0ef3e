"""ta.override_sdpa(): the same answers as torch's own, from here, at every entry; and torch as it was afterwards."""

import itertools
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map_only

import tiled_attention as ta

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OPS = {
    op.name: op for op in op_db if op.name in ("nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward")
}
MODULES = {
    info.name: info
    for info in module_db
    if info.name in ("nn.MultiheadAttention", "nn.TransformerEncoderLayer", "nn.TransformerDecoderLayer", "nn.Transformer")
}
MODES = list(itertools.product((False, True), repeat=3))  # train, grad, need_weights


@pytest.fixture(autouse=True)
def restored():
    """Whatever happens in a test, torch is as it was after it."""
    forward, fast_path, tag = F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled(), torch.compiler.config.cache_key_tag
    yield
    assert F.multi_head_attention_forward is forward
    assert torch.backends.mha.get_fastpath_enabled() == fast_path and torch.compiler.config.cache_key_tag == tag
    q = torch.randn(1, 2, 3, 8)
    with ta.override_sdpa() as override:
        pass
    F.scaled_dot_product_attention(q, q, q)
    assert override.calls == 0


def close(a, b, tolerance: float) -> bool:
    a, b = tree_leaves(a), tree_leaves(b)
    assert len(a) == len(b)
    return all(
        x is y
        if x is None or y is None
        else x.shape == y.shape and torch.allclose(x.double(), y.double(), atol=tolerance, rtol=tolerance, equal_nan=False)
        for x, y in zip(a, b)
    )


def result_and_gradients(function, args, kwargs, leaves: list[Tensor]):
    out = function(*args, **kwargs)
    outs = needing_gradients(out)
    gradients = torch.autograd.grad(sum(t.double().sin().sum() for t in outs), leaves, allow_unused=True) if outs and leaves else []
    return out, list(gradients)


def needing_gradients(tree) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.requires_grad]


def scaled(tree, factor: float, dtype: torch.dtype | None = None):
    """The same with other floating-point numbers: with those that torch ships, scores reach thousands, and rounding decides the weights."""

    def change(t: Tensor) -> Tensor:
        return t.detach().to(dtype).mul(factor).requires_grad_(t.requires_grad) if t.is_floating_point() else t

    return tree_map_only(Tensor, change, tree)


def served(function, *args, **kwargs):
    """(result, calls served) under the override."""
    with ta.override_sdpa() as override:
        return function(*args, **kwargs), override.calls


def as_accurate(got, stock, exact, dtype: torch.dtype) -> bool:
    """Each of `got` within twice torch's own error and some units in the last place of the largest element."""
    leaves = [tree_leaves(x) for x in (got, stock, exact)]
    assert len({len(x) for x in leaves}) == 1
    for ours, theirs, right in zip(*leaves):
        if right is None or ours is None:
            assert ours is theirs is right
        elif right.numel():
            limit = 2 * (theirs.double() - right).abs().max() + 64 * torch.finfo(dtype).eps * (1 + right.abs().max())
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            if not (ours.double() - right).abs().max() <= limit:
                return False
    return True


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("grad", (False, True))
def test_the_samples_that_torch_ships(name: str, dtype: torch.dtype, grad: bool):
    op, count = OPS[name], 0
    for sample in op.sample_inputs("cpu", dtype, requires_grad=grad):
        args, kwargs = scaled([sample.input, *sample.args], 0.1), scaled(dict(sample.kwargs), 0.1)
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        if name.endswith("forward"):
            kwargs["training"] = False
        given = scaled((args, kwargs), 1.0, torch.float64)
        for options in ({}, {"need_weights": False}) if name.endswith("forward") else ({},):
            exact = result_and_gradients(op.op, given[0], given[1] | options, needing_gradients(given))
            stock = result_and_gradients(op.op, args, kwargs | options, needing_gradients((args, kwargs)))
            got, calls = served(result_and_gradients, op.op, args, kwargs | options, needing_gradients((args, kwargs)))
            assert calls == 1 and as_accurate(got, stock, exact, dtype), (sample, options)
            count += 1
    assert count


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("train", (False, True))
@pytest.mark.parametrize("how", ("override", "convert"))
def test_the_modules_that_torch_ships(name: str, train: bool, how: str):
    info, count = MODULES[name], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in info.module_inputs_func(info, "cpu", torch.float64, True, train):
            module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs, dtype=torch.float64).train(train)
            for part in module.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0
                if isinstance(part, nn.MultiheadAttention):
                    part.dropout = 0.0
            args, kwargs = given.forward_input.args, given.forward_input.kwargs
            leaves = needing_gradients((args, kwargs)) + list(module.parameters())
            layers = sum(isinstance(part, nn.MultiheadAttention) for part in module.modules())
            expected = result_and_gradients(module, args, kwargs, leaves)
            with torch.no_grad():
                expected_fast = module(*args, **kwargs)
            if how == "override":
                got, calls = served(result_and_gradients, module, args, kwargs, leaves)
                with torch.no_grad():
                    fast, fast_calls = served(module, *args, **kwargs)
            else:
                with ta.convert(module) as handle:
                    got, calls = result_and_gradients(module, args, kwargs, leaves), sum(handle.calls.values())
                    with torch.no_grad():
                        fast, fast_calls = module(*args, **kwargs), sum(handle.calls.values()) - calls
            assert calls == fast_calls == layers
            assert close(got, expected, 1e-9) and close(fast, expected_fast, 1e-9)
            count += 1
    assert count


@pytest.mark.parametrize("batch_first", (False, True))
@pytest.mark.parametrize("masks", ("none", "padding", "mask", "both"))
def test_every_mode_of_the_module_is_served(batch_first: bool, masks: str):
    m, x = nn.MultiheadAttention(16, 2, batch_first=batch_first), torch.randn(4, 4, 16)
    given = {}
    if masks in ("padding", "both"):
        given["key_padding_mask"] = torch.tensor([[False] * 4, [False, False, True, True]] * 2)
    if masks in ("mask", "both"):
        given["attn_mask"] = torch.ones(4, 4).triu(1).bool()
    for train, grad, need_weights in MODES:
        m.train(train)
        with torch.set_grad_enabled(grad):
            for inputs in ((x, x, x), (x, x.clone(), x.clone())):
                expected = m(*inputs, need_weights=need_weights, **given)
                got, calls = served(m, *inputs, need_weights=need_weights, **given)
                assert calls == 1 and close(got, expected, 1e-5)


def test_dead_rows_are_zero_in_every_mode():
    m, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 4, 16)
    padding = torch.tensor([[False] * 4, [True] * 4])
    outs = []
    for train, grad, need_weights in MODES:
        m.train(train)
        with torch.set_grad_enabled(grad):
            outs.append(served(m, x, x, x, key_padding_mask=padding, need_weights=need_weights)[0][0])
    assert all(close(out, outs[0], 1e-6) for out in outs)
    assert close(outs[0][1], m.out_proj.bias.expand(4, -1), 1e-6)


def test_dropout_replays_from_the_seed_of_torch():
    q = torch.randn(1, 2, 6, 8)
    with ta.override_sdpa():
        torch.manual_seed(1)
        a = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(a, ta.attention(q, q, q, dropout_p=0.5))


@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("norm_first", (False, True))
def test_encoder_in_training_and_on_the_inference_fast_path(padded: bool, norm_first: bool):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encoder = nn.TransformerEncoder(layer, 3)
        x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
        for train, grad in itertools.product((False, True), repeat=2):
            encoder.train(train)
            with torch.set_grad_enabled(grad):
                expected = encoder(x, src_key_padding_mask=padding)
                got, calls = served(encoder, x, src_key_padding_mask=padding)
            assert calls == 3 and close(got, expected, 1e-5)


def test_an_additive_mask_stays_additive_on_the_fast_path():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    x, mask = torch.randn(2, 5, 16), torch.randn(5, 5)
    expected = layer(x, src_mask=mask)
    with torch.no_grad():
        got, calls = served(layer, x, src_mask=mask)
    assert calls == 1 and close(got, expected, 1e-5)


def test_entries_other_than_eager_code():
    q, mask = torch.randn(2, 3, 6, 8), torch.rand(2, 1, 6, 6) > 0.3
    expected = F.scaled_dot_product_attention(q, q, q, mask)

    def attend(q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, mask)

    class Module(nn.Module):
        def forward(self, q: Tensor, mask: Tensor) -> Tensor:
            return attend(q, mask)

    scripted = torch.jit.script(attend)
    traced = torch.jit.trace(attend, (q, mask))
    exported = torch.export.export(Module(), (q, mask)).module()
    for entry in (scripted, traced, exported, torch.ops.aten.scaled_dot_product_attention):
        arguments = (q, q, q, mask) if entry is torch.ops.aten.scaled_dot_product_attention else (q, mask)
        for grad in (False, True):
            leaf = [t.clone().requires_grad_(grad) if t is q else t for t in arguments]
            got, calls = served(entry, *leaf)
            assert calls == 1 and close(got, expected, 1e-5)
    with torch.inference_mode():
        got, calls = served(attend, q, mask)
    assert calls == 1 and close(got, expected, 1e-5)


@pytest.mark.parametrize("backend", ("eager", "aot_eager", "inductor"))
def test_compiled_code_is_served_and_recompiled(backend: str):
    q = torch.randn(1, 2, 6, 8, requires_grad=True)
    function = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), backend=backend, fullgraph=True)
    expected = result_and_gradients(function, (q,), {}, [q])
    with ta.override_sdpa() as override:
        assert close(result_and_gradients(function, (q,), {}, [q]), expected, 1e-5) and override.calls
        with torch.no_grad():
            assert close(function(q), expected[0], 1e-5)
    assert close(result_and_gradients(function, (q,), {}, [q]), expected, 1e-5)


def test_compiled_and_exported_graphs_hold_our_operator():
    class Module(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 2, 6, 8)
    program = torch.export.export(Module(), (q,))
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    with ta.override_sdpa():
        graphs.append(str(program.run_decompositions().graph))
        torch.compile(Module(), backend=torch._dynamo.backends.common.aot_autograd(fw_compiler=keep))(q)
    assert len(graphs) == 2 and all("tiled_attention" in graph and "bmm" not in graph for graph in graphs)


@pytest.mark.parametrize("need_weights", (False, True))
def test_compiled_module(need_weights: bool):
    m, x = nn.MultiheadAttention(16, 2, batch_first=True, add_bias_kv=True), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = result_and_gradients(m, (x, x, x), {"key_padding_mask": padding, "need_weights": need_weights}, list(m.parameters()))
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    with ta.override_sdpa() as override:
        got = result_and_gradients(compiled, (x, x, x), {"key_padding_mask": padding, "need_weights": need_weights}, list(m.parameters()))
        assert override.calls and close(got, expected, 1e-5)


def test_scripted_module():
    m, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.randn(2, 5, 16)
    with ta.override_sdpa() as override:
        scripted = torch.jit.script(m)
        out = scripted(x, x, x, need_weights=False)[0]
        assert override.calls == 1
        with torch.no_grad():
            assert close(scripted(x, x, x), m(x, x, x), 1e-5) and override.calls == 3
    assert close(out, m(x, x, x)[0], 1e-5) and close(scripted(x, x, x), m(x, x, x), 1e-5)


@pytest.mark.parametrize("need_weights", (False, True))
@pytest.mark.parametrize("batch_first", (False, True))
def test_the_output_lies_in_memory_as_torchs(batch_first: bool, need_weights: bool):
    m, x = nn.MultiheadAttention(16, 2, batch_first=batch_first), torch.randn(3, 5, 16)
    for inputs in ((x, x, x), (x, x.clone(), x.clone())):
        expected, (got, calls) = m(*inputs, need_weights=need_weights), served(m, *inputs, need_weights=need_weights)
        assert calls == 1 and [t.stride() for t in got if t is not None] == [t.stride() for t in expected if t is not None]


def test_scripted_and_eager_layers_drop_the_same():
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True), torch.randn(2, 5, 16)
    with ta.override_sdpa():
        outs = [function(x) for function in (layer, torch.jit.script(layer)) if torch.manual_seed(3)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("module", (nn.MultiheadAttention, ta.MultiheadAttention))
def test_a_bias_of_another_dtype_is_added_as_by_torch(module: type[nn.MultiheadAttention]):
    m, x = module(16, 2, batch_first=True, dtype=torch.float64), torch.randn(3, 5, 16, dtype=torch.float64)
    m.in_proj_bias = nn.Parameter(torch.randn(48).half())
    given = {"in_proj_bias": m.in_proj_bias.double()}
    for keys in (x, x.clone()):
        expected = torch.func.functional_call(m, given, (x, keys, keys))
        assert close(served(m, x, keys, keys)[0], expected, 1e-12)


def test_what_is_traced_under_it_runs_without_it():
    m, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    with ta.override_sdpa():
        traced = torch.jit.trace(m, (x, x, x))
    assert "tiled_attention" not in str(traced.inlined_graph) and close(traced(x, x, x), m(x, x, x), 1e-5)


def test_causal_bias_objects():
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    for bias in (causal_upper_left(4, 6), causal_lower_right(4, 6)):
        got, calls = served(F.scaled_dot_product_attention, q, k, k, bias)
        assert calls == 1 and close(got, F.scaled_dot_product_attention(q, k, k, bias), 1e-5)


def test_what_is_passed_on_to_torch():
    q = torch.randn(2, 2, 4, 8)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, q, q)
        got, calls = served(F.scaled_dot_product_attention, q, q, q)
        assert calls == 0 and torch.equal(got, expected)
        m, x = nn.MultiheadAttention(16, 2), torch.randn(4, 2, 16)
        assert served(m, x, x, x)[1] == 0
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        assert served(F.scaled_dot_product_attention, q, q, q)[1] == 1
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)])
    jagged = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged).unflatten(-1, (2, 8)).transpose(1, 2)
    for t in (nested, jagged):
        got, calls = served(F.scaled_dot_product_attention, t, t, t)
        expected = F.scaled_dot_product_attention(t, t, t)
        assert calls == 0 and all(torch.equal(a, b) for a, b in zip(got.unbind(), expected.unbind()))
    meta = q.to("meta")
    got, calls = served(F.scaled_dot_product_attention, meta, meta, meta)
    assert calls == 0 and got.shape == q.shape
    got, calls = served(torch.vmap(F.scaled_dot_product_attention), q, q, q)
    assert close(got, F.scaled_dot_product_attention(q, q, q), 1e-5)


def test_nested_tensors_in_modules():
    items = [torch.randn(n, 16) for n in (3, 5)]
    nested, m = torch.nested.nested_tensor(items), nn.MultiheadAttention(16, 2, batch_first=True).eval()
    with torch.no_grad():
        got, calls = served(m, nested, nested, nested, need_weights=False)
        assert calls == 1 and all(close(got[0][i], m(item, item, item)[0], 1e-5) for i, item in enumerate(items))
        empty = torch.nested.nested_tensor([])
        with pytest.raises(AssertionError, match="NestedTensor"):
            served(m, empty, empty, empty)
        with pytest.raises(ValueError, match="^query: .*nested"):
            ta.MultiheadAttention(16, 2, batch_first=True)(empty, empty, empty)


def test_errors_are_torchs():
    m, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    for bad in (
        {"attn_mask": torch.zeros(5, 6)},
        {"attn_mask": torch.zeros(5, 5, dtype=torch.long)},
        {"is_causal": True},
        {"key_padding_mask": torch.zeros(3, 5)},
    ):
        with pytest.raises((AssertionError, RuntimeError)) as stock:
            m(x, x, x, **bad)
        with ta.override_sdpa(), pytest.raises(stock.type) as ours:
            m(x, x, x, **bad)
        assert str(ours.value) == str(stock.value)


def test_errors_of_the_function_are_torchs():
    q = torch.randn(2, 2, 4, 8)
    for bad in ((q, q.double(), q), (q[0, 0, 0], q, q), (q, q[..., :7], q), (q, q, q, torch.zeros(3, 5, dtype=torch.long))):
        with pytest.raises(RuntimeError) as stock:
            F.scaled_dot_product_attention(*bad)
        with ta.override_sdpa() as override, pytest.raises(RuntimeError) as ours:
            F.scaled_dot_product_attention(*bad)
        assert str(ours.value) == str(stock.value) and override.calls == 0
    with ta.override_sdpa(), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, q, q, torch.zeros(3, 5))
    with ta.override_sdpa(), pytest.raises(RuntimeError):  # torch's own kernel reads past the end of value
        F.scaled_dot_product_attention(q, q, q[..., :3, :])
    for p in (-0.5, 1.5):
        with ta.override_sdpa(), pytest.raises((ValueError, RuntimeError), match="dropout"):
            F.scaled_dot_product_attention(q, q, q, dropout_p=p)


def test_static_keys_and_values():
    x, static = torch.randn(4, 2, 16), torch.randn(4, 4, 8)
    weights = [torch.randn(48, 16), torch.randn(48), None, None, True, 0.0, torch.randn(16, 16), torch.randn(16)]
    for given in ({"static_k": static}, {"static_v": static}, {"static_k": static, "static_v": static}):
        for need_weights in (False, True):
            expected = F.multi_head_attention_forward(x, x, x, 16, 2, *weights, need_weights=need_weights, **given)
            with ta.override_sdpa() as override:
                got = F.multi_head_attention_forward(x, x, x, 16, 2, *weights, need_weights=need_weights, **given)
            assert override.calls == 1 and close(got, expected, 1e-4)


def test_a_torch_function_mode_sees_what_it_saw():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", str(function)))
            return function(*args, **kwargs or {})

    m, x = nn.MultiheadAttention(16, 2), torch.randn(4, 2, 16)
    with Mode():
        m(x, x, x)
        before, seen = seen, []
        with ta.override_sdpa():
            m(x, x, x)
    assert "multi_head_attention_forward" in before and "multi_head_attention_forward" in seen


def test_uses_are_counted_nested_and_overlapping():
    q = torch.randn(1, 1, 3, 8)
    outer, inner = ta.override_sdpa(), ta.override_sdpa()
    outer.enable()
    F.scaled_dot_product_attention(q, q, q)
    inner.enable()
    F.scaled_dot_product_attention(q, q, q)
    outer.disable()
    F.scaled_dot_product_attention(q, q, q)
    assert (outer.calls, inner.calls) == (2, 2)
    with pytest.raises(RuntimeError, match="enable"):
        outer.disable()
    inner.disable()
    F.scaled_dot_product_attention(q, q, q)
    with outer, outer:
        F.scaled_dot_product_attention(q, q, q)
    assert (outer.calls, inner.calls) == (3, 2)


def test_an_exception_undoes_it():
    q = torch.randn(1, 1, 3, 8)
    with pytest.raises(KeyError), ta.override_sdpa() as override:
        F.scaled_dot_product_attention(q, q, q)
        raise KeyError
    assert override.calls == 1


def test_a_failure_while_turning_on_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    override = ta.override_sdpa()
    monkeypatch.setattr(torch._dynamo, "reset", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        override.enable()
    monkeypatch.undo()
    with override:
        q = torch.randn(1, 1, 3, 8)
        F.scaled_dot_product_attention(q, q, q)
    assert override.calls == 1


def test_threads():
    q, errors = torch.randn(1, 2, 8, 8), []
    expected, start = F.scaled_dot_product_attention(q, q, q), threading.Barrier(4)

    def work() -> None:
        try:
            start.wait()
            for _ in range(8):
                with ta.override_sdpa() as override:
                    assert close(F.scaled_dot_product_attention(q, q, q), expected, 1e-5)
                    assert override.calls >= 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_autocast():
    q = torch.randn(1, 2, 6, 8)
    m, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.randn(2, 5, 16)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            expected = F.scaled_dot_product_attention(q, q, q), m(x, x, x)[0]
            (a, b), calls = served(lambda: (F.scaled_dot_product_attention(q, q, q), m(x, x, x)[0]))
        assert calls == 2 and a.dtype == expected[0].dtype and b.dtype == expected[1].dtype and close((a, b), expected, 3e-2)
