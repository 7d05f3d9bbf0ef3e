"""Ring attention: the ranks' keys and values pass by the queries of each, forward and, with their gradients, backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import Arguments, Gradients, is_by_distance, real_dtype
from ..fake import dense_like
from ..lowering import lower
from ..masks import Mask
from ..parts import add_backward, add_forward, lse_limit
from .layout import Run
from .local_masks import Block, band_of, block_of, localize
from .peers import Peers, Pending
from .schedule import Piece, Schedule, Step

_OWN: Step = (1, 0)


class Ring(NamedTuple):
    """One call."""

    peers: Peers
    forward: Schedule
    backward: Schedule
    lengths: tuple[int, int]  # of the whole
    mask: Mask | Tensor | None
    query_offset: int | Tensor  # of the whole
    options: Arguments  # without tensors but the seed


class _Rows(NamedTuple):
    """A run of this rank's queries, and what belongs to it."""

    run: Run
    query: Tensor
    out: Tensor
    lse: Tensor
    residual: Tensor

    def narrow(self, tensor: Tensor, dim: int = -2) -> Tensor:
        return tensor.narrow(dim, self.run.at, self.run.end - self.run.begin)


def _rows_of(run: Run, query: Tensor, out: Tensor, lse: Tensor, residual: Tensor) -> _Rows:
    rows = _Rows(run, query, out, lse, residual)
    residual = rows.narrow(residual) if residual.dim() > 1 else residual
    return _Rows(run, rows.narrow(query), rows.narrow(out), rows.narrow(lse, -1).contiguous(), residual)


def _arguments(ring: Ring, rows: _Rows, piece: Piece, key: Tensor, value: Tensor, bias: Tensor | None, slopes: Tensor | None) -> Arguments:
    """Of these rows and the keys of a piece; `bias` is that of the rank."""
    run, offset = rows.run, ring.query_offset
    whole = offset if isinstance(offset, int) else None
    block = Block(run.begin, run.end, piece.begin, piece.end, run.at, *ring.lengths, whole)
    lowered = lower(
        localize(ring.mask, block, key.device),
        batch_shape=key.shape[:-3],
        num_heads=rows.query.shape[-3],
        seqlen_q=rows.query.shape[-2],
        seqlen_kv=key.shape[-2],
        query_offset=offset + (run.begin - piece.begin),
        device=key.device,
    )
    if bias is not None:
        bias = band_of(bias, block) if is_by_distance(bias, *ring.lengths) else block_of(bias, block)
    return ring.options._replace(
        query=rows.query,
        key=key,
        value=value,
        mask=lowered.mask,
        bias=bias,
        alibi_slopes=slopes,
        key_lengths=lowered.key_lengths,
        documents=lowered.documents,
        query_offset=lowered.query_offset,
        block_rows=lowered.block_rows,
        block_tiles=lowered.block_tiles,
        block_bits=lowered.block_bits,
        intervals=lowered.intervals,
        dropout_offsets=(0, 0, run.begin, piece.begin) if ring.options.dropout_p > 0 else (),
    )


def _pair_views(flat: Tensor, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """`flat` as keys and values of a piece, like those of the rank."""
    shapes = [(*x.shape[:-2], length, x.shape[-1]) for x in (key, value)]
    middle = math.prod(shapes[0])
    return flat[:middle].view(shapes[0]), flat[middle:].view(shapes[1])


def _room(piece: Piece, key: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """For the keys and values of a piece, or their gradients, as `_pair_views` divides it."""
    return key.new_empty(math.prod(key.shape[:-2]) * piece.length * (key.shape[-1] + value.shape[-1]), dtype=dtype)


class _Travel:
    """Pieces on their way: `steps` yields what is here at each step, while the next ones arrive."""

    def __init__(self, peers: Peers, schedule: Schedule, key: Tensor, value: Tensor) -> None:
        self.peers, self.schedule, self.key, self.value = peers, schedule, key, value

    def steps(self) -> Iterator[tuple[Step, dict[Piece, tuple[Tensor, Tensor]]]]:
        steps = (_OWN, *self.schedule.steps)
        held = {piece: self._own(piece) for piece in self.schedule.own[self.peers.rank]}
        flat: dict[Piece, Tensor] = {}
        for at, step in enumerate(steps):
            pending, coming = self._start(steps[at + 1], flat) if at + 1 < len(steps) else (None, {})
            yield step, held
            held.clear()
            if pending is not None:
                pending.wait()
            flat = coming
            held = {piece: _pair_views(tensor, self.key, self.value, piece.length) for piece, tensor in coming.items()}

    def _own(self, piece: Piece) -> tuple[Tensor, Tensor]:
        return self.key.narrow(-2, piece.at, piece.length), self.value.narrow(-2, piece.at, piece.length)

    def _start(self, step: Step, flat: dict[Piece, Tensor]) -> tuple[Pending, dict[Piece, Tensor]]:
        """The messages of the step, which keep what is sent, and what they bring."""
        (direction, distance), peers = step, self.peers
        ahead, behind = (peers.rank + direction) % peers.size, (peers.rank - direction) % peers.size
        sends = [(ahead, flat[piece] if distance > 1 else self._packed(piece)) for piece in self.schedule.at(ahead, step)]
        coming = {piece: _room(piece, self.key, self.value, self.key.dtype) for piece in self.schedule.at(peers.rank, step)}
        return peers.exchange(sends, [(behind, tensor) for tensor in coming.values()]), coming

    def _packed(self, piece: Piece) -> Tensor:
        flat = _room(piece, self.key, self.value, self.key.dtype)
        for target, source in zip(_pair_views(flat, self.key, self.value, piece.length), self._own(piece), strict=True):
            target.copy_(source)
        return flat


def attend(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, residual) of this rank's queries over the keys of all ranks, below autograd."""
    schedule, rank = ring.forward, ring.peers.rank
    real = real_dtype(query.dtype)
    out = dense_like(query, (*query.shape[:-1], value.shape[-1])).zero_()
    residual = torch.zeros_like(out) if real != query.dtype else out.new_empty(0)
    # A sink is a part without a value. In double, lse is rounded once, not by each part that joins.
    lse = torch.full(query.shape[:-1], -math.inf, dtype=torch.float64, device=query.device)
    if sinks is not None:
        lse.copy_(sinks[:, None].expand(lse.shape))
    every = {run: _rows_of(run, query, out, lse, residual) for run in schedule.rows[rank]}

    def add(piece: Piece, key: Tensor, value: Tensor) -> None:
        for run in schedule.blocks(rank, piece):
            rows = every[run]
            add_forward(_arguments(ring, rows, piece, key, value, bias, slopes), rows.out, rows.lse, rows.residual)

    for _, held in _Travel(ring.peers, schedule, key, value).steps():
        for piece in list(held):
            add(piece, *held[piece])
    for rows in every.values():
        rows.narrow(lse, -1).copy_(rows.lse)
    return out, lse.to(real), residual


class RingAttention(torch.autograd.Function):
    """(Ring, query, key, value, bias, slopes, sinks) -> (out, lse)."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, *tensors: Tensor | None) -> Any:
        query, key, value, bias, slopes, sinks = tensors
        assert query is not None and key is not None and value is not None
        out, lse, residual = attend(ring, query, key, value, bias, slopes, sinks)
        ctx.ring = ring
        ctx.save_for_backward(*tensors, out, lse, residual)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("ring_attention cannot be differentiated twice (create_graph=True): use method='all_to_all'")
        *tensors, out, lse, residual = ctx.saved_tensors
        if grad_out is None:
            grad_out = out.new_zeros(()).expand(out.shape)
        passed = _Backward(ctx.ring, grad_out, grad_lse, tensors, out, lse, residual, ctx.needs_input_grad[1:])
        return (None, *passed.run())


class _Backward:
    def __init__(
        self,
        ring: Ring,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        tensors: Sequence[Any],
        out: Tensor,
        lse: Tensor,
        residual: Tensor,
        needed: Sequence[bool],
    ) -> None:
        self.ring, self.peers, self.schedule = ring, ring.peers, ring.backward
        self.grad_out, self.grad_lse = grad_out, grad_lse
        self.query, self.key, self.value, self.bias, self.slopes, self.sinks = tensors
        self.out, self.lse, self.residual, self.needed = out, lse, residual, needed
        self.real = real_dtype(out.dtype)
        # The same for all keys of a row: scores without a place. Operators take it that all keys of the row are theirs.
        self.by_row = bool(needed[3]) and self.bias.shape[-1] == 1
        needed = [bool(need) and not (at == 3 and self.by_row) for at, need in enumerate(needed)]
        zeros = [torch.zeros_like(x, dtype=self.real) if need else None for x, need in zip(tensors[:5], needed)]
        self.totals = Gradients(zeros[0], zeros[1], zeros[2], zeros[3], zeros[4], None)
        self.moves = bool(needed[1] or needed[2])
        self.every = {run: _rows_of(run, self.query, out, lse, residual) for run in self.schedule.rows[self.peers.rank]}
        # exp(score - lse) is as exact as lse is. Operators normalise rows with large lse again, from the keys that they are given.
        coarse = (lse.abs() > lse_limit(out.dtype)).logical_and_(lse.isfinite())
        self.shift = torch.where(coarse, lse, 0.0)[..., None] if bool(coarse.any()) else None
        # By place of the piece: messages, which keep what is sent, and what comes home.
        self.pending: dict[int, tuple[Pending, list[tuple[Piece, Tensor]]]] = {}
        self.arriving: dict[int, Tensor] = {}

    def run(self) -> list[Tensor | None]:
        indices = range(max((len(pieces) for pieces in self.schedule.pieces), default=0))
        for step, held in _Travel(self.peers, self.schedule, self.key, self.value).steps():
            if step == _OWN:
                for piece in list(held):
                    self._add(piece, *held[piece], *self._own(piece))
                continue
            here = {piece.place: piece for piece in held}
            for index in indices:
                self._settle(index)
                grad = None
                if index in here:
                    grad = self._visit(here[index], step, *held[here[index]])
                if self.moves:
                    self._send_on(step, index, grad)
        for index in indices:
            self._settle(index)
        if self.by_row:
            self.totals = self.totals._replace(bias=self._grad_rows().sum_to_size(self.bias.shape))
        grads: list[Tensor | None] = []
        for name, x in zip(Gradients._fields[:5], (self.query, self.key, self.value, self.bias, self.slopes), strict=True):
            total = getattr(self.totals, name)
            self.totals = self.totals._replace(**{name: None})
            grads.append(None if total is None else total.to(x.dtype))
            del total
        return [*grads, self._grad_sinks() if self.needed[5] else None]

    def _room(self, piece: Piece) -> Tensor:
        return _room(piece, self.key, self.value, self.real)

    def _own(self, piece: Piece) -> tuple[Tensor | None, Tensor | None]:
        grads = [None if grad is None else grad.narrow(-2, piece.at, piece.length) for grad in self.totals[1:3]]
        return grads[0], grads[1]

    def _visit(self, piece: Piece, step: Step, key: Tensor, value: Tensor) -> tuple[Piece, Tensor] | None:
        """Adds what this rank's rows say to the piece's gradient, and returns that; None before it starts."""
        direction, distance = step
        grad = None
        if self.moves and distance > piece.start(direction):
            grad = self.arriving.pop(piece.place)
        elif self.moves and distance == piece.start(direction):
            grad = self._room(piece).zero_()
        if distance in piece.seen_at(direction):
            views = (None, None) if grad is None else _pair_views(grad, self.key, self.value, piece.length)
            self._add(piece, key, value, *views)
        return None if grad is None else (piece, grad)

    def _send_on(self, step: Step, index: int, grad: tuple[Piece, Tensor] | None) -> None:
        """To the next rank, or home; and receives that of the next step, or one that comes home."""
        (direction, distance), peers, schedule = step, self.peers, self.schedule
        sends, receives, returned = [], [], []
        if grad is not None:
            target = grad[0].owner if distance == grad[0].reach(direction) else (peers.rank + direction) % peers.size
            sends.append((target, grad[1]))
        for coming in schedule.at(peers.rank, (direction, distance + 1)):
            if coming.place == index and distance + 1 > coming.start(direction):
                self.arriving[index] = self._room(coming)
                receives.append(((peers.rank - direction) % peers.size, self.arriving[index]))
        for own in schedule.pieces[peers.rank]:
            if own.place == index and own.reach(direction) == distance:
                returned.append((own, self._room(own)))
                receives.append(((peers.rank + direction * distance) % peers.size, returned[0][1]))
        self.pending[index] = peers.exchange(sends, receives), returned

    def _settle(self, index: int) -> None:
        """Waits for what was sent and received of this piece; what came home is added."""
        if index not in self.pending:
            return
        pending, returned = self.pending.pop(index)
        pending.wait()
        for home, flat in returned:
            for grad, part in zip(self._own(home), _pair_views(flat, self.key, self.value, home.length), strict=True):
                if grad is not None:
                    grad.add_(part)

    def _add(self, piece: Piece, key: Tensor, value: Tensor, grad_key: Tensor | None, grad_value: Tensor | None) -> None:
        for run in self.schedule.blocks(self.peers.rank, piece):
            rows = self.every[run]
            args = _arguments(self.ring, rows, piece, key, value, self.bias, self.slopes)
            lse, grad_lse = rows.lse, self.grad_lse
            if grad_lse is not None:
                grad_lse = rows.narrow(grad_lse, -1).contiguous()
            grad_query, grad_bias = self.totals.query, self.totals.bias
            grads = Gradients(
                None if grad_query is None else rows.narrow(grad_query), grad_key, grad_value, None, self.totals.alibi_slopes, None
            )
            if self.shift is not None:
                shift = rows.narrow(self.shift)
                lse = (lse[..., None] - shift)[..., 0]
                self._add_shifted(args, shift, rows, lse, grad_lse, grads, grad_bias, piece)
                continue
            if grad_bias is not None:
                grads = grads._replace(bias=self._bias_part(grad_bias, rows, piece))
            self._add_block(args, rows, lse, grad_lse, grads)

    def _add_block(self, args: Arguments, rows: _Rows, lse: Tensor, grad_lse: Tensor | None, grads: Gradients) -> None:
        results = (rows.narrow(self.grad_out), grad_lse, rows.out, lse, rows.residual)
        if grads.bias is None or args.bias is None or grads.bias.shape[-1] > 1:
            add_backward(args, *results, grads)
            return
        # One key beside one column of bias: a second, hidden key tells it from a bias that is the same for all keys of the row.
        hidden = F.pad(args.bias, (0, 1), value=-math.inf)
        wide = args._replace(key=F.pad(args.key, (0, 0, 0, 1)), value=F.pad(args.value, (0, 0, 0, 1)), bias=hidden)
        found = grads._replace(
            key=None if grads.key is None else torch.zeros_like(wide.key, dtype=self.real),
            value=None if grads.value is None else torch.zeros_like(wide.value, dtype=self.real),
            bias=torch.zeros_like(hidden, dtype=self.real),
        )
        add_backward(wide, *results, found)
        for grad, part, dim in ((grads.key, found.key, -2), (grads.value, found.value, -2), (grads.bias, found.bias, -1)):
            if grad is not None and part is not None:
                grad.add_(part.narrow(dim, 0, 1))

    def _bias_part(self, tensor: Tensor, rows: _Rows, piece: Piece) -> Tensor:
        run = rows.run
        block = Block(run.begin, run.end, piece.begin, piece.end, run.at, *self.ring.lengths, None)
        return band_of(tensor, block) if is_by_distance(tensor, *self.ring.lengths) else block_of(tensor, block)

    def _add_shifted(
        self,
        args: Arguments,
        shift: Tensor,
        rows: _Rows,
        lse: Tensor,
        grad_lse: Tensor | None,
        grads: Gradients,
        grad_bias: Tensor | None,
        piece: Piece,
    ) -> None:
        """Every score and lse less `shift`: the same weights, and no row is normalised again."""
        if args.bias is None:
            self._add_block(args._replace(bias=-shift), rows, lse, grad_lse, grads)
            return
        bias = args.bias.detach().to(self.real).requires_grad_(grad_bias is not None)
        with torch.enable_grad():
            total = bias
            if is_by_distance(self.bias, *self.ring.lengths):  # row i reads from element seqlen_q - 1 - i on
                total = bias[..., 0, :].unfold(-1, args.key.shape[-2], 1).flip(-2)
            total = total - shift
        part = None if grad_bias is None else torch.zeros_like(total)
        args = args._replace(bias=total.detach())
        self._add_block(args, rows, lse, grad_lse, grads._replace(bias=part))
        if grad_bias is not None:
            self._bias_part(grad_bias, rows, piece).add_(torch.autograd.grad(total, bias, part)[0])

    def _through_sinks(self) -> Tensor:
        """(..., num_heads, seqlen_q): gradients of the sinks' scores, row by row; their share of the softmax is exp(sink - lse)."""
        out = self.out.to(self.real)
        if self.residual.dim() > 1:
            out = out + self.residual
        grad = -(out * self.grad_out).sum(-1)
        if self.grad_lse is not None:
            grad = grad + self.grad_lse
        return torch.where(self.lse == -math.inf, 0.0, (self.sinks[:, None] - self.lse).exp()) * grad

    def _grad_sinks(self) -> Tensor:
        grad = self._through_sinks()
        return grad.flatten(0, -3).sum((0, -1)) if grad.dim() > 2 else grad.sum(-1)

    def _grad_rows(self) -> Tensor:
        """(..., num_heads, seqlen_q, 1): sums of the gradients of a row's scores. With the sink's, all but lse's part sums to 0."""
        whole = self.lse.new_zeros(self.lse.shape) if self.grad_lse is None else torch.where(self.lse == -math.inf, 0.0, self.grad_lse)
        return (whole if self.sinks is None else whole - self._through_sinks())[..., None]
