"""Reformer's attention: exact over the pairs that its hashes choose, each counted once; the hashes themselves; tokens that are hidden."""

import importlib
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap

import tiled_attention as ta
from tiled_attention.reference_lsh import lsh_rotation
from tiled_attention.testing import DTYPES, LAYOUTS, lay_out, real_dtype

lsh = importlib.import_module("tiled_attention.lsh_attention")
F64 = torch.float64
INF, NAN = math.inf, math.nan
SHAPES = [(12, 3), (40, 4), (7, 7), (9, 1), (10, 5), (64, 16), (24, 12), (51, 3), (64, 2)]  # seqlen, bucket_size
CAUSAL = pytest.mark.parametrize("causal", (False, True))


def randn(*shape: int, dtype=F64) -> Tensor:
    return torch.randn(shape, dtype=F64).to(dtype)


def tokens(n: int, dtype=F64, batch=(2,), heads=2, dim=4, dim_v=3) -> tuple[Tensor, Tensor]:
    return randn(*batch, heads, n, dim, dtype=dtype), randn(*batch, heads, n, dim_v, dtype=dtype)


@CAUSAL
@pytest.mark.parametrize("num_hashes", (1, 2, 5))
@pytest.mark.parametrize("seqlen, bucket_size", SHAPES)
def test_exact_over_the_union_of_pairs(seqlen, bucket_size, num_hashes, causal):
    query_key, value = tokens(seqlen)
    options = dict(num_hashes=num_hashes, bucket_size=bucket_size, causal=causal, seed=seqlen)
    ours = ta.lsh_attention(query_key, value, **options, return_lse=True)
    torch.testing.assert_close(ours, ta.reference.lsh_attention(query_key, value, **options), rtol=1e-12, atol=1e-12)
    assert torch.equal(ours[0], ta.lsh_attention(query_key, value, **options))


@CAUSAL
def test_the_definitions_agree(causal):
    query_key, value = tokens(24, batch=(), heads=1)
    options = dict(num_hashes=3, bucket_size=4, causal=causal, seed=-7)
    out, _ = ta.reference.lsh_attention(query_key, value, **options)
    rotations = [lsh_rotation(-7, round_, 4, 3).numpy() for round_ in range(3)]
    expected, weights = ta.numpy_reference.lsh_attention(query_key[0].numpy(), value[0].numpy(), rotations, 4, causal)
    np.testing.assert_allclose(out[0].numpy(), expected, rtol=1e-12)
    assert np.array_equal(weights > 0, ta.reference.lsh_pairs(query_key, **options)[0].numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, isa):
    query_key, value = tokens(64, dtype, dim=16)
    options = dict(num_hashes=4, bucket_size=8, causal=True, seed=1)
    out, lse = ta.lsh_attention(query_key, value, **options, return_lse=True)
    expected, expected_lse = ta.reference.lsh_attention(query_key.double(), value.double(), **options)
    # Keys are rounded after they are normalised; the largest |query| is about 8.
    eps = torch.finfo(dtype).eps
    assert out.dtype == dtype and lse.dtype == real_dtype(dtype)
    torch.testing.assert_close(out.double(), expected, rtol=8 * eps, atol=8 * eps)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=8 * eps, atol=8 * eps)


def test_one_bucket_is_all_of_attention():
    query_key, value = tokens(20)
    ours = ta.lsh_attention(query_key, value, num_hashes=3, bucket_size=20, causal=False, seed=0)
    others = ~torch.eye(20, dtype=torch.bool)
    torch.testing.assert_close(ours, ta.attention(query_key, F.normalize(query_key, dim=-1), value, mask=others))


def test_more_rounds_find_more_of_the_nearest_keys():
    query_key, _ = tokens(512, dim=16)
    query_key = query_key + 3 * randn(2, 2, 32, 16).repeat_interleave(16, 2)[:, :, torch.randperm(512)]  # clusters
    scores = query_key @ F.normalize(query_key, dim=-1).mT
    scores.diagonal(dim1=-2, dim2=-1).fill_(-INF)
    top = scores.topk(8).indices
    recall = [float(ta.reference.lsh_pairs(query_key, rounds, 16, False, 3).gather(-1, top).double().mean()) for rounds in (1, 2, 4, 8)]
    assert recall == sorted(recall) and recall[0] > 3 * 31 / 511 and recall[-1] > 0.9


# Hashes


@pytest.mark.parametrize("seed", (0, 1, -1, 2**63 - 1, 123456789123))
def test_rotations_are_philox_numbers(seed):
    ours = lsh.rotation_numbers(seed, 2 * 3 * 5, torch.device("cpu")).view(2, 3, 5)
    for round_ in range(2):
        torch.testing.assert_close(ours[round_], lsh_rotation(seed, round_, 3, 5), rtol=1e-13, atol=1e-13)


def test_rotations_are_normal():
    numbers = lsh.rotation_numbers(4, 100_001, torch.device("cpu"))
    bound = 5 / len(numbers) ** 0.5
    assert abs(float(numbers.mean())) < bound and abs(float(numbers.var()) - 1) < 2 * bound
    assert abs(float((numbers[1:] * numbers[:-1]).mean())) < bound and abs(float(numbers.pow(4).mean()) - 3) < 10 * bound
    assert not torch.equal(numbers, lsh.rotation_numbers(5, 100_001, torch.device("cpu")))


@pytest.mark.parametrize("buckets", (0, 1, 2, 3, 15, 16, 17, 36, 37, 1000, 16384, 16385))
def test_there_are_enough_hashes(buckets):
    halves = lsh.hash_sizes(buckets)
    hashes = math.prod(2 * half for half in halves)
    assert buckets <= hashes <= buckets + 4 * math.isqrt(buckets) + 8 and sum(halves) <= math.isqrt(buckets) + 8


@CAUSAL
@pytest.mark.parametrize("seqlen", (508, 600))  # 254 and 300 buckets: as many as a byte numbers, and more
def test_many_buckets(seqlen, causal):
    query_key, value = tokens(seqlen, batch=(), heads=2)
    orders = lsh.hash_orders(query_key, 2, 2, 3, None)
    places = orders.argsort(-1) // 2
    behind = places[..., :, None] - places[..., None, :]
    seen = ((behind == 0) | (behind == 1)).any(0)
    i = torch.arange(seqlen)
    seen &= i[:, None] > i if causal else i[:, None] != i
    seen |= ~seen.any(-1, keepdim=True) & (i[:, None] == i)
    ours = ta.lsh_attention(query_key, value, num_hashes=2, bucket_size=2, causal=causal, seed=3)
    torch.testing.assert_close(ours, ta.attention(query_key, F.normalize(query_key, dim=-1), value, mask=seen))
    half = lsh.hash_sizes(seqlen // 2)[0]
    numbers = lsh.rotation_numbers(3, 2 * 4 * 2 * half, torch.device("cpu")).view(2, 4, 2, half)
    rotated = torch.einsum("hnd,rdfc->frhnc", query_key, numbers)
    first, second = torch.cat([rotated, -rotated], -1).argmax(-1)
    assert torch.equal(orders, ((first * 2 * half + second) * seqlen + i).argsort(-1))


def test_hashes_do_not_depend_on_the_batch_or_on_length_of_vectors():
    query_key, _ = tokens(40)
    whole = lsh.hash_orders(query_key, 2, 4, 9, None)
    assert torch.equal(whole[:, 1:], lsh.hash_orders(query_key[1:], 2, 4, 9, None))
    assert torch.equal(whole, lsh.hash_orders(query_key * torch.rand(40, 1, dtype=F64), 2, 4, 9, None))


def test_what_later_tokens_hold_reaches_no_earlier_one():
    query_key, value = tokens(40)
    options = dict(num_hashes=3, bucket_size=4, causal=True, seed=2)
    out = ta.lsh_attention(query_key, value, **options)
    changed = value.clone()
    changed[:, :, 20:] = 1e6
    query_key = query_key.clone()
    query_key[:, :, 20:] *= 3  # the same hashes
    assert torch.equal(ta.lsh_attention(query_key, changed, **options)[:, :, :20], out[:, :, :20])


# Masks, sizes, layouts


@CAUSAL
@pytest.mark.parametrize("hidden", (NAN, INF, 1e6))
def test_hidden_tokens_change_nothing(hidden, causal):
    key_mask = torch.rand(2, 24) > 0.4
    key_mask[1] = False
    query_key, value = tokens(24)
    options = dict(num_hashes=3, bucket_size=4, causal=causal, seed=2, key_mask=key_mask)
    expected = ta.reference.lsh_attention(query_key, value, **options)
    ours = ta.lsh_attention(query_key, value, **options, return_lse=True)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    assert (ours[0][1] == 0).all() and (ours[1][1] == -INF).all()
    holes = ~key_mask[:, None, :, None]
    leaves = [tensor.masked_fill(holes, hidden).requires_grad_() for tensor in (query_key, value)]
    out = ta.lsh_attention(*leaves, **options)
    assert torch.equal(out, ours[0]) and (out.masked_select(holes) == 0).all()
    out.square().sum().backward()
    assert all((leaf.grad.masked_select(holes) == 0).all() and leaf.grad.isfinite().all() for leaf in leaves)


def test_key_mask_broadcasts():
    query_key, value = tokens(8)
    one = torch.tensor([True] * 5 + [False] * 3)
    options = dict(num_hashes=2, bucket_size=2, causal=False, seed=2)
    expected = ta.lsh_attention(query_key, value, **options, key_mask=one.expand(2, 8))
    assert torch.equal(ta.lsh_attention(query_key, value, **options, key_mask=one), expected)


@pytest.mark.parametrize("batch", [(), (0,), (2, 3)])
@pytest.mark.parametrize("seqlen, dim, dim_v, heads", [(0, 4, 3, 2), (8, 4, 0, 2), (8, 4, 3, 0), (8, 1, 3, 1)])
def test_sizes(seqlen, dim, dim_v, heads, batch, poisoned):
    leaves = [tensor.requires_grad_() for tensor in tokens(seqlen, batch=batch, heads=heads, dim=dim, dim_v=dim_v)]
    options = dict(num_hashes=2, bucket_size=2, causal=True, seed=2)
    ours = ta.lsh_attention(*leaves, **options, return_lse=True)
    torch.testing.assert_close(ours, ta.reference.lsh_attention(*leaves, **options))
    (ours[0].sum() + ours[1].sum()).backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    query_key, value = (lay_out(tensor, layout) for tensor in tokens(12))
    options = dict(num_hashes=2, bucket_size=3, causal=True, seed=2)
    expected, _ = ta.reference.lsh_attention(query_key, value, **options)
    torch.testing.assert_close(ta.lsh_attention(query_key, value, **options), expected)


def test_zero_vectors_are_uniform():
    value = randn(1, 1, 6, 2)
    ours = ta.lsh_attention(torch.zeros(1, 1, 6, 4, dtype=F64), value, num_hashes=1, bucket_size=6, causal=False, seed=0)
    torch.testing.assert_close(ours[0, 0, 0], value[0, 0, 1:].mean(0))


def test_zero_vectors_have_finite_gradients():
    query_key, value = tokens(6)
    query_key[:, :, 2] = 0
    query_key.requires_grad_()
    out = ta.lsh_attention(query_key, value, num_hashes=2, bucket_size=3, causal=False, seed=0)
    (gradient,) = torch.autograd.grad(out.square().sum(), query_key, create_graph=True)
    assert gradient.isfinite().all() and torch.autograd.grad(gradient.square().sum(), query_key)[0].isfinite().all()


# Derivatives


@pytest.mark.parametrize("scale, causal", [(None, False), (2.0, True)])
def test_derivatives_are_exact(scale, causal):
    leaves = [tensor.requires_grad_() for tensor in tokens(6, batch=(), dim=3, dim_v=2)]
    options = dict(num_hashes=2, bucket_size=2, causal=causal, seed=4, scale=scale, return_lse=True)
    run = lambda *x: ta.lsh_attention(*x, **options)
    assert gradcheck(run, leaves, check_forward_ad=True) and (causal or gradgradcheck(run, leaves))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gradients_are_those_of_the_definition(dtype):
    leaves = [tensor.requires_grad_() for tensor in tokens(64, dtype, dim=16)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    options = dict(num_hashes=4, bucket_size=8, causal=True, seed=1)
    grad_out = randn(2, 2, 64, 3)
    ours = torch.autograd.grad(ta.lsh_attention(*leaves, **options), leaves, grad_out.to(dtype))
    expected = torch.autograd.grad(ta.reference.lsh_attention(*wide, **options)[0], wide, grad_out.to(dtype).double())
    for grad, exact in zip(ours, expected):
        assert grad.dtype == dtype
        assert (grad - exact).abs().max() <= (1e-5 if dtype == torch.float32 else 4 * 2**-8) * exact.abs().max()


def test_thread_counts_change_no_bit():
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        leaves = [tensor.requires_grad_() for tensor in tokens(512, torch.float32, dim=16)]
        out, lse = ta.lsh_attention(*leaves, num_hashes=3, bucket_size=16, causal=True, seed=1, return_lse=True)
        results.append([out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_transforms():
    query_key, value = tokens(12, batch=(3, 2))
    run = lambda *x: ta.lsh_attention(*x, num_hashes=2, bucket_size=3, causal=True, seed=2)
    torch.testing.assert_close(vmap(run)(query_key, value), run(query_key, value))
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(query_key.float(), value.float())
    assert torch.equal(cast, run(query_key.bfloat16(), value.bfloat16()))


def test_compiled_calls_are_one_graph():
    torch._dynamo.reset()
    run = lambda *x: ta.lsh_attention(*x, num_hashes=2, bucket_size=4, causal=True, seed=2, return_lse=True)
    leaves = [tensor.requires_grad_() for tensor in tokens(16, torch.float32)]
    results = []
    for function in (torch.compile(run, fullgraph=True, backend="aot_eager"), run):
        outs = function(*leaves)
        results.append([*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), leaves)])
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


QK, V = torch.zeros(1, 2, 12, 4), torch.zeros(1, 2, 12, 3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (dict(bucket_size=5), r"bucket_size must divide seqlen \(12\), got 5"),
        (dict(bucket_size=0), "bucket_size"),
        (dict(bucket_size=24), "bucket_size"),
        (dict(bucket_size=2.0), "bucket_size"),
        (dict(num_hashes=0), "num_hashes"),
        (dict(causal=1), "causal"),
        (dict(seed=1.5), "seed"),
        (dict(seed=2**64), "seed"),
        (dict(key_mask=torch.ones(12, dtype=torch.bool, device="meta")), "key_mask.*meta"),
        (dict(query_key=QK[0, 0]), "query_key"),
        (dict(query_key=QK.long()), "query_key"),
        (dict(query_key=None), "query_key"),
        (dict(value=V.double()), "value"),
        (dict(value=V[:, :, :6]), "value"),
        (dict(value=None), "value"),
        (dict(key_mask=torch.ones(1, 12)), "key_mask"),
        (dict(key_mask=torch.ones(2, 12, dtype=torch.bool)), "key_mask"),
        (dict(key_mask=[True]), "key_mask"),
        (dict(scale=NAN), "scale"),
        (dict(scale="1"), "scale"),
    ],
)
def test_errors_name_the_argument(arguments, named):
    with pytest.raises((ValueError, TypeError), match=named):
        ta.lsh_attention(**{**dict(query_key=QK, value=V, num_hashes=2, bucket_size=3, causal=False, seed=0), **arguments})


def test_key_mask_of_one_number_is_for_all_tokens():
    options = dict(num_hashes=2, bucket_size=3, causal=False, seed=0)
    assert torch.equal(ta.lsh_attention(QK, V, **options, key_mask=torch.tensor(True)), ta.lsh_attention(QK, V, **options))
    assert not ta.lsh_attention(QK, V, **options, key_mask=torch.tensor(False)).any()
