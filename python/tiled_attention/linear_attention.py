"""Linear attention: the public functions `linear_attention` and `linear_attention_step`, and the state between them."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor
from torch.autograd.graph import increment_version

from .call import runs_plain
from .library import below_autograd
from .linear_call import (
    FEATURE_MAPS,
    FeatureMap,
    LinearState,
    forward,
    out_dtype,
    prepare,
    run_step,
    run_step_in_place,
    step,
    step_in_place,
)

__all__ = ["LinearState", "linear_attention", "linear_attention_step"]


@overload
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    causal: bool = False,
    normalize: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: Literal[False] = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor: ...


@overload
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    causal: bool = False,
    normalize: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: Literal[True],
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LinearState]: ...


@overload
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    causal: bool = False,
    normalize: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: bool,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, LinearState]: ...


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    causal: bool = False,
    normalize: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, LinearState]:
    """Attention with weights phi(query) . phi(key), in time and memory linear in the sequence lengths.

    A state S (head_dim, head_dim_v), z (head_dim) for every key head; for token t, with g = log_decay::

        S_t = exp(g_t) S_(t-1) + phi(key_t) value_t^T
        z_t = exp(g_t) z_(t-1) + phi(key_t)
        out_t = phi(query_t) S_t / (phi(query_t) . z_t)     normalize=True
        out_t = scale * phi(query_t) S_t                    normalize=False

    With causal=False every query uses the last S and z. The state and all sums are float32 (float64 for float64 inputs). Where the
    denominator is 0, out and all gradients through it are 0. Query head h uses the state of head h // (num_heads / num_heads_kv).

    Args:
        query: (..., num_heads, seqlen_q, head_dim), float32, float64, bfloat16 or float16. Any strides, no copies; any sizes, 0 included.
        key: (..., num_heads_kv, seqlen_kv, head_dim), where num_heads_kv divides num_heads; dtype and leading dimensions of query.
        value: (..., num_heads_kv, seqlen_kv, head_dim_v).
        feature_map: phi. "elu": elu(x) + 1, computed as exp(x) below 0, so that it never rounds to 0; "relu"; "exp"; "identity"; these
            are computed while loading. Or a callable or module, applied to query and to key before: it may change head_dim, and keeps
            the other sizes; where it widens the dtype, all runs in the wider one and out is cast back. With normalize=True, if it has
            methods `map_query` and `map_key` (`FavorFeatures`), these are called. Or a pair (query map, key map) of any of them.
            Default "elu".
        causal: query t uses the state after key t; seqlen_q equals seqlen_kv. Default False.
        normalize: divide by phi(query) . z. Default True.
        scale: multiplies out with normalize=False, and has no effect otherwise; None: 1. Finite.
        key_mask: bool, broadcastable to (..., seqlen_kv), True = the key counts. Acts after the feature map: a hidden key counts in
            neither sum and has gradient 0, whatever stands in it. Its token decays the state all the same.
        log_decay: float, <= 0. Of one dimension less than query: per token (RetNet), broadcastable to (..., heads, seqlen_kv). Of as many:
            per feature (GLA), broadcastable to (..., heads, seqlen_kv, head_dim). heads is num_heads_kv, or num_heads: then each query
            head has a state of its own. -inf: everything before is forgotten. Only with causal=True.
        initial_state: S and z before the first token, of the same dtype as the sums; None: 0. Only with causal=True. Not changed. With
            num_heads heads each query head has a state of its own.
        return_state: also return the state after the last token.
        cu_seqlens: int32 or int64 (num_sequences + 1,), on the device of query: 0, then the sum of the lengths so far, up to seqlen_q =
            seqlen_kv. Sequences lie one after the other in query, key and value of shape (1, heads, total, dim), and each is what it is
            alone; on the CPU it has the same bits. A sequence may have no tokens. initial_state and the returned state then have
            num_sequences in place of the batch.

    Returns:
        out (..., num_heads, seqlen_q, head_dim_v), dtype of query, dense in the dimension order of query; with `return_state` (out, state),
        state a `LinearState`: kv (..., num_heads_kv, head_dim, head_dim_v), k_sum (..., num_heads_kv, head_dim), contiguous, with num_heads
        heads where log_decay or initial_state has. A sequence without tokens returns the initial state.

    Differentiable in query, key, value, log_decay and initial_state, through out and the returned state: any number of times, in reverse
    and forward mode, under torch.func (vmap folds into the batch; with cu_seqlens it is one call per sample); inside torch.compile once in
    reverse mode. With cu_seqlens what is beyond the first backward pass reads the offsets, which on CUDA waits for the device. Autocast
    casts query, key and value; log_decay and states stay what they are.

    Raises:
        ValueError, TypeError, RuntimeError: naming the argument, what was expected and what came. That log_decay is <= 0 and not NaN is
            checked in eager mode on the CPU, and not under torch.func. On CUDA the values of cu_seqlens are not read: kernels act as if
            the first were 0, the last the total and none less than those before it.

    Source: Katharopoulos et al., Transformers are RNNs (2020), sections 3.2 and 3.3. Decay: Sun et al., Retentive network (2023), section
    2.1; Yang et al., Gated linear attention transformers (2024), section 4.
    """
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
        cu_seqlens=cu_seqlens,
    )
    out, kv, k_sum = forward(args)
    out = out.to(out_dtype(query))
    return (out, LinearState(kv, k_sum)) if return_state else out


def linear_attention_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LinearState,
    *,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    normalize: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, LinearState]:
    """One token of causal `linear_attention`: the same formula, in time and memory that do not depend on how many came before.

    Args:
        query: (..., num_heads, 1, head_dim).
        key: (..., num_heads_kv, 1, head_dim).
        value: (..., num_heads_kv, 1, head_dim_v).
        state: the state before the token, as `linear_attention(..., return_state=True)` or the last step returned it.
        feature_map, normalize, scale: as in `linear_attention`.
        key_mask: bool, broadcastable to (..., 1).
        log_decay: broadcastable to (..., heads, 1), or (..., heads, 1, head_dim).
        inplace: update the tensors of `state`, and allocate nothing but out. Not where gradients are recorded or a torch.func transform
            acts.

    Returns:
        (out, state): out (..., num_heads, 1, head_dim_v), and the state after the token: a new one, or with `inplace` the given one.

    Differentiable as `linear_attention`.

    Raises:
        ValueError, TypeError, RuntimeError: naming the argument, what was expected and what came.

    Source: Katharopoulos et al., Transformers are RNNs (2020), section 3.4, equations 16 to 20.
    """
    if (
        key_mask is None
        and log_decay is None
        and scale is None
        and type(state) is LinearState
        and type(feature_map) is str
        and type(normalize) is bool
        and isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and runs_plain(query, key, value)
    ):
        # The shortest way for the plain call; the operator checks the rest.
        code = FEATURE_MAPS.get(feature_map)
        kv, k_sum = state
        if (
            code is not None
            and isinstance(kv, Tensor)
            and isinstance(k_sum, Tensor)
            and not (kv.requires_grad or k_sum.requires_grad)
            and key.dim() == kv.dim() > 2
            and kv.shape[-3] == key.shape[-3]
        ):
            if inplace is False:
                with below_autograd():
                    out, kv, k_sum = run_step(query, key, value, None, None, kv, k_sum, code, code, normalize, 1.0)
                return out, LinearState(kv, k_sum)
            if inplace is True and kv.is_contiguous() and k_sum.is_contiguous():
                with below_autograd():
                    out = run_step_in_place(query, key, value, None, None, kv, k_sum, code, code, normalize, 1.0)
                increment_version(state)
                return out, state
    args = prepare(query, key, value, feature_map, True, normalize, scale, key_mask, log_decay, state, state_name="state")
    if query.shape[-2] != 1:
        raise ValueError(f"query must be one token, (..., num_heads, 1, head_dim), got {tuple(query.shape)}")
    if args.initial_kv is None:
        raise TypeError("state must be a LinearState(kv, k_sum) of tensors, got None")
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace must be True or False, got {inplace!r}")
    if inplace:
        return step_in_place(args, state).to(out_dtype(query)), LinearState(*state)
    out, kv, k_sum = step(args)
    return out.to(out_dtype(query)), LinearState(kv, k_sum)
