"""What flash_attn's documentation says that its functions compute, one step after the other, in float64 and without our operators."""

import math

import torch
from torch import Tensor


def visible_keys(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> Tensor:
    """bool (seqlen_q, seqlen_k): between p - left and p + right, both inclusive, p = i + seqlen_k - seqlen_q; causal: not behind p."""
    left, right = window
    seen = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for i in range(seqlen_q):
        p = i + seqlen_k - seqlen_q
        for j in range(seqlen_k):
            seen[i, j] = (left < 0 or j >= p - left) and (right < 0 or j <= p + right) and not (causal and j > p)
    return seen


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    softmax_scale: float | None = None,
    kept: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_lse, probabilities) of q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim)."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[2] // max(k.shape[2], 1)
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    seqlen_q, seqlen_k = scores.shape[-2:]
    if alibi_slopes is not None:
        distance = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)
        slopes = alibi_slopes.double().reshape(-1, q.shape[2])[:, :, None, None]
        scores = scores - slopes * distance.abs()
    seen = visible_keys(seqlen_q, seqlen_k, causal, window_size)
    scores = scores.masked_fill(~seen, -math.inf)
    alive = seen.any(-1)[:, None]
    lse = torch.where(alive[:, 0], scores.masked_fill(~alive, 0.0).logsumexp(-1), -math.inf)
    probabilities = torch.where(seen, torch.exp(scores - torch.where(alive, lse[..., None], 0.0)), 0.0)
    weights = probabilities if kept is None else probabilities * kept / (1 - round(dropout_p * 65536) / 65536)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse, probabilities


def turn(rows: Tensor, cos: Tensor, sin: Tensor, positions: list[int], interleaved: bool) -> Tensor:
    """rows (seqlen, heads, headdim) turned by rows `positions` of cos and sin (seqlen_ro, rotary_dim / 2)."""
    turned, half = rows.clone(), cos.shape[1]
    for i, position in enumerate(positions):
        for pair in range(half):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            turned[i, :, a] = rows[i, :, a] * cos[position, pair] - rows[i, :, b] * sin[position, pair]
            turned[i, :, b] = rows[i, :, b] * cos[position, pair] + rows[i, :, a] * sin[position, pair]
    return turned
