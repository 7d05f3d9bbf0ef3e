"""Inputs on which other implementations failed in public: performance. Values are checked here and memory in fresh processes, not times."""

import json
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


# Memory: the peak above what the inputs hold, of a call in a fresh process after a small warm-up, in MB.

MEASURE = """
import json, sys
import torch
import tiled_attention as ta

def resident(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(field))

def step(seqlen_q, seqlen_kv, heads, heads_kv, dim, dtype, backward, bias, mask, options):
    query = torch.randn(1, heads, seqlen_q, dim).to(dtype)
    key, value = (torch.randn(1, heads_kv, seqlen_kv, dim).to(dtype) for _ in range(2))
    if bias:
        options["bias"] = torch.randn([{"L": seqlen_q, "S": seqlen_kv}.get(size, size) for size in bias])
    if mask:
        names = {"torch": torch, "Bool": lambda *shape: torch.rand([seqlen_kv if s == "S" else s for s in shape]) < 0.9}
        options["mask"] = eval(mask, vars(ta) | names)
    leaves = [t for t in (query, key, value, options.get("bias")) if t is not None]
    for leaf in leaves:
        leaf.requires_grad_(backward)
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = resident("VmRSS")
    with torch.set_grad_enabled(backward):
        out = ta.attention(query, key, value, **options)
    if backward:
        out.sum().backward()
    return resident("VmHWM") - before

task = json.loads(sys.argv[1])
task["dtype"] = getattr(torch, task["dtype"])
step(**task | dict(seqlen_q=min(64, task["seqlen_q"]), seqlen_kv=64, options=dict(task["options"])))
print(step(**task))
"""


def extra_memory(
    seqlen_q: int, seqlen_kv: int, heads=1, heads_kv=1, dim=32, dtype="float32", backward=False, bias=None, mask=None, **options
) -> float:
    """MB beyond the inputs at the peak of one call."""
    task = {"seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, "heads": heads, "heads_kv": heads_kv, "dim": dim, "dtype": dtype}
    task |= {"backward": backward, "bias": bias, "mask": mask, "options": options}
    done = subprocess.run([sys.executable, "-c", MEASURE, json.dumps(task)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


FORMS = {
    "plain": {},
    "causal": {"mask": "Causal()"},
    "window": {"mask": "SlidingWindow(256, 0)"},
    "key lengths": {"mask": "KeyLengths(torch.tensor([8000]))"},
    "broadcast bool mask": {"mask": "Bool('S')"},
    "broadcast bias": {"bias": ["L", 1]},
    "key bias": {"bias": ["S"]},
    "dropout": {"dropout_p": 0.1},
    "softcap": {"softcap": 5.0},
    "all": {"mask": "Causal() & (SlidingWindow(4000, 0) | Sinks(4))", "bias": ["S"], "dropout_p": 0.1, "softcap": 5.0},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_memory_is_linear_in_the_length(form: str, dtype: str):
    """8192 x 8192 scores are 256 MB in float32, 64 MB as bytes; out, gradients, packed copies and accumulators are below 10 MB."""
    limit = 48
    for backward in (False, True):
        extra = extra_memory(8192, 8192, dtype=dtype, backward=backward, **FORMS[form])
        assert extra < limit, f"{extra:.0f} MB beyond the inputs, {'forward and backward' if backward else 'forward'}"


def test_a9_memory_of_a_bias_gradient():
    """The gradient of a (1, 1, 4096, 4096) float32 bias is 64 MB; nothing else of that size may be there."""
    assert extra_memory(4096, 4096, backward=True, bias=[1, 1, "L", "S"]) < 64 + 32


def test_p3_memory_of_a_window_follows_the_length():
    """65536 x 65536 bytes would be 4 GB."""
    assert extra_memory(65536, 65536, dim=16, backward=True, mask="SlidingWindow(16, 0)") < 100


@pytest.mark.parametrize("seqlen_q", (1, 512))
def test_p5_keys_are_not_expanded_to_the_query_heads(seqlen_q: int):
    """Expanded, 32 heads of 8192 keys and values are 134 MB; the output at 512 queries is 4 MB."""
    assert extra_memory(seqlen_q, 8192, heads=32, heads_kv=2, dim=64) < 40
    assert extra_memory(seqlen_q, 8192, heads=32, heads_kv=2, dim=64, dtype="bfloat16") < 40
