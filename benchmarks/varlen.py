"""Packed sequences: against our own attention on one sequence of as many pairs, laid out like them, and against SDPA on the padded batch.

8 heads of 64, lengths mixed from 16 to 2048. The padded batch is told of its padding the way SDPA is fastest: by is_causal where that hides
it, by a mask of keys otherwise.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from rows import Row

import tiled_attention as ta
from tiled_attention.compare import machine
from tiled_attention.compare.timing import alternate
from tiled_attention.library import ops

LENGTHS = (16, 2048, 33, 512, 128, 1024, 64, 1536, 255, 768, 400, 97)
HEADS, HEAD_DIM = 8, 64


def _packed(causal: bool) -> Callable[..., torch.Tensor]:
    cu_seqlens = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    mask = ta.Causal() if causal else None
    return lambda q, k, v: ta.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, max(LENGTHS), max(LENGTHS), mask=mask)


def _padded(causal: bool) -> Callable[..., torch.Tensor]:
    keys = None if causal else (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None])[:, None, None]
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, keys, is_causal=causal)


def _pad(tensor: torch.Tensor) -> torch.Tensor:
    """(total, heads, dim) as (batch, heads, longest, dim)."""
    return torch.nn.utils.rnn.pad_sequence(tensor.detach().split(LENGTHS), batch_first=True).transpose(1, 2)


def _step(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], grad_out: torch.Tensor, backward: bool) -> object:
    with torch.set_grad_enabled(backward):
        out = function(*tensors)
    return torch.autograd.grad(out, tensors, grad_out) if backward else out


def varlen(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """The rate of packed sequences, forward alone and with the backward."""
    total, pairs = sum(LENGTHS), sum(n * n for n in LENGTHS)
    with machine.pinned(threads):
        for dtype, causal, backward in itertools.product((torch.float32, torch.bfloat16), (False, True), (False, True)):
            packed = [torch.randn(total, HEADS, HEAD_DIM).to(dtype).requires_grad_() for _ in range(3)]
            padded = [_pad(x).contiguous().requires_grad_() for x in packed]
            single = [torch.randn(1, math.isqrt(pairs), HEADS, HEAD_DIM).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
            out, want = _packed(causal)(*packed), _padded(causal)(*padded).transpose(1, 2)
            right = all(
                torch.allclose(part.float(), whole[: len(part)].float(), rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)
                for part, whole in zip(out.split(LENGTHS), want, strict=True)
            )
            grads = [torch.ones(total, HEADS, HEAD_DIM).to(dtype), torch.ones_like(single[0])]
            own = partial(ta.attention, mask=ta.Causal() if causal else None)
            against = {
                "ours, one sequence": (partial(_step, own, single, grads[1], backward), dict(at_most=1 / 0.9)),
                "SDPA, padded": (partial(_step, _padded(causal), padded, _pad(grads[0]).contiguous(), backward), dict(at_least=1.5)),
            }
            direction = "forward+backward" if backward else "forward"
            name = (
                f"{len(LENGTHS)} of 16 to 2048, ({HEADS}, {HEAD_DIM}) {machine.dtype_name(dtype)}{' causal' if causal else ''} {direction}"
            )
            for label, (theirs, target) in against.items():
                row = Row("varlen", name, label, "ms", wrong=not right)
                if right:
                    calls = {"ours": partial(_step, _packed(causal), packed, grads[0], backward), "theirs": theirs}
                    found = alternate(calls, rounds=rounds, seconds=seconds)
                    row.ours, row.theirs = found["ours"] * 1e3, found["theirs"] * 1e3
                    visible = sum(n * (n + 1) / 2 for n in LENGTHS) if causal else pairs
                    flops = 4 * HEADS * visible * HEAD_DIM * (3.5 if backward else 1)
                    row.share = flops / found["ours"] / (float(ops._peak(machine.PEAK_CODES[dtype])) * threads * 1e9)
                yield row.want(**target)


CLAIMS = {"varlen": varlen}
