"""Tangents and second derivatives of additive attention in plain PyTorch, exact, a block of queries at a time.

Names as in `derivatives`, and for query i, key j and column d:

    t = tanh(q_id + k_jd)   score = sum_d w_d t   slope = w_d (1 - t^2)
    score_t = sum_d slope x_t + w_t t             x_t = q_t + k_t
    grad_q = sum_j score_grad slope   grad_k = sum_i score_grad slope   grad_w = sum_ij score_grad t

A block holds rows x seqlen_kv x head_dim elements, at least one row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import AdditiveArguments, AdditiveGradients, Arguments
from .blocks import Cut, Problem, Scores, Sum, dot
from .derivatives import Wanted


def masks_of(args: AdditiveArguments) -> Arguments:
    """The call as one of exact attention, whose masks and dropout it shares."""
    return Arguments(
        args.query,
        args.key,
        args.value,
        args.mask,
        None,
        None,
        None,
        args.key_lengths,
        args.documents,
        args.query_offset,
        args.dropout_seed,
        None,
        None,
        None,
        None,
        None,
        1.0,
        0.0,
        args.dropout_p,
        args.intervals,
        args.dropout_offsets,
        False,
        False,
    )


class _Problem(Problem):
    def __init__(self, args: AdditiveArguments, chosen: Tensor | None = None, seqlen_q: int | None = None) -> None:
        super().__init__(masks_of(args), chosen, seqlen_q)
        self.pair_elements = max(1, args.query.shape[-1])
        self.score_weight = args.score_weight

    def weight(self, weight: Tensor, cut: Cut) -> Tensor:
        """The block's part of a score_weight, (heads_kv or 1, group or 1, 1, 1, head_dim)."""
        weight = weight.to(self.real)
        if weight.dim() == 1:
            return weight.view(1, 1, 1, 1, -1)
        heads = (self.num_heads_kv, self.group, 1, 1, weight.shape[-1])
        return weight.view(heads).narrow(0, cut.heads_kv.start, cut.heads_kv.stop - cut.heads_kv.start)


class _Scores(Scores):
    """The weights of one block, and of each of its elements (..., num_heads_kv, group, rows, seqlen_kv, head_dim) the tanh."""

    problem: _Problem

    def _raw(self) -> Tensor:
        self.shown = self.visible[..., None]
        self.t = torch.tanh(self._sum(self.query, self.key))
        self.score_weight = self.problem.weight(self.problem.score_weight, self.cut)
        self.curve = 1 - self.t * self.t
        return (self.t * self.score_weight).sum(-1)

    def _sum(self, query: Tensor | None, key: Tensor | None) -> Any:
        """query + key of each visible pair, 0 in hidden ones: what they hold reaches nothing."""
        parts = [] if query is None else [query.unsqueeze(-2)]
        parts += [] if key is None else [key.unsqueeze(-3).unsqueeze(-3)]
        return torch.where(self.shown, sum(parts), 0.0) if parts else None

    def direction(self, directions: AdditiveGradients) -> tuple[Tensor, Any, Any]:
        """(score_t, x_t, w_t)."""
        problem, cut = self.problem, self.cut
        query = None if directions.query is None else problem.real_rows(directions.query, cut)
        key = None if directions.key is None else problem.real_keys(directions.key, cut)
        x_t = self._sum(query, key)
        w_t = None if directions.score_weight is None else problem.weight(directions.score_weight, cut)
        score_t = torch.zeros_like(self.weight)
        if x_t is not None:
            score_t = score_t + (self.score_weight * self.curve * x_t).sum(-1)
        if w_t is not None:
            score_t = score_t + (w_t * self.t).sum(-1)
        return self.select(score_t), x_t, w_t


class _GradientSums:
    """Sums of the wanted gradients of query, key, value and score_weight, from blocks."""

    def __init__(self, problem: _Problem, wanted: Wanted) -> None:
        args = problem.args
        self.problem, self.wanted = problem, wanted
        self.query = Sum((*problem.rows_shape, args.query.shape[-1]), args.query.dtype, by_rows=True)
        keys_shape = (*problem.leading, problem.num_heads_kv, problem.seqlen_kv)
        self.key = Sum((*keys_shape, args.key.shape[-1]), args.key.dtype, by_rows=False)
        if wanted[2]:
            self.value = Sum((*keys_shape, args.value.shape[-1]), args.value.dtype, by_rows=False)
        heads = (1, 1) if problem.score_weight.dim() == 1 else (problem.num_heads_kv, problem.group)
        self.weight = Sum((*heads, 1, problem.score_weight.shape[-1]), problem.real, by_rows=False)

    def add(self, scores: _Scores, by_argument: Any, by_weight: Any) -> None:
        """`by_argument`: what reaches q + k of each element, `by_weight`: what reaches w."""
        cut = scores.cut
        if self.wanted[0]:
            self.query.add(cut.row_index, by_argument.sum(-2))
        if self.wanted[1]:
            self.key.add(cut.key_index, by_argument.sum((-4, -3)))
        if self.wanted[3]:
            block = by_weight.sum((-3, -2)).unsqueeze(-2)
            block = block.sum(list(range(block.dim() - 4))) if block.dim() > 4 else block
            if self.problem.score_weight.dim() == 1:
                block = block.sum((0, 1), keepdim=True)
            self.weight.add(cut.head_index, block)

    def results(self) -> AdditiveGradients:
        args, weight = self.problem.args, self.problem.score_weight
        return AdditiveGradients(
            self.query.result(args.query.shape, args.query) if self.wanted[0] else None,
            self.key.result(args.key.shape, args.key) if self.wanted[1] else None,
            self.value.result(args.value.shape, args.value) if self.wanted[2] else None,
            self.weight.result(weight.shape, weight) if self.wanted[3] else None,
        )


def tangents(args: AdditiveArguments, directions: AdditiveGradients) -> tuple[Tensor, Tensor]:
    """Tangents of (out, lse), where the inputs move in `directions` (None: that one does not)."""
    problem = _Problem(args)
    head_dim_v = args.value.shape[-1]
    out_sum = Sum((*problem.rows_shape, head_dim_v), args.query.dtype, by_rows=True)
    lse_sum = Sum((*problem.rows_shape, 1), problem.real, by_rows=True)
    for cut in problem.cuts():
        scores = _Scores(problem, cut)
        score_t, _, _ = scores.direction(directions)
        lse_t = (scores.weight * score_t).sum(-1, keepdim=True)
        out_t = scores.gather(scores.drop(scores.weight * (score_t - lse_t)), scores.value)
        if directions.value is not None:
            out_t = out_t + scores.gather(scores.drop(scores.weight), problem.real_keys(directions.value, cut))
        out_sum.add(cut.row_index, out_t)
        lse_sum.add(cut.row_index, lse_t)
    rows_shape = args.query.shape[:-1]
    return out_sum.result((*rows_shape, head_dim_v), args.query), lse_sum.result(rows_shape, args.query)


def gradient_tangents(
    args: AdditiveArguments,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    directions: AdditiveGradients,
    grad_out_t: Tensor | None,
    grad_lse_t: Tensor | None,
    wanted: Wanted,
) -> AdditiveGradients:
    """Tangents of the wanted gradients, where the inputs and the two output gradients move in the given directions."""
    problem = _Problem(args)
    sums = _GradientSums(problem, wanted)
    for cut in problem.cuts():
        scores = _Scores(problem, cut)
        score_t, x_t, w_t = scores.direction(directions)
        lse_t = (scores.weight * score_t).sum(-1, keepdim=True)
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
        score_grad = scores.select(weight * (dp + from_lse))[..., None]
        score_grad_t = scores.select(weight_t * (dp + from_lse) + weight * (dp_t + from_lse_t))[..., None]

        by_argument, by_weight = score_grad_t * scores.score_weight * scores.curve, score_grad_t * scores.t
        if w_t is not None:
            by_argument = by_argument + score_grad * w_t * scores.curve
        if x_t is not None:
            moved = score_grad * scores.curve * x_t
            by_argument, by_weight = by_argument - 2 * scores.score_weight * scores.t * moved, by_weight + moved
        sums.add(scores, by_argument, by_weight)
        if wanted[2]:
            block = scores.scatter(scores.drop(weight_t), grad)
            if grad_t is not None:
                block = block + scores.scatter(scores.drop(weight), grad_t)
            sums.value.add(cut.key_index, block)
    return sums.results()


def weights_tangent(
    args: AdditiveArguments, lse: Tensor, directions: AdditiveGradients, lse_t: Tensor | None, rows: Tensor | None
) -> Tensor:
    """Tangent of exp(score - lse), dropped, (..., num_heads, num_rows, seqlen_kv), where score and lse move on their own."""
    chosen, lse = _choose_rows(args, rows), _of_rows(lse[..., None], rows)[..., 0]
    directions = directions._replace(query=_of_rows(directions.query, rows))
    problem = _Problem(chosen, rows, args.query.shape[-2])
    total = Sum((*problem.rows_shape, problem.seqlen_kv), problem.real, by_rows=True)
    for cut in problem.cuts():
        scores = _Scores(problem, cut, lse)
        score_t, _, _ = scores.direction(directions)
        if lse_t is not None:
            score_t = score_t - problem.real_rows(_of_rows(lse_t[..., None], rows), cut)
        total.add(cut.row_index, scores.drop(scores.select(scores.weight * score_t)))
    return total.result((*problem.leading, problem.num_heads, problem.seqlen_q, problem.seqlen_kv), lse)


def weights_gradients(
    args: AdditiveArguments, lse: Tensor, grad_weights: Tensor, rows: Tensor | None, wanted: Wanted
) -> tuple[AdditiveGradients, Tensor]:
    """Gradients of exp(score - lse), dropped: by the score arguments, and by lse."""
    chosen, chosen_lse = _choose_rows(args, rows), _of_rows(lse[..., None], rows)[..., 0]
    problem = _Problem(chosen, rows, args.query.shape[-2])
    sums = _GradientSums(problem, wanted)
    lse_sum = Sum((*problem.rows_shape, 1), problem.real, by_rows=True)
    for cut in problem.cuts():
        scores = _Scores(problem, cut, chosen_lse)
        grad = problem.real_rows(grad_weights, cut)
        score_grad = scores.select(scores.weight * scores.drop(scores.select(grad)))
        lse_sum.add(cut.row_index, -score_grad.sum(-1, keepdim=True))
        sums.add(scores, score_grad[..., None] * scores.score_weight * scores.curve, score_grad[..., None] * scores.t)
    gradients, grad_lse = sums.results(), lse_sum.result((*chosen_lse.shape, 1), lse)
    gradients = gradients._replace(query=_put_rows(gradients.query, args.query, rows))
    return gradients, _put_rows(grad_lse, lse[..., None], rows)[..., 0]


def _choose_rows(args: AdditiveArguments, rows: Tensor | None) -> AdditiveArguments:
    """The arguments of the chosen rows alone."""
    mask = args.mask
    if mask is not None and rows is not None and mask.dim() > 1 and mask.shape[-2] != 1:
        mask = mask.index_select(-2, rows)
    return args._replace(query=_of_rows(args.query, rows), mask=mask)


def _of_rows(tensor: Any, rows: Tensor | None) -> Any:
    """The chosen rows of a (..., seqlen_q, any) tensor."""
    return tensor if tensor is None or rows is None else tensor.index_select(-2, rows)


def _put_rows(gradient: Any, tensor: Tensor, rows: Tensor | None) -> Any:
    """The gradient of `tensor` from that of `_of_rows(tensor, rows)`."""
    return gradient if gradient is None or rows is None else gradient.new_zeros(tensor.shape).index_add(-2, rows, gradient)
