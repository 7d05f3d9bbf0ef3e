"""One query over 12 keys in 4 tiles: scores, running maximum, row sum, rescaling and output of a real run, as an animated SVG.

The picture needs nothing but itself. Where the reader prefers reduced motion it stands still and shows the end. Prints its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from _common import BLUE, ORANGE, start

import tiled_attention as ta

SEED, KEYS, TILE, HEAD_DIM = 158, 12, 3, 16
STEP, HOLD, LOOPS = 4.0, 6.0, 5  # seconds of a tile, of the end, and how often all of it plays
WIDTH, HEIGHT = 880, 548
LEFT, SLOT, BASE, TALL = 42, 67, 282, 150  # of the bars: first x, distance, y of the ground, height of a weight of 1
NEW, OLD, PALE, INK, GREY = ORANGE, BLUE, "#fff3d1", "#1b1b1b", "#5f5f5f"


class Tile(NamedTuple):
    """The state after a tile of keys."""

    tile_max: float
    row_max: float
    factor: float  # exp(row_max before - row_max), which multiplies row_sum and acc
    row_sum: float
    acc: float
    shares: list[float]  # exp(score - row_max) of all keys so far


class Run(NamedTuple):
    scores: list[float]
    values: list[float]
    tiles: list[Tile]
    lse: float  # of the operator
    out: float  # of the operator


def run() -> Run:
    """The recurrence in float64 beside the operator, on one query and one column of values."""
    torch.manual_seed(SEED)
    query, key = torch.randn(1, 1, 1, HEAD_DIM).double() * 1.6, torch.randn(1, 1, KEYS, HEAD_DIM).double()
    value = torch.randn(1, 1, KEYS, 1).double()
    scores, values = (query @ key.mT)[0, 0, 0] * HEAD_DIM**-0.5, value[0, 0, :, 0]
    row_max, row_sum, acc = torch.tensor(-torch.inf).double(), torch.zeros(()).double(), torch.zeros(()).double()
    tiles = []
    for begin in range(0, KEYS, TILE):
        s, v = scores[begin : begin + TILE], values[begin : begin + TILE]
        new_max = torch.maximum(row_max, s.max())
        factor = torch.exp(row_max - new_max)
        p = torch.exp(s - new_max)
        row_max, row_sum, acc = new_max, factor * row_sum + p.sum(), factor * acc + p @ v
        shares = torch.exp(scores[: begin + TILE] - row_max).tolist()
        tiles.append(Tile(float(s.max()), float(row_max), float(factor), float(row_sum), float(acc), shares))
    out, lse = ta.attention(query, key, value, return_lse=True)
    return Run(scores.tolist(), values.tolist(), tiles, float(lse), float(out))


class Animation:
    """SVG elements whose properties change over time; a property's last value is also its value without animation."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.rules: list[str] = []
        self.elements: list[str] = []

    def add(self, element: str, name: str = "", frames: Sequence[tuple[float, str]] = (), still: str = "") -> None:
        """An element with `{}` where its attributes go. frames: (second, declarations); still: declarations where nothing moves."""
        if not frames:
            self.elements.append(element.format(""))
            return
        percent = [f"{100 * second / self.seconds:.3f}%{{{what}}}" for second, what in frames]
        self.rules.append(f"@keyframes {name}{{{''.join(percent)}}}\n#{name}{{{still or frames[-1][1]};animation-name:{name}}}")
        self.elements.append(element.format(f'id="{name}"'))

    def text(self, x: float, y: float, text: str, kind: str = "", appears: tuple[float, float] | None = None, name: str = "") -> None:
        """A text, there from the start, or between two seconds (the second one the end: it stays)."""
        mark = f'<text x="{x:g}" y="{y:g}" class="{kind}" {{}}>{text}</text>'
        if appears is None:
            self.add(mark)
            return
        begin, end = appears
        frames = [(0, "opacity:0"), (begin, "opacity:0"), (begin + 0.3, "opacity:1")]
        if end >= self.seconds:
            self.add(mark, name, [*frames, (self.seconds, "opacity:1")])
        else:
            self.add(mark, name, [*frames, (end - 0.3, "opacity:1"), (end, "opacity:0"), (self.seconds, "opacity:0")])


def number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}".replace("-", "\u2212")


def draw(result: Run) -> str:
    end = STEP * len(result.tiles) + HOLD
    movie = Animation(end)
    movie.text(24, 32, f"Softmax in tiles: one query, {KEYS} keys, {TILE} keys at a time", "title")
    note = "Bars: exp(score \u2212 running maximum). A new maximum shrinks every bar so far, the sum and the output by one factor."
    movie.text(24, 54, note, "note")

    for t in range(len(result.tiles)):
        x, start = LEFT + SLOT * TILE * t, STEP * t
        mark = f'<rect x="{x - 4}" y="70" width="{SLOT * TILE - 8}" height="{BASE - 20}" rx="6" fill="{PALE}" {{}}/>'
        shown = [(start, "opacity:0"), (start + 0.3, "opacity:1"), (start + STEP - 0.1, "opacity:1"), (start + STEP, "opacity:0")]
        movie.add(mark, f"tile{t}", [(0, "opacity:0"), *shown, (end, "opacity:0")])
        movie.text(x + SLOT * TILE / 2 - 8, 88, f"tile {t + 1}", "middle label")

    for j, (score, value) in enumerate(zip(result.scores, result.values)):
        x, home = LEFT + SLOT * j + 4, j // TILE
        grown = STEP * home + 1.5
        frames = [(0.0, f"transform:scaleY(0);fill:{NEW}"), (grown, f"transform:scaleY(0);fill:{NEW}")]
        for t in range(home, len(result.tiles)):
            height, color = f"transform:scaleY({result.tiles[t].shares[j]:.4f})", NEW if t == home else OLD
            begin = grown if t == home else STEP * t + 0.5
            if t > home:
                frames.append((begin, f"transform:scaleY({result.tiles[t - 1].shares[j]:.4f});fill:{OLD}"))
            frames += [(begin + 0.8, f"{height};fill:{color}"), (STEP * (t + 1) - 0.1, f"{height};fill:{color}")]
        shrunk = f"transform:scaleY({result.tiles[-1].shares[j]:.4f});fill:{OLD}"
        frames += [(STEP * len(result.tiles), shrunk), (end, shrunk)]
        movie.add(f'<rect x="{x}" y="{BASE - TALL}" width="{SLOT - 22}" height="{TALL}" class="bar" {{}}/>', f"bar{j}", frames)
        movie.text(x + SLOT / 2 - 11, BASE + 20, number(score, 2), "middle number")
        movie.text(x + SLOT / 2 - 11, BASE + 40, number(value, 2), "middle number")
    movie.add(f'<path d="M{LEFT - 6} {BASE}H{LEFT + SLOT * KEYS - 12}" stroke="{INK}" stroke-width="1.2"/>')
    movie.text(LEFT - 10, BASE + 20, "s", "end label")
    movie.text(LEFT - 10, BASE + 40, "v", "end label")
    movie.text(LEFT - 10, BASE - TALL + 5, "1", "end label")
    movie.add(f'<path d="M{LEFT - 6} {BASE - TALL}h6" stroke="{INK}"/>')
    for t, tile in enumerate(result.tiles[1:], 1):
        middle = LEFT + SLOT * TILE * t / 2 - 8
        text = f"\u00d7 {number(tile.factor)}" if tile.factor < 1 else "\u00d7 1: the maximum stays"
        movie.text(middle, BASE - TALL - 8, text, "middle factor", (STEP * t + 0.4, STEP * t + 2.4), f"factor{t}")

    names = ("maximum of tile", "running maximum m", "factor", "row sum \u2113", "output a", "a / \u2113")
    columns = list(zip((190, 352, 460, 578, 710, 838), names))
    top = BASE + 84
    for x, name in columns:
        movie.text(x, top, name, "end label")
    movie.add(f'<path d="M24 {top + 10}H{WIDTH - 24}" stroke="{INK}"/>')
    for t, tile in enumerate(result.tiles):
        y, start = top + 34 + 27 * t, STEP * t
        movie.text(24, y, f"tile {t + 1}", "label")
        factor = "\u2013" if t == 0 else number(tile.factor)
        before = result.tiles[t - 1] if t else None
        sums = number(tile.row_sum), number(tile.acc)
        cells = [number(tile.tile_max), number(tile.row_max), factor, *sums, number(tile.acc / tile.row_sum)]
        times = (0.3, 0.3, 0.4, 2.4, 2.4, 2.9)
        for (x, name), cell, time in zip(columns, cells, times):
            strong = " strong" if name.startswith("running") and (before is None or tile.row_max > before.row_max) else ""
            movie.text(x, y, cell, "end number" + strong, (start + time, end), f"cell{t}x{x}")
    y, start = top + 34 + 27 * len(result.tiles) + 8, STEP * len(result.tiles)
    movie.add(f'<path d="M24 {y - 22}H{WIDTH - 24}" stroke="{GREY}" stroke-dasharray="2 3"/>')
    final = result.tiles[-1]
    lse = f"m + log \u2113 = {number(final.row_max + math.log(final.row_sum))}"
    whole = f"ta.attention, all at once: lse = {number(result.lse)}, out = {number(result.out)}"
    movie.text(24, y, whole, "label", (start + 0.3, end), "all")
    movie.text(838, y, f"{lse} and a / \u2113 = {number(final.acc / final.row_sum)}", "end number strong", (start + 0.9, end), "same")

    moving = f"animation-duration:{end:g}s;animation-iteration-count:{LOOPS};animation-timing-function:linear;animation-fill-mode:forwards"
    style = f"""text{{font:15px system-ui,'DejaVu Sans',sans-serif;fill:{INK}}}
.title{{font-size:19px;font-weight:600}} .note{{font-size:13.5px;fill:{GREY}}} .label{{font-size:14px;fill:{GREY}}}
.number{{font-variant-numeric:tabular-nums}} .strong{{font-weight:700}} .factor{{font-weight:700;fill:{OLD}}}
.middle{{text-anchor:middle}} .end{{text-anchor:end}}
.bar{{transform-box:fill-box;transform-origin:bottom}}
rect,text{{{moving}}}
svg:hover rect,svg:hover text{{animation-play-state:paused}}
{chr(10).join(movie.rules)}
@media (prefers-reduced-motion:reduce){{rect,text{{animation:none!important}}}}"""
    described = f"The running state of a softmax over {KEYS} keys in {len(result.tiles)} tiles; the end is the softmax of all keys at once."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{described}">\n'
        f"<style>\n{style}\n</style>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>\n' + "\n".join(movie.elements) + "\n</svg>\n"
    )


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    result = run()
    (out / "tiled_softmax.svg").write_text(draw(result))
    print("tile  max of tile  running max  factor  row sum  output  output / sum")
    for t, tile in enumerate(result.tiles, 1):
        maxima = f"{t:4} {tile.tile_max:12.3f} {tile.row_max:12.3f} {tile.factor:7.3f}"
        print(f"{maxima} {tile.row_sum:8.3f} {tile.acc:7.3f} {tile.acc / tile.row_sum:13.3f}")
    last = result.tiles[-1]
    print(f"log of the sum: {last.row_max + math.log(last.row_sum):.3f}; ta.attention: lse {result.lse:.3f}, out {result.out:.3f}")


if __name__ == "__main__":
    main()
