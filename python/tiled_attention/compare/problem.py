"""One call to compare: its case, its tensors, and the gradient that flows into it."""

import math
from dataclasses import dataclass

import torch

import tiled_attention as ta
from tiled_attention.testing import Case, Inputs


@dataclass
class Problem:
    """grad_out (batch, num_heads, seqlen_q, head_dim_v) in query's dtype; kept (batch, num_heads, seqlen_q, seqlen_kv) bool, True = not
    dropped, or None without dropout."""

    case: Case
    inputs: Inputs
    grad_out: torch.Tensor
    kept: torch.Tensor | None

    @property
    def scale(self) -> float:
        """What multiplies query . key."""
        return 1 / math.sqrt(self.case.head_dim) if self.case.scale is None else self.case.scale

    @property
    def keep_probability(self) -> float:
        """Of one weight under dropout, quantised to 2^-16 as the operator does."""
        return 1 - round(self.case.dropout_p * 65536) / 65536

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.case.num_heads // self.case.kv_heads

    def distance(self) -> torch.Tensor:
        """|p - j| for the query position p and the key position j: (seqlen_q, seqlen_kv), int64."""
        return (self.inputs.position - torch.arange(self.case.kv_length)).abs()

    def gradients(self, out: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gradients of sum(out * grad_out), by the name of the argument."""
        leaves = self.inputs.leaves()
        return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), self.grad_out)))


def make_problem(case: Case) -> Problem:
    """The case's inputs as leaves; the seed of the case also governs dropout and grad_out."""
    kept = None
    if case.dropout_p > 0:
        torch.manual_seed(case.seed)
        batch, num_heads, seqlen_q, seqlen_kv = case.score_shape
        kept = ta.dropout_mask(batch, num_heads, seqlen_q, seqlen_kv, case.dropout_p)
    generator = torch.Generator().manual_seed(case.seed + 1)
    grad_out = torch.randn(*case.score_shape[:-1], case.value_dim, generator=generator).to(case.dtype)
    return Problem(case, case.inputs().requires_grad_(), grad_out, kept)
