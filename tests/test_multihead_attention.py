"""ta.MultiheadAttention against its definition in float64, over every constructor option, mask form, mode and kind of weights."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiled_attention as ta
from tiled_attention.multihead_attention import merge_masks

INF = math.inf
OPTIONS = {
    "plain": {},
    "kdim": {"kdim": 10},
    "kdim and vdim": {"kdim": 10, "vdim": 12},
    "bias_kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "bias_kv and zero": {"add_bias_kv": True, "add_zero_attn": True},
    "no bias": {"bias": False},
}
MASKS = (
    "none",
    "bool",
    "float",
    "bool 3-D",
    "float 3-D",
    "expanded 3-D",
    "padding",
    "float padding",
    "-inf padding",
    "bool + padding",
    "float + padding",
    "bool + float padding",
    "float + float padding",
    "float + -inf padding",
    "float 3-D + padding",
    "dead",
)
MODES = list(itertools.product((False, True), repeat=3))  # train, grad, need_weights


def definition(m: nn.MultiheadAttention, query, key, value, attn_mask=None, key_padding_mask=None, is_causal=False, kept=None):
    """(out, weights per head) in float64, batch first: one head of one batch item at a time. `kept` is the dropout mask."""
    state = {name: p.double() for name, p in m.state_dict(keep_vars=True).items()}
    if "in_proj_weight" in state:
        projections = state["in_proj_weight"].chunk(3)
    else:
        projections = tuple(state[f"{name}_proj_weight"] for name in "qkv")
    biases = state["in_proj_bias"].chunk(3) if "in_proj_bias" in state else (0.0, 0.0, 0.0)
    q, k, v = (x.double() @ w.T + b for x, w, b in zip((query, key, value), projections, biases))
    batch, seqlen_q, seqlen_kv = q.shape[0], q.shape[1], k.shape[1]
    added = torch.zeros(batch, m.num_heads, seqlen_q, seqlen_kv, dtype=torch.float64)
    for mask, shape in ((attn_mask, (-1, m.num_heads)), (key_padding_mask, None)):
        if mask is not None:
            scores = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -INF) if mask.dtype == torch.bool else mask.double()
            added = added + (scores[:, None, None] if shape is None else scores.unflatten(0, shape) if mask.dim() == 3 else scores)
    if is_causal:
        added = added.masked_fill(torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool).triu(1), -INF)
    zero = torch.zeros(1, 1, m.embed_dim, dtype=torch.float64)
    columns = [(state["bias_k"], state["bias_v"])] if "bias_k" in state else []
    for column_k, column_v in columns + [(zero, zero)] * m.add_zero_attn:
        k, v = (torch.cat([x, column.expand(batch, 1, -1)], 1) for x, column in ((k, column_k), (v, column_v)))
        added = torch.cat([added, added.new_zeros(*added.shape[:-1], 1)], -1)
    q, k, v = (x.unflatten(-1, (m.num_heads, m.head_dim)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / math.sqrt(m.head_dim) + added
    alive = (scores > -INF).any(-1, keepdim=True)
    weights = torch.where(alive, torch.where(alive, scores, 0.0).softmax(-1), 0.0)
    if kept is not None:
        weights = weights * kept / (1 - round(m.dropout * 65536) / 65536)
    out = (weights @ v).transpose(1, 2).flatten(-2)
    return out @ state["out_proj.weight"].T + state.get("out_proj.bias", 0.0), weights


def masks(name: str, batch: int, heads: int, seqlen_q: int, seqlen_kv: int) -> dict[str, Tensor]:
    """Module masks: bool True = ignore. Key 0 is seen by every row, but in "dead", where head 1 and the last query see nothing."""
    hidden = torch.rand(seqlen_q, seqlen_kv) < 0.4
    hidden_3d = torch.rand(batch * heads, seqlen_q, seqlen_kv) < 0.4
    padding = torch.zeros(batch, seqlen_kv, dtype=torch.bool)
    padding[-1, seqlen_kv // 2 :] = True
    hidden[:, 0] = hidden_3d[..., 0] = False
    added = torch.randn(seqlen_q, seqlen_kv).masked_fill(hidden, -INF)
    dead = (torch.arange(batch * heads) % heads == 1)[:, None, None].expand(-1, seqlen_q, seqlen_kv).clone()
    dead[:, -1] = True
    choices = {
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": added},
        "bool 3-D": {"attn_mask": hidden_3d},
        "float 3-D": {"attn_mask": torch.randn(hidden_3d.shape).masked_fill(hidden_3d, -INF)},
        "expanded 3-D": {"attn_mask": hidden.expand(batch * heads, -1, -1)},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": torch.randn(padding.shape)},
        "-inf padding": {"key_padding_mask": torch.zeros(padding.shape).masked_fill(padding, -INF)},
        "dead": {"attn_mask": dead},
        "none": {},
    }
    return {key: mask for part in name.split(" + ") for key, mask in choices[part].items()}


def inputs(m: nn.MultiheadAttention, batch: int, seqlen_q: int, seqlen_kv: int, same: str = "none", dtype=torch.float32) -> list[Tensor]:
    """query, key, value, batch first; `same`: "none", "key value" or "all" are one tensor."""
    query = torch.randn(batch, seqlen_q, m.embed_dim, dtype=dtype)
    key = query if same == "all" else torch.randn(batch, seqlen_kv, m.kdim, dtype=dtype)
    value = key if same != "none" else torch.randn(batch, seqlen_kv, m.vdim, dtype=dtype)
    return [query, key, value]


def call(m: nn.MultiheadAttention, query, key, value, **options):
    """Batch first in and out, whatever the module wants."""
    if m.batch_first:
        return m(query, key, value, **options)
    turned = {id(x): x.transpose(0, 1) for x in (query, key, value)}
    out, weights = m(*(turned[id(x)] for x in (query, key, value)), **options)
    return out.transpose(0, 1), weights


def close(a: Tensor, b: Tensor, tolerance: float = 2e-5) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), atol=tolerance, rtol=tolerance)


def parametrized_module(batch_first: bool = False, dtype=torch.float32, **options) -> ta.MultiheadAttention:
    m = ta.MultiheadAttention(24, 3, batch_first=batch_first, dtype=dtype, **options)
    for p in m.parameters():
        nn.init.normal_(p, std=0.4)
    return m


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("mask", MASKS)
def test_every_form_equals_the_definition(options: dict, mask: str):
    for batch_first, same in itertools.product((False, True), ("none", "key value", "all")):
        m = parametrized_module(batch_first, **options)
        if (same == "all" and m.kdim != m.embed_dim) or (same != "none" and m.kdim != m.vdim):
            continue
        x = inputs(m, 2, 6, 6 if same == "all" else 9, same)
        given = masks(mask, 2, 3, 6, x[1].shape[1])
        expected_out, expected = definition(m, *x, **given)
        for train, grad, need_weights in MODES:
            m.train(train)
            with torch.set_grad_enabled(grad):
                out, weights = call(m, *x, need_weights=need_weights, **given)
                assert close(out, expected_out)
                assert close(weights, expected.mean(1)) if need_weights else weights is None
                if need_weights:
                    out, weights = call(m, *x, average_attn_weights=False, **given)
                    assert close(out, expected_out) and close(weights, expected)
        with torch.inference_mode():
            assert close(call(m, *x, **given)[0], expected_out)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("mask", ("none", "bool", "float 3-D", "padding", "float + padding", "dead"))
def test_without_a_batch(options: dict, mask: str):
    for batch_first in (False, True):
        m = parametrized_module(batch_first, **options)
        x = inputs(m, 1, 5, 7)
        given = masks(mask, 1, 3, 5, 7)
        expected_out, expected = definition(m, *x, **given)
        if "key_padding_mask" in given:
            given["key_padding_mask"] = given["key_padding_mask"][0]
        out, weights = m(*(t[0] for t in x), **given)
        assert close(out, expected_out[0]) and close(weights, expected[0].mean(0))
        assert close(m(*(t[0] for t in x), average_attn_weights=False, **given)[1], expected[0])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("mask", ("none", "bool", "float", "padding", "float + padding", "float + float padding", "dead"))
@pytest.mark.parametrize("need_weights", (False, True))
def test_gradients(options: dict, mask: str, need_weights: bool):
    m = parametrized_module(True, torch.float64, **options)
    x = [t.requires_grad_() for t in inputs(m, 2, 5, 7, dtype=torch.float64)]
    given = masks(mask, 2, 3, 5, 7)
    learned = [t.requires_grad_() for t in given.values() if t.is_floating_point()]
    leaves = [*x, *learned, *m.parameters()]

    def gradients(out: Tensor, weights: Tensor | None) -> list[Tensor]:
        loss = (out * torch.arange(out.numel()).reshape(out.shape).sin()).sum()
        if weights is not None:
            loss = loss + (weights * torch.arange(weights.numel()).reshape(weights.shape).cos()).sum()
        return torch.autograd.grad(loss, leaves)

    out, weights = m(*x, need_weights=need_weights, **given)
    expected_out, expected = definition(m, *x, **given)
    for got, right in zip(gradients(out, weights), gradients(expected_out, expected.mean(1) if need_weights else None)):
        assert got.shape == right.shape and torch.allclose(got.double(), right.double(), atol=1e-5 if got.dtype != torch.float64 else 1e-9)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("mask", ("none", "bool", "float", "padding", "bool + padding", "float + padding", "float + float padding"))
@pytest.mark.parametrize("seqlen_kv", (4, 6, 9))
def test_is_causal_is_causal_and_combines_with_masks(options: dict, mask: str, seqlen_kv: int):
    m = parametrized_module(True, **options)
    x = inputs(m, 2, 6, seqlen_kv)
    given = masks(mask, 2, 3, 6, seqlen_kv)
    expected_out, expected = definition(m, *x, is_causal=True, **given)
    for need_weights in (False, True):
        out, weights = m(*x, is_causal=True, need_weights=need_weights, **given)
        assert close(out, expected_out)
        assert not need_weights or close(weights, expected.mean(1))


def test_weights_under_dropout_are_those_that_made_the_output():
    m = parametrized_module(True, torch.float64, dropout=0.4, add_zero_attn=True).train()
    x = [t.requires_grad_() for t in inputs(m, 2, 5, 7, dtype=torch.float64)]
    torch.manual_seed(5)
    kept = ta.dropout_mask(2, 3, 5, 8, 0.4).roll(-1, -1)
    expected_out, expected = definition(m, *x, kept=kept)
    for average in (False, True):
        torch.manual_seed(5)
        out, weights = m(*x, average_attn_weights=average)
        assert close(out, expected_out, 1e-9) and close(weights, expected.mean(1) if average else expected, 1e-9)
        got, right = (
            torch.autograd.grad(o.sin().sum() + w.cos().sum(), x, retain_graph=True)
            for o, w in ((out, weights), (expected_out, expected.mean(1) if average else expected))
        )
        assert all(close(a, b, 1e-9) for a, b in zip(got, right))
    torch.manual_seed(5)
    assert close(m(*x, need_weights=False)[0], expected_out, 1e-9)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.float16))
def test_other_dtypes(dtype: torch.dtype):
    m = parametrized_module(True, dtype)
    x = inputs(m, 2, 6, 9, dtype=dtype)
    given = masks("float + padding", 2, 3, 6, 9)
    (out, weights), (expected_out, expected), tolerance = m(*x, **given), definition(m, *x, **given), 64 * torch.finfo(dtype).eps
    assert out.dtype == weights.dtype == dtype and close(out, expected_out, tolerance) and close(weights, expected.mean(1), tolerance)


def test_autocast_takes_a_float32_mask_as_it_is():
    m, x = ta.MultiheadAttention(32, 4, add_bias_kv=True), torch.randn(6, 2, 32)
    mask = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1)
    for need_weights in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            out, weights = m(x, x, x, attn_mask=mask, need_weights=need_weights)
        assert out.dtype == torch.bfloat16 and out.isfinite().all()
        assert close(out, m(x, x, x, attn_mask=mask)[0], 0.05)


def test_a2_one_answer_over_eight_paths():
    m, x = ta.MultiheadAttention(4, 2, batch_first=True), torch.randn(1, 5, 4)
    dead_head = torch.tensor([False, True]).view(2, 1, 1).expand(2, 5, 5)
    outs = []
    for train, grad, need_weights in MODES:
        m.train(train)
        with torch.set_grad_enabled(grad):
            out, weights = m(x, x, x, attn_mask=dead_head, need_weights=need_weights, average_attn_weights=False)
        outs.append(out)
        assert weights is None or (weights[:, 1] == 0).all()
    assert all(close(out, outs[0], 1e-6) for out in outs) and outs[0].isfinite().all()


def test_a4_dropout_follows_training():
    m, x = ta.MultiheadAttention(8, 2, dropout=0.9).eval(), torch.randn(4, 2, 8)
    assert torch.equal(m(x, x, x)[0], m(x, x, x)[0])
    assert not torch.equal(m.train()(x, x, x)[0], m(x, x, x)[0])
    m = ta.MultiheadAttention(8, 2, dropout=1.0)
    out, weights = m(x, x, x)
    out.sum().backward()
    assert close(out, m.out_proj.bias.expand_as(out)) and (weights == 0).all() and all(p.grad.isfinite().all() for p in m.parameters())
    for p in (-1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="dropout"):
            ta.MultiheadAttention(8, 2, dropout=p)


@pytest.mark.parametrize("options", [*OPTIONS.values(), {"batch_first": True}, {"dtype": torch.float64}])
def test_a11_state_and_initial_values_are_torchs(options: dict):
    torch.manual_seed(3)
    ours = ta.MultiheadAttention(24, 4, **options)
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(24, 4, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values()))
    assert isinstance(ours, nn.MultiheadAttention)
    for p in theirs.parameters():
        nn.init.normal_(p)
    ours.load_state_dict(theirs.state_dict())
    query, key, value = (torch.randn(5, 2, width, dtype=options.get("dtype")) for width in (24, ours.kdim, ours.vdim))
    assert all(close(a, b) for a, b in zip(ours(query, key, value), theirs(query, key, value)))


@pytest.mark.parametrize("duplicate", (lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy), ids=("pickle", "deepcopy"))
def test_a11_copies(duplicate):
    m = ta.MultiheadAttention(24, 4, kdim=10, add_bias_kv=True, batch_first=True, dropout=0.3).eval()
    c, x = duplicate(m), inputs(m, 2, 5, 7)
    assert (c.batch_first, c.dropout, c.training, type(c)) == (True, 0.3, False, ta.MultiheadAttention)
    assert all(torch.equal(a, b) and a is not b for a, b in zip(m.parameters(), c.parameters()))
    assert torch.equal(m(*x)[0], c(*x)[0])


def test_m1_bool_masks_ignore_where_true():
    x, lower = torch.randn(1, 4, 8), torch.ones(4, 4).tril().bool()
    m = ta.MultiheadAttention(8, 1, batch_first=True)
    a, b = m(x, x, x, attn_mask=~lower)[0], m(x, x, x, attn_mask=torch.zeros(4, 4).masked_fill(~lower, -INF))[0]
    changed = x.clone()
    changed[:, -1] += 9
    assert close(a, b) and torch.equal(m(changed, changed, changed, attn_mask=~lower)[0][:, :3], a[:, :3])


def test_m2_floats_are_added_in_every_mode():
    m, x = ta.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    bias, padding = torch.randn(5, 5), torch.randn(2, 5)
    for given in ({"attn_mask": bias}, {"key_padding_mask": padding}, {"attn_mask": bias, "key_padding_mask": padding}):
        expected, _ = definition(m, x, x, x, **given)
        for train, clones in itertools.product((False, True), repeat=2):
            m.train(train)
            args = (x, x.clone(), x.clone()) if clones else (x, x, x)
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with mode():
                    assert close(m(*args, **given)[0], expected)


@pytest.mark.parametrize("need_weights", (False, True))
def test_n2_a_dead_row_poisons_no_gradient(need_weights: bool):
    m, x = parametrized_module(True, torch.float64), torch.randn(2, 4, 24, dtype=torch.float64)
    padding = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1]]).bool()
    band = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 0]]).bool()  # row 3 of item 1 sees nothing
    for masked in ({"attn_mask": band, "key_padding_mask": padding}, {"key_padding_mask": padding | torch.tensor([[False], [True]])}):
        out, _ = m(x, x, x, need_weights=need_weights, **masked)
        got = torch.autograd.grad(out[:, :2].sum(), m.parameters())
        expected = torch.autograd.grad(definition(m, x, x, x, **masked)[0][:, :2].sum(), m.parameters())
        assert all(a.isfinite().all() and close(a, b, 1e-9) for a, b in zip(got, expected))


@pytest.mark.parametrize("batch, seqlen_q, seqlen_kv", [s for s in itertools.product((0, 2), (0, 3), (0, 4)) if 0 in s])
def test_m9_zero_sizes(batch: int, seqlen_q: int, seqlen_kv: int):
    for options, need_weights, causal in itertools.product(OPTIONS.values(), (False, True), (False, True)):
        m = parametrized_module(True, **options)
        x = inputs(m, batch, seqlen_q, seqlen_kv)
        out, weights = m(*x, need_weights=need_weights, is_causal=causal)
        expected_out, expected = definition(m, *x, is_causal=causal)
        out.sum().backward()
        assert close(out, expected_out)
        assert not need_weights or close(weights, expected.mean(1))


def test_nested_tensors_are_attended_item_by_item():
    m, items = parametrized_module(True).eval(), [torch.randn(n, 24) for n in (3, 6, 1)]
    nested = torch.nested.nested_tensor(items)
    out, weights = m(nested, nested, nested)
    for i, item in enumerate(items):
        expected_out, expected = m(item, item, item)
        assert close(out[i], expected_out)
        assert close(weights[i, : len(item), : len(item)], expected) and weights[i].sum().round() == len(item)
    with pytest.raises(ValueError, match="nested"):
        m(nested, nested, nested, attn_mask=torch.zeros(6, 6))


class LowRank(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.a, self.b = inner, nn.Linear(inner.in_features, 2), nn.Linear(2, inner.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.b(self.a(x))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("need_weights", (False, True))
@pytest.mark.parametrize("train", (False, True))
def test_out_proj_is_called(need_weights: bool, train: bool):
    m, x, seen = parametrized_module(True).train(train), torch.randn(2, 5, 24), []
    base = m(x, x, x)[0]
    handle = m.out_proj.register_forward_hook(lambda module, args, out: seen.append(args[0]) or 2 * out)
    with torch.no_grad():
        assert close(m(x, x, x, need_weights=need_weights)[0], 2 * base) and len(seen) == 1
    handle.remove()

    m.out_proj = LowRank(m.out_proj)
    assert close(m(x, x, x, need_weights=need_weights)[0], base + m.out_proj.b(m.out_proj.a(seen[0])))
    m.out_proj = m.out_proj.inner
    nn.utils.parametrize.register_parametrization(m.out_proj, "weight", Doubled())
    nn.utils.parametrize.register_parametrization(m, "in_proj_weight", Doubled())
    with torch.no_grad():
        doubled = nn.MultiheadAttention(24, 3, batch_first=True)
        packed = {name: getattr(m, name) for name in ("in_proj_weight", "in_proj_bias")}
        doubled.load_state_dict(packed | {f"out_proj.{name}": getattr(m.out_proj, name) for name in ("weight", "bias")})
        assert close(m(x, x, x, need_weights=need_weights)[0], definition(doubled, x, x, x)[0])


def test_transformer_layers_call_it(monkeypatch: pytest.MonkeyPatch):
    encoder = nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True)
    decoder = nn.TransformerDecoderLayer(24, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 24)
    expected = encoder(x), decoder(x, x)
    for layer, names in ((encoder, ("self_attn",)), (decoder, ("self_attn", "multihead_attn"))):
        for name in names:
            state = getattr(layer, name).state_dict()
            setattr(layer, name, ta.MultiheadAttention(24, 4, batch_first=True))
            getattr(layer, name).load_state_dict(state)
    calls, forward = [], ta.MultiheadAttention.forward
    monkeypatch.setattr(
        ta.MultiheadAttention, "forward", lambda self, *args, **kwargs: calls.append(self) or forward(self, *args, **kwargs)
    )
    for train, grad in itertools.product((False, True), repeat=2):
        calls.clear()
        with torch.set_grad_enabled(grad):
            assert close(encoder.train(train)(x), expected[0]) and close(decoder.train(train)(x, x), expected[1])
        assert calls == [encoder.self_attn, decoder.self_attn, decoder.multihead_attn]


@pytest.mark.parametrize("mask", ("none", "bool", "float + padding", "bool + padding"))
@pytest.mark.parametrize("need_weights", (False, True))
def test_compiles_into_one_graph(mask: str, need_weights: bool):
    for options, causal in (({}, False), ({"kdim": 10, "add_bias_kv": True, "add_zero_attn": True}, True)):
        torch._dynamo.reset()
        m = parametrized_module(True, **options)
        compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
        x = inputs(m, 2, 6, 9)
        given = masks(mask, 2, 3, 6, 9)
        expected, right = m(*x, need_weights=need_weights, is_causal=causal, **given)
        out, weights = compiled(*x, need_weights=need_weights, is_causal=causal, **given)
        assert close(out, expected) and (not need_weights or close(weights, right))
        got, wanted = (torch.autograd.grad(o.sin().sum(), m.parameters()) for o in (out, expected))
        assert all(close(a, b) for a, b in zip(got, wanted))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                self.size = max(self.size, t.untyped_storage().nbytes() // t.itemsize)
        return result


@pytest.mark.parametrize("mask", [name for name in MASKS if "3-D" not in name or "expanded" in name])
@pytest.mark.parametrize("need_weights", (False, True))
@pytest.mark.parametrize("batch_first", (False, True))
def test_nothing_is_expanded_over_batch_or_heads(mask: str, need_weights: bool, batch_first: bool):
    batch, heads, seqlen = 3, 8, 96
    m = ta.MultiheadAttention(8, heads, batch_first=batch_first)
    x = torch.randn(batch, seqlen, 8) if batch_first else torch.randn(seqlen, batch, 8)
    given = masks(mask, batch, heads, seqlen, seqlen)
    if mask == "dead":
        given = {"attn_mask": torch.tensor([False, True] * 4 * batch).view(-1, 1, 1).expand(-1, seqlen, seqlen)}
    for causal in (False, True):
        with Largest() as largest:
            m(x, x, x, need_weights=need_weights, is_causal=causal, **given)[0].sum().backward()
        per_item = need_weights or mask in ("float + float padding", "float + -inf padding")  # two that are added
        assert largest.size <= (batch if per_item else 1) * seqlen * seqlen


def test_a_float_padding_mask_that_only_hides_is_not_added_to_another():
    given = masks("float + -inf padding", 3, 2, 5, 7)
    mask, bias = merge_masks(given["attn_mask"], given["key_padding_mask"], 3, 2, torch.float32)
    assert bias is given["attn_mask"] and torch.equal(mask, (given["key_padding_mask"] == 0)[:, None, None, :])


@pytest.mark.parametrize("batch_first", (False, True))
def test_out_is_contiguous_in_the_order_of_the_input(batch_first: bool):
    m, x = ta.MultiheadAttention(24, 3, batch_first=batch_first), torch.randn(4, 6, 24)
    assert m(x, x, x, need_weights=False)[0].is_contiguous()


BAD = {
    "query of rank 1": ("query", {"query": torch.zeros(24)}),
    "query of other width": ("query", {"query": torch.zeros(2, 5, 23)}),
    "key of other rank": ("key", {"key": torch.zeros(5, 24)}),
    "key of other batch": ("key", {"key": torch.zeros(3, 5, 24), "value": torch.zeros(3, 5, 24)}),
    "value of other length": ("value", {"value": torch.zeros(2, 6, 24)}),
    "value of other width": ("value", {"value": torch.zeros(2, 5, 25)}),
    "integer attn_mask": ("attn_mask", {"attn_mask": torch.zeros(5, 5, dtype=torch.long)}),
    "attn_mask of other shape": ("attn_mask", {"attn_mask": torch.zeros(5, 6)}),
    "attn_mask of other heads": ("attn_mask", {"attn_mask": torch.zeros(2, 5, 5)}),
    "attn_mask of rank 1": ("attn_mask", {"attn_mask": torch.zeros(5)}),
    "attn_mask that is no tensor": ("attn_mask", {"attn_mask": [[0.0]]}),
    "integer key_padding_mask": ("key_padding_mask", {"key_padding_mask": torch.zeros(2, 5, dtype=torch.uint8)}),
    "key_padding_mask of other shape": ("key_padding_mask", {"key_padding_mask": torch.zeros(5, 2)}),
}


@pytest.mark.parametrize("name, changed", BAD.values(), ids=list(BAD))
def test_errors_name_the_argument(name: str, changed: dict):
    m = ta.MultiheadAttention(24, 3, batch_first=True)
    arguments = {"query": torch.zeros(2, 5, 24), "key": torch.zeros(2, 5, 24), "value": torch.zeros(2, 5, 24)} | changed
    for train in (False, True):
        with pytest.raises((TypeError, ValueError), match=f"^{name}:"):
            m.train(train)(**arguments)


@pytest.mark.parametrize("sizes", ((0, 1), (8, 0), (8, -2), (8, 3)))
def test_constructor_errors(sizes: tuple[int, int]):
    with pytest.raises(ValueError, match="embed_dim, num_heads"):
        ta.MultiheadAttention(*sizes)
