"""Checks the operators on cuda without a device: run by check_cuda.py in an environment with a CUDA build of torch.

Every operator has a CUDA kernel of the library (not a refusal in its place); it and its backward formulas trace with fake tensors on cuda
and keep shapes, dtypes and strides; torch.compile captures one graph that holds the operator; calls without a device and tensors of two
devices fail with a message. torch's autograd engine asks the driver for the device's context, so that formulas are called here without it,
and no backward graph is captured. Prints one line per check; exits with 1 if one fails.
"""

import contextlib
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import tiled_attention as ta
from tiled_attention import additive_autograd, autograd, call, library, linear_autograd, linear_call, varlen_autograd
from tiled_attention.testing import DTYPES

ops = torch.ops.tiled_attention
# Operators without tensors of a device.
OF_NO_DEVICE = {"_isa", "_available_isas", "_set_isa", "_peak", "_poison", "_cuda_architectures", "_cuda_poison"}
# Tensors on CUDA do not reach these: there the parts of a residue mask are merged after their kernels.
OF_CPU = {"_attention_fwd_add_", "_attention_bwd_add_"}


def operators() -> list[str]:
    """Every operator of the library that has tensors on CUDA, by the dispatcher's own list."""
    schemas = torch._C._jit_get_all_schemas()
    return sorted({schema.name.partition("::")[2] for schema in schemas if schema.name.startswith("tiled_attention::")} - OF_NO_DEVICE - OF_CPU)


def check_registrations() -> None:
    """A kernel under the key CUDA from the CUDA library, or a composite of operators that have one."""
    assert library.cuda_problem == "", library.cuda_problem
    names = operators()
    assert len(names) >= 11, names
    for name in names:
        qualified = f"tiled_attention::{name}"
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeExplicitAutograd")
        assert composite or torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CUDA"), f"{qualified} has no CUDA kernel"
        if not composite:
            found = [line for line in torch._C._dispatch_dump(qualified).splitlines() if re.match(r"CUDA\b", line)]
            assert found and "library.py" not in found[0], f"{qualified}: {found}"
    print("   ", ", ".join(names))


def check_architectures() -> None:
    """The library names what it was compiled for."""
    assert re.fullmatch(r"sm_\d+\w?( sm_\d+\w?)* compute_\d+\w?", ops._cuda_architectures()), ops._cuda_architectures()


def inputs(dtype: torch.dtype, rows: int = 40, keys: int = 50, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Four query heads on two key heads, heads beside the sequence in memory as a projection leaves them."""
    made = [torch.empty(2, n, heads, 64, dtype=dtype, device="cuda").transpose(1, 2) for n, heads in ((rows, 4), (keys, 2), (keys, 2))]
    query, key, value = (tensor.detach().requires_grad_(grad) for tensor in made)
    return query, key, value


def options(real: torch.dtype) -> dict[str, dict[str, Any]]:
    """Arguments of ta.attention by name, on cuda."""
    new = lambda *shape: torch.empty(shape, dtype=real, device="cuda", requires_grad=True)
    return {
        "plain": {},
        "causal": {"mask": ta.Causal()},
        "streaming": {"mask": ta.Causal() & (ta.SlidingWindow(7, 0) | ta.Sinks(3))},
        "bool": {"mask": torch.empty(2, 1, 40, 50, dtype=torch.bool, device="cuda")},
        "lengths": {"mask": ta.KeyLengths(torch.empty(2, dtype=torch.int64, device="cuda"))},
        "bias": {"bias": new(4, 40, 50), "alibi_slopes": new(4), "sinks": new(4), "softcap": 20.0},
        "dropout": {"dropout_p": 0.1},
        "by distance": {"bias": new(4, 1, 40 + 50 - 1)},
        "strided": {"mask": ta.Causal() & (ta.Strided(8) | ta.SlidingWindow(7, 0))},
        "blocks": {"mask": ta.BlockSparse(torch.empty(3, 4, dtype=torch.bool, device="cuda"), 16)},
    }


def expect_like(name: str, got: Tensor, like: Tensor) -> None:
    """On cuda, with the dtype and shape of `like`."""
    assert got.device.type == "cuda", f"{name} is on {got.device}"
    assert got.dtype == like.dtype and got.shape == like.shape, f"{name}: {got.dtype} {tuple(got.shape)}"


class Context:
    """What an autograd function keeps for its backward."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


@contextlib.contextmanager
def without_engine(holder: Any, name: str, function: Any, unpacked: bool = False) -> Iterator[list[Any]]:
    """Inside, `holder.name(args)`, `unpacked` (*args), is the autograd function's forward and appends (args, outputs) to the result."""
    calls: list[Any] = []

    def record(*given: Any) -> Any:
        args = given if unpacked else given[0]
        outputs = function.forward(*args)
        calls.append((args, outputs))
        return outputs

    with mock.patch.object(holder, name, record):
        yield calls


def gradients(function: Any, args: Any, outputs: Any) -> list[tuple[Any, Any]]:
    """(argument, its gradient) of every argument that asks for one, by the formula of `function`."""
    context = Context(tuple(isinstance(arg, Tensor) and arg.requires_grad for arg in args))
    function.setup_context(context, args, outputs)
    with torch.no_grad():
        found = function.backward(context, *(torch.empty_like(output) for output in outputs))
    return [(arg, gradient) for arg, gradient, needed in zip(args, found, context.needs_input_grad) if needed]


def check_exact_traces() -> None:
    """Forward and backward of ta.attention and ta.attention_weights."""
    for dtype in DTYPES:
        real = torch.float64 if dtype == torch.float64 else torch.float32
        with FakeTensorMode(allow_non_fake_inputs=True):
            for name, given in options(real).items():
                query, key, value = inputs(dtype)
                with without_engine(call, "record_attention", autograd.Attention) as calls:
                    out, lse = ta.attention(query, key, value, return_lse=True, **given)
                expect_like(f"{name}: out", out, query)
                assert out.stride() == query.stride(), f"{name}: out has strides {out.stride()}, query {query.stride()}"
                assert lse.shape == (2, 4, 40) and lse.dtype == real and lse.device.type == "cuda"
                ((args, outputs),) = calls
                found = gradients(autograd.Attention, args, outputs)
                assert len(found) == 3 + sum(isinstance(t, Tensor) and t.requires_grad for t in given.values())
                for place, (leaf, gradient) in enumerate(found):
                    expect_like(f"{name}: gradient {place}", gradient, leaf)
                    assert place > 2 or gradient.stride() == leaf.stride(), f"{name}: {gradient.stride()}"
            query, key, _ = inputs(dtype, grad=False)
            weights = ta.attention_weights(query, key, mask=ta.Causal())
            assert weights.shape == (2, 4, 40, 50) and weights.device.type == "cuda"
            kept = ta.dropout_mask(2, 4, 40, 50, 0.1, device="cuda")
            assert kept.device.type == "cuda" and kept.dtype == torch.bool


def linear_options(real: torch.dtype) -> dict[str, dict[str, Any]]:
    """Arguments of ta.linear_attention by name, on cuda."""
    new = lambda *shape: torch.empty(shape, dtype=real, device="cuda", requires_grad=True)
    return {
        "all keys": {},
        "decay per token": {"causal": True, "log_decay": new(2, 2, 40)},
        "state": {
            "causal": True,
            "log_decay": new(2, 2, 40, 64),
            "initial_state": ta.LinearState(new(2, 2, 64, 64), new(2, 2, 64)),
        },
        "padding": {"causal": True, "key_mask": torch.empty(2, 40, dtype=torch.bool, device="cuda"), "normalize": False},
    }


def check_linear_traces() -> None:
    """Forward and backward of ta.linear_attention, and its step."""
    function = linear_autograd.LinearAttention
    for dtype in DTYPES:
        real = torch.float64 if dtype == torch.float64 else torch.float32
        with FakeTensorMode(allow_non_fake_inputs=True):
            for name, given in linear_options(real).items():
                query, key, value = inputs(dtype, 40, 40)
                with without_engine(linear_call, "record_linear_attention", function) as calls:
                    out, state = ta.linear_attention(query, key, value, return_state=True, **given)
                expect_like(f"{name}: out", out, query)
                assert state.kv.shape == (2, 2, 64, 64) and state.kv.dtype == real and state.kv.device.type == "cuda"
                ((args, outputs),) = calls
                found = gradients(function, args, outputs)
                assert len(found) >= 3
                for place, (leaf, gradient) in enumerate(found):
                    expect_like(f"{name}: gradient {place}", gradient, leaf)
            query, key, value = inputs(dtype, 1, 1, grad=False)
            sizes = ((2, 2, 64, 64), (2, 2, 64))
            state = ta.LinearState(*(torch.empty(size, dtype=real, device="cuda") for size in sizes))
            for inplace in (False, True):
                out, after = ta.linear_attention_step(query, key, value, state, inplace=inplace)
                expect_like("out", out, query)
                assert (after.kv is state.kv) == inplace


def check_varlen_traces() -> None:
    """Forward and backward of ta.attention_varlen."""
    function, module = varlen_autograd.AttentionVarlen, importlib.import_module("tiled_attention.attention_varlen")
    for dtype in DTYPES:
        with FakeTensorMode(allow_non_fake_inputs=True):
            query, key, value = (
                torch.empty(n, heads, 64, dtype=dtype, device="cuda", requires_grad=True) for n, heads in ((40, 4), (50, 2), (50, 2))
            )
            offsets = torch.empty(4, dtype=torch.int32, device="cuda")
            with without_engine(module, "record_attention_varlen", function) as calls:
                out, lse = ta.attention_varlen(
                    query, key, value, offsets, offsets, 20, 30, mask=ta.Causal(), dropout_p=0.1, return_lse=True
                )
            expect_like("out", out, query)
            assert lse.shape == (4, 40) and lse.device.type == "cuda"
            ((args, outputs),) = calls
            for place, (leaf, gradient) in enumerate(gradients(function, args, outputs)):
                expect_like(f"gradient {place}", gradient, leaf)


def check_additive_traces() -> None:
    """Forward and backward of ta.additive_attention, and its weights."""
    function = additive_autograd.AdditiveAttention
    for dtype in DTYPES:
        real = torch.float64 if dtype == torch.float64 else torch.float32
        with FakeTensorMode(allow_non_fake_inputs=True):
            query, key, value = inputs(dtype)
            weight = torch.empty(4, 64, dtype=real, device="cuda", requires_grad=True)
            with without_engine(function, "apply", function, unpacked=True) as calls:
                out, lse = ta.additive_attention(query, key, value, weight, mask=ta.Causal(), return_lse=True)
            expect_like("out", out, query)
            assert lse.shape == (2, 4, 40) and lse.dtype == real
            ((args, outputs),) = calls
            found = gradients(function, args, outputs)
            assert len(found) == 4
            for place, (leaf, gradient) in enumerate(found):
                expect_like(f"gradient {place}", gradient, leaf)
            weights = ta.additive_attention_weights(query.detach(), key.detach(), weight.detach())
            assert weights.shape == (2, 4, 40, 50) and weights.device.type == "cuda"


def check_decode_traces() -> None:
    """Append and attend of every kind of cache."""
    kinds: dict[str, dict[str, Any]] = {"contiguous": {}, "paged": {"page_size": 16}, "rolling": {"window": 24}}
    for dtype in DTYPES:
        with FakeTensorMode(allow_non_fake_inputs=True):
            for name, given in kinds.items():
                cache = ta.KVCache(2, 2, 64, 64, dtype=dtype, device="cuda", **given)
                query, key, value = inputs(dtype, 3, 3, grad=False)
                expect_like(f"{name}: out", cache.attend(query, key, value, mask=ta.Causal()), query)


def check_family_traces() -> None:
    """What is made of other operators: rotary positions, Luong, Gaussian and LSH attention."""
    for dtype in DTYPES:
        with FakeTensorMode(allow_non_fake_inputs=True):
            query, key, value = inputs(dtype, 64, 64, grad=False)
            rotary = ta.RotaryEmbedding(64).to("cuda")
            for got, like in zip(rotary(query, key), (query, key)):
                expect_like("rotary", got, like)
            expect_like("attention with rotary", ta.attention(query, key, value, rotary=rotary), query)
            expect_like("luong", ta.luong_attention(query, key, value, "general", torch.empty(64, 64, dtype=dtype, device="cuda")), query)
            expect_like("gaussian", ta.gaussian_attention(query, key, value, 2.0), query)
            expect_like("lsh", ta.lsh_attention(key, value, num_hashes=2, bucket_size=16, causal=True, seed=0), key)


def functions() -> Iterator[tuple[str, Callable[..., Tensor], str, int]]:
    """Name, function of query, key and value, the operator in its graph, and the number of keys."""
    yield "attention", lambda q, k, v: ta.attention(q, k, v, mask=ta.Causal(), softcap=20.0), "attention", 50
    yield "dropout", lambda q, k, v: ta.attention(q, k, v, dropout_p=0.1), "attention", 50
    yield "drop-in", lambda q, k, v: ta.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), "attention", 50
    yield "linear", lambda q, k, v: ta.linear_attention(q, k, v, causal=True), "linear_attention", 40
    yield "additive", lambda q, k, v: ta.additive_attention(q, k, v, torch.ones(64, device=q.device)), "additive_attention", 50
    rotary = ta.RotaryEmbedding(64)
    yield "rotary", lambda q, k, v: ta.attention(q, k, v, rotary=rotary), "attention", 50


def check_compile_captures() -> None:
    """fullgraph=True through dynamo and AOT autograd, on fake tensors of cuda."""
    for name, function, operator, keys in functions():
        torch._dynamo.reset()
        found: list[str] = []

        def keep(graph: torch.fx.GraphModule, _: Any, found: list[str] = found) -> Any:
            found += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            return graph.forward

        with FakeTensorMode(), torch.no_grad():
            tensors = inputs(torch.bfloat16, 40, keys, grad=False)
            out = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*tensors)
        expect_like(f"{name}: out", out, tensors[0])
        assert any(f"tiled_attention.{operator}." in target for target in found), f"{name}: no {operator} in {found}"


def check_messages() -> None:
    """No device: torch's own error, before any kernel of ours; tensors of two devices: ours, naming the argument."""
    assert not torch.cuda.is_available()
    try:
        torch.empty(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        assert "CUDA" in str(error) or "NVIDIA" in str(error), error
    else:
        raise AssertionError("a tensor on cuda without a device")
    with FakeTensorMode():
        query, key, value = inputs(torch.bfloat16, grad=False)
        for name, wrong in {
            "key": lambda: ta.attention(query, torch.empty(key.shape, dtype=key.dtype), value),
            "bias": lambda: ta.attention(query, key, value, bias=torch.empty(40, 50)),
            "value": lambda: ta.linear_attention(query, key, torch.empty(value.shape, dtype=value.dtype)),
        }.items():
            try:
                wrong()
            except (ValueError, RuntimeError) as error:
                assert name in str(error) and "cuda" in str(error) and "cpu" in str(error), f"{name}: {error}"
            else:
                raise AssertionError(f"{name} on another device is accepted")


def check_cpu() -> None:
    """The same process still computes on the CPU."""
    query = torch.randn(1, 2, 9, 8)
    torch.testing.assert_close(ta.attention(query, query, query), torch.nn.functional.scaled_dot_product_attention(query, query, query))


def main() -> int:
    print(f"    torch {torch.__version__}, CUDA {torch.version.cuda}, {library.cuda_path}")
    failed = 0
    for name, check in (
        ("registrations", check_registrations),
        ("architectures", check_architectures),
        ("exact attention traces", check_exact_traces),
        ("linear attention traces", check_linear_traces),
        ("packed sequences traces", check_varlen_traces),
        ("additive attention traces", check_additive_traces),
        ("decode traces", check_decode_traces),
        ("traces of the rest of the family", check_family_traces),
        ("compile graphs", check_compile_captures),
        ("messages", check_messages),
        ("CPU", check_cpu),
    ):
        try:
            check()
            print(f"  ok    {name}", flush=True)
        except Exception:
            failed += 1
            print(f"  FAIL  {name}\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
