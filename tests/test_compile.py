"""torch.compile, torch.export, fake tensors, opcheck, FLOP counts: the same numbers, strides and errors as in eager mode."""

import math

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


def agrees(compiled, eager, tensors, tolerance=1e-6, seed=None):
    results = []
    for function in (compiled, eager):
        if seed is not None:
            torch.manual_seed(seed)
        out = function(*tensors)
        outs = out if isinstance(out, tuple) else (out,)
        loss = sum(torch.where(part == -math.inf, 0.0, part).float().square().sum() for part in outs)
        gradients = torch.autograd.grad(loss, [tensor for tensor in tensors if tensor.requires_grad])
        results.append([*outs, *gradients])
    for ours, expected in zip(*results):
        assert ours.stride() == expected.stride()
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


OPTIONS = {
    "plain": dict(),
    "causal": dict(mask=ta.Causal()),
    "streaming": dict(mask=ta.Causal() & (ta.SlidingWindow(2, 0) | ta.Sinks(1))),
    "lengths": dict(mask=ta.KeyLengths(torch.tensor([3, 1]))),
    "documents": dict(mask=ta.Documents(torch.tensor([0, 2, 5])) & ta.Causal()),
    "offset": dict(mask=ta.Causal(), query_offset=1),
    "offsets": dict(mask=ta.Causal(), query_offset=torch.tensor([0, 2])),
    "softcap": dict(softcap=2.0, scale=0.3),
    "lse": dict(return_lse=True),
    "dropout": dict(dropout_p=0.5, return_lse=True),
}


@BACKENDS
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, backend):
    options = OPTIONS[name]
    run = lambda q, k, v: ta.attention(q, k, v, **options)
    agrees(torch.compile(run, fullgraph=True, backend=backend), run, inputs(), seed=4)


@BACKENDS
def test_tensors_of_options(backend):
    def run(query, key, value, bias, slopes, sinks, keep):
        return ta.attention(query, key, value, mask=keep, bias=bias, alibi_slopes=slopes, sinks=sinks, return_lse=True)

    keep = torch.rand(2, 1, 1, 5) > 0.3
    others = [torch.randn(4, 5, 1, requires_grad=True), torch.rand(4, requires_grad=True), torch.randn(4, requires_grad=True)]
    agrees(torch.compile(run, fullgraph=True, backend=backend), run, [*inputs(), *others, keep])


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, backend):
    run = lambda q, k, v: ta.attention(q, k, v, mask=ta.Causal())
    agrees(torch.compile(run, fullgraph=True, backend=backend), run, inputs(n=9, dtype=dtype), tolerance=0)


@BACKENDS
@pytest.mark.parametrize("function", ["attention", "drop-in", "weights"])
def test_lengths_recompile_at_most_twice(function, backend):
    run = {
        "attention": lambda q, k, v: ta.attention(q, k, v, mask=ta.Causal()),
        "drop-in": lambda q, k, v: ta.scaled_dot_product_attention(q, k, v, is_causal=q.shape[-2] > 1, enable_gqa=True),
        "weights": lambda q, k, v: ta.attention_weights(q, k, mask=ta.Causal()),
    }[function]
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for n in (7, 64, 65, 130, 1, 33):
        query, key, value = inputs(n=n)
        agrees(compiled, run, [query, key, value.detach() if function == "weights" else value], tolerance=1e-5)
    assert counter.frame_count <= 3


def test_a_static_function_becomes_dynamic_once():
    counter = CompileCounterWithBackend("aot_eager")
    run = lambda q, k, v: ta.attention(q, k, v, mask=ta.SlidingWindow(3, 0), softcap=5.0)
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for n in (7, 64, 65, 130, 33):
        agrees(compiled, run, inputs(n=n))
    assert counter.frame_count <= 3


@BACKENDS
def test_dropout_draws_as_eager_does(backend):
    query, key, value = inputs(n=9, grad=False)
    run = lambda q, k, v: ta.attention(q, k, v, dropout_p=0.5)
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    torch.manual_seed(1)
    first, second = compiled(query, key, value), compiled(query, key, value)
    torch.manual_seed(1)
    assert torch.equal(first, run(query, key, value)) and torch.equal(second, run(query, key, value))
    assert not torch.equal(first, second)
    with pytest.raises(Exception, match="generator"):
        torch.compile(lambda q: ta.attention(q, q, q, dropout_p=0.5, generator=torch.default_generator), fullgraph=True, backend=backend)(
            query
        )


@BACKENDS
def test_checkpoint_inside_compile_replays_dropout(backend):
    def run(query, key, value):
        inner = lambda *tensors: ta.attention(*tensors, dropout_p=0.5)
        return torch.utils.checkpoint.checkpoint(inner, query, key, value, use_reentrant=False)

    torch.manual_seed(0)
    query, key, value = inputs(n=9)
    out = torch.compile(run, fullgraph=True, backend=backend)(query, key, value)
    (slope,) = torch.autograd.grad(out.sum(), value)
    torch.testing.assert_close((slope * value).sum(), out.sum())  # out is linear in value under one mask


@pytest.mark.parametrize("average", [False, True])
@BACKENDS
def test_attention_with_weights(backend, average):
    from tiled_attention.weights import attention_with_weights

    def run(query, key, value):
        return attention_with_weights(query, key, value, mask=ta.Causal(), dropout_p=0.3, average=average, softcap=3.0)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    for n in (6, 9):
        agrees(compiled, run, inputs(n=n), tolerance=1e-5, seed=3)


@BACKENDS
def test_merge_and_dropout_mask(backend):
    def run(query, key, value):
        out_a, lse_a = ta.attention(query, key[..., :2, :], value[..., :2, :], return_lse=True)
        out_b, lse_b = ta.attention(query, key[..., 2:, :], value[..., 2:, :], return_lse=True)
        return ta.merge_attention(out_a, lse_a, out_b, lse_b)

    agrees(torch.compile(run, fullgraph=True, backend=backend), run, inputs(), tolerance=1e-5)
    draw = lambda x: ta.dropout_mask(2, 3, x.shape[0], 7, 0.4)
    torch.manual_seed(0)
    ours = torch.compile(draw, fullgraph=True, dynamic=True, backend=backend)(torch.zeros(5))
    torch.manual_seed(0)
    assert torch.equal(ours, draw(torch.zeros(5)))


@BACKENDS
def test_autocast_inside_and_outside(backend):
    query, key, value = inputs(n=9)
    bias = torch.randn(9, 9, requires_grad=True)
    run = lambda q, k, v, b: ta.attention(q, k, v, bias=b, mask=ta.Causal())

    def inside(*tensors):
        with torch.autocast("cpu", torch.bfloat16):
            return run(*tensors)

    assert inside(query, key, value, bias).dtype == torch.bfloat16
    agrees(torch.compile(inside, fullgraph=True, backend=backend), inside, [query, key, value, bias], tolerance=0)
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        agrees(torch.compile(run, fullgraph=True, backend=backend), run, [query, key, value, bias], tolerance=0)


def test_autocast_casts_what_torch_casts():
    query, key, value = inputs(n=9, grad=False)
    with torch.autocast("cpu", torch.float16):
        assert ta.attention(query, key, value).dtype == torch.float16
        assert ta.attention(query.bfloat16(), key, value.half()).dtype == torch.float16
        assert ta.attention(query.double(), key.double(), value.double()).dtype == torch.float64
        assert ta.attention_weights(query, key).dtype == torch.float32
        assert ta.scaled_dot_product_attention(query, key, value, enable_gqa=True).dtype == torch.float16
    bias = torch.full((9, 9), torch.finfo(torch.float32).min)
    with torch.autocast("cpu", torch.float16):
        out = ta.attention(query, key, value, bias=bias)  # a float32 bias stays what it is: equal minima, not -inf
    torch.testing.assert_close(out.float()[:, 0, 0], value[:, 0].mean(-2), atol=1e-3, rtol=1e-3)


# Export


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("function", ["attention", "drop-in", "dropout"])
def test_export_with_dynamic_batch_and_length(strict, function):
    class Model(torch.nn.Module):
        def forward(self, query, key, value):
            if function == "attention":
                return ta.attention(query, key, value, mask=ta.Causal(), softcap=3.0)
            if function == "dropout":
                return ta.attention(query, key, value, dropout_p=0.5)
            return ta.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=4096)
    shapes = {name: {0: batch, 2: length} for name in ("query", "key", "value")}
    program = torch.export.export(Model(), tuple(inputs(grad=False)), dynamic_shapes=shapes, strict=strict)
    module = program.module()
    for case in (dict(n=5, batch=2), dict(n=33, batch=1), dict(n=64, batch=5)):
        tensors = inputs(grad=False, **case)
        torch.manual_seed(0)
        ours = module(*tensors)
        torch.manual_seed(0)
        torch.testing.assert_close(ours, Model()(*tensors))
    assert any("tiled_attention" in str(node.target) for node in program.graph.nodes)
    decomposed = program.run_decompositions()
    assert any("tiled_attention" in str(node.target) for node in decomposed.graph.nodes)


def test_export_with_an_unbacked_batch():
    class Model(torch.nn.Module):
        def forward(self, x, keep):
            picked = x[keep]  # its size is known at run time only
            return ta.attention(picked, picked, picked, mask=ta.Causal())

    x, keep = torch.randn(4, 2, 5, 8), torch.tensor([True, False, True, True])
    program = torch.export.export(Model(), (x, keep), strict=False)
    for other in (keep, torch.tensor([True, False, False, False])):
        torch.testing.assert_close(program.module()(x, other), Model()(x, other))


def test_masks_are_inputs_of_exported_programs():
    class Model(torch.nn.Module):
        def forward(self, x, lengths):
            return ta.attention(x, x, x, mask=ta.Causal() & ta.KeyLengths(lengths))

    x, lengths = torch.randn(2, 2, 5, 8), torch.tensor([5, 3])
    program = torch.export.export(Model(), (x, lengths))
    for other in (lengths, torch.tensor([1, 2])):
        torch.testing.assert_close(program.module()(x, other), Model()(x, other))


# Fake tensors have the shapes, dtypes and strides of real ones.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim_v", [8, 3, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_strides(layout, dim_v, dtype):
    query, key = (lay_out(torch.randn(2, 4, 5, 8).to(dtype), layout) for _ in range(2))
    value = lay_out(torch.randn(2, 4, 5, dim_v).to(dtype), layout)
    bias = lay_out(torch.randn(2, 4, 5, 5), layout)
    arguments = (None, bias, *(None,) * 11, 0.3, 0.0, 0.0, [], [], False, False)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def operators(query, key, value, arguments):
        ops = torch.ops.tiled_attention
        out, lse, residual = ops.attention_fwd(query, key, value, *arguments, True)
        gradients = ops.attention_bwd(torch.ones_like(out), None, query, key, value, *arguments, out, lse, residual, 15)
        few = ops.attention_bwd(torch.ones_like(out), None, query, key, value, *arguments, out, lse, residual, 2)
        weights = ops.attention_weights(query, key, *arguments[:3], *arguments[4:], lse, None, True)
        return [out, lse, residual, *gradients, *few, weights]

    real = operators(query, key, value, arguments)
    fakes = [mode.from_tensor(tensor) for tensor in (query, key, value, bias)]
    with mode:
        fake = operators(*fakes[:3], (None, fakes[3], *arguments[2:]))
    for a, b in zip(real, fake):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert all(s == t for s, t, size in zip(a.stride(), b.stride(), a.shape) if size > 1)


def test_meta_tensors():
    query, key, value = (tensor.detach().to("meta") for tensor in inputs(n=9))
    out, lse = ta.attention(query, key, value, mask=ta.Causal(), bias=torch.zeros(9, 9, device="meta"), dropout_p=0.5, return_lse=True)
    assert out.is_meta and out.shape == query.shape and lse.shape == query.shape[:-1]
    assert ta.attention_weights(query, key).shape == (2, 4, 9, 9)
    assert ta.scaled_dot_product_attention(query, query, query, is_causal=True).shape == query.shape
    query.requires_grad_()
    (gradient,) = torch.autograd.grad(ta.attention(query, key, value).sum(), query)
    assert gradient.is_meta and gradient.shape == query.shape


# What the checks of fake tensors refuse, the operators refuse too: the same arguments are named.

BAD_ARGUMENTS = {
    "key dtype": ("key", lambda q, k, v: ta.attention(q, k.double(), v)),
    "value dtype": ("value", lambda q, k, v: ta.attention(q, k, v.double())),
    "query dtype": ("query", lambda q, k, v: ta.attention(q.long(), k.long(), v.long())),
    "rank": ("key", lambda q, k, v: ta.attention(q, k[0], v)),
    "rank 2": ("query", lambda q, k, v: ta.attention(q[0, 0], k[0, 0], v[0, 0])),
    "batch": ("key", lambda q, k, v: ta.attention(q, k[:1], v)),
    "head_dim": ("key", lambda q, k, v: ta.attention(q, k[..., :4], v)),
    "heads": ("num_heads", lambda q, k, v: ta.attention(q[:, :3], k, v)),
    "seqlen_kv": ("value", lambda q, k, v: ta.attention(q, k, v[..., :4, :])),
    "mask shape": ("mask", lambda q, k, v: ta.attention(q, k, v, mask=torch.ones(5, 4, dtype=torch.bool))),
    "mask dtype": ("mask", lambda q, k, v: ta.attention(q, k, v, mask=torch.ones(5, 5, dtype=torch.long))),
    "mask float": ("bias=", lambda q, k, v: ta.attention(q, k, v, mask=torch.ones(5, 5))),
    "bias shape": ("bias", lambda q, k, v: ta.attention(q, k, v, bias=torch.ones(2, 2, 4, 5, 5))),
    "bias bool": ("mask=", lambda q, k, v: ta.attention(q, k, v, bias=torch.ones(5, 5, dtype=torch.bool))),
    "bias int": ("bias", lambda q, k, v: ta.attention(q, k, v, bias=torch.ones(5, 5, dtype=torch.long))),
    "slopes": ("alibi_slopes", lambda q, k, v: ta.attention(q, k, v, alibi_slopes=torch.ones(3))),
    "sinks": ("sinks", lambda q, k, v: ta.attention(q, k, v, sinks=torch.ones(4, 1))),
    "dropout_p": ("dropout_p", lambda q, k, v: ta.attention(q, k, v, dropout_p=1.5)),
    "scale": ("scale", lambda q, k, v: ta.attention(q, k, v, scale=math.nan)),
    "softcap": ("softcap", lambda q, k, v: ta.attention(q, k, v, softcap=0.0)),
    "lengths": ("lengths", lambda q, k, v: ta.attention(q, k, v, mask=ta.KeyLengths(torch.tensor([1, 2, 3])))),
    "query_offset": ("query_offset", lambda q, k, v: ta.attention(q, k, v, query_offset=torch.tensor([1, 2, 3]))),
    "drop-in heads": ("heads", lambda q, k, v: ta.scaled_dot_product_attention(q, k, v)),
    "drop-in mask": ("attn_mask", lambda q, k, v: ta.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.long))),
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


# What torch cannot express inside compiled code is an error, never a wrong number.

QUERY_ONLY = {
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (torch.ones_like(q),))[1],
    "jacfwd": lambda f, q: torch.func.jacfwd(f)(q),
    "grad": lambda f, q: torch.func.grad(lambda q: f(q).sum())(q),
    "vjp": lambda f, q: torch.func.vjp(f, q)[1](torch.ones_like(f(q)))[0],
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "hessian": lambda f, q: torch.func.hessian(lambda q: f(q).sum())(q),
    "grad of grad": lambda f, q: torch.func.grad(lambda q: torch.func.grad(lambda q: f(q).square().sum())(q).sum())(q),
    "vmap of grad": lambda f, q: torch.vmap(torch.func.grad(lambda q: f(q).sum()))(q[None])[0],
    "dual numbers": lambda f, q: _dual(f, q),
}


def _dual(f, q):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(q, torch.ones_like(q)))).tangent


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("function", ["attention", "weights", "drop-in"])
@pytest.mark.parametrize("name", QUERY_ONLY)
def test_transforms_and_compile_give_the_right_number_or_an_error(name, function, where, fullgraph):
    _, key, value = inputs(n=3, heads=2, heads_kv=2, dim=2, batch=1, grad=False)
    query = torch.randn_like(key)
    f = {
        "attention": lambda q: ta.attention(q, key, value, mask=ta.Causal()),
        "weights": lambda q: ta.attention_weights(q, key, mask=ta.Causal()),
        "drop-in": lambda q: ta.scaled_dot_product_attention(q, key, value, is_causal=True),
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
    query, key, value = (torch.randn(3, 1, 2, 5, 4) for _ in range(3))
    run = lambda *tensors: torch.vmap(lambda q, k, v: ta.attention(q, k, v, mask=ta.Causal()))(*tensors)
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(query, key, value), run(query, key, value))
        dropped = lambda *tensors: torch.vmap(lambda q, k, v: ta.attention(q, k, v, dropout_p=0.5), randomness="different")(*tensors)
        out = torch.compile(dropped, fullgraph=True, backend="aot_eager")(query[:1].expand_as(query), key, value)
        assert out.shape == query.shape
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)


@BACKENDS
def test_second_derivatives_of_compiled_code_are_an_error(backend):
    query, key, value = inputs()
    out = torch.compile(ta.attention, fullgraph=True, backend=backend)(query, key, value)
    with pytest.raises(RuntimeError, match="double backward|second derivative"):
        (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
        torch.autograd.grad(first.sum(), query)


# Operators


BLOCKS = (
    torch.tensor([[[0, 1]], [[1, 2]], [[0, 1]], [[2, 2]]], dtype=torch.int32),
    torch.tensor([[0, -1], [0, 0]], dtype=torch.int32),
    torch.arange(1 << 40, (1 << 40) + 64)[None],
)


def op_arguments(dtype=torch.float32, everything=True):
    query, key, value = inputs(n=5, dtype=dtype, grad=False)
    if not everything:
        return [query, key, value, *(None,) * 13, 0.3, 0.0, 0.0, [], [], False, False]
    return [
        query,
        key,
        value,
        torch.rand(2, 1, 1, 5) > 0.2,
        torch.randn(4, 5, 5),
        torch.rand(4),
        torch.randn(4),
        torch.tensor([5, 3]),
        torch.tensor([0, 2, 5]),
        torch.tensor([0, 1]),
        torch.tensor(7),
        *BLOCKS,
        torch.randn(5, 4),
        torch.randn(2, 1, 5, 4),
        0.3,
        2.0,
        0.25,
        [0, *(1 << 40,) * 4, -1, 0, 1 << 40, 0, 0],
        [1, 2, 3, 4],
        True,
        True,
    ]


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype, everything):
    ops = torch.ops.tiled_attention
    arguments = op_arguments(dtype, everything)
    torch.library.opcheck(ops.attention_fwd.default, (*arguments, True))
    floats = [x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
    floats[14:16] = arguments[14:16]  # constants
    torch.library.opcheck(ops.attention.default, (*floats, True))
    out, lse, residual = ops.attention_fwd(*arguments, True)
    wanted = 63 if everything else 7
    torch.library.opcheck(ops.attention_bwd.default, (torch.ones_like(out), lse * 0, *arguments, out, lse, residual, wanted))
    without_value = [arguments[at] for at in (0, 1, 3, 4, 5, *range(7, 23))]
    for rows in (None, torch.tensor([4, 0, 0])):
        torch.library.opcheck(ops.attention_weights.default, (*without_value, lse, rows, everything))
    torch.library.opcheck(ops.dropout_mask.default, (torch.tensor(3), 0.3, 2, 4, 5, 6, [0, 0, 1, 0]))
    torch.library.opcheck(ops._mask_dense.default, ([], torch.tensor([5, 3]), None, None, 2, 5, 6))
    if everything:
        rows = torch.tensor([4, 0, 0])
        torch.library.opcheck(ops._blocks_dense.default, (*BLOCKS, rows, 5, 6))
    torch.library.opcheck(ops.draw_seed.default, (*arguments[:3],), test_utils=("test_schema", "test_faketensor"))


def test_flops():
    query, key, value = inputs(n=64, heads_kv=4)
    with FlopCounterMode(display=False) as ours:
        ta.attention(query, key, value).sum().backward()
    with FlopCounterMode(display=False) as stock:
        torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    pairs = 2 * 4 * 64 * 64
    assert ours.get_total_flops() == 2 * pairs * (2 + 5) * 8
    assert stock.get_total_flops() in (0, ours.get_total_flops())
    with FlopCounterMode(display=False) as weights, torch.no_grad():
        ta.attention_weights(query, key)
    assert weights.get_total_flops() == 2 * 2 * pairs * 8


def test_no_graph_breaks_with_constants_of_python():
    explanation = torch._dynamo.explain(lambda q, k, v: ta.attention(q, k, v, mask=ta.Causal(), query_offset=2))(*inputs())
    assert explanation.graph_break_count == 0


def test_pickled_and_deep_copied_masks_compile_to_the_same():
    import copy
    import pickle

    query, key, value = inputs(grad=False)
    mask = ta.Causal() & ta.KeyLengths(torch.tensor([4, 2]))
    compiled = torch.compile(lambda mask: ta.attention(query, key, value, mask=mask), fullgraph=True, backend="eager")
    for other in (mask, copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(compiled(other), ta.attention(query, key, value, mask=mask))
