"""Linear attention over packed sequences: each is what it is alone, with its own state; derivatives; bad input."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import tiled_attention as ta
from checks import same_bits
from tiled_attention.testing import DTYPES, real_dtype

LENGTHS = [0, 5, 64, 0, 1, 70, 33, 0]


def offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def inputs(lengths: list[int], dtype: torch.dtype, heads_last: bool = False) -> list[Tensor]:
    tensors = [torch.randn(1, heads, sum(lengths), dim).to(dtype) for heads, dim in ((4, 8), (2, 8), (2, 6))]
    return [x.transpose(1, 2).contiguous().transpose(1, 2) if heads_last else x for x in tensors]


def state_of(lengths: list[int], dtype: torch.dtype) -> ta.LinearState:
    count, real = len(lengths), real_dtype(dtype)
    return ta.LinearState(torch.randn(count, 2, 8, 6, dtype=real), torch.rand(count, 2, 8, dtype=real))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_each_sequence_is_what_it_is_alone(dtype, causal):
    tensors = inputs(LENGTHS, dtype, heads_last=causal)
    total = sum(LENGTHS)
    options: dict = {"key_mask": torch.rand(1, total) > 0.2}
    if causal:
        options |= {"log_decay": -torch.rand(1, 2, total), "initial_state": state_of(LENGTHS, dtype)}
    out, state = ta.linear_attention(*tensors, causal=causal, return_state=True, cu_seqlens=offsets(LENGTHS), **options)
    assert out.stride() == torch.empty_like(tensors[0][..., :1].expand(*tensors[0].shape[:-1], 6)).stride() or not causal
    assert state.kv.shape == (len(LENGTHS), 2, 8, 6) and state.k_sum.shape == (len(LENGTHS), 2, 8)
    for b, (begin, end) in enumerate(itertools.pairwise(offsets(LENGTHS).tolist())):
        own = {"key_mask": options["key_mask"][..., begin:end]}
        if causal:
            own |= {"log_decay": options["log_decay"][..., begin:end]}
            own |= {"initial_state": ta.LinearState(*(part[b : b + 1] for part in options["initial_state"]))}
        want, last = ta.linear_attention(*(x[:, :, begin:end] for x in tensors), causal=causal, return_state=True, **own)
        assert same_bits(out[:, :, begin:end], want)
        assert all(same_bits(part[b : b + 1], wanted) for part, wanted in zip(state, last, strict=True))


def test_against_the_definition():
    tensors = inputs(LENGTHS, torch.float64)
    decay = -torch.rand(1, 2, sum(LENGTHS), 8, dtype=torch.float64)
    out = ta.linear_attention(*tensors, causal=True, log_decay=decay, feature_map="exp", cu_seqlens=offsets(LENGTHS, torch.int64))
    parts = [x.split(LENGTHS, 2) for x in (*tensors, decay)]
    want = [
        ta.reference.linear_attention(q, k, v, causal=True, log_decay=g, feature_map="exp")[0] for q, k, v, g in zip(*parts, strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(want, 2), rtol=1e-10, atol=1e-12)


def test_nothing_leaks_between_sequences():
    tensors, cu = inputs(LENGTHS, torch.float32), offsets(LENGTHS)
    changed = [x.clone() for x in tensors]
    for x in changed:
        x[:, :, 5:69] = torch.nan
    a, b = (ta.linear_attention(*x, causal=True, cu_seqlens=cu) for x in (tensors, changed))
    others = [*range(5), *range(69, sum(LENGTHS))]
    assert same_bits(a[:, :, others], b[:, :, others]) and b[:, :, 5:69].isnan().all()


def test_no_sequences():
    out, state = ta.linear_attention(*inputs([], torch.float32), return_state=True, cu_seqlens=offsets([]))
    assert out.shape == (1, 4, 0, 6) and state.kv.shape == (0, 2, 8, 6) and state.k_sum.shape == (0, 2, 8)


def test_derivatives():
    lengths = [2, 0, 1]
    shapes = ((1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2), (1, 1, 3), (3, 1, 2, 2), (3, 1, 2))
    leaves = [torch.rand(shape, dtype=torch.float64).requires_grad_() for shape in shapes]

    def run(query, key, value, decay, kv, k_sum):
        given = dict(log_decay=-decay, initial_state=ta.LinearState(kv, k_sum), return_state=True)
        out, state = ta.linear_attention(query, key, value, causal=True, cu_seqlens=offsets(lengths), **given)
        return out, *state

    assert gradcheck(run, leaves, check_forward_ad=True)
    assert gradgradcheck(run, leaves, fast_mode=True)


GOOD = offsets([2, 3])


@pytest.mark.parametrize(
    ("cu_seqlens", "text"),
    [
        (GOOD + 1, "must start at 0, got 1"),
        (GOOD[:-1], "must end at the total length \\(5\\), got 2"),
        (GOOD.flip(0), "must start at 0, got 5"),
        (torch.tensor([0, 4, 3, 5]), "must not decrease, got 4 before 3"),
        (GOOD.float(), "int32 or int64 tensor, got torch.float32"),
        ([0, 5], "int32 or int64 tensor"),
        (GOOD[None], "must have shape \\(num_sequences \\+ 1,\\)"),
    ],
)
def test_bad_offsets(cu_seqlens, text):
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises((TypeError, ValueError), match=text) as raised:
        ta.linear_attention(x, x, x, cu_seqlens=cu_seqlens)
    raised.match("cu_seqlens")


def test_bad_shapes():
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match="query must have shape \\(1, heads, total, head_dim\\)"):
        ta.linear_attention(x.expand(2, 2, 5, 4), x, x, cu_seqlens=GOOD)
    with pytest.raises(ValueError, match="key must have the total length of query"):
        ta.linear_attention(x, x[:, :, :3], x, cu_seqlens=GOOD)
    with pytest.raises(ValueError, match="initial_state.kv must have one state for each of 2 sequences"):
        state = ta.LinearState(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4))
        ta.linear_attention(x, x, x, causal=True, cu_seqlens=GOOD, initial_state=state)
