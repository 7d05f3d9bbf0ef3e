"""A roll call of the ranks of a group before they exchange data: all of them are here, in time, with calls that fit together.

It goes through the store of the group, not through its connections, so that nothing but the data itself is sent between ranks. Those that
are missing, refused their call or made another one are named on every rank before any of them waits for data that does not come, or that
does not fit into its buffer.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import _get_process_group_store

from .peers import Peers

_lock = threading.Lock()
_held: defaultdict[str, int] = defaultdict(int)  # roll calls so far, by the name of the group


def hold(peers: Peers, call: str, facts: Mapping[str, Any]) -> None:
    """Waits until all ranks are here, with the same call and the same facts about it. A fact is what json can write.

    Raises:
        RuntimeError: naming the ranks that did not come in time, made another call or refused theirs.
        ValueError: naming a fact on which ranks disagree, with what two of them say.
    """
    store, place = _get_process_group_store(peers.group), _next_place(peers)
    keys = [f"{place}/{rank}" for rank in range(peers.size)]
    store.set(keys[peers.rank], json.dumps({"call": call, "facts": facts}))
    try:
        store.wait(keys, *(() if peers.timeout is None else (timedelta(seconds=peers.timeout),)))
    except RuntimeError:
        missing = [peers.name(rank) for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            within = "the time-out of the store" if peers.timeout is None else f"{peers.timeout} s"
            problem = f"{call}: {', '.join(missing)} did not make this call within {within}"
            store.set(keys[peers.rank], json.dumps({"call": call, "refusal": f"gave up, since {problem}"}))
            raise RuntimeError(problem) from None
    said = [json.loads(entry) for entry in store.multi_get(keys)]
    _forget(store, place, peers.rank)
    for rank, entry in enumerate(said):
        if "refusal" in entry:
            raise RuntimeError(f"{call}: {peers.name(rank)} refused its call: {entry['refusal']}")
    for rank, entry in enumerate(said):
        if entry["call"] != said[0]["call"]:
            calls = f"{said[0]['call']} on {peers.name(0)} and {entry['call']} on {peers.name(rank)}"
            raise RuntimeError(f"all ranks must make the same call, got {calls}")
        for name, fact in said[0]["facts"].items():
            if entry["facts"].get(name) != fact:
                facts_ = f"{_text(fact)} on {peers.name(0)} and {_text(entry['facts'].get(name))} on {peers.name(rank)}"
                raise ValueError(f"{name} must be the same on all ranks, got {facts_}")


@contextlib.contextmanager
def reporting(peers: Peers, call: str) -> Iterator[None]:
    """What is raised inside stands for this rank in the roll call that the others hold, so that they need not wait for it."""
    try:
        yield
    except Exception as error:
        entry = json.dumps({"call": call, "refusal": f"{type(error).__name__}: {error}"})
        _get_process_group_store(peers.group).set(f"{_next_place(peers)}/{peers.rank}", entry)
        raise


def _next_place(peers: Peers) -> str:
    with _lock:
        number = _held[peers.group.group_name]
        _held[peers.group.group_name] += 1
    return f"tiled_attention/{number}"


def _forget(store: Any, place: str, rank: int) -> None:
    """Deletes what this rank said in the roll call before: all that came to this one have read it."""
    name, number = place.rsplit("/", 1)
    if number != "0":
        store.delete_key(f"{name}/{int(number) - 1}/{rank}")


def _text(fact: Any) -> str:
    return str(tuple(fact)) if isinstance(fact, list) else str(fact)
