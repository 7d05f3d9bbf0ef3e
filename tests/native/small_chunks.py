"""Linear attention over every chunk and segment edge: run by test_small_tiles.py on a library whose chunks hold 8 to 12 tokens and whose
segments at least 16.

A length of 45 is then several chunks, and with several threads segments, each with a ragged end.
"""

import functools

import pytest
import torch
from torch import Tensor

import tiled_attention as ta
from tiled_attention.linear_testing import LinearCase, check, leaves_of, with_leaves

attention = functools.partial(ta.linear_attention, return_state=True)
SMALL = LinearCase(batch=(1,), num_heads=2, num_heads_kv=1, seqlen_q=45, head_dim=3, head_dim_v=2, dtype=torch.float64, masked=0.2)
CASES = {
    "plain": SMALL,
    "token decay": SMALL.replace(decay="token", state=True),
    "feature decay": SMALL.replace(decay="feature", state=True),
    "not normalised": SMALL.replace(normalize=False, feature_map="identity", state=True),
    "not causal": SMALL.replace(causal=False, seqlen_kv=33),
}


@pytest.mark.parametrize("threads", (1, 2, 7))
@pytest.mark.parametrize("name", CASES)
def test_gradients_cross_every_edge(name: str, threads: int, isa: str):
    torch.set_num_threads(threads)
    inputs = CASES[name].inputs()
    leaves = {key: leaf.requires_grad_() for key, leaf in leaves_of(inputs).items()}

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        out, state = attention(**with_leaves(inputs, dict(zip(leaves, tensors))))
        return out, *state

    assert torch.autograd.gradcheck(run, tuple(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", (1, 7, 8, 9, 12, 13, 16, 17, 24, 25, 64, 90))
def test_values_and_gradients_do_not_depend_on_the_chunks(name: str, n: int, isa: str):
    """The limits are those of the usual chunks."""
    for dtype in (torch.float64, torch.float32):
        case = CASES[name].replace(seqlen_q=n, head_dim=18, head_dim_v=21, dtype=dtype)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            check(case, attention)
