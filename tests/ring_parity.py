"""How the ranks of ring_attention compare with one process.

The whole problem is made on every rank from a seed and computed there by one process; the rank's call must give its rows of that.
"""

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tiled_attention as ta
from tiled_attention.distributed import ring_attention
from tiled_attention.distributed.layout import lengths_of, runs_of

NAMES = ("query", "key", "value", "bias", "alibi_slopes", "sinks")


def problem(seqlen_q: int, seqlen_kv: int, *, batch=(2,), heads=(4, 2), dims=(16, 8), dtype=torch.float64, seed=0) -> list[Tensor]:
    gen = torch.Generator().manual_seed(seed)
    shapes = ((heads[0], seqlen_q, dims[0]), (heads[1], seqlen_kv, dims[0]), (heads[1], seqlen_kv, dims[1]))
    return [torch.randn(*batch, *shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


def rows_of(x: Tensor, rank: int, lengths: tuple[int, ...], layout: str, dim: int = -2) -> Tensor:
    runs = runs_of(lengths, layout, "x")[rank]
    return torch.cat([x.narrow(dim, run.begin, run.end - run.begin) for run in runs] or [x.narrow(dim, 0, 0)], dim)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def compare(
    rank: int,
    size: int,
    tensors: list[Tensor],
    *,
    layout: str = "contiguous",
    method: str = "ring",
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    by_rows: dict[str, Tensor] | None = None,
    seed: int | None = None,
    tolerance: float = 1e-12,
    with_lse: bool = True,
    **options: Any,
) -> None:
    """The rows and gradients of this rank beside those of one process. `by_rows`: a mask or bias whose rows are divided too."""
    query, key, value = tensors
    lengths = lengths or (lengths_of(query.shape[-2], size, layout), lengths_of(key.shape[-2], size, layout))
    whole = dict(zip(NAMES, map(leaf, tensors)))
    mine = {name: leaf(rows_of(x, rank, lengths[name != "query"], layout)) for name, x in whole.items()}
    shared, shared_whole = {}, {}
    for name in ("bias", "alibi_slopes", "sinks"):
        if isinstance(options.get(name), Tensor):
            shared_whole[name], shared[name] = leaf(options[name]), leaf(options.pop(name))
    for name, x in (by_rows or {}).items():
        part = rows_of(x, rank, lengths[0], layout)
        if x.dtype != torch.bool:
            shared_whole[name], mine[name] = leaf(x), leaf(part)
        else:
            options[name] = x
    mask = options.pop("mask", None)
    local_mask = rows_of(mask, rank, lengths[0], layout) if by_rows and "mask" in by_rows else mask
    if callable(mask) and not isinstance(mask, (Tensor, ta.Mask)):
        local_mask, mask = mask(lambda x: rows_of(x, rank, lengths[0], layout)), mask(lambda x: x)
    if seed is not None:
        torch.manual_seed(seed)
    out, lse = ta.attention(*list(whole.values()), mask=mask, return_lse=True, **shared_whole, **options)
    if seed is not None:
        torch.manual_seed(seed)
    ours, our_lse = ring_attention(
        mine["query"],
        mine["key"],
        mine["value"],
        mask=local_mask,
        layout=layout,
        method=method,
        return_lse=True,
        **{name: x for name, x in mine.items() if name not in NAMES[:3]},
        **shared,
        **options,
    )
    gen = torch.Generator().manual_seed(7)
    grad_out = torch.randn(out.shape, generator=gen, dtype=torch.float64).to(out.dtype)
    grad_lse = torch.randn(lse.shape, generator=gen, dtype=torch.float64).to(lse.dtype) * with_lse
    grad_lse = torch.where(lse.detach() == -math.inf, 0.0, grad_lse)
    for x, y in ((out, ours), (lse[..., None], our_lse[..., None])):
        close(y, rows_of(x, rank, lengths[0], layout), tolerance, "out or lse")
    roots, ups = ([out, lse], [grad_out, grad_lse]) if with_lse else ([out], [grad_out])
    torch.autograd.backward(roots, ups)
    local = [rows_of(grad_out, rank, lengths[0], layout), rows_of(grad_lse[..., None], rank, lengths[0], layout)[..., 0]]
    torch.autograd.backward([ours, our_lse][: len(roots)], local[: len(roots)])
    for name, x in mine.items():
        want = (whole | shared_whole)[name].grad
        close(x.grad, rows_of(want, rank, lengths[name not in ("query", "bias")], layout), tolerance, name)
    for name, x in shared.items():
        grad = x.grad.clone()
        dist.all_reduce(grad)
        close(grad, shared_whole[name].grad, tolerance, name)


def close(got: Tensor | None, want: Tensor, tolerance: float, name: str) -> None:
    assert got is not None, f"{name}: no gradient"
    assert got.shape == want.shape and got.dtype == want.dtype, (
        f"{name}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    )
    same = (got == want) | (got.isnan() & want.isnan())
    got, want = got.detach(), want.detach()
    error = torch.where(same, 0.0, (got - want).abs().double())
    scale = max(1.0, float(want[want.isfinite()].abs().max()) if want.numel() and bool(want.isfinite().any()) else 1.0)
    assert not error.numel() or float(error.max()) <= tolerance * scale, (
        f"{name}: off by {float(error.max()):.3g} at a scale of {scale:.3g}"
    )


def rms(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).square().mean().sqrt())


def raises(kind: type[Exception], text: str) -> Any:
    return pytest.raises(kind, match=re.escape(text))
