"""The keys and values that decoding keeps: contiguous, in pages, or the last ones in a ring."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention_decode import NO_RING, append, decode, turn_new
from .mask_checks import is_readable, number
from .masks import Causal, Mask, Sinks, SlidingWindow
from .rotary import RotaryEmbedding

_CAUSAL = Causal()


class KVCache:
    """Preallocated keys and values of a batch, one layer's.

    Contiguous by default. With `page_size` in pages, all of them allocated here, of which batch item b owns page_table[b]. With `window` a
    ring: the cache holds the last `capacity` tokens (and the first `num_sinks`), so that memory stays the same however long the text grows,
    and every query sees the last `window` keys, its own included (and the first `num_sinks`). Positions stay absolute: key j of an item is
    its j-th token, whatever slot it is in, for masks and for ALiBi.

    `attend` is the step of a decoder::

        cache = ta.KVCache(batch, num_heads_kv, 4096, head_dim, dtype=torch.bfloat16)
        cache.append(key, value)                    # the prompt, attended to by ta.attention(..., mask=ta.Causal())
        out = cache.attend(query, key, value)       # one token, or a few: appended, then seen

    Its tensors are what `attention_decode` takes, unless the cache is a ring. All of them are updated in place, so that a captured CUDA
    graph, and compiled code, work on the same memory.

    Args:
        batch, num_heads_kv, head_dim: sizes.
        capacity: tokens that each batch item can hold; rounded up to whole pages.
        head_dim_v: of the values; None: head_dim.
        dtype: float32, float64, bfloat16 or float16; None: torch's default.
        device: None: torch's default.
        page_size: tokens of a page; None: not paged.
        window: keys that a query sees; None: all, and no ring. At most capacity - num_sinks. A call may bring
            capacity - num_sinks - window + 1 tokens to `attend`: room for more than the window is what a block of several queries needs.
        num_sinks: with a window, the first tokens, which stay visible (Xiao et al., Efficient streaming language models with attention
            sinks, 2024; at their own positions, not at shifted ones).

    Attributes:
        keys: (batch, num_heads_kv, capacity, head_dim), or (num_pages, num_heads_kv, page_size, head_dim).
        values: the same with head_dim_v.
        seqlens: int32 (batch,), tokens so far, those that left a ring included.
        page_table: int32 (batch, pages), or None.

    Raises:
        ValueError, TypeError: naming the argument.
    """

    keys: Tensor
    values: Tensor
    seqlens: Tensor
    page_table: Tensor | None

    def __init__(
        self,
        batch: int,
        num_heads_kv: int,
        capacity: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        page_size: int | None = None,
        window: int | None = None,
        num_sinks: int = 0,
    ) -> None:
        sizes = (("batch", batch), ("num_heads_kv", num_heads_kv), ("capacity", capacity), ("head_dim", head_dim), ("num_sinks", num_sinks))
        batch, num_heads_kv, capacity, head_dim, num_sinks = (number(name, size, 0) for name, size in sizes)
        head_dim_v = head_dim if head_dim_v is None else number("head_dim_v", head_dim_v, 0)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            raise TypeError(f"dtype: expected float32, float64, bfloat16 or float16, got {dtype}")
        self.page_table = None
        shape: tuple[int, ...] = (batch, num_heads_kv, capacity)
        if page_size is not None:
            page_size = number("page_size", page_size, 1)
            pages = -(-capacity // page_size)
            capacity = pages * page_size
            shape = (batch * pages, num_heads_kv, page_size)
            self.page_table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
        self.capacity, self.num_sinks, self.window = capacity, num_sinks, window
        self._pinned, self._mask = NO_RING, None
        if window is not None:
            self.window = number("window", window, 1)
            if self.window > capacity - num_sinks:
                raise ValueError(f"window: expected at most capacity - num_sinks = {capacity - num_sinks}, got {window}")
            self._pinned = num_sinks
            near: Mask = SlidingWindow(self.window - 1, 0)
            self._mask = Causal() & (near | Sinks(num_sinks)) if num_sinks else near
        elif num_sinks:
            raise ValueError(f"num_sinks: expected 0 without a window, where all keys are visible, got {num_sinks}")
        self.keys = torch.empty((*shape, head_dim), dtype=dtype, device=device)
        self.values = torch.empty((*shape, head_dim_v), dtype=dtype, device=device)
        self.seqlens = torch.zeros(batch, dtype=torch.int32, device=device)

    def append(self, key: Tensor, value: Tensor, *, rotary: RotaryEmbedding | None = None) -> None:
        """Adds tokens to every batch item. Of more tokens than a ring holds, the last ones stay.

        Args:
            key: (batch, num_heads_kv, n_new, head_dim).
            value: (batch, num_heads_kv, n_new, head_dim_v).
            rotary: turns keys at their positions before they are written, as `attend(..., rotary=)` wants to find them. None: no turning.

        Raises:
            RuntimeError, ValueError, TypeError: naming the argument; on the CPU also where they do not fit behind `seqlens`.
        """
        if rotary is not None:
            key = turn_new("key", key, self.seqlens, rotary)
        self.seqlens.add_(append(self.keys, self.values, key, value, self.seqlens, self.page_table, self._pinned))

    def attend(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = _CAUSAL,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        rotary: RotaryEmbedding | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Appends key and value, where they are given, and returns `attention_decode` of `query` over the cache.

        Args:
            query: (batch, num_heads, seqlen_q, head_dim); the last query stands at the last token.
            key, value: as in `append`, usually as many tokens as queries.
            mask: combined with the window of a ring. None: every query sees all keys.
            scale, softcap, alibi_slopes, sinks, return_lse: as in `attention_decode`.
            rotary: turns query and key at their positions, key before it is written: the cache holds turned keys.

        Returns:
            out (batch, num_heads, seqlen_q, head_dim_v), or (out, lse).

        Raises:
            RuntimeError, ValueError, TypeError: naming the argument.
        """
        if not isinstance(query, Tensor):
            raise TypeError(f"query must be a tensor, got {type(query).__name__}")
        if self.window is not None and self._mask is not None:
            room = self.capacity - self.num_sinks - self.window + 1
            if query.dim() == 4 and query.shape[-2] > room:
                raise ValueError(
                    f"query: expected at most capacity - num_sinks - window + 1 = {room} queries, whose windows the ring still holds, "
                    f"got {query.shape[-2]}"
                )
            mask = self._mask if mask is None or mask is _CAUSAL else mask & self._mask
        elif mask is _CAUSAL and query.dim() == 4 and query.shape[-2] == 1:
            mask = None  # the last token sees all
        result = decode(
            *(query, self.keys, self.values, self.seqlens, self.page_table, key, value),
            *(mask, scale, softcap, alibi_slopes, sinks, return_lse, self._pinned),
            rotary=rotary,
        )
        if key is not None:
            self.seqlens.add_(key.shape[-2])
        return result

    def reorder(self, index: Tensor) -> None:
        """Batch item b becomes what item index[b] was, as beam search wants it.

        Args:
            index: integer (batch,), each in [0, batch); items may be taken several times.

        Raises:
            ValueError, TypeError: naming `index`.
        """
        batch = self.seqlens.shape[0]
        if not isinstance(index, Tensor) or index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
            raise TypeError(f"index: expected an integer tensor ({batch},), got {getattr(index, 'dtype', type(index).__name__)}")
        if tuple(index.shape) != (batch,):
            raise ValueError(f"index: expected shape ({batch},), got {tuple(index.shape)}")
        readable = is_readable(index) and batch > 0
        if readable and bool(((index < 0) | (index >= batch)).any()):
            raise ValueError(f"index: expected items in [0, {batch}), got {index.tolist()}")
        index = index.to(self.seqlens.device, torch.int64)
        # Lengths are read only where that waits for nothing.
        used = min(int(self.seqlens.max()), self.capacity) if readable and is_readable(self.seqlens) else self.capacity
        for cache in (self.keys, self.values):
            if self.page_table is None:
                rows = cache.narrow(2, 0, used)
                rows.copy_(rows.index_select(0, index))
            else:
                pages = self.page_table[:, : -(-used // cache.shape[2])].long()
                cache.index_copy_(0, pages.flatten(), cache.index_select(0, pages.index_select(0, index).flatten()))
        self.seqlens.copy_(self.seqlens.index_select(0, index))

    def reset(self) -> None:
        """Forgets all tokens; the memory stays."""
        self.seqlens.zero_()

    def __repr__(self) -> str:
        shape = (
            f"batch={self.seqlens.shape[0]}, num_heads_kv={self.keys.shape[1]}, capacity={self.capacity}, head_dim={self.keys.shape[-1]}"
        )
        paged = "" if self.page_table is None else f", page_size={self.keys.shape[2]}"
        ring = "" if self.window is None else f", window={self.window}, num_sinks={self.num_sinks}"
        return f"KVCache({shape}, head_dim_v={self.values.shape[-1]}, dtype={self.keys.dtype}, device={self.keys.device}{paged}{ring})"
