"""The seed of a call with dropout: one 64-bit number drawn from torch's generator, by an operator that compiled graphs keep where it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("tiled_attention", "FRAGMENT")
_library.define("draw_seed(Tensor[] like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag))


def _randint(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, dtype=torch.int64, device=device, generator=generator)


def _draw(like: list[Tensor]) -> Tensor:
    return _randint((), like[0].device)


def _map(info: Any, in_dims: Any, like: list[Tensor]) -> tuple[Tensor, int | None]:
    if info.randomness == "error":
        raise RuntimeError("dropout under vmap draws random numbers: pass randomness='same' or 'different' to torch.vmap")
    if info.randomness == "same":
        return torch.ops.tiled_attention.draw_seed(like), None
    return _randint((info.batch_size,), like[0].device), 0


_library.impl("draw_seed", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("tiled_attention::draw_seed", lambda like: like[0].new_empty((), dtype=torch.int64))
torch.library.register_vmap("tiled_attention::draw_seed", _map)


def draw_seed(like: list[Tensor], generator: torch.Generator | None) -> Tensor:
    """A seed, int64 (), on the device of `like`. `generator` None: torch's, which torch.manual_seed sets and checkpointing replays."""
    if torch.compiler.is_compiling():
        if generator is not None:
            raise ValueError("generator must be None inside torch.compile and torch.export, got a torch.Generator: use torch.manual_seed")
        return torch.ops.tiled_attention.draw_seed(like)
    return _randint((), like[0].device, generator)
