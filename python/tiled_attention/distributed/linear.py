"""Linear attention over a sequence that lies in pieces on the ranks of a group: what a rank needs of the others is one state."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..arguments import LinearArguments, LinearGradients, real_dtype
from ..autograd import is_differentiating, pick, save, saved, spread
from ..call import needs_derivatives
from ..library import below_autograd, ops
from ..linear_attention import linear_attention as _of_one_process
from ..linear_autograd import linear_bwd_arguments
from ..linear_call import FeatureMap, LinearState, out_dtype, prepare
from .agreement import agree, reporting
from .peers import Peers, Pending

_FUNCTION = "distributed.linear_attention"
_BACKWARD = f"backward of {_FUNCTION}"
_ONCE = (
    f"{_FUNCTION} is differentiated once, in reverse mode: no create_graph, forward mode or torch.func; use "
    "tiled_attention.linear_attention on the whole sequence"
)
State = tuple[Tensor, Tensor]


@overload
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    causal: bool = False,
    normalize: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: Literal[False] = False,
    timeout: float | None = None,
) -> Tensor: ...


@overload
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    causal: bool = False,
    normalize: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: Literal[True],
    timeout: float | None = None,
) -> tuple[Tensor, LinearState]: ...


@_disable_dynamo
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    causal: bool = False,
    normalize: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    timeout: float | None = None,
) -> Tensor | tuple[Tensor, LinearState]:
    """`ta.linear_attention` over a sequence of which every rank holds one piece, in the order of the ranks.

    All ranks call it with their pieces, which may have different lengths, 0 included. Causal: every rank computes what its keys add to a
    state, takes the state before its piece from the rank before, hands the state after it on to the next, and computes its outputs from the
    state before. One state crosses each boundary between ranks, in backward one gradient of a state, and nothing else. Otherwise the
    states are summed over all ranks (one all-reduce of a state, in backward another one). With one rank it is `ta.linear_attention`.

    Args:
        query: (..., num_heads, seqlen_q, head_dim), the piece of this rank.
        key: (..., num_heads_kv, seqlen_kv, head_dim); with causal=True seqlen_kv is seqlen_q, of this rank.
        value: (..., num_heads_kv, seqlen_kv, head_dim_v).
        group: a process group or a mesh of one dimension, all of whose ranks call: on CPU tensors over gloo, on CUDA tensors over NCCL.
            None: the default group.
        feature_map, causal, normalize, scale: as in `ta.linear_attention`, the same on all ranks.
        key_mask: of the keys of this rank.
        log_decay: of the tokens of this rank; either on all ranks or on none.
        initial_state: the state before the first token of the sequence, read on the first rank. What the others give must have the shape of
            a state, is not read, and has gradient 0, so that the sum over ranks of its gradients is its gradient. Only with causal=True.
        return_state: also return the state after the last token of this rank, which on the last rank is that of the sequence; with
            causal=False that of all keys.
        timeout: seconds to wait for another rank. None: the time-out of the group.

    Returns:
        out (..., num_heads, seqlen_q, head_dim_v) of the queries of this rank; with `return_state` (out, state).

    Differentiable once, in reverse mode, in query, key, value, log_decay and initial_state, through out and the returned state. All ranks
    must run backward, each for what it returned: a loss that reaches one rank alone makes the others wait for it, and then fail.

    Raises:
        ValueError, TypeError: naming the argument; on every rank, where ranks disagree on shapes, dtypes or options.
        RuntimeError: naming the rank that did not make the call within `timeout`, was lost in it or refused it, on every other rank.

    Source: Katharopoulos et al., Transformers are RNNs (2020), section 3.3, for the state; states as what crosses devices: Sun et al.,
    Linear attention sequence parallelism (2024).
    """
    peers = Peers(group, query.device if isinstance(query, Tensor) else torch.device("cpu"), timeout)
    options: dict[str, Any] = {"feature_map": feature_map, "causal": causal, "normalize": normalize, "scale": scale, "key_mask": key_mask}
    if peers.size == 1:
        peers.check_timeout()
        options |= {"log_decay": log_decay, "initial_state": initial_state, "return_state": return_state}
        return _of_one_process(query, key, value, **options)
    with reporting(peers, _FUNCTION):
        args = prepare(
            query,
            key,
            value,
            feature_map,
            causal,
            normalize,
            scale,
            key_mask,
            log_decay,
            initial_state,
            state_name="initial_state",
        )
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            raise RuntimeError(_ONCE)
    records = needs_derivatives(args)
    agree(peers, _FUNCTION, _facts(args, records))
    function = _Causal if args.causal else _Full
    if records:
        out, kv, k_sum = function.apply(peers, *args)
    else:
        (out, kv, k_sum), _ = function.run(peers, args)
    out = out.to(out_dtype(query))
    return (out, LinearState(kv, k_sum)) if return_state else out


def _facts(args: LinearArguments, records: bool) -> dict[str, Any]:
    """What all ranks must say alike. Lengths may differ."""
    decay = args.log_decay
    return {
        "the leading dimensions and heads of query": tuple(args.query.shape[:-2]),
        "the leading dimensions and heads of key": tuple(args.key.shape[:-2]),
        "head_dim of query and key": args.query.shape[-1],
        "head_dim of value": args.value.shape[-1],
        "the dtype of query": args.query.dtype,
        "the device type of query": args.query.device.type,
        "causal": args.causal,
        "normalize": args.normalize,
        "scale": args.scale,
        "feature_map": (args.query_map, args.key_map),
        "log_decay": "None" if decay is None else "per token" if decay.shape[-1] == 1 else "per feature",
        "whether an input requires a gradient": records,
    }


class _Causal(torch.autograd.Function):
    """(Peers, LinearArguments) -> (out, kv, k_sum) of this rank."""

    @staticmethod
    def run(peers: Peers, args: LinearArguments) -> tuple[tuple[Tensor, Tensor, Tensor], LinearArguments]:
        """The results, and the arguments with the state before this piece for the initial one."""
        args = args if _is_first(peers) else args._replace(initial_kv=None, initial_k_sum=None)
        results = None
        if _is_first(peers) and args.log_decay is not None:
            results = _forward(args)
            added = results[1:]
        elif not _is_last(peers):
            added = _added(args)
        if not _is_first(peers):
            args = _with_state(args, _received(peers, peers.rank - 1, args))
        sent = None
        if not _is_last(peers):
            before = (args.initial_kv, args.initial_k_sum)
            state = added if results is not None or before[0] is None else _plus(added, _decayed(before, args.log_decay))
            sent = _send(peers, peers.rank + 1, state)
        results = results or _forward(args)
        if sent is not None:
            sent.wait()
        return results, args

    @staticmethod
    def forward(ctx: Any, peers: Peers, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        args = LinearArguments(*inputs)
        results, with_state = _Causal.run(peers, args)
        save(ctx, with_state)
        ctx.peers, ctx.given = peers, [None if x is None else (x.shape, x.dtype) for x in (args.initial_kv, args.initial_k_sum)]
        ctx.set_materialize_grads(True)
        return results

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *by_state: Tensor) -> Any:
        peers, (args, _) = ctx.peers, saved(ctx)
        _begin_backward(peers)
        wanted = pick(ctx.needs_input_grad[1:], LinearGradients)
        for_state = wanted._replace(initial_kv=True, initial_k_sum=True)
        after: State = (by_state[0], by_state[1])
        sent = None
        if not _is_last(peers):
            added = None if _is_first(peers) else _gradients((grad_out, *after), args, _STATE_ALONE)[4:]
            received = _received(peers, peers.rank + 1, args)
            if added is not None:
                sent = _send(peers, peers.rank - 1, _plus(added, _decayed(received, args.log_decay)))
            after = _plus(after, received)
        grads = _gradients(
            (grad_out, *after), args, for_state if _is_last(peers) else wanted if _is_first(peers) else _without_state(wanted)
        )
        if _is_last(peers):
            sent = _send(peers, peers.rank - 1, grads[4:])
        results = LinearGradients(*(grad if want else None for grad, want in zip(grads, wanted)))
        if not _is_first(peers):  # what was given for the initial state acts on nothing here
            unread = (
                torch.zeros(given[0], dtype=given[1], device=grad_out.device) if want and given else None
                for given, want in zip(ctx.given, wanted[4:])
            )
            results = LinearGradients(*results[:4], *unread)
        if sent is not None:
            sent.wait()
        return (None, *spread(results, LinearArguments))


class _Full(torch.autograd.Function):
    """The same without order: the state of all keys is a sum over the ranks."""

    @staticmethod
    def run(peers: Peers, args: LinearArguments) -> tuple[tuple[Tensor, Tensor, Tensor], LinearArguments]:
        state = _summed(peers, _added(args), args)
        return (_forward(_reading(args, state))[0], *state), args

    @staticmethod
    def forward(ctx: Any, peers: Peers, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        args = LinearArguments(*inputs)
        results, _ = _Full.run(peers, args)
        save(ctx, args, *results[1:])
        ctx.peers = peers
        ctx.set_materialize_grads(True)
        return results

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *by_state: Tensor) -> Any:
        peers, (args, state) = ctx.peers, saved(ctx)
        _begin_backward(peers)
        wanted = pick(ctx.needs_input_grad[1:], LinearGradients)
        reads = _wanted(query=wanted.query, initial_kv=True, initial_k_sum=True)
        by_query, _, _, _, *by_sum = _gradients((grad_out, None, None), _reading(args, state), reads)
        total = _summed(peers, _plus(by_sum, by_state), args)
        keys = _wanted(key=wanted.key, value=wanted.value)
        _, by_key, by_value, *_ = _gradients((None, *total), _without_queries(args), keys)
        grads = LinearGradients(by_query, by_key, by_value, None, None, None)
        return (None, *spread([grad if want else None for grad, want in zip(grads, wanted)], LinearArguments))


def _wanted(**wants: Any) -> Any:
    """Which gradients are wanted: True for each of these."""
    return LinearGradients(*(wants.get(name, False) for name in LinearGradients._fields))


_STATE_ALONE = _wanted(initial_kv=True, initial_k_sum=True)


def _without_state(wanted: Any) -> Any:
    return wanted._replace(initial_kv=False, initial_k_sum=False)


def _begin_backward(peers: Peers) -> None:
    with reporting(peers, _BACKWARD):
        if is_differentiating():
            raise RuntimeError(_ONCE)
    agree(peers, _BACKWARD, {})


def _forward(args: LinearArguments) -> tuple[Tensor, Tensor, Tensor]:
    with below_autograd():
        return ops.linear_attention_fwd(*args)


def _gradients(grads: Any, args: LinearArguments, wanted: Any) -> tuple[Tensor, ...]:
    """The results of linear_attention_bwd; without the gradients of a state where the call has none."""
    if args.initial_kv is None:
        wanted = _without_state(wanted)
    with below_autograd():
        return ops.linear_attention_bwd(*linear_bwd_arguments(grads, args, wanted))


def _without_queries(args: LinearArguments) -> LinearArguments:
    """A call for the state alone, where no gate decays it."""
    return args._replace(query=args.query[..., :0, :], causal=False, initial_kv=None, initial_k_sum=None)


def _added(args: LinearArguments) -> State:
    """What the keys of this rank add to the state after them."""
    if args.log_decay is None:
        return _forward(_without_queries(args))[1:]
    return _forward(args._replace(initial_kv=None, initial_k_sum=None))[1:]


def _reading(args: LinearArguments, state: State) -> LinearArguments:
    """Queries before which stands `state`, and no key."""
    query, key, value = args.query, args.key, args.value
    seqlen = query.shape[-2]
    return args._replace(
        key=key.new_zeros(()).expand(*key.shape[:-2], seqlen, key.shape[-1]),
        value=value.new_zeros(()).expand(*value.shape[:-2], seqlen, value.shape[-1]),
        key_mask=torch.zeros((1,) * query.dim(), dtype=torch.bool, device=query.device),
        initial_kv=state[0],
        initial_k_sum=state[1],
        causal=True,
    )


def _decayed(state: Any, log_decay: Tensor | None) -> State:
    """A state, or the gradient of one, over all tokens of this rank. A gate that forgets leaves nothing, whatever was there."""
    if log_decay is None:
        return state
    factor, forgets = log_decay.sum(-2).exp(), (log_decay.exp() == 0).any(-2)  # (..., heads, 1 or head_dim)
    kv = torch.where(forgets[..., None], 0.0, state[0] * factor[..., None])
    return kv, torch.where(forgets, 0.0, state[1] * factor)


def _plus(a: Any, b: Any) -> State:
    return a[0] + b[0], a[1] + b[1]


def _with_state(args: LinearArguments, state: State) -> LinearArguments:
    return args._replace(initial_kv=state[0], initial_k_sum=state[1])


def _sizes(args: LinearArguments) -> tuple[torch.Size, torch.Size]:
    key = args.key
    k_sum = torch.Size((*key.shape[:-2], key.shape[-1]))
    return torch.Size((*k_sum, args.value.shape[-1])), k_sum


def _pack(state: Any) -> Tensor:
    """A message: kv and behind it k_sum, flat."""
    return torch.cat([part.reshape(-1) for part in state])


def _send(peers: Peers, to: int, state: Any) -> Pending:
    return peers.exchange([(to, _pack(state))], [])


def _received(peers: Peers, source: int, args: LinearArguments) -> State:
    message = args.key.new_empty(sum(size.numel() for size in _sizes(args)), dtype=real_dtype(args.key.dtype))
    peers.exchange([], [(source, message)]).wait()
    return _unpack(message, args)


def _summed(peers: Peers, state: Any, args: LinearArguments) -> State:
    """The sum over all ranks."""
    message = _pack(state)
    if message.numel():
        try:
            work = dist.all_reduce(message, group=peers.group, async_op=True)
            work.wait(*([] if peers.timeout is None or message.is_cuda else [timedelta(seconds=peers.timeout)]))
        except RuntimeError as error:
            raise peers.lost(peers.others(), error) from error
    return _unpack(message, args)


def _is_first(peers: Peers) -> bool:
    return peers.rank == 0


def _is_last(peers: Peers) -> bool:
    return peers.rank == peers.size - 1


def _unpack(message: Tensor, args: LinearArguments) -> State:
    kv, k_sum = _sizes(args)
    return message[: kv.numel()].view(kv), message[kv.numel() :].view(k_sum)
