"""How ranks agree before they exchange data: all of them are here, in time, with calls that fit together.

They meet in the store of the group, not over its connections: no tensor is sent, and a group in which a rank did not come is as before.
Ranks that are missing, raised or made another call are named on every rank before any of them waits for data that does not come, or that
does not fit into its buffer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed.distributed_c10d import _get_process_group_store

from .peers import Peers


class _Meetings:
    """Those of one group. Its store keeps their number: a group may be made again, over the same store, or with other processes."""

    def __init__(self, peers: Peers) -> None:
        store: Any = _get_process_group_store(peers.group)
        self.store = store.clone()  # a connection of its own: waiting holds a lock on it, and its time-out is set
        self._root = f"tiled_attention/{peers.size}"  # not all ranks of a larger group met in a smaller one
        self._count = f"{self._root}/count/{peers.rank}"
        self._number = self.store.add(self._count, 0)
        self.written: set[str] = set()  # keys of this rank that others may not have read yet

    def next_place(self) -> str:
        number = self._number
        self._number += 1
        self.store.set(self._count, str(self._number))
        return f"{self._root}/{number}"

    def write(self, key: str, entry: Mapping[str, Any]) -> None:
        self.store.set(key, json.dumps(entry))
        self.written.add(key)


_meetings: WeakKeyDictionary[dist.ProcessGroup, _Meetings] = WeakKeyDictionary()


@_disable_dynamo
def agree(peers: Peers, function: str, facts: Mapping[str, Any], numbers: Sequence[int] = ()) -> list[list[int]]:
    """The `numbers` of every rank, when all are here with the same function and the same facts about the call, as `str` has them.

    Raises:
        RuntimeError: naming the ranks that did not come in time, or one that raised.
        ValueError: naming a fact on which ranks disagree, with what two of them have.
    """
    if peers.size == 1:
        return [list(numbers)]
    said = {"function": function, **{name: str(fact) for name, fact in facts.items()}}
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]
    try:
        place = _meetings_of(peers).next_place()
        entries = _exchange(peers, function, place, {"facts": digest, "numbers": list(numbers)})
        if any(entry["facts"] != digest for entry in entries):
            _compare(peers, _exchange(peers, function, f"{place}/facts", said))
    except dist.DistNetworkError as error:
        holder = "in global rank 0, unless torchrun or the program keeps it elsewhere"
        raise RuntimeError(f"{function}: the store of the group is lost, which lies {holder}: {error}") from error
    return [entry["numbers"] for entry in entries]


@contextlib.contextmanager
def reporting(peers: Peers, function: str) -> Iterator[None]:
    """What is raised inside, or because of the time-out, stands for this rank where the others agree: they need not wait for it."""
    try:
        peers.check_timeout()
        yield
    except Exception as error:
        if peers.size > 1:
            with contextlib.suppress(dist.DistError):
                meetings = _meetings_of(peers)
                meetings.write(f"{meetings.next_place()}/{peers.rank}", _raised(error))
        raise


def _exchange(peers: Peers, function: str, place: str, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What all ranks wrote at this place."""
    keys = [f"{place}/{rank}" for rank in range(peers.size)]
    meetings, seconds = _meetings_of(peers), peers.seconds()
    store, earlier = meetings.store, list(meetings.written)
    store.set_timeout(timedelta(seconds=seconds))
    meetings.write(keys[peers.rank], entry)
    try:
        found = store.multi_get(keys)
    except dist.DistStoreError:
        missing = [peers.name(rank) for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            late = RuntimeError(f"{function}: {', '.join(missing)} did not make this call within {seconds:g} s")
            meetings.write(keys[peers.rank], _raised(late))
            raise late from None
        found = store.multi_get(keys)
    for key in earlier:  # who came here has read them
        store.delete_key(key)
    meetings.written.difference_update(earlier)
    entries = [json.loads(text) for text in found]
    for rank, said in enumerate(entries):
        if "raised" in said:
            raise RuntimeError(f"{function}: {peers.name(rank)} raised {said['raised']}")
    return entries


def _compare(peers: Peers, said: Sequence[Mapping[str, str]]) -> None:
    for name in dict.fromkeys(name for facts in said for name in facts):
        for rank, facts in enumerate(said):
            first, other = said[0].get(name), facts.get(name)
            if first != other:
                raise ValueError(f"{name} must be equal on all ranks: {peers.name(0)} has {first}, {peers.name(rank)} has {other}")


def _raised(error: Exception) -> dict[str, str]:
    return {"raised": f"{type(error).__name__}: {error}"}


def _meetings_of(peers: Peers) -> _Meetings:
    if peers.group not in _meetings:
        _meetings[peers.group] = _Meetings(peers)
    return _meetings[peers.group]
