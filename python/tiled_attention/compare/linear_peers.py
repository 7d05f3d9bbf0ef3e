"""What linear attention is measured against: the same formula in PyTorch's own operators, as it is usually written."""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 64


def two_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Not causal: phi(Q) (phi(K)^T V) over phi(Q) (sum of phi(K)), phi = elu + 1."""
    phi_q, phi_k = F.elu(query) + 1, F.elu(key) + 1
    return (phi_q @ (phi_k.mT @ value)) / (phi_q @ phi_k.sum(-2, keepdim=True).mT)


def chunked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal, in chunks of 64: the pairs inside each chunk by a masked product, those before by running sums of chunk states.

    query, key, value: (batch, heads, n, dim); phi = elu + 1.
    """
    n = query.shape[-2]
    padded = F.pad(query, (0, 0, 0, -n % CHUNK)), F.pad(key, (0, 0, 0, -n % CHUNK)), F.pad(value, (0, 0, 0, -n % CHUNK))
    q, k, v = (tensor.unflatten(-2, (-1, CHUNK)) for tensor in padded)
    phi_q, phi_k = F.elu(q) + 1, F.elu(k) + 1
    states, sums = phi_k.mT @ v, phi_k.sum(-2, keepdim=True)
    before, sums_before = states.cumsum(-3) - states, sums.cumsum(-3) - sums
    weights = (phi_q @ phi_k.mT).tril()
    denominator = weights.sum(-1, keepdim=True) + phi_q @ sums_before.mT
    return ((weights @ v + phi_q @ before) / denominator).flatten(-3, -2)[..., :n, :]
