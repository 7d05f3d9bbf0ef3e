"""Measurements that are not one call beside another: modules, threads, memory, overhead, and the cases P1 to P6."""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rows import Row

import tiled_attention as ta
from tiled_attention.compare import machine
from tiled_attention.compare.memory import in_fresh_process
from tiled_attention.compare.speed import naive_attention
from tiled_attention.compare.timing import alternate

Calls = dict[str, Callable[[], object]]


def _normal(*sizes: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(sizes).to(dtype).requires_grad_(grad)


def _timed(row: Row, calls: Calls, rounds: int, seconds: float, results: tuple[torch.Tensor, torch.Tensor] | None) -> Row:
    """Fill in the times of calls "ours" and "theirs" after comparing `results`, which should agree."""
    row.wrong = results is not None and not torch.allclose(*results, rtol=1e-3, atol=1e-4)
    if not row.wrong:
        found = alternate(calls, rounds=rounds, seconds=seconds)
        scale = {"us": 1e6, "ms": 1e3}[row.unit]
        row.ours, row.theirs = found["ours"] * scale, found["theirs"] * scale
    return row


def _module_pair(embed_dim: int, num_heads: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    stock = torch.nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)
    ours = ta.MultiheadAttention(embed_dim, num_heads, batch_first=True)
    ours.load_state_dict(stock.state_dict())
    return ours, stock


def _infer(layer: torch.nn.Module, x: torch.Tensor, need_weights: bool) -> torch.Tensor:
    with torch.no_grad():
        return layer.eval()(x, x, x, need_weights=need_weights)[0]


def _train(layer: torch.nn.Module, x: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    out = layer.train()(x, x, x, need_weights=False)[0]
    return torch.autograd.grad(out, list(layer.parameters()), grad_out)[0]


def module(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """ta.MultiheadAttention against nn.MultiheadAttention, embed_dim 512, 8 heads."""
    with machine.pinned(threads):
        for n, eval_reach, weights_reach, training_reach in ((2048, 1.6, 1.5, 1.2), (512, 1.0, 1.0, 1.0)):
            ours, stock = _module_pair(512, 8)
            x, grad_out = _normal(1, n, 512), _normal(1, n, 512)

            for need_weights, reach in ((False, eval_reach), (True, weights_reach)):
                calls: Calls = {name: partial(_infer, layer, x, need_weights) for name, layer in (("ours", ours), ("theirs", stock))}
                row = Row("module", f"{n} x 512 eval, need_weights={need_weights}", "nn.MultiheadAttention", "ms")
                yield _timed(row, calls, rounds, seconds, (calls["ours"](), calls["theirs"]())).want(at_least=reach)
            calls = {name: partial(_train, layer, x, grad_out) for name, layer in (("ours", ours), ("theirs", stock))}
            row = Row("module", f"{n} x 512 training step", "nn.MultiheadAttention", "ms")
            first, second = calls["ours"](), calls["theirs"]()
            size = second.abs().max()
            yield _timed(row, calls, rounds, seconds, (first / size, second / size)).want(at_least=training_reach)


def _forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object | None = None) -> torch.Tensor:
    with torch.no_grad():
        return ta.attention(query, key, value, mask=mask)


def _backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out, (query, key, value), out, retain_graph=True)


def _on_threads(number: int, call: Callable[[], object]) -> None:
    torch.set_num_threads(number)
    call()


def threads(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """One batch item, one head: all threads against one thread."""
    with machine.pinned(threads):
        for n, mask in itertools.product((1024, 4096), (None, ta.Causal())):
            inputs = [_normal(1, 1, n, 64, grad=True) for _ in range(3)]
            out = ta.attention(*inputs, mask=mask)
            for direction, call in (("forward", partial(_forward, *inputs, mask)), ("backward", partial(_backward, *inputs, out))):
                calls: Calls = {"ours": partial(_on_threads, threads, call), "theirs": partial(_on_threads, 1, call)}
                row = Row(
                    "threads", f"(1, 1, {n}, 64) {'causal' if mask else 'full'} {direction}, {threads} threads", "ours, 1 thread", "ms"
                )
                yield _timed(row, calls, rounds, seconds, None).want(at_least=0.85 * threads)
            torch.set_num_threads(threads)


def memory(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Peak beyond the inputs at n = 16384 against what the arrays that must exist take, and a bias with its gradient."""
    n, head_dim = 16384, 64
    common = {"implementation": "tiled", "n": n, "head_dim": head_dim, "threads": threads, "timed_calls": 0}
    for num_heads in (1, 8):
        for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
            element = n * head_dim
            results = num_heads * element * itemsize * (4 if itemsize == 4 else 5) + 4 * num_heads * n  # out, gradients, residual; lse
            # Packed key and value with their accumulators per thread, and 4 buffers of dk and dv, in float32.
            allowed = results + threads * 4 * element * 4 + 4 * 2 * element * 4
            found = in_fresh_process(**common, num_heads=num_heads, dtype=dtype)
            row = Row("memory", f"(1, {num_heads}, {n}, {head_dim}) {dtype} forward+backward", unit="MiB", ours=found["bytes"] / 2**20)
            yield row.want_value(at_most=allowed / 2**20)
    n, num_heads = 2048, 8
    found = in_fresh_process(**common | {"n": n}, num_heads=num_heads, bias=True)
    matrix, element = num_heads * n * n * 4, n * head_dim * 4
    row = Row("memory", f"(1, {num_heads}, {n}, {head_dim}) bias with gradient", unit="MiB", ours=found["bytes"] / 2**20)
    yield row.want_value(at_most=(matrix + 4 * num_heads * element + threads * 4 * element + 8 * element) / 2**20)


def overhead(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """A call that computes next to nothing."""
    with machine.pinned(threads), torch.no_grad():
        query, key, value = (_normal(1, 1, 1, 8) for _ in range(3))
        calls: Calls = {
            "ours": lambda: ta.attention(query, key, value),
            "theirs": lambda: F.scaled_dot_product_attention(query, key, value),
        }
        row = Row("overhead", "(1, 1, 1, 8), no gradient", "SDPA", "us")
        yield _timed(row, calls, max(rounds, 100), seconds, (calls["ours"](), calls["theirs"]())).want(at_most=2.5)


def p1(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """What asking for weights costs: time, and memory."""
    with machine.pinned(threads), torch.no_grad():
        layer = ta.MultiheadAttention(256, 8, batch_first=True).eval()
        for n in (300, 2048):
            x = _normal(1, n, 256)
            calls: Calls = {"ours": partial(_infer, layer, x, True), "theirs": partial(_infer, layer, x, False)}
            row = Row("P1", f"{n} x 256 with averaged weights", "ours without", "ms")
            yield _timed(row, calls, rounds, seconds, (calls["ours"](), calls["theirs"]()))
    for need_weights in (True, False):
        options = {
            "implementation": "module",
            "n": 2048,
            "num_heads": 8,
            "head_dim": 32,
            "threads": threads,
            "backward": False,
            "timed_calls": 0,
        }
        found = in_fresh_process(**options, need_weights=need_weights)
        row = Row("P1", f"2048 x 256, peak memory, need_weights={need_weights}", unit="MiB", ours=found["bytes"] / 2**20)
        # Averaged weights are one n x n matrix; eight arrays of n x embed_dim are projections, out, and what the pass packs.
        yield row.want_value(at_most=(8 * 2048 * 256 * 4 + (2048 * 2048 * 4 if need_weights else 0)) / 2**20)


def p2(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """One query against matmul, softmax, matmul."""
    with machine.pinned(threads), torch.no_grad():
        for heads in (1, 8, 32):
            for n in (1, 16, 256, 4096, 32768):
                query, key, value = _normal(1, heads, 1, 64), _normal(1, heads, n, 64), _normal(1, heads, n, 64)
                calls: Calls = {"ours": partial(ta.attention, query, key, value), "theirs": partial(naive_attention, query, key, value)}
                row = Row("P2", f"one query, {n} keys, {heads} heads", "matmul, softmax, matmul", "us")
                yield _timed(row, calls, rounds, seconds / 5, (calls["ours"](), calls["theirs"]())).want(at_least=1.0)


def _window(inputs: list[torch.Tensor], window: int, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        out = ta.attention(*inputs, mask=ta.SlidingWindow(window, 0))
    if gradients:
        torch.autograd.grad(out, inputs, out)


def p3(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Time over the window, n = 16384: the slope of log time over log w between neighbours, near 1 where time follows the window."""
    n, windows = 16384, (16, 64, 256, 1024, 16384)
    times: dict[str, dict[str, float]] = {}
    with machine.pinned(threads):
        inputs = [_normal(1, 1, n, 16, grad=True) for _ in range(3)]
        for direction, gradients in (("forward", False), ("forward+backward", True)):
            calls: Calls = {str(window): partial(_window, inputs, window, gradients) for window in windows}
            times[direction] = alternate(calls, rounds=rounds, seconds=2 * seconds)
    for direction, found in times.items():
        for before, window in itertools.pairwise(windows):
            slope = math.log(found[str(window)] / found[str(before)]) / math.log(window / before)
            row = Row("P3", f"{direction}, window {window}: slope from {before} is {slope:.2f}", f"ours, window {before}", "ms")
            row.ours, row.theirs = found[str(window)] * 1e3, found[str(before)] * 1e3
            yield row


def p5(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Grouped heads, 32 over 2, against keys and values expanded beforehand."""
    with machine.pinned(threads), torch.no_grad():
        for seqlen_q in (1, 512):
            query, key, value = _normal(1, 32, seqlen_q, 64), _normal(1, 2, 8192, 64), _normal(1, 2, 8192, 64)
            wide_key, wide_value = key.repeat_interleave(16, 1), value.repeat_interleave(16, 1)
            calls: Calls = {"ours": partial(ta.attention, query, key, value), "theirs": partial(ta.attention, query, wide_key, wide_value)}
            row = Row("P5", f"32 heads over 2, {seqlen_q} queries, 8192 keys", "ours, expanded", "ms")
            yield _timed(row, calls, rounds, seconds, (calls["ours"](), calls["theirs"]())).want(at_least=1.0)


def p6(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """16-bit types against float32 at a small size, forward and backward."""
    with machine.pinned(threads):
        for dtype, direction in itertools.product((torch.float16, torch.bfloat16), ("forward", "backward")):
            calls: Calls = {}
            for name, kind in (("ours", dtype), ("theirs", torch.float32)):
                inputs = [_normal(1, 4, 128, 64, dtype=kind, grad=True) for _ in range(3)]
                backward = partial(_backward, *inputs, ta.attention(*inputs))
                calls[name] = partial(_forward, *inputs) if direction == "forward" else backward
            row = Row("P6", f"(1, 4, 128, 64) {machine.dtype_name(dtype)} {direction}", "ours, float32", "us")
            yield _timed(row, calls, rounds, seconds, None)


def rotary(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Attention that turns query and key by their positions, against attention without."""
    turn = ta.RotaryEmbedding(64)
    with machine.pinned(threads):
        for n, direction in itertools.product((512, 2048, 4096), ("forward", "forward+backward")):
            grad = direction != "forward"
            inputs = [_normal(1, 8, n, 64, grad=grad) for _ in range(3)]
            mask = ta.Causal()

            def call(inputs: list[torch.Tensor] = inputs, grad: bool = grad, **options: Any) -> None:
                out = ta.attention(*inputs, **options)
                if grad:
                    torch.autograd.grad(out.sum(), inputs)

            turned = ta.reference.rotary_embedding(inputs[0], torch.arange(n)), ta.reference.rotary_embedding(inputs[1], torch.arange(n))
            results = ta.attention(*inputs, mask=mask, rotary=turn), ta.attention(*turned, inputs[2], mask=mask)
            calls: Calls = {"ours": partial(call, mask=mask, rotary=turn), "theirs": partial(call, mask=mask)}
            row = Row("rotary", f"(1, 8, {n}, 64) causal {direction}", "ours, without", "ms")
            yield _timed(row, calls, rounds, seconds, results).want(at_most=1.05)


CLAIMS: dict[str, Callable[[int, int, float], Iterator[Row]]] = {
    "module": module,
    "threads": threads,
    "memory": memory,
    "overhead": overhead,
    "P1": p1,
    "P2": p2,
    "P3": p3,
    "P5": p5,
    "P6": p6,
    "rotary": rotary,
}
