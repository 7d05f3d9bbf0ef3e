"""Step 1, parity: errors against float64, beside those of PyTorch's own implementations in the same dtype."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import tiled_attention as ta
from tiled_attention.library import ops
from tiled_attention.testing import DTYPES, Case, rounding, ulp

from . import peers
from .machine import dtype_name
from .problem import Problem, make_problem

# The largest error allowed: in float32 and float64 this many times that of PyTorch's math path, plus one ulp of the largest element; in
# 16 bit this many times the rounding of the exact result to that dtype. The bf16 dot product rounds the weights too. A backward that
# recomputes takes sum(grad_out * out) where math sums weights, which rounds more in rows that see few keys: gradients go by the worst of
# PyTorch's own, the fused kernel and nn.MultiheadAttention included.
MATH_FACTOR = 2.0
OUT_ROUNDINGS = 1.5
GRADIENT_ROUNDINGS = 2.0
BF16_DOT_GRADIENT_ROUNDINGS = 4.0

# The largest of a few errors is a matter of luck, most of all in a gradient of one number per head: the math path runs on so many seeds.
MATH_SEEDS = 3
# Long double has no fast matrix product: float64 cases stop at this length.
MAX_FLOAT64_SEQLEN = 64
BATCH, NUM_HEADS, HEAD_DIM = 2, 4, 64

Advance = Callable[[str], None]


def cases(n: int) -> dict[str, dict[str, Any]]:
    """What differs from plain attention over n queries and n keys, by the name of the case."""
    causal = {"mask": "Causal()"}
    longer = {"seqlen_kv": n + 37}
    per_head = (1, NUM_HEADS, n, n)
    lengths = tuple(max(1, n // (item + 2)) for item in range(BATCH))
    everything = {"softcap": 5.0, "alibi": True, "sinks": True, "bias": (1, NUM_HEADS, 1, n)}
    return {
        "plain": {},
        "causal": causal,
        "more keys than queries, causal": causal | longer,
        "top-left causal, more keys": {"mask": "Causal(align='top_left')"} | longer,
        "window": {"mask": "SlidingWindow(20, 5)"},
        "causal window with sinks": {"mask": "Causal() & (SlidingWindow(16, 0) | Sinks(4))"},
        "prefix": {"mask": "PrefixLM(11)"},
        "chunks, causal": {"mask": "Causal() & Chunked(24)"},
        "key lengths": {"mask": f"KeyLengths({lengths})"},
        "rows that see nothing": {"mask": f"KeyLengths({(0, n - 1)})"},
        "documents, causal": {"mask": f"Causal() & Documents({(0, n // 3, n // 2, n)})"},
        "bool mask (L, S)": {"mask": f"Bool({n}, {n})"},
        "bool mask per head": {"mask": f"Bool({BATCH}, {NUM_HEADS}, {n}, {n})"},
        "bias (b, h, L, S)": {"bias": (BATCH, *per_head[1:])},
        "bias (1, h, L, S), causal": {"bias": per_head} | causal,
        "bias (1, 1, 1, S)": {"bias": (1, 1, 1, n)},
        "scale": {"scale": 0.5},
        "softcap": {"softcap": 5.0},
        "ALiBi, causal": {"alibi": True} | causal,
        "learnable sinks": {"sinks": True},
        "all score options, causal": everything | causal,
        "grouped heads, causal": {"num_heads_kv": 2} | causal,
        "one key head": {"num_heads_kv": 1},
        "value narrower": {"head_dim_v": 40},
        "(batch, seqlen, heads, dim)": {"layout": "heads_last"} | causal,
        "dropout": {"dropout_p": 0.1},
        "dropout, bias, causal": {"dropout_p": 0.25, "bias": per_head} | causal,
    }


def error(found: torch.Tensor, truth: np.ndarray) -> float:
    """Largest absolute difference; infinite where the shapes or the patterns of finite numbers differ."""
    values = found.detach().double().numpy().astype(truth.dtype)
    if values.shape != truth.shape or not np.array_equal(np.isfinite(values), np.isfinite(truth)):
        return math.inf
    return float(np.abs(values - truth).max(initial=0, where=np.isfinite(truth)))


def limit(dtype: torch.dtype, tensor: str, truth: np.ndarray, torch_error: float, isa: str) -> float:
    """The error allowed for `tensor`, "out" or the name of an argument."""
    exact = torch.from_numpy(truth.astype(np.float64))
    # One number for many rows: delta of each row carries the rounding of its out, and where the rows cancel the sum does not grow with it.
    sums = 2 if tensor in ("alibi_slopes", "sinks") else 1
    if dtype in (torch.float32, torch.float64):
        return sums * (MATH_FACTOR * torch_error + ulp(float(np.abs(truth).max(initial=0)), dtype))
    if tensor == "out":
        return OUT_ROUNDINGS * rounding(exact, dtype)
    dot = dtype == torch.bfloat16 and "bf16" in isa
    return sums * (BF16_DOT_GRADIENT_ROUNDINGS if dot else GRADIENT_ROUNDINGS) * rounding(exact, dtype)


def _errors(problem: Problem, function: Callable[[Problem], torch.Tensor | None], truth: dict[str, np.ndarray]) -> dict[str, float] | None:
    out = function(problem)
    if out is None:
        return None
    found = {"out": out, **problem.gradients(out)}
    return {name: error(found[name], truth[name]) for name in truth}


def _math_errors(problem: Problem, truth: dict[str, np.ndarray]) -> dict[str, float]:
    found = _errors(problem, peers.sdpa_math, truth) or _errors(problem, peers.plain_math, truth)
    assert found is not None
    return found


def typical_math_errors(case: Case, truth: dict[str, np.ndarray], first: dict[str, float]) -> dict[str, float]:
    """The largest errors of PyTorch's math path over a few seeds, each relative to the largest element, in units of this truth."""
    found = dict(first)
    for seed in range(case.seed + 1, case.seed + MATH_SEEDS):
        other = make_problem(case.replace(seed=seed))
        exact = peers.exact(other)
        for name, value in _math_errors(other, exact).items():
            ratio = float(np.abs(truth[name]).max(initial=0)) / max(float(np.abs(exact[name]).max(initial=0)), 1e-300)
            found[name] = max(found[name], value * ratio)
    return found


def run_case(name: str, case: Case) -> list[dict[str, Any]]:
    """One row per tensor: out and each gradient."""
    problem = make_problem(case)
    truth = peers.exact(problem)
    ours = _errors(problem, peers.tiled, truth)
    assert ours is not None
    by_math = _math_errors(problem, truth)
    stock, module = _errors(problem, peers.sdpa, truth), _errors(problem, peers.multihead, truth)
    typical = typical_math_errors(case, truth, by_math) if case.dtype in (torch.float32, torch.float64) else by_math
    for own in (stock, module):
        if own is not None:
            typical = {name: value if name == "out" else max(value, own[name]) for name, value in typical.items()}
    rows = []
    for tensor, true in truth.items():
        allowed = limit(case.dtype, tensor, true, typical[tensor], str(ops._isa()))
        rows.append(
            {
                "case": name,
                "id": case.id,
                "dtype": dtype_name(case.dtype),
                "tensor": "out" if tensor == "out" else f"grad_{tensor}",
                "largest": float(np.abs(true).max(initial=0)),
                "tiled": ours[tensor],
                "sdpa": None if stock is None else stock[tensor],
                "multihead": None if module is None else module[tensor],
                "math": by_math[tensor],
                "limit": allowed,
                "passed": ours[tensor] <= allowed,
            }
        )
    return rows


def run_module(dtype: torch.dtype, seqlen: int, *, causal: bool, embed_dim: int = 128, num_heads: int = 4) -> list[dict[str, Any]]:
    """ta.MultiheadAttention beside nn.MultiheadAttention with the same parameters: out, weights, gradients of input and parameters.

    Exact is nn.MultiheadAttention in float64, so float64 itself is not compared. The limit is relative to nn.MultiheadAttention.
    """
    torch.manual_seed(0)
    options: dict[str, Any] = {"embed_dim": embed_dim, "num_heads": num_heads, "batch_first": True}
    stock = torch.nn.MultiheadAttention(**options, dtype=dtype)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=embed_dim**-0.5)
    ours = ta.MultiheadAttention(**options, dtype=dtype)
    true = torch.nn.MultiheadAttention(**options, dtype=torch.float64)
    for module in (ours, true):
        module.load_state_dict(stock.state_dict())
    x, grad_out = (torch.randn(2, seqlen, embed_dim).to(dtype) for _ in range(2))
    mask = torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1) if causal else None

    def results(module: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaf = x.to(dtype).requires_grad_()
        out, weights = module(leaf, leaf, leaf, attn_mask=mask, need_weights=True)
        names, parameters = zip(*module.named_parameters())
        found = torch.autograd.grad(out, (leaf, *parameters), grad_out.to(dtype))
        return {"out": out, "weights": weights} | {f"grad_{name}": grad for name, grad in zip(("x", *names), found)}

    truth = {name: tensor.detach().numpy() for name, tensor in results(true, torch.float64).items()}
    found, peer = results(ours, dtype), results(stock, dtype)
    rows = []
    for tensor, exact in truth.items():
        mine, theirs, largest = error(found[tensor], exact), error(peer[tensor], exact), float(np.abs(exact).max())
        allowed = MATH_FACTOR * theirs + ulp(largest, dtype)
        rows.append(
            {
                "case": "MultiheadAttention, causal" if causal else "MultiheadAttention",
                "id": f"n{seqlen}-e{embed_dim}-h{num_heads}",
                "dtype": dtype_name(dtype),
                "tensor": tensor,
                "largest": largest,
                "tiled": mine,
                "sdpa": None,
                "multihead": theirs,
                "math": None,
                "limit": allowed,
                "passed": mine <= allowed,
            }
        )
    return rows


def _dtypes() -> tuple[torch.dtype, ...]:
    """float64 stands only where long double can judge it."""
    wide = np.finfo(np.longdouble).eps < np.finfo(np.float64).eps
    return tuple(dtype for dtype in DTYPES if wide or dtype != torch.float64)


def steps(sizes: Sequence[int]) -> int:
    """How often `run` reports."""
    return len(sizes) * len(_dtypes()) * (len(cases(1)) + 1)


def run(sizes: Sequence[int], advance: Advance) -> list[dict[str, Any]]:
    """All rows over the given query lengths, on one thread: the cases are small, and ours has the same bits on any number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(sizes, advance)
    finally:
        torch.set_num_threads(threads)


def _run(sizes: Sequence[int], advance: Advance) -> list[dict[str, Any]]:
    rows = []
    for seqlen in sizes:
        for dtype in _dtypes():
            n = min(seqlen, MAX_FLOAT64_SEQLEN) if dtype == torch.float64 else seqlen
            for name, options in cases(n).items():
                case = Case(batch=(BATCH,), num_heads=NUM_HEADS, seqlen_q=n, head_dim=HEAD_DIM, dtype=dtype)
                if "bias" in options:
                    options = options | {"bias_dtype": dtype}
                rows += run_case(name, case.replace(**options))
                advance(f"{dtype_name(dtype)}, {name}")
            if dtype != torch.float64:
                rows += run_module(dtype, seqlen, causal=False) + run_module(dtype, seqlen, causal=True)
            advance(f"{dtype_name(dtype)}, MultiheadAttention")
    return rows
