"""The definitions of linear attention, against explicit tril(phi(Q) phi(K)^T), against each other, and against NumPy."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from tiled_attention import numpy_reference, reference

INF, NAN = math.inf, math.nan
MAPS = {"identity": lambda x: x, "elu": lambda x: torch.nn.functional.elu(x) + 1, "relu": torch.relu, "exp": torch.exp}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def inputs(n: int = 6, m: int | None = None, heads: int = 2, heads_kv: int = 2) -> list[Tensor]:
    m = n if m is None else m
    return [randn(2, heads, n, 3), randn(2, heads_kv, m, 3), randn(2, heads_kv, m, 4)]


def state_of(heads: int = 2) -> tuple[Tensor, Tensor]:
    return randn(2, heads, 3, 4), torch.rand(2, heads, 3, dtype=torch.float64)


def assert_close(ours, expected) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("feature_map", MAPS)
def test_parallel_form_is_a_masked_product(feature_map, causal, normalize):
    query, key, value = inputs()
    phi = MAPS[feature_map]
    weights = phi(query) @ phi(key).mT
    weights = weights.tril() if causal else weights
    expected = weights @ value
    expected = (expected / weights.sum(-1, keepdim=True)).nan_to_num(0.0) if normalize else 0.3 * expected  # relu: 0 / 0 is 0
    out, (kv, k_sum) = reference.linear_attention(query, key, value, feature_map=feature_map, causal=causal, normalize=normalize, scale=0.3)
    assert_close(out, expected)
    assert_close((kv, k_sum), (phi(key).mT @ value, phi(key).sum(-2)))


def test_decay_by_single_numbers():
    query, key, value = (x[0, 0] for x in inputs())
    gate = -torch.rand(6, 3, dtype=torch.float64)
    out, _ = reference.linear_attention(
        query[None], key[None], value[None], feature_map="exp", causal=True, normalize=False, log_decay=gate[None]
    )
    for i in range(6):
        expected = torch.zeros(4, dtype=torch.float64)
        for j, c in itertools.product(range(i + 1), range(3)):
            expected += math.exp(query[i, c] + key[j, c] + sum(gate[t, c] for t in range(j + 1, i + 1))) * value[j]
        assert_close(out[0, i], expected)


OPTIONS = {
    "plain": {},
    "scale": {"normalize": False, "scale": -0.7},
    "padding": {"key_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0]]).bool()},
    "nothing seen": {"key_mask": torch.zeros(6).bool()},
    "per token": {"log_decay": -torch.arange(24.0, dtype=torch.float64).reshape(2, 2, 6) / 10},
    "one for all heads": {"log_decay": -torch.arange(6.0, dtype=torch.float64).reshape(1, 6)},
    "per feature": {"log_decay": -torch.arange(36.0, dtype=torch.float64).reshape(1, 2, 6, 3).sqrt()},
    "reset": {"log_decay": torch.tensor([-0.7, -0.1, -INF, -0.7, -3e37, -0.2]).double().expand(2, 2, 6)},
    "state": {"initial_state": state_of()},
    "everything": {
        "key_mask": torch.tensor([1, 0, 1, 1, 0, 1]).bool(),
        "log_decay": -torch.arange(24.0, dtype=torch.float64).reshape(2, 2, 6) / 30,
        "initial_state": state_of(),
        "normalize": False,
    },
}


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("name", OPTIONS)
def test_parallel_recurrent_and_numpy_agree(name, feature_map):
    query, key, value = inputs()
    options = {"feature_map": feature_map, **OPTIONS[name]}
    parallel = reference.linear_attention(query, key, value, causal=True, **options)
    recurrent = reference.linear_attention_recurrent(query, key, value, **options)
    assert_close(parallel, recurrent)

    gate = options.get("log_decay")
    if gate is not None:
        options["log_decay"] = gate[..., None] if gate.dim() < 4 else gate
    if "key_mask" in options:
        options["key_mask"] = options["key_mask"][..., None, :]
    out, state = numpy_reference.linear_attention(query, key, value, causal=True, **options)
    assert_close(parallel, (torch.from_numpy(out), tuple(map(torch.from_numpy, state))))


@pytest.mark.parametrize("feature_map", MAPS)
def test_numpy_without_order(feature_map):
    query, key, value = inputs(n=3, m=5)
    key_mask = torch.tensor([1, 0, 1, 1, 0]).bool()
    parallel = reference.linear_attention(query, key, value, feature_map=feature_map, key_mask=key_mask)
    out, state = numpy_reference.linear_attention(query, key, value, feature_map=feature_map, key_mask=key_mask)
    assert_close(parallel, (torch.from_numpy(out), tuple(map(torch.from_numpy, state))))


@pytest.mark.parametrize("form", [reference.linear_attention_recurrent, lambda *x, **o: reference.linear_attention(*x, causal=True, **o)])
def test_heads(form):
    query, key, value = inputs(heads=4)
    repeated = [x.repeat_interleave(2, 1) for x in (key, value)]
    gate, per_query_head = -torch.rand(2, 2, 6).double(), -torch.rand(2, 4, 6).double()
    shared, state = form(query, key, value, log_decay=gate)
    out, full = form(query, *repeated, log_decay=gate.repeat_interleave(2, 1))
    assert_close(shared, out)
    assert_close(state, (full[0][:, ::2], full[1][:, ::2]))

    own = form(query, key, value, log_decay=per_query_head, initial_state=state)
    assert own[1][0].shape == (2, 4, 3, 4)
    assert_close(own, form(query, *repeated, log_decay=per_query_head, initial_state=tuple(x.repeat_interleave(2, 1) for x in state)))
    assert_close(own, form(query, key, value, log_decay=per_query_head, initial_state=tuple(x.repeat_interleave(2, 1) for x in state)))


@pytest.mark.parametrize("form", [reference.linear_attention_recurrent, lambda *x, **o: reference.linear_attention(*x, causal=True, **o)])
def test_pieces(form):
    query, key, value = inputs(n=7)
    gate = -torch.rand(2, 2, 7, 3).double()
    whole, last = form(query, key, value, log_decay=gate)
    state, outs = None, []
    for part in (slice(0, 0), slice(0, 2), slice(2, 2), slice(2, 3), slice(3, 7), slice(7, 7)):
        out, state = form(*(x[:, :, part] for x in (query, key, value)), log_decay=gate[:, :, part], initial_state=state)
        outs.append(out)
    assert_close((torch.cat(outs, 2), state), (whole, last))


@pytest.mark.parametrize("bad", [NAN, INF])
def test_hidden_keys_and_forgotten_states(bad):
    query, key, value = inputs()
    key_mask = torch.tensor([1, 1, 0, 1, 1, 1]).bool()
    polluted = [x.clone() for x in (key, value)]
    for x in polluted:
        x[:, :, 2] = bad
    for causal in (True, False):
        clean = reference.linear_attention(query, key, value, causal=causal, key_mask=key_mask)
        assert_close(reference.linear_attention(query, *polluted, causal=causal, key_mask=key_mask), clean)
    gate = torch.zeros(2, 2, 6).double()
    gate[..., 0] = -INF
    state = tuple(x.fill_(bad) for x in state_of())
    out = reference.linear_attention_recurrent(query, key, value, log_decay=gate, initial_state=state)
    assert_close(out, reference.linear_attention_recurrent(query, key, value))


def test_gradients_of_the_definition():
    query, key, value = (x.requires_grad_() for x in inputs(n=3))
    gate, state = (-torch.rand(2, 2, 3).double()).requires_grad_(), [x.requires_grad_() for x in state_of()]

    def run(query, key, value, gate, *state):
        out, after = reference.linear_attention(query, key, value, causal=True, log_decay=gate, initial_state=state)
        return out, *after

    assert gradcheck(run, (query, key, value, gate, *state))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype):
    query, key, value = (x.to(dtype) for x in inputs())
    for out, state in (reference.linear_attention(query, key, value), reference.linear_attention_recurrent(query, key, value)):
        assert out.dtype == dtype and all(x.dtype == torch.float32 for x in state)
