"""Exact attention: the public functions `attention`, `merge_attention` and `dropout_mask`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor

from . import residues
from .arguments import NO_TENSORS
from .call import allows_tf32, check_dropout_p, check_float, default_scale, forward, prepare, run_forward, runs_plain
from .library import below_autograd, ops
from .masks import Mask
from .observers import Call, observers, tell
from .relative_bias import RelativeBias
from .rotary import RotaryEmbedding
from .seeds import draw_seed
from .weights import attention_with_weights  # noqa: F401  (for MultiheadAttention)


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
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
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
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
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, exact, in memory linear in the sequence lengths.

    For query row i at position p = i + seqlen_kv - seqlen_q and key j::

        score = scale * query_i . key_j
        score = softcap * tanh(score / softcap)             if softcap
        score = score - alibi_slopes * |p - j| + bias
        score = -inf                                        where mask hides j
        lse = log(sum_j exp(score) + exp(sinks))
        out = sum_j dropout(exp(score - lse)) * value_j

    Scores, softmax and sums are float32 (float64 for float64 inputs); products of float32 CUDA tensors are of operands rounded to tf32
    where torch.backends.cuda.matmul.allow_tf32 is True. A row that sees no key gives zeros and lse = -inf (the sink's
    value with sinks); what stands in hidden keys and values reaches neither results nor gradients. Query head h uses key/value head
    h // (num_heads / num_heads_kv). A row's result is the same bits whatever batch it stands in and for every thread count.

    Args:
        query: (..., num_heads, seqlen_q, head_dim), float32, float64, bfloat16 or float16. Any strides, no copies; any sizes, 0 included.
        key: (..., num_heads_kv, seqlen_kv, head_dim), where num_heads_kv divides num_heads; dtype and leading dimensions of query.
        value: (..., num_heads_kv, seqlen_kv, head_dim_v).
        mask: a mask of `tiled_attention` (aligned to the bottom right, unless it says otherwise), or a bool tensor that broadcasts to
            (..., num_heads, seqlen_q, seqlen_kv), True = attend. None: every key is seen. Integer and float tensors are refused.
        bias: float tensor that broadcasts to (..., num_heads, seqlen_q, seqlen_kv), added to the scores; -inf hides. Never expanded. Or
            relative positions, (..., num_heads or 1, 1, seqlen_q + seqlen_kv - 1): element t is added where j - i = t - (seqlen_q - 1). Or
            a `RelativeBias`.
        scale: multiplies query . key; None: head_dim ** -0.5. Finite.
        softcap: > 0; None: no capping (Gemma 2, 2024).
        alibi_slopes: (num_heads,) (Press et al., 2022, section 3); query_offset moves p here too.
        sinks: (num_heads,) logits of a key without value (gpt-oss, 2025); -inf: none.
        rotary: turns query (at p) and key (at j) before their product; see `RotaryEmbedding`. None: no turning.
        dropout_p: probability in [0, 1] that a weight is zeroed; the kept ones are scaled by 1 / (1 - dropout_p), both with dropout_p
            rounded to 2 ** -16. The random numbers are Philox4x32-10, counted by (batch, head, query, key): see `dropout_mask`.
        generator: draws the dropout seed; None: torch's, which torch.manual_seed sets. An explicit generator is not replayed by
            torch.utils.checkpoint, and does not compile.
        query_offset: where query row 0 stands, in place of seqlen_kv - seqlen_q: a number, or one per batch item (a list, or an integer
            tensor that broadcasts to the leading dimensions). Moves masks, ALiBi and rotary.
        return_lse: also return lse.

    Returns:
        out (..., num_heads, seqlen_q, head_dim_v), dtype of query, dense in the dimension order of query; with `return_lse` (out, lse),
        lse (..., num_heads, seqlen_q), float32 or float64, the natural logarithm.

    Differentiable in query, key, value, bias, alibi_slopes and sinks, through out and lse: any number of times, in reverse and forward
    mode, under torch.func (vmap folds into the batch); inside torch.compile once in reverse mode. Autocast casts query, key and value.

    Raises:
        ValueError, TypeError, RuntimeError: naming the argument, what was expected and what came.

    Source: Dao et al., FlashAttention (2022), algorithm 1; Dao, FlashAttention-2 (2023), section 3.
    """
    if (
        mask is None
        and bias is None
        and softcap is None
        and alibi_slopes is None
        and sinks is None
        and rotary is None
        and query_offset is None
        and dropout_p == 0.0
        and isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and query.dim() > 2
        and (scale is None or type(scale) is float)
        and runs_plain(query, key, value)
    ):
        # The shortest way for the plain call; the operator checks the rest.
        if scale is None:
            scale = default_scale(query.shape[-1])
        with below_autograd():
            allow_tf32 = query.is_cuda and allows_tf32(query)
            out, lse, _ = run_forward(query, key, value, *NO_TENSORS, scale, 0.0, 0.0, (), (), allow_tf32, False, False)
    else:
        options = (bias, scale, softcap, alibi_slopes, sinks, dropout_p, generator, query_offset, rotary)
        pattern = residues.pattern_of(mask) if mask is not None and dropout_p == 0 and bias is None else None
        args = prepare(query, key, value, None if pattern else mask, *options)
        if pattern is not None and residues.serves(pattern, args):
            out, lse = residues.attend(args, pattern)
        else:
            out, lse = forward(args if pattern is None else prepare(query, key, value, mask, *options))
        if not torch.compiler.is_compiling() and observers:
            scores = (mask, bias, scale, softcap, alibi_slopes, sinks, 0.0, None, query_offset, rotary)
            tell(Call(query, key, partial(prepare, query, key, None, *scores), lse))
    return (out, lse) if return_lse else out


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the keys of two parts, from the results of each: exact, and differentiable any number of times.

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    Args:
        out_a, out_b: (..., seqlen_q, head_dim_v), same shape and dtype, from `attention` over disjoint sets of keys with the same
            queries. With sinks, give them to one of the parts only.
        lse_a, lse_b: (..., seqlen_q), as `attention(..., return_lse=True)` returns. -inf: that part saw no key, and its out is not read.

    Returns:
        (out, lse), in the dtypes of out_a and lse_a; 0 and -inf where neither part saw a key.

    Raises:
        ValueError, TypeError: naming the argument.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), section 3.1.
    """
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        check_float(name, tensor)
    if out_b.shape != out_a.shape or out_b.dtype != out_a.dtype:
        raise ValueError(f"out_b must be like out_a, {out_a.dtype} {tuple(out_a.shape)}, got {out_b.dtype} {tuple(out_b.shape)}")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != out_a.shape[:-1]:
            raise ValueError(f"{name} must have shape {tuple(out_a.shape[:-1])}, out_a without its last dimension, got {tuple(lse.shape)}")
        if lse.dtype != lse_a.dtype:
            raise ValueError(f"{name} must have the dtype of lse_a ({lse_a.dtype}), got {lse.dtype}")
    top = torch.maximum(lse_a, lse_b).detach()
    dead = top == -math.inf
    top = torch.where(dead, 0.0, top)
    weight_a, weight_b = (lse_a - top).exp(), (lse_b - top).exp()
    total = torch.where(dead, 1.0, weight_a + weight_b)
    parts = []
    for out, lse, weight in ((out_a, lse_a, weight_a), (out_b, lse_b, weight_b)):
        parts.append(torch.where((lse == -math.inf)[..., None], 0.0, out.to(lse.dtype)) * (weight / total)[..., None])
    return (parts[0] + parts[1]).to(out_a.dtype), torch.where(dead, -math.inf, top + total.log())


def dropout_mask(
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_kv: int,
    dropout_p: float,
    generator: torch.Generator | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """The weights that `attention` would keep: draws the seed that the call would have drawn in its place.

    Philox4x32-10 (Salmon et al., 2011). Key: the seed's low and high word. Counter words: key // 4, query // 2, head, flattened batch
    index. Key j takes word j % 4 of the result, even queries its low 16 bits, odd queries its high 16; dropped are those below
    round(dropout_p * 65536).

    Args:
        batch: product of the leading dimensions of query.
        num_heads, seqlen_q, seqlen_kv: as of the call.
        dropout_p: in [0, 1]. With 0 no seed is drawn.
        generator: as in `attention`.
        device: of the result; None: the generator's, or the default device.

    Returns:
        bool (batch, num_heads, seqlen_q, seqlen_kv), True = kept.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    sizes = (("batch", batch), ("num_heads", num_heads), ("seqlen_q", seqlen_q), ("seqlen_kv", seqlen_kv))
    for name, size in sizes:
        if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool):
            raise TypeError(f"{name} must be an integer >= 0, got {size!r}")
        if size < 0:
            raise ValueError(f"{name} must be an integer >= 0, got {size}")
    dropout_p = check_dropout_p(dropout_p)
    if device is None and generator is not None:
        device = generator.device
    if dropout_p == 0:
        return torch.ones((batch, num_heads, seqlen_q, seqlen_kv), dtype=torch.bool, device=device)
    nothing = torch.empty(0, device=device)
    seed = draw_seed(nothing, nothing, None, generator)
    return ops.dropout_mask(seed, dropout_p, batch, num_heads, seqlen_q, seqlen_kv, (0, 0, 0, 0))
