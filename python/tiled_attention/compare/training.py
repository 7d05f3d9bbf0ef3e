"""Step 4, training: an nn.TransformerEncoder as it is and converted, from the same start on the same batches."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiled_attention as ta

from .text import Missing, hamlet, spoken

# Losses may part by this many times the distance between two stock runs on different SDPA backends, plus 16 float32 ulps of a loss near 4.
TRAINING_FACTOR = 4.0
FLOOR = 16 * 2.0**-21

EMBED_DIM, NUM_HEADS, NUM_LAYERS, SEQLEN, BATCH = 128, 4, 2, 128, 8
LEARNING_RATE = 1e-3

Advance = Callable[[str], None]


class CharacterModel(torch.nn.Module):
    """Predicts the next character: embeddings, an nn.TransformerEncoder under a causal mask, a linear head."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.character = torch.nn.Embedding(num_characters, EMBED_DIM)
        self.position = torch.nn.Embedding(SEQLEN, EMBED_DIM)
        layer = torch.nn.TransformerEncoderLayer(EMBED_DIM, NUM_HEADS, 4 * EMBED_DIM, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(EMBED_DIM, num_characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """(batch, seqlen) int64 -> logits (batch, seqlen, num_characters)."""
        seqlen = characters.shape[1]
        x = self.character(characters) + self.position(torch.arange(seqlen))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(seqlen)
        return self.head(self.encoder(x, mask=mask, is_causal=True))


def _characters() -> tuple[torch.Tensor, str]:
    """The text as numbers, and its name; without the package a made-up text whose next character depends on the last two."""
    try:
        text = spoken(hamlet())
    except Missing as missing:
        numbers = [1, 2]
        for step in range(20000):
            numbers.append((numbers[-1] * 5 + numbers[-2] * 3 + step % 7) % 31)
        return torch.tensor(numbers), f"a made-up text ({missing})"
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text]), "Hamlet"


def run(num_steps: int, advance: Advance) -> dict[str, Any]:
    """Losses of each step side by side, the loss in eval mode, and the calls that each converted layer served."""
    characters, name = _characters()
    torch.manual_seed(0)
    stock = CharacterModel(int(characters.max()) + 1)
    ours, other = copy.deepcopy(stock), copy.deepcopy(stock)
    handle = ta.convert(ours)
    starts = torch.randint(len(characters) - SEQLEN - 1, (num_steps + 1, BATCH), generator=torch.Generator().manual_seed(1))
    batches = [torch.stack([characters[start : start + SEQLEN + 1] for start in row]) for row in starts]

    def loss(model: CharacterModel, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def train(model: CharacterModel, label: str) -> list[float]:
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        losses = []
        for batch in batches[:-1]:
            value = loss(model, batch)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(float(value))
            advance(label)
        with torch.no_grad():
            losses.append(float(loss(model.eval(), batches[-1])))
        return losses

    stock_losses, our_losses = train(stock, "stock"), train(ours, "converted")
    with sdpa_kernel(SDPBackend.MATH):
        other_losses = train(other, "stock, math backend")
    served = {str(layer): int(calls) for layer, calls in dict(handle.calls).items()}
    handle.restore()

    def distance(losses: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(losses, stock_losses))

    allowed = TRAINING_FACTOR * distance(other_losses) + FLOOR
    return {
        "text": name,
        "steps": num_steps,
        "stock_losses": stock_losses[:-1],
        "tiled_losses": our_losses[:-1],
        "stock_eval_loss": stock_losses[-1],
        "tiled_eval_loss": our_losses[-1],
        "difference": distance(our_losses),
        "limit": allowed,
        "passed": distance(our_losses) <= allowed,
        "served": served,
        "all_served": bool(served) and min(served.values()) > 0,
    }
