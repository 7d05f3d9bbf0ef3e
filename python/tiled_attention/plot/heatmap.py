"""Weights as a matplotlib figure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..block_list import TILE, shares
from ..masks import Mask
from .layers import Layer, is_causal, labels_of, layers_of

_PIXELS = 1024  # lengths up to which every pair is a pixel
_BLOCKS = 256  # blocks a side of a longer map
_BRIGHTEST = 0.995  # share of the blocks that the colour bar covers
_COLORS = "magma_r"  # perceptually uniform, its lightness falls from one end to the other: safe for every colour vision, and in grey
_HIDDEN, _HATCH, _TILE = "#e4e6ea", "#a9b0ba", "#2563a8"
_FONT = 8.0  # points
_LABEL_CHARACTERS = 16


def heatmap(
    weights: Any,
    *,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    mask: Mask | Tensor | None = None,
    tile: int | tuple[int, int] | None = None,
    heads: int | Sequence[int] | None = None,
    layers: int | Sequence[int] | None = None,
    axes: Any = None,
    title: str | None = None,
) -> Any:
    """Draws attention weights: queries down, keys across, one map for each layer (down) and head
    (across).

    Hidden pairs are hatched grey, so that they cannot be taken for small weights. All maps of a call share one colour bar, from 0 to their
    largest weight (where means over blocks are drawn: to their 99.5 % quantile). Labels are thinned where they would overlap.

    Args:
        weights: (seqlen_q, seqlen_kv), (num_heads, seqlen_q, seqlen_kv) or (num_layers, num_heads, seqlen_q, seqlen_kv), float tensors or
            arrays; a sequence of such layers, with or without a batch (of which item 0 is drawn); a recording of `ta.record_attention` or a
            part of one. Of lengths above 1024, the means over blocks are drawn, 256 blocks a side (a recording computes them without a
            seqlen_q x seqlen_kv tensor).
        tokens: labels of the queries, and of the keys where `key_tokens` is None and the lengths agree.
        key_tokens: labels of the keys.
        mask: the pairs that are visible: a mask, or a bool tensor (..., seqlen_q, seqlen_kv) that broadcasts to
            (num_layers, num_heads, seqlen_q, seqlen_kv). None: everything, or the causal triangle where every weight above the bottom-right
            diagonal is exactly 0.
        tile: size, or sizes (tile_q, tile_kv), of the tiles to outline: those that show at least one pair, which a tiled kernel visits.
        heads, layers: which of them to draw, in that order; None: all.
        axes: matplotlib axes to draw on: one for one map, else an array (layers, heads); None: those of a new figure.
        title: above the figure, or above the only map; None: the names of layers and heads.

    Returns:
        The axes of one map, else an array (layers, heads) of axes.

    Raises:
        ImportError: without matplotlib.
        ValueError, TypeError, IndexError: naming the argument.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("tiled_attention.plot.heatmap needs matplotlib: pip install matplotlib") from error
    found = layers_of(weights)
    chosen = [found[place] for place in _places("layers", layers, range(len(found)))]
    columns = [_places("heads", heads, layer.heads) for layer in chosen]
    shape = (len(chosen), max(len(part) for part in columns))
    sizes = () if tile is None else (tile, tile) if isinstance(tile, int) else tuple(tile)
    if len(sizes) not in (0, 2) or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f"tile must be an integer >= 1 or two of them, got {tile!r}")
    given = None if axes is None else _given(axes, shape)
    labels = [labels_of([layer], tokens, key_tokens) for layer in chosen]
    pictures = [_pictures(layer)[part] for layer, part in zip(chosen, columns)]
    means = any(maps.shape[-2:] != (layer.seqlen_q, layer.seqlen_kv) for layer, maps in zip(chosen, pictures))
    # A few blocks of short rows would leave the means of all others pale.
    largest = max(float(np.quantile(maps, _BRIGHTEST) if means else maps.max()) for maps in pictures) or 1.0
    if given is None:
        figure, grid = pyplot.subplots(
            *shape, squeeze=False, figsize=_figure_size(chosen[0], labels[0], shape), layout="constrained", sharex=False, sharey=False
        )
    else:
        grid, figure = given, given.flat[0].figure
    single = grid.size == 1
    image = None
    for row, (layer, maps, part) in enumerate(zip(chosen, pictures, columns)):
        hidden = _hidden(layer, mask, maps, row, part)
        for column, axis in enumerate(grid[row]):
            if column >= len(part):
                axis.set_axis_off()
                continue
            extent = (0, layer.seqlen_kv, layer.seqlen_q, 0)
            image = axis.imshow(maps[column], cmap=_COLORS, vmin=0, vmax=largest, interpolation="nearest", aspect="auto", extent=extent)
            _draw_hidden(axis, hidden[column], layer)
            if sizes:
                _draw_tiles(axis, hidden[column], layer, sizes)
            head = f"head {layer.heads[part[column]]}"
            if single:
                axis.set_title(title or ", ".join(filter(None, (_short(layer.name, 40), head))), fontsize=_FONT + 2, parse_math=False)
            elif row == 0 or part != columns[0]:
                axis.set_title(head, fontsize=_FONT)
            _label(axis, labels[row], layer, outer=(row == shape[0] - 1, column == 0))
            if len(grid) > 1 and column == 0:
                axis.set_ylabel(_short(layer.name, 20), fontsize=_FONT, parse_math=False)
    if not single and given is None and (title or shape[0] == 1):
        figure.suptitle(title or chosen[0].name, fontsize=_FONT + 4, parse_math=False)
    looks = {"fraction": 0.05, "pad": 0.02, "aspect": 30, "shrink": 1.0 if shape[0] == 1 else 0.6, "extend": "max" if means else "neither"}
    bar = figure.colorbar(image, ax=grid.ravel().tolist(), **looks)
    bar.set_label("mean weight of a block" if means else "weight", fontsize=_FONT)
    bar.ax.tick_params(labelsize=_FONT)
    bar.outline.set_visible(False)
    return grid[0, 0] if single else grid


def _places(name: str, wanted: int | Sequence[int] | None, numbers: Sequence[int]) -> list[int]:
    """Where the wanted numbers stand among `numbers`; negative ones count from the end."""
    if wanted is None:
        return list(range(len(numbers)))
    places = []
    for number in [wanted] if isinstance(wanted, int) else wanted:
        if number not in numbers and not -len(numbers) <= number < 0:
            raise IndexError(f"{name} must be among {list(numbers)}, got {number}")
        places.append(list(numbers).index(number) if number >= 0 else len(numbers) + number)
    if not places:
        raise ValueError(f"{name} must name at least one, got none")
    return places


def _given(axes: Any, shape: tuple[int, int]) -> np.ndarray:
    grid = np.array(axes, dtype=object)
    if grid.size != shape[0] * shape[1] or (grid.size > 1 and grid.shape != shape and 1 not in shape):
        raise ValueError(f"axes must be {shape[0]} x {shape[1]}, one for each layer and head, got shape {grid.shape}")
    return grid.reshape(shape)


def _pictures(layer: Layer) -> np.ndarray:
    """(num_heads, rows, columns): the weights, or means over blocks of them."""
    return layer.weights() if max(layer.seqlen_q, layer.seqlen_kv) <= _PIXELS else layer.means(_BLOCKS)


def _hidden(layer: Layer, mask: Mask | Tensor | None, maps: np.ndarray, row: int, part: list[int]) -> np.ndarray:
    """bool (drawn heads, rows, columns), True = hidden; of long maps: of each TILE x TILE tile, whether all of it is."""
    seqlen_q, seqlen_kv = layer.seqlen_q, layer.seqlen_kv
    if mask is None:
        corner = np.zeros((1, 1), bool)
        if maps.shape[-2:] == (seqlen_q, seqlen_kv) and is_causal(maps):
            corner = np.triu(np.ones((seqlen_q, seqlen_kv), bool), k=seqlen_kv - seqlen_q + 1)
        return np.broadcast_to(corner, (len(part), *corner.shape))
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool or mask.dim() < 2 or mask.shape[-2:] != (seqlen_q, seqlen_kv):
            raise ValueError(f"mask must be bool (..., {seqlen_q}, {seqlen_kv}), got {mask.dtype} {tuple(mask.shape)}")
        seen = mask.cpu()
    elif not isinstance(mask, Mask):
        raise TypeError(f"mask must be a mask or a bool tensor, got {type(mask).__name__}")
    elif max(seqlen_q, seqlen_kv) <= _PIXELS:
        seen = mask.dense(seqlen_q, seqlen_kv).cpu()
    else:
        seen = shares(mask, seqlen_q, seqlen_kv, None).cpu() > 0
    if seen.dim() > 2 and isinstance(mask, Mask):
        seen = seen.reshape(-1, *seen.shape[-3:])[0]  # item 0 of the batch
    elif seen.dim() == 4:
        seen = seen[row if len(seen) > 1 else 0]
    if seen.dim() > 3:
        raise ValueError(f"mask must have at most 4 dimensions, got {tuple(seen.shape)}")
    if seen.dim() == 2:
        seen = seen[None]
    if len(seen) not in (1, layer.num_heads):
        raise ValueError(f"mask must be for 1 or {layer.num_heads} heads, got {len(seen)}")
    picked = seen[part] if len(seen) > 1 else seen.expand(len(part), -1, -1)
    return np.asarray(~picked.numpy())


def _edges(count: int, length: int) -> np.ndarray:
    """Where the cells of an axis begin and end, in tokens."""
    size = 1 if count == length else (length if count == 1 else TILE)
    return np.minimum(np.arange(count + 1) * size, length)


def _draw_hidden(axis: Any, hidden: np.ndarray, layer: Layer) -> None:
    """One path of rectangles: runs of hidden cells, of rows that are alike together."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if not hidden.any():
        return
    down, across = _edges(hidden.shape[0], layer.seqlen_q), _edges(hidden.shape[1], layer.seqlen_kv)
    changes = [0, *(np.flatnonzero((hidden[1:] != hidden[:-1]).any(1)) + 1).tolist(), len(hidden)]
    corners = []
    for top, bottom in pairwise(changes):
        steps = np.flatnonzero(np.diff(hidden[top].astype(np.int8), prepend=0, append=0))
        for left, right in steps.reshape(-1, 2):
            x, y = across[[left, right]], down[[top, bottom]]
            corners += [(x[0], y[0]), (x[1], y[0]), (x[1], y[1]), (x[0], y[1]), (x[0], y[0])]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * (len(corners) // 5)
    axis.add_patch(PathPatch(Path(corners, codes), facecolor=_HIDDEN, edgecolor=_HATCH, hatch="/////", linewidth=0, gid="hidden"))


def _draw_tiles(axis: Any, hidden: np.ndarray, layer: Layer, tile: tuple[int, ...]) -> None:
    """Outlines of the tiles that show something."""
    from matplotlib.collections import LineCollection

    down, across = _edges(hidden.shape[0], layer.seqlen_q), _edges(hidden.shape[1], layer.seqlen_kv)
    visible = np.repeat(np.repeat(~hidden, np.diff(down), 0), np.diff(across), 1)
    starts = [np.arange(0, length, size) for length, size in zip(visible.shape, tile)]
    visited = np.logical_or.reduceat(np.logical_or.reduceat(visible, starts[0], 0), starts[1], 1)
    ends = [np.append(start, length) for start, length in zip(starts, visible.shape)]
    sides = set()
    for i, j in zip(*np.nonzero(visited)):
        top, bottom, left, right = ends[0][i], ends[0][i + 1], ends[1][j], ends[1][j + 1]
        for y in (top, bottom):
            sides.add(((left, y), (right, y)))
        for x in (left, right):
            sides.add(((x, top), (x, bottom)))
    axis.add_collection(LineCollection(sorted(sides), colors=_TILE, linewidths=0.8, capstyle="projecting", clip_on=False, gid="tiles"))


def _figure_size(layer: Layer, labels: tuple[list[str] | None, list[str] | None], shape: tuple[int, int]) -> tuple[float, float]:
    """Inches: square maps, cells large enough for labels where there are few, at most 16 inches."""
    rows, columns = shape
    if shape == (1, 1):
        cell = 0.22 if any(labels) else 0.1
        across = min(max(cell * layer.seqlen_kv, 3.0), 6.5)
        down = min(max(across * layer.seqlen_q / layer.seqlen_kv, 1.2), 6.5)
        return across + 1.4, down + 1.0
    size = min(max(16 / max(columns, rows), 1.15), 2.6)
    ratio = min(max(layer.seqlen_q / layer.seqlen_kv, 0.4), 2.5)
    return size * columns + 1.4, size * rows * ratio + 0.9


def _label(axis: Any, labels: tuple[list[str] | None, list[str] | None], layer: Layer, *, outer: tuple[bool, bool]) -> None:
    """Tokens or numbers; on the outer sides of a grid only."""
    bottom, left = outer
    width, height = (72 * size for size in _inches(axis))
    room = {"x": max(2, int(width / (1.35 * _FONT))), "y": max(2, int(height / (1.35 * _FONT)))}
    axis.tick_params(length=2, width=0.6, labelsize=_FONT)
    for side in axis.spines.values():
        side.set_linewidth(0.6)
    for which, shown, names, length in (("x", bottom, labels[1], layer.seqlen_kv), ("y", left, labels[0], layer.seqlen_q)):
        ticks, texts = _ticks(length, names, room[which])
        setter = getattr(axis, f"set_{which}ticks")
        if not shown:
            setter([])
            continue
        setter(ticks, texts)
        for text in getattr(axis, f"get_{which}ticklabels")():
            text.set_parse_math(False)
            if which == "x" and names is not None:
                text.set(rotation=90)
        getattr(axis, f"set_{which}label")("key" if which == "x" else "query", fontsize=_FONT)


def _inches(axis: Any) -> tuple[float, float]:
    box, (width, height) = axis.get_position(), axis.figure.get_size_inches()
    return box.width * width, box.height * height


def _ticks(length: int, names: list[str] | None, room: int) -> tuple[list[float], list[str]]:
    """Middles of the tokens that are named, and the names: every token, or every 2nd, 5th, 10th, 20th, ..."""
    if names is None:
        room = min(room, 9)
    step = next(step for step in (part * 10**power for power in range(12) for part in (1, 2, 5)) if -(-length // step) <= room)
    chosen = range(0, length, step)
    texts = [str(index) if names is None else _short(names[index], _LABEL_CHARACTERS) for index in chosen]
    return [index + 0.5 for index in chosen], texts


def _short(label: str, most: int) -> str:
    """The end of a module's path tells more than its beginning; of a token, the beginning does."""
    label = label.replace("\n", "⏎").replace("\t", "⇥")
    if len(label) <= most:
        return label
    return "…" + label[1 - most :] if "." in label else label[: most - 1] + "…"
