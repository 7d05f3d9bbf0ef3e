"""The examples in NumPy, of copying, of characters, and of linear against softmax attention, small: each reaches its outcome."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiled_attention as ta
from test_examples import load, pictures


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """run(name, *arguments): the outcome of one example; its pictures lie in tmp_path."""
    return lambda name, *arguments: load(name).main([*map(str, arguments), "--out", str(tmp_path)])


# numpy_attention


def test_numpy_agrees_to_rounding(run: Callable[..., Any], tmp_path: Path):
    outcome = run("numpy_attention", "--seqlen", 33, "--head-dim", 16, "--num-heads", 2)
    assert len(outcome.rows) == 4 * (4 + 6) and outcome.passed
    assert max(row.tiled for row in outcome.rows) <= 16 and outcome.slope_error < 1e-8
    assert min(row.tiled for row in outcome.rows if row.tensor == "out") > 0  # something was compared
    assert pictures(tmp_path) == {"numpy_attention.png"}


def test_numpy_rows_that_see_nothing_are_zero_like_the_operators():
    example = load("numpy_attention")
    rng = np.random.default_rng(0)
    query, key, value, grad_out = (rng.standard_normal((1, 2, 5, 8)) for _ in range(4))
    visible = np.ones((5, 5), dtype=bool)
    visible[1] = visible[:, 3] = False
    out, weights = example.attention(query, key, value, visible)
    grads = example.attention_backward(grad_out, query, key, value, weights)
    tensors = [torch.from_numpy(x).requires_grad_() for x in (query, key, value)]
    expected = ta.attention(*tensors, mask=torch.from_numpy(visible))
    expected_grads = torch.autograd.grad(expected, tensors, torch.from_numpy(grad_out))
    assert not out[0, :, 1].any() and not weights[0, :, 1].any() and not grads[0][0, :, 1].any() and not grads[1][0, :, 3].any()
    for ours, theirs in zip((out, *grads), (expected, *expected_grads)):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-12, atol=1e-14)


def test_numpy_example_stops_at_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    example = load("numpy_attention")
    right = example.softmax_backward
    monkeypatch.setattr(example, "softmax_backward", lambda grad, weights: right(grad, weights) * (1 + 1e-4))
    with pytest.raises(SystemExit, match="more than 16 units"):
        example.main(["--seqlen", "8", "--head-dim", "8", "--out", str(tmp_path)])


# reverse_task


def test_reverse_task_is_learned_where_the_weights_say(run: Callable[..., Any], tmp_path: Path):
    outcome = run("reverse_task", "--n", 6, "--dim", 32, "--num-heads", 2, "--samples", 2000, "--epochs", 8, "--batch", 40)
    for task, result in outcome.results.items():
        assert result.exact >= 0.99, task
        assert result.share > 3 * result.chance and max(result.head_shares) > 0.5, task
        assert result.weights.shape == (2, 6, 6) and result.weights.sum(-1).max() <= 1 + 1e-5
    place = torch.arange(6)
    weights = outcome.results["reverse"].weights
    assert weights[:, place, 5 - place].mean().item() == pytest.approx(outcome.results["reverse"].share, rel=1e-5)
    assert pictures(tmp_path) == {"copy.png", "reverse.png"}


# char_lm


def test_characters_are_learned_and_heads_look_back(run: Callable[..., Any], tmp_path: Path):
    sizes = ["--lines", 300, "--steps", 250, "--batch", 8, "--seqlen", 32, "--dim", 64, "--num-heads", 2, "--layers", 2, "--length", 50]
    outcome = run("char_lm", *sizes, "--dropout", 0)
    assert outcome.best < outcome.unigram - 0.5 and outcome.losses[-1] < outcome.losses[0] - 1
    assert outcome.previous.shape == (2, 2) and outcome.previous.max() > 2 * outcome.chance
    assert len(outcome.text) == 50 and len(set(outcome.text)) > 5
    assert pictures(tmp_path) == {"char_lm.png"}


def test_characters_one_by_one_are_characters_at_once():
    example = load("char_lm")
    model = example.CharacterModel(20, dim=16, num_heads=2, num_layers=2, dropout=0.0).eval()
    characters = torch.randint(20, (1, 12))
    caches = [ta.KVCache(1, 2, 12, 8, window=12) for _ in range(2)]
    with torch.no_grad():
        steps = torch.cat([model(characters[:, [t]], caches) for t in range(12)], 1)
        torch.testing.assert_close(steps, model(characters), rtol=1e-4, atol=1e-5)


def test_previous_share_of_known_weights(monkeypatch: pytest.MonkeyPatch):
    example = load("char_lm")
    model = example.CharacterModel(20, dim=16, num_heads=2, num_layers=1, dropout=0.0)
    known = torch.zeros(1, 3, 2, 8, 8)
    known[:, :, 0] = torch.eye(8)[[0, 0, 1, 2, 3, 4, 5, 6]]  # row i on key i - 1
    known[:, :, 1] = torch.ones(8, 8).tril() / torch.arange(1, 9)[:, None]
    monkeypatch.setattr(model, "weights", lambda characters: known)
    shares = example.previous_share(model, torch.zeros(3, 9, dtype=torch.int64))
    assert shares[0, 0].item() == pytest.approx(1)
    assert shares[0, 1].item() == pytest.approx(sum(1 / (i + 1) for i in range(1, 8)) / 7)


# linear_vs_softmax


def test_linear_attention_copies_worse_and_needs_less(run: Callable[..., Any], tmp_path: Path):
    outcome = run("linear_vs_softmax", "--lengths", 4, 16, "--steps", 250, "--sizes", 2048)
    softmax, linear = outcome.symbols("softmax"), outcome.symbols("linear")
    assert softmax[4] > 0.99 and softmax[16] > 0.95
    assert linear[16] < linear[4] and linear[16] < softmax[16] - 0.1
    most, tiled, least = (outcome.bytes(implementation)[2048] for implementation in ("math", "tiled", "linear"))
    assert most > 3 * 2048 * 2048 * 4 * 0.9 and most > 4 * tiled and least < most / 4
    assert all(row.seconds > 0 for row in outcome.costs)
    assert pictures(tmp_path) == {"linear_vs_softmax.png"}


def test_math_is_left_out_where_it_needs_too_much():
    cost = load("linear_vs_softmax").measure("math", 4096, 1, 64)
    assert cost.bytes is None and cost.seconds is None and cost.stopped == "needs 320 MiB, more than the limit of 64"
