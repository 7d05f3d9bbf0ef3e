"""The API reference is complete: every public name stands in docs/reference, and every docstring says what its callers need."""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import tiled_attention as ta
from tiled_attention.convert import Conversion
from tiled_attention.counts import Flops, Memory
from tiled_attention.distributed import HeadwiseParallel
from tiled_attention.integrations.transformers import register

PAGES = sorted((Path(__file__).resolve().parent.parent / "docs/reference").glob("*.md"))
ENTRY = re.compile(r"^::: tiled_attention\.(\S+)\n(?: {4}options:\n((?: {6}.*\n)*))?", re.MULTILINE)
# Name -> the methods that its page shows; None: all of its own. A function is named with its module where both have the same name.
GENERATED = [
    (re.sub(r"\b(\w+)\.\1$", r"\1", match[1]), shown and re.findall(r"\w+", shown[1]))
    for page in PAGES
    for match in ENTRY.finditer(page.read_text() + "\n")
    for shown in [re.search(r"members: \[(.*)\]", match[2] or "")]
]
# Made by functions of this package, not by a caller.
MADE_HERE = (Conversion, ta.RecordedAttention, ta.Recording, ta.plot.Page)
# What public functions return or take, without a place in the namespace.
BESIDE: dict[str, Any] = {
    "convert.Conversion": Conversion,
    "counts.Flops": Flops,
    "counts.Memory": Memory,
    "distributed.tensor_parallel.HeadwiseParallel": HeadwiseParallel,
    "integrations.transformers.register": register,
}
SECTION = r"^{}:\n((?:(?: {{4}}.*)?\n)*)"


def members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Functions and classes of this package that a module offers."""
    for name, member in vars(module).items():
        ours = (inspect.isfunction(member) or inspect.isclass(member)) and member.__module__.startswith(module.__name__)
        if ours and not name.startswith("_"):
            yield f"{module.__name__.removeprefix('tiled_attention.')}.{name}", member


PUBLIC: dict[str, Any] = dict(BESIDE)
for _name in ta.__all__:
    _member = getattr(ta, _name)
    if isinstance(_member, ModuleType):
        PUBLIC.update(members(_member))
    else:
        PUBLIC[_name] = _member

# Definitions take the arguments of the operators whose names they carry, and are documented by the formula that they are.
CALLABLES: dict[str, Any] = {name: member for name, member in PUBLIC.items() if not re.match(r"(numpy_)?reference\.|counts\.", name)}
for _name, _shown in GENERATED:
    if inspect.isclass(_member := PUBLIC.get(_name)):
        _methods = [key for key, value in vars(_member).items() if inspect.isfunction(value) and key[0] != "_" and key != "extra_repr"]
        CALLABLES.update((f"{_name}.{key}", getattr(_member, key)) for key in (_methods if _shown is None else _shown))


def parameters(target: Callable[..., Any]) -> set[str]:
    """Names that a caller can give; of a class those of its constructor."""
    if (
        inspect.isclass(target)
        and "__init__" not in vars(target)
        and not issubclass(target, tuple)
        and not hasattr(target, "__dataclass_fields__")
    ):
        return set()
    return {name for name in inspect.signature(target).parameters if name not in ("self", "cls")}


def section(docstring: str, title: str) -> str | None:
    match = re.search(SECTION.format(title), docstring + "\n", re.MULTILINE)
    return match[1] if match else None


def named(entries: str) -> set[str]:
    """Names that the entries of a section describe."""
    return {
        name.strip(" *") for entry in re.findall(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):", entries, re.MULTILINE) for name in entry.split(",")
    }


def test_the_pages_name_what_exists_once():
    assert sorted(name for name, _ in GENERATED) == sorted(PUBLIC)


def test_the_index_links_every_entry():
    index = (PAGES[0].parent / "index.md").read_text()
    for page in PAGES:
        for name in ENTRY.findall(page.read_text() if page.name != "definitions.md" else ""):
            assert f"({page.name}#tiled_attention.{name[0]})" in index or name[0].startswith("counts.") or "Conversion" in name[0]


@pytest.mark.parametrize("name", CALLABLES)
def test_docstring_is_complete(name: str):
    target = CALLABLES[name]
    docstring = inspect.cleandoc(target.__doc__ or "")
    assert docstring, "no docstring"
    assert not re.search(r"^Errors:", docstring, re.MULTILINE), "errors stand under 'Raises:'"
    wanted = set() if target in MADE_HERE else parameters(target)
    if inspect.isclass(target) and issubclass(target, tuple):
        entries = (section(docstring, "Args") or "") + (section(docstring, "Attributes") or "")
    else:
        entries = section(docstring, "Args") or ""
    assert named(entries) >= wanted, f"not described: {sorted(wanted - named(entries))}"
    if not inspect.isclass(target):
        assert named(section(docstring, "Args") or "") <= wanted, "describes what the signature lacks"
        if inspect.signature(target).return_annotation not in ("None", None) and wanted:
            assert section(docstring, "Returns"), "no 'Returns:'"
    raises = section(docstring, "Raises")
    if wanted and not (inspect.isclass(target) and issubclass(target, tuple)):
        assert raises, "no 'Raises:'"
    for line in (raises or "").splitlines():
        if re.match(r" {4}\S", line):
            assert re.match(r" {4}[A-Z]\w+(, [A-Z]\w+)*: \S", line), f"expected 'Error, Error: when', got {line.strip()!r}"


@pytest.mark.parametrize("name", [name for name, member in PUBLIC.items() if inspect.isclass(member)])
def test_properties_are_described(name: str):
    kind = PUBLIC[name]
    for key, member in vars(kind).items():
        if isinstance(member, property) and key[0] != "_" and not issubclass(kind, nn.Module):
            assert member.__doc__ or re.search(rf"^ +{key}:", kind.__doc__ or "", re.MULTILINE), f"{key} has no docstring"
