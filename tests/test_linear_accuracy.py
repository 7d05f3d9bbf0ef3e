"""Accuracy of linear attention over many samples: the root mean square of the errors against float64, beside the definition's own."""

import functools
import math

import pytest
import torch

import tiled_attention as ta
from tiled_attention.linear_testing import LinearCase, results
from tiled_attention.testing import largest, ulp

SEEDS = 6
attention = functools.partial(ta.linear_attention, return_state=True)


def root_mean_square(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack([t.square().mean() for t in tensors]).mean().sqrt())


@pytest.mark.parametrize("decay", (None, "token", "feature"))
@pytest.mark.parametrize("causal", (True, False))
def test_errors_in_float32(causal: bool, decay: str | None, isa: str):
    """At most twice those of the definition computed in float32, and the root mean square of an ulp of the largest element."""
    ours: dict[str, list[torch.Tensor]] = {}
    theirs: dict[str, list[torch.Tensor]] = {}
    sizes: dict[str, float] = {}
    for seed in range(SEEDS):
        case = LinearCase(batch=(1,), seqlen_q=200, head_dim=64, causal=causal, decay=decay if causal else None, state=causal, seed=seed)
        inputs = case.inputs()
        grads = {name: torch.randn_like(t) for name, t in results(ta.reference.linear_attention, inputs).items()}
        exact = results(ta.reference.linear_attention, inputs, torch.float64, grads)
        for found, function in ((ours, attention), (theirs, ta.reference.linear_attention)):
            for name, tensor in results(function, inputs, None, grads).items():
                found.setdefault(name, []).append(tensor.double() - exact[name])
        sizes = {name: max(sizes.get(name, 0.0), largest(tensor)) for name, tensor in exact.items()}
    for name, errors in ours.items():
        limit = 2 * root_mean_square(theirs[name]) + ulp(sizes[name], torch.float32) / math.sqrt(12)
        assert root_mean_square(errors) <= limit, f"{name}: {root_mean_square(errors):.2e} above {limit:.2e}"
