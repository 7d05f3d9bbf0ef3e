"""Strided and dilated masks, alone and with a window, by residue classes: against the dense matrix."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import tiled_attention as ta
from checks import run_with_mask as run
from tiled_attention import parts, residues
from tiled_attention.testing import Case

ops = torch.ops.tiled_attention

RESIDUES = [
    ta.Strided(7),
    ta.Causal() & ta.Strided(7),
    ta.Causal() & (ta.Strided(8) | ta.SlidingWindow(7, 0)),
    ta.Strided(8) | ta.SlidingWindow(9, 3),
    ta.Dilated(4, 9),
    ta.Causal() & ta.Dilated(4, 8),
    ta.Dilated(4, 8) | ta.SlidingWindow(8, 8),
    ta.SlidingWindow(40, 30) & (ta.SlidingWindow(2, 90) | ta.Strided(4)),
    (ta.Dilated(6, 8) & ta.Causal()) | ta.SlidingWindow(3, 4),
]
RESIDUE_OPTIONS = {
    "plain": {},
    "everything": {"softcap": 2.0, "alibi": True, "sinks": True},
    "before": {"query_offset": -9},
    "large": {"scale": 30.0},
}


@pytest.mark.parametrize("options", RESIDUE_OPTIONS.values(), ids=RESIDUE_OPTIONS)
@pytest.mark.parametrize("lengths", [(160, 160), (70, 301)])
def test_residue_classes_are_the_dense_mask(lengths: tuple[int, int], options: dict[str, object]):
    for k, mask in enumerate(RESIDUES):
        dtype = (torch.float64, torch.float32, torch.bfloat16)[k % 3]
        case = Case(num_heads=4, num_heads_kv=2, seqlen_q=lengths[0], seqlen_kv=lengths[1], head_dim_v=5, dtype=dtype, **options)
        x = case.inputs()
        given = {name: getattr(x, name) for name in ("alibi_slopes", "sinks", "query_offset", "softcap", "scale")}
        given = {name: value for name, value in given.items() if value is not None}
        assert residues.pattern_of(mask) is not None
        ours, want = run(mask, x, given), run(mask.dense(*lengths, query_offset=x.query_offset), x, given)
        for name in ours:
            if name == "weights":
                continue
            a, b = ours[name].nan_to_num(neginf=0.0), want[name].nan_to_num(neginf=0.0)
            # Gradients are as exact as dtype, whatever they are stored in.
            eps = 16 * torch.finfo(a.dtype if name == "lse" else dtype).eps * (64 if "scale" in options else 1)
            # Where bf16 weights are summed after rounding, each of the two lse is within 2 ** -9.
            limit = eps * (b.abs().max().item() + 1) + (2 * 2.0**-9 if dtype == torch.bfloat16 and name == "lse" else 0.0)
            assert (a - b).abs().max().item() <= limit, (mask, name)


def test_residue_classes_hide_what_they_do_not_see():
    x = torch.randn(1, 2, 128, 8)
    poisoned = x.clone()
    poisoned[:, :, 1::2] = math.nan
    out = ta.attention(x, poisoned, poisoned, mask=ta.Strided(2))
    assert torch.equal(out[:, :, ::2], ta.attention(x, x, x, mask=ta.Strided(2))[:, :, ::2]) and out[:, :, 1::2].isnan().all()


def test_what_residue_classes_cannot_say_is_said_by_a_list():
    n = 130
    x = Case(num_heads=2, seqlen_q=n, bias=(2, n, n)).inputs()
    for options in ({"dropout_p": 0.4}, {"bias": x.bias}):
        for mask in (ta.Strided(4) | ta.SlidingWindow(3, 0), ta.Dilated(9, 3)):
            ours, want = run(mask, x, options), run(mask.dense(n, n), x, options)
            assert all(torch.allclose(ours[name], want[name], atol=1e-5, rtol=1e-4) for name in ours)


def test_second_derivatives_of_residue_classes():
    inputs = [torch.randn(1, heads, n, 3, dtype=torch.float64, requires_grad=True) for heads, n in ((2, 66), (1, 70), (1, 70))]
    slopes, sinks = torch.rand(2).double().requires_grad_(), torch.randn(2).double().requires_grad_()
    for mask in (ta.Strided(5) | ta.SlidingWindow(3, 3), ta.Causal() & ta.Dilated(3, 7)):

        def call(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, sinks: Tensor, mask: ta.Mask = mask) -> tuple[Tensor, ...]:
            return ta.attention(q, k, v, mask=mask, alibi_slopes=slopes, sinks=sinks, return_lse=True)

        assert gradcheck(call, (*inputs, slopes, sinks), fast_mode=True) and gradgradcheck(call, (*inputs, slopes, sinks), fast_mode=True)
        tangent = torch.randn_like(inputs[0])
        dense = mask.dense(66, 70)
        ours, want = (
            torch.func.jvp(lambda q, m=m: ta.attention(q, *inputs[1:], mask=m), (inputs[0].detach(),), (tangent,))[1] for m in (mask, dense)
        )
        torch.testing.assert_close(ours, want)


LOCAL = ta.Causal() & (ta.Strided(8) | ta.SlidingWindow(7, 0))
on_cpu = pytest.mark.skipif(not parts.CPU_ADDS, reason="a build of emulated CUDA kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [LOCAL, ta.Strided(8) | ta.SlidingWindow(9, 3)], ids=repr)
def test_parts_are_one_softmax(mask: ta.Mask, dtype: torch.dtype):
    """As exact as one call: against float64, in the layout of a model, for shapes that fill the classes and that do not."""
    for n in (128, 131):
        x = [torch.randn(2, n, heads, 16).to(dtype).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]
        grad = torch.randn(2, n, 4, 16).to(dtype).transpose(1, 2)
        out, lse = ta.attention(*x, mask=mask, return_lse=True)
        exact = [t.detach().double().requires_grad_() for t in x]
        want, want_lse = ta.reference.attention(*exact, mask=mask, return_lse=True)
        assert out.stride() == x[0].stride()
        eps = torch.finfo(dtype).eps
        assert (out.double() - want).abs().max() <= 4 * eps * want.abs().max()
        # Where bf16 weights are summed after rounding, lse is within 2 ** -9 of a part, and lies in the dtype of accumulation otherwise.
        limit = 2.0**-8 if dtype == torch.bfloat16 else 32 * torch.finfo(lse.dtype).eps
        assert (lse.double() - want_lse).abs().max() <= limit
        for ours, exactly in zip(torch.autograd.grad(out, x, grad), torch.autograd.grad(want, exact, grad.double()), strict=True):
            assert (ours.double() - exactly).abs().max() <= 8 * eps * exactly.abs().max()


def test_parts_hide_what_they_do_not_see():
    """A part without a key for a row leaves the row's bits; NaN in hidden keys reaches nothing."""
    n = 64
    x = torch.randn(1, 2, n, 8)
    mask = ta.Causal() & (ta.Strided(8) | ta.SlidingWindow(7, 0))
    seen = mask.dense(n, n)
    for row in (0, 7, 20, n - 1):
        poisoned = x.clone()
        poisoned[:, :, ~seen[row]] = math.nan
        out, lse = ta.attention(x, poisoned, poisoned, mask=mask, return_lse=True)
        whole, whole_lse = ta.attention(x, x, x, mask=mask, return_lse=True)
        assert torch.equal(out[:, :, row], whole[:, :, row]) and torch.equal(lse[:, :, row], whole_lse[:, :, row])
    first = ta.attention(x, x, x, mask=ta.Causal() & ta.SlidingWindow(7, 0))
    assert torch.equal(whole[:, :, :8], first[:, :, :8])  # nothing before the window


def test_threads_change_no_bit():
    x = [torch.randn(1, 6, 512, 16, requires_grad=True) for _ in range(3)]
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            out, lse = ta.attention(*x, mask=LOCAL, return_lse=True)
            found.append([out, lse, *torch.autograd.grad(out.sum() + lse.sum(), x)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class TestAddingInPlace:
    """`_attention_fwd_add_` and `_attention_bwd_add_`."""

    pytestmark = on_cpu

    @staticmethod
    def rest(**changed: object) -> list[object]:
        named = dict.fromkeys(
            ("mask", "bias", "slopes", "sinks", "lengths", "documents", "offset", "seed", "rows", "tiles", "bits", "q", "k")
        )
        numbers = {"scale": 0.25, "softcap": 0.0, "dropout_p": 0.0, "intervals": [], "offsets": [], "tf32": False, "interleaved": False}
        return list((named | numbers | changed).values())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
    def test_keys_one_half_after_the_other(self, dtype: torch.dtype, isa: str):
        n = 80
        query, key, value, grad = (torch.randn(2, 3, n, 8).to(dtype) for _ in range(4))
        out, lse, residual = ops.attention_fwd(query, key[:, :, :37], value[:, :, :37], *self.rest(), True)
        lse = lse.double()
        added = ops._attention_fwd_add_(query, key[:, :, 37:], value[:, :, 37:], *self.rest(), out, lse, residual)
        assert added is None
        exact = (query.double() @ key.double().mT).mul_(0.25).logsumexp(-1)
        whole, whole_lse, whole_residual = ops.attention_fwd(query, key, value, *self.rest(), True)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out, whole, atol=2 * eps, rtol=2 * eps)
        torch.testing.assert_close(lse.to(whole_lse.dtype), whole_lse, atol=2.0**-8 if dtype == torch.bfloat16 else 1e-6, rtol=1e-6)
        assert (lse - exact).abs().max() <= (2.0**-8 if dtype == torch.bfloat16 else 1e-6)
        if residual.dim() > 1:
            both, whole_both = out.double() + residual.double(), whole.double() + whole_residual.double()
            assert (both - whole_both).abs().max() < (2.0**-8 if dtype == torch.bfloat16 else 2.0**-18)
        saved = (whole, whole_lse, whole_residual)
        want = ops.attention_bwd(grad, None, query, key, value, *self.rest(), *saved, 7)[:3]
        grad_query, grad_key, grad_value = ops.attention_bwd(grad, None, query, key[:, :, :37], value[:, :, :37], *self.rest(), *saved, 7)[
            :3
        ]
        grads = [grad_query, torch.ones_like(key[:, :, 37:]), None]
        ops._attention_bwd_add_(grad, None, query, key[:, :, 37:], value[:, :, 37:], *self.rest(), *saved, *grads, None)
        torch.testing.assert_close(grad_query, want[0], atol=8 * eps, rtol=8 * eps)
        torch.testing.assert_close(torch.cat([grad_key, grads[1] - 1], 2), want[1], atol=8 * eps, rtol=8 * eps)
        assert torch.equal(grad_value, ops.attention_bwd(grad, None, query, key[:, :, :37], value[:, :, :37], *self.rest(), *saved, 7)[2])

    def test_nothing_to_add_leaves_everything(self):
        query, key = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 12, 8)
        out, lse, residual = ops.attention_fwd(query, key, key, *self.rest(), False)
        lse = lse.double()
        before = out.clone(), lse.clone()
        hidden = self.rest(mask=torch.zeros(9, 12, dtype=torch.bool))
        ops._attention_fwd_add_(query, key, key, *hidden, out, lse, residual)
        ops._attention_fwd_add_(query, key[:, :, :0], key[:, :, :0], *self.rest(), out, lse, residual)
        assert torch.equal(out, before[0]) and torch.equal(lse, before[1])
        empty = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
        ops._attention_fwd_add_(query, key, key, *self.rest(), *empty, residual)  # rows that hold no key are not read
        assert torch.equal(empty[0], out) and torch.equal(empty[1].float(), lse.float())

    def test_wrong_results_are_named(self):
        x = torch.randn(1, 2, 9, 8)
        out, lse, residual = ops.attention_fwd(x, x, x, *self.rest(), False)
        exact = lse.double()
        for wrong, message in (
            ((out[..., :7], exact, residual), "out must have shape"),
            ((out.double(), exact, residual), "out must"),
            ((out, exact[..., :8], residual), "lse must"),
            ((out, lse, residual), "lse must be float64"),
            ((out, exact.mT.contiguous().mT, residual), "lse must be contiguous"),
            ((out, exact, out), "residual must have shape"),
        ):
            with pytest.raises(RuntimeError, match=message):
                ops._attention_fwd_add_(x, x, x, *self.rest(), *wrong)
        with pytest.raises(RuntimeError, match="grad_key must have shape"):
            ops._attention_bwd_add_(x, None, x, x, x, *self.rest(), out, lse, residual, None, out[:, :1], None, None)
