"""DTensor rules of all operators: sharded by batch items or by heads, an operator runs on the local shards without communication.

A rule is a torch_dispatch rule (torch.library.register_torch_dispatch), not an entry in DTensor's table of placements: dropout counts batch
items and heads from the start of the whole tensor, so that each rank has numbers of its own to pass on, which such an entry cannot say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..library import ops

HEADS = -1  # the role of a dimension: this, or which of the leading dimensions it is, from 0
Role = int


class Layout(NamedTuple):
    """Where heads and batch items lie in a tensor, counted from its last dimension."""

    heads: int | None  # dimension of heads
    of_key: bool = False  # heads of key and value, not of query
    leading: bool = True  # the dimensions before heads are the leading ones of query, or broadcast to them
    per_item: bool = False  # dimension 0 counts the batch items, leading dimensions taken together


_QUERY, _KEY = Layout(-3), Layout(-3, of_key=True)
_ROWS, _KEY_SUM = Layout(-2), Layout(-2, of_key=True)
_PER_HEAD, _WEIGHT = Layout(-1, leading=False), Layout(-2, leading=False)
_PER_ITEM, _WHOLE = Layout(None, per_item=True), Layout(None)
_PACKED, _PACKED_KEY = Layout(-2, leading=False), Layout(-2, of_key=True, leading=False)
_PAGES = Layout(-3, of_key=True, leading=False)

_LAYOUTS = {
    **dict.fromkeys(("query", "out", "residual", "grad_out", "mask", "bias", "block_rows", "query_table", "rows", "grad_weights"), _QUERY),
    **dict.fromkeys(("key", "value", "key_table", "key_mask", "log_decay", "initial_kv", "kv", "grad_kv"), _KEY),
    **dict.fromkeys(("key_cache", "value_cache", "new_key", "new_value"), _KEY),
    **dict.fromkeys(("lse", "grad_lse"), _ROWS),
    **dict.fromkeys(("initial_k_sum", "k_sum", "grad_k_sum"), _KEY_SUM),
    **dict.fromkeys(("alibi_slopes", "sinks"), _PER_HEAD),
    **dict.fromkeys(("key_lengths", "query_offset", "cache_seqlens", "page_table"), _PER_ITEM),
    "score_weight": _WEIGHT,
    "table": _QUERY,
}
_VARLEN = {
    **dict.fromkeys(("query", "out", "residual", "grad_out", "lse", "grad_lse"), _PACKED),
    **dict.fromkeys(("key", "value"), _PACKED_KEY),
    **dict.fromkeys(("alibi_slopes", "sinks"), _PER_HEAD),
}
# Tensors that decide how a call is sharded, the first that is there first.
_LEADERS = ("query", "rows", "new_key", "key")
_RESULTS = {  # of the operators whose results are not gradients
    **dict.fromkeys(("attention", "attention_fwd", "additive_attention", "additive_attention_fwd"), ("out", "lse", "residual")),
    **dict.fromkeys(("attention_varlen", "attention_varlen_fwd"), ("out", "lse", "residual")),
    **dict.fromkeys(("linear_attention", "linear_attention_fwd", "linear_attention_step"), ("out", "kv", "k_sum")),
    **dict.fromkeys(("attention_weights", "additive_attention_weights", "rotate", "linear_attention_step_"), ("out",)),
    "attention_decode": ("out", "lse"),
    **dict.fromkeys(("cache_append_", "_attention_fwd_add_", "_attention_bwd_add_"), ()),
}
_GRADIENTS = tuple(f"{name}_bwd" for name in (
    *("attention", "attention_weights", "attention_varlen", "linear_attention", "additive_attention", "additive_attention_weights"),
))  # fmt: skip


class _Call:
    """One call of an operator: its arguments by name, where heads and batch items lie in them, and what each mesh dimension shards."""

    def __init__(self, op: Any, args: Sequence[Any], kwargs: Any) -> None:
        schema = op._schema
        self.name = schema.name.rpartition("::")[2]
        names = [argument.name for argument in schema.arguments]
        given = {**dict(zip(names, args)), **(kwargs or {})}
        self.values: dict[str, Any] = {name: given[name] for name in names}
        self.written = {argument.name for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write}
        self.returned = [result.name or "out" for result in schema.returns]
        self.mesh: DeviceMesh = next(value.device_mesh for value in self.values.values() if isinstance(value, DTensor))
        leader = next((name for name in _LEADERS if isinstance(self.values.get(name), Tensor)), None)
        self.known = self.name in _RESULTS or self.name in _GRADIENTS
        self._check(leader)
        self.roles: list[Role | None] = [None] * self.mesh.ndim
        self.sizes: dict[tuple[Role, bool], int] = {}  # of a role in query, and in key (True)
        if self.known and leader is not None:
            self._measure(self.values[leader], leader)
            for dim in range(self.mesh.ndim):
                self.roles[dim] = self._role_of(dim, leader)

    def _check(self, leader: str | None) -> None:
        for name, value in self.values.items():
            if isinstance(value, DTensor):
                if value.device_mesh != self.mesh:
                    raise ValueError(f"{name} must be on the mesh of the others, {self.mesh}, got {value.device_mesh}")
            elif isinstance(value, Tensor) and (value.requires_grad or name in (leader, "key", "value", "key_cache", "value_cache")):
                raise ValueError(
                    f"{name} must be a DTensor on {self.mesh}, as other tensors of the call are, got a plain tensor: see distribute_tensor"
                )

    def layout(self, name: str) -> Layout:
        if not self.known:
            return _WHOLE
        if self.name.startswith("attention_varlen"):
            return _VARLEN.get(name, _WHOLE)
        if self.values.get("page_table") is not None and name in ("key_cache", "value_cache"):
            return _PAGES
        if name == "rows" and self.name != "rotate":
            return _WHOLE
        if self.name == "attention_decode" and name == "documents":
            return _WHOLE
        return _LAYOUTS.get(name, _WHOLE)

    def dim_of(self, role: Role, layout: Layout, rank: int) -> int | None:
        """The dimension of a tensor of `rank` dimensions that has the role."""
        if layout.per_item:
            return 0 if role == 0 and self.leading == 1 else None
        if layout.heads is None or rank + layout.heads < 0:
            return None
        heads = rank + layout.heads
        if role == HEADS:
            return heads
        dim = heads - self.leading + role
        return dim if layout.leading and 0 <= dim < heads else None

    def _measure(self, tensor: Tensor, name: str) -> None:
        layout = self.layout(name)
        self.leading = tensor.dim() + (layout.heads or 0) if layout.leading else 0
        for role in (HEADS, *range(self.leading)):
            dim: Any = self.dim_of(role, layout, tensor.dim())
            self.sizes[role, False] = self.sizes[role, True] = tensor.shape[dim]
        for key in ("key", "key_cache"):
            if isinstance(self.values.get(key), Tensor):
                self.sizes[HEADS, True] = self.values[key].shape[self.layout(key).heads]

    def _role_of(self, mesh_dim: int, leader: str) -> Role | None:
        """What this mesh dimension shards: as the tensors are, where that can be computed without the other ranks."""
        for name in (leader, "key", "value"):
            tensor = self.values.get(name)
            if not isinstance(tensor, DTensor) or tensor.placements[mesh_dim] == Replicate():
                continue
            placement = tensor.placements[mesh_dim]
            candidates: list[Role] = [HEADS, *range(self.leading)]
            if type(placement) is Shard:
                same = [role for role in candidates if self.dim_of(role, self.layout(name), tensor.dim()) == placement.dim % tensor.dim()]
                if same and self._may_shard(same[0], mesh_dim):
                    return same[0]
            even = [role for role in candidates if self._may_shard(role, mesh_dim) and self._is_even(role, mesh_dim)]
            return even[0] if even else None
        return None

    def _shards(self, role: Role, mesh_dim: int) -> int:
        """Into how many shards a role falls when this mesh dimension shards it too."""
        dims = [dim for dim in range(mesh_dim) if self.roles[dim] == role] + [mesh_dim]
        return math.prod(self.mesh.size(dim) for dim in dims)

    def _is_even(self, role: Role, mesh_dim: int) -> bool:
        return all(self.sizes[role, of_key] % self._shards(role, mesh_dim) == 0 for of_key in (False, True) if self.sizes[role, of_key] > 1)

    def _may_shard(self, role: Role, mesh_dim: int) -> bool:
        if self.sizes[role, False] < 2:
            return False
        if role == HEADS:
            heads, heads_kv = self.sizes[HEADS, False], self.sizes[HEADS, True]
            return heads_kv in (1, heads) or self._is_even(role, mesh_dim)
        if self.values.get("cu_seqlens") is not None:
            return False
        counts_items = any(self.values.get(name) is not None for name, layout in _LAYOUTS.items() if layout.per_item)
        return self.leading == 1 or not (counts_items or (role > 0 and self.values.get("dropout_p")))

    def placements(self, layout: Layout, shape: Sequence[int]) -> list[Placement]:
        """Of a tensor of this shape; dimensions of size 1 are broadcast, and on all ranks."""
        found: list[Placement] = []
        for role in self.roles:
            dim = None if role is None else self.dim_of(role, layout, len(shape))
            found.append(Replicate() if dim is None or shape[dim] == 1 else Shard(dim))
        return found

    def local(self, name: str) -> Any:
        value = self.values[name]
        if not isinstance(value, Tensor):
            return value
        if self.name == "draw_seed" and isinstance(value, DTensor):  # which does not look at the values
            return value.to_local()
        wanted = self.placements(self.layout(name), value.shape)
        if not isinstance(value, DTensor):
            value = DTensor.from_local(value, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        if list(value.placements) == wanted:
            return value.to_local()
        if name in self.written:
            raise ValueError(f"{name} is written in place and must have the placements {wanted} in this call, got {list(value.placements)}")
        detached: Any = value.detach()  # what redistribute returns cannot be detached in place in torch 2.10
        return detached.redistribute(placements=wanted).to_local()

    def shard(self, role: Role) -> tuple[int, int]:
        """Where the shard of this rank begins in the dimension of the role, and its size: as torch.chunk cuts, dimension by dimension."""
        begin, size = 0, self.sizes[role, False]
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"tiled_attention::{self.name}: this process is not in the mesh {self.mesh} of its tensors")
        for mesh_dim, at in enumerate(self.roles):
            if at == role:
                chunk = -(-size // self.mesh.size(mesh_dim))
                first = min(coordinate[mesh_dim] * chunk, size)
                begin, size = begin + first, min(chunk, size - first)
        return begin, size

    def dropout_offsets(self) -> list[int]:
        batch, head, query, key = self.values["dropout_offsets"] or (0, 0, 0, 0)
        if HEADS in self.roles:
            head += self.shard(HEADS)[0]
        if 0 in self.roles:
            batch += self.shard(0)[0] * math.prod(self.sizes[role, False] for role in range(1, self.leading))
        return [batch, head, query, key]

    def run(self, op: Any) -> Any:
        locals_ = {name: self.local(name) for name in self.values}
        if self.values.get("dropout_p") and "dropout_offsets" in locals_:
            locals_["dropout_offsets"] = self.dropout_offsets()
        if self.averages() and "grad_weights" in locals_:
            locals_["grad_weights"] = locals_["grad_weights"] * self.share_of_heads()
        for name in ("grad_kv", "grad_k_sum"):
            if isinstance(locals_.get(name), Tensor) and not self.counts_states():
                locals_[name] = torch.zeros_like(locals_[name])
        results = op(*locals_.values())
        if not self.returned:
            return None
        several = isinstance(results, (tuple, list))
        names = _RESULTS.get(self.name, self.returned)
        parts = zip(names, results if several else [results], strict=True)
        wrapped = [self._wrap(name, result, at) for at, (name, result) in enumerate(parts)]
        return tuple(wrapped) if several else wrapped[0]

    def _wrap(self, name: str, local: Tensor, at: int) -> DTensor:
        """The result `at` of this rank, as the shard, the copy or the summand of the whole that it is."""
        gradient = name.startswith("grad_")
        layout = self.layout(name.removeprefix("grad_") if gradient else name)
        shape = list(local.shape)
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        is_left_out = not self.values["gradients"] >> at & 1 if gradient else local.dim() == 1 and local.numel() == 0
        averages = self.averages() and name == "out"
        for mesh_dim, role in enumerate(self.roles):
            if role is None or is_left_out:
                continue
            dim = self.dim_of(role, layout, local.dim())
            of = self.values[name.removeprefix("grad_")].shape if gradient else None
            size = 1 if dim is None else of[dim] if of is not None else self.sizes[role, layout.of_key]
            if dim is not None and size > 1 and not (averages and role == HEADS):
                shape[dim], placements[mesh_dim] = size, Shard(dim)
            elif gradient or averages:
                placements[mesh_dim] = Partial()
        if averages:
            local = local * self.share_of_heads()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=_strides(shape, local))

    def averages(self) -> bool:
        """Whether the result is a mean over heads of which this rank has a part: the ranks' means, weighted with their heads, add up."""
        return self.values.get("average") is True and HEADS in self.roles

    def counts_states(self) -> bool:
        """Whether gradients of states act on this rank. A state of one head is the same on all ranks of heads, whose gradients add up."""
        shares = HEADS in self.roles and self.sizes[HEADS, True] == 1 < self.sizes[HEADS, False]
        coordinate: Any = self.mesh.get_coordinate()
        return not shares or not any(at for at, role in zip(coordinate, self.roles) if role == HEADS)

    def share_of_heads(self) -> float:
        return self.shard(HEADS)[1] / self.sizes[HEADS, False]


def _strides(shape: Sequence[int], local: Tensor) -> tuple[int, ...]:
    """Dense, in the order of dimensions of `local`."""
    strides, step = [1] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (local.stride(dim), -dim)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _rule(cls: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    with torch.no_grad():
        return _Call(op, args, kwargs).run(op)


def register() -> None:
    """Gives DTensor the rules; once."""
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace == "tiled_attention" and hasattr(ops, name):
            torch.library.register_torch_dispatch(qualified, DTensor, _rule)
