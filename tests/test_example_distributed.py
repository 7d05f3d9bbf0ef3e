"""The example that trains on several ranks, small."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from test_examples import load, pictures

SIZES = ["--lines", 60, "--steps", 6, "--batch", 2, "--seqlen", 33, "--dim", 16, "--num-heads", 2, "--layers", 2, "--dropout", 0.2]


@pytest.fixture
def example() -> Any:
    return load("char_lm_distributed")


def test_two_ranks_have_the_loss_curve_of_one_process(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    outcome = example.main([*map(str, SIZES), "--ranks", "2", "--out", str(tmp_path)])
    assert len(outcome.shared.losses) == len(outcome.alone.losses) == 6
    assert outcome.passed and outcome.difference <= 1e-5
    assert pictures(tmp_path) == {"char_lm_distributed.png"}
    assert "2 ranks" in capsys.readouterr().out


def test_dropout_acts_and_a_curve_that_parts_is_told(example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    train = example.train
    monkeypatch.setattr(example, "on_ranks", lambda options, num_ranks: train(replace(options, dropout=0.0), None))
    with pytest.raises(SystemExit, match="not that of one process"):
        example.main([*map(str, SIZES), "--ranks", "2", "--out", str(tmp_path)])
