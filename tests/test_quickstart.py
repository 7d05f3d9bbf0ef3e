"""What the documentation shows runs: the example script, and the Python blocks of the README and of docs/."""

import re
import runpy
from pathlib import Path

import pytest

import tiled_attention as ta

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
]


def test_quickstart_runs_and_finds_no_difference(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(ROOT / "examples/quickstart.py"), run_name="__main__")
    assert capsys.readouterr().out.count("largest difference") == 8


def test_the_pages_that_show_code_are_found():
    assert {page.name for page in PAGES if f"{page.relative_to(ROOT)}-0" in {block.id for block in BLOCKS}} >= {
        "README.md",
        "more_operators.md",
    }


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str):
    exec(compile(block, "block", "exec"), {"__name__": "block"})


@pytest.mark.parametrize("name", ta.__all__)
def test_every_public_name_is_documented(name: str):
    assert any(re.search(rf"\b{name}\b", page.read_text()) for page in PAGES)
    assert (getattr(ta, name).__doc__ or "").strip()
