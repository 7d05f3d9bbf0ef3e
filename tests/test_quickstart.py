"""What the documentation shows runs: the example script, and the Python blocks of the README."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README_BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_quickstart_runs_and_finds_no_difference(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(ROOT / "examples/quickstart.py"), run_name="__main__")
    assert capsys.readouterr().out.count("largest difference") == 8


def test_readme_has_python_blocks():
    assert README_BLOCKS


@pytest.mark.parametrize("block", README_BLOCKS, ids=range(len(README_BLOCKS)))
def test_readme_block_runs(block: str):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
