"""The ranks of a process group: a roll call before they exchange data, and the exchanges, each with a limit of time.

The roll call goes through the store of the group, not through its connections. Ranks that are missing, refused the call or made another one
are named on every rank before any of them waits for data that does not come, or that does not fit into its buffer.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store

from ..call import check_number

_lock = threading.Lock()
_roll_calls: defaultdict[str, int] = defaultdict(int)  # held so far, by the name of the group


def group_of(group: Any) -> dist.ProcessGroup:
    """The process group that the argument `group` means. Raises where this process is not in one."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("group needs torch.distributed: call torch.distributed.init_process_group first")
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a process group or a mesh of one dimension, got a mesh of shape {tuple(group.shape)}")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must have this process as a member, got a group that it is not in")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group, a mesh of one dimension or None, got {type(group).__name__}")
    return group


def seconds(timeout: Any) -> float | None:
    """The argument `timeout`, checked."""
    if timeout is None:
        return None
    return check_number("timeout", timeout, "a number of seconds > 0 or None", lambda x: 0 < x < math.inf)


class Ranks:
    """The ranks of `group`, seen from this one and counted within the group. `timeout` is in seconds; None: that of the group."""

    def __init__(self, group: dist.ProcessGroup, timeout: float | None) -> None:
        self.group = group
        self._limit = () if timeout is None else (timedelta(seconds=timeout),)
        self._within = "the time-out of the group" if timeout is None else f"{timeout:g} s"
        self.rank, self.size = group.rank(), group.size()
        self.is_first, self.is_last = self.rank == 0, self.rank == self.size - 1

    def roll_call(self, call: str, facts: Mapping[str, Any]) -> None:
        """Waits until all ranks are here, with the same call and the same facts about it. A fact is what json can write.

        Raises:
            RuntimeError: naming the ranks that did not come in time, made another call or refused theirs.
            ValueError: naming a fact on which ranks disagree, with what two of them say.
        """
        store, place = _get_process_group_store(self.group), self._place()
        keys = [f"{place}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps({"call": call, "facts": facts}))
        try:
            store.wait(keys, *self._limit)
        except RuntimeError:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if missing:
                names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self.size}"
                problem = f"{call}: {names} did not make this call within {self._within}"
                store.set(keys[self.rank], json.dumps({"call": call, "refusal": f"gave up, since {problem}"}))
                raise RuntimeError(problem) from None
        said = [json.loads(entry) for entry in store.multi_get(keys)]
        self._forget(store, place)
        for rank, entry in enumerate(said):
            if "refusal" in entry:
                raise RuntimeError(f"{call}: rank {rank} refused its call: {entry['refusal']}")
        for rank, entry in enumerate(said):
            if entry["call"] != said[0]["call"]:
                raise RuntimeError(f"all ranks must make the same call, got {said[0]['call']} on rank 0 and {entry['call']} on rank {rank}")
            for name, fact in said[0]["facts"].items():
                if entry["facts"].get(name) != fact:
                    other = entry["facts"].get(name)
                    raise ValueError(f"{name} must be the same on all ranks, got {_text(fact)} on rank 0 and {_text(other)} on rank {rank}")

    @contextlib.contextmanager
    def reporting(self, call: str) -> Iterator[None]:
        """What is raised inside stands for this rank in the roll call that the others hold, so that they need not wait for it."""
        try:
            yield
        except Exception as error:
            store, place = _get_process_group_store(self.group), self._place()
            refusal = f"{type(error).__name__}: {error}"
            store.set(f"{place}/{self.rank}", json.dumps({"call": call, "refusal": refusal}))
            raise

    def send(self, tensor: Tensor, to: int) -> dist.Work | None:
        if not tensor.numel():
            return None
        with self._naming(to):
            return dist.isend(tensor, group=self.group, group_dst=to)

    def receive(self, like: Tensor, source: int) -> Tensor:
        buffer = torch.empty_like(like)
        if not buffer.numel():
            return buffer
        with self._naming(source):
            self.finish(dist.irecv(buffer, group=self.group, group_src=source), source, buffer)
        return buffer

    def finish(self, work: dist.Work | None, other: int, tensor: Tensor) -> None:
        """Waits for what was sent to, or is received from `other`: the host on the CPU, the stream on CUDA."""
        if work is not None:
            with self._naming(other):
                work.wait(*() if tensor.is_cuda else self._limit)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if not tensor.numel():
            return tensor
        try:
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
            if work is not None:
                work.wait(*() if tensor.is_cuda else self._limit)
        except RuntimeError as error:
            raise RuntimeError(f"a rank was lost in the sum over {self.size} ranks, or took longer than {self._within}: {error}") from error
        return tensor

    @contextlib.contextmanager
    def _naming(self, other: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if str(error).startswith("rank "):
                raise
            problem = f"rank {other} was lost after the roll call, or took longer than {self._within} (seen by rank {self.rank})"
            raise RuntimeError(f"{problem}: {error}") from error

    def _place(self) -> str:
        with _lock:
            number = _roll_calls[self.group.group_name]
            _roll_calls[self.group.group_name] += 1
        return f"tiled_attention/{number}"

    def _forget(self, store: Any, place: str) -> None:
        """Deletes what this rank said in the roll call before: all that came to this one have read it."""
        name, number = place.rsplit("/", 1)
        if number != "0":
            store.delete_key(f"{name}/{int(number) - 1}/{self.rank}")


def _text(fact: Any) -> str:
    return str(tuple(fact)) if isinstance(fact, list) else str(fact)
