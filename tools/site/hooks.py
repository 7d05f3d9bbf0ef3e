"""Hooks of the documentation's build: formulas become MathML, and the built pages ask nothing of the network."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex makes of $...$ and $$...$$.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\((.*?)\\\)|\\\[(.*?)\\\])</\1>', re.DOTALL)


def _mathml(match: re.Match[str]) -> str:
    tag, inline, block = match.groups()
    latex = html.unescape(inline if inline is not None else block).strip()
    return f'<{tag} class="arithmatex">{convert(latex, display="inline" if inline is not None else "block")}</{tag}>'


def on_config(config: Any) -> Any:
    """The offline plugin adds a script from a CDN, for a search in browsers that lack workers on file://; modern ones need none."""
    config.extra["polyfills"] = []
    return config


def on_page_content(content: str, **_: Any) -> str:
    """LaTeX to MathML, which browsers draw by themselves."""
    return _FORMULA.sub(_mathml, content)
