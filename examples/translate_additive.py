"""Reads dates in nine formats and writes them as YYYY-MM-DD: a recurrent encoder and decoder that meet in attention, additive and Luong's.

The encoder reads the characters of a date in both directions. The decoder writes one character a step; in each step it asks the encoder's
states for what it needs. With additive attention (Bahdanau, Cho and Bengio, 2015) the decoder's last state asks before the step; with
Luong's (Luong, Pham and Manning, 2015) the new state asks after it. The keys are projected once for a date and used in all ten steps.
"""

import argparse
import datetime
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

import tiled_attention as ta

# Two digits of a year mean 1970 to 2069. Day before month, except between slashes.
FIRST_DAY, NUM_DAYS = datetime.date(1970, 1, 1), 36525
# Weekday, day, month, year by their letters in strftime; "d" without a leading zero is "e".
FORMATS = ("d-m-y", "Y.m.d", "m/d/Y", "a, d-m-y", "e B Y", "B e, Y", "e b y", "b e Y (a)", "A, e B Y")
SEPARATORS = " ,-./()"
NAMES = {"B": "%B", "b": "%b", "A": "%A", "a": "%a", "Y": "%Y", "y": "%y", "m": "%m", "d": "%d"}
PARTS = {"Y": "year", "y": "year", "B": "month", "b": "month", "m": "month", "d": "day", "e": "day"}
# Where each part stands in YYYY-MM-DD.
PLACES = {"year": range(4), "month": range(5, 7), "day": range(8, 10)}

PAD, START = 0, 1
ALPHABET = SEPARATORS + string.digits + string.ascii_letters
CODES = {character: index + 2 for index, character in enumerate(ALPHABET)}
# Kind of attention -> learning rate.
KINDS = {"additive": 1e-2, "luong": 7e-3}


@dataclass(frozen=True)
class Written:
    """One date in one format.

    Attributes:
        text: as it is read.
        target: as it is to be written, YYYY-MM-DD.
        spans: "year", "month", "day" -> the characters of the text that say it.
    """

    text: str
    target: str
    spans: dict[str, range]


@dataclass(frozen=True)
class Outcome:
    """What one kind of attention reached on dates that were not trained on.

    Attributes:
        loss: of the last training steps, cross entropy per character.
        accuracy: share of dates written without a fault.
        aligned: "year", "month", "day" -> mean weight, over the characters written of it, on the characters that say it.
        chance: the same for uniform weights.
    """

    loss: float
    accuracy: float
    aligned: dict[str, float]
    chance: dict[str, float]


def write(date: datetime.date, form: str) -> Written:
    """The date in one of FORMATS."""
    text, spans = "", {}
    for letter in form:
        piece = letter if letter in SEPARATORS else str(date.day) if letter == "e" else date.strftime(NAMES[letter])
        if letter in PARTS:
            spans[PARTS[letter]] = range(len(text), len(text) + len(piece))
        text += piece
    return Written(text, date.isoformat(), spans)


def encode(written: Sequence[Written]) -> tuple[Tensor, Tensor, Tensor]:
    """(source (batch, seqlen) padded with PAD, lengths (batch,), target (batch, 10)), int64."""
    source = nn.utils.rnn.pad_sequence([torch.tensor([CODES[c] for c in w.text]) for w in written], batch_first=True, padding_value=PAD)
    target = torch.tensor([[CODES[c] for c in w.target] for w in written])
    return source, torch.tensor([len(w.text) for w in written]), target


class Translator(nn.Module):
    """A bidirectional GRU reads, a GRU with attention writes."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.source = nn.Embedding(len(CODES) + 2, width, padding_idx=PAD)
        self.target = nn.Embedding(len(CODES) + 2, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.first = nn.Linear(2 * width, width)
        self.attention: ta.AdditiveAttention | ta.LuongAttention
        if kind == "additive":
            self.attention = ta.AdditiveAttention(query_dim=width, key_dim=2 * width, hidden_dim=width)
        else:
            self.attention = ta.LuongAttention(query_dim=width, key_dim=2 * width, score="general")
        self.step = nn.GRUCell(3 * width, width)
        self.mix = nn.Linear(3 * width, width)
        self.classify = nn.Linear(width, len(CODES) + 2)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor | None = None, length: int = 10) -> tuple[Tensor, Tensor]:
        """Logits (batch, length, characters) and weights (batch, length, seqlen).

        source (batch, seqlen), lengths (batch,), target (batch, length): the characters before each step, or None: what it wrote itself.
        """
        packed = nn.utils.rnn.pack_padded_sequence(self.source(source), lengths, batch_first=True, enforce_sorted=False)
        states, _ = nn.utils.rnn.pad_packed_sequence(self.encoder(packed)[0], batch_first=True)  # (batch, seqlen, 2 * width)
        mask = (torch.arange(states.shape[1]) < lengths[:, None])[:, None]  # (batch, 1, seqlen)
        keys = self.attention.project_keys(states)  # once: the decoder moves, the keys do not
        state = torch.tanh(self.first(states.masked_fill(~mask.mT, 0).sum(1) / lengths[:, None]))
        context = states.new_zeros(len(states), states.shape[2])
        character = torch.full((len(states),), START)
        logits, weights = [], []

        def look(query: Tensor) -> Tensor:
            out, weight = self.attention(query[:, None], None, states, mask=mask, need_weights=True, projected_key=keys)
            weights.append(weight[:, 0])
            return out[:, 0]

        for step in range(length):
            if self.kind == "additive":
                context = look(state)
            state = self.step(torch.cat([self.target(character), context], -1), state)
            if self.kind == "luong":
                context = look(state)
            logits.append(self.classify(torch.tanh(self.mix(torch.cat([state, context], -1)))))
            character = logits[-1].argmax(-1) if target is None else target[:, step]
        return torch.stack(logits, 1), torch.stack(weights, 1)


def train(model: Translator, dates: Sequence[datetime.date], formats: Sequence[str], steps: int, batch: int, draw: random.Random) -> float:
    """Trains on dates in formats drawn anew; returns the mean loss of the last twentieth of the steps."""
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, KINDS[model.kind], total_steps=steps)
    losses = []
    for _ in track(range(steps), description=f"training, {model.kind}"):
        source, lengths, target = encode([write(draw.choice(dates), draw.choice(formats)) for _ in range(batch)])
        logits, _ = model(source, lengths, target)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 20) :]
    return sum(last) / len(last)


@torch.no_grad()
def examine(model: Translator, written: Sequence[Written], loss: float) -> Outcome:
    """Lets the model write on its own, and sees where it looks."""
    source, lengths, target = encode(written)
    logits, weights = model(source, lengths)
    accuracy = (logits.argmax(-1) == target).all(1).double().mean().item()
    aligned, chance = {}, {}
    for part, places in PLACES.items():
        inside = [weights[i, places.start : places.stop, w.spans[part].start : w.spans[part].stop] for i, w in enumerate(written)]
        aligned[part] = sum(weight.sum(1).mean().item() for weight in inside) / len(written)
        chance[part] = sum(len(w.spans[part]) / len(w.text) for w in written) / len(written)
    return Outcome(loss, accuracy, aligned, chance)


@torch.no_grad()
def draw_alignment(models: dict[str, Translator], written: Written, path: Path) -> None:
    """One picture: a map for each kind of attention, of characters written (down) over characters read (across)."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(models), figsize=(6.5 * len(models), 3.6), squeeze=False)
    source, lengths, _ = encode([written])
    for (kind, model), place in zip(models.items(), axes[0]):
        _, weights = model(source, lengths)
        ta.plot.heatmap(weights[0], tokens=list(written.target), key_tokens=list(written.text), axes=place, title=kind)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def run(
    formats: Sequence[str], steps: int, batch: int, width: int, tested: int, seed: int
) -> tuple[dict[str, Outcome], dict[str, Translator]]:
    """Trains both kinds; the dates of the test are not among those of the training, in any format."""
    draw = random.Random(seed)
    dates = [FIRST_DAY + datetime.timedelta(days=day) for day in range(NUM_DAYS)]
    draw.shuffle(dates)
    held_out = [write(date, formats[index % len(formats)]) for index, date in enumerate(dates[:tested])]
    outcomes, models = {}, {}
    for kind in KINDS:
        torch.manual_seed(seed)
        models[kind] = Translator(kind, width)
        loss = train(models[kind], dates[tested:], formats, steps, batch, random.Random(seed + 1))
        outcomes[kind] = examine(models[kind].eval(), held_out, loss)
    return outcomes, models


def main(argv: Sequence[str] | None = None) -> dict[str, Outcome]:
    """Parses the arguments, runs, prints, draws; returns the outcome of each kind of attention."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", type=int, default=len(FORMATS), help="of dates, the first ones (default: %(default)s, all)")
    parser.add_argument("--steps", type=int, default=400, help="training steps of each kind of attention (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="dates in a step (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="features of a state (default: %(default)s)")
    parser.add_argument("--tested", type=int, default=2000, help="dates held out (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of dates, formats and weights (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("example-results"), help="folder for the picture (default: %(default)s)")
    args = parser.parse_args(argv)
    for name, largest in (("formats", len(FORMATS)), ("steps", 10**6), ("batch", 10**5), ("width", 10**4), ("tested", NUM_DAYS - 1)):
        if not 1 <= getattr(args, name) <= largest:
            parser.error(f"argument --{name}: expected 1 to {largest}, got {getattr(args, name)}")

    outcomes, models = run(FORMATS[: args.formats], args.steps, args.batch, args.width, args.tested, args.seed)
    for kind, outcome in outcomes.items():
        print(f"{kind:8}  {outcome.accuracy:6.1%} of {args.tested} new dates exact, loss {outcome.loss:.4f} per character")
        weights = ", ".join(f"{part} {outcome.aligned[part]:.2f} (uniform {outcome.chance[part]:.2f})" for part in PLACES)
        print(f"{'':8}  weight on the characters that say it: {weights}")
    matplotlib.use("agg")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "translate_additive.png"
    draw_alignment(models, write(datetime.date(2021, 3, 3), FORMATS[args.formats - 1]), path)
    print(f"alignment: {path}")
    return outcomes


if __name__ == "__main__":
    main()
