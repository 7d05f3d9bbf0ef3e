"""What linear attention gives up and what it gains: accuracy of copying over length, then memory and time from 4096 tokens on.

    python examples/linear_vs_softmax.py

First the copy task of reverse_task.py: n symbols, n blanks, and the symbols are to be written at the blanks. Two encoders of one layer and
the same size learn it for the same number of steps, one with softmax attention and one with linear attention, whose weights come from
elu(x) + 1 (Katharopoulos et al., "Transformers are RNNs", 2020). Copying needs weights that are the identity, of rank n; those of linear
attention are a product of features, of rank head_dim at most in each head, which the exponential of the softmax is not.

Then one head of 64 features, forward and backward, without a model around it: softmax attention by matrix products (math), the same from
tiles (tiled), and causal linear attention. Each measurement has a process of its own, and its memory is what the system says that the
process held at most, beyond the inputs.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import tiled_attention as ta
from tiled_attention.compare.machine import free_bytes
from tiled_attention.compare.memory import in_fresh_process
from tiled_attention.compare.speed import math_bytes

SYMBOLS = 10
BLANK = SYMBOLS
DIM, NUM_HEADS = 64, 4
KINDS = ("softmax", "linear")
IMPLEMENTATIONS = ("math", "tiled", "linear")
# Colour-blind safe (Wong, Nature Methods 8, 2011), and told apart by their markers too.
LOOKS: dict[str, dict[str, Any]] = {
    "math": {"color": "#D55E00", "marker": "s"},
    "tiled": {"color": "#0072B2", "marker": "o"},
    "softmax": {"color": "#0072B2", "marker": "o"},
    "linear": {"color": "#009E73", "marker": "^"},
}


class Encoder(nn.Module):
    """One layer: attention and a feed-forward network, each added to its input and normalised."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS + 1, DIM)
        self.position = ta.SinusoidalEmbedding(DIM)
        self.softmax = ta.MultiheadAttention(DIM, NUM_HEADS, batch_first=True) if kind == "softmax" else None
        self.linear = ta.LinearAttention(DIM, NUM_HEADS, feature_map="elu", causal=False) if kind == "linear" else None
        self.feed_forward = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.head = nn.Linear(DIM, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, 2 n) -> logits at the blanks (batch, n, SYMBOLS)."""
        seqlen = tokens.shape[1]
        x = self.symbol(tokens) + self.position(torch.arange(seqlen))
        if self.softmax is not None:
            attended = self.softmax(x, x, x, need_weights=False)[0]
        else:
            assert self.linear is not None
            attended = self.linear(x)
        x = self.norms[0](x + attended)
        x = self.norms[1](x + self.feed_forward(x))
        return self.head(x[:, seqlen // 2 :])


@dataclass(frozen=True)
class Copied:
    """How well new sequences of n symbols are copied."""

    kind: str  # softmax or linear
    n: int
    symbols: float  # share of symbols that are right
    exact: float  # share of sequences without a fault


@dataclass(frozen=True)
class Cost:
    """Of one head, forward and backward. bytes and seconds are None where the measurement was left out, for the reason in `stopped`."""

    implementation: str
    n: int
    bytes: float | None
    seconds: float | None
    stopped: str | None


@dataclass(frozen=True)
class Outcome:
    copied: list[Copied]
    costs: list[Cost]
    picture: Path | None

    def symbols(self, kind: str) -> dict[int, float]:
        """n -> share of symbols that are right."""
        return {row.n: row.symbols for row in self.copied if row.kind == kind}

    def bytes(self, implementation: str) -> dict[int, float]:
        """n -> peak memory, where it was measured."""
        return {row.n: row.bytes for row in self.costs if row.implementation == implementation and row.bytes is not None}

    def seconds(self, implementation: str) -> dict[int, float]:
        """n -> time, where it was measured."""
        return {row.n: row.seconds for row in self.costs if row.implementation == implementation and row.seconds is not None}


def learn(kind: str, n: int, steps: int, batch: int, seed: int) -> Copied:
    """Trains on symbols that are drawn anew in each step, and tests on 500 new sequences."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Encoder(kind)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    for _ in range(steps):
        symbols = torch.randint(SYMBOLS, (batch, n), generator=generator)
        loss = F.cross_entropy(model(F.pad(symbols, (0, n), value=BLANK)).flatten(0, 1), symbols.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        symbols = torch.randint(SYMBOLS, (500, n), generator=generator)
        right = model.eval()(F.pad(symbols, (0, n), value=BLANK)).argmax(-1) == symbols
    return Copied(kind, n, right.float().mean().item(), right.all(-1).float().mean().item())


def measure(implementation: str, n: int, threads: int, limit: int) -> Cost:
    """limit: MiB. Math is left out where it needs more, or more than half of what is free."""
    if implementation == "math":
        need, most = math_bytes(n, 1, 4) / 2**20, min(limit, free_bytes() / 2**21)
        if need > most:
            return Cost(implementation, n, None, None, f"needs {need:.0f} MiB, more than the limit of {most:.0f}")
    found = in_fresh_process(implementation=implementation, n=n, threads=threads)
    return Cost(implementation, n, found["bytes"], found["seconds"], None)


def draw(outcome: Outcome, path: Path) -> None:
    """Accuracy over length, memory over length, time over length."""
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    (accuracy, memory, time) = figure.subplots(1, 3)
    for kind in KINDS:
        found = outcome.symbols(kind)
        accuracy.plot(list(found), list(found.values()), label=kind, **LOOKS[kind])
    accuracy.axhline(1 / SYMBOLS, color="#777777", linestyle=":", label="chance")
    accuracy.set(xscale="log", ylim=(0, 1.05), xlabel="symbols to copy", ylabel="symbols right", title="copying, same training for both")
    for place, values, unit, title in (
        (memory, outcome.bytes, 2**20, "peak memory of one head, MiB"),
        (time, outcome.seconds, 1, "forward + backward, seconds"),
    ):
        for implementation in IMPLEMENTATIONS:
            measured = {n: value / unit for n, value in values(implementation).items()}
            place.plot(list(measured), list(measured.values()), label=implementation, **LOOKS[implementation])
        place.set(xscale="log", yscale="log", xlabel="tokens", title=title)
    for place, ticks in ((accuracy, outcome.symbols("softmax")), (memory, outcome.bytes("linear")), (time, outcome.bytes("linear"))):
        place.set_xticks(list(ticks), [str(n) for n in ticks], minor=False)
        place.set_xticks([], minor=True)
        place.grid(alpha=0.3)
        place.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def run(
    *,
    lengths: Sequence[int] = (8, 16, 32, 64, 128),
    steps: int = 400,
    batch: int = 32,
    sizes: Sequence[int] = (4096, 8192, 16384),
    limit: int = 2048,
    seed: int = 0,
    out: Path | None = None,
    progress: bool = False,
) -> Outcome:
    """Trains on each of `lengths`, measures at each of `sizes`, draws into the folder `out`, if there is one.

    Errors: ValueError naming the argument.
    """
    for name, numbers in (("lengths", lengths), ("steps", [steps]), ("batch", [batch]), ("sizes", sizes), ("limit", [limit])):
        if not numbers or min(numbers) < 1:
            raise ValueError(f"{name}: expected integers >= 1, got {', '.join(map(str, numbers)) or 'none'}")
    copied, costs = [], []
    with Progress(disable=not progress, transient=True) as bars:
        training = bars.add_task("copying", total=sum(lengths) * len(KINDS))
        measuring = bars.add_task("measuring", total=len(sizes) * len(IMPLEMENTATIONS))
        for n in lengths:
            for kind in KINDS:
                copied.append(learn(kind, n, steps, batch, seed))
                bars.advance(training, n)
        for n in sizes:
            for implementation in IMPLEMENTATIONS:
                costs.append(measure(implementation, n, torch.get_num_threads(), limit))
                bars.advance(measuring)
    picture = None if out is None else out / "linear_vs_softmax.png"
    outcome = Outcome(copied, costs, picture)
    if picture is not None:
        draw(outcome, picture)
    return outcome


def main(argv: Sequence[str] | None = None) -> Outcome:
    parser = argparse.ArgumentParser(description="Linear against softmax attention: copying over length, memory and time.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="symbols to copy (default: 8 16 32 64 128)")
    parser.add_argument("--steps", type=int, default=400, help="of training for each length and kind (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192, 16384], help="tokens to measure at (default: 4096 8192 16384)")
    parser.add_argument("--limit", type=int, default=2048, help="MiB that softmax by math may need (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("example-results"), help="folder for the picture (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        outcome = run(**vars(arguments), progress=True)
    except ValueError as error:
        parser.error(str(error))
    print("copied: symbols right, sequences without a fault")
    table = Table()
    for heading in ("symbols", *KINDS):
        table.add_column(heading, justify="right")
    for n in arguments.lengths:
        rows = {row.kind: row for row in outcome.copied if row.n == n}
        table.add_row(str(n), *(f"{rows[kind].symbols:.1%}, {rows[kind].exact:.1%}" for kind in KINDS))
    Console().print(table)
    print("one head of 64, forward + backward: peak memory, time")
    table = Table()
    for heading in ("tokens", *IMPLEMENTATIONS):
        table.add_column(heading, justify="right")
    for n in arguments.sizes:
        costs = {row.implementation: row for row in outcome.costs if row.n == n}
        cells = [
            cost.stopped if cost.bytes is None or cost.seconds is None else f"{cost.bytes / 2**20:.1f} MiB, {cost.seconds * 1e3:.0f} ms"
            for cost in (costs[implementation] for implementation in IMPLEMENTATIONS)
        ]
        table.add_row(str(n), *cells)
    Console().print(table)
    if outcome.picture is not None:
        print(f"picture: {outcome.picture}")
    return outcome


if __name__ == "__main__":
    main()
