"""The worked examples, small: each reaches the outcome that it claims, and says so when an argument is wrong.

An example is one file in examples/ whose `main(argv)` parses its arguments (`--seed`, `--out`, sizes), runs, prints, writes its pictures
into `--out`, and returns a dataclass of outcomes.
"""

import datetime
import importlib.util
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
try:
    import run_examples
finally:
    sys.path.pop(0)

EXAMPLES = run_examples.find(ROOT / "examples")


@cache
def load(name: str) -> ModuleType:
    """The module examples/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES[name])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """run(name, *arguments): the outcome of one example; its pictures lie in tmp_path."""
    return lambda name, *arguments: load(name).main([*map(str, arguments), "--out", str(tmp_path)])


def pictures(folder: Path) -> set[str]:
    """Names of the pictures in the folder, each of which is a whole PNG."""
    for path in folder.glob("*.png"):
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") and content.rstrip().endswith(b"IEND\xaeB`\x82")
    return {path.name for path in folder.iterdir()}


# What all of them have.


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_names_seed_and_folder(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        load(name).main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "--seed" in text and "--out" in text


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(
    ("arguments", "message"), [(["--nonsense"], "unrecognized arguments: --nonsense"), (["--seed", "x"], "argument --seed")]
)
def test_wrong_option(name: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        load(name).main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


# name, arguments, what the message says
WRONG = [
    ("numpy_attention", ["--seqlen", "0"], "seqlen: expected an integer >= 1, got 0"),
    ("reverse_task", ["--n", "0"], "n: expected an integer >= 1, got 0"),
    ("reverse_task", ["--dim", "62"], "dim: expected a multiple of num_heads (4), got 62"),
    ("char_lm", ["--lines", "3"], "lines: expected 10 to"),
    ("char_lm", ["--lines", "20", "--seqlen", "4000"], "seqlen: expected 2 to"),
    ("char_lm", ["--dim", "12"], "dim: expected a multiple of 2 * num_heads (8)"),
    ("char_lm", ["--dropout", "1"], "dropout: expected a number in [0, 1), got 1.0"),
    ("char_lm", ["--temperature", "nan"], "temperature: expected a number > 0, got nan"),
    ("char_lm_distributed", ["--ranks", "0"], "ranks: expected an integer >= 1, got 0"),
    ("char_lm_distributed", ["--dim", "12"], "dim: expected a multiple of 2 * num_heads (8)"),
    ("char_lm_distributed", ["--dropout", "1"], "dropout: expected a number in [0, 1), got 1.0"),
    ("char_lm_distributed", ["--lines", "20", "--seqlen", "4000"], "seqlen: expected less than the held-out text"),
    ("linear_vs_softmax", ["--lengths", "8", "0"], "lengths: expected integers >= 1, got 8, 0"),
    ("linear_vs_softmax", ["--sizes", "-1"], "sizes: expected integers >= 1, got -1"),
    ("translate_additive", ["--steps", "0"], "argument --steps: expected 1 to 1000000, got 0"),
    ("translate_additive", ["--tested", "36525"], "argument --tested: expected 1 to 36524, got 36525"),
    ("translate_additive", ["--formats", "10"], "argument --formats: expected 1 to 9, got 10"),
    ("streaming", ["--window", "0"], "argument --window: expected at least 1, got 0"),
    ("streaming", ["--model", "gpt"], "argument --model: invalid choice: 'gpt'"),
    ("reading", ["--sentences", "2"], "argument --sentences: expected at least 3, got 2"),
    ("finetune_text", ["--layers", "7"], "argument --layers: expected 0 to 6, got 7"),
    ("finetune_text", ["--learning-rate", "nan"], "argument --learning-rate: expected a number above 0, got nan"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), WRONG)
def test_wrong_argument(name: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with pytest.raises(SystemExit) as stop:
        load(name).main([*arguments, "--out", str(tmp_path / "none")])
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


# `make examples`.


def test_all_examples_run_and_a_failure_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "a_fails.py").write_text("raise SystemExit(3)")
    (tmp_path / "b_writes.py").write_text("import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('done')")
    (tmp_path / "quickstart.py").write_text("raise SystemExit(4)")
    out = tmp_path / "result"
    assert run_examples.main(["--out", str(out)], tmp_path) == 1
    assert out.read_text() == "done"
    text = capfd.readouterr().out
    assert "failed with exit code 3" in text and "b_writes" in text and "quickstart" not in text
    assert run_examples.main(["b_writes", "--out", str(out)], tmp_path) == 0


def test_unknown_example(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        run_examples.main(["none"])
    assert stop.value.code == 2 and "NAME: expected one of" in capsys.readouterr().err


# One by one.


def test_dates_are_read_where_they_are_written(run: Callable[..., Any], tmp_path: Path):
    outcomes = run("translate_additive", "--formats", 2, "--steps", 200, "--batch", 16, "--tested", 200)
    assert set(outcomes) == {"additive", "luong"}
    for outcome in outcomes.values():
        assert outcome.accuracy >= 0.75
        for part in ("year", "month", "day"):
            assert outcome.aligned[part] >= 2 * outcome.chance[part]
    assert pictures(tmp_path) == {"translate_additive.png"}


def test_every_format_says_where_its_parts_are():
    example = load("translate_additive")
    date = datetime.date(2021, 3, 7)
    for form in example.FORMATS:
        written = example.write(date, form)
        said = {part: written.text[span.start : span.stop] for part, span in written.spans.items()}
        assert said["year"] in ("2021", "21") and said["month"] in ("March", "Mar", "03") and said["day"] in ("7", "07")
        assert written.target == "2021-03-07"
    assert example.write(date, "a, d-m-y").text == "Sun, 07-03-21"


def test_dates_of_the_test_are_not_trained_on(monkeypatch: pytest.MonkeyPatch):
    example = load("translate_additive")
    trained: list[datetime.date] = []
    tested: list[str] = []
    monkeypatch.setattr(example, "train", lambda model, dates, *rest: trained.extend(dates) or 0.0)
    monkeypatch.setattr(example, "examine", lambda model, written, loss: tested.extend(w.target for w in written))
    example.run(example.FORMATS, steps=1, batch=1, width=8, tested=100, seed=0)
    assert len(set(tested)) == 100 and not set(tested) & {date.isoformat() for date in trained}


@pytest.mark.parametrize("block", [1, 16])
def test_streams_equal_the_dense_mask_in_flat_memory(block: int, run: Callable[..., Any], tmp_path: Path):
    outcomes = run("streaming", "--model", "random", "--tokens", 160, "--window", 24, "--block", block, "--new", 3)
    everything, *rings = outcomes.values()
    for outcome in outcomes.values():
        assert outcome.difference <= 1e-5
        assert len(outcome.continuation) == 3 and all(0 <= token < 97 for token in outcome.continuation)
    size = everything.cache_bytes[0] / block  # of a token
    assert everything.cache_bytes == [size * min(160, block * (index + 1)) for index in range(len(everything.cache_bytes))]
    for ring, sinks in zip(rings, (0, 4)):
        assert ring.cache_bytes[-1] == ring.cache_bytes[len(ring.cache_bytes) // 2] == size * (24 + sinks + block - 1)
    assert pictures(tmp_path) == {"streaming.png"}


def test_a_stream_that_forgets_its_sinks_is_found(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]):
    example = load("streaming")
    stream = example.Stream

    def without_sinks(config: Any, capacity: int, window: int | None, num_sinks: int) -> Any:
        return stream(config, capacity, window, 0)

    monkeypatch.setattr(example, "Stream", without_sinks)
    outcomes = run("streaming", "--model", "random", "--tokens", 64, "--window", 8, "--block", 8, "--new", 1)
    assert outcomes["window"].difference <= 1e-5 < 1e-3 < outcomes["window and sinks"].difference


def test_the_question_word_looks_at_its_place(run: Callable[..., Any], tmp_path: Path):
    outcome = run("reading", "--steps", 150, "--batch", 32, "--sentences", 4, "--tested", 100)
    for word in ("where", "who"):
        assert outcome.accuracy[word] >= 0.9
        assert outcome.on_answer[word] >= 0.8 > 2 * outcome.chance[word]
        assert outcome.on_kind[word] >= 0.95
    assert pictures(tmp_path) == {"reading.png"}


def test_answers_of_stories():
    """Against a plain reading of the story, sentence by sentence."""
    example = load("reading")
    draw = random.Random(0)
    for story in (example.tell(draw, 6, 4) for _ in range(50)):
        where, who = {}, {}
        for first in range(0, len(story.words), 6):
            person, verb, _, _, place, _ = story.words[first : first + 6]
            if verb in ("went", "ran", "walked", "hurried"):
                where[person], who[place] = (place, first + 4), (person, first)
        for question in story.questions:
            known = where if question.words[0] == "where" else who
            asked = next(word for word in question.words if word in known)
            assert (question.answer, question.place) == known[asked]


def test_fine_tuning_has_one_loss_curve(run: Callable[..., Any], tmp_path: Path):
    outcomes = run("finetune_text", "--steps", 3, "--batch", 4, "--tested", 8)
    stock, math, *ours = outcomes.values()
    assert len(stock.loss) == 3 and stock.difference == 0 and not any(stock.served.values()) and not any(math.served.values())
    for outcome in ours:
        assert outcome.difference <= 4 * math.difference + 16 * 2.0**-24
        assert len(outcome.served) == 7 and all(outcome.served.values())
        assert outcome.accuracy == stock.accuracy
    assert pictures(tmp_path) == {"finetune_text.png"}


def test_speeches_hold_what_is_said():
    said = load("finetune_text").speeches("tragedies/hamlet")
    assert len(said) > 500 and not any(mark in speech for speech in said for mark in ("**", "_", "#"))
    assert said[0] == "'Tis now struck twelve; get thee to bed, Francisco."
