"""torch's context_parallel: served by the ring where scaled_dot_product_attention is ours, refused where a shard would seem whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import tiled_attention as ta
from processes import processes


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """The drop-in put in the place of torch's function, as code that imports it by that name does."""
    stock, F.scaled_dot_product_attention = F.scaled_dot_product_attention, ta.scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = stock


def rows_of(n: int) -> torch.Tensor:
    """What torch gives this rank: of 2 W chunks the one from the front and the one from the back, where they divide evenly."""
    rank, size = dist.get_rank(), dist.get_world_size()
    positions = torch.arange(n)
    if n % (2 * size):
        return positions.chunk(size)[rank]
    chunks = positions.chunk(2 * size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def attend(served: Any, n: int, heads_kv: int, **options: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(4)
    whole = [torch.randn(2, h, n, 8, generator=generator, dtype=torch.float64) for h in (4, heads_kv, heads_kv)]
    grad = torch.randn(2, 4, n, 8, generator=generator, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in whole]
    torch.manual_seed(9)
    want = ta.scaled_dot_product_attention(*leaves, **options)
    want_grads = torch.autograd.grad(want, leaves, grad)
    rows, buffers = rows_of(n), [x.clone() for x in whole]
    with served, context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
        shards = [x.detach().clone().requires_grad_() for x in buffers]
        assert torch.equal(shards[0], whole[0][:, :, rows])
        torch.manual_seed(9)
        got = F.scaled_dot_product_attention(*shards, **options)
        grads = torch.autograd.grad(got, shards, grad[:, :, rows])
    torch.testing.assert_close(got, want[:, :, rows], atol=1e-10, rtol=1e-10)
    for x, y in zip(grads, want_grads):
        torch.testing.assert_close(x, y[:, :, rows], atol=1e-10, rtol=1e-10)


def check_served() -> None:
    for make in (replaced, ta.override_sdpa):
        for n in (16, 8 * dist.get_world_size() + dist.get_world_size()):
            attend(make(), n, 4)
            attend(make(), n, 4, is_causal=True)
        attend(make(), 16, 2, is_causal=True, enable_gqa=True, scale=0.3)
        attend(make(), 16, 4, is_causal=True, dropout_p=0.3)
    with ta.override_sdpa() as served:
        attend(contextlib.nullcontext(), 16, 4)
    assert served.calls == 1


def check_modules() -> None:
    """nn.MultiheadAttention calls F.scaled_dot_product_attention, with the override and without."""
    mesh, size = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size()
    torch.manual_seed(1)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 4 * size, 16, dtype=torch.float64)
    want = module(x, x, x, need_weights=False)[0]
    buffer = x.clone()
    with ta.override_sdpa(), context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
        got = module(buffer, buffer, buffer, need_weights=False)[0]
    torch.testing.assert_close(got, want[:, rows_of(4 * size)], atol=1e-10, rtol=1e-10)


def check_refused() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(2, 4, 16, 8)
    module = ta.MultiheadAttention(8, 2, batch_first=True)
    mask = torch.ones(1, 1, 8, 16, dtype=torch.bool)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        with pytest.raises(RuntimeError, match="scaled_dot_product_attention inside torch's context_parallel would attend to the shard"):
            ta.scaled_dot_product_attention(x, x, x)
        with pytest.raises(RuntimeError, match="MultiheadAttention inside torch's context_parallel would attend to the shard"):
            module(x[:, 0], x[:, 0], x[:, 0])
        ta.attention(x, x, x)  # a shard, as for any other function
        with ta.override_sdpa(), pytest.raises(ValueError, match="attn_mask must be None inside torch's context_parallel"):
            F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    ta.scaled_dot_product_attention(x, x, x)
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


@pytest.mark.parametrize("size", (2, 4))
def test_served_by_the_ring(size: int):
    processes(size).run(check_served)


@pytest.mark.parametrize("check", (check_modules, check_refused), ids=lambda function: function.__name__[6:])
def test_modules_and_refusals(check: Any):
    processes(2).run(check)
