"""How far products of operands rounded to tf32 may be from the exact ones: bounds, element by element, of what rounding can do."""

import dataclasses
import math

import torch
from torch import Tensor

import oracle
from cases import NAN, STREAMING
from tiled_attention.testing import Case, Inputs, assert_accurate, largest

UNIT = 2.0**-11  # half the distance from 1 to the next number with 10 bits behind the point

CASES = (
    Case(),
    Case(batch=(1,), num_heads=4, num_heads_kv=2, seqlen_q=70, seqlen_kv=133, head_dim=64, head_dim_v=40, mask="Causal()"),
    Case(num_heads=6, num_heads_kv=2, seqlen_q=5, seqlen_kv=70, mask=STREAMING, softcap=2.0, alibi=True, sinks=True),
    Case(seqlen_q=37, seqlen_kv=53, mask="Bool(37, 53)", bias=(2, 2, 37, 53), bias_hidden=0.3),
    Case(seqlen_q=66, seqlen_kv=65, head_dim=20, bias=(65,), alibi=True),
    Case(seqlen_q=17, seqlen_kv=5, bias=(2, 17, 1), sinks=True, query_offset=(3, 16)),
    Case(seqlen_q=33, seqlen_kv=41, head_dim_v=5, dropout_p=0.25, bias=(33, 41)),
    Case(batch=(), num_heads=1, seqlen_q=30, head_dim=3, head_dim_v=200),
    Case(batch=(1,), num_heads=1, seqlen_q=65, seqlen_kv=64, head_dim=129, head_dim_v=130, mask="SlidingWindow(9, 9)"),
    Case(seqlen_q=1, seqlen_kv=77, scale=-0.3, layout=("heads_last", "dim_first", "strided")),
    Case(seqlen_q=20, seqlen_kv=90, mask="KeyLengths((50, 0))", hidden=NAN),
)  # fmt: skip


def rounded(tensor: Tensor) -> Tensor:
    """A finite float32 tensor to the nearest tf32, ties away from 0."""
    return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def rounded_inputs(case: Case) -> Inputs:
    """Those of the case with query, key and value as tensor cores read them."""
    x = case.inputs()
    for tensor in (x.query, x.key, x.value):
        tensor.copy_(torch.where(tensor.isfinite(), rounded(tensor), tensor))
    return x


def limits(x: Inputs, exact: dict[str, Tensor], grad_out: Tensor, grad_lse: Tensor, kept: Tensor | None) -> dict[str, Tensor]:
    """Bounds of |result - exact|, for operands that are tf32 numbers. Rounded are the weights and the gradients of scores; out, and
    with it delta = grad_out . out, are as far off as the weights make them. float32 adds its own."""
    shape = (*x.query.shape[:-1], x.key.shape[-2])
    bias = (torch.zeros((), dtype=torch.float64) if x.bias is None else x.bias.double()).expand(shape)
    whole = dataclasses.replace(x, bias=bias)
    score_grad = oracle.attention_and_gradients(whole, grad_out, grad_lse, kept)["bias"].abs()
    weight = oracle.attention_and_gradients(whole, torch.zeros_like(grad_out), torch.ones_like(grad_lse))["bias"]
    out = oracle.attention(dataclasses.replace(x, value=x.value.abs()), kept)[0]
    delta = UNIT * (grad_out.double().abs() * out).sum(-1)
    off = weight * delta[..., None]
    operand = off + UNIT * score_grad

    group = x.query.shape[-3] // x.key.shape[-3]
    query, key = (tensor.double().nan_to_num(0.0).abs() for tensor in (x.query, x.key))
    scale = abs(x.scale) if x.scale is not None else 1 / math.sqrt(x.query.shape[-1])
    of_group = lambda tensor: tensor.unflatten(-3, (-1, group)).sum(-3)
    leading = list(range(len(shape) - 3))
    bounds = {
        "out": UNIT * out,
        "lse": torch.zeros(()),
        "query": scale * operand @ key.repeat_interleave(group, -3),
        "key": of_group(scale * operand.mT @ query),
        "value": UNIT * oracle.attention_and_gradients(x, grad_out.abs(), None, kept)["value"],
        "alibi_slopes": (off * (x.position - torch.arange(shape[-1])).abs()).sum((*leading, -2, -1)),
        "sinks": ((1 - weight.sum(-1)) * delta).sum((*leading, -1)),
    }
    if x.bias is not None:
        bounds["bias"] = off.sum_to_size(x.bias.shape)
    return {name: bounds[name] + oracle.tolerance(torch.float32, largest(exact[name])) for name in exact}


def assert_within(actual: Tensor, exact: Tensor, limit: Tensor, name: str) -> None:
    """As assert_accurate, with a limit for each element."""
    scaled = [torch.where(exact.isfinite(), tensor.double() / limit, tensor.double()) for tensor in (actual, exact)]
    assert_accurate(*scaled, 1.0, f"{name}, in units of its limit")
