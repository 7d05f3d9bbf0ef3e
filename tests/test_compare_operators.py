"""The comparison of the operators beyond exact and linear attention: that its checks fail where they should, and what it judges by."""

import dataclasses

import pytest
import torch

import tiled_attention as ta
from tiled_attention.compare import comparison, counted, memory, operators, packed, patterns, scores
from tiled_attention.compare.comparison import Size, parity_rows, speed_rows

SIZE = Size(2, 4, 2, 40, 16)
THEMES = {theme.name: theme for theme in operators.THEMES}


def all_comparisons(size: Size = SIZE) -> dict[str, comparison.Comparison]:
    return {found.name: found for theme in operators.THEMES for found in theme.comparisons(size, 0)}


@pytest.mark.parametrize("name", all_comparisons())
def test_a_wrong_result_is_found(name):
    """One part in two hundred of the largest element, in one place."""
    right = all_comparisons()[name]

    def wrong(**leaves: torch.Tensor) -> torch.Tensor:
        out = right.tiled(**leaves)
        change = torch.zeros_like(out)
        change.view(-1)[out.numel() // 2] = out.detach().abs().max() / 200
        return out + change

    def rows(function) -> dict[str, bool]:
        given = dataclasses.replace(right, tiled=function)
        return {row["tensor"]: row["passed"] for row in parity_rows(lambda seed: [given], torch.float32)}

    assert not rows(wrong)["out"]


@pytest.mark.parametrize("name", [name for name, found in all_comparisons().items() if found.differentiable])
def test_a_wrong_gradient_is_found(name):
    right = all_comparisons()[name]

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    given = dataclasses.replace(right, tiled=lambda **leaves: right.tiled(**{leaf: Doubled.apply(x) for leaf, x in leaves.items()}))
    passed = {row["tensor"]: row["passed"] for row in parity_rows(lambda seed: [given], torch.float32)}
    assert passed.pop("out") and not any(passed.values())


@pytest.mark.parametrize("name", [name for name, found in all_comparisons().items() if not found.approximated])
def test_peers_compute_the_same(name):
    found = all_comparisons(dataclasses.replace(SIZE, num_heads_kv=4))[name]
    leaves = {leaf: x.double() for leaf, x in found.leaves.items()}
    want = found.definition(**leaves)
    for peer in found.peers.values():
        torch.testing.assert_close(peer(**leaves), want, rtol=1e-9, atol=1e-11)


def test_packed_peers_include_nested_tensors():
    assert set(all_comparisons(dataclasses.replace(SIZE, num_heads_kv=4))["attention_varlen"].peers) == {"SDPA, padded", "nested tensors"}


def test_every_leaf_of_a_peer_is_differentiated_in_its_own_layout():
    (found, _) = packed.varlen(Size(1, 2, 2, 24, 8), 0)
    rows = speed_rows(found, 24, torch.float32, 0.0)
    assert [row["direction"] for row in rows] == ["forward", "forward+backward"]
    assert all(set(row["ratios"]) == {"SDPA, padded", "nested tensors"} for row in rows)
    (decode,) = packed.decode(Size(1, 4, 2, 24, 8), 0)
    assert [row["direction"] for row in speed_rows(decode, 24, torch.bfloat16, 0.0)] == ["forward"]


def test_buckets_are_those_of_the_module():
    module = ta.RelativeBias(2, scores.T5_DISTANCE, num_buckets=scores.T5_BUCKETS)
    distance = torch.arange(300) - torch.arange(300)[:, None]
    assert torch.equal(scores.t5_buckets(300), module.index(distance))


def test_rotary_is_that_of_the_reference():
    x = torch.randn(2, 3, 20, 8, dtype=torch.float64)
    torch.testing.assert_close(scores.turned(x), ta.reference.rotary_embedding(x, torch.arange(20)))


def test_masks_of_every_kind_are_sparse_and_leave_no_row_empty():
    for n in (8, 64, 333):
        for name, mask in patterns.masks(n, 3, 0).items():
            dense = patterns.dense(mask, n)
            assert dense.any(-1).all(), name
            assert n < 300 or 0 < dense.double().mean() < 0.2, name


def test_recall_is_whole_where_everything_is_seen(monkeypatch):
    monkeypatch.setattr(patterns, "RECALL_BUCKET", patterns.RECALL_SEQLEN)
    (row,) = patterns.recall((1,))
    assert row["recall"] == 1 and row["weight"] == pytest.approx(1) and row["error"] < 1e-5
    assert not row["passed"]  # no more often than chance


def test_recall_grows_with_the_rounds():
    rows = patterns.recall((1, 4))
    assert all(row["passed"] for row in rows) and rows[0]["recall"] < rows[1]["recall"] and rows[0]["error"] > rows[1]["error"]


def test_a_wrong_density_is_found(monkeypatch):
    monkeypatch.setattr(ta.Dilated, "density", lambda *_, **__: 0.5)
    assert [row["mask"] for row in patterns.densities(64, 2) if not row["passed"]] == ["Dilated"]


def test_a_wrong_count_is_found(monkeypatch):
    assert all(row["passed"] for row in counted.rows())
    flops = ta.flops
    monkeypatch.setattr(ta, "flops", lambda *args, **options: ta.counts.Flops(*(value + 1 for value in flops(*args, **options))))
    assert {row["what"].split(",")[0] for row in counted.rows() if not row["passed"]} == {"flops"}


def test_lengths_are_bounded():
    assert operators._parity_sizes(THEMES["scores"], (8, 64, 197, 512)) == [8, 64, THEMES["scores"].longest]
    seen = []
    operators.THEMES, themes = (THEMES["decode"],), operators.THEMES
    try:
        rows = operators.speed(False, 16, 1, 0.0, seen.append)
    finally:
        operators.THEMES = themes
    assert {row["n"] for row in rows} == {16} and len(seen) == len(rows) == 2


def test_memory_of_additive_attention_and_its_composite():
    rows = operators.memory(400, torch.get_num_threads(), lambda _: None)
    assert [row["implementation"] for row in rows] == list(operators.MEMORY) and {row["n"] for row in rows} == {400}
    assert rows[1]["bytes"] > 400 * 400 * memory.HEAD_DIM * 4 > 4 * rows[0]["bytes"]


def test_additive_composite_is_the_formula():
    query, key, value, weight = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 3), torch.randn(4)
    want = ta.reference.additive_attention(query, key, value, weight)
    torch.testing.assert_close(scores.additive_composite(query, key, value, weight), want)
