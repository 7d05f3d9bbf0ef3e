"""What the figures share: arguments, colours, and one way to save."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

# Okabe and Ito's colours: told apart with every common colour blindness.
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE = "#000000", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7"
WEIGHTS = "Blues"  # of weights, 0 to 1: perceptually ordered, white is 0
SIGNED = "PuOr"  # of values of both signs, white is 0

STYLE = {
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "tiled-attention",
}


def start(argv: Sequence[str] | None, description: str | None) -> Path:
    """Sets the style. Returns the folder that `--out` names; that of the documentation without it."""
    pyplot.rcParams.update(STYLE)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "pictures", help="folder of the picture")
    out: Path = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    return out


def save(figure: Any, path: Path) -> None:
    """Write a picture whose bytes depend on nothing but what is drawn."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
    pyplot.close(figure)


def matrix(axes: Any, values: Any, rows: Sequence[str] | None = None, columns: Sequence[str] | None = None, **options: Any) -> Any:
    """Draws a matrix, row 0 at the top, with labels if given. Returns matplotlib's image, for a colour bar."""
    options = {"cmap": WEIGHTS, "vmin": 0, "vmax": 1, **options}
    image = axes.imshow(values, interpolation="nearest", **options)
    axes.spines[:].set_visible(False)
    if columns is not None:
        axes.set_xticks(range(len(columns)), columns, rotation=90 if max(map(len, columns)) > 2 else 0)
    if rows is not None:
        axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    return image
