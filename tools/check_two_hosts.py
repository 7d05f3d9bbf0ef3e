"""Attention over a sequence that two hosts share, one rank on each: the results of one process, over TCP between them.

The hosts are two network namespaces joined by a veth pair, in a user, network and mount namespace of their own: nothing of it is seen
outside, nothing is left of it, and no privileges are needed where the kernel lets users make namespaces. Linux, with `ip` and `unshare`.

    python tools/check_two_hosts.py [--n 128]

Exits with 0 where all limits hold, 1 where one breaks or a rank fails, 3 where this machine does not allow the namespaces, with the reason.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2"}
PORT = 29500
NOT_ALLOWED = 3
INSIDE = "TILED_ATTENTION_TWO_HOSTS"
MOUNTS = "mount -t tmpfs tmpfs /run"  # where `ip netns` keeps its names
SHOWN_LINES = 15


def enclosed(command: Sequence[str]) -> list[str]:
    """The command in namespaces of its own."""
    return ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", f'{MOUNTS} && exec "$@"', "sh", *command]


def refusal() -> str | None:
    """Why two hosts cannot be made here, if they cannot."""
    missing = [name for name in ("unshare", "ip") if shutil.which(name) is None]
    if sys.platform != "linux" or missing:
        return f"not installed: {', '.join(missing)}" if missing else "network namespaces are Linux's"
    trial = "ip netns add a && ip netns add b && ip link add veth-a netns a type veth peer name veth-b netns b && ip netns exec a true"
    done = subprocess.run(enclosed(["sh", "-c", trial]), capture_output=True, text=True)
    return f"namespaces are not allowed: {done.stderr.strip()}" if done.returncode else None


def connect() -> None:
    """Makes the hosts and the wire between them."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    for host in HOSTS:
        ip("netns", "add", host)
    ip("link", "add", "veth-a", "netns", "a", "type", "veth", "peer", "name", "veth-b", "netns", "b")
    for host, address in HOSTS.items():
        ip("-n", host, "address", "add", f"{address}/24", "dev", f"veth-{host}")
        for device in ("lo", f"veth-{host}"):
            ip("-n", host, "link", "set", device, "up")


def sent(host: str) -> int:
    """Bytes that have left the host over the wire, with the headers of Ethernet, IP and TCP."""
    counter = f"/sys/class/net/veth-{host}/statistics/tx_bytes"
    return int(subprocess.run(["ip", "netns", "exec", host, "cat", counter], capture_output=True, text=True, check=True).stdout)


def start(host: str, rank: int, job: str, folder: Path) -> subprocess.Popen:
    """One rank on a host. What it prints goes into a file beside its results."""
    program = ["-m", "tiled_attention.compare.rank", job, str(folder)]
    place = {"RANK": str(rank), "WORLD_SIZE": str(len(HOSTS)), "MASTER_ADDR": HOSTS["a"], "MASTER_PORT": str(PORT)}
    environment = os.environ | place | {"GLOO_SOCKET_IFNAME": f"veth-{host}", "OMP_NUM_THREADS": "1"}
    with (folder / f"{host}.log").open("w") as log:
        return subprocess.Popen(["ip", "netns", "exec", host, sys.executable, *program], env=environment, stdout=log, stderr=log)


def check(n: int, timeout: float) -> int:
    """Inside the namespaces: runs both ranks, compares, prints; the exit code."""
    import torch

    from tiled_attention.compare import distributed

    connect()
    job = json.dumps({"threads": 1, "timeout": timeout, "parity": n, "measured": []})
    with tempfile.TemporaryDirectory() as name:
        folder, before = Path(name), {host: sent(host) for host in HOSTS}
        ranks = {host: start(host, rank, job, folder) for rank, host in enumerate(HOSTS)}
        while any(rank.poll() is None for rank in ranks.values()) and not any(rank.poll() for rank in ranks.values()):
            time.sleep(0.1)
        failed = [host for host, rank in ranks.items() if rank.poll()]
        for rank in ranks.values():
            if rank.poll() is None:
                rank.terminate()
            rank.wait()
        for host in failed:
            last = (folder / f"{host}.log").read_text().strip().splitlines()[-SHOWN_LINES:]
            print(f"rank {list(HOSTS).index(host)} on host {host} failed:", *last, sep="\n", file=sys.stderr)
        if failed:
            return 1
        rows = distributed.parity_rows(n, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(len(HOSTS))])
        for host, count in before.items():
            print(f"host {host}, {HOSTS[host]}: {(sent(host) - count) / 2**10:.0f} KiB sent")
    for row in rows:
        if not row["passed"]:
            print({name: row[name] for name in row if name != "passed"}, file=sys.stderr)
    passed = sum(row["passed"] for row in rows)
    print(f"n = {n}: {passed} of {len(rows)} tensors of {len({row['case'] for row in rows})} calls within their limit")
    return 0 if passed == len(rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=128, help="length of the sequence (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a rank waits for the other (default: %(default)g)")
    arguments = parser.parse_args(argv)
    if INSIDE in os.environ:
        return check(arguments.n, arguments.timeout)
    reason = refusal()
    if reason is not None:
        print(f"two hosts cannot be made here: {reason}", file=sys.stderr)
        return NOT_ALLOWED
    own = [sys.executable, str(Path(__file__).resolve()), "--n", str(arguments.n), "--timeout", str(arguments.timeout)]
    return subprocess.run(enclosed(own), env=os.environ | {INSIDE: "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
