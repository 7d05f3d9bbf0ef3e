"""HeadwiseParallel: a MultiheadAttention over ranks is the module in one process, with one all-reduce each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tiled_attention as ta
from processes import Wire, processes
from tiled_attention.distributed import HeadwiseParallel

EMBED, HEADS, BATCH, N = 16, 4, 3, 7
LIMIT = {"atol": 1e-10, "rtol": 1e-10}


def build(parallel: Any = None, **options: Any) -> tuple[ta.MultiheadAttention, nn.Module]:
    """The module in one process, and one of the same parameters over all ranks."""
    torch.manual_seed(1)
    whole = ta.MultiheadAttention(EMBED, HEADS, **{"batch_first": True, "dtype": torch.float64, **options})
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3)
    torch.manual_seed(1)
    parts = ta.MultiheadAttention(EMBED, HEADS, **{"batch_first": True, "dtype": torch.float64, **options})
    parts.load_state_dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return whole, parallelize_module(parts, mesh, parallel or HeadwiseParallel())


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def full(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(modules: tuple[nn.Module, nn.Module], inputs: list[torch.Tensor], **options: Any) -> None:
    """Output, weights and all gradients, those of inputs and floating masks included."""
    results = []
    for module in modules:
        torch.manual_seed(5)
        leaves = [x.clone().requires_grad_() for x in inputs]
        masks = {k: m.clone().requires_grad_() for k, m in options.items() if isinstance(m, torch.Tensor) and m.is_floating_point()}
        arguments = leaves * 3 if len(leaves) == 1 else leaves if len(leaves) == 3 else [leaves[0], leaves[1], leaves[1]]
        out, weights = module(*arguments, **{**options, **masks})
        loss = (out * randn(*out.shape, seed=8)).sum()
        if weights is not None:
            loss = loss + (weights * randn(*weights.shape, seed=9)).sum()
        wanted = {**dict(module.named_parameters()), **{f"input {k}": x for k, x in enumerate(leaves)}, **masks}
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        results.append((out, weights, dict(zip(wanted, grads))))
    (out, weights, grads), (got, got_weights, got_grads) = results
    torch.testing.assert_close(got, out, **LIMIT)
    if weights is not None:
        torch.testing.assert_close(got_weights, weights, **LIMIT)
    for name, grad in grads.items():
        assert (grad is None) == (got_grads[name] is None), name
        if grad is not None:
            torch.testing.assert_close(full(got_grads[name]).view(grad.shape), grad, **LIMIT, msg=lambda m, k=name: f"gradient of {k}: {m}")


def check_calls() -> None:
    one, two = [randn(BATCH, N, EMBED)], [randn(BATCH, N, EMBED), randn(BATCH, N + 2, EMBED, seed=1)]
    padding = torch.zeros(BATCH, N, dtype=torch.bool)
    padding[0, 4:] = True
    modules = build()
    compare(modules, one, need_weights=False)
    compare(modules, one)
    if dist.get_world_size() > 2:
        return
    compare(modules, one, average_attn_weights=False)
    compare(modules, one, need_weights=False, is_causal=True, key_padding_mask=padding)
    compare(modules, one, attn_mask=randn(N, N, seed=3), need_weights=False)
    compare(modules, one, attn_mask=randn(BATCH * HEADS, N, N, seed=3), need_weights=True)
    compare(modules, one, attn_mask=randn(BATCH * HEADS, N, N, seed=3) > 1, need_weights=False)
    compare(modules, two, need_weights=False)
    compare(modules, [*two, randn(BATCH, N + 2, EMBED, seed=2)])
    compare(modules, [x[0] for x in two])
    compare(build(bias=False), one)
    compare(build(add_bias_kv=True, add_zero_attn=True), one, is_causal=True)
    compare(build(add_bias_kv=True), one, need_weights=False)
    compare(build(kdim=6, vdim=10), [two[0], randn(BATCH, N, 6), randn(BATCH, N, 10)])
    compare(build(batch_first=False), one)
    modules = build(dropout=0.4)
    compare(modules, one)
    modules = tuple(module.eval() for module in modules)
    compare(modules, one)


def check_communication() -> None:
    x = randn(BATCH, N, EMBED).requires_grad_()
    _, module = build()
    with Wire() as forward:
        out, _ = module(x, x, x, need_weights=False)
    with Wire() as backward:
        out.sum().backward()
    for counted in (forward, backward):
        assert counted.calls == [("all_reduce", x.nbytes)], counted.calls


def check_parameters() -> None:
    """A checkpoint, an optimiser and a clipped norm see one module."""
    whole, parts = build()
    for name, parameter in whole.state_dict().items():
        assert torch.equal(full(parts.state_dict()[name]).view(parameter.shape), parameter), name
    for name, parameter in whole.named_parameters():
        share = 1 if name == "out_proj.bias" else dist.get_world_size()
        assert parts.get_parameter(name).to_local().numel() * share == parameter.numel(), name
    x, norms = randn(BATCH, N, EMBED), []
    for module in (whole, parts):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(x, x, x, need_weights=False)[0].square().sum().backward()
            norms.append(full(nn.utils.clip_grad_norm_(module.parameters(), 1.0)))
            optimizer.step()
    torch.testing.assert_close(norms[3:], norms[:3], atol=1e-8, rtol=1e-8)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(full(parts.get_parameter(name)).detach().view(parameter.shape), parameter.detach(), atol=1e-7, rtol=1e-7)


def check_layer() -> None:
    """A whole encoder layer, in the plan with torch's own styles."""
    mesh, layers = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for _ in range(2):
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
        ta.convert(layer)
        layers.append(layer)
    plan = {"self_attn": HeadwiseParallel(), "linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
    parallelize_module(layers[1], mesh, plan)
    x = randn(BATCH, N, EMBED)
    for mode in (True, False):
        outs = [layer.train(mode)(x) for layer in layers]
        torch.testing.assert_close(outs[1], outs[0], **LIMIT)


def check_sequence() -> None:
    """Inputs and outputs in pieces of the sequence: an all-gather before, a reduce-scatter after."""
    size = dist.get_world_size()
    whole, parts = build(HeadwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1)))
    x = randn(BATCH, 2 * size, EMBED)
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    want_leaf, leaf = x.clone().requires_grad_(), x[:, rows].clone().requires_grad_()
    want, got = (m(a, a, a, need_weights=False)[0] for m, a in ((whole, want_leaf), (parts, leaf)))
    torch.testing.assert_close(got, want[:, rows], **LIMIT)
    grad = randn(*want.shape, seed=4)
    (want_grad,), (got_grad,) = torch.autograd.grad(want, want_leaf, grad), torch.autograd.grad(got, leaf, grad[:, rows])
    torch.testing.assert_close(got_grad, want_grad[:, rows], **LIMIT)


def check_errors() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module, error, pattern in (
        (nn.MultiheadAttention(EMBED, HEADS), TypeError, "divides a tiled_attention.MultiheadAttention, got MultiheadAttention"),
        (ta.MultiheadAttention(15, 3), ValueError, r"num_heads must be a multiple of the \d ranks of the mesh, got 3"),
    ):
        with pytest.raises(error, match=pattern):
            parallelize_module(module, mesh, HeadwiseParallel())
    _, module = build()
    with pytest.raises(ValueError, match="expected 16 features"):
        module(*[torch.zeros(2, 3, 5, dtype=torch.float64)] * 3)
    nested = torch.nested.nested_tensor([torch.zeros(2, EMBED)], dtype=torch.float64)
    with pytest.raises(ValueError, match="expected dense tensors in a tensor-parallel module"):
        module(nested, nested, nested)


CHECKS = (check_calls, check_communication, check_parameters, check_layer, check_sequence, check_errors)


@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("check", CHECKS, ids=lambda function: function.__name__[6:])
def test_tensor_parallel(size: int, check: Callable[[], None]):
    processes(size).run(check)
