"""tools/check_site.py finds what is broken in a built site, and nothing else."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
check_site: Callable[[Path], tuple[list[str], int, int]] = runpy.run_path(str(ROOT / "tools/check_site.py"))["check_site"]
HEAD = '<link rel="stylesheet" href="site.css"><h1 id="top">A</h1>'
WHOLE = (
    '<a href="sub/b.html#there">b</a><a href="#top">top</a><a href="https://example.org/x">out</a><img src="a%20b.png"><img src="data:,">'
)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(HEAD + WHOLE)
    (tmp_path / "sub/b.html").write_text('<a id="there" href="../">home</a>')
    (tmp_path / "site.css").write_text("body { background: url('a b.png') }".replace("a b", "a%20b"))
    (tmp_path / "a b.png").write_text("")
    return tmp_path


def test_a_whole_site_has_no_problem(site: Path):
    assert check_site(site) == ([], 2, 8)


@pytest.mark.parametrize(
    "fault, message",
    [
        ('<a href="gone.html">x</a>', "gone.html leads to no file"),
        ('<img src="sub/gone.png">', "sub/gone.png leads to no file"),
        ('<a href="../outside.html">x</a>', "leads to no file"),
        ('<a href="sub/b.html#here">x</a>', "has no element with that id"),
        ('<a href="#here">x</a>', "has no element with that id"),
        ('<p id="top">x</p>', "the id top stands twice"),
        ('<a href="https://nowhere">x</a>', "expected an address"),
        ('<a href="htp://example.org">x</a>', "expected an address"),
        ('<script src="https://example.org/x.js"></script>', "from outside the site"),
        ('<p style="background: url(//example.org/x.png)">x</p>', "from outside the site"),
        ('<img srcset="gone.png 2x">', "gone.png leads to no file"),
    ],
)
def test_a_fault_is_found(site: Path, fault: str, message: str):
    (site / "index.html").write_text(HEAD + WHOLE + fault)
    problems, _, _ = check_site(site)
    assert len(problems) == 1 and message in problems[0]


def test_style_sheets_are_read(site: Path):
    (site / "site.css").write_text('@import "https://example.org/font.css"; a { background: url(gone.svg) }')
    problems, _, _ = check_site(site)
    assert len(problems) == 2


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"])
def test_links_of_pages_outside_the_site_lead_somewhere(name: str):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
