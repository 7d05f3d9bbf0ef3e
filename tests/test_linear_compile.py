"""Linear attention under torch.compile and torch.export, fake tensors, opcheck, FLOP counts: numbers, strides, errors as in eager mode."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import tiled_attention as ta
from tiled_attention.testing import DTYPES, LAYOUTS, lay_out

BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(n=5, m=None, heads=4, heads_kv=2, dim=8, batch=2, dtype=torch.float32, grad=True) -> list[Tensor]:
    shapes = ((batch, heads, n, dim), (batch, heads_kv, m or n, dim), (batch, heads_kv, m or n, dim))
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def state_of(heads=2, dim=8, batch=2, grad=True) -> ta.LinearState:
    kv, k_sum = torch.randn(batch, heads, dim, dim), torch.rand(batch, heads, dim)
    return ta.LinearState(kv.requires_grad_(grad), k_sum.requires_grad_(grad))


def flat(results) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(results)


def agrees(compiled, eager, tensors, tolerance=1e-5):
    results = []
    for function in (compiled, eager):
        outs = flat(function(*tensors))
        loss = sum(part.float().square().sum() for part in outs)
        results.append([*outs, *torch.autograd.grad(loss, [x for x in flat(tensors) if x.requires_grad])])
    for ours, expected in zip(*results):
        assert ours.stride() == expected.stride()
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


OPTIONS = {
    "all keys": dict(),
    "causal": dict(causal=True),
    "padding": dict(key_mask=torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool(), causal=True),
    "not normalised": dict(normalize=False, scale=0.3, feature_map=("relu", "exp")),
    "callable": dict(feature_map=lambda x: torch.cat([x.relu(), (-x).relu()], -1), causal=True),
    "module": dict(feature_map=(torch.nn.Softplus(), "identity")),
    "decay per token": dict(causal=True, log_decay=-torch.rand(2, 1, 5)),
    "decay per feature": dict(causal=True, log_decay=-torch.rand(1, 2, 5, 8)),
    "decay per query head": dict(causal=True, log_decay=-torch.rand(1, 4, 5)),
    "state": dict(causal=True, initial_state=state_of(grad=False), return_state=True),
}


@BACKENDS
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, backend):
    run = lambda q, k, v: ta.linear_attention(q, k, v, **OPTIONS[name])
    agrees(torch.compile(run, fullgraph=True, backend=backend), run, inputs())


@BACKENDS
def test_tensors_of_options(backend):
    def run(query, key, value, state, gate, key_mask):
        options = dict(log_decay=gate, key_mask=key_mask, initial_state=state, return_state=True)
        return ta.linear_attention(query, key, value, causal=True, **options)

    gate = (-torch.rand(2, 2, 5)).requires_grad_()
    agrees(torch.compile(run, fullgraph=True, backend=backend), run, [*inputs(), state_of(), gate, torch.rand(2, 5) > 0.3])


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, backend):
    run = lambda q, k, v: ta.linear_attention(q, k, v, causal=True, return_state=True)
    agrees(torch.compile(run, fullgraph=True, backend=backend), run, inputs(n=9, dtype=dtype), tolerance=0)


@BACKENDS
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_recompile_at_most_twice(causal, backend):
    run = lambda q, k, v: ta.linear_attention(q, k, v, causal=causal, return_state=True)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for n in (7, 64, 65, 130, 1, 33):
        agrees(compiled, run, inputs(n=n), tolerance=1e-4)
    assert counter.frame_count <= 3


@BACKENDS
@pytest.mark.parametrize("grad", [True, False])
def test_a_step(grad, backend):
    def run(query, key, value, state, gate):
        return ta.linear_attention_step(query, key, value, state, log_decay=gate)

    tensors = [*inputs(n=1, grad=grad), state_of(grad=grad), -torch.rand(2, 2, 1)]
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    if grad:
        agrees(compiled, run, tensors)
    else:
        torch.testing.assert_close(compiled(*tensors), run(*tensors))


@BACKENDS
@pytest.mark.parametrize("dynamic", [None, True])
def test_steps_in_place(dynamic, backend):
    def decode(query, key, value, state):
        outs = []
        for t in range(3):
            token = (x[:, :, t : t + 1] for x in (query, key, value))
            out, state = ta.linear_attention_step(*token, state, inplace=True)
            outs.append(out)
        return torch.cat(outs, 2)

    tensors, state = inputs(n=3, grad=False), state_of(grad=False)
    mine, eager = (ta.LinearState(*(x.clone() for x in state)) for _ in range(2))
    ours = torch.compile(decode, fullgraph=True, dynamic=dynamic, backend=backend)(*tensors, mine)
    torch.testing.assert_close(ours, decode(*tensors, eager))
    torch.testing.assert_close((*mine,), (*eager,))
    out, last = ta.linear_attention(*tensors, causal=True, initial_state=state, return_state=True)
    torch.testing.assert_close((ours, *mine), (out, *last))


@BACKENDS
def test_autocast_inside_and_outside(backend):
    tensors = [*inputs(n=9), (-torch.rand(2, 2, 9)).requires_grad_()]
    run = lambda q, k, v, g: ta.linear_attention(q, k, v, log_decay=g, causal=True, return_state=True)

    def inside(*tensors):
        with torch.autocast("cpu", torch.bfloat16):
            return run(*tensors)

    out, state = inside(*tensors)
    assert out.dtype == torch.bfloat16 and state.kv.dtype == torch.float32
    agrees(torch.compile(inside, fullgraph=True, backend=backend), inside, tensors)
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        agrees(torch.compile(run, fullgraph=True, backend=backend), run, tensors)


def test_no_graph_breaks():
    explanation = torch._dynamo.explain(lambda q, k, v: ta.linear_attention(q, k, v, causal=True, return_state=True))(*inputs())
    assert explanation.graph_break_count == 0


# Export


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_export_with_dynamic_batch_and_length(strict, causal):
    class Model(torch.nn.Module):
        def forward(self, query, key, value, key_mask):
            return ta.linear_attention(query, key, value, key_mask=key_mask, causal=causal, return_state=True)

    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=4096)
    shapes = {**{name: {0: batch, 2: length} for name in ("query", "key", "value")}, "key_mask": {0: batch, 1: length}}
    example = (*inputs(grad=False), torch.ones(2, 5).bool())
    program = torch.export.export(Model(), example, dynamic_shapes=shapes, strict=strict)
    for case in (dict(n=5, batch=2), dict(n=33, batch=1), dict(n=64, batch=5)):
        tensors = (*inputs(grad=False, **case), torch.rand(case["batch"], case["n"]) > 0.2)
        torch.testing.assert_close(flat(program.module()(*tensors)), flat(Model()(*tensors)))
    for graph in (program.graph, program.run_decompositions().graph):
        assert any("tiled_attention" in str(node.target) for node in graph.nodes)


def test_export_of_a_step():
    class Model(torch.nn.Module):
        def forward(self, query, key, value, kv, k_sum):
            return ta.linear_attention_step(query, key, value, ta.LinearState(kv, k_sum))

    with torch.no_grad():
        program = torch.export.export(Model(), (*inputs(n=1, grad=False), *state_of(grad=False)))
        tensors = (*inputs(n=1, grad=False), *state_of(grad=False))
        torch.testing.assert_close(flat(program.module()(*tensors)), flat(Model()(*tensors)))


# Fake tensors have the shapes, dtypes and strides of real ones.

WITHOUT = (None,) * 5


def operators(query, key, value, gate, kv, k_sum):
    ops = torch.ops.tiled_attention
    arguments = (query, key, value, None, gate, kv, k_sum, None, 1, 1, True, True, 1.0)
    out, *state = ops.linear_attention_fwd(*arguments)
    gradients = ops.linear_attention_bwd(torch.ones_like(out), *state, *arguments, 63)
    few = ops.linear_attention_bwd(torch.ones_like(out), None, None, *arguments, 0b100010)
    token = [x[..., :1, :] for x in (query, key, value, gate)]
    step = ops.linear_attention_step(*token[:3], None, token[3], kv, k_sum, 1, 1, True, 1.0)
    in_place = ops.linear_attention_step_(*token[:3], None, token[3], kv, k_sum, 1, 1, True, 1.0)
    across = ops.linear_attention_fwd(query[..., :3, :], key, value, *WITHOUT, 1, 1, False, True, 1.0)
    return [out, *state, *gradients, *few, *step, in_place, *across]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim_v", [8, 3, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fake_strides(layout, dim_v, dtype):
    real = torch.float64 if dtype == torch.float64 else torch.float32
    query, key = (lay_out(torch.randn(2, 4, 5, 8).to(dtype), layout) for _ in range(2))
    value = lay_out(torch.randn(2, 4, 5, dim_v).to(dtype), layout)
    gate = -torch.rand(2, 4, 5, 8, dtype=real)
    tensors = (query, key, value, gate, torch.randn(2, 4, 8, dim_v, dtype=real), torch.rand(2, 4, 8, dtype=real))
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in tensors]
    real_results = operators(*tensors)
    with mode:
        fake_results = operators(*fakes)
    for a, b in zip(real_results, fake_results):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert all(s == t for s, t, size in zip(a.stride(), b.stride(), a.shape) if size > 1)


def test_meta_tensors():
    query, key, value = (tensor.detach().to("meta") for tensor in inputs(n=9))
    gate = torch.zeros(2, 2, 9, device="meta")
    out, state = ta.linear_attention(query, key, value, causal=True, log_decay=gate, return_state=True)
    assert out.is_meta and out.shape == query.shape and state.kv.shape == (2, 2, 8, 8) and state.k_sum.shape == (2, 2, 8)
    token = [x[:, :, :1] for x in (query, key, value)]
    out, after = ta.linear_attention_step(*token, state)
    assert out.shape == (2, 4, 1, 8) and after.kv.is_meta
    query.requires_grad_()
    (gradient,) = torch.autograd.grad(ta.linear_attention(query, key, value).sum(), query)
    assert gradient.is_meta and gradient.shape == query.shape


# The same arguments are refused, by the same names, with data and without.

BAD_ARGUMENTS = {
    "key dtype": ("key", lambda q, k, v: ta.linear_attention(q, k.double(), v)),
    "query dtype": ("query", lambda q, k, v: ta.linear_attention(q.long(), k.long(), v.long())),
    "rank": ("key", lambda q, k, v: ta.linear_attention(q, k[0], v)),
    "heads": ("num_heads", lambda q, k, v: ta.linear_attention(q[:, :3], k, v)),
    "length": ("key", lambda q, k, v: ta.linear_attention(q[:, :, :4], k, v, causal=True)),
    "map": ("feature_map", lambda q, k, v: ta.linear_attention(q, k, v, feature_map="gelu")),
    "map length": ("feature_map", lambda q, k, v: ta.linear_attention(q, k, v, feature_map=lambda x: x[..., :2, :])),
    "mask": ("key_mask", lambda q, k, v: ta.linear_attention(q, k, v, key_mask=torch.ones(4).bool())),
    "decay": ("log_decay", lambda q, k, v: ta.linear_attention(q, k, v, causal=True, log_decay=torch.zeros(2, 3, 5))),
    "decay without order": ("log_decay", lambda q, k, v: ta.linear_attention(q, k, v, log_decay=torch.zeros(2, 2, 5))),
    "state": ("initial_state", lambda q, k, v: ta.linear_attention(q, k, v, causal=True, initial_state=state_of(dim=7))),
    "step": ("query", lambda q, k, v: ta.linear_attention_step(q, k, v, state_of())),
    "step, state": ("state", lambda q, k, v: ta.linear_attention_step(q[:, :, :1], k[:, :, :1], v[:, :, :1], state_of(batch=1))),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_errors_name_the_argument_everywhere(name):
    expected, call = BAD_ARGUMENTS[name]
    tensors = inputs(grad=False)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=expected):
        call(*tensors)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(tensor) for tensor in tensors]
    with mode, pytest.raises((ValueError, TypeError, RuntimeError), match=expected):
        call(*fakes)
    with pytest.raises(Exception, match=expected):
        torch.compile(call, fullgraph=True, backend="eager")(*tensors)


def raw(query, key, value, key_mask=None, log_decay=None, kv=None, k_sum=None, causal=True):
    return torch.ops.tiled_attention.linear_attention_fwd(query, key, value, key_mask, log_decay, kv, k_sum, None, 1, 1, causal, True, 1.0)


BAD_RAW = {
    "value length": ("value", lambda q, k, v: raw(q, k, v[:, :, :4])),
    "causal length": ("key", lambda q, k, v: raw(q[:, :, :4], k, v)),
    "mask shape": ("key_mask", lambda q, k, v: raw(q, k, v, key_mask=torch.ones(2, 1, 1, 4).bool())),
    "mask dtype": ("key_mask", lambda q, k, v: raw(q, k, v, key_mask=torch.ones(2, 1, 1, 5))),
    "decay shape": ("log_decay", lambda q, k, v: raw(q, k, v, log_decay=torch.zeros(2, 2, 5, 3))),
    "decay dtype": ("log_decay", lambda q, k, v: raw(q, k, v, log_decay=torch.zeros(2, 2, 5, 1).double())),
    "kv": ("initial_kv", lambda q, k, v: raw(q, k, v, kv=torch.zeros(2, 2, 8, 7), k_sum=torch.zeros(2, 2, 8))),
    "k_sum": ("initial_k_sum", lambda q, k, v: raw(q, k, v, kv=torch.zeros(2, 2, 8, 8), k_sum=torch.zeros(2, 2, 7))),
    "kv alone": ("initial_k", lambda q, k, v: raw(q, k, v, kv=torch.zeros(2, 2, 8, 8))),
    "order": ("log_decay|causal", lambda q, k, v: raw(q, k, v, log_decay=torch.zeros(2, 2, 5, 1), causal=False)),
}


@pytest.mark.parametrize("name", BAD_RAW)
def test_raw_operators_refuse_the_same(name):
    expected, call = BAD_RAW[name]
    tensors = inputs(grad=False)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=expected):
        call(*tensors)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, pytest.raises((ValueError, TypeError, RuntimeError), match=expected):
        call(*(mode.from_tensor(tensor) for tensor in tensors))


# What torch cannot express inside compiled code is an error, never a wrong number.

QUERY_ONLY = {
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (torch.ones_like(q),))[1],
    "jacfwd": lambda f, q: torch.func.jacfwd(f)(q),
    "grad": lambda f, q: torch.func.grad(lambda q: f(q).sum())(q),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "hessian": lambda f, q: torch.func.hessian(lambda q: f(q).sum())(q),
    "vmap": lambda f, q: torch.vmap(f)(q[None])[0],
    "vmap of grad": lambda f, q: torch.vmap(torch.func.grad(lambda q: f(q).sum()))(q[None])[0],
    "dual numbers": lambda f, q: _dual(f, q),
}


def _dual(f, q):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(q, torch.ones_like(q)))).tangent


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("function", ["whole", "step"])
@pytest.mark.parametrize("name", QUERY_ONLY)
def test_transforms_and_compile_give_the_right_number_or_an_error(name, function, where, fullgraph):
    _, key, value = inputs(n=1, heads=2, heads_kv=2, dim=2, batch=1, grad=False)
    query, state = torch.randn_like(key), state_of(dim=2, batch=1, grad=False)
    f = {
        "whole": lambda q: ta.linear_attention(q, key, value, causal=True, initial_state=state),
        "step": lambda q: ta.linear_attention_step(q, key, value, state)[0],
    }[function]
    transform = QUERY_ONLY[name]
    expected = transform(f, query)
    if where == "inside":
        compiled = torch.compile(lambda q: transform(f, q), fullgraph=fullgraph, backend="aot_eager")
    else:
        inner = torch.compile(f, fullgraph=fullgraph, backend="aot_eager")
        compiled = lambda q: transform(inner, q)
    try:
        ours = compiled(query)
    except Exception as error:
        assert "tiled_attention" in str(error) or "torch.func" in str(error), error
    else:
        torch.testing.assert_close(ours, expected)


def test_vmap_inside_compile_folds():
    tensors = [torch.randn(3, 1, 2, 5, 4) for _ in range(3)]
    run = lambda *tensors: torch.vmap(lambda q, k, v: ta.linear_attention(q, k, v, causal=True))(*tensors)
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(*tensors), run(*tensors))
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)


@BACKENDS
def test_second_derivatives_of_compiled_code_are_an_error(backend):
    query, key, value = inputs()
    out = torch.compile(lambda *x: ta.linear_attention(*x, causal=True), fullgraph=True, backend=backend)(query, key, value)
    with pytest.raises(RuntimeError, match="double backward|second derivative"):
        (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
        torch.autograd.grad(first.sum(), query)


# Operators


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype, everything):
    ops = torch.ops.tiled_attention
    arguments = [*inputs(dtype=dtype, grad=False), *WITHOUT, 1, 1, everything, True, 1.0]
    if everything:
        arguments[3:7] = [torch.rand(2, 1, 1, 5) > 0.2, -torch.rand(2, 2, 5, 1), *state_of(grad=False)]
    torch.library.opcheck(ops.linear_attention_fwd.default, tuple(arguments))
    results = ops.linear_attention_fwd(*arguments)
    torch.library.opcheck(ops.linear_attention_bwd.default, (*map(torch.ones_like, results), *arguments, 63 if everything else 7))
    floats = [x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
    torch.library.opcheck(ops.linear_attention.default, tuple(floats))
    token = [x[:, :, :1] for x in arguments[:3]]
    step = (*token, None, -torch.rand(2, 2, 1, 1) if everything else None, *state_of(grad=False), 1, 1, True, 1.0)
    for op in (ops.linear_attention_step.default, ops.linear_attention_step_.default):
        torch.library.opcheck(op, step)


def test_flops():
    query, key, value = inputs(n=64, heads=4, heads_kv=4)
    with FlopCounterMode(display=False) as counter:
        ta.linear_attention(query, key, value, causal=True).sum().backward()
    forward = 4 * 64 * 8 * (8 + 32) * 2 * 4  # 4 n d (d + 32) of each of 8 heads
    assert counter.get_total_flops() == forward + forward * 5 // 2
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        ta.linear_attention(query[:, :, :3], key, value)
    assert counter.get_total_flops() == 2 * (3 + 64) * 8 * 8 * 8
