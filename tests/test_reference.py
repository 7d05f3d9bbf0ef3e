"""The definitions, against loops over single numbers, against PyTorch, against NumPy, and against each other."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from tiled_attention import numpy_reference, reference
from tiled_attention.masks import Causal, KeyLengths, PrefixLM, Sinks, SlidingWindow

INF, NAN = math.inf, math.nan


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def by_hand(q, k, v, visible, bias, scale, softcap, slope, sink, offset):
    """One query head, number by number: lists q (L, d), k (S, d), v (S, dv), visible and bias (L, S). Returns (out, lse, weights)."""
    outs, lses, weights = [], [], []
    for i in range(len(q)):
        scores = {}
        for j in range(len(k)):
            if not visible[i][j] or bias[i][j] == -INF:
                continue
            score = scale * sum(a * b for a, b in zip(q[i], k[j], strict=True))
            score = softcap * math.tanh(score / softcap) if softcap else score
            scores[j] = score - slope * abs(i + offset - j) + bias[i][j]
        top = max([*scores.values(), sink])
        total = sum(math.exp(x - top) for x in [*scores.values(), sink] if x > -INF) if top > -INF else 0.0
        row = [math.exp(scores[j] - top) / total if j in scores else 0.0 for j in range(len(k))]
        outs.append([sum(row[j] * v[j][c] for j in scores) for c in range(len(v[0]))])
        lses.append(top + math.log(total) if total else -INF)
        weights.append(row)
    return outs, lses, weights


@pytest.mark.parametrize("seqlen_q", [3, 7])
@pytest.mark.parametrize("offset", [None, 1, "each"])
@pytest.mark.parametrize(
    "mask", [None, Causal(), SlidingWindow(2, 1) & Causal("top_left"), KeyLengths(torch.tensor([0, 3])), "tensor"], ids=str
)
def test_every_option_against_single_numbers(mask, offset, seqlen_q):
    batch, num_heads, num_heads_kv, seqlen_kv = 2, 4, 2, 5
    q, k, v = randn(batch, num_heads, seqlen_q, 3), randn(batch, num_heads_kv, seqlen_kv, 3), randn(batch, num_heads_kv, seqlen_kv, 2)
    bias, slopes, sinks = randn(1, num_heads, seqlen_q, seqlen_kv), torch.rand(num_heads).double(), randn(num_heads)
    bias[0, 1, 0], bias[0, :, 1, 2], sinks[1] = -INF, -INF, -INF
    if mask == "tensor":
        mask = torch.rand(batch, 1, seqlen_q, seqlen_kv) > 0.5
    offset = torch.tensor([4, -3]) if offset == "each" else offset
    options = {"bias": bias, "scale": 0.7, "softcap": 1.5, "alibi_slopes": slopes, "sinks": sinks, "query_offset": offset, "mask": mask}
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    weights = reference.attention_weights(q, k, **options)
    visible = torch.ones(batch, 1, seqlen_q, seqlen_kv, dtype=torch.bool)
    if mask is not None:
        visible = visible & (mask if isinstance(mask, Tensor) else mask.dense(seqlen_q, seqlen_kv, query_offset=offset))
    for b, h in itertools.product(range(batch), range(num_heads)):
        position = seqlen_kv - seqlen_q if offset is None else int(offset[b]) if isinstance(offset, Tensor) else offset
        rows = [x.tolist() for x in (q[b, h], k[b, h // 2], v[b, h // 2], visible[b, 0], bias[0, h])]
        expected = by_hand(*rows, 0.7, 1.5, slopes[h].item(), sinks[h].item(), position)
        for got, want in zip((out[b, h], lse[b, h], weights[b, h]), expected, strict=True):
            assert close(got, torch.tensor(want, dtype=torch.float64))
    rows = torch.tensor([2, 0, 2])
    assert torch.equal(reference.attention_weights(q, k, rows=rows, **options), weights[:, :, rows])


SDPA_CASES = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.ones(5, 7).tril(1).bool()},
    "float": {"attn_mask": torch.linspace(-3, 3, 70, dtype=torch.float64).sin().view(2, 1, 5, 7)},
    "infinite": {"attn_mask": torch.zeros(5, 7, dtype=torch.float64).masked_fill(torch.ones(5, 7).triu(3).bool(), -INF)},
    "row": {"attn_mask": torch.tensor([True, False, True, True, False, True, True])},
}


@pytest.mark.parametrize("name", SDPA_CASES)
@pytest.mark.parametrize(
    ("shape_q", "shape_kv", "gqa"),
    [
        ((2, 4, 5, 8), (2, 4, 7, 8), False),
        ((2, 4, 5, 8), (2, 2, 7, 8), True),
        ((2, 1, 5, 8), (1, 4, 7, 8), False),
        ((3, 2, 4, 5, 8), (2, 4, 7, 8), False),
        ((4, 5, 8), (4, 7, 8), False),
        ((5, 8), (7, 8), False),
    ],
)
def test_scaled_dot_product_attention_is_torchs(name, shape_q, shape_kv, gqa):
    options = SDPA_CASES[name]
    if name == "float" and len(shape_q) < 4:
        options = {"attn_mask": options["attn_mask"][0, 0]}
    leaves = [randn(*shape, grad=True) for shape in (shape_q, shape_kv, shape_kv)]
    got = reference.scaled_dot_product_attention(*leaves, enable_gqa=gqa, **options)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = F.scaled_dot_product_attention(*leaves, enable_gqa=gqa, **options)
    assert close(got, want)
    grad = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True):
        assert close(a, b)


def test_causal_corners():
    q, k, v = randn(1, 3, 8), randn(1, 5, 8), randn(1, 5, 8)
    top_left = reference.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert close(top_left, reference.attention(q, k, v, mask=Causal("top_left")))
    bottom_right = numpy_reference.scaled_dot_product_attention(q.numpy(), k.numpy(), v.numpy(), causal=True)[0]
    assert close(torch.from_numpy(bottom_right), reference.attention(q, k, v, mask=Causal()))
    both = reference.scaled_dot_product_attention(q, k, v, torch.ones(3, 5).triu().bool(), is_causal=True)
    assert close(both, v[:, :3])


def test_numpy_against_torch():
    q, k, v = randn(2, 3, 5, 8), randn(2, 3, 7, 8), randn(2, 3, 7, 4)
    mask, bias = torch.rand(2, 1, 5, 7) > 0.4, randn(3, 5, 7)
    mask[0, 0, 1] = False
    bias[:, 2, 3] = -INF
    for options in ({}, {"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias, "scale": 2.0}):
        arrays = {name: option.numpy() if isinstance(option, Tensor) else option for name, option in options.items()}
        out, weights = numpy_reference.scaled_dot_product_attention(q.numpy(), k.numpy(), v.numpy(), **arrays)
        assert out.dtype == weights.dtype == np.float64
        assert close(torch.from_numpy(out), reference.attention(q, k, v, **options))
        assert close(torch.from_numpy(weights), reference.attention_weights(q, k, **options))
    scores = np.array([[1000.0, 999.0], [-INF, -INF], [-1000.0, -INF], [0.0, 0.0]])
    assert np.allclose(numpy_reference.softmax_rows(scores), [[1 / (1 + math.exp(-1)), 1 / (1 + math.e)], [0, 0], [1, 0], [0.5, 0.5]])
    assert numpy_reference.softmax_rows(np.zeros((2, 0))).shape == (2, 0)
    with pytest.raises(TypeError, match=r"mask.*bool.*int64"):
        numpy_reference.scaled_dot_product_attention(q, k, v, np.ones((5, 7), dtype=np.int64))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("add_bias_kv", [False, True])
@pytest.mark.parametrize("add_zero_attn", [False, True])
def test_multi_head_attention_is_torchs(add_zero_attn, add_bias_kv, bias):
    options = {"bias": bias, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}
    module = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64, **options)
    query, memory, mask = randn(2, 5, 12), randn(2, 7, 12), torch.rand(2, 1, 5, 7) > 0.3
    padding = torch.tensor([[0] * 7, [0] * 4 + [1] * 3]).bool()  # True = ignore in the module
    mask[..., 0] = True
    mask = mask.expand(2, 3, 5, 7) & ~padding[:, None, None]
    parameters = (module.num_heads, module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias)
    added = {"add_zero_attn": add_zero_attn}
    if add_bias_kv:
        added |= {"bias_k": module.bias_k[0, 0], "bias_v": module.bias_v[0, 0]}
    want = module(query, memory, memory, attn_mask=~mask.flatten(0, 1), average_attn_weights=False)
    got = reference.multi_head_attention(query, memory, memory, *parameters, mask=mask, **added)
    assert close(got[0], want[0]) and close(got[1], want[1])
    as_bias = torch.zeros(2, 3, 5, 7, dtype=torch.float64).masked_fill(~mask, -INF)
    assert close(reference.multi_head_attention(query, memory, memory, *parameters, bias=as_bias, **added)[0], want[0])
    if not (add_bias_kv or add_zero_attn):
        arrays = [x.detach().numpy() if isinstance(x, Tensor) else x for x in (query, memory, memory, *parameters, mask)]
        for a, b in zip(numpy_reference.multi_head_attention(*arrays), want, strict=True):
            assert close(torch.from_numpy(a), b)


def test_multi_head_attention_with_other_key_and_value_sizes():
    module = torch.nn.MultiheadAttention(12, 3, kdim=5, vdim=4, batch_first=True, dtype=torch.float64)
    query, key, value = randn(2, 5, 12), randn(2, 7, 5), randn(2, 7, 4)
    want = module(query, key, value, average_attn_weights=False)
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    got = reference.multi_head_attention(query, key, value, 3, weights, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias)
    assert close(got[0], want[0]) and close(got[1], want[1])


DEAD = torch.tensor([[0, 0, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]]).bool()


def test_dead_rows_are_zero_and_add_no_gradient():
    q, k, v, bias = randn(2, 2, 4, 3, grad=True), randn(2, 1, 4, 3, grad=True), randn(2, 1, 4, 3, grad=True), randn(4, 4, grad=True)
    out, lse = reference.attention(q, k, v, mask=DEAD, bias=bias, softcap=2.0, return_lse=True)
    dead = ~DEAD.any(-1)
    assert (out[:, :, dead] == 0).all() and (lse[:, :, dead] == -INF).all() and lse[:, :, ~dead].isfinite().all()
    assert (reference.attention_weights(q, k, mask=DEAD)[:, :, dead] == 0).all()
    grads = torch.autograd.grad(out.sum() + lse[:, :, ~dead].sum(), [q, k, v, bias], create_graph=True)
    live = reference.attention(q[:, :, ~dead], k, v, mask=DEAD[~dead], bias=bias[~dead], softcap=2.0, return_lse=True)
    expected = torch.autograd.grad(live[0].sum() + live[1].sum(), [q, k, v, bias])
    assert all(close(a, b) for a, b in zip(grads, expected, strict=True))
    assert (grads[0][:, :, dead] == 0).all() and (grads[3][~DEAD] == 0).all()
    second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), [q, k, v, bias])
    assert all(grad.isfinite().all() for grad in second)


def test_a_dead_row_of_lse_has_gradient_zero():
    q, k = randn(1, 4, 3, grad=True), randn(1, 4, 3, grad=True)
    _, lse = reference.attention(q, k, k, mask=DEAD, return_lse=True)
    grads = torch.autograd.grad(lse, [q, k], torch.ones_like(lse))
    assert all(grad.isfinite().all() for grad in grads) and (grads[0][:, ~DEAD.any(-1)] == 0).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("masking", ["mask", "bias", "Causal", "KeyLengths"])
def test_what_stands_in_hidden_keys_reaches_nothing(bad, masking):
    visible = {"Causal": torch.ones(4, 4).tril().bool(), "KeyLengths": torch.arange(4) < torch.tensor(2)}.get(masking, DEAD)
    options = {
        "mask": {"mask": DEAD},
        "bias": {"bias": torch.zeros(4, 4, dtype=torch.float64).masked_fill(~DEAD, -INF)},
        "Causal": {"mask": Causal()},
        "KeyLengths": {"mask": KeyLengths(torch.tensor([2]))},
    }[masking]
    visible = visible.expand(4, 4)
    q, k, v = randn(1, 1, 4, 3), randn(1, 1, 4, 3), randn(1, 1, 4, 3)
    grad = randn(1, 1, 4, 3)
    for j in range(4):
        clean_rows, seen = ~visible[:, j], visible[:, j]
        grad_rows = torch.where(clean_rows[:, None], grad, 0.0)
        results = []
        for poison in (0.5, bad):
            leaves = [q.clone(), k.clone(), v.clone()]
            leaves[1][..., j, 0], leaves[2][..., j, 1] = poison, poison
            leaves = [leaf.requires_grad_() for leaf in leaves]
            out = reference.attention(*leaves, softcap=3.0, **options)
            results.append((out, *torch.autograd.grad(out, leaves, grad_rows)))
        clean, poisoned = results
        assert close(clean[0][:, :, clean_rows], poisoned[0][:, :, clean_rows]), j
        assert not clean_rows.any() or close(clean[1][:, :, clean_rows], poisoned[1][:, :, clean_rows])
        if not seen.any():
            assert all(close(a, b) for a, b in zip(clean, poisoned, strict=True))
            assert (poisoned[2][:, :, j] == 0).all() and (poisoned[3][:, :, j] == 0).all()


def test_a_key_that_is_seen_does_poison():
    q, k, v = randn(1, 3, 3), randn(1, 3, 3), randn(1, 3, 3)
    k[0, 1, 0] = NAN
    out = reference.attention(q, k, v, mask=Causal())
    assert out[0, 0].isfinite().all() and out[0, 1:].isnan().all()
    assert (reference.attention_weights(q, k, mask=Causal())[0].triu(1) == 0).all()


def test_hidden_scores_may_overflow():
    q = torch.full((1, 2, 4), 1e10, dtype=torch.float64, requires_grad=True)
    k = torch.tensor([[[1.0, 1.0, 1.0, 1.0], [1e300, -1e300, 1e300, -1e300]]], dtype=torch.float64, requires_grad=True)
    v = randn(1, 2, 3)
    assert (q @ k.mT)[..., 1].isnan().all()
    out = reference.attention(q, k, v, mask=Sinks(1), softcap=1.0)
    assert close(out, v[:, :1].expand(1, 2, 3))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), [q, k]))


def test_large_and_equal_scores():
    q, k, v = torch.full((1, 2, 1), 1e3).double().requires_grad_(), torch.full((1, 3, 1), -1e3).double().requires_grad_(), randn(1, 3, 2)
    for mask in (None, Sinks(2), Causal()):
        out = reference.attention(q, k, v, mask=mask, scale=1.0)
        visible = torch.ones(2, 3).bool() if mask is None else mask.dense(2, 3)
        assert close(out, (visible.double() / visible.sum(-1, keepdim=True)) @ v)
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), [q, k]))
    lowest = torch.full((2, 3), torch.finfo(torch.float64).min, dtype=torch.float64)
    assert close(reference.attention(q * 0, k, v, bias=lowest), v.mean(-2, keepdim=True).expand(1, 2, 2))


def test_sinks():
    q, k, v, sinks = randn(1, 2, 3, 4), randn(1, 2, 5, 4), randn(1, 2, 5, 4), torch.tensor([0.5, 20.0]).double().requires_grad_()
    out, lse = reference.attention(q, k, v, sinks=sinks, return_lse=True)
    plain, plain_lse = reference.attention(q, k, v, return_lse=True)
    assert close(lse, torch.logaddexp(plain_lse, sinks[:, None])) and close(out, plain * (plain_lse - lse).exp()[..., None])
    none = torch.full((2,), -INF, dtype=torch.float64, requires_grad=True)
    out, lse = reference.attention(q, k, v, sinks=none, return_lse=True)
    assert close(out, plain) and close(lse, plain_lse) and (torch.autograd.grad(out.sum() + lse.sum(), none)[0] == 0).all()
    out, lse = reference.attention(q, k, v, mask=Sinks(0), sinks=sinks, return_lse=True)
    assert (out == 0).all() and close(lse, sinks[:, None].expand(1, 2, 3))
    assert close(torch.autograd.grad(lse.sum(), sinks)[0], torch.full((2,), 3.0))


OPTIONS = {
    "plain": {},
    "dead": {"mask": DEAD},
    "softcap": {"mask": Causal() & SlidingWindow(1, 0), "softcap": 1.3},
    "offset": {"mask": PrefixLM(1), "scale": 0.4, "query_offset": -2},
    "dropout": {"mask": KeyLengths(torch.tensor([0, 3])), "dropout_p": 0.4, "dropout_mask": torch.tensor([True, False, True, True])},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives(check, name):
    options = OPTIONS[name]
    q, k, v = randn(2, 2, 4, 2, grad=True), randn(2, 1, 4, 2, grad=True), randn(2, 1, 4, 2, grad=True)
    bias, slopes, sinks = randn(2, 4, 4, grad=True), randn(2, grad=True), randn(2, grad=True)

    def everything(q, k, v, bias, slopes, sinks):
        return reference.attention(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, return_lse=True, **options)

    def plain(q, k, v, bias):
        return reference.attention(q, k, v, bias=bias, **options), reference.attention_weights(q, k, bias=bias, **options)

    assert check(everything, (q, k, v, bias, slopes, sinks))
    assert check(plain, (q, k, v, bias))


def test_sixteen_bit_inputs_are_computed_in_float32():
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = (randn(1, 2, 5, 4).to(dtype) for _ in range(3))
        out, lse = reference.attention(q, k, v, mask=Causal(), return_lse=True)
        exact, exact_lse = reference.attention(q.double(), k.double(), v.double(), mask=Causal(), return_lse=True)
        assert out.dtype == dtype and lse.dtype == torch.float32 and close(lse, exact_lse, 1e-5)
        assert close(out.float(), exact.to(dtype).float(), torch.finfo(dtype).eps)


def test_empty_sizes():
    for batch, heads, seqlen_q, seqlen_kv, dim, dim_v in itertools.product((0, 1), (0, 2), (0, 3), (0, 4), (0, 8), (0, 8)):
        q, k, v = (
            torch.ones(batch, heads, seqlen_q, dim),
            torch.ones(batch, heads, seqlen_kv, dim),
            torch.ones(batch, heads, seqlen_kv, dim_v),
        )
        out, lse = reference.attention(q, k, v, return_lse=True)
        assert out.shape == (batch, heads, seqlen_q, dim_v) and lse.shape == (batch, heads, seqlen_q)
        assert (out == float(seqlen_kv > 0)).all() and ((lse == -INF) == (seqlen_kv == 0)).all()


def test_merge_is_attention_over_both_key_sets():
    q, k, v = randn(1, 2, 4, 3, grad=True), randn(1, 2, 6, 3, grad=True), randn(1, 2, 6, 3, grad=True)
    visible = torch.rand(4, 6) > 0.3
    visible[0, :4], visible[1, 4:], visible[2] = False, False, False
    whole = reference.attention(q, k, v, mask=visible, return_lse=True)
    parts = [
        reference.attention(q, k[:, :, part], v[:, :, part], mask=visible[:, part], return_lse=True) for part in (slice(0, 4), slice(4, 6))
    ]
    merged = reference.merge_attention(*parts[0], *parts[1])
    assert close(merged[0], whole[0]) and close(merged[1], whole[1])
    grad = randn(1, 2, 4, 3)
    for a, b in zip(torch.autograd.grad(merged[0], [q, k, v], grad), torch.autograd.grad(whole[0], [q, k, v], grad), strict=True):
        assert close(a, b)
    dead = torch.full((1, 2, 4), -INF, dtype=torch.float64)
    garbage = torch.full((1, 2, 4, 3), NAN, dtype=torch.float64)
    out, lse = reference.merge_attention(garbage, dead, whole[0], whole[1])
    assert close(out, whole[0]) and close(lse, whole[1])
    leaves = (randn(2, 3, grad=True), randn(2, grad=True), randn(2, 3, grad=True), randn(2, grad=True))
    assert gradcheck(reference.merge_attention, leaves) and gradgradcheck(reference.merge_attention, leaves)


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [second >> 32 ^ counter[1] ^ key[0], second % 2**32, first >> 32 ^ counter[3] ^ key[1], first % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


KNOWN = [  # Random123, kat_vectors, philox4x32 10 rounds
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_known_answers(counter, key, answer):
    counter, key, answer = ([int(word, 16) for word in words.split()] for words in (counter, key, answer))
    assert [int(word) for word in reference.philox(tuple(torch.tensor(word) for word in counter), tuple(key))] == answer
    assert philox_by_hand(counter, key) == answer


@pytest.mark.parametrize("seed", [0, 1, (1 << 62) + 12345, -1, -(1 << 63)])
@pytest.mark.parametrize("offsets", [(0, 0, 0, 0), (1, 2, 3, 5), (0, 0, 1 << 33, (1 << 34) + 1)])
def test_dropout_mask_element_by_element(seed, offsets):
    p = 0.3
    kept = reference.dropout_mask(seed, p, 2, 3, 4, 7, offsets)
    assert kept.dtype == torch.bool and kept.shape == (2, 3, 4, 7)
    for b, h, i, j in itertools.product(range(2), range(3), range(4), range(7)):
        item, head, row, column = (x + offset for x, offset in zip((b, h, i, j), offsets, strict=True))
        words = philox_by_hand([column // 4 % 2**32, row // 2 % 2**32, head, item], [seed % 2**32, (seed >> 32) % 2**32])
        bits = words[column % 4] >> (16 if row % 2 else 0) & 0xFFFF
        assert kept[b, h, i, j] == (bits >= round(p * 65536))


def test_dropout_masks_of_parts_are_parts_of_the_mask():
    whole = reference.dropout_mask(77, 0.5, 3, 4, 9, 11)
    part = reference.dropout_mask(77, 0.5, 2, 2, 5, 6, offsets=(1, 2, 3, 5))
    assert torch.equal(part, whole[1:3, 2:4, 3:8, 5:11])
    assert reference.dropout_mask(77, 0.0, 1, 1, 5, 5).all() and not reference.dropout_mask(77, 1.0, 1, 1, 5, 5).any()
    n = 4 * 256 * 256
    for p in (0.1, 0.5, 0.9):
        dropped = (~reference.dropout_mask(5, p, 1, 4, 256, 256)).double().mean().item()
        assert abs(dropped - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_dropout_acts_on_the_weights():
    q, k, v, p = randn(1, 2, 4, 3), randn(1, 2, 6, 3), randn(1, 2, 6, 3), 0.3
    kept = reference.dropout_mask(3, p, 1, 2, 4, 6)
    factor = 1 / (1 - round(p * 65536) / 65536)
    weights = reference.attention_weights(q, k, mask=Causal())
    dropped = reference.attention_weights(q, k, mask=Causal(), dropout_p=p, dropout_mask=kept)
    assert close(dropped, weights * kept * factor)
    out, lse = reference.attention(q, k, v, mask=Causal(), dropout_p=p, dropout_mask=kept, return_lse=True)
    assert close(out, dropped @ v) and close(lse, reference.attention(q, k, v, mask=Causal(), return_lse=True)[1])
    assert (reference.attention(q, k, v, dropout_p=1.0, dropout_mask=torch.zeros(4, 6).bool()) == 0).all()
    with pytest.raises(ValueError, match="dropout_mask"):
        reference.attention(q, k, v, dropout_p=p)
