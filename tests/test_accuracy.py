"""The accuracy of the contract: over many seeds, errors against float64 at most twice those of PyTorch's own math path."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cases
import oracle
import tiled_attention as ta
from checks import run
from tiled_attention.testing import Case, largest, ulp

SEEDS = range(8)
KINDS = {
    "short": Case(seqlen_q=9, seqlen_kv=11, head_dim=16),
    "causal": Case(seqlen_q=97, head_dim=64, mask="Causal()"),
    "long": Case(batch=(1,), num_heads=1, seqlen_q=40, seqlen_kv=2000, head_dim=32),
    "wide": Case(seqlen_q=20, seqlen_kv=70, head_dim=128),
    "grouped": Case(num_heads=6, num_heads_kv=2, seqlen_q=40, seqlen_kv=70, head_dim=32, mask=cases.STREAMING),
    "bias": Case(seqlen_q=70, seqlen_kv=90, head_dim=32, bias=(2, 70, 90)),
    "one bias for each head": Case(seqlen_q=70, seqlen_kv=90, head_dim=32, bias=(2, 1, 1)),
    "one bias for all": Case(seqlen_q=70, seqlen_kv=90, head_dim=32, bias=(1,)),
    "score options": Case(seqlen_q=70, seqlen_kv=90, head_dim=32, mask="Causal()", softcap=3.0, alibi=True, sinks=True),
    "large scores": Case(seqlen_q=40, seqlen_kv=60, head_dim=64, spread=4.0),
    "enormous scores": Case(seqlen_q=40, seqlen_kv=60, head_dim=64, spread=20.0),
}


def rms(tensors: list[Tensor]) -> float:
    return torch.cat([t.flatten() for t in tensors]).square().mean().sqrt().item()


@pytest.mark.parametrize("kind", KINDS)
def test_float32_errors_are_at_most_twice_those_of_plain_pytorch(kind: str, isa: str):
    """Root mean squares over the seeds, plus that of one ulp of the largest element (ulp / sqrt(12))."""
    ours, plain, size = {}, {}, {}
    for seed in SEEDS:
        case = KINDS[kind].replace(seed=seed)
        want = oracle.expected(case)
        got = run(case, case.inputs(), want.grad_out, want.grad_lse)
        other = oracle.attention_and_gradients(case.inputs(), want.grad_out, want.grad_lse, dtype=torch.float32)
        for name, exact in want.exact.items():
            ours.setdefault(name, []).append(got[name].double() - exact)
            plain.setdefault(name, []).append(other[name].double() - exact)
            size[name] = max(size.get(name, 0.0), largest(exact))
    wrong = {}
    for name in ours:
        error, limit = rms(ours[name]), 2 * rms(plain[name]) + ulp(size[name], torch.float32) / math.sqrt(12)
        if error > limit:
            wrong[name] = f"{error:.2e}, PyTorch {rms(plain[name]):.2e}"
    assert not wrong, f"root mean square errors: {wrong}"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("causal", (False, True))
def test_errors_against_the_math_path_itself(causal: bool, dtype: torch.dtype, isa: str):
    """The largest error of out and of each gradient, at most twice that of F.scaled_dot_product_attention's math path and one ulp."""
    tensors = [torch.randn(2, 4, 200, 64).to(dtype) for _ in range(3)]
    grad_out = torch.randn(2, 4, 200, 64).to(dtype)
    results = []
    for function in ("exact", "torch", "ours"):
        leaves = [(t.double() if function == "exact" else t).detach().requires_grad_() for t in tensors]
        with sdpa_kernel(SDPBackend.MATH):
            if function == "ours":
                out = ta.attention(*leaves, mask=ta.Causal() if causal else None)
            else:
                out = scaled_dot_product_attention(*leaves, is_causal=causal)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))])
    for name, exact, torchs, ours in zip(("out", "query", "key", "value"), *results, strict=True):
        limit = 2 * largest(torchs.double() - exact) + ulp(largest(exact), dtype)
        assert largest(ours.double() - exact) <= limit, name
