"""Who is told of attention calls: nobody, unless `record_attention` is on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor

from .arguments import AdditiveArguments, Arguments


class Call(NamedTuple):
    """One finished call."""

    query: Tensor
    key: Tensor
    arguments: Callable[[], Arguments | AdditiveArguments]  # of its probabilities: value None, no dropout
    lse: Tensor | None = None  # (..., num_heads, seqlen_q), where the call had it
    columns: int = 0  # keys that stand first in `arguments`, and last in the weights that the module returns


observers: list[Callable[[Call], None]] = []
_local = threading.local()


def tell(call: Call) -> None:
    columns = getattr(_local, "columns", 0)
    if columns:
        call = call._replace(columns=columns)
    for observer in list(observers):
        observer(call)


@contextlib.contextmanager
def columns_first(count: int) -> Iterator[None]:
    """The first `count` keys of calls inside are such columns."""
    before = getattr(_local, "columns", 0)
    _local.columns = count
    try:
        yield
    finally:
        _local.columns = before


class Shared:
    """What is in place for as long as anybody holds it. Counted, for all threads."""

    def __init__(self, install: Callable[[ExitStack], None]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._holders = 0
        self._undo = ExitStack()

    def enter(self) -> None:
        with self._lock:
            if not self._holders:
                with ExitStack() as undo:
                    self._install(undo)
                    self._undo = undo.pop_all()
            self._holders += 1

    def leave(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._undo.close()
