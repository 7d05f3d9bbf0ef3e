"""Rotary position embedding: pairs of features of query and key turned by angles that grow with the position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .arguments import real_dtype
from .mask_checks import number
from .positions import angles_of, check_base, check_positions, inverse_frequencies
from .rotate import rotate

KINDS = ("linear", "ntk", "dynamic", "yarn")
# Of the configurations of transformers: their names for `kind`, and the fields under the names that they have there.
_ROPE_TYPES = {"linear": "linear", "ntk": "ntk", "dynamic": "dynamic", "yarn": "yarn"}
_NAMES = {"factor": "factor", "original_max_position_embeddings": "original_max_len"} | {
    name: name for name in ("attention_factor", "beta_fast", "beta_slow", "truncate")
}
_OTHER_NAMES = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class RotaryScaling:
    """How frequencies change so that a model reads sequences longer than those it was trained on. f = base ** (-2 i / d), d = rotary_dim.

        linear    f / factor (Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation", 2023)
        ntk       f of base * factor ** (d / (d - 2))                                       ("NTK-aware", Peng et al., 2023, section 3.1)
        dynamic   ntk with factor * n / original_max_len - (factor - 1) in the place of factor, where n is the length of the call, at
                  least original_max_len                                                    ("dynamic NTK", there, section 3.3)
        yarn      f where it turns more than beta_fast times in original_max_len, f / factor where less than beta_slow times, a linear
                  ramp over i between; cosines and sines times attention_factor (Peng et al., "YaRN", 2023, sections 3.2 and 3.4)

    Args:
        kind: one of these.
        factor: >= 1.
        original_max_len: the sequence length of the training; of dynamic and yarn only, which need it.
        attention_factor: of yarn only; None: 0.1 log(factor) + 1.
        beta_fast, beta_slow: turns, of yarn only. Defaults 32 and 1.
        truncate: whether the ends of the ramp of yarn are rounded outwards to whole i. Default True.

    Raises:
        ValueError, TypeError: naming the field.
    """

    kind: Literal["linear", "ntk", "dynamic", "yarn"]
    factor: float
    original_max_len: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"scaling: kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            if value is None and name == "attention_factor":
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"scaling: {name} must be a number, got {value!r}")
            least = 1.0 if name == "factor" else 0.0
            if not least <= value < math.inf or value == 0:
                raise ValueError(f"scaling: {name} must be finite and {'>= 1' if least else '> 0'}, got {value}")
        if self.kind in ("dynamic", "yarn"):
            if self.original_max_len is None:
                raise ValueError(f"scaling: original_max_len must be given for {self.kind}, got None")
            number("scaling: original_max_len", self.original_max_len, 1)
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            raise ValueError(f"scaling: beta_fast must be at least beta_slow ({self.beta_slow}), got {self.beta_fast}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], base: float) -> RotaryScaling | None:
        """From `rope_parameters` (or `rope_scaling`) of a Hugging Face model.

        Args:
            config: that mapping.
            base: what its `rope_theta` must be, where it has one.

        Returns:
            The scaling; None for the type "default".

        Raises:
            ValueError: for a type or a name that is not known, another base, a missing factor.
        """
        kind = config.get("rope_type", config.get("type", "default"))
        if kind != "default" and kind not in _ROPE_TYPES:
            raise ValueError(f"scaling: rope_type must be one of default, {', '.join(_ROPE_TYPES)}, got {kind!r}")
        for name in config:
            if name not in _NAMES and name not in _OTHER_NAMES:
                raise ValueError(f"scaling: expected the names {', '.join((*_OTHER_NAMES, *_NAMES))}, got {name!r}")
        if config.get("rope_theta", base) != base:
            raise ValueError(f"base must be rope_theta of scaling, {config['rope_theta']}, got {base}")
        if kind == "default":
            return None
        given = {ours: config[theirs] for theirs, ours in _NAMES.items() if config.get(theirs) is not None}
        if "factor" not in given:
            raise ValueError("scaling: factor must be given, got none")
        numerator, denominator = config.get("mscale"), config.get("mscale_all_dim")
        if numerator and denominator and "attention_factor" not in given:  # DeepSeek-V2 (2024), its own variant of YaRN's factor
            given["attention_factor"] = _yarn_factor(given["factor"], numerator) / _yarn_factor(given["factor"], denominator)
        return cls(cast(Any, kind), **given)


class RotaryEmbedding(nn.Module):
    """Turns pairs of features of query and key by angles proportional to their positions (Su et al., "RoFormer", 2021, section 3.2).

        angle_i(p) = p * base ** (-2 i / rotary_dim),  i = 0 .. rotary_dim / 2 - 1
        (x_a, x_b) -> (x_a cos - x_b sin, x_b cos + x_a sin)

    with (a, b) = (i, i + rotary_dim / 2), or (2 i, 2 i + 1) if `interleaved`. Query . key then depends on the positions through their
    difference only. Angles are float64, cosines and sines at least float32, products likewise; the result has the dtype, and the order
    of dimensions in memory, of the input. There are no parameters and no buffers, so that nothing of it is lost in `.half()`; the
    table of the longest call is kept, of static frequencies, in eager mode.

    Args:
        head_dim: of query and key, even.
        base: > 0. Default 10000.
        interleaved: pairs of neighbours (RoFormer, GPT-J) rather than of halves (GPT-NeoX, Llama). Default False.
        scaling: a `RotaryScaling`, or the `rope_parameters` of a Hugging Face configuration (rope_type, factor,
            original_max_position_embeddings, ...). Default None.
        rotary_dim: even, at most head_dim: only the first rotary_dim features are turned, as if they were all (GPT-J, GPT-NeoX). None:
            head_dim, or what `partial_rotary_factor` of a configuration says.

    `attention(..., rotary=RotaryEmbedding(...))` does this to query (at p) and key (at j) by itself.

    Raises:
        ValueError, TypeError: naming the argument.
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scaling: RotaryScaling | Mapping[str, Any] | None = None,
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = number("head_dim", head_dim, 2)
        if rotary_dim is None and isinstance(scaling, Mapping):
            rotary_dim = int(self.head_dim * scaling.get("partial_rotary_factor", 1.0))
        self.rotary_dim = self.head_dim if rotary_dim is None else number("rotary_dim", rotary_dim, 2)
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            name, most = ("head_dim", "") if rotary_dim is None else ("rotary_dim", f" and at most head_dim ({head_dim})")
            raise ValueError(f"{name} must be even, for pairs of features{most}, got {self.rotary_dim}")
        self.base = check_base(base)
        self.interleaved = bool(interleaved)
        if isinstance(scaling, Mapping):
            scaling = RotaryScaling.from_config(scaling, self.base)
        elif scaling is not None and not isinstance(scaling, RotaryScaling):
            raise TypeError(f"scaling must be a RotaryScaling, a mapping or None, got {type(scaling).__name__}")
        if self.base == 1 and scaling is not None and scaling.kind == "yarn":
            raise ValueError("base must not be 1 for yarn, got 1")
        self.scaling = scaling
        self._kept: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Turn both.

        Args:
            query: (..., num_heads, seqlen_q, head_dim).
            key: (..., num_heads_kv, seqlen_kv, head_dim).
            positions: (seqlen,), or with leading dimensions that broadcast to those of query and key; for both where their lengths are
                equal, or a pair (of query, of key). None: key j at j, query i at i + seqlen_kv - seqlen_q.

        Returns:
            query and key, turned.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        for name, tensor in (("query", query), ("key", key)):
            self.check(name, tensor)
        if positions is None:
            tables = self.tables_for_call(query, key, None)
            return rotate(query, tables[0], self.interleaved), rotate(key, tables[1], self.interleaved)
        if isinstance(positions, (tuple, list)):
            if len(positions) != 2:
                raise ValueError(f"positions must be one tensor or a pair, got {len(positions)}")
            pair = positions[0], positions[1]
        else:
            pair = positions, positions
        for name, tensor, places in (("query", query, pair[0]), ("key", key, pair[1])):
            check_positions("positions", places)
            if places.device != tensor.device:
                raise ValueError(f"positions must be on the device of {name} ({tensor.device}), got {places.device}")
            if places.dim() < 1 or places.shape[-1] != tensor.shape[-2]:
                raise ValueError(f"positions must have shape (..., {tensor.shape[-2]}) for {name}, got {tuple(places.shape)}")
            lead, rank = tensor.shape[:-3], places.dim() - 1
            if rank > len(lead) or any(a not in (1, b) for a, b in zip(places.shape[:-1], lead[len(lead) - rank :])):
                raise ValueError(f"positions must broadcast to {(*lead, tensor.shape[-2])} for {name}, got {tuple(places.shape)}")
        return self.turn_both(query, key, *pair)

    def tables(self, positions: Tensor, *, length: int | Tensor | None = None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles, times the attention factor of YaRN: all that a kernel needs to turn a row as it loads it.

        Args:
            positions: (..., seqlen), integer or floating point.
            length: n of dynamic scaling, one for queries and keys; None: the largest position + 1.
            dtype: of the results. Default float32.

        Returns:
            (cos, sin), each (..., seqlen, rotary_dim // 2).

        Raises:
            TypeError: naming `positions`.
        """
        check_positions("positions", positions)
        angles = angles_of(positions, self._frequencies(positions, length))
        factor = self._attention_factor()
        cos, sin = angles.cos(), angles.sin()
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return cos.to(dtype), sin.to(dtype)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (..., num_heads, seqlen, head_dim) turned by tables that broadcast to (..., num_heads, seqlen, rotary_dim // 2)."""
        return rotate(x, torch.cat([cos, sin], -1), self.interleaved)

    def turn_both(self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Both at positions (..., seqlen) whose leading dimensions broadcast to those of query and key. No checks."""
        tables = self.tables_at(query_positions, key_positions, (real_dtype(query.dtype), real_dtype(key.dtype)))
        return rotate(query, tables[0], self.interleaved), rotate(key, tables[1], self.interleaved)

    def tables_for_call(self, query: Tensor, key: Tensor, query_offset: int | Tensor | None) -> tuple[Tensor, Tensor]:
        """Those that `attention` turns query and key by, (..., seqlen, rotary_dim), cosines and behind them sines, in the dtype of scores:
        key j at j, query i at i + query_offset (None: seqlen_kv - seqlen_q; a tensor: (batch...,))."""
        seqlen_q, seqlen_kv, dtypes = query.shape[-2], key.shape[-2], (real_dtype(query.dtype), real_dtype(key.dtype))
        offset = seqlen_kv - seqlen_q if query_offset is None else query_offset
        is_static = self.scaling is None or self.scaling.kind != "dynamic"
        if is_static and not isinstance(offset, Tensor) and 0 <= offset <= seqlen_kv and dtypes[0] == dtypes[1]:
            table = self._table(max(offset + seqlen_q, seqlen_kv), query.device, dtypes[0])
            return table[offset : offset + seqlen_q], table[:seqlen_kv]
        rows, keys = torch.arange(seqlen_q, device=query.device), torch.arange(seqlen_kv, device=key.device)
        if isinstance(offset, Tensor) and offset.dim():
            offset = offset.long()[..., None]
        return self.tables_at(rows + offset, keys, dtypes)

    def tables_at(self, query_positions: Tensor, key_positions: Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Tensor, Tensor]:
        """(..., 1, seqlen, rotary_dim) of query and key at positions (..., seqlen): cosines and behind them sines."""
        length = _length(query_positions, key_positions) if self.scaling is not None and self.scaling.kind == "dynamic" else None
        both = zip((query_positions, key_positions), dtypes, strict=True)
        tables = [torch.cat(self.tables(positions[..., None, :], length=length, dtype=dtype), -1) for positions, dtype in both]
        return tables[0], tables[1]

    def _table(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Of positions 0 .. length - 1 at frequencies that do not depend on the call, (length, rotary_dim); kept from call to call."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or is_in_torch_dispatch_mode():
            return torch.cat(self.tables(torch.arange(length, device=device), dtype=dtype), -1)
        kept = self._kept
        if kept is None or kept.device != device or kept.dtype != dtype or kept.shape[0] < length:
            positions = torch.arange(max(1 << (length - 1).bit_length(), 256), device=device)
            kept = torch.cat(self.tables(positions, dtype=dtype), -1)
            if not torch.is_inference_mode_enabled():  # whose tensors no backward can use
                self._kept = kept
        return kept[:length]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def check(self, name: str, tensor: Any) -> None:
        """That it is a float tensor (..., heads, seqlen, head_dim)."""
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name} must be a float tensor, got {tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__}")
        if tensor.dim() < 3 or tensor.shape[-1] != self.head_dim:
            raise ValueError(f"{name} must have shape (..., num_heads, seqlen, {self.head_dim}) for rotary, got {tuple(tensor.shape)}")

    def _frequencies(self, positions: Tensor, length: int | Tensor | None) -> Tensor:
        """(rotary_dim // 2,), float64."""
        scaling, device = self.scaling, positions.device
        if scaling is None:
            return inverse_frequencies(self.rotary_dim, self.base, device)
        if scaling.kind == "linear":
            return inverse_frequencies(self.rotary_dim, self.base, device) / scaling.factor
        if scaling.kind == "yarn":
            return self._yarn(scaling, device)
        exponent = self.rotary_dim / max(self.rotary_dim - 2, 1)  # with one pair the frequency is 1 whatever base is
        if scaling.kind == "ntk":
            return inverse_frequencies(self.rotary_dim, self.base * scaling.factor**exponent, device)
        trained = cast(int, scaling.original_max_len)
        if length is None:
            length = _length(positions)
        if not isinstance(length, Tensor):
            length = torch.tensor(length, device=device)
        ratio = length.to(torch.float64).clamp(min=trained) / trained
        return inverse_frequencies(self.rotary_dim, self.base * (scaling.factor * ratio - (scaling.factor - 1)) ** exponent, device)

    def _yarn(self, scaling: RotaryScaling, device: torch.device) -> Tensor:
        def pair_that_turns(times: float) -> float:
            trained = cast(int, scaling.original_max_len)
            return self.rotary_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(self.base))

        first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.rotary_dim - 1)
        if first == last:
            last += 0.001
        pairs = torch.arange(self.rotary_dim // 2, dtype=torch.float64, device=device)
        slow = ((pairs - first) / (last - first)).clamp(0, 1)
        return inverse_frequencies(self.rotary_dim, self.base, device) * (1 - slow + slow / scaling.factor)

    def _attention_factor(self) -> float:
        if self.scaling is None or self.scaling.kind != "yarn":
            return 1.0
        given = self.scaling.attention_factor
        return _yarn_factor(self.scaling.factor) if given is None else given

    def extra_repr(self) -> str:
        scaling = "" if self.scaling is None else f", scaling={self.scaling}"
        partial = "" if self.rotary_dim == self.head_dim else f", rotary_dim={self.rotary_dim}"
        return f"{self.head_dim}, base={self.base:g}, interleaved={self.interleaved}{scaling}{partial}"


def check_rotary(rotary: Any, **rows: Tensor) -> None:
    """Errors name `rotary`, or one of `rows`, each (..., num_heads, seqlen, head_dim)."""
    if not isinstance(rotary, RotaryEmbedding):
        raise TypeError(f"rotary must be a RotaryEmbedding, got {type(rotary).__name__}")
    for name, tensor in rows.items():
        rotary.check(name, tensor)


def _yarn_factor(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def _length(*positions: Tensor) -> int | Tensor:
    """The largest position + 1; 0 where there is none."""
    found = [places.max() for places in positions if places.numel()]
    return torch.stack(found).max() + 1 if found else 0


torch.serialization.add_safe_globals([RotaryScaling])
