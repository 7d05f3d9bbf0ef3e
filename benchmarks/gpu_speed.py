"""Times the operators on a GPU beside F.scaled_dot_product_attention's backends. One JSON object a line; run by gpu.py.

    python benchmarks/gpu_speed.py [--seconds 150]

A result is checked before it is timed: sampled query rows against the definition in float64, and all gradients of a loss on those rows.
Times are medians of calls queued back to back between CUDA events; TFLOP/s count two products forward and five backward over visible
pairs. The ratio is the fastest peer's time over ours. Rows stand in the order of importance; those that the time does not admit are
skipped.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiled_attention as ta

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# A result further away than this share of its largest element is wrong; accuracy itself is what the tests look at.
WRONG = {F32: 1e-4, BF16: 5e-2, F16: 1e-2}
SAMPLED = 128
TOKENS, WIDTH = 16384, 2048  # batch * seqlen and num_heads * head_dim, as FlashAttention-2 reports
MATH_ELEMENTS = 1 << 31  # the most scores that the math backend is asked to hold


@dataclass(frozen=True)
class Shape:
    """One call. window: keys before the query that are seen."""

    operator: str  # exact, linear
    seqlen: int
    head_dim: int
    dtype: torch.dtype = BF16
    causal: bool = False
    bias: bool = False
    window: int | None = None
    dropout_p: float = 0.0
    group: int = 1  # query heads per key head

    @property
    def batch(self) -> int:
        return max(TOKENS // self.seqlen, 1)

    @property
    def num_heads(self) -> int:
        return WIDTH // self.head_dim

    @property
    def name(self) -> str:
        words = [
            self.operator,
            str(self.dtype).removeprefix("torch."),
            f"b{self.batch}",
            f"h{self.num_heads}",
            f"n{self.seqlen}",
            f"d{self.head_dim}",
        ]
        words += [name for name in ("causal", "bias") if getattr(self, name)]
        words += [f"window{self.window}"] if self.window is not None else []
        words += [f"dropout{self.dropout_p}"] if self.dropout_p else []
        words += [f"gqa{self.group}"] if self.group > 1 else []
        return "-".join(words)

    def flops(self, backward: bool) -> float:
        """Multiplications and additions of the products."""
        if self.operator == "linear":  # state and chunks of 64
            return 4.0 * self.batch * self.num_heads * self.seqlen * self.head_dim * (self.head_dim + 64 / 2) * (2.5 if backward else 1)
        pairs: float = self.seqlen**2
        if self.window is not None:
            pairs = self.seqlen * (self.window + 1) - self.window * (self.window + 1) / 2
        elif self.causal:
            pairs = self.seqlen * (self.seqlen + 1) / 2
        return 4.0 * self.batch * self.num_heads * pairs * self.head_dim * (2.5 if backward else 1)


def shapes() -> Iterator[Shape]:
    """Everything that is measured, the most telling first."""
    lengths = (4096, 16384, 1024, 2048, 8192, 512)
    for n in lengths:
        for head_dim in (128, 64):
            for causal in (False, True):
                yield Shape("exact", n, head_dim, causal=causal)
    for head_dim in (64, 128):
        yield Shape("exact", 2048, head_dim, bias=True)
        yield Shape("exact", 8192, head_dim, window=256)
        yield Shape("exact", 4096, head_dim, dropout_p=0.1)
        yield Shape("exact", 4096, head_dim, causal=True, group=4)
        for n in (4096, 16384, 1024):
            for dtype in (BF16, F32):
                yield Shape("linear", n, head_dim, causal=True, dtype=dtype)
    for dtype in (F16, F32):
        for n in lengths:
            for head_dim in (128, 64):
                for causal in (False, True):
                    yield Shape("exact", n, head_dim, causal=causal, dtype=dtype)


@dataclass
class Problem:
    """The tensors of a shape, leaves on the GPU."""

    shape: Shape
    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    bias: Tensor | None

    def leaves(self) -> list[Tensor]:
        return [self.query, self.key, self.value, *([self.bias] if self.bias is not None else [])]


def make_problem(shape: Shape) -> Problem:
    """Contiguous (batch, num_heads, seqlen, head_dim)."""
    torch.manual_seed(0)
    sizes = (shape.batch, shape.num_heads, shape.seqlen, shape.head_dim)
    few = (shape.batch, shape.num_heads // shape.group, *sizes[2:])
    query, key, value = (torch.randn(size, device="cuda", dtype=shape.dtype, requires_grad=True) for size in (sizes, few, few))
    grad_out = torch.randn(sizes, device="cuda", dtype=shape.dtype)
    bias = None
    if shape.bias:
        bias = torch.randn((shape.num_heads, shape.seqlen, shape.seqlen), device="cuda", requires_grad=True)
    return Problem(shape, query, key, value, grad_out, bias)


def ours(p: Problem) -> Tensor:
    """The operator."""
    shape = p.shape
    if shape.operator == "linear":
        return ta.linear_attention(p.query, p.key, p.value, causal=shape.causal)
    mask = ta.SlidingWindow(shape.window, 0) if shape.window is not None else ta.Causal() if shape.causal else None
    return ta.attention(p.query, p.key, p.value, mask=mask, bias=p.bias, dropout_p=shape.dropout_p)


def sdpa(p: Problem, mask: Tensor | None) -> Tensor:
    """PyTorch's, called the way its fast paths want."""
    causal = p.shape.causal and mask is None
    gqa = {"enable_gqa": True} if p.shape.group > 1 else {}
    return F.scaled_dot_product_attention(p.query, p.key, p.value, mask, p.shape.dropout_p, causal, **gqa)


def sdpa_mask(p: Problem) -> Tensor | None:
    """What SDPA needs where it has no option for it."""
    if p.bias is not None:
        return p.bias.to(p.shape.dtype)
    if p.shape.window is not None:
        i = torch.arange(p.shape.seqlen, device="cuda")
        return (i <= i[:, None]) & (i >= i[:, None] - p.shape.window)
    return None


def sampled_rows(shape: Shape) -> Tensor:
    """Query rows that are checked; for linear attention, whose definition is a prefix, the first ones."""
    if shape.operator == "linear":
        return torch.arange(min(shape.seqlen, 1024), device="cuda")
    return torch.linspace(0, shape.seqlen - 1, min(SAMPLED, shape.seqlen), device="cuda").long()


def definition(p: Problem, rows: Tensor, item: int, kept: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """out of one batch item at `rows` and the gradients of sum(out * grad_out[rows]), in float64."""
    shape = p.shape
    leaves = [leaf.detach()[item].double() for leaf in (p.query, p.key, p.value)] + (
        [p.bias.detach().double()] if p.bias is not None else []
    )
    for leaf in leaves:
        leaf.requires_grad_()
    query, key, value = leaves[0][:, rows], *(leaf.repeat_interleave(shape.group, 0) for leaf in leaves[1:3])
    if shape.operator == "linear":
        key, value = key[:, : len(rows)], value[:, : len(rows)]
        weight = (F.elu(query) + 1) @ (F.elu(key) + 1).mT
        weight = weight.tril()
        out = (weight / weight.sum(-1, keepdim=True)) @ value
    else:
        score = query @ key.mT / math.sqrt(shape.head_dim)
        if p.bias is not None:
            score = score + leaves[3][:, rows]
        j = torch.arange(shape.seqlen, device="cuda")
        if shape.causal or shape.window is not None:
            score = score.masked_fill(j > rows[:, None], -math.inf)
        if shape.window is not None:
            score = score.masked_fill(j < rows[:, None] - shape.window, -math.inf)
        weight = score.softmax(-1)
        if kept is not None:
            weight = torch.where(kept[item][:, rows], weight / (1 - round(shape.dropout_p * 65536) / 65536), 0.0)
        out = weight @ value
    grads = torch.autograd.grad((out * p.grad_out[item][:, rows].double()).sum(), leaves)
    return out.detach(), list(grads)


def wrong(p: Problem) -> str:
    """Empty where the first and the last batch item are right."""
    shape = p.shape
    rows = sampled_rows(shape)
    kept = None
    if shape.dropout_p:
        torch.manual_seed(1)
        kept = ta.dropout_mask(shape.batch, shape.num_heads, shape.seqlen, shape.seqlen, shape.dropout_p, device="cuda")
    torch.manual_seed(1)
    out = ours(p)
    for item in {0, shape.batch - 1}:
        masked = torch.zeros_like(p.grad_out)
        masked[item, :, rows] = p.grad_out[item, :, rows]
        grads = torch.autograd.grad(out, p.leaves(), masked, retain_graph=True)
        exact_out, exact_grads = definition(p, rows, item, kept)
        got = [out.detach()[item][:, rows], *(grad[item] for grad in grads[:3]), *grads[3:]]
        for name, mine, exact in zip(("out", "query", "key", "value", "bias"), got, [exact_out, *exact_grads]):
            distance = float((mine.double() - exact).abs().max())
            if not distance <= WRONG[shape.dtype] * float(exact.abs().max()):
                return f"{name} of batch item {item} is {distance:.3g} off, largest {float(exact.abs().max()):.3g}"
    return ""


def milliseconds(call: Callable[[], object], seconds: float) -> float:
    """Median over calls that are queued together, at least 3 and at most 50."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = min(max(int(seconds / max(time.perf_counter() - start, 1e-6)), 3), 50)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(second) for first, second in itertools.pairwise(events))


@dataclass
class Row:
    """One shape in one direction; times in ms, or why there is none."""

    shape: str
    direction: str
    ours_ms: float | None = None
    ours_tflops: float | None = None
    peers_ms: dict[str, float] = field(default_factory=dict)
    peers_tflops: dict[str, float] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    best_peer: str | None = None
    ratio: float | None = None
    wrong: str = ""


def timed(p: Problem, function: Callable[[Problem], Tensor], backward: bool, seconds: float) -> float:
    """Forward alone without gradients, or backward alone on a kept graph."""
    if not backward:
        with torch.no_grad():
            return milliseconds(lambda: function(p), seconds)
    out = function(p)
    return milliseconds(lambda: torch.autograd.grad(out, p.leaves(), p.grad_out, retain_graph=True), seconds)


def peers(p: Problem) -> dict[str, Callable[[Problem], Tensor]]:
    """SDPA by backend. Linear attention has none: it stands beside causal softmax attention of the same shape."""
    mask = sdpa_mask(p)

    def on(backend: SDPBackend) -> Callable[[Problem], Tensor]:
        def run(problem: Problem) -> Tensor:
            # The mask with gradient is cast anew, so that its graph is that of this call.
            given = problem.bias.to(problem.shape.dtype) if problem.bias is not None else mask
            with sdpa_kernel(backend):
                return sdpa(problem, given)

        return run

    scores = p.shape.batch * p.shape.num_heads * p.shape.seqlen**2
    return {name: on(backend) for name, backend in BACKENDS.items() if name != "math" or scores <= MATH_ELEMENTS}


def measure(shape: Shape, seconds: float) -> Iterator[Row]:
    """Both directions, or one row that says what is wrong."""
    p = make_problem(shape)
    problem = wrong(p)
    if problem:
        yield Row(shape.name, "both", wrong=problem)
        return
    for backward in (False, True):
        row = Row(shape.name, ("forward", "backward")[backward])
        flops = shape.flops(backward)
        row.ours_ms = timed(p, ours, backward, seconds)
        row.ours_tflops = flops / row.ours_ms / 1e9
        for name, function in peers(p).items():
            try:
                row.peers_ms[name] = timed(p, function, backward, seconds)
                row.peers_tflops[name] = flops / row.peers_ms[name] / 1e9
            except (RuntimeError, NotImplementedError) as error:
                row.unavailable[name] = str(error).strip().splitlines()[0][:200]
                torch.cuda.empty_cache()
        if row.peers_ms:
            row.best_peer = min(row.peers_ms, key=row.peers_ms.__getitem__)
            row.ratio = row.peers_ms[row.best_peer] / row.ours_ms
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="no shape starts after these (default: 150)")
    parser.add_argument("--each", type=float, default=0.08, help="seconds for one timing (default: 0.08)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 1
    start, failed = time.monotonic(), False
    for shape in shapes():
        if time.monotonic() - start > arguments.seconds:
            print(json.dumps({"shape": shape.name, "skipped": "out of time"}), flush=True)
            continue
        rows: list[Any]
        try:
            rows = [vars(row) for row in measure(shape, arguments.each)]
        except (RuntimeError, NotImplementedError) as error:
            rows = [{"shape": shape.name, "wrong": str(error).strip()[:500]}]
        failed = failed or any(row["wrong"] for row in rows)
        for row in rows:
            print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
