"""FAVOR+ in a trained model: all-MiniLM-L6-v2 with its softmax replaced by random features, and what that does to its embeddings."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..favor import FavorFeatures
from ..linear_attention import linear_attention
from .models import _implementation, load_sentence_encoder

NAME = "tiled_attention_favor"
KINDS = ("positive", "hyperbolic")
NUM_FEATURES = (64, 256, 1024)
NUM_SEEDS = 4
PAIRS = 10000  # measured in each call, evenly spaced

Advance = Callable[[str], None]


class Replacement:
    """The attention of every layer as transformers calls it, with features of the layer's own."""

    def __init__(self) -> None:
        self.kind = (
            "exact"  # which measures the norms, "uniform" (equal weights, what is left if nothing is estimated), or of FavorFeatures
        )
        self.num_features = 0
        self.seed = 0
        self.maps: dict[int, FavorFeatures] = {}  # by layer
        self.measured: list[Tensor] = []  # |q'| |k'| and |q' + k'|^2 / 2 of some visible pairs of a call: (2, pairs)

    def use(self, kind: str, num_features: int = 0, seed: int = 0) -> None:
        """From now on; every layer draws features of its own at its next call."""
        self.kind, self.num_features, self.seed, self.maps = kind, num_features, seed, {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """query, key, value (batch, num_heads, seqlen, head_dim), a bool mask (batch, 1, seqlen, seqlen) or None."""
        head_dim = query.shape[-1]
        if scaling is not None:
            query = query * (scaling * math.sqrt(head_dim))
        key_mask = None if attention_mask is None else attention_mask[:, 0, -1]
        if self.kind in ("exact", "uniform"):
            if self.kind == "exact":
                self._measure(query, key, key_mask)
            else:
                query = torch.zeros_like(query)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        else:
            if id(module) not in self.maps:
                seed = (self.seed << 16) + len(self.maps)
                self.maps[id(module)] = FavorFeatures(head_dim, self.num_features, self.kind, seed=seed)
            out = linear_attention(query, key, value, feature_map=self.maps[id(module)], key_mask=key_mask)
        return out.transpose(1, 2).contiguous(), None

    def _measure(self, query: Tensor, key: Tensor, key_mask: Tensor | None) -> None:
        q, k = (x.double() / x.shape[-1] ** 0.25 for x in (query, key))
        norms = q.norm(dim=-1)[..., :, None] * k.norm(dim=-1)[..., None, :]
        exponents = 0.5 * (q.square().sum(-1)[..., :, None] + k.square().sum(-1)[..., None, :]) + q @ k.mT
        pairs = torch.stack([norms, exponents])
        if key_mask is not None:
            pairs = pairs[:, (key_mask[:, None, :, None] & key_mask[:, None, None, :]).expand(norms.shape)]
        pairs = pairs.flatten(1)
        self.measured.append(pairs[:, :: -(-pairs.shape[1] // PAIRS)])


def sentence_encoder(
    num_sentences: int,
    advance: Advance,
    *,
    kinds: Sequence[str] = KINDS,
    num_features: Sequence[int] = NUM_FEATURES,
    num_seeds: int = NUM_SEEDS,
) -> dict[str, Any]:
    """The mean-pooled, normalised embeddings of sentences of Hamlet with every softmax replaced, against those of the model as it is.

    Args:
        num_sentences: how many, from the start of the play.
        advance: told after each step.
        kinds, num_features: of `FavorFeatures`.
        num_seeds: draws to average over.

    Returns:
        model, sentences; over the visible pairs of all layers median and 90th percentile ("high") of norms |q| |k| / sqrt(head_dim)
        and of exponents |q + k|^2 / (2 sqrt(head_dim)), the logarithm of the kernel estimate's relative error with one feature; rows of
        kind, num_features, error (root mean square of |embedding - exact|; embeddings have norm 1; mean over the seeds), error_low,
        error_high (over the seeds), cosine (mean), nearest (share of sentences whose nearest other sentence stays the same). The first
        row, "uniform", has equal weights in the place of every softmax.

    Raises:
        text.Missing: a package is not installed.
    """
    model, batches, embeddings = load_sentence_encoder(num_sentences)
    exact, rows, replacement = embeddings(), [], Replacement()
    with _replaced(model, replacement):
        embeddings()
        replacement.use("uniform")
        rows.append({"kind": "uniform", "num_features": 0} | _errors([embeddings()], exact))
        advance(f"{type(model).__name__}, exact and uniform")
        for kind, m in itertools.product(kinds, num_features):
            found = []
            for seed in range(num_seeds):
                replacement.use(kind, m, seed)
                found.append(embeddings())
                advance(f"{type(model).__name__}, {m} {kind} features")
            rows.append({"kind": kind, "num_features": m} | _errors(found, exact))
    norms, exponents = torch.cat(replacement.measured, 1)
    return {
        "model": "all-MiniLM-L6-v2",
        "sentences": sum(len(batch["attention_mask"]) for batch in batches),
        "norms": _quantiles(norms),
        "exponents": _quantiles(exponents),
        "rows": rows,
    }


def _replaced(model: Any, replacement: Replacement) -> AbstractContextManager[None]:
    """A context in which the model attends by `replacement`."""
    import transformers

    transformers.AttentionInterface.register(NAME, functools.partial(Replacement.__call__, replacement))
    transformers.AttentionMaskInterface.register(NAME, transformers.masking_utils.sdpa_mask)
    return _implementation(model, NAME)


def _errors(found: list[Tensor], exact: Tensor) -> dict[str, float]:
    errors = [float((x - exact).square().sum(-1).mean().sqrt()) for x in found]
    return {
        "error": sum(errors) / len(errors),
        "error_low": min(errors),
        "error_high": max(errors),
        "cosine": sum(float((x * exact).sum(-1).mean()) for x in found) / len(found),
        "nearest": sum(float((_nearest(x) == _nearest(exact)).double().mean()) for x in found) / len(found),
    }


def _nearest(embeddings: Tensor) -> Tensor:
    """For each row the index of the other row that is most like it."""
    return (embeddings @ embeddings.mT).fill_diagonal_(-math.inf).argmax(-1)


def _quantiles(values: Tensor) -> dict[str, float]:
    values = values.sort().values
    return {name: float(values[int(q * (len(values) - 1))]) for name, q in (("median", 0.5), ("high", 0.9))}
