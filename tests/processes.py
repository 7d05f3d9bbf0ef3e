"""Processes that form a gloo group and run functions of the tests together, started once for each size."""

from __future__ import annotations

import atexit
import datetime
import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRELOADED = ["tiled_attention", "tiled_attention.distributed.tensor_parallel", "torch.distributed.fsdp", "pytest"]
_TIMEOUT = 120.0
_kept: dict[int, Processes] = {}


class Processes:
    """`size` ranks. `run` has every rank call a function of a test module; what one raises fails the test, with its trace."""

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
        results, problems = [], []
        for rank in chosen:
            if not self._pipes[rank].poll(timeout):
                problems.append(f"rank {rank} did not return within {timeout} s")
                continue
            try:
                ok, result = self._pipes[rank].recv()
            except EOFError:
                problems.append(f"rank {rank} has gone")
                continue
            results.append(result) if ok else problems.append(f"rank {rank}:\n{result}")
        assert not problems, "\n".join(problems)
        return results

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()

    def close(self) -> None:
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


def processes(size: int) -> Processes:
    """The group of this size that all tests share."""
    if size not in _kept:
        _kept[size] = Processes(size)
        atexit.register(_kept[size].close)
    return _kept[size]


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
