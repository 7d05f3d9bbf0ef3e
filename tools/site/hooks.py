"""Hooks of the documentation's build: formulas become MathML, which browsers draw by themselves, without a script."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex makes of $...$ and $$...$$.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\((.*?)\\\)|\\\[(.*?)\\\])</\1>', re.DOTALL)
_FUNCTION = "<mi>[A-Za-z]{2,}</mi>"
_BAR = re.compile('<mo(?: stretchy="false")?>(&#x0007C;|&#x02016;)</mo>')


def _mathml(match: re.Match[str]) -> str:
    tag, inline, block = match.groups()
    latex = html.unescape(inline if inline is not None else block).strip()
    mathml = convert(latex, display="inline" if inline is not None else "block")
    if "\\" in mathml:
        raise ValueError(f"{latex!r}: expected LaTeX that latex2mathml knows, got {mathml}")
    # Names of functions, and bars of absolute values and norms, are set without the wide spaces of operators,
    mathml = re.sub("<mo>([A-Za-z]{2,})</mo>", r"<mi>\1</mi>", mathml).replace('width="negativethinmathspace"', 'width="-0.167em"')
    mathml = _BAR.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', mathml)
    # and names with the thin ones of TeX on both sides, where no parenthesis stands.
    mathml = re.sub(rf"({_FUNCTION})(?=<m(?:i|n|su|row|fr|sq|ov|un))", r'\1<mspace width="0.167em" />', mathml)
    mathml = re.sub(rf"(</m(?:i|n|sub|sup|subsup|row|frac)>)(?={_FUNCTION})", r'\1<mspace width="0.167em" />', mathml)
    return f'<{tag} class="arithmatex">{mathml}</{tag}>'


def on_page_content(content: str, **_: Any) -> str:
    """LaTeX to MathML. ValueError for a command that is not known."""
    return _FORMULA.sub(_mathml, content)
