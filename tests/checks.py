"""Running a case through `ta.attention`, and comparing what comes with the oracle."""

import torch
from torch import Tensor

import tiled_attention as ta
from oracle import expected
from tiled_attention.testing import Case, Inputs, assert_accurate, real_dtype


def run(case: Case, x: Inputs, grad_out: Tensor | None = None, grad_lse: Tensor | None = None) -> dict[str, Tensor]:
    """out and lse, and with a `grad_out` the gradient of every input by its name. Draws the dropout mask of `oracle.expected`."""
    torch.manual_seed(case.seed)
    if grad_out is None:
        with torch.no_grad():
            out, lse = ta.attention(**x.arguments(), return_lse=True)
        return {"out": out, "lse": lse}
    x = x.clone().requires_grad_()
    out, lse = ta.attention(**x.arguments(), return_lse=True)
    outputs, grads = ([out], [grad_out]) if grad_lse is None else ([out, lse], [grad_out, grad_lse])
    leaves = x.leaves()
    gradients = torch.autograd.grad(outputs, list(leaves.values()), grads)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}


def on_dot_path(dtype: torch.dtype) -> bool:
    """Whether weights and gradients of scores are rounded to this 16-bit dtype for the products: with the bfloat16 dot, on tensor cores."""
    isa = torch.ops.tiled_attention._isa()
    return (dtype == torch.bfloat16 and "bf16" in isa) or (dtype.itemsize == 2 and isa == "emulated")


def check(case: Case) -> None:
    """Values, lse and all gradients within the limits, exact zeros where nothing is seen, the same bits with and without gradients."""
    want = expected(case)
    x = case.inputs()
    got = run(case, x, want.grad_out, want.grad_lse)
    for name, exact in want.exact.items():
        dtype = real_dtype(case.dtype) if name == "lse" else want.stored.get(name, case.dtype)
        assert got[name].dtype == dtype, f"{name}: expected {dtype}, got {got[name].dtype}"
        assert_accurate(got[name], exact, want.limit(name, on_dot_path(case.dtype)), name)
    check_zeros(x, got)
    for name, tensor in run(case, x).items():
        assert same_bits(tensor, got[name]), f"{name}: without gradients it differs from the same call with gradients"


def check_zeros(x: Inputs, got: dict[str, Tensor]) -> None:
    """Where no pair is visible, out and every gradient hold exactly 0."""
    shape = (*x.query.shape[:-1], x.key.shape[-2])
    live = torch.ones(shape, dtype=torch.bool) if x.visible is None else x.visible.expand(shape)
    if x.bias is not None:
        live = live & (x.bias != -torch.inf)
    rows = live.any(-1)
    heads_kv = x.key.shape[-3]
    keys = live.any(-2).unflatten(-2, (heads_kv, shape[-3] // heads_kv)).any(-2)
    for name, seen in (("out", rows), ("query", rows), ("key", keys), ("value", keys)):
        assert (got[name][~seen] == 0).all(), f"{name}: expected 0 where nothing is seen"
    if x.bias is not None:
        seen = live.double().sum_to_size(x.bias.shape) > 0
        assert (got["bias"][~seen] == 0).all(), "bias: expected gradient 0 where nothing is seen"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shapes and values, NaN equal to NaN."""
    return a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def gradients_of(case: Case) -> dict[str, Tensor]:
    """Everything that a case gives, for the oracle's grad_out and grad_lse."""
    want = expected(case)
    return run(case, case.inputs(), want.grad_out, want.grad_lse)


def run_with_mask(mask: ta.Mask | Tensor, x: Inputs, options: dict[str, object]) -> dict[str, Tensor]:
    """Results and gradients, the same for each mask."""
    torch.manual_seed(3)
    leaves = {"query": x.query, "key": x.key, "value": x.value} | {
        name: options[name] for name in ("bias", "alibi_slopes", "sinks") if options.get(name) is not None
    }
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    given = options | {name: leaf for name, leaf in leaves.items() if name in options}
    out, lse = ta.attention(leaves["query"], leaves["key"], leaves["value"], mask=mask, return_lse=True, **given)
    generator = torch.Generator().manual_seed(5)
    directions = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in (out, lse)]
    grads = torch.autograd.grad((out, lse), list(leaves.values()), directions)
    torch.manual_seed(3)
    weights = ta.attention_weights(leaves["query"].detach(), leaves["key"].detach(), mask=mask, **options)
    return {"out": out, "lse": lse, "weights": weights} | dict(zip(leaves, grads, strict=True))
