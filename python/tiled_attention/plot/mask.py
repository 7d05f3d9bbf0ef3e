"""The picture of a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..block_list import shares
from ..masks import Mask

_PIXELS = 512  # lengths up to which every pair is a pixel


def mask(mask: Mask | Tensor, seqlen_q: int, seqlen_kv: int, *, query_offset: int | None = None, axes: Any = None) -> Any:
    """Draws which keys (across) each query (down) sees. Of long sequences: how much of each 64 x 64 tile, without a dense matrix.

    Args:
        mask: a mask, or a bool tensor (seqlen_q, seqlen_kv).
        seqlen_q, seqlen_kv, query_offset: as of `Mask.dense`.
        axes: matplotlib axes to draw on; None: those of a new figure.

    Returns:
        The axes. Where batch items or heads differ, the mean over them is drawn.

    Raises:
        ImportError: without matplotlib.
        ValueError, TypeError: naming `mask` or a length.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("tiled_attention.plot needs matplotlib: pip install matplotlib") from error
    for name, length in (("seqlen_q", seqlen_q), ("seqlen_kv", seqlen_kv)):
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {length!r}")
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool or mask.shape[-2:] != (seqlen_q, seqlen_kv):
            raise ValueError(f"mask must be bool (..., {seqlen_q}, {seqlen_kv}), got {mask.dtype} {tuple(mask.shape)}")
        seen = mask.double()
    elif not isinstance(mask, Mask):
        raise TypeError(f"mask must be a mask or a bool tensor, got {type(mask).__name__}")
    elif max(seqlen_q, seqlen_kv) <= _PIXELS:
        seen = mask.dense(seqlen_q, seqlen_kv, query_offset=query_offset).double()
    else:
        seen = shares(mask, seqlen_q, seqlen_kv, query_offset)
    picture = seen.reshape(-1, *seen.shape[-2:]).mean(0).cpu().numpy()
    if axes is None:
        _, axes = pyplot.subplots()
    axes.imshow(picture, cmap="Blues", vmin=0, vmax=1, interpolation="nearest", aspect="auto", extent=(0, seqlen_kv, seqlen_q, 0))
    axes.set(xlabel="key", ylabel="query", title="" if isinstance(mask, Tensor) else repr(mask))
    return axes
