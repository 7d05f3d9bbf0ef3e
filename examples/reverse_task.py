"""Copy and reverse: a one-layer encoder learns in seconds which position to look at, and its weights show it.

    python examples/reverse_task.py

The input is n symbols and n blanks, and the answer is written at the blanks: the symbols as they came, or backwards. A blank carries
nothing but its position, so whatever appears there has come through attention. For `reverse`, blank i has to look at symbol n - 1 - i, the
anti-diagonal of the weights; for `copy` at symbol i, the diagonal.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor, nn

import tiled_attention as ta

SYMBOLS = 10
BLANK = SYMBOLS
ANSWERS: dict[str, Callable[[Tensor], Tensor]] = {"copy": lambda symbols: symbols, "reverse": lambda symbols: symbols.flip(-1)}


class Encoder(nn.Module):
    """One layer as in Vaswani et al. (2017), section 3.1: attention and a feed-forward network, each added to its input and normalised."""

    def __init__(self, seqlen: int, dim: int, num_heads: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS + 1, dim)
        self.position = ta.LearnedEmbedding(seqlen, dim)
        self.attention = ta.MultiheadAttention(dim, num_heads, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.head = nn.Linear(dim, SYMBOLS)

    def forward(self, tokens: Tensor, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """(batch, 2 n) -> logits at the blanks (batch, n, SYMBOLS), and the weights (batch, num_heads, 2 n, 2 n) if wanted."""
        seqlen = tokens.shape[1]
        x = self.symbol(tokens) + self.position(torch.arange(seqlen))
        attended, weights = self.attention(x, x, x, need_weights=need_weights, average_attn_weights=False)
        x = self.norms[0](x + attended)
        x = self.norms[1](x + self.feed_forward(x))
        return self.head(x[:, seqlen // 2 :]), weights


@dataclass(frozen=True)
class Result:
    """Of one task, on sequences that training has not seen."""

    task: str
    exact: float  # share of sequences with every symbol right
    weights: Tensor  # (num_heads, n, n): of blank i on symbol j, mean over the sequences
    share: float  # of a blank's weight on the symbol it has to say, mean over blanks and heads; the weight on blanks counts as lost
    head_shares: list[float]  # the same of each head

    @property
    def chance(self) -> float:
        """The share where every weight is the same."""
        return 1 / (2 * self.weights.shape[-1])


@dataclass(frozen=True)
class Outcome:
    results: dict[str, Result]
    pictures: list[Path]


def sample(count: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random symbols (count, n), and the tokens (count, 2 n): the symbols, then blanks."""
    symbols = torch.randint(SYMBOLS, (count, n), generator=generator)
    return symbols, F.pad(symbols, (0, n), value=BLANK)


def train(
    task: str, *, n: int, dim: int, num_heads: int, samples: int, epochs: int, batch: int, seed: int, advance: Callable[[], None]
) -> Result:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    answer = ANSWERS[task]
    symbols, tokens = sample(samples, n, generator)
    unseen, unseen_tokens = sample(1000, n, generator)
    model = Encoder(2 * n, dim, num_heads)
    optimizer = torch.optim.Adam(model.parameters())
    steps = epochs * -(-samples // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    for _ in range(epochs):
        for chosen in torch.randperm(samples, generator=generator).split(batch):
            logits, _ = model(tokens[chosen])
            loss = F.cross_entropy(logits.flatten(0, 1), answer(symbols[chosen]).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            advance()
    with torch.no_grad():
        logits, weights = model.eval()(unseen_tokens, need_weights=True)
    assert weights is not None
    exact = (logits.argmax(-1) == answer(unseen)).all(-1).float().mean().item()
    mean = weights[:, :, n:, :n].mean(0)
    wanted = answer(torch.arange(n))  # blank i has to look at wanted[i]
    shares = mean[:, torch.arange(n), wanted].mean(-1)
    return Result(task, exact, mean, shares.mean().item(), shares.tolist())


def draw(result: Result, path: Path) -> None:
    """The weights of each head, blanks down, symbols across."""
    n = result.weights.shape[-1]
    num_heads = len(result.weights)
    figure = Figure(figsize=(3 * num_heads + 1, 3.4), layout="constrained")
    places = figure.subplots(1, num_heads, squeeze=False)
    symbols, blanks = [f"x{j}" for j in range(n)], [f"_{i}" for i in range(n)]
    ta.plot.heatmap(result.weights, tokens=blanks, key_tokens=symbols, axes=places)
    for head, (place, share) in enumerate(zip(places[0], result.head_shares)):
        place.set_title(f"head {head}: {share:.0%} where it has to look", fontsize=9)
    figure.suptitle(f"{result.task}: {result.exact:.1%} of unseen sequences exact", fontsize=11)
    figure.savefig(path, dpi=110)


def run(
    *,
    n: int = 8,
    dim: int = 64,
    num_heads: int = 4,
    samples: int = 10_000,
    epochs: int = 10,
    batch: int = 100,
    seed: int = 0,
    out: Path | None = None,
    progress: bool = False,
) -> Outcome:
    """Trains both tasks from the same start and draws their weights into the folder `out`, if there is one.

    Errors: ValueError naming the argument.
    """
    sizes = {"n": n, "dim": dim, "num_heads": num_heads, "samples": samples, "epochs": epochs, "batch": batch}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected an integer >= 1, got {size}")
    if dim % num_heads:
        raise ValueError(f"dim: expected a multiple of num_heads ({num_heads}), got {dim}")
    results, pictures = {}, []
    with Progress(disable=not progress, transient=True) as bars:
        for task in ANSWERS:
            bar = bars.add_task(task, total=epochs * -(-samples // batch))
            results[task] = train(task, **sizes, seed=seed, advance=partial(bars.advance, bar))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for task, result in results.items():
            pictures.append(out / f"{task}.png")
            draw(result, pictures[-1])
    return Outcome(results, pictures)


def main(argv: Sequence[str] | None = None) -> Outcome:
    parser = argparse.ArgumentParser(description="A one-layer encoder learns to copy and to reverse; its attention weights show how.")
    parser.add_argument("--n", type=int, default=8, help="symbols (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--samples", type=int, default=10_000, help="sequences to train on (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("example-results"), help="folder for the pictures (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        outcome = run(**vars(arguments), progress=True)
    except ValueError as error:
        parser.error(str(error))
    for task, result in outcome.results.items():
        line = "anti-diagonal" if task == "reverse" else "diagonal"
        heads = ", ".join(f"{share:.2f}" for share in result.head_shares)
        print(
            f"{task}: {result.exact:.2%} of unseen sequences exact; share of weight on the {line} {result.share:.2f} "
            f"(heads {heads}; {result.chance:.2f} by chance)"
        )
    for picture in outcome.pictures:
        print(f"picture: {picture}")
    return outcome


if __name__ == "__main__":
    main()
