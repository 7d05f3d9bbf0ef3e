"""How the package is built: the oldest torch is the same one everywhere, and a Python that cannot use the build is refused by name."""

import re
import runpy
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_the_oldest_torch_is_one():
    (oldest,) = set(re.findall(r'"torch>=([\d.]+)"', PYPROJECT))
    assert PYPROJECT.count(f'"torch>={oldest}"') == 2  # to build and to run
    major, minor = oldest.split(".")
    assert re.findall(r"torch==(\S+)", re.findall(r'before-build = "(.*)"', PYPROJECT)[0]) == [f"{oldest}.0"]
    assert re.findall(r'torch: "(\d[\d.]*)"', (ROOT / ".github/workflows/tests.yml").read_text()) == [f"{oldest}.0"]
    # Major and minor version in the two highest bytes.
    assert f'("TORCH_TARGET_VERSION", "0x{int(major):02x}{int(minor):02x}{"0" * 12}")' in (ROOT / "setup.py").read_text()
    assert f"[{major}, {minor}]" in (ROOT / "Makefile").read_text()


def test_the_limited_api_is_that_of_the_oldest_python():
    (oldest,) = re.findall(r'requires-python = ">=(\d+\.\d+)"', PYPROJECT)
    major, minor = map(int, oldest.split("."))
    setup = (ROOT / "setup.py").read_text()
    assert f'("Py_LIMITED_API", "0x{major:02x}{minor:02x}0000")' in setup
    assert f'"py_limited_api": "cp{major}{minor}"' in setup
    assert f'\nbuild = "cp{major}{minor}-*"' in PYPROJECT


def test_free_threaded_python_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sysconfig.get_config_vars(), "Py_GIL_DISABLED", 1)
    monkeypatch.setattr(sys, "argv", ["setup.py", "--version"])
    with pytest.raises(SystemExit, match="does not support free-threaded Python, and .* is one: it takes no wheel of the limited API"):
        runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
