"""float32 attention where products may round their operands to tf32: tensor cores do, CPUs do not."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
import tf32
import tiled_attention as ta
from checks import same_bits
from tiled_attention import autograd, call, residues
from tiled_attention.arguments import Arguments
from tiled_attention.testing import Case, Inputs, assert_accurate, largest
from tiled_attention.weights import weights_of

ops = torch.ops.tiled_attention
emulated = pytest.mark.skipif(ops._isa() != "emulated", reason="needs TILED_ATTENTION_LIBRARY to name the emulated CUDA kernels")
WIDE = Case(batch=(1,), num_heads=2, num_heads_kv=1, seqlen_q=40, seqlen_kv=70, head_dim=32, mask="Causal()")


def arguments(x: Inputs, allow_tf32: bool = True) -> Arguments:
    """Those of the operators, as ta.attention would have them for a CUDA tensor."""
    names = ("mask", "bias", "scale", "softcap", "alibi_slopes", "sinks")
    prepared = call.prepare(x.query, x.key, x.value, *(getattr(x, name) for name in names), x.dropout_p, None, x.query_offset)
    return prepared._replace(allow_tf32=allow_tf32)


def run(x: Inputs, grad_out: Tensor, grad_lse: Tensor | None = None, allow_tf32: bool = True, seed: int = 0) -> dict[str, Tensor]:
    """out, lse, and the gradient of every input by its name."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    out, lse = call.forward(arguments(x, allow_tf32))
    outputs, grads = ([out], [grad_out]) if grad_lse is None else ([out, lse], [grad_out, grad_lse])
    leaves = x.leaves()
    return {
        "out": out.detach(),
        "lse": lse.detach(),
        **dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), grads), strict=True)),
    }


def expect_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in a:
        assert same_bits(a[name], b[name]), f"{name}: other bits, by {largest(a[name] - b[name]):.1e}"


@pytest.mark.skipif(ops._isa() == "emulated", reason="of the CPU")
def test_of_no_effect_on_a_cpu(isa: str):
    x = WIDE.inputs()
    grad_out = torch.randn_like(x.query)
    expect_same(run(x, grad_out), run(x, grad_out, allow_tf32=False))


@emulated
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", tf32.CASES, ids=lambda case: case.id)
def test_within_what_rounding_can_do(case: Case):
    want = oracle.expected(case)
    x, grad_out = tf32.rounded_inputs(case), tf32.rounded(want.grad_out)
    exact = oracle.attention_and_gradients(x, grad_out, want.grad_lse, want.kept)
    got = run(x, grad_out, want.grad_lse, seed=case.seed)
    for name, limit in tf32.limits(x, exact, grad_out, want.grad_lse, want.kept).items():
        tf32.assert_within(got[name], exact[name], limit, name)


@emulated
def test_operands_are_rounded_to_nearest():
    """The same bits from operands that were rounded before, ties included; and other bits than without tf32."""
    x = WIDE.inputs()
    for tensor in (x.query, x.key, x.value):
        bits = tensor.view(torch.int32)
        bits[..., ::3] = (bits[..., ::3] & ~0x1FFF) | 0x1000
    before = x.clone(query=tf32.rounded(x.query), key=tf32.rounded(x.key), value=tf32.rounded(x.value))
    grad_out = tf32.rounded(torch.randn_like(x.query))
    got = run(x, grad_out)
    expect_same(got, run(before, grad_out))
    plain = run(x, grad_out, allow_tf32=False)
    for name in got:
        assert largest(got[name] - plain[name]) > 1e-4 * largest(plain[name]), f"{name} is that of float32"


@emulated
@pytest.mark.parametrize("hidden", (math.nan, -math.inf, torch.finfo(torch.float32).max))
def test_what_is_hidden_is_not_multiplied(hidden: float):
    """The largest float rounds to inf."""
    case = WIDE.replace(mask="KeyLengths((30,))", hidden=hidden)
    grad_out = torch.randn(1, 2, 40, 32)
    expect_same(run(case.inputs(), grad_out), run(case.replace(hidden=0.0).inputs(), grad_out))


@emulated
def test_what_is_visible_and_not_finite_shows():
    x = WIDE.inputs()
    x.value[..., 5, 3], x.value[..., 60, 4] = math.inf, math.nan
    grad_out = torch.randn_like(x.query)
    got, plain = run(x, grad_out), run(x, grad_out, allow_tf32=False)
    for name in ("out", "query", "key", "value"):
        assert torch.equal(got[name].isfinite(), plain[name].isfinite()), name
    assert not got["out"].isfinite().all() and got["out"][..., 5].isfinite().all()


@emulated
def test_the_backward_pass_uses_what_the_forward_pass_did():
    x, grad_out = WIDE.inputs(), torch.randn(1, 2, 40, 32)
    got = run(x, grad_out)
    args = arguments(x)
    out, lse, residual = ops.attention_fwd(*args, True)
    for allowed in (True, False):
        again = ops.attention_bwd(grad_out, None, *args._replace(allow_tf32=allowed), out, lse, residual, 7)
        assert all(same_bits(got[name], again[at]) == allowed for at, name in enumerate(("query", "key", "value")))


@emulated
@pytest.mark.parametrize("spread", (1.0, 12.0))
def test_weights_are_those_of_the_scores(spread: float):
    """Their rows sum to 1, where scores are large, too: then each rounding of a score would show."""
    x = WIDE.replace(spread=spread).inputs()
    args = arguments(x)
    _, lse = call.forward(args)
    assert spread == 1 or largest(lse) > 100
    weights = weights_of(args, lse)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 40), atol=2e-6, rtol=0)
    exact = oracle.attention(tf32.rounded_inputs(WIDE.replace(spread=spread)))[1]
    assert_accurate(lse, exact, oracle.tolerance(torch.float32, largest(exact)), "lse")
    assert spread > 1 or not same_bits(weights, weights_of(args._replace(allow_tf32=False), lse))


@emulated
def test_compiled_and_mapped_calls():
    x = WIDE.inputs()
    grad_out = torch.randn_like(x.query)
    want = run(x, grad_out)

    def attention(query: Tensor) -> Any:
        return call.forward(arguments(x)._replace(query=query))

    query = x.query.clone().requires_grad_()
    out, _ = torch.compile(attention, fullgraph=True, backend="aot_eager")(query)
    assert same_bits(out, want["out"]) and same_bits(torch.autograd.grad(out, query, grad_out)[0], want["query"])
    both = torch.func.vmap(attention)(torch.stack([x.query, x.query]))[0]
    assert same_bits(both[1], want["out"])


def test_residue_classes_keep_the_choice_for_their_backward():
    """Whatever torch's setting is by then."""
    seen: list[tuple[str, bool]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names = [argument.name for argument in func._schema.arguments]
            if "allow_tf32" in names:
                seen.append((func._schema.name, args[names.index("allow_tf32")]))
            return func(*args, **(kwargs or {}))

    x = Case(num_heads=1, seqlen_q=128).inputs()
    pattern = residues.pattern_of(ta.Strided(8) | ta.SlidingWindow(3, 0))
    assert pattern is not None
    for allow_tf32 in (True, False):
        seen.clear()
        with Watch():
            out, _ = residues.attend(arguments(x.clone().requires_grad_(), allow_tf32), pattern)
            out.sum().backward()
        assert {"tiled_attention::attention_fwd", "tiled_attention::attention_bwd"} <= {name for name, _ in seen} and len(seen) >= 4
        assert all(choice == allow_tf32 for _, choice in seen)


@emulated
def test_tangents_are_those_of_float32():
    """They are made of torch's products, which ask torch's setting themselves."""
    x = WIDE.inputs()
    direction = torch.randn_like(x.query)

    def tangent(allow_tf32: bool) -> Tensor:
        attention = lambda query: autograd.Attention.apply(*arguments(x, allow_tf32)._replace(query=query))[0]
        return torch.func.jvp(attention, (x.query,), (direction,))[1]

    assert same_bits(tangent(True), tangent(False))
