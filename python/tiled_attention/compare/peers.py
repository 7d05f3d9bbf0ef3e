"""The implementations that stand beside each other: the operator, PyTorch's two, plain math, and the exact result in NumPy."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiled_attention as ta
from tiled_attention.testing import real_dtype

from .problem import Problem


def tiled(problem: Problem) -> torch.Tensor:
    """`ta.attention`, out (batch, num_heads, seqlen_q, head_dim_v)."""
    if problem.case.dropout_p > 0:
        torch.manual_seed(problem.case.seed)
    inputs = problem.inputs
    arguments = {name: value for name, value in inputs.arguments().items() if name not in ("query", "key", "value")}
    out = ta.attention(inputs.query, inputs.key, inputs.value, **arguments)
    assert isinstance(out, torch.Tensor)
    return out


def float_mask(problem: Problem) -> torch.Tensor | None:
    """ALiBi, bias and mask as one float tensor in query's dtype, -inf where masked; differentiable. None without ALiBi and bias."""
    inputs, total = problem.inputs, problem.inputs.bias
    if inputs.alibi_slopes is not None:
        alibi = (-inputs.alibi_slopes[:, None, None] * problem.distance()).to(inputs.query.dtype)
        total = alibi if total is None else total + alibi
    if total is not None and inputs.visible is not None:
        total = torch.where(inputs.visible, total, -torch.inf)
    return total


def _only_torch_options(problem: Problem) -> bool:
    return problem.case.softcap is None and not problem.case.sinks and problem.case.dropout_p == 0


def sdpa(problem: Problem) -> torch.Tensor | None:
    """F.scaled_dot_product_attention, or None where it has no such option."""
    if not _only_torch_options(problem):
        return None
    inputs, mask = problem.inputs, float_mask(problem)
    return F.scaled_dot_product_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.visible if mask is None else mask,
        scale=problem.case.scale,
        enable_gqa=problem.group > 1,
    )


def sdpa_math(problem: Problem) -> torch.Tensor | None:
    """The same through PyTorch's own math path, which the limits are relative to."""
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(problem)


def multihead(problem: Problem) -> torch.Tensor | None:
    """nn.MultiheadAttention with identity projections, weights asked for (its default), or None where it has no such option."""
    case, inputs = problem.case, problem.inputs
    if not _only_torch_options(problem) or case.scale is not None or problem.group > 1 or case.value_dim != case.head_dim:
        return None
    if inputs.visible is not None and not inputs.visible.any(-1).all():
        return None
    embed_dim = case.num_heads * case.head_dim
    module = torch.nn.MultiheadAttention(embed_dim, case.num_heads, bias=False, batch_first=True, dtype=case.dtype)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(embed_dim).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(embed_dim))
    mask = float_mask(problem)
    if mask is None and inputs.visible is not None:
        mask = ~inputs.visible
    if mask is not None:
        mask = mask.expand(case.score_shape).flatten(0, 1)
    query, key, value = (tensor.transpose(1, 2).flatten(2) for tensor in (inputs.query, inputs.key, inputs.value))
    out, _ = module(query, key, value, attn_mask=mask, need_weights=True)
    return out.unflatten(2, (case.num_heads, case.head_dim)).transpose(1, 2)


def plain_math(problem: Problem) -> torch.Tensor:
    """The definition in plain PyTorch with every option; 16-bit inputs are computed in float32 and rounded once at the end."""
    case, inputs = problem.case, problem.inputs
    real = real_dtype(case.dtype)
    query = inputs.query.to(real)
    key, value = (tensor.to(real).repeat_interleave(problem.group, 1) for tensor in (inputs.key, inputs.value))
    score = query @ key.mT * problem.scale
    if case.softcap is not None:
        score = case.softcap * torch.tanh(score / case.softcap)
    if inputs.alibi_slopes is not None:
        score = score - inputs.alibi_slopes[:, None, None] * problem.distance()
    if inputs.bias is not None:
        score = score + inputs.bias.to(real)
    empty = torch.zeros((), dtype=torch.bool)
    if inputs.visible is not None:
        empty = ~inputs.visible.any(-1, keepdim=True)
        score = score.masked_fill(~inputs.visible & ~empty, -torch.inf)
    if inputs.sinks is not None:
        sink = inputs.sinks[:, None, None].expand(score.shape[:-1] + (1,))
        weight = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
    else:
        weight = score.softmax(-1)
    weight = weight.masked_fill(empty, 0)
    if problem.kept is not None:
        weight = weight * problem.kept / problem.keep_probability
    return (weight @ value).to(case.dtype)


def exact(problem: Problem) -> dict[str, np.ndarray]:
    """Out and the gradient of every leaf in NumPy, float64; for float64 inputs in long double, which x86 makes 80 bits wide."""
    case, inputs = problem.case, problem.inputs
    real = np.longdouble if case.dtype == torch.float64 else np.float64

    def array(tensor: torch.Tensor) -> Any:
        return tensor.detach().double().numpy().astype(real)

    query, grad_out = array(inputs.query), array(problem.grad_out)
    key, value = (array(tensor).repeat(problem.group, 1) for tensor in (inputs.key, inputs.value))
    scale, distance = real(problem.scale), problem.distance().numpy().astype(real)

    # Scores, with the derivative of the softcap.
    score, slope = query @ key.swapaxes(-1, -2) * scale, real(1)
    if case.softcap is not None:
        bent = np.tanh(score / real(case.softcap))
        score, slope = real(case.softcap) * bent, 1 - bent * bent
    if inputs.alibi_slopes is not None:
        score = score - array(inputs.alibi_slopes)[:, None, None] * distance
    if inputs.bias is not None:
        score = score + array(inputs.bias)
    if inputs.visible is not None:
        score = np.where(inputs.visible.numpy(), score, -np.inf)

    # Weights; a row that sees nothing keeps weight 0.
    sink = array(inputs.sinks)[:, None, None] if inputs.sinks is not None else np.full((1, 1, 1), -np.inf, dtype=real)
    top = np.maximum(score.max(-1, keepdims=True), sink)
    top = np.where(np.isneginf(top), 0, top)
    weight, sink_weight = np.exp(score - top), np.exp(sink - top)
    total = weight.sum(-1, keepdims=True) + sink_weight
    total = np.where(total == 0, 1, total)
    weight, sink_weight = weight / total, sink_weight / total
    dropout = real(1) if problem.kept is None else problem.kept.numpy().astype(real) / real(problem.keep_probability)

    # Gradients back through output, dropout, softmax and scores.
    dropped = weight * dropout
    grad_weight = grad_out @ value.swapaxes(-1, -2) * dropout
    delta = (grad_weight * weight).sum(-1, keepdims=True)
    grad_score = weight * (grad_weight - delta)
    grad_product = grad_score * slope * scale

    def over_group(gradient: Any) -> Any:
        return gradient.reshape(gradient.shape[0], case.kv_heads, problem.group, *gradient.shape[2:]).sum(2)

    result = {
        "out": dropped @ value,
        "query": grad_product @ key,
        "key": over_group(grad_product.swapaxes(-1, -2) @ query),
        "value": over_group(dropped.swapaxes(-1, -2) @ grad_out),
    }
    if inputs.bias is not None:
        axes = tuple(axis for axis in range(4) if inputs.bias.shape[axis] == 1)
        result["bias"] = grad_score.sum(axes, keepdims=True)
    if inputs.alibi_slopes is not None:
        result["alibi_slopes"] = -(grad_score * distance).sum((0, 2, 3))
    if inputs.sinks is not None:
        result["sinks"] = -(sink_weight * delta).sum((0, 2, 3))
    return result
