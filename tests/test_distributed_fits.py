"""Models of the package's modules under what trains them: FSDP2, activation checkpointing, functional calls, gradient scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import tiled_attention as ta
from processes import processes
from tiled_attention.distributed import HeadwiseParallel

DIM, HEADS, BATCH, N = 16, 4, 4, 10


class Block(nn.Module):
    """Exact causal attention, linear attention and rotary positions, with residuals."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.exact = ta.MultiheadAttention(DIM, HEADS, dropout=dropout, batch_first=True)
        self.linear = ta.LinearAttention(DIM, HEADS)
        self.rotary = ta.RotaryEmbedding(DIM // HEADS)
        self.slopes = nn.Parameter(ta.alibi_slopes(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.exact(y, y, y, is_causal=True, need_weights=False)[0]
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        rotated = ta.attention(heads, heads, heads, mask=ta.Causal(), rotary=self.rotary, alibi_slopes=self.slopes)
        return x + rotated.transpose(1, 2).flatten(2) + self.linear(x)


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.checkpoints = checkpoints  # None: none; else use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
        return x


def build(dtype: torch.dtype = torch.float64, **options: Any) -> Model:
    """In float64 the gradient of a key's bias, which is 0 but for rounding, moves no optimiser."""
    torch.manual_seed(1)
    return Model(**options).to(dtype)


def batch(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(BATCH, N, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)


def train(model: nn.Module, x: Tensor, steps: int = 3) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def full(parameter: Any) -> Tensor:
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)
    return fully_shard(model, **options)


def check_fsdp() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = batch()
    mine = x.chunk(size)[rank]
    want = build()
    train(want, x)
    mesh = init_device_mesh("cpu", (size,))
    for model in (shard(build(), mesh=mesh), shard(build(checkpoints=False), mesh=mesh, reshard_after_forward=False)):
        train(model, mine)
        for name, parameter in want.named_parameters():
            sharded = model.get_parameter(name)
            assert isinstance(sharded, DTensor) and sharded.to_local().numel() <= -(-parameter.numel() // size) + parameter[:1].numel()
            torch.testing.assert_close(full(sharded), parameter.detach(), atol=1e-7, rtol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def check_fsdp_in_16_bits() -> None:
    """Parameters and activations of bfloat16, gradients summed in float32."""
    size, x = dist.get_world_size(), batch(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(
        build(torch.float32), mesh=init_device_mesh("cpu", (size,)), mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False)
    )
    losses = train(model, x.chunk(size)[dist.get_rank()])
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / size, torch.tensor(train(build(torch.float32), x)), atol=0.0, rtol=3e-2)


def check_fsdp_and_tensor_parallel() -> None:
    """Two dimensions: parameters of heads divided over one, and all of them again over the other."""
    x, mesh = batch(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    want = build()
    train(want, x)
    model = build()
    for block in model.blocks:
        parallelize_module(block.exact, mesh["heads"], HeadwiseParallel())  # type: ignore[union-attr, arg-type]
    shard(model, mesh=mesh["data"])
    train(model, x.chunk(2)[mesh["data"].get_local_rank()])
    for name, parameter in want.named_parameters():
        got = full(model.get_parameter(name)).view(parameter.shape)
        torch.testing.assert_close(got, parameter.detach(), atol=1e-7, rtol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("size", (2, 4))
def test_fsdp_trains_as_one_process(size: int):
    processes(size).run(check_fsdp)


def test_fsdp_over_tensor_parallel():
    processes(4).run(check_fsdp_and_tensor_parallel)


def test_fsdp_in_16_bits():
    processes(2).run(check_fsdp_in_16_bits)


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpointing_recomputes_the_same(use_reentrant: bool):
    """Dropout draws its seed again, so the gradients are those of the pass that was checkpointed."""
    grads = []
    for checkpoints in (None, use_reentrant):
        model = build(dropout=0.3, checkpoints=checkpoints)
        x = batch().requires_grad_()
        torch.manual_seed(7)
        model(x).square().sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    for want, got in zip(*grads):
        assert torch.equal(want, got)


def test_functional_call():
    model, x = build(), batch()
    parameters = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, parameters, (x,))
    other = build()
    other.load_state_dict(parameters, strict=False)
    assert torch.equal(out, other(x).detach())
    loss = other(x).square().sum()
    loss.backward()
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(parameters)
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-9, rtol=1e-9)
    per_sample = torch.func.vmap(torch.func.grad(lambda p, x: torch.func.functional_call(model, p, (x[None],)).square().sum()), (None, 0))
    for name, grad in per_sample(parameters, x).items():
        torch.testing.assert_close(grad.sum(0), grads[name], atol=1e-9, rtol=1e-9)


def test_gradient_scaling():
    """A scaled loss in float16 autocast steps as the loss itself; a step with an infinite gradient is left out and the scale halved."""
    x, models = batch(torch.float32), (build(torch.float32), build(torch.float32))
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    for _ in range(3):
        for model, optimizer, scales in zip(models, optimizers, (False, True)):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            if scales:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    for want, got in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
    before = [parameter.detach().clone() for parameter in models[1].parameters()]
    scaler.scale(models[1](x).sum() * 1e38).backward()
    scaler.step(optimizers[1])
    scaler.update()
    assert scaler.get_scale() == 128.0
    assert all(torch.equal(a, b) for a, b in zip(before, models[1].parameters()))


def check_scaling_of_shards() -> None:
    """An infinite gradient on one rank leaves the step out on all of them."""
    size = dist.get_world_size()
    model = shard(build(), mesh=init_device_mesh("cpu", (size,)))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=4.0)
    x = batch().chunk(size)[dist.get_rank()]
    for factor, scale in ((1.0, 4.0), (torch.inf if dist.get_rank() == 1 else 1.0, 2.0)):
        before = [full(p).clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        moved = [not torch.equal(a, full(p)) for a, p in zip(before, model.parameters())]
        assert any(moved) if scale == 4.0 else not any(moved)


def test_gradient_scaling_of_shards():
    processes(2).run(check_scaling_of_shards)
