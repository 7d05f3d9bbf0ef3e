"""Inputs on which other implementations failed in public: performance. Values are checked here and memory in fresh processes, not times."""

import json
import os
import subprocess
import sys

import pytest
import torch

import tiled_attention as ta
from oracle import exact, tolerance
from tiled_attention.testing import DTYPES, assert_accurate, largest, rounding

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("heads,n", ((1, 1), (8, 256), (32, 4096)))
@by_dtype
def test_p2_a_one_token_query(heads: int, n: int, dtype: torch.dtype, isa: str):
    query, key, value = (torch.randn(1, heads, m, 64).to(dtype) for m in (1, n, n))
    want = exact(query, key, value)
    assert_accurate(ta.attention(query, key, value), want, tolerance(dtype, largest(want)), "out")


@pytest.mark.parametrize("width", (16, 256))
def test_p3_a_window(width: int, isa: str):
    x = torch.randn(1, 1, 4096, 16)
    out = ta.attention(x, x, x, mask=ta.SlidingWindow(width, 0))
    want = exact(x[:, :, -1:], x[:, :, -1 - width :], x[:, :, -1 - width :])
    assert_accurate(out[:, :, -1:], want, tolerance(torch.float32, largest(want)), "out")


@by_dtype
def test_p5_grouped_heads_equal_the_expanded_ones(dtype: torch.dtype, isa: str):
    query, key, value = torch.randn(1, 32, 1, 64).to(dtype), torch.randn(1, 2, 1024, 64).to(dtype), torch.randn(1, 2, 1024, 64).to(dtype)
    want = exact(query, key, value)
    for repeats in (1, 16):
        out = ta.attention(query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))
        assert_accurate(out, want, tolerance(dtype, largest(want)), "out")


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_p6_sixteen_bits(dtype: torch.dtype, isa: str):
    query, key, value = (torch.randn(1, 4, 128, 64).to(dtype) for _ in range(3))
    out, want = ta.attention(query, key, value), exact(query, key, value)
    floor = (want.to(dtype).double() - want).abs().max()
    assert out.dtype == dtype and (out.double() - want).abs().max() <= 1.5 * floor and floor <= rounding(want, dtype)


# Memory: peaks above what the inputs hold, in MB, of calls in a fresh process. glibc gives every block above 64 KB back when it is freed.

MEASURE = """
import json, sys
import torch
import tiled_attention as ta

def resident(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(field))

def step(seqlen_q, seqlen_kv, heads=1, heads_kv=1, dim=32, dtype="float32", backward=True, bias=None, mask=None, **options):
    dtype = getattr(torch, dtype)
    query = torch.randn(1, heads, seqlen_q, dim).to(dtype)
    key, value = (torch.randn(1, heads_kv, seqlen_kv, dim).to(dtype) for _ in range(2))
    if bias:
        options["bias"] = torch.randn([{"L": seqlen_q, "S": seqlen_kv, "D": seqlen_q + seqlen_kv - 1}.get(size, size) for size in bias])
    if mask:
        names = {"torch": torch, "Bool": lambda *shape: torch.rand([seqlen_kv if s == "S" else s for s in shape]) < 0.9}
        options["mask"] = eval(mask, vars(ta) | names)
    for leaf in (query, key, value, options.get("bias")):
        if leaf is not None:
            leaf.requires_grad_(backward)
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = resident("VmRSS")
    with torch.set_grad_enabled(backward):
        out = ta.attention(query, key, value, **options)
    if backward:
        out.sum().backward()
    return resident("VmHWM") - before

tasks = json.loads(sys.argv[1])
for task in tasks:
    step(**task | dict(seqlen_q=min(64, task["seqlen_q"]), seqlen_kv=64))
print(json.dumps([step(**task) for task in tasks]))
"""


def extra_memory(*tasks: dict[str, object]) -> list[float]:
    """MB beyond the inputs at the peak of each call."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", MEASURE, json.dumps(tasks)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


FORMS = {
    "plain": {},
    "causal": {"mask": "Causal()"},
    "window": {"mask": "SlidingWindow(256, 0)"},
    "key lengths": {"mask": "KeyLengths(torch.tensor([4000]))"},
    "broadcast bool mask": {"mask": "Bool('S')"},
    "broadcast bias": {"bias": ["L", 1]},
    "key bias": {"bias": ["S"]},
    "dropout": {"dropout_p": 0.1},
    "softcap": {"softcap": 5.0},
    "all": {"mask": "Causal() & (SlidingWindow(2000, 0) | Sinks(4))", "bias": ["S"], "dropout_p": 0.1, "softcap": 5.0},
}


@pytest.mark.parametrize("backward", (False, True), ids=("forward", "backward"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_memory_is_linear_in_the_length(dtype: str, backward: bool):
    """4096 x 4096 scores are 64 MB in float32, 16 MB as bytes; out, gradients, packed copies and accumulators together about 6 MB."""
    tasks = [{"seqlen_q": 4096, "seqlen_kv": 4096, "dtype": dtype, "backward": backward, **form} for form in FORMS.values()]
    extra = dict(zip(FORMS, extra_memory(*tasks), strict=True))
    assert all(size < 14 for size in extra.values()), f"MB beyond the inputs: {extra}"


def test_a9_memory_of_a_bias_gradient():
    """The gradient of a (1, 1, 4096, 4096) float32 bias is 64 MB; nothing else of that size may be there."""
    (extra,) = extra_memory({"seqlen_q": 4096, "seqlen_kv": 4096, "bias": [1, 1, "L", "S"]})
    assert extra < 64 + 14


def test_memory_of_relative_positions():
    """A bias by distance and its gradient hold 8191 elements, not 4096 x 4096."""
    (extra,) = extra_memory({"seqlen_q": 4096, "seqlen_kv": 4096, "bias": [1, 1, 1, "D"]})
    assert extra < 14


def test_p3_memory_of_a_window_follows_the_length():
    """65536 x 65536 bytes would be 4 GB; out and gradients are 16 MB, packed keys and values and their buffers about 60."""
    (extra,) = extra_memory({"seqlen_q": 65536, "seqlen_kv": 65536, "dim": 16, "mask": "SlidingWindow(16, 0)"})
    assert extra < 100


def test_p5_keys_are_not_expanded_to_the_query_heads():
    """Expanded, 32 heads of 8192 keys and values are 134 MB in float32; the output at 512 queries is 4 MB."""
    shape = {"seqlen_kv": 8192, "heads": 32, "heads_kv": 2, "dim": 64, "backward": False}
    tasks = [{**shape, "seqlen_q": seqlen_q, "dtype": dtype} for seqlen_q in (1, 512) for dtype in ("float32", "bfloat16")]
    extra = extra_memory(*tasks)
    assert all(size < 40 for size in extra), f"MB beyond the inputs: {extra}"
