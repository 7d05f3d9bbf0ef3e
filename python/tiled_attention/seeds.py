"""The seed of a call with dropout: one 64-bit number drawn from torch's generator, by an operator that compiled graphs keep where it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .compile_cache import register_fake

_library = torch.library.Library("tiled_attention", "FRAGMENT")
_library.define(
    "draw_seed(Tensor query, Tensor key, Tensor? value) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
)


def _randint(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, dtype=torch.int64, device=device, generator=generator)


def _draw(query: Tensor, key: Tensor, value: Tensor | None) -> Tensor:
    return _randint((), query.device)


def _map(info: Any, in_dims: Any, *tensors: Any) -> tuple[Tensor, None]:
    # A random operator without mapped inputs: torch applies the randomness mode itself.
    return _draw(*tensors), None


_library.impl("draw_seed", _draw, "CompositeExplicitAutograd")
register_fake("draw_seed", lambda query, key, value: query.new_empty((), dtype=torch.int64))
torch.library.register_vmap("tiled_attention::draw_seed", _map)


def draw_seed(query: Tensor, key: Tensor, value: Tensor | None, generator: torch.Generator | None) -> Tensor:
    """A seed, int64 (), on the device of query. `generator` None: torch's, which torch.manual_seed sets and checkpointing replays.

    All tensors of the call are passed, so that vmap sees whether any of them is mapped.
    """
    if torch.compiler.is_compiling():
        if generator is not None:
            raise ValueError("generator must be None inside torch.compile and torch.export, got a torch.Generator: use torch.manual_seed")
        return torch.ops.tiled_attention.draw_seed(query, key, value)
    return _randint((), query.device, generator)
