"""Hooks of the documentation's build: formulas become MathML, which browsers draw by themselves, without a script."""

import html
import re
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert

_NAMESPACE = "http://www.w3.org/1998/Math/MathML"
# What pymdownx.arithmatex makes of $...$ and $$...$$.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\((.*?)\\\)|\\\[(.*?)\\\])</\1>', re.DOTALL)
_ORDINARY = {"mi", "mn", "msub", "msup", "msubsup", "mfrac", "msqrt", "mover", "munder", "munderover"}
_SCRIPTED = {"msub", "msup", "msubsup", "munder", "munderover"}
_THIN = "0.167em"
ElementTree.register_namespace("", _NAMESPACE)


def _is_function(node: ElementTree.Element) -> bool:
    """A name of several letters (log, max, softmax), with or without something below or above."""
    if _tag(node) in _SCRIPTED and len(node):
        node = node[0]
    return _tag(node) == "mi" and re.fullmatch("[A-Za-z]{2,}", node.text or "") is not None


def _tag(node: ElementTree.Element) -> str:
    return node.tag.removeprefix(f"{{{_NAMESPACE}}}")


def _tidy(node: ElementTree.Element) -> None:
    """Spaces as TeX sets them: none around bars, thin ones around the names of functions, where no parenthesis stands."""
    if _tag(node) == "mo" and re.fullmatch("[A-Za-z]{2,}", node.text or ""):
        node.tag = f"{{{_NAMESPACE}}}mi"
    elif _tag(node) == "mo" and node.text in ("|", "\u2016") and node.get("fence") is None:
        node.attrib.update(stretchy="false", lspace="0", rspace="0")
    elif node.get("width") == "negativethinmathspace":
        node.set("width", f"-{_THIN}")
    for child in node:
        _tidy(child)
    if _tag(node) in ("math", "mrow"):
        children = list(node)
        for i in range(len(children) - 1, 0, -1):
            before, after = children[i - 1], children[i]
            if {_tag(before), _tag(after)} <= _ORDINARY and (_is_function(before) or _is_function(after)):
                node.insert(i, ElementTree.Element(f"{{{_NAMESPACE}}}mspace", width=_THIN))


def _mathml(match: re.Match[str]) -> str:
    tag, inline, block = match.groups()
    latex = html.unescape(inline if inline is not None else block).strip()
    math = ElementTree.fromstring(convert(latex, display="inline" if inline is not None else "block"))
    _tidy(math)
    mathml = ElementTree.tostring(math, encoding="unicode")
    if "\\" in mathml:
        raise ValueError(f"{latex!r}: expected LaTeX that latex2mathml knows, got {mathml}")
    return f'<{tag} class="arithmatex">{mathml}</{tag}>'


def on_page_content(content: str, **_: Any) -> str:
    """LaTeX to MathML. ValueError for a command that is not known."""
    return _FORMULA.sub(_mathml, content)
