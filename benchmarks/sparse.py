"""Sparse patterns: time over the share of full attention's time that the visible pairs or tiles are, and over SDPA with the dense mask."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from rows import Row

import tiled_attention as ta
from tiled_attention import block_list
from tiled_attention.compare import machine
from tiled_attention.compare.timing import alternate

HEADS, HEAD_DIM = 2, 64


def _tensors(n: int) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, n, HEAD_DIM, requires_grad=at < 3) for at in range(4)]


def _attend(tensors: list[torch.Tensor], mask: ta.Mask | None, direction: str) -> torch.Tensor:
    query, key, value, grad = tensors
    with torch.set_grad_enabled(direction != "forward"):
        out = ta.attention(query, key, value, mask=mask)
    if direction != "forward":
        torch.autograd.grad(out, (query, key, value), grad)
    return out


def _sdpa(tensors: list[torch.Tensor], dense: torch.Tensor, direction: str) -> torch.Tensor:
    query, key, value, grad = tensors
    with torch.set_grad_enabled(direction != "forward"):
        out = F.scaled_dot_product_attention(query, key, value, dense)
    if direction != "forward":
        torch.autograd.grad(out, (query, key, value), grad)
    return out


def _local_attention() -> Callable[[list[torch.Tensor], str], torch.Tensor]:
    """The PyPI package local-attention. Its exact window of 256 is the query and 256 keys before it."""
    from local_attention import LocalAttention

    layer = LocalAttention(window_size=256, causal=True, look_backward=1, look_forward=0, exact_windowsize=True, use_rotary_pos_emb=False)

    def call(tensors: list[torch.Tensor], direction: str) -> torch.Tensor:
        query, key, value, grad = tensors
        with torch.set_grad_enabled(direction != "forward"):
            out = layer(query, key, value)
        if direction != "forward":
            torch.autograd.grad(out, (query, key, value), grad)
        return out

    return call


def _tile_share(mask: ta.Mask, n: int) -> float:
    return float((block_list.shares(mask, n, n, None) > 0).double().mean())


def _is_right(tensors: list[torch.Tensor], mask: ta.Mask) -> bool:
    """Against SDPA on some rows."""
    n = tensors[0].shape[-2]
    rows = torch.tensor([0, 1, n // 2 - 1, n // 2, n - 1])
    visible = mask.dense(n, n)[..., rows, :]
    want = F.scaled_dot_product_attention(tensors[0][..., rows, :], *tensors[1:3], visible)
    return torch.allclose(_attend(tensors, mask, "forward")[..., rows, :], want, rtol=1e-3, atol=1e-4)


def _rows(claim: str, n: int, masks: dict[str, ta.Mask], by_tiles: bool, reach: float, rounds: int, seconds: float) -> Iterator[Row]:
    tensors = _tensors(n)
    for name, mask in masks.items():
        share = _tile_share(mask, n) if by_tiles else mask.density(n, n)
        right = _is_right(tensors, mask)
        for direction in ("forward", "forward+backward"):
            what = f"{name}, n {n}, {share:.2%} of the {'tiles' if by_tiles else 'pairs'} {direction}"
            row = Row(claim, what, "share of full attention", "ms", wrong=not right)
            if right:
                calls = {"ours": partial(_attend, tensors, mask, direction), "theirs": partial(_attend, tensors, None, direction)}
                found = alternate(calls, rounds=rounds, seconds=seconds)
                row.ours, row.theirs = found["ours"] * 1e3, found["theirs"] * share * 1e3
            yield row.want(at_most=reach)


def _beside_local_attention(tensors: list[torch.Tensor], n: int, rounds: int, seconds: float) -> Iterator[Row]:
    peer, mask = _local_attention(), ta.SlidingWindow(256, 0)
    right = torch.allclose(peer(tensors, "forward"), _attend(tensors, mask, "forward"), rtol=1e-3, atol=1e-4)
    for direction in ("forward", "forward+backward"):
        row = Row("sparse_window", f"window 256, n {n} {direction}", "local-attention", "ms", wrong=not right)
        if right:
            calls = {"ours": partial(_attend, tensors, mask, direction), "theirs": partial(peer, tensors, direction)}
            found = alternate(calls, rounds=rounds, seconds=seconds)
            row.ours, row.theirs = found["ours"] * 1e3, found["theirs"] * 1e3
        yield row


def window(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Sliding window of 256 keys and 4 sinks, n 16384."""
    n, mask = 16384, ta.Causal() & (ta.SlidingWindow(255, 0) | ta.Sinks(4))
    with machine.pinned(threads):
        yield from _rows("sparse_window", n, {"window 256 + 4 sinks": mask}, False, 1.4, rounds, seconds)
        tensors, dense = _tensors(n), mask.dense(n, n)
        if importlib.util.find_spec("local_attention") is None:
            yield Row("sparse_window", "local-attention is not installed")
        else:
            yield from _beside_local_attention(tensors, n, rounds, seconds)
        for direction in ("forward", "forward+backward"):
            row = Row("sparse_window", f"window 256 + 4 sinks, n {n} {direction}", "SDPA, dense mask", "ms")
            calls = {"ours": partial(_attend, tensors, mask, direction), "theirs": partial(_sdpa, tensors, dense, direction)}
            found = alternate(calls, rounds=rounds, seconds=seconds)
            row.ours, row.theirs = found["ours"] * 1e3, found["theirs"] * 1e3
            yield row.want(at_least=20)


def blocks(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Global tokens, random blocks and BlockSparse at a tenth of the tiles, n 8192."""
    n = 8192
    generator = torch.Generator().manual_seed(0)
    layout = torch.rand(HEADS, n // 64, n // 64, generator=generator) < 0.1
    masks = {
        "Global": ta.Global(tuple(range(n // 20))),
        "Global | SlidingWindow": ta.Global(tuple(range(8))) | ta.SlidingWindow(320, 320),
        "RandomBlocks": ta.RandomBlocks(n // 640),
        "BlockSparse per head": ta.BlockSparse(layout, 64),
    }
    with machine.pinned(threads):
        yield from _rows("sparse_blocks", n, masks, True, 1.5, rounds, seconds)


def residues(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Strided(64) with its local window, causal and not, and Dilated(64, 4), n 8192."""
    masks = {
        "Causal & (Strided(64) | SlidingWindow(63, 0))": ta.Causal() & (ta.Strided(64) | ta.SlidingWindow(63, 0)),
        "Strided(64) | SlidingWindow(64, 64)": ta.Strided(64) | ta.SlidingWindow(64, 64),
        "Dilated(64, 4)": ta.Dilated(64, 4),
    }
    with machine.pinned(threads):
        yield from _rows("sparse_residues", 8192, masks, False, 2.0, rounds, seconds)


CLAIMS = {"sparse_window": window, "sparse_blocks": blocks, "sparse_residues": residues}
