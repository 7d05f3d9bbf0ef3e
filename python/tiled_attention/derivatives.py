"""Tangents and second derivatives of attention in plain PyTorch, exact, in memory that does not grow with seqlen_q x seqlen_kv.

Names as in the formulas, for query row i and key j, with the inputs moving in the direction of their tangents (marked `_t`):

    raw = scale q.k        tanh = tanh(raw / softcap)   score = softcap tanh - slope |p - j| + bias
    w = softmax(score)     w_t = w (score_t - lse_t)    lse_t = sum_j w score_t + w_sink sink_t
    out = sum_j f w v      f: what dropout multiplies the weights with
    dp = f (grad_out . v)  delta = sum_j w dp           score_grad = w (dp - delta + grad_lse)

`tangents` gives the tangents of out and lse, `gradient_tangents` those of the backward formula. Second derivatives commute, so the two
give its
transpose as well: with u the cotangents of the gradients, the cotangents of grad_out and grad_lse are the tangents of out and lse in the
direction u, and those of the inputs are the tangents of the gradients in the direction u. Everything is made of differentiable
operators: higher orders work too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import Arguments, Gradients
from .blocks import Problem, Scores, Sum, dot

Wanted = tuple[bool, ...]  # per field of Gradients


class _GradientSums:
    """Sums of the gradients that are wanted, from blocks."""

    def __init__(self, problem: Problem, wanted: Wanted) -> None:
        args = problem.args
        self.problem, self.wanted = problem, wanted
        self.query = Sum((*problem.rows_shape, args.query.shape[-1]), args.query.dtype, by_rows=True)
        keys_shape = (*problem.leading, problem.num_heads_kv, problem.seqlen_kv)
        self.key = Sum((*keys_shape, args.key.shape[-1]), args.key.dtype, by_rows=False)
        if wanted[2]:
            self.value = Sum((*keys_shape, args.value.shape[-1]), args.value.dtype, by_rows=False)
        heads_shape = (problem.num_heads_kv, problem.group, 1, 1)
        self.alibi_slopes, self.sinks = (Sum(heads_shape, problem.real, by_rows=False) for _ in range(2))
        if wanted[3]:
            bias: Any = args.bias
            shape = problem.split(bias).shape
            self.bias = Sum(shape, bias.dtype, by_rows=shape[-2] != 1)

    def add_scores(self, scores: Scores, score_grad: Tensor) -> None:
        """What reaches bias and slopes."""
        if self.wanted[3]:
            by_distance = self.problem.bias_by_distance
            reduced = [dim for dim, size in enumerate(self.bias.shape) if size == 1 and not (by_distance and dim == score_grad.dim() - 2)]
            block = score_grad.sum(reduced, keepdim=True) if reduced else score_grad
            if by_distance:
                total = block.new_zeros(*block.shape[:-2], self.bias.shape[-1])
                block = total.index_add(-1, self.problem.distances(scores.cut).flatten(), block.flatten(-2))[..., None, :]
            self.bias.add(scores.cut.row_index, block)
        if self.wanted[4]:
            self.alibi_slopes.add(scores.cut.head_index, _per_head(-(score_grad * scores.distance)))

    def results(self) -> Gradients:
        args, wanted = self.problem.args, self.wanted
        results = []
        for name, on in zip(Gradients._fields, wanted):
            like = getattr(args, name)
            results.append(getattr(self, name).result(like.shape, like) if on else None)
        return Gradients(*results)


def _per_head(block: Tensor) -> Tensor:
    """(leading..., heads_kv, group, rows, cols) summed to (heads_kv, group, 1, 1)."""
    return block.sum((-1, -2), keepdim=True).sum(list(range(block.dim() - 4))) if block.dim() > 4 else block.sum((-1, -2), keepdim=True)


def _direction(scores: Scores, directions: Gradients) -> tuple[Tensor, Tensor | None]:
    """(score_t, tanh_t); tanh_t is None where softcap or the direction of query and key is."""
    problem, cut = scores.problem, scores.cut
    raw_t = None
    if directions.query is not None:
        raw_t = dot(problem.real_rows(directions.query, cut), scores.key)
    if directions.key is not None:
        by_key = dot(scores.query, problem.real_keys(directions.key, cut))
        raw_t = by_key if raw_t is None else raw_t + by_key
    tanh_t, score_t = None, torch.zeros_like(scores.weight)
    if raw_t is not None:
        score_t = scores.select(scores.to_raw(raw_t))
        if scores.tanh is not None:
            tanh_t = score_t / problem.args.softcap
    if directions.alibi_slopes is not None:
        score_t = score_t - problem.per_head(directions.alibi_slopes, cut) * scores.distance
    if directions.bias is not None:
        score_t = score_t + problem.bias(directions.bias, cut).to(problem.real)
    return scores.select(score_t), tanh_t


def _lse_tangent(scores: Scores, directions: Gradients, score_t: Tensor) -> Tensor:
    lse_t = (scores.weight * score_t).sum(-1, keepdim=True)
    if directions.sinks is not None:
        lse_t = lse_t + scores.sink_weight * scores.problem.per_head(directions.sinks, scores.cut)
    return lse_t


def turned(args: Arguments) -> Arguments:
    """The same call where query and key are turned already."""
    query, key = _turn(args, args.query, args.key)
    return args._replace(query=query, key=key, query_table=None, key_table=None)


def _turn(args: Arguments, query: Any, key: Any, back: bool = False) -> tuple[Any, Any]:
    """By the tables of rotary positions, where there are any."""
    from .rotate import rotate

    pairs = ((query, args.query_table), (key, args.key_table))
    rows = [rows if rows is None or table is None else rotate(rows, table, args.interleaved, back) for rows, table in pairs]
    return rows[0], rows[1]


def _turn_directions(args: Arguments, directions: Gradients, back: bool = False) -> Gradients:
    query, key = _turn(args, directions.query, directions.key, back)
    return directions._replace(query=query, key=key)


def tangents(args: Arguments, directions: Gradients) -> tuple[Tensor, Tensor]:
    """Tangents of (out, lse), where the inputs move in `directions` (None: that one does not)."""
    args, directions = turned(args), _turn_directions(args, directions)
    problem = Problem(args)
    head_dim_v = args.value.shape[-1]
    out_sum = Sum((*problem.rows_shape, head_dim_v), args.query.dtype, by_rows=True)
    lse_sum = Sum((*problem.rows_shape, 1), problem.real, by_rows=True)
    for cut in problem.cuts():
        scores = Scores(problem, cut)
        score_t, _ = _direction(scores, directions)
        lse_t = _lse_tangent(scores, directions, score_t)
        out_t = scores.gather(scores.drop(scores.weight * (score_t - lse_t)), scores.value)
        if directions.value is not None:
            out_t = out_t + scores.gather(scores.drop(scores.weight), problem.real_keys(directions.value, cut))
        out_sum.add(cut.row_index, out_t)
        lse_sum.add(cut.row_index, lse_t)
    rows_shape = args.query.shape[:-1]
    return out_sum.result((*rows_shape, head_dim_v), args.query), lse_sum.result(rows_shape, args.query)


def gradient_tangents(
    args: Arguments,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    directions: Gradients,
    grad_out_t: Tensor | None,
    grad_lse_t: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """Tangents of the wanted gradients, where the inputs and the two output gradients move in the given directions."""
    given, directions = args, _turn_directions(args, directions)
    args = turned(args)
    problem = Problem(args)
    sums = _GradientSums(problem, wanted)
    for cut in problem.cuts():
        scores = Scores(problem, cut)
        score_t, tanh_t = _direction(scores, directions)
        lse_t = _lse_tangent(scores, directions, score_t)
        weight, weight_t = scores.weight, scores.weight * (score_t - lse_t)
        grad = problem.real_rows(grad_out, cut)
        grad_t = None if grad_out_t is None else problem.real_rows(grad_out_t, cut)
        to_lse = 0.0 if grad_lse is None else problem.real_rows(grad_lse[..., None], cut)
        to_lse_t = 0.0 if grad_lse_t is None else problem.real_rows(grad_lse_t[..., None], cut)

        dp = scores.drop(scores.select(dot(grad, scores.value)))
        dp_t = torch.zeros_like(dp) if grad_t is None else dot(grad_t, scores.value)
        if directions.value is not None:
            dp_t = dp_t + dot(grad, problem.real_keys(directions.value, cut))
        dp_t = scores.drop(scores.select(dp_t))
        from_lse = to_lse - (weight * dp).sum(-1, keepdim=True)
        from_lse_t = to_lse_t - (weight_t * dp + weight * dp_t).sum(-1, keepdim=True)
        score_grad = scores.select(weight * (dp + from_lse))
        score_grad_t = scores.select(weight_t * (dp + from_lse) + weight * (dp_t + from_lse_t))

        sums.add_scores(scores, score_grad_t)
        raw_grad, raw_grad_t = scores.to_raw(score_grad), scores.to_raw(score_grad_t)
        if tanh_t is not None:
            raw_grad_t = raw_grad_t - score_grad * scores.tanh * tanh_t * (2 * args.scale)
        if wanted[0]:
            block = scores.gather(raw_grad_t, scores.key)
            if directions.key is not None:
                block = block + scores.gather(raw_grad, problem.real_keys(directions.key, cut))
            sums.query.add(cut.row_index, block)
        if wanted[1]:
            block = scores.scatter(raw_grad_t, scores.query)
            if directions.query is not None:
                block = block + scores.scatter(raw_grad, problem.real_rows(directions.query, cut))
            sums.key.add(cut.key_index, block)
        if wanted[2]:
            block = scores.scatter(scores.drop(weight_t), grad)
            if grad_t is not None:
                block = block + scores.scatter(scores.drop(weight), grad_t)
            sums.value.add(cut.key_index, block)
        if wanted[5]:
            sink_t = -lse_t
            if directions.sinks is not None:
                sink_t = sink_t + problem.per_head(directions.sinks, cut)
            sums.sinks.add(cut.head_index, _per_head(scores.sink_weight * (sink_t * from_lse + from_lse_t)))
    return _turn_directions(given, sums.results(), back=True)


def weights_tangent(
    args: Arguments, lse: Tensor, directions: Gradients, lse_t: Tensor | None, average: bool, rows: Tensor | None
) -> Tensor:
    """Tangent of exp(score - lse), dropped, (..., num_heads or 1, num_rows, seqlen_kv), where score and lse move on their own."""
    args, directions = turned(args), _turn_directions(args, directions)
    chosen, lse = choose_rows(args, rows), _of_rows(lse[..., None], rows, True)[..., 0]
    directions = directions._replace(query=_of_rows(directions.query, rows, True), bias=_of_rows(directions.bias, rows))
    problem = Problem(chosen, rows, args.query.shape[-2])
    heads = (1, 1) if average else (problem.num_heads_kv, problem.group)
    total = Sum((*problem.leading, *heads, problem.seqlen_q, problem.seqlen_kv), problem.real, by_rows=True)
    for cut in problem.cuts():
        scores = Scores(problem, cut, lse)
        score_t, _ = _direction(scores, directions)
        if lse_t is not None:
            score_t = score_t - problem.real_rows(_of_rows(lse_t[..., None], rows, True), cut)
        block = scores.drop(scores.select(scores.weight * score_t))
        total.add(cut.row_index, block.sum((-4, -3), keepdim=True) / problem.num_heads if average else block)
    num_heads = 1 if average else problem.num_heads
    return total.result((*problem.leading, num_heads, problem.seqlen_q, problem.seqlen_kv), lse)


def weights_gradients(
    args: Arguments, lse: Tensor, grad_weights: Tensor, average: bool, rows: Tensor | None, wanted: Wanted
) -> tuple[Gradients, Tensor]:
    """Gradients of exp(score - lse), dropped: by the score arguments, and by lse."""
    given, args = args, turned(args)
    chosen, chosen_lse = choose_rows(args, rows), _of_rows(lse[..., None], rows, True)[..., 0]
    problem = Problem(chosen, rows, args.query.shape[-2])
    sums = _GradientSums(problem, wanted)
    lse_sum = Sum((*problem.rows_shape, 1), problem.real, by_rows=True)
    for cut in problem.cuts():
        scores = Scores(problem, cut, chosen_lse)
        grad = problem.real_rows(grad_weights, cut)
        if average:
            grad = grad / problem.num_heads
        score_grad = scores.select(scores.weight * scores.drop(scores.select(grad)))
        lse_sum.add(cut.row_index, -score_grad.sum(-1, keepdim=True))
        sums.add_scores(scores, score_grad)
        raw_grad = scores.to_raw(score_grad)
        if wanted[0]:
            sums.query.add(cut.row_index, scores.gather(raw_grad, scores.key))
        if wanted[1]:
            sums.key.add(cut.key_index, scores.scatter(raw_grad, scores.query))
    gradients, grad_lse = sums.results(), lse_sum.result((*chosen_lse.shape, 1), lse)
    query, bias = _put_rows(gradients.query, args.query, rows, True), _put_rows(gradients.bias, args.bias, rows)
    gradients = _turn_directions(given, gradients._replace(query=query, bias=bias), back=True)
    return gradients, _put_rows(grad_lse, lse[..., None], rows, True)[..., 0]


def choose_rows(args: Arguments, rows: Tensor | None) -> Arguments:
    """The arguments of the chosen rows alone."""
    return args._replace(query=_of_rows(args.query, rows, True), mask=_of_rows(args.mask, rows), bias=_of_rows(args.bias, rows))


def _of_rows(tensor: Any, rows: Tensor | None, whole: bool = False) -> Any:
    """The chosen rows of a (..., seqlen_q, any) tensor; unless it is `whole`, one that broadcasts over rows stays as it is."""
    if tensor is None or rows is None or not (whole or _has_rows(tensor)):
        return tensor
    return tensor.index_select(-2, rows)


def _put_rows(gradient: Any, tensor: Any, rows: Tensor | None, whole: bool = False) -> Any:
    """The gradient of `tensor` from that of `_of_rows(tensor, rows, whole)`."""
    if gradient is None or rows is None or not (whole or _has_rows(tensor)):
        return gradient
    return gradient.new_zeros(tensor.shape).index_add(-2, rows, gradient)


def _has_rows(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and tensor.shape[-2] != 1
