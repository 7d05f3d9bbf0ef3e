"""Inputs on which other implementations failed in public: linear attention. Each test carries the id of its case."""

import math

import pytest
import torch
from torch import Tensor

import tiled_attention as ta

INF = math.inf


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape).requires_grad_(grad)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("side", ("left", "right", "between"))
def test_l1_padded_keys_count_in_neither_sum(side: str, batch: int, causal: bool, isa: str):
    query, key, value = (randn(1, 2, 5, 4) for _ in range(3))
    real = {"left": [3, 4, 5, 6, 7], "right": [0, 1, 2, 3, 4], "between": [0, 1, 5, 6, 7]}[side]
    padding = sorted(set(range(8)) - set(real))
    key_mask = torch.zeros(batch, 8, dtype=torch.bool)
    key_mask[:, real] = True
    padded = []
    for tensor in (query, key, value):
        whole = randn(batch, 2, 8, 4)
        whole[:, :, real] = tensor
        padded.append(whole.requires_grad_())
    out, state = ta.linear_attention(*padded, causal=causal, key_mask=key_mask, return_state=True)
    want, want_state = ta.linear_attention(query, key, value, causal=causal, return_state=True)
    torch.testing.assert_close(out[:1, :, real], want)
    torch.testing.assert_close(state.kv[:1], want_state.kv)
    torch.testing.assert_close(state.k_sum[:1], want_state.k_sum)
    out.sum().backward()
    assert all((leaf.grad[:, :, padding] == 0).all() for leaf in padded[1:])


@pytest.mark.parametrize("causal", (False, True))
def test_l1_an_item_of_padding_alone_gives_zero(causal: bool, isa: str):
    leaves = [randn(2, 2, 8, 4, grad=True) for _ in range(3)]
    key_mask = torch.tensor([[True] * 8, [False] * 8])
    out, state = ta.linear_attention(*leaves, causal=causal, key_mask=key_mask, return_state=True)
    out.square().sum().backward()
    assert (out[1] == 0).all() and (state.kv[1] == 0).all() and (state.k_sum[1] == 0).all()
    assert all((leaf.grad[1] == 0).all() for leaf in leaves)


def test_l3_long_sums_in_16_bit(isa: str):
    ones = torch.ones(1, 1, 20000, 8).half()
    assert (ta.linear_attention(ones, ones, ones, causal=True) == 1).all()
    one = torch.ones(1, 1, 1, 8).bfloat16()
    out, state = ta.linear_attention(one, one, one, causal=True, return_state=True)
    for _ in range(999):
        out, state = ta.linear_attention_step(one, one, one, state)
    assert state.kv.dtype == torch.float32 and (out == 1).all() and (state.k_sum == 2000).all()


@pytest.mark.parametrize("per_feature", (False, True))
@pytest.mark.parametrize("rate", (-1e-4, -1.0, -5.0, -20.0, -88.0, -200.0))
def test_l4_decays_do_not_overflow_where_they_are_masked(rate: float, per_feature: bool, isa: str):
    log_decay = torch.full((1, 2, 64, 8) if per_feature else (1, 2, 64), rate, requires_grad=True)
    query, key, value = (randn(1, 2, 64, 8, grad=True) for _ in range(3))
    out = ta.linear_attention(query, key, value, log_decay=log_decay, causal=True)
    out.sum().backward()
    assert out.isfinite().all() and all(leaf.grad.isfinite().all() for leaf in (log_decay, query, key, value))
    state, rows = ta.LinearState(torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8)), []
    with torch.no_grad():
        for t in range(64):
            at = slice(t, t + 1)
            tokens = (tensor[:, :, at] for tensor in (query, key, value))
            row, state = ta.linear_attention_step(*tokens, state, log_decay=log_decay[:, :, at])
            rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 2), out, rtol=1e-4, atol=1e-4)


def test_l6_the_whole_equals_its_pieces(isa: str):
    state0 = ta.LinearState(randn(1, 2, 8, 8).double(), randn(1, 2, 8).double().abs())
    query, key, value = (randn(1, 2, 37, 8).double() for _ in range(3))
    whole, last = ta.linear_attention(query, key, value, causal=True, initial_state=state0, return_state=True)
    for cuts in ([37], [1] * 37, [1, 2, 34], [16, 21], [0, 37]):
        state, outs = state0, []
        for q, k, v in zip(*(tensor.split(cuts, 2) for tensor in (query, key, value))):
            out, state = ta.linear_attention(q, k, v, causal=True, initial_state=state, return_state=True)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=0, atol=1e-12)
        torch.testing.assert_close(tuple(state), tuple(last), rtol=0, atol=1e-12)

    def through(kv: Tensor, k_sum: Tensor) -> tuple[Tensor, ...]:
        tokens = (tensor[:, :, :5] for tensor in (query, key, value))
        out, state = ta.linear_attention(*tokens, causal=True, initial_state=ta.LinearState(kv, k_sum), return_state=True)
        return out, *state

    assert torch.autograd.gradcheck(through, (state0.kv.requires_grad_(), state0.k_sum.requires_grad_()))


@pytest.mark.parametrize("per_feature", (False, True))
@pytest.mark.parametrize("reset", (-INF, -3e37))
def test_l7_a_reset_by_a_hugely_negative_gate(reset: float, per_feature: bool, isa: str):
    query, key, value = (randn(1, 2, 16, 8) for _ in range(3))
    log_decay = torch.full((1, 2, 16, 8) if per_feature else (1, 2, 16), -0.7)
    log_decay[:, :, 8] = reset
    log_decay.requires_grad_()
    out = ta.linear_attention(query, key, value, log_decay=log_decay, causal=True)
    tail = (tensor[:, :, 8:] for tensor in (query, key, value))
    torch.testing.assert_close(out[:, :, 8:], ta.linear_attention(*tail, log_decay=log_decay[:, :, 8:], causal=True))
    out.sum().backward()
    assert out.isfinite().all() and log_decay.grad.isfinite().all()
