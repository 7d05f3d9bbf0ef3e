"""The ranks of a group, and messages between them: batched point-to-point, with errors that name the rank at the other end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_TAG = 0x7A11  # keeps these messages apart from those of the program, where the backend has tags

Message = tuple[int, Tensor]  # rank of the group at the other end, contiguous tensor


class Peers:
    """Ranks are those of the group, 0 .. size - 1."""

    def __init__(self, group: Any, device: torch.device, timeout: float | None) -> None:
        self.group = _process_group(group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise RuntimeError(f"group must have this process as a member, got a group that rank {dist.get_rank()} is not in")
        self.device = device
        self.timeout = timeout  # not checked yet: the others are to hear of it

    def check_timeout(self) -> None:
        timeout = self.timeout
        if timeout is None:
            return
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout must be a number of seconds > 0 or None, got {timeout!r}")
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be a number of seconds > 0 or None, got {timeout}")

    def seconds(self) -> float:
        """How long to wait for another rank."""
        return self.group._get_backend(self.device).options._timeout.total_seconds() if self.timeout is None else self.timeout

    def others(self) -> list[int]:
        """From the next rank on, round to the one before."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def name(self, rank: int) -> str:
        whole = dist.get_global_rank(self.group, rank)
        return f"rank {rank}" if whole == rank else f"rank {rank} of the group (global rank {whole})"

    def exchange(self, sends: Iterable[Message], receives: Iterable[Message]) -> Pending:
        """Starts these messages; those between two ranks arrive in the order given. Empty ones are left out at both ends.

        Every rank starts its exchanges in one order that all ranks share, so that none waits for one that stands behind another.
        """
        parts: list[tuple[Any, int, Tensor]] = [(dist.isend, peer, tensor) for peer, tensor in sends if tensor.numel()]
        parts += [(dist.irecv, peer, tensor) for peer, tensor in receives if tensor.numel()]
        ops = [dist.P2POp(op, tensor, group=self.group, tag=_TAG, group_peer=peer) for op, peer, tensor in parts]
        if not ops:
            return Pending(self, [], [])
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self.lost([peer for _, peer, _ in parts], error) from error
        return Pending(self, works, parts)

    def lost(self, ranks: Sequence[int], error: Exception) -> RuntimeError:
        names = " or ".join(self.name(rank) for rank in sorted(set(ranks)))
        if "timed out" in str(error).lower():
            limit = "the time-out of the group" if self.timeout is None else f"{self.timeout} s"
            return RuntimeError(f"{names} did not answer within {limit}: it is lost, or waits for another rank itself")
        return RuntimeError(f"{names} is lost: {str(error).split('. ')[0]}")


class Pending:
    """Messages on their way. Their tensors stay alive until `wait`."""

    def __init__(self, peers: Peers, works: list[Any], parts: list[tuple[Any, int, Tensor]]) -> None:
        self._peers, self._works, self._parts = peers, works, parts
        self.limit = peers.timeout  # seconds

    def wait(self) -> None:
        """Until all have been sent and received; on CUDA, until what follows on the current stream may use them.

        RuntimeError naming the rank that did not answer in time.
        """
        failed = self.failures()
        if failed:
            raise self._peers.lost(list(failed), next(iter(failed.values()))) from next(iter(failed.values()))

    def failures(self) -> dict[int, Exception]:
        """Waits, and returns who failed: by rank. Everything else has arrived then."""
        failed: dict[int, Exception] = {}
        works, self._works = self._works, []
        each = len(works) == len(self._parts)
        for at, work in enumerate(works):
            peers = [self._parts[at][1]] if each else [peer for _, peer, _ in self._parts]
            try:
                if self.limit is None or self._peers.device.type != "cpu":
                    work.wait()
                else:
                    work.wait(timedelta(seconds=self.limit))
            except RuntimeError as error:
                for peer in peers:
                    failed.setdefault(peer, error)
        self._parts = []
        return failed


def _process_group(group: Any) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("group needs torch.distributed: call torch.distributed.init_process_group first")
    if group is None:
        return dist.distributed_c10d._get_default_group()
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a process group or a mesh of one dimension, got a mesh of shape {tuple(group.shape)}")
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise RuntimeError("group must have this process as a member, got a group that it is not in")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group, a mesh of one dimension or None, got {type(group).__name__}")
    return group
