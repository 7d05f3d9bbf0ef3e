"""Prepares docstrings for the API reference: entries that name several parameters or errors become one row each.

The sources write `query, key, value: text` once; the tables of the reference have a row, with type and default, for each name.
"""

import re
from typing import Any

from griffe import Extension, Object

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns):$")
_ENTRY = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*):(.*)$")


class Docstrings(Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = rewrite(obj.docstring.value)


def rewrite(text: str) -> str:
    """A docstring of this project as Google-style Markdown that griffe reads without loss."""
    lines: list[str] = []
    section: str | None = None
    names: list[str] = []  # of the entry that is being read
    entry: list[str] = []

    def close_entry() -> None:
        for name in names:
            first = entry[0].replace(" >", " \\>", 1) if entry[0].startswith(" >") else entry[0]  # "> 0" is no quotation
            lines.extend([f"    {name}:{first}", *entry[1:]])
        names.clear()
        entry.clear()

    for line in text.split("\n"):
        if match := _SECTION.match(line):
            close_entry()
            section = match[1]
            lines.append("**Returns**\n" if section == "Returns" else line)
        elif line and not line.startswith(" "):
            close_entry()
            section = None
            lines.append(re.sub(r"^Source:", "**Source:**", line.removesuffix(":") if line.endswith("::") else line))
        elif section == "Returns":
            lines.append(line.removeprefix("    "))
        elif section is None:
            source = bool(lines) and lines[-1].startswith("**Source:**")
            lines.append(line.lstrip() if source else line)
        elif match := _ENTRY.match(line):
            close_entry()
            names.extend(match[1].split(", "))
            entry.append(match[2])
        elif names:
            entry.append(line)
        else:
            lines.append(line)
    close_entry()
    return "\n".join(lines)
