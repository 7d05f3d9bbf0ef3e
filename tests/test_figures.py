"""The pictures of the documentation: each script of docs/figures runs, and prints what the page that shows its picture quotes."""

import math
import re
import runpy
from pathlib import Path

import matplotlib
import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
SCRIPTS = sorted(DOCS.glob("figures/[!_]*.py"))
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)")


def quoted(script: Path) -> list[str]:
    """The ```text blocks that follow a mention of the script: what it printed for the pages."""
    pattern = rf"docs/figures/{script.name}(?:(?!```).)*?```text\n(.*?)```"
    return [block for page in sorted(DOCS.rglob("*.md")) for block in re.findall(pattern, page.read_text(), re.DOTALL)]


def test_there_are_figures():
    assert SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_figure_is_shown_and_its_numbers_are_quoted(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.syspath_prepend(str(script.parent))
    with matplotlib.rc_context():
        runpy.run_path(str(script))["main"](["--out", str(tmp_path)])
    printed = capsys.readouterr().out
    pictures = sorted(path.name for path in tmp_path.iterdir())
    assert pictures and all(name.startswith(script.stem) for name in pictures)
    for name in pictures:
        assert (DOCS / "pictures" / name).stat().st_size < 150_000
        assert any(f"pictures/{name}" in page.read_text() for page in DOCS.rglob("*.md")), f"no page shows {name}"
    blocks = quoted(script)
    assert bool(blocks) == bool(printed.strip()), f"{script.name} prints, and no page quotes it, or the other way round"
    for block in blocks:
        assert NUMBER.sub("#", block).split() == NUMBER.sub("#", printed).split()
        for there, here in zip(NUMBER.findall(block), NUMBER.findall(printed), strict=True):
            # Instruction sets round differently: the last digit may differ, and a rounding error is any small number.
            assert math.isclose(float(there), float(here), rel_tol=0.02, abs_tol=1e-5), (there, here)


def test_every_picture_has_its_script():
    """In docs/figures, or among the examples, which draw what they learned."""
    stems = {script.stem for script in SCRIPTS}
    examples = {script.stem for script in (DOCS.parent / "examples").glob("*.py")}
    for picture in DOCS.glob("pictures/*"):
        drawn = any(picture.stem.startswith(stem) for stem in stems) or any(stem.startswith(picture.stem) for stem in examples)
        assert drawn, picture.name
