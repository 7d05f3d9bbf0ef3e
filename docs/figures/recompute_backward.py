"""Draws what forward keeps for backward, over the length: the formula in PyTorch's operators, and attention that keeps lse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from _common import BLACK, BLUE, ORANGE, RED, pyplot, save, start
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiled_attention as ta

HEAD_DIM = 64
SEQLENS = (256, 512, 1024, 2048, 4096)


def formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT * HEAD_DIM**-0.5, -1) @ value


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def kept(function: Callable[[Tensor, Tensor, Tensor], Tensor], seqlen: int) -> int:
    """Bytes that autograd keeps for backward beyond query, key and value. Views of one memory count once."""
    inputs = [torch.randn(1, 1, seqlen, HEAD_DIM, requires_grad=True) for _ in range(3)]
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*inputs)
    for tensor in inputs:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    assert out.requires_grad
    return sum(storages.values())


def main(argv: Sequence[str] | None = None) -> None:
    out = start(argv, __doc__)
    curves = {
        "formula in PyTorch's operators": ([kept(formula, n) for n in SEQLENS], "s--", RED),
        "SDPA, fused": ([kept(fused, n) for n in SEQLENS], "^-", ORANGE),
        "ta.attention": ([kept(ta.attention, n) for n in SEQLENS], "o:", BLUE),
    }
    figure, axes = pyplot.subplots(figsize=(5.2, 3.2))
    for name, (size, line, color) in curves.items():
        hollow = {"markersize": 9, "markerfacecolor": "none"} if color == ORANGE else {"markersize": 5}
        axes.plot(SEQLENS, size, line, color=color, label=name, **hollow)
    axes.set(xscale="log", yscale="log", xlabel="seqlen", ylabel="bytes kept for backward, one head")
    axes.set_xticks(SEQLENS, [str(n) for n in SEQLENS])
    axes.minorticks_off()
    axes.set_yticks([2**e for e in (16, 18, 20, 22, 24, 26)], ["64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB"])
    axes.annotate("n² weights", (SEQLENS[-1], curves["formula in PyTorch's operators"][0][-1]), (-66, 0), textcoords="offset points")
    axes.annotate("out and lse", (SEQLENS[-1], curves["ta.attention"][0][-1]), (-44, -28), textcoords="offset points", color=BLACK)
    axes.legend(loc="upper left")
    save(figure, out / "recompute_backward.svg")

    print("bytes kept for backward beyond query, key and value; one head, head_dim 64, float32")
    print("seqlen    formula      SDPA  ta.attention")
    for n, *sizes in zip(SEQLENS, *(size for size, _, _ in curves.values()), strict=True):
        print(f"{n:6} {sizes[0]:10} {sizes[1]:9} {sizes[2]:13}")


if __name__ == "__main__":
    main()
