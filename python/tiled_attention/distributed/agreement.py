"""What all ranks must say alike before they start: every rank tells every other one, and each raises the same named error."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .peers import Peers, Pending

_NUMBERS = 4  # int64 of each rank's own
_BYTES = 2048  # of one descriptor
_LIMIT = _BYTES - 8 * (_NUMBERS + 1)


class Agreement:
    """Of one call: `says` what must be equal, `numbers` what each rank has of its own, then `reach`."""

    def __init__(self, function: str) -> None:
        self._said: dict[str, Any] = {"function": function}
        self._numbers: list[int] = []
        self._error: Exception | None = None

    @contextlib.contextmanager
    def local_checks(self) -> Iterator[None]:
        """An error of the arguments in here is raised by `reach`, when the other ranks have been told; at once where there is no group."""
        try:
            yield
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            if not dist.is_initialized():
                raise
            self._error = error

    def says(self, **fields: Any) -> None:
        self._said.update({name: str(value) for name, value in fields.items()})

    def numbers(self, *values: int) -> None:
        self._numbers = list(values)

    def reach(self, group: Any, tensor: Any, timeout: float | None) -> list[list[int]]:
        """The numbers of every rank. Raises this rank's error, or one that names a rank that failed, disagrees or does not answer."""
        device = tensor.device if isinstance(tensor, Tensor) else torch.device("cpu")
        try:
            peers = Peers(group, device, timeout)
        except (TypeError, ValueError, RuntimeError) as error:
            raise (self._error or error) from None
        said = self._said if self._error is None else {"error": f"{type(self._error).__name__}: {self._error}"}
        mine = _packed(said, self._numbers)
        if peers.size == 1:
            entries = [mine]
        elif device.type == "cpu":
            entries = _tell(peers, mine)
        else:
            gathered = torch.empty(peers.size * _BYTES, dtype=torch.uint8, device=device)
            dist.all_gather_into_tensor(gathered, mine.to(device), group=peers.group)
            entries = list(gathered.cpu().view(peers.size, _BYTES))
        if self._error is not None:
            raise self._error
        _compare(peers, entries)
        return [entry[: 8 * _NUMBERS].view(torch.int64).tolist() for entry in entries]


def _packed(said: dict[str, Any], numbers: list[int]) -> Tensor:
    text = json.dumps(said).encode()
    if len(text) > _LIMIT:  # long values by their hashes
        share = _LIMIT // max(1, len(said)) // 2
        said = {name: value if len(value) < share else _shortened(value, share) for name, value in said.items()}
        text = json.dumps(said).encode()[:_LIMIT]
    entry = torch.zeros(_BYTES, dtype=torch.uint8)
    head = torch.zeros(_NUMBERS + 1, dtype=torch.int64)
    head[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    head[_NUMBERS] = len(text)
    entry[: head.numel() * 8] = head.view(torch.uint8)
    entry[head.numel() * 8 :][: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return entry


def _shortened(value: str, size: int) -> str:
    digest = hashlib.sha256(value.encode()).hexdigest()[:16]
    return f"{value[: max(0, size // 4)]}... (sha256 {digest})"


def _text(entry: Tensor) -> bytes:
    length = int(entry[8 * _NUMBERS : 8 * (_NUMBERS + 1)].view(torch.int64))
    return bytes(entry[8 * (_NUMBERS + 1) :][:length].tolist())


def _tell(peers: Peers, mine: Tensor) -> list[Tensor]:
    """Between each two ranks, so that it is known who does not answer."""
    entries = [torch.empty_like(mine) for _ in range(peers.size)]
    entries[peers.rank] = mine
    pending: list[Pending] = []
    failed: dict[int, Exception] = {}
    for peer in peers.others():
        try:
            pending.append(peers.exchange([(peer, mine)], [(peer, entries[peer])]))
        except RuntimeError as error:
            failed[peer] = error
    deadline = time.monotonic() + (peers.timeout or 0.0)
    for messages in pending:
        if peers.timeout is not None:  # one time-out for all of them together
            messages.limit = max(deadline - time.monotonic(), 0.01)
        failed.update(messages.failures())
    if failed:
        raise peers.lost(list(failed), next(iter(failed.values())))
    return entries


def _compare(peers: Peers, entries: list[Tensor]) -> None:
    texts = [_text(entry) for entry in entries]
    for rank, text in enumerate(texts):
        if b'"error"' in text:
            said = json.loads(text)
            if "error" in said:
                raise RuntimeError(f"{peers.name(rank)} raised {said['error']}")
    if all(text == texts[0] for text in texts):
        return
    said = [json.loads(text) for text in texts]
    for name in said[0] | said[-1]:
        for rank in range(1, peers.size):
            first, other = said[0].get(name), said[rank].get(name)
            if first != other:
                raise ValueError(f"{name} must be equal on all ranks: {peers.name(0)} has {first}, {peers.name(rank)} has {other}")
    raise ValueError("all ranks must make the same call")
