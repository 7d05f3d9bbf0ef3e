"""What attention is, from the contract: two passes over all scores, in float64 or in any dtype, with PyTorch's own autograd.

Written apart from `tiled_attention.reference`, so that the two check each other.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

import tiled_attention as ta
from tiled_attention.testing import Case, Inputs, error, largest, real_dtype, rounding, ulp


def attention(x: Inputs, kept: Tensor | None = None, dtype: torch.dtype = torch.float64, order: int = 0) -> tuple[Tensor, Tensor]:
    """(out, lse), both `dtype`. `kept` (..., num_heads, seqlen_q, seqlen_kv) is what dropout leaves.

    The bits of `order` (1, 2, 4) reverse keys, head_dim and queries, so that the same sums are rounded another way.
    """
    query, key, value = (t.to(dtype) for t in (x.query, x.key, x.value))
    group = query.shape[-3] // max(key.shape[-3], 1)
    key, value = (t.repeat_interleave(group, -3) for t in (key, value))
    shape = (*query.shape[:-1], key.shape[-2])
    scale = x.scale if x.scale is not None else 1 / math.sqrt(max(query.shape[-1], 1))
    live = torch.ones(shape, dtype=torch.bool) if x.visible is None else x.visible.expand(shape)
    added = torch.zeros((), dtype=dtype)
    if x.alibi_slopes is not None:
        added = added - x.alibi_slopes.to(dtype)[:, None, None] * (x.position - torch.arange(shape[-1])).abs()
    if x.bias is not None:
        live = live & (x.bias != -math.inf)
        added = added + torch.where(x.bias == -math.inf, 0.0, x.bias.to(dtype))
    added = added.expand(shape)
    columns, dims, rows = order & 1, order & 2, order & 4
    query, key, value = _flip(query, rows, dims), _flip(key, columns, dims), _flip(value, columns, 0)
    live, added, kept = _flip(live, rows, columns), _flip(added, rows, columns), None if kept is None else _flip(kept, rows, columns)
    select = not all(t.isfinite().all() for t in (query, key, value))
    root = math.sqrt(abs(scale))  # on both sides, as PyTorch's math path does it
    query, key = query * math.copysign(root, scale), key * root
    if select:
        score = (query[..., :, None, :] * torch.where(live[..., None], key[..., None, :, :], 0.0)).sum(-1)
    else:
        score = query @ key.mT
    if x.softcap is not None:
        score = x.softcap * torch.tanh(score / x.softcap)
    score = torch.where(live, score + added, -math.inf)
    if x.sinks is not None:
        score = torch.cat([score, x.sinks.to(dtype)[:, None, None].expand(*shape[:-1], 1)], -1)
    live = score != -math.inf
    top = score.detach().amax(-1, keepdim=True) if score.shape[-1] else score.new_full((*shape[:-1], 1), -math.inf)
    dead = top == -math.inf
    weight = torch.where(live, torch.exp(torch.where(live, score, 0.0) - torch.where(dead, 0.0, top)), 0.0)
    total = torch.where(dead, 1.0, weight.sum(-1, keepdim=True))
    probability = (weight / total)[..., : shape[-1]]
    if kept is not None:
        dropped = round(x.dropout_p * 65536) / 65536
        probability = torch.where(kept, probability / max(1 - dropped, 2.0**-16), 0.0)  # the larger one only where nothing is kept
    if select:
        out = (probability[..., None] * torch.where(live[..., : shape[-1], None], value[..., None, :, :], 0.0)).sum(-2)
    else:
        out = probability @ value
    lse = torch.where(dead, -math.inf, top + total.log())
    return _flip(out, rows, 0), _flip(lse, rows, 0)[..., 0]


def _flip(tensor: Tensor, rows: int, columns: int) -> Tensor:
    return tensor.flip([dim for dim, wanted in ((-2, rows), (-1, columns)) if wanted]) if rows or columns else tensor


def plain_inputs(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None, **options) -> Inputs:
    """The oracle's view of a call without a `Case`."""
    absent = dict.fromkeys(("mask", "bias", "alibi_slopes", "sinks", "query_offset", "scale", "softcap"))
    position = torch.arange(query.shape[-2])[:, None] + key.shape[-2] - query.shape[-2]
    fields = {**absent, "position": position, "dropout_p": 0.0, "visible": visible, **options}
    return Inputs(query=query, key=key, value=value, **fields)


def exact(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None, **options) -> Tensor:
    """The float64 output."""
    return attention(plain_inputs(query, key, value, visible, **options))[0]


def tolerance(dtype: torch.dtype, size: float = 1.0) -> float:
    """Enough for values of `size` where the point of a test is elsewhere."""
    return {torch.float64: 1e-12, torch.float32: 5e-6}.get(dtype, torch.finfo(dtype).eps) * max(size, 1.0)


def attention_and_gradients(
    x: Inputs, grad_out: Tensor, grad_lse: Tensor | None, kept: Tensor | None = None, dtype: torch.dtype = torch.float64, order: int = 0
) -> dict[str, Tensor]:
    """out, lse, and the gradient of every float input by its name; the gradients in `dtype` and in the shape of their input."""
    fresh = x.clone()
    for name, tensor in fresh.leaves().items():
        setattr(fresh, name, tensor.to(dtype).requires_grad_())
    out, lse = attention(fresh, kept, dtype, order)
    outputs, grads = [out], [grad_out.to(dtype)]
    if grad_lse is not None:
        outputs, grads = [out, lse], [*grads, grad_lse.to(dtype)]
    leaves = fresh.leaves()
    gradients = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
    filled = {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in zip(leaves.items(), gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **filled}


@dataclass(frozen=True)
class Expected:
    """The float64 results of a case by name (out, lse, and each input for its gradient), and what their accuracy is measured by."""

    case: Case
    exact: dict[str, Tensor]
    own: dict[str, float]  # error of plain float32 PyTorch over some orders of summation
    single: dict[str, float]  # see _single_key_terms
    stored: dict[str, torch.dtype]  # of the tensor itself: a gradient is returned in the dtype of its input
    grad_out: Tensor
    grad_lse: Tensor
    kept: Tensor | None

    def limit(self, name: str, dot: bool) -> float:
        """How far the result may be from the exact one. `dot`: on the bfloat16 dot path, which rounds weights and score gradients."""
        exact, real = self.exact[name], real_dtype(self.case.dtype)
        limit = limit_of(name, exact, self.own[name], self.case.dtype, self.stored.get(name, self.case.dtype), dot)
        if name not in ("out", "lse"):
            # Weights come again from lse: its rounding (at ordinary scores, below 16) and that of the exponential are theirs.
            limit += (0.5 * ulp(min(largest(self.exact["lse"]), 15.0), real) + torch.finfo(real).eps) * largest(exact)
        return limit + self.single.get(name, 0.0) * torch.finfo(real).eps


@lru_cache(maxsize=8)
def expected(case: Case) -> Expected:
    """What a case must give, for fixed random grad_out and grad_lse."""
    x = case.inputs()
    generator = torch.Generator().manual_seed(case.seed + 1)
    shape = (*case.batch, case.num_heads, case.seqlen_q)
    grad_out = torch.randn((*shape, case.value_dim), generator=generator).to(case.dtype)
    grad_lse = torch.randn(shape, generator=generator).to(real_dtype(case.dtype))
    kept = None
    if case.dropout_p:
        torch.manual_seed(case.seed)
        batch = math.prod(case.batch)
        kept = ta.dropout_mask(batch, case.num_heads, case.seqlen_q, case.kv_length, case.dropout_p).view(case.score_shape)
    exact = attention_and_gradients(x, grad_out, grad_lse, kept)
    orders = (0, 7, 1, 4) if math.prod(case.score_shape) < 100_000 else (0, 7)
    plain = [attention_and_gradients(x, grad_out, grad_lse, kept, torch.float32, order) for order in orders]
    own = {name: max(error(result[name], want) for result in plain) for name, want in exact.items()}
    stored = {name: leaf.dtype for name, leaf in x.leaves().items()}
    return Expected(case, exact, own, _single_key_terms(x, grad_out), stored, grad_out, grad_lse, kept)


def limit_of(name: str, exact: Tensor, own: float, dtype: torch.dtype, stored: torch.dtype, dot: bool) -> float:
    """How far one case may be off.

    The contract allows twice the error of PyTorch's math path and one ulp of the largest element. That is asked of many seeds together, in
    test_accuracy.py. The largest error of a single case is that of one element, in ours as in PyTorch's, and their ratio scatters:
    float32 allows 4x `own` here; float64 8x, in its own unit, since `own` is known from float32 only and the expected value is rounded too.
    16 bit: the output within 1.5x its rounding (on the dot path 2x for one case; test_n10 asks for 1.5x there too), gradients within 2x (4x
    on the dot path); lse is float32, and on the dot path the sum of rounded weights.
    """
    if dtype == torch.float64:
        limit = 8 * own * 2.0**-29 + ulp(largest(exact), dtype)
    elif dtype == torch.float32:
        limit = 4 * own + ulp(largest(exact), dtype)
    elif name == "lse":
        return 4 * own + ulp(largest(exact), torch.float32) + (2.0**-9 if dot else 0.0)
    else:
        factor = {True: 2 if dot else 1.5, False: 4 if dot else 2}[name == "out"]
        return factor * max(rounding(exact, dtype), rounding(exact, stored))
    return limit + (rounding(exact, stored) if torch.finfo(stored).eps > torch.finfo(dtype).eps else 0.0)


def _single_key_terms(x: Inputs, grad_out: Tensor) -> dict[str, float]:
    """Where no row sees more than one key, the score gradient is a difference of two equal sums over head_dim_v, and its rounding is
    measured by those sums: their bound, times what each gradient multiplies them with."""
    shape = (*x.query.shape[:-1], x.key.shape[-2])
    live = torch.ones(shape, dtype=torch.bool) if x.visible is None else x.visible.expand(shape)
    if x.sinks is not None or not live.any() or live.sum(-1).max() > 1:
        return {}
    terms = largest(grad_out.double().abs().sum(-1)) * largest(x.value)
    scale = abs(x.scale) if x.scale is not None else 1 / math.sqrt(max(x.query.shape[-1], 1))
    distance = largest(x.position - torch.arange(shape[-1]))
    factors = {"query": scale * largest(x.key), "key": scale * largest(x.query), "bias": 1.0, "alibi_slopes": distance}
    return {name: terms * factor for name, factor in factors.items()}


def philox(counter: np.ndarray, key: tuple[int, int], rounds: int = 10) -> np.ndarray:
    """Philox4x32 (Salmon et al. 2011): uint32 (..., 4) -> uint32 (..., 4)."""
    c = [counter[..., k].astype(np.uint64) for k in range(4)]
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> high) ^ c[1] ^ np.uint64(k0), p1 & low, (p0 >> high) ^ c[3] ^ np.uint64(k1), p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, -1).astype(np.uint32)


def dropout_mask(
    seed: int, dropout_p: float, shape: tuple[int, int, int, int], offsets: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> Tensor:
    """bool (batch, num_heads, seqlen_q, seqlen_kv), True = kept: element (b, h, q, k) takes 16 bits of the word k % 4 of the counter
    (k / 4, q / 2, h, b) under the key `seed`, the low half in even rows, and is dropped below round(p * 65536)."""
    b, h, q, k = np.meshgrid(*(np.arange(n, dtype=np.int64) + first for n, first in zip(shape, offsets, strict=True)), indexing="ij")
    counter = np.stack([k // 4, q // 2, h, b], -1) & 0xFFFFFFFF
    words = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    word = np.take_along_axis(words, (k % 4)[..., None], -1)[..., 0].astype(np.int64)
    bits = np.where(q % 2 == 0, word & 0xFFFF, word >> 16)
    return torch.from_numpy(bits >= round(dropout_p * 65536))
