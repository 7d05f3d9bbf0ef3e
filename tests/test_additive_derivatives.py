"""Derivatives of additive attention: gradcheck in float64, torch.func, compile, autocast, operators, errors; and its module."""

import copy

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tiled_attention as ta

F64 = torch.float64
ops = torch.ops.tiled_attention


def inputs(per_head: bool = False, dtype: torch.dtype = F64, grad: bool = True) -> list[Tensor]:
    """query (2, 4, 5, 3), key and value of 2 heads and 6 keys, score_weight."""
    return _leaves(((2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4)), per_head, dtype, grad)


def few(per_head: bool = False) -> list[Tensor]:
    """The same for numerical derivatives: query (2, 4, 2, 3), one value head_dim less and 3 keys."""
    return _leaves(((2, 4, 2, 3), (2, 2, 3, 3), (2, 2, 3, 2)), per_head, F64, True)


def _leaves(shapes: tuple, per_head: bool, dtype: torch.dtype, grad: bool) -> list[Tensor]:
    weight = torch.randn((4, 3) if per_head else (3,), dtype=torch.float32 if dtype != F64 else F64)
    return [t.requires_grad_(grad) for t in (*(torch.randn(shape).to(dtype) for shape in shapes), weight)]


OPTIONS = (
    {},
    {"mask": ta.Causal()},
    {"mask": torch.tensor([[True, False, True], [False, False, True]])},
    {"mask": ta.KeyLengths(torch.tensor([2, 0]))},
    {"dropout_p": 0.4},
)


def seeded(options: dict, name: str = "additive_attention"):
    """The same dropout mask in every call."""

    def run(*tensors: Tensor):
        torch.manual_seed(5)
        more = {"return_lse": True} if name == "additive_attention" else {"rows": torch.tensor([1, 0, 1])}
        results = getattr(ta, name)(*tensors, **options, **more)
        if isinstance(results, Tensor):
            return results
        out, lse = results
        return out, torch.where(lse.isfinite(), lse, 0.0)

    return run


@pytest.mark.parametrize("case", list(enumerate(OPTIONS)), ids=str)
def test_gradcheck(case: tuple[int, dict]):
    number, options = case
    tensors = few(per_head=number % 2 == 0)
    torch.autograd.gradcheck(seeded(options), tensors, check_forward_ad=True)
    torch.autograd.gradgradcheck(seeded(options), tensors, check_fwd_over_rev=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck_of_weights(options: dict):
    query, key, _, weight = few(True)
    run = seeded(options, "additive_attention_weights")
    torch.autograd.gradcheck(run, (query, key, weight), check_forward_ad=True)
    torch.autograd.gradgradcheck(run, (query, key, weight), fast_mode=True)


def test_second_derivatives_in_blocks(monkeypatch):
    monkeypatch.setattr(ta.blocks, "BLOCK_ELEMENTS", 20)
    torch.autograd.gradgradcheck(seeded({"mask": ta.Causal(), "dropout_p": 0.3}), few(True))


def test_gradients_with_nan_in_hidden_slots_of_any_order():
    query, key, value, weight = inputs()
    with torch.no_grad():
        key[..., 4:, :], value[..., 4:, :] = torch.nan, torch.nan
    out = ta.additive_attention(query, key, value, weight, mask=ta.KeyLengths(torch.tensor([4, 4])))
    first = torch.autograd.grad(out.square().sum(), (query, key, value, weight), create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), (query, key, value, weight))
    assert all(t.isfinite().all() for t in (out, *first, *second))
    assert (second[1][..., 4:, :] == 0).all() and (second[2][..., 4:, :] == 0).all()


@pytest.mark.parametrize("mapped", ((0, 0, 0, None), (0, None, 0, None), (0, 0, 0, 0), (None, None, 1, None)), ids=str)
def test_vmap(mapped: tuple):
    tensors = [t.detach() if dim is None else torch.stack([t.detach() + i for i in range(3)], dim) for t, dim in zip(inputs(), mapped)]
    run = lambda *t: ta.additive_attention(*t, mask=ta.Causal(), return_lse=True)
    want = [run(*(t if dim is None else t.select(dim, i) for t, dim in zip(tensors, mapped))) for i in range(3)]
    got = torch.vmap(run, in_dims=mapped)(*tensors)
    for a, b in zip(got, zip(*want)):
        torch.testing.assert_close(a, torch.stack(b))
    grad = torch.func.grad(lambda *t: sum(x.sum() for x in run(*t)), argnums=(0, 1, 2, 3))
    want = [grad(*(t if dim is None else t.select(dim, i) for t, dim in zip(tensors, mapped))) for i in range(3)]
    for a, b in zip(torch.vmap(grad, in_dims=mapped)(*tensors), zip(*want)):
        torch.testing.assert_close(a, torch.stack(b))


@pytest.mark.parametrize("per_head", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_opcheck(dtype: torch.dtype, per_head: bool):
    query, key, value, weight = inputs(per_head, dtype, grad=False)
    masks = (torch.rand(5, 6) > 0.3, torch.tensor([6, 3]), None, None, torch.tensor(3), 0.25, [], [])
    call = (query, key, value, weight, *masks, True)
    torch.library.opcheck(ops.additive_attention_fwd.default, call)
    out, lse, residual = ops.additive_attention_fwd(*call)
    torch.library.opcheck(ops.additive_attention_bwd.default, (out, lse, *call[:-1], out, lse, residual, 15 if per_head else 9))
    torch.library.opcheck(ops.additive_attention_weights.default, (query, key, weight, *masks, lse, torch.tensor([3, 0])))
    floats = [t.clone().requires_grad_() for t in (query, key, value, weight)]
    torch.library.opcheck(ops.additive_attention.default, (*floats, *masks, True))
    torch.library.opcheck(ops.additive_attention_weights.default, (floats[0], floats[1], floats[3], *masks, lse, None))


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compile(backend: str):
    tensors = inputs(True, torch.float32)

    def run(*t: Tensor) -> tuple[Tensor, ...]:
        return *ta.additive_attention(*t, mask=ta.Causal(), return_lse=True), ta.additive_attention_weights(
            t[0], t[1], t[3], mask=ta.Causal()
        )

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    results = []
    for function in (run, compiled):
        outputs = function(*tensors)
        results.append([*outputs, *torch.autograd.grad(sum(t.square().sum() for t in outputs), tensors)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(RuntimeError, match="double backward|second derivative|create_graph=False"):
        (first,) = torch.autograd.grad(compiled(*tensors)[0].square().sum(), tensors[0], create_graph=True)
        torch.autograd.grad(first.sum(), tensors[0])


def test_raw_operators_refuse_what_they_cannot_derive():
    query, key, value, weight = inputs()
    call = (query, key, value, weight, None, None, None, None, None, 0.0, [], [])
    with pytest.raises(RuntimeError, match="has no forward-mode derivative"):
        torch.func.jvp(lambda q: ops.additive_attention(q, *call[1:], False)[0], (query.detach(),), (torch.ones_like(query),))
    with pytest.raises(RuntimeError, match="has no derivative under torch.func"):
        torch.func.grad(lambda q: ops.additive_attention(q, *call[1:], False)[0].sum())(query)
    with pytest.raises(RuntimeError, match="additive_attention_fwd has no derivative: call tiled_attention.additive_attention"):
        ops.additive_attention_fwd(*call, False)
    out, lse, residual = ops.additive_attention(*call, True)
    with pytest.raises(RuntimeError, match="second derivatives exist in eager mode only"):
        ops.additive_attention_bwd(out, None, *call, out, lse, residual, 15)


def test_autocast_casts_query_key_and_value():
    query, key, value, weight = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = ta.additive_attention(query, key, value, weight)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ta.additive_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), weight))
    assert torch.autograd.grad(out.float().sum(), weight)[0].dtype == torch.float32


def test_score_weight_of_another_dtype_gets_its_gradient_back():
    query, key, value, weight = inputs(dtype=torch.bfloat16, grad=False)
    weight = weight.bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(ta.additive_attention(query, key, value, weight).float().sum(), weight)
    assert grad.dtype == torch.bfloat16 and grad.shape == weight.shape


def test_flops():
    query, key, value, weight = inputs()
    pairs = 2 * 4 * 5 * 6
    with FlopCounterMode(display=False) as counter:
        ta.additive_attention(query, key, value, weight).sum().backward()
    assert counter.get_total_flops() == pairs * (4 * 3 + 2 * 4) + pairs * (12 * 3 + 4 * 4)


def test_errors():
    query, key, value, weight = inputs(grad=False)
    for bad, kind, text in (
        (weight[:2], ValueError, r"score_weight must have shape \(3,\), or \(4, 3\)"),
        (torch.randn(2, 3, dtype=F64), ValueError, "score_weight must have shape"),
        (torch.ones(3, dtype=torch.int64), TypeError, "score_weight must be a float tensor"),
        (None, TypeError, "score_weight must be a float tensor, got NoneType"),
    ):
        with pytest.raises(kind, match=text):
            ta.additive_attention(query, key, value, bad)
    with pytest.raises(ValueError, match="query must have shape"):
        ta.additive_attention(query[0, 0], key[0, 0], value[0, 0], weight)
    with pytest.raises((RuntimeError, ValueError), match="head_dim of query"):
        ta.additive_attention(query, key[..., :2], value, weight)
    with pytest.raises(ValueError, match=r"dropout_p must be a number in \[0, 1\]"):
        ta.additive_attention(query, key, value, weight, dropout_p=1.5)
    with pytest.raises(TypeError, match="rows must be an integer tensor"):
        ta.additive_attention_weights(query, key, weight, rows=torch.tensor([0.5]))
    with pytest.raises(RuntimeError, match=r"rows must be in \[0, seqlen_q = 5\), got 5 at 1"):
        ta.additive_attention_weights(query, key, weight, rows=torch.tensor([0, 5]))
    plain = (None, None, None, None, None, 0.0, [], [])
    for bad, text in (
        (weight.float(), "score_weight must be float64, got float32"),
        (torch.randn(4, 4, dtype=F64), "score_weight must have shape"),
    ):
        with pytest.raises(RuntimeError, match=text):
            ops.additive_attention_fwd(query, key, value, bad, *plain, False)
    out, lse, residual = ops.additive_attention_fwd(query, key, value, weight, *plain, True)
    with pytest.raises(RuntimeError, match=r"gradients must be in \[0, 16\)"):
        ops.additive_attention_bwd(out, None, query, key, value, weight, *plain, out, lse, residual, 16)
    with pytest.raises(RuntimeError, match="lse must have shape"):
        ops.additive_attention_bwd(out, None, query, key, value, weight, *plain, out, lse[..., :2], residual, 15)


# The module


def composite(module: ta.AdditiveAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Written out, with one head after the other."""
    outs, weights = [], []
    size, parts = module.hidden_dim // module.num_heads, value.chunk(module.num_heads, -1)
    for head in range(module.num_heads):
        cut = slice(head * size, (head + 1) * size)
        q = query @ module.query_proj.weight[cut].mT
        k = key @ module.key_proj.weight[cut].mT + module.key_proj.bias[cut]
        score = torch.tanh(q[..., :, None, :] + k[..., None, :, :]) @ module.score_weight[head]
        weights.append((score if mask is None else score.masked_fill(~mask, -torch.inf)).softmax(-1))
        outs.append(weights[-1] @ parts[head])
    return torch.cat(outs, -1), torch.stack(weights, -3)


@pytest.mark.parametrize("num_heads", (1, 3))
def test_module_equals_the_composite(num_heads: int):
    module = ta.AdditiveAttention(5, 7, 12, num_heads=num_heads, dtype=F64)
    torch.nn.init.normal_(module.key_proj.bias)
    query, key, value = (torch.randn(2, n, d, dtype=F64, requires_grad=True) for n, d in ((3, 5), (6, 7), (6, 9)))
    mask = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])[:, None]
    leaves = [query, key, value, *module.parameters()]
    for given in (None, mask):
        out, none = module(query, key, value, mask=given)
        again, weights = module(query, key, value, mask=given, need_weights=True)
        want, want_weights = composite(module, query, key, value, given)
        assert none is None and torch.equal(out, again)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(weights, want_weights[:, 0] if num_heads == 1 else want_weights)
        ours, theirs = ([t.square().sum() for t in pair] for pair in ((again, weights), (want, want_weights)))
        for a, b in zip(torch.autograd.grad(sum(ours), leaves), torch.autograd.grad(sum(theirs), leaves), strict=True):
            torch.testing.assert_close(a, b)


def test_keys_are_projected_once_for_all_steps_of_a_decoder():
    module = ta.AdditiveAttention(5, 7, 8)
    query, key, value = torch.randn(2, 4, 5), torch.randn(2, 6, 7), torch.randn(2, 6, 3)
    calls = []
    module.key_proj.register_forward_hook(lambda *_: calls.append(1))
    projected = module.project_keys(key)
    steps = [module(query[:, i : i + 1], None, value, projected_key=projected)[0] for i in range(4)]
    assert len(calls) == 1
    torch.testing.assert_close(torch.cat(steps, 1), module(query, key, value)[0])


def test_module_weights_are_those_that_made_out_under_dropout():
    module = ta.AdditiveAttention(5, 5, 8, num_heads=2, dropout=0.5)
    query, value = torch.randn(3, 6, 5), torch.eye(6).repeat(1, 2).expand(3, 6, 12)
    out, weights = module(query, query, value, need_weights=True)
    torch.testing.assert_close(out.unflatten(-1, (2, 6)).transpose(1, 2), weights)
    assert (weights == 0).any()
    module.eval()
    assert not (module(query, query, value, need_weights=True)[1] == 0).any()


def test_module_state_copy_masks_and_compile():
    module = ta.AdditiveAttention(5, 5, 8)
    other = ta.AdditiveAttention(5, 5, 8)
    other.load_state_dict(module.state_dict())
    query = torch.randn(2, 6, 5)
    mask = ta.Causal() & ta.KeyLengths(torch.tensor([6, 3]))
    want, _ = module(query, query, query, mask=mask)
    for same in (other, copy.deepcopy(module), torch.compile(module, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(same(query, query, query, mask=mask)[0], want)
    assert "5, 5, 8, num_heads=1, dropout=0.0" in repr(module)
    torch.testing.assert_close(module(query[0], query[0], query[0], mask=ta.Causal())[0], want[0])


def test_module_errors():
    for sizes, options, name in (
        ((0, 1, 1), {}, "query_dim"),
        ((1, 1, 5), {"num_heads": 2}, "hidden_dim"),
        ((1, 1, 1), {"dropout": 2.0}, "dropout"),
    ):
        with pytest.raises(ValueError, match=f"{name}(: expected| must be)"):
            ta.AdditiveAttention(*sizes, **options)
    for sizes, dropout, text in (((4.0, 1, 1), 0.0, "query_dim.*4.0"), ((1, "2", 1), 0.0, "key_dim"), ((1, 1, 1), "a", "dropout.*'a'")):
        with pytest.raises(TypeError, match=text):
            ta.AdditiveAttention(*sizes, dropout=dropout)
    module = ta.AdditiveAttention(5, 7, 8, num_heads=2)
    query, key, value = torch.randn(2, 3, 5), torch.randn(2, 6, 7), torch.randn(2, 6, 4)
    for arguments, options, text in (
        ((query[..., :4], key, value), {}, r"query: expected shape \(..., seqlen, 5\)"),
        ((query, key[..., :4], value), {}, r"key: expected shape"),
        ((query, key, value[..., :3]), {}, "value: expected a last dimension that num_heads = 2 divides"),
        ((query, None, value), {}, "key, projected_key: expected one of the two, got neither"),
        ((query, key, value), {"projected_key": key}, "got both"),
        ((query, None, value), {"projected_key": key}, "projected_key: expected the result of project_keys"),
        ((query, None, value), {"projected_key": torch.randn(2, 1, 6, 4)}, r"projected_key: .*2, seqlen_kv, 4\), got \(2, 1, 6, 4\)"),
    ):
        with pytest.raises(ValueError, match=text):
            module(*arguments, **options)
    with pytest.raises(TypeError, match="query: expected a floating-point tensor, got int"):
        module(3, key, value)
