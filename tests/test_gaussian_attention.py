"""Gaussian attention: the formula with its differences taken first, far from the origin, with every option, and its derivatives."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jvp, vmap

import tiled_attention as ta
from tiled_attention.testing import DTYPES, LAYOUTS, lay_out, real_dtype

F64 = torch.float64
INF, NAN = math.inf, math.nan


def randn(*shape: int, dtype=F64) -> Tensor:
    return torch.randn(shape, dtype=F64).to(dtype)


def inputs(dtype=F64, n=7, m=11, heads=4, heads_kv=2, dim=3, batch=(2,)) -> list[Tensor]:
    shapes = ((*batch, heads, n, dim), (*batch, heads_kv, m, dim), (*batch, heads_kv, m, 5))
    return [randn(*shape, dtype=dtype) for shape in shapes]


def limits(dtype: torch.dtype) -> dict[str, float]:
    # Rounded once, from float64.
    return dict(rtol=torch.finfo(dtype).eps, atol=1e-12 if dtype == F64 else torch.finfo(dtype).eps)


MASKS = {
    "none": dict(),
    "causal": dict(mask=ta.Causal()),
    "offsets": dict(mask=ta.Causal() & ta.SlidingWindow(2, 0), query_offset=torch.tensor([-3, 8])),
    "lengths": dict(mask=ta.KeyLengths(torch.tensor([4, 0]))),
    "bool": dict(mask=torch.tensor([[True, False] * 5 + [True]])),
}
BANDWIDTHS = {"number": 0.7, "one": torch.tensor(0.7), "per head": torch.tensor([0.3, 1.0, 2.0, 10.0])}


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype, name, bandwidth):
    query, key, value = inputs(dtype)
    out, lse = ta.gaussian_attention(query, key, value, BANDWIDTHS[bandwidth], return_lse=True, **MASKS[name])
    exact = (tensor.double() for tensor in (query, key, value))
    expected, expected_lse = ta.reference.gaussian_attention(*exact, BANDWIDTHS[bandwidth], **MASKS[name])
    assert out.dtype == dtype and lse.dtype == real_dtype(dtype)
    torch.testing.assert_close(out.double(), expected, **limits(dtype))
    torch.testing.assert_close(lse.double(), expected_lse, **limits(lse.dtype))
    assert torch.equal(out, ta.gaussian_attention(query, key, value, BANDWIDTHS[bandwidth], **MASKS[name]))


def test_the_definitions_agree():
    query, key, value = inputs(heads=2)
    mask = torch.rand(7, 11) > 0.3
    expected, _ = ta.numpy_reference.gaussian_attention(query, key, value, 0.6, mask)
    ours, _ = ta.reference.gaussian_attention(query, key, value, 0.6, mask=mask)
    torch.testing.assert_close(ours, torch.from_numpy(expected))
    for i in range(7):  # one row, number by number
        near = [math.exp(-sum((a - b) ** 2 for a, b in zip(query[0, 0, i], key[0, 0, j])) / (2 * 0.6**2)) * mask[i, j] for j in range(11)]
        row = sum(weight * value[0, 0, j] for j, weight in enumerate(near)) / sum(near)
        torch.testing.assert_close(ours[0, 0, i], row)


@pytest.mark.parametrize("dim", (1, 3, 32))
@pytest.mark.parametrize("bandwidth", (1.0, 0.1))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_distances_far_from_the_origin_are_exact(dtype, bandwidth, dim):
    torch.manual_seed(dim)
    query, key, value = (tensor.to(dtype) for tensor in inputs(n=40, m=60, dim=dim))
    query, key = query + 1000, key + 1000
    for given in (bandwidth, torch.full((4,), bandwidth)):
        out, lse = ta.gaussian_attention(query, key, value, given, return_lse=True)
        exact = (tensor.double() for tensor in (query, key, value))
        expected, expected_lse = ta.reference.gaussian_attention(*exact, float(torch.tensor(bandwidth)) if given is bandwidth else given)
        bound = 2.0**-51 * (2 * 1010 * dim**0.5 / bandwidth) ** 2
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), expected, rtol=eps, atol=10 * bound + eps)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=torch.finfo(torch.float32).eps, atol=10 * bound + 1e-6)


def test_float32_computes_within_its_bound():
    query, key, value = inputs(torch.float32, n=40, m=60)
    exact, _ = ta.reference.gaussian_attention(query.double(), key.double(), value.double(), 0.5)
    ours = ta.gaussian_attention(query, key, value, 0.5, compute_dtype=torch.float32)
    reach = (float(query.norm(dim=-1).max()) + float(key.norm(dim=-1).max())) / 0.5
    assert ours.dtype == torch.float32 and (ours - exact).abs().max() <= 2.0**-24 * reach**2 * 2 * value.abs().max()
    assert not torch.equal(ours, ta.gaussian_attention(query, key, value, 0.5))
    with torch.autocast("cpu", torch.bfloat16):
        ours = ta.gaussian_attention(query, key, value, 0.5, compute_dtype=torch.float32)
    rounded = [tensor.bfloat16() for tensor in (query, key, value)]
    assert torch.equal(ours, ta.gaussian_attention(*rounded, 0.5, compute_dtype=torch.float32))


def test_keys_of_one_norm_make_it_softmax_attention():
    query, key, value = inputs()
    key = 1.7 * key / key.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(ta.gaussian_attention(query, key, value, 0.8), ta.attention(query, key, value, scale=0.8**-2))


@pytest.mark.parametrize("shift", (1.0, -300.0))
def test_distances_do_not_know_the_origin(shift):
    query, key, value = inputs()
    ours = ta.gaussian_attention(query + shift, key + shift, value, 0.5, return_lse=True)
    torch.testing.assert_close(ours, ta.gaussian_attention(query, key, value, 0.5, return_lse=True), rtol=1e-8, atol=1e-9)


def test_bandwidths_from_nearest_neighbour_to_mean():
    query, key, value = inputs(heads=2)
    nearest = torch.cdist(query, key).argmin(-1)[..., None].expand(-1, -1, -1, 5)
    torch.testing.assert_close(ta.gaussian_attention(query, key, value, 1e-4), value.gather(2, nearest))
    torch.testing.assert_close(ta.gaussian_attention(query, key, value, 1e6), value.mean(2, keepdim=True).expand(-1, -1, 7, -1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    query, key, value = (lay_out(tensor, layout) for tensor in inputs(torch.float32))
    expected, _ = ta.reference.gaussian_attention(query.double(), key.double(), value.double(), 0.7)
    out = ta.gaussian_attention(query, key, value, 0.7)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    if layout == "heads_last":
        assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    "sizes", [dict(n=0), dict(m=0), dict(dim=0), dict(heads=0, heads_kv=0), dict(batch=(0,)), dict(batch=()), dict(batch=(2, 3))]
)
def test_sizes(sizes, poisoned):
    leaves = [tensor.requires_grad_() for tensor in inputs(**sizes)]
    bandwidth = torch.full((leaves[0].shape[-3],), 0.9, dtype=F64, requires_grad=True)
    ours = ta.gaussian_attention(*leaves, bandwidth, return_lse=True)
    torch.testing.assert_close(ours, ta.reference.gaussian_attention(*leaves, bandwidth))
    (ours[0].sum() + torch.where(ours[1] == -INF, 0.0, ours[1]).sum()).backward()
    assert all(leaf.grad.isfinite().all() for leaf in (*leaves, bandwidth))


@pytest.mark.parametrize("hidden", (NAN, INF, -INF, 1e30))
@pytest.mark.parametrize("dtype", (torch.float32, F64))
def test_hidden_keys_reach_nothing(dtype, hidden):
    query, key, value = inputs(dtype)
    bandwidth = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=dtype)
    mask = ta.KeyLengths(torch.tensor([6, 0]))
    key[0, :, 6:], value[0, :, 6:] = hidden, hidden
    key[1], value[1] = hidden, hidden
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value, bandwidth)]
    out, lse = ta.gaussian_attention(*leaves, mask=mask, return_lse=True)
    clean = [tensor.clone() for tensor in (query, key, value, bandwidth)]
    for tensor in clean[1:3]:
        tensor[0, :, 6:], tensor[1] = 0, 0
    clean = [tensor.requires_grad_() for tensor in clean]
    expected = ta.gaussian_attention(*clean, mask=mask, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    for leaf, other in zip(leaves, clean):
        grads = [torch.autograd.grad(o.sum() + torch.where(s == -INF, 0.0, s).sum(), x, retain_graph=True)[0]
                 for o, s, x in ((out, lse, leaf), (*expected, other))]  # fmt: skip
        assert torch.equal(*grads)
    assert (out[1] == 0).all() and (lse[1] == -INF).all()


def test_visible_values_that_are_not_finite():
    query, key, value = inputs(heads=2)
    key[0, 0, 2, 1], key[1, 1, 3, 0] = INF, NAN
    out, lse = ta.gaussian_attention(query, key, value, 1.0, return_lse=True)
    expected, expected_lse = ta.reference.gaussian_attention(query, key, value, 1.0)
    torch.testing.assert_close((out, lse), (expected, expected_lse), equal_nan=True)
    assert out[1, 1].isnan().all() and out[0].isfinite().all()


def test_dropout_is_that_of_attention():
    query, key, value = inputs()
    torch.manual_seed(5)
    kept = ta.dropout_mask(2, 4, 7, 11, 0.3)
    torch.manual_seed(5)
    out, lse = ta.gaussian_attention(query, key, value, 0.9, dropout_p=0.3, return_lse=True)
    expected, expected_lse = ta.reference.gaussian_attention(query, key, value, 0.9, dropout_mask=kept.view(2, 4, 7, 11), dropout_p=0.3)
    torch.testing.assert_close((out, lse), (expected, expected_lse))
    generator = torch.Generator().manual_seed(9)
    first = ta.gaussian_attention(query, key, value, 0.9, dropout_p=0.3, generator=generator)
    assert torch.equal(first, ta.gaussian_attention(query, key, value, 0.9, dropout_p=0.3, generator=generator.manual_seed(9)))


@pytest.mark.parametrize("per_head", (False, True))
@pytest.mark.parametrize("mask", (None, ta.Causal()), ids=str)
def test_derivatives_are_exact(mask, per_head):
    leaves = inputs(n=4, m=3, heads=2, heads_kv=1, dim=2, batch=(1,))
    bandwidth = torch.tensor([0.8, 1.3], dtype=F64) if per_head else torch.tensor(0.8, dtype=F64)
    leaves = [tensor.requires_grad_() for tensor in (*leaves, bandwidth)]

    def run(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = ta.gaussian_attention(*x, mask=mask, return_lse=True)
        return out, torch.where(lse == -INF, 0.0, lse)

    assert gradcheck(run, leaves, check_forward_ad=True) and gradgradcheck(run, leaves)


def test_gradients_of_float32_are_rounded_once():
    query, key, value = inputs(torch.float32, n=30, m=40)
    leaves = [tensor.requires_grad_() for tensor in (query + 1000, key + 1000, value, torch.tensor([0.5, 1.0, 2.0, 4.0]))]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    ours, _ = ta.gaussian_attention(*leaves, return_lse=True)
    expected, _ = ta.reference.gaussian_attention(*wide)
    for grad, other in zip(torch.autograd.grad(ours.square().sum(), leaves), torch.autograd.grad(expected.square().sum(), wide)):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad.double(), other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))


def test_thread_counts_and_other_rows_change_no_bit():
    query, key, value = inputs(torch.float32, n=70, m=300)
    whole = ta.gaussian_attention(query, key, value, 0.7, return_lse=True)
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        again = ta.gaussian_attention(query, key, value, 0.7, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(whole, again))
    part = ta.gaussian_attention(query[1:, :, 7:20], key[1:], value[1:], 0.7, return_lse=True)
    assert torch.equal(part[0], whole[0][1:, :, 7:20]) and torch.equal(part[1], whole[1][1:, :, 7:20])


def test_transforms():
    query, key, value = inputs(batch=(3, 2))
    bandwidth = torch.tensor([0.8, 1.3, 2.0, 0.4], dtype=F64)
    run = lambda *x: ta.gaussian_attention(*x, bandwidth)
    torch.testing.assert_close(vmap(run)(query, key, value), run(query, key, value))
    each = torch.stack([bandwidth, 2 * bandwidth, 3 * bandwidth])
    mapped = vmap(ta.gaussian_attention)(query, key, value, each)
    torch.testing.assert_close(mapped, torch.stack([ta.gaussian_attention(*x) for x in zip(query, key, value, each)]))
    _, tangent = jvp(lambda h: ta.gaussian_attention(query, key, value, h), (bandwidth,), (torch.ones_like(bandwidth),))
    ahead, behind = (ta.gaussian_attention(query, key, value, bandwidth + step) for step in (1e-6, -1e-6))
    torch.testing.assert_close(tangent, (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-7)


def test_compiled_calls_are_one_graph():
    torch._dynamo.reset()
    bandwidth = torch.tensor([0.8, 1.3, 2.0, 0.4], requires_grad=True)
    run = lambda *x: ta.gaussian_attention(*x, mask=ta.Causal(), return_lse=True)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for length in (5, 9):
        leaves = [*(tensor.requires_grad_() for tensor in inputs(torch.float32, n=length, m=length)), bandwidth]
        results = []
        for function in (compiled, run):
            outs = function(*leaves)
            results.append([*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), leaves)])
        for ours, expected in zip(*results):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


Q, K, V = inputs(torch.float32)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (dict(bandwidth=0.0), "bandwidth must be > 0"),
        (dict(bandwidth=-1.0), "bandwidth must be > 0"),
        (dict(bandwidth=NAN), "bandwidth must be > 0"),
        (dict(bandwidth=INF), "bandwidth must be > 0"),
        (dict(bandwidth=1e-25, compute_dtype=torch.float32), "bandwidth must be > 0.*float32"),
        (dict(bandwidth=torch.tensor([1.0, 1.0, 0.0, 1.0])), "bandwidth must be > 0"),
        (dict(bandwidth=torch.tensor(-1.0, requires_grad=True)), "bandwidth must be > 0"),
        (dict(bandwidth=torch.ones(3)), r"bandwidth.*\(4,\)"),
        (dict(bandwidth=torch.ones(2, 4)), "bandwidth"),
        (dict(bandwidth=torch.ones(4, dtype=torch.long)), "bandwidth"),
        (dict(bandwidth="1"), "bandwidth"),
        (dict(bandwidth=None), "bandwidth"),
        (dict(query=Q[..., :2]), "head_dim"),
        (dict(key=K.double()), "key"),
        (dict(query=Q.long()), "query"),
        (dict(value=V[:, :, :3]), "value"),
        (dict(query=[1.0]), "query"),
        (dict(mask=torch.ones(7, 11)), "mask"),
        (dict(dropout_p=2.0), "dropout_p"),
        (dict(compute_dtype=torch.float16), "compute_dtype"),
    ],
)
def test_errors_name_the_argument(arguments, named):
    with pytest.raises((ValueError, TypeError), match=named):
        ta.gaussian_attention(**{**dict(query=Q, key=K, value=V, bandwidth=1.0), **arguments})
