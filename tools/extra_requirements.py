"""Prints the requirements of one extra of the installed package, one a line: `extra_requirements.py NAME`."""

import importlib.metadata
import re
import sys


def extra_requirements(extra: str) -> list[str]:
    """Requirement strings that pyproject.toml lists under `extra`; ValueError if it has no such extra."""
    requires = importlib.metadata.requires("tiled-attention") or []
    found = [match[1] for line in requires if (match := re.fullmatch(rf"(.+?)\s*;\s*extra\s*==\s*['\"]{re.escape(extra)}['\"]", line))]
    if not found:
        raise ValueError(f"extra: expected one that pyproject.toml defines, got {extra!r}")
    return found


if __name__ == "__main__":
    print("\n".join(extra_requirements(sys.argv[1])))
