"""Between padded batches and packed rows, as flash_attn.bert_padding does it. Differentiable."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of (rows, ...) by their indices (n,): (n, ...)."""
    return input.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that are tokens, one after the other.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integers, 1 where there is a token.
        unused_mask: (batch, seqlen), 1 for rows that are kept too but do not count as used.

    Returns:
        The rows (total, ...), their indices among all (total,), the offsets int32 (batch + 1,), the longest length, and the used tokens of
        each item, int32 (batch,).

    Raises:
        RuntimeError: where shapes do not fit.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero()[:, 0]
    longest = int(lengths.max()) if lengths.numel() else 0
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, longest, attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch (batch, seqlen, ...) again, zeros where there is no token; arguments as `unpad_input` returns them."""
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
