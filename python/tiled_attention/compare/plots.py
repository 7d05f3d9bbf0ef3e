"""PNG plots of the results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from .. import plot
from ..masks import Mask
from . import patterns

MASK_SEQLEN = 256
LABELS = {"tiled": "tiled", "sdpa": "SDPA", "math": "plain math", "multihead": "nn.MultiheadAttention"}
COLORS = {"tiled": "tab:blue", "sdpa": "tab:orange", "math": "tab:green", "multihead": "tab:red"}


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _over_lengths(axis: Any, lengths: Sequence[int]) -> None:
    """Logarithmic axes, with a tick at each length and no others."""
    axis.set(xscale="log", yscale="log", xlabel="n")
    axis.set_xticks(lengths, labels=[str(n) for n in lengths], fontsize="small")
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.3)


def speed(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Float32 time over length, a column per variant, a row per direction."""
    rows = [row for row in rows if row["dtype"] == "float32"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    size = (3.2 * len(variants), 3 * len(directions))
    figure, axes = pyplot.subplots(len(directions), len(variants), squeeze=False, sharex=True, figsize=size)
    for line, direction in zip(axes, directions):
        for axis, variant in zip(line, variants):
            chosen = [row for row in rows if row["variant"] == variant and row["direction"] == direction]
            for name in ("tiled", "sdpa", "math"):
                points = [(row["n"], row["seconds"][name] * 1e3) for row in chosen if name in row["seconds"]]
                if points:
                    axis.plot(*zip(*points), marker="o", label=LABELS[name], color=COLORS[name])
            axis.set(title=f"{variant}, {direction}", ylabel="ms")
            _over_lengths(axis, sorted({row["n"] for row in rows}))
    axes[0][0].legend()
    return _save(figure, path)


def memory(result: Mapping[str, Any], path: Path) -> Path:
    """Peak memory over length."""
    figure, axis = pyplot.subplots(figsize=(5, 4))
    for name in ("tiled", "sdpa", "math"):
        points = [(row["n"], row["bytes"] / 2**20) for row in result["rows"] if row["implementation"] == name and row["bytes"]]
        if points:
            axis.plot(*zip(*points), marker="o", label=LABELS[name], color=COLORS[name])
    axis.set(ylabel="peak MiB beyond the inputs", title=f"one head, {result['direction']}")
    _over_lengths(axis, sorted({row["n"] for row in result["rows"]}))
    axis.legend()
    return _save(figure, path)


def parity(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Each tensor's error in units of its limit, ours and PyTorch's, per dtype."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, axes = pyplot.subplots(1, len(dtypes), squeeze=False, sharey=True, figsize=(3.2 * len(dtypes), 4))
    for axis, dtype in zip(axes[0], dtypes):
        chosen = [row for row in rows if row["dtype"] == dtype and row["limit"] > 0]
        for name in ("tiled", "sdpa", "multihead"):
            values = sorted(row[name] / row["limit"] for row in chosen if row[name] is not None)
            axis.plot([(index + 0.5) / len(values) for index in range(len(values))], values, label=LABELS[name], color=COLORS[name])
        axis.axhline(1, color="black", linestyle="--", linewidth=1)
        axis.set(yscale="log", title=dtype, xlabel="share of the tensors")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("error / limit")
    axes[0][0].legend()
    return _save(figure, path)


def training(result: Mapping[str, Any], path: Path) -> Path:
    """Both loss curves, and their distance."""
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(5, 5))
    above.plot(result["stock_losses"], label="as it is", color=COLORS["multihead"])
    above.plot(result["tiled_losses"], label="converted", color=COLORS["tiled"], linestyle="--")
    above.set(ylabel="loss", title=f"nn.TransformerEncoder on {result['text']}"[:60])
    above.legend()
    below.plot([abs(a - b) for a, b in zip(result["stock_losses"], result["tiled_losses"])], color="black")
    below.set(xlabel="step", ylabel="|difference|")
    return _save(figure, path)


def linear(result: Mapping[str, Any], path: Path) -> Path:
    """Linear attention: float32 time over length against its peers, and one decoded token over its position."""
    labels = {"linear": "linear", "composite": "composite", "sdpa": "SDPA", "exact": "exact"}
    colors = {"linear": "tab:blue", "composite": "tab:green", "sdpa": "tab:orange", "exact": "tab:purple"}
    variants, directions = ("causal", "not causal"), list(dict.fromkeys(row["direction"] for row in result["speed"]))
    figure, axes = pyplot.subplots(len(directions), len(variants) + 1, squeeze=False, figsize=(3.2 * 3, 3 * len(directions)))
    for line, direction in zip(axes, directions):
        for axis, variant in zip(line, variants):
            rows = [row for row in result["speed"] if (row["variant"], row["direction"], row["dtype"]) == (variant, direction, "float32")]
            for name, label in labels.items():
                points = [(row["n"], row["seconds"][name] * 1e3) for row in rows if name in row["seconds"]]
                if points:
                    axis.plot(*zip(*points), marker="o", label=label, color=colors[name])
            axis.set(title=f"{variant}, {direction}", ylabel="ms")
            _over_lengths(axis, sorted({row["n"] for row in rows}))
    axes[0][0].legend()
    for name in ("linear", "exact"):
        points = [(row["position"], row["seconds"][name] * 1e6) for row in result["decode"]]
        axes[0][-1].plot(*zip(*points), marker="o", label=labels[name], color=colors[name])
    axes[0][-1].set(title="one token", ylabel="us")
    _over_lengths(axes[0][-1], [row["position"] for row in result["decode"]])
    for line in axes[1:]:
        line[-1].set_axis_off()
    return _save(figure, path)


def operators(result: Mapping[str, Any], path: Path) -> Path:
    """How many times faster than each peer, float32, per operator; below 1 slower."""
    bars = [
        (f"{row['case']}, {row['direction']}: {peer}", ratio)
        for row in result["speed"]
        if row["dtype"] == "float32"
        for peer, ratio in row["ratios"].items()
    ]
    figure, axis = pyplot.subplots(figsize=(9, 0.6 + 0.2 * len(bars)))
    axis.barh([label for label, _ in bars], [ratio - 1 for _, ratio in bars], left=1, color=COLORS["tiled"])
    axis.margins(y=0.01)
    axis.axvline(1, color="black", linestyle="--", linewidth=1)
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize="x-small")
    axis.set(xscale="log", xlabel="their time over ours")
    return _save(figure, path)


def masks(n: int, path: Path) -> Path:
    """Which keys each query sees, for each kind of sparse mask."""
    found = {name: mask for name, mask in patterns.masks(n, 1, 0).items() if isinstance(mask, Mask)}
    figure, axes = pyplot.subplots(2, -(-len(found) // 2), figsize=(12, 6.5))
    for axis, (name, mask) in zip(axes.flat, found.items()):
        plot.mask(mask, n, n, axes=axis)
        axis.set_title(f"{name}: {mask.density(n, n):.1%}", fontsize="small")
    for axis in axes.flat[len(found) :]:
        axis.set_axis_off()
    return _save(figure, path)


def distributed(results: Mapping[str, Any], path: Path) -> Path:
    """Memory and time over length, of one process and of the ranks."""
    operators = list(dict.fromkeys(row["operator"] for row in results["measured"]))
    figure, axes = pyplot.subplots(2, len(operators), squeeze=False, sharex=True, figsize=(4 * len(operators), 6))
    for operator, (above, below) in zip(operators, axes.T):
        rows = [row for row in results["measured"] if row["operator"] == operator]
        lengths = [row["n"] for row in rows]
        above.plot(lengths, [row["one_bytes"] / 2**20 for row in rows], marker="o", label="one process")
        above.plot(lengths, [max(row["bytes"]) / 2**20 for row in rows], marker="o", label=f"a rank of {results['ranks']}")
        above.set(title=f"{operator}, causal", ylabel="MiB")
        below.plot(lengths, [row["one_seconds"] * 1e3 for row in rows], marker="o")
        below.plot(lengths, [row["seconds"] * 1e3 for row in rows], marker="o")
        below.set(ylabel="ms, forward+backward")
        for axis in (above, below):
            _over_lengths(axis, lengths)
    axes[0][0].legend()
    return _save(figure, path)


def write(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """All plots, in `folder`."""
    return [
        parity(results["parity"], folder / "parity.png"),
        speed(results["speed"], folder / "speed.png"),
        memory(results["memory"], folder / "memory.png"),
        linear(results["linear"], folder / "linear.png"),
        operators(results["operators"], folder / "operators.png"),
        masks(MASK_SEQLEN, folder / "masks.png"),
        training(results["training"], folder / "training.png"),
    ]
