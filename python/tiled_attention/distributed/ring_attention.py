"""Exact attention over a sequence whose rows are divided between ranks: the public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from ..arguments import real_dtype
from ..attention import attention
from ..call import needs_derivatives
from ..masks import Mask
from ..relative_bias import RelativeBias
from ..rotary import RotaryEmbedding
from .agreement import agree, reporting
from .all_to_all import attend_by_heads, numbers_sent, refusal
from .checked import check_keys, checked, has_rows, said, tensors_for
from .layout import check_layout, runs_of
from .local_masks import sight_of
from .peers import Peers
from .ring import Ring, RingAttention, attend
from .schedule import make_schedule

METHODS = ("ring", "all_to_all", "auto")
_FUNCTION = "ring_attention"


@overload
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    mask: Mask | Tensor | None = None,
    bias: Tensor | RelativeBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    rotary: RotaryEmbedding | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    return_lse: Literal[False] = False,
    layout: str = "contiguous",
    method: str = "ring",
    timeout: float | None = None,
) -> Tensor: ...


@overload
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    mask: Mask | Tensor | None = None,
    bias: Tensor | RelativeBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    rotary: RotaryEmbedding | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    return_lse: Literal[True],
    layout: str = "contiguous",
    method: str = "ring",
    timeout: float | None = None,
) -> tuple[Tensor, Tensor]: ...


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    mask: Mask | Tensor | None = None,
    bias: Tensor | RelativeBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    rotary: RotaryEmbedding | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    return_lse: bool = False,
    layout: str = "contiguous",
    method: str = "ring",
    timeout: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over a sequence whose rows are divided between the ranks of a group: each gives its shard and gets its rows of out.

    The rows of all ranks together are `attention` of the whole: the same formula, masks, positions and dropout. Every rank calls it with
    the same options, and runs the backward pass if one does. With "ring", keys and values go from rank to rank while each computes with
    what it has; parts are joined by lse; the backward pass sends them round again, and their gradients behind them. Memory is that of the
    shards and of two more of keys and values, in the backward pass of two more of their gradients (float32 for 16-bit inputs). Masks made
    of intervals send nothing to ranks that see none of it.

    Args:
        query: (..., num_heads, this rank's rows, head_dim), as `shard_sequence` makes it; dtypes and strides as of `attention`. Shards of
            the contiguous layout may have any lengths, 0 included.
        key: (..., num_heads_kv, this rank's keys, head_dim).
        value: (..., num_heads_kv, this rank's keys, head_dim_v).
        group: a process group, or a mesh of one dimension; None: the default group. With one rank this is `attention`.
        mask: of the whole sequence, in its order, whatever the layout: a mask of `tiled_attention`, equal on all ranks. A bool tensor in
            it has this rank's rows, in the order of its query, or one row for all, and all keys: it broadcasts to (..., num_heads, this
            rank's rows, all keys).
        bias: float tensor as a bool mask: this rank's rows, all keys. Or, the same on all ranks, one by distance, (..., num_heads or 1, 1,
            all rows + all keys - 1), or a `RelativeBias`.
        scale, softcap: as of `attention`.
        alibi_slopes, sinks: (num_heads,), the same on all ranks.
        rotary: turns query and key by their positions in the whole.
        dropout_p: as of `attention`. The weights that are dropped are those that one process drops whose seed is that of rank 0.
        generator: draws the seed; None: torch's. Every rank draws one, and that of rank 0 is used: with equal seeds on all ranks,
            generators stay equal, and what is dropped is what `attention` would drop.
        query_offset: where query row 0 of the whole stands; None: all keys - all rows.
        return_lse: also return lse.
        layout: "contiguous" or "zigzag", of query, key and value: see `shard_sequence`. Zigzag makes causal work equal for all ranks.
        method: "ring"; "all_to_all": ranks exchange rows for heads, compute whole sequences, and exchange back (needs a number of ranks
            that divides num_heads, and num_heads_kv or is a multiple of it; bool masks and biases without rows); "auto": whichever of both
            sends less.
        timeout: seconds to wait for another rank, on CUDA only for it to come to the call; None: the time-out of the group.

    Returns:
        out (..., num_heads, this rank's rows, head_dim_v), or (out, lse) with `return_lse`, as `attention`.

    Differentiable in query, key, value, bias, alibi_slopes and sinks, through out and lse, once in reverse mode ("all_to_all": any number
    of times). Gradients of key and value are whole. Those of bias, alibi_slopes and sinks are this rank's share, as those of any parameter
    that all ranks have: sum them over the group. Under torch.compile the graph breaks here.

    Raises:
        ValueError, TypeError, RuntimeError: on every rank, naming the argument that is wrong or differs between ranks, or the rank that
            raised or did not answer in time.

    Source: Liu et al., Ring Attention with Blockwise Transformers (2023), section 3; zigzag: Brandon et al., Striped Attention (2023),
        for the imbalance; all-to-all: Jacobs et al., DeepSpeed Ulysses (2023), section 3.
    """
    options = (scale, softcap, alibi_slopes, sinks, dropout_p, generator, query_offset)
    out, lse = _attend(query, key, value, group, mask, bias, rotary, options, return_lse, layout, method, timeout)
    return (out, lse) if return_lse else out


@_disable_dynamo
def _attend(
    query: Any,
    key: Any,
    value: Any,
    group: Any,
    mask: Any,
    bias: Any,
    rotary: Any,
    options: Any,
    return_lse: bool,
    layout: Any,
    method: Any,
    timeout: Any,
) -> tuple[Any, Any]:
    peers = Peers(group, query.device if isinstance(query, Tensor) else torch.device("cpu"), timeout)
    with reporting(peers, _FUNCTION):
        check_layout(layout)
        if method not in METHODS:
            raise ValueError(f"method must be 'ring', 'all_to_all' or 'auto', got {method!r}")
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError("ring_attention cannot run under a torch.func transform")
        if peers.size == 1:
            scale, softcap, slopes, sinks, dropout_p, generator, offset = options
            named = dict(scale=scale, softcap=softcap, alibi_slopes=slopes, sinks=sinks, dropout_p=dropout_p, query_offset=offset)
            return attention(query, key, value, mask=mask, bias=bias, rotary=rotary, generator=generator, return_lse=True, **named)
        call = checked(query, key, value, mask, bias, rotary, options)
        facts = said(call, layout, method, return_lse)
        seed = call.args.dropout_seed
        number = int(seed) if seed is not None and seed.device.type == "cpu" else 0
        own = (call.args.query.shape[-2], call.args.key.shape[-2], number, has_rows(call))
    entries = agree(peers, _FUNCTION, facts, own)
    # From here on every decision, errors included, is the same on all ranks.
    args = call.args
    if args.dropout_seed is not None:
        if args.dropout_seed.device.type == "cpu":
            seed = torch.full_like(args.dropout_seed, entries[0][2])
        else:
            seed = args.dropout_seed.clone()
            dist.broadcast(seed, group=peers.group, group_src=0)
        args = args._replace(dropout_seed=seed)
    lengths_q, lengths_kv = tuple(entry[0] for entry in entries), tuple(entry[1] for entry in entries)
    lengths = sum(lengths_q), sum(lengths_kv)
    offset = lengths[1] - lengths[0] if call.query_offset is None else call.query_offset
    check_keys(call, lengths)

    sight = sight_of(call.mask, offset if isinstance(offset, int) else None)
    forward = make_schedule(lengths_q, lengths_kv, layout, sight, False)
    backward = make_schedule(lengths_q, lengths_kv, layout, sight, True)
    keys = runs_of(lengths_kv, layout, "key")
    tensors = tensors_for(call, args, lengths, offset, (forward.rows[peers.rank], keys[peers.rank]))
    records = needs_derivatives(tensors)
    dims = (args.query.shape[-1], args.value.shape[-1])
    heads = (args.query.shape[-3], args.key.shape[-3])
    reason = refusal(*heads, peers.size, any(entry[3] for entry in entries))
    if method == "all_to_all" and reason is not None:
        raise ValueError(f"method='all_to_all' needs {reason}: use method='ring'")
    if method == "auto" and reason is None:
        passes = 2 if records else 1
        by_heads = passes * numbers_sent(lengths_q, lengths_kv, heads, dims)
        wide = real_dtype(args.query.dtype).itemsize / args.query.dtype.itemsize
        numbers = sum(passes * forward.keys_sent(rank) + (records and wide * backward.gradients_sent(rank)) for rank in range(peers.size))
        method = "all_to_all" if by_heads < numbers * heads[1] * sum(dims) else "ring"
    empty: Any = None
    rest = args._replace(query=empty, key=empty, value=None, alibi_slopes=None, sinks=None, query_offset=None, intervals=())
    if method == "all_to_all":
        return attend_by_heads(peers, rest, call.mask, offset, (forward.rows, keys), (lengths_q, lengths_kv), tensors, return_lse)
    ring = Ring(peers, forward, backward, lengths, call.mask, offset, rest)
    if records:
        out, lse = RingAttention.apply(ring, *tensors)
    else:
        with torch.no_grad():
            out, lse, _ = attend(ring, *tensors)
    return out, lse
