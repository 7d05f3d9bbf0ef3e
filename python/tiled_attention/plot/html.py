"""Weights as one HTML file that needs nothing else: no network, no server, no library."""

from __future__ import annotations

import base64
import hashlib
import html as markup
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from string import Template
from typing import Any

from .encode import encode
from .layers import labels_of, layers_of, same_lengths

_BUDGET = 15_000_000  # bytes of a page, whatever it shows
_HEADER = 64  # bytes of the header that a layer and a head take, at most
_FRAME_HEIGHT = 860  # CSS pixels, in a notebook
_SCRIPTS = ("decode.js", "viewer.js", "map.js", "events.js")


@dataclass(frozen=True, repr=False)
class Page:
    """An HTML page: `str(page)`, `page.save(path)`, or the last line of a notebook's cell.

    Attributes:
        text: the whole page.
        kept: "all" weights, or the "largest" of each row.
        error: of the weights that it holds: "largest" and "mean" distance from the given ones, "largest_of_row" as a share of the largest
            weight in the row; empty where it holds means over blocks only.
    """

    text: str
    kept: str
    error: dict[str, float]

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Page({len(self.text.encode())} bytes, kept={self.kept!r}, error={self.error})"

    def save(self, path: str | Path) -> Path:
        """Writes the page, in UTF-8.

        Args:
            path: of the file.

        Returns:
            The path.

        Raises:
            OSError: where it cannot be written.
        """
        path = Path(path)
        path.write_text(self.text, encoding="utf-8", newline="\n")
        return path

    def _repr_html_(self) -> str:
        """The page in a frame of its own, which neither styles the notebook nor reaches it."""
        source = markup.escape(self.text, quote=True)
        style = f"width:100%;height:{_FRAME_HEIGHT}px;border:0"
        return f'<iframe srcdoc="{source}" sandbox="allow-scripts" title="attention weights" style="{style}"></iframe>'


def html(
    weights: Any,
    tokens: Sequence[str] | None = None,
    *,
    key_tokens: Sequence[str] | None = None,
    title: str | None = None,
    layer_names: Sequence[str] | None = None,
) -> Page:
    """A page that shows attention weights: the tokens, where each looks, the map of a head, all heads, and a table.

    The page is one file of at most 15 MB that loads nothing: it opens from a disk, in a mail, and in a notebook. Where they fit, it holds
    every weight, in steps as fine as the size allows: 256 of the square root of a weight's share of the largest in its row, down to 12
    linear ones. Of more, it holds the largest weights of each row, at most 32, and means over blocks, 128 a side. What that leaves as an
    error is measured and written on the page. It needs a browser of 2023 or later.

    Args:
        weights: (seqlen_q, seqlen_kv), (num_heads, seqlen_q, seqlen_kv) or (num_layers, num_heads, seqlen_q, seqlen_kv), float tensors or
            arrays; a sequence of such layers, with or without a batch (of which item 0 is shown); a recording of `ta.record_attention` or a
            part of one. All layers must have the same lengths.
        tokens: of the queries, and of the keys where `key_tokens` is None and the lengths agree; None: their numbers.
        key_tokens: of the keys, for cross-attention.
        title: of the page; None: "Attention weights".
        layer_names: one a layer; None: those of the recording, or numbers.

    Returns:
        A `Page`.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    layers = layers_of(weights)
    same_lengths(layers)
    queries, keys = labels_of(layers, tokens, key_tokens)
    first = layers[0]
    names = [layer.name for layer in layers] if layer_names is None else [str(name) for name in layer_names]
    if len(names) != len(layers):
        raise ValueError(f"layer_names must have {len(layers)} entries, one a layer, got {len(names)}")
    queries = queries or [str(index) for index in range(first.seqlen_q)]
    if keys is None and first.seqlen_q != first.seqlen_kv:
        keys = [str(index) for index in range(first.seqlen_kv)]
    title = ("Attention weights" if title is None else str(title)).encode("utf-8", "replace").decode()
    separate = keys if key_tokens is not None or first.seqlen_q != first.seqlen_kv else None
    about = {"tokens": queries, "key_tokens": separate}
    fixed = len(_render(title, json.dumps([about, names]), {}).encode()) + _HEADER * sum(4 + layer.num_heads for layer in layers)
    encoded = encode(layers, _BUDGET - fixed - 1024)
    for layer, name in zip(encoded.header["layers"], names):
        layer["name"] = name
    text = _render(title, json.dumps(encoded.header | about, separators=(",", ":")), encoded.blobs)
    return Page(text, encoded.header["kept"], encoded.header.get("error", {}))


def _render(title: str, data: str, blobs: dict[str, str]) -> str:
    """The page's own files, the data and the blobs in one text; nothing of the data can end its element or run."""
    folder = resources.files(__package__) / "page"
    style = (folder / "viewer.css").read_text(encoding="utf-8")
    script = "".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template((folder / "viewer.html").read_text(encoding="utf-8")).substitute(
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        version=metadata.version("tiled-attention"),
        title=markup.escape(title),
        style=style,
        data=data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
        blobs="\n".join(f'<script type="text/plain" id="{name}">{text}</script>' for name, text in blobs.items()),
        script=script,
    )
