"""Ranks for tests: processes that form a gloo group and run functions of the tests together, started once for each size."""

from __future__ import annotations

import atexit
import datetime
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRELOADED = ["tiled_attention", "tiled_attention.distributed.tensor_parallel", "torch.distributed.fsdp", "pytest"]
_TIMEOUT = 120.0  # seconds
_AFTER_A_FAILURE = 5.0  # the others may wait for what the rank that failed never sends
_kept: dict[int, Processes] = {}


class Processes:
    """`size` ranks. `run` has every rank call a function of a test module; what one raises fails the test, with its trace.

    After a failure the ranks are closed: they may be in the middle of something.
    """

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)  # the imports are done once, not once per rank
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.size = size
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, self._store.port, rank, size), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, ranks: Any = None, timeout: float = _TIMEOUT) -> list[Any]:
        """What `function(*args)` returned on every rank (of `ranks`), to be found by its name in its module."""
        chosen = list(range(self.size)) if ranks is None else list(ranks)
        for rank in chosen:
            self._pipes[rank].send((function, args))
        results: dict[int, Any] = {}
        problems: dict[int, str] = {}
        waiting = {self._pipes[rank]: rank for rank in chosen}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = connection.wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                problems |= dict.fromkeys(waiting.values(), "did not return in time")
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ok, result = pipe.recv()
                except EOFError:
                    ok, result = False, "has gone"
                (results if ok else problems)[rank] = result
            if problems:
                deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE)
        if problems:
            self.close()
        assert not problems, "\n".join(f"rank {rank} of {self.size}: {problem}" for rank, problem in problems.items())
        return [results[rank] for rank in chosen]

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()

    def lose_store(self) -> None:
        del self._store

    def close(self) -> None:
        if _kept.get(self.size) is self:
            del _kept[self.size]
        for process in self._processes:
            process.kill()
            process.join()


class Wire(TorchDispatchMode):
    """What this rank hands to collectives and messages: the operator and its bytes, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # DTensor first: what it comes to returns here
            return NotImplemented
        name = function._schema.name.partition("::")[2]
        if function.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.calls.append((name, sum(x.numel() * x.element_size() for x in tensors)))
        return function(*args, **(kwargs or {}))

    def sent(self) -> int:
        """Bytes of messages."""
        return sum(size for name, size in self.calls if name == "send")


def processes(size: int) -> Processes:
    """The group of this size that all tests share."""
    if size not in _kept:
        _kept[size] = Processes(size)
    return _kept[size]


@atexit.register
def _close() -> None:
    for group in list(_kept.values()):
        group.close()


def _work(pipe: Any, port: int, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
