"""Several processes on this machine, started by torchrun, and the traffic between them.

A rank that fails, is killed or is lost ends all of them: `RankFailed` has its number and its error.
"""

import contextlib
import logging
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

# Linux, include/uapi/linux/tcp.h, struct tcp_info: tcpi_bytes_sent and tcpi_bytes_retrans, since 4.19.
TCP_INFO_SENT = struct.Struct("=QQ")
TCP_INFO_SENT_OFFSET = 200
SHOWN_LINES = 5


class RankFailed(Exception):
    """A rank raised, left with a code other than 0, or was killed. `errors`: by rank, the first to fail first."""

    def __init__(self, errors: Mapping[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank} failed: {error}" for rank, error in errors.items()))
        self.errors = dict(errors)


@contextlib.contextmanager
def _own_settings(environment: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment set, and no log of torchrun's, whose errors `RankFailed` tells.

    These, and the signal handlers that torchrun replaces, are at the end what they were.
    """
    before, level = dict(os.environ), logging.root.manager.disable
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if main else {}
    os.environ.update(environment)
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(level)
        os.environ.clear()
        os.environ.update(before)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _errors(failures: Mapping[int, ProcessFailure], logs: Path) -> dict[int, str]:
    """What each rank died of, in order. torchrun ends the others by SIGTERM: they are left out unless there is nothing else."""

    def written(rank: int) -> Path:
        return Path(failures[rank].error_file)

    def error(rank: int) -> str:
        failure = failures[rank]
        message: Any = failure.message
        if isinstance(message, dict):
            return str(message["message"])
        if failure.exitcode < 0:
            return f"killed by signal {-failure.exitcode} ({failure.signal_name()})"
        log = next(logs.glob(f"*/attempt_0/{failure.local_rank}/stderr.log"), logs / "none")
        last = log.read_text(errors="replace").strip().splitlines()[-SHOWN_LINES:] if log.is_file() else []
        return "\n".join([f"exit code {failure.exitcode}", *last])

    raised = sorted((rank for rank in failures if written(rank).is_file()), key=lambda rank: written(rank).stat().st_mtime_ns)
    ended = [rank for rank in failures if rank not in raised and failures[rank].exitcode == -signal.SIGTERM]
    # Who went without a word is nobody's consequence.
    silent = [rank for rank in failures if rank not in raised and rank not in ended]
    return {rank: error(rank) for rank in [*silent, *raised] or ended}


def launch(program: Sequence[str], num_ranks: int, *, threads: int = 1, environment: Mapping[str, str] | None = None) -> None:
    """Runs `program` in num_ranks processes on this machine (`torch.distributed.run`, one rendezvous of its own), and waits for them.

    Args:
        program: what follows `python`: a file, or "-m" and a module, and arguments. Its entry is wrapped by torch's `record`, so that the
            errors that it raises are told.
        num_ranks: >= 1.
        threads: of each process.
        environment: more variables.

    What the processes print is shown nowhere, except the last lines of one that left with a code other than 0 and no error.

    Raises:
        RankFailed: naming the ranks that failed by themselves; the others have been ended.
    """
    own = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        own["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory(prefix="ranks-") as logs, _own_settings(own | dict(environment or {})):
        options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks), "--redirects", "3", "--log-dir", logs]
        try:
            torchrun.run(torchrun.parse_args([*options, *program]))
        except ChildFailedError as failed:
            raise RankFailed(_errors(failed.failures, Path(logs))) from None
        except SignalException as told:
            if told.sigval != signal.SIGINT:
                raise
            raise KeyboardInterrupt from None


def sent_bytes() -> int | None:
    """Bytes that this process has sent over the TCP connections to other ranks that it has open now; None where the system does not count.

    What goes to the store, by which ranks find each other, is left out.
    """
    if sys.platform != "linux":
        return None
    store = int(os.environ.get("MASTER_PORT", 0))
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                    continue
                if store in (connection.getpeername()[1], connection.getsockname()[1]):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
            if len(info) < TCP_INFO_SENT_OFFSET + TCP_INFO_SENT.size:
                return None
            sent, again = TCP_INFO_SENT.unpack_from(info, TCP_INFO_SENT_OFFSET)
            total += sent - again
    return total
