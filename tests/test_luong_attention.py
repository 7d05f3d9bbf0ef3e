"""Luong's scores as a function and as a module: the formulas, every option, derivatives, and the weights that made the output."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap

import tiled_attention as ta
from tiled_attention.testing import DTYPES, LAYOUTS, lay_out

F64 = torch.float64
HIDDEN = 6


def randn(*shape: int, dtype=F64) -> Tensor:
    return torch.randn(shape, dtype=F64).to(dtype)


def needs(score: str) -> None:
    if score == "concat":
        pytest.importorskip("tiled_attention.additive_attention")


def inputs(score: str, dtype=F64, n=7, m=11, heads=4, heads_kv=2, batch=(2,)) -> list:
    dim_k = 4 if score == "dot" else 3
    shapes = ((*batch, heads, n, 4), (*batch, heads_kv, m, dim_k), (*batch, heads_kv, m, 5))
    weights = {
        "dot": None,
        "general": randn(4, dim_k, dtype=dtype),
        "per head": randn(heads, 4, dim_k, dtype=dtype),
        "concat": (randn(HIDDEN, 4 + dim_k, dtype=dtype), randn(HIDDEN, dtype=dtype)),
    }
    return [*(randn(*shape, dtype=dtype) for shape in shapes), "general" if score == "per head" else score, weights[score]]


def widened(tensors: list) -> list:
    wide = lambda x: x.double() if isinstance(x, Tensor) else tuple(map(wide, x)) if isinstance(x, tuple) else x
    return [wide(x) for x in tensors]


SCORES = pytest.mark.parametrize("score", ("dot", "general", "per head", "concat"))
MASKS = {
    "none": dict(),
    "causal": dict(mask=ta.Causal()),
    "lengths": dict(mask=ta.KeyLengths(torch.tensor([4, 0])), scale=0.5),
    "bool": dict(mask=torch.tensor([[True, False] * 5 + [True]]), scale=-1.0),
}


@SCORES
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype, name, score):
    needs(score)
    arguments = inputs(score, dtype)
    out, lse = ta.luong_attention(*arguments, return_lse=True, **MASKS[name])
    expected, expected_lse = ta.reference.luong_attention(*widened(arguments), **MASKS[name])
    eps = torch.finfo(dtype).eps
    # The scores, up to 10, hold the rounding of a projected query or key.
    tolerance = 1e-12 if dtype == F64 else 1e-5 if dtype == torch.float32 else 16 * eps
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=4 * tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("score", ("dot", "general", "concat"))
def test_the_definitions_agree(score):
    arguments = inputs(score, heads=2)
    mask = torch.rand(7, 11) > 0.3
    expected, _ = ta.numpy_reference.luong_attention(*arguments, mask)
    ours, _ = ta.reference.luong_attention(*arguments, mask=mask)
    torch.testing.assert_close(ours, torch.from_numpy(expected))


@SCORES
@pytest.mark.parametrize(
    "sizes", [dict(n=0), dict(m=0), dict(heads=0, heads_kv=0), dict(batch=(0,)), dict(batch=()), dict(batch=(2, 3)), dict(m=1, n=1)]
)
def test_sizes(score, sizes):
    needs(score)
    arguments = inputs(score, **sizes)
    torch.testing.assert_close(ta.luong_attention(*arguments, return_lse=True), ta.reference.luong_attention(*arguments))


@SCORES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, score):
    needs(score)
    query, key, value, *others = inputs(score)
    laid_out = [lay_out(tensor, layout) for tensor in (query, key, value)]
    expected, _ = ta.reference.luong_attention(*(tensor.contiguous() for tensor in laid_out), *others)
    torch.testing.assert_close(ta.luong_attention(*laid_out, *others), expected)


@SCORES
def test_hidden_keys_reach_nothing(score):
    needs(score)
    query, key, value, score, weight = inputs(score)
    weights = () if weight is None else weight if isinstance(weight, tuple) else (weight,)
    mask = ta.KeyLengths(torch.tensor([6, 0]))
    expected = ta.luong_attention(query, key, value, score, weight, mask=mask)
    for tensor in (key, value):
        tensor[0, :, 6:], tensor[1] = math.nan, math.inf
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, *weights)]
    out = ta.luong_attention(query, key, value, score, weight, mask=mask)
    out.square().sum().backward()
    assert torch.equal(out, expected) and (out[1] == 0).all()
    assert all((leaf.grad[0, :, 6:] == 0).all() and (leaf.grad[1] == 0).all() for leaf in (key, value))
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("score", ("general", "concat"))
def test_hidden_keys_of_the_module_reach_nothing(score):
    needs(score)
    module = ta.LuongAttention(4, 3, score, dtype=F64)
    query, key, value = randn(2, 7, 4), randn(2, 11, 3), randn(2, 11, 5)
    mask = ta.KeyLengths(torch.tensor([6, 11]))
    expected, _ = module(query, key, value, mask=mask)
    key[0, 6:], value[0, 6:] = math.nan, math.nan
    out, _ = module(query, key, value, mask=mask)
    out.square().sum().backward()
    assert torch.equal(out, expected) and all(parameter.grad.isfinite().all() for parameter in module.parameters())


@SCORES
def test_derivatives_are_exact(score):
    needs(score)
    query, key, value, score, weight = inputs(score, n=3, m=4, heads=2, heads_kv=1, batch=(1,))
    weights = () if weight is None else weight if isinstance(weight, tuple) else (weight,)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, *weights)]

    def run(query: Tensor, key: Tensor, value: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        weight = weights if score == "concat" else weights[0] if weights else None
        return ta.luong_attention(query, key, value, score, weight, return_lse=True)

    assert gradcheck(run, leaves, check_forward_ad=True) and gradgradcheck(run, leaves)


@SCORES
def test_dropout_vmap_and_offsets(score):
    needs(score)
    query, key, value, score, weight = inputs(score, batch=(3, 2))
    run = lambda *x: ta.luong_attention(*x, score, weight)
    torch.testing.assert_close(vmap(run)(query, key, value), run(query, key, value))
    torch.manual_seed(5)
    kept = ta.dropout_mask(6, 4, 7, 11, 0.3).view(3, 2, 4, 7, 11)
    torch.manual_seed(5)
    out = ta.luong_attention(query, key, value, score, weight, dropout_p=0.3)
    expected, _ = ta.reference.luong_attention(query, key, value, score, weight, dropout_mask=kept, dropout_p=0.3)
    torch.testing.assert_close(out, expected)
    if score != "concat":
        out = ta.luong_attention(query, key, value, score, weight, mask=ta.Causal(), query_offset=2)
        expected, _ = ta.reference.luong_attention(query, key, value, score, weight, mask=ta.Causal(), query_offset=2)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("score", ("general", "concat"))
def test_compiled_calls_are_one_graph(score):
    needs(score)
    torch._dynamo.reset()
    module = ta.LuongAttention(4, 3, score)

    def run(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return *module(query, key, value, need_weights=True), ta.luong_attention(query, query, query)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    leaves = [
        torch.randn(2, 7, 4, requires_grad=True),
        torch.randn(2, 11, 3, requires_grad=True),
        torch.randn(2, 11, 5, requires_grad=True),
    ]
    results = []
    for function in (compiled, run):
        outs = function(*leaves)
        results.append([*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), leaves)])
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


# The module


@pytest.mark.parametrize("need_weights", (False, True))
@pytest.mark.parametrize("score", ("dot", "general", "concat"))
def test_module(score, need_weights):
    needs(score)
    query_dim, key_dim = 4, 4 if score == "dot" else 3
    module = ta.LuongAttention(query_dim, key_dim, score, dtype=F64)
    query, key, value = randn(2, 7, query_dim), randn(2, 11, key_dim), randn(2, 11, 5)
    weight = {"dot": None, "general": module.weight, "concat": (module.weight, module.vector)}[score]
    for mask in (None, ta.Causal(), torch.rand(7, 11) > 0.5, torch.rand(2, 1, 11) > 0.5, torch.zeros(2, 7, 11, dtype=torch.bool)):
        out, weights = module(query, key, value, mask=mask, need_weights=need_weights)
        inner = mask[:, None] if isinstance(mask, Tensor) and mask.dim() == 3 else mask
        one_head = (query[:, None], key[:, None], value[:, None], score, weight)
        expected, _ = ta.reference.luong_attention(*one_head, mask=inner)
        torch.testing.assert_close(out, expected[:, 0])
        assert out.shape == (2, 7, 5) and (weights is None) == (not need_weights)
        if need_weights:
            unit = torch.eye(11, dtype=F64).expand(2, 1, 11, 11)
            expected, _ = ta.reference.luong_attention(*one_head[:2], unit, score, weight, mask=inner)
            torch.testing.assert_close(weights, expected[:, 0])
        reused, _ = module(query, None, value, mask=mask, projected_key=module.project_keys(key))
        torch.testing.assert_close(reused, out)


@pytest.mark.parametrize("score", ("dot", "general", "concat"))
def test_the_weights_of_dropout_made_the_output(score):
    needs(score)
    module = ta.LuongAttention(4, 4, score, dropout=0.4, dtype=F64)
    query, key, value = randn(2, 7, 4), randn(2, 11, 4), randn(2, 11, 5)
    out, weights = module(query, key, value, need_weights=True)
    torch.testing.assert_close(weights @ value, out)
    assert 0.2 < (weights == 0).double().mean() < 0.6
    out, weights = module.eval()(query, key, value, need_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 7, dtype=F64))


@pytest.mark.parametrize("score", ("dot", "general", "concat"))
def test_gradients_flow_through_the_weights(score):
    needs(score)
    module = ta.LuongAttention(4, 4, score, dtype=F64)
    leaves = [tensor.requires_grad_() for tensor in (randn(1, 3, 4), randn(1, 5, 4), randn(1, 5, 2))]
    parameters = dict(module.named_parameters())

    def coverage(query: Tensor, key: Tensor, value: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(parameters, values))
        _, weights = torch.func.functional_call(module, given, (query, key, value), {"need_weights": True})
        return weights.sum(1)  # over the steps

    assert gradcheck(coverage, (*leaves, *parameters.values()))


@pytest.mark.parametrize("score", ("general", "concat"))
def test_module_with_other_leading_dimensions(score):
    needs(score)
    module = ta.LuongAttention(4, 3, score, dtype=F64)
    query, key, value = randn(2, 3, 7, 4), randn(2, 3, 11, 3), randn(2, 3, 11, 5)
    mask = torch.rand(2, 1, 7, 11) > 0.4
    out, weights = module(query, key, value, mask=mask, need_weights=True)
    for item in range(2):
        for other in range(3):
            single = module(query[item, other], key[item, other], value[item, other], mask=mask[item, 0], need_weights=True)
            torch.testing.assert_close(single, (out[item, other], weights[item, other]))


def test_a_decoder_steps_over_projected_keys():
    module = ta.LuongAttention(4, 3, dtype=F64)
    query, key, value = randn(2, 6, 4), randn(2, 9, 3), randn(2, 9, 5)
    whole, _ = module(query, key, value)
    kept = module.project_keys(key)
    steps = [module(query[:, t : t + 1], None, value, projected_key=kept)[0] for t in range(6)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


def test_parameters():
    shapes = lambda module: {name: tuple(parameter.shape) for name, parameter in module.state_dict().items()}
    assert shapes(ta.LuongAttention(4, 4, "dot")) == {}
    assert shapes(ta.LuongAttention(4, 3)) == {"weight": (4, 3)}
    assert shapes(ta.LuongAttention(4, 3, "concat", 8)) == {"weight": (8, 7), "vector": (8,)}
    assert shapes(ta.LuongAttention(4, 3, "concat")) == {"weight": (4, 7), "vector": (4,)}
    module = ta.LuongAttention(400, 300)
    limit = (6 / 700) ** 0.5
    assert module.weight.abs().max() <= limit and abs(float(module.weight.detach().std()) - limit / 3**0.5) < 1e-3


Q, K, V = (torch.zeros(1, 2, 3, 4) for _ in range(3))
PAIR = torch.zeros(3, 8), torch.zeros(3)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: ta.luong_attention(Q, K, V, "cosine"), "score.*cosine"),
        (lambda: ta.luong_attention(Q, K, V, "dot", torch.eye(4)), "weight"),
        (lambda: ta.luong_attention(Q, K[..., :2], V), "key"),
        (lambda: ta.luong_attention(Q, K, V, "general"), "weight"),
        (lambda: ta.luong_attention(Q, K, V, "general", torch.zeros(4, 3)), "weight"),
        (lambda: ta.luong_attention(Q, K, V, "general", torch.zeros(3, 4, 4)), "weight"),
        (lambda: ta.luong_attention(Q, K, V, "general", torch.zeros(4, 4).long()), "weight"),
        (lambda: ta.luong_attention(Q, K, V, "concat", torch.zeros(4, 8)), "weight"),
        (lambda: ta.luong_attention(Q, K, V, "concat", (torch.zeros(4, 7), torch.zeros(4))), "weight"),
        (lambda: ta.luong_attention(Q, K, V, "concat", (torch.zeros(4, 8), torch.zeros(3))), "weight"),
        (lambda: ta.luong_attention(Q[0, 0], K, V), "query"),
        (lambda: ta.luong_attention(Q, None, V), "key"),
        (lambda: ta.luong_attention(Q, K, V, scale=math.inf), "scale"),
        (lambda: ta.luong_attention(Q, K, V, scale="1"), "scale"),
        (lambda: ta.luong_attention(Q, K, V, mask=torch.ones(3, 3)), "mask"),
        (lambda: ta.luong_attention(Q, K, V, "general", torch.ones(4, 4, device="meta")), "weight must be on the device of query"),
        (lambda: ta.luong_attention(Q, K, V, "general", torch.ones(4, 4).to(torch.float16)), "weight must have the dtype of query"),
        (lambda: ta.luong_attention(Q, K, V, "concat", (PAIR[0].to("meta"), PAIR[1])), "weight.*meta"),
        (lambda: ta.luong_attention(Q, K.to("meta"), V, "concat", PAIR), "key.*meta"),
        (lambda: ta.luong_attention(Q, K.half(), V, "concat", PAIR), "key.*float16"),
        (lambda: ta.LuongAttention(4, 4, device="meta")(Q[0], K[0], V[0]), "query.*meta"),
        (lambda: ta.LuongAttention(4, 3, dropout="a"), "dropout must"),
        (lambda: ta.LuongAttention(4, 3, "dot"), "key_dim"),
        (lambda: ta.LuongAttention(4, 3, "sum"), "score"),
        (lambda: ta.LuongAttention(0, 3), "query_dim"),
        (lambda: ta.LuongAttention(4, 3, hidden_dim=5), "hidden_dim"),
        (lambda: ta.LuongAttention(4, 3, "concat", 0), "hidden_dim"),
        (lambda: ta.LuongAttention(4, 3, dropout=1.5), "dropout"),
        (lambda: ta.LuongAttention(4, 4)(Q[0], K[0, :, :, :3], V[0]), "key"),
        (lambda: ta.LuongAttention(4, 4)(Q[0, 0, 0], K[0], V[0]), "query"),
        (lambda: ta.LuongAttention(4, 4)(Q[0], None, V[0]), "key.*neither"),
        (lambda: ta.LuongAttention(4, 4)(Q[0], K[0], V[0], projected_key=K[0]), "key.*both"),
        (lambda: ta.LuongAttention(4, 3)(Q[0], None, V[0], projected_key=K[0, :, :, :3]), "projected_key"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()
