"""The worked examples, small: each reaches the outcome that it claims, and says so when an argument is wrong.

An example is one file in examples/ whose `main(argv)` parses its arguments (`--seed`, `--out`, sizes), runs, prints, writes its pictures
into `--out`, and returns a dataclass of outcomes.
"""

import importlib.util
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
WRONG: list[tuple[str, list[str], str]] = []


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
