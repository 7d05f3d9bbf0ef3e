"""`compare --distributed`, run small: its JSON, its plot, its exit code, ranks that fail or are lost; two hosts where they can be made."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tiled_attention.__main__ import main
from tiled_attention.compare import command, distributed, ranks, sharded
from tiled_attention.compare.ranks import RankFailed, launch

ROOT = Path(__file__).resolve().parent.parent
RANKS, N = 2, 67


def arguments(*more: str) -> list[str]:
    return ["compare", "--distributed", str(RANKS), "--quick", "--threads", "1", "--sizes", str(N), *more]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, exit code, what was printed) of one run of the command."""
    folder = tmp_path_factory.mktemp("distributed")
    done = subprocess.run([sys.executable, "-m", "tiled_attention", *arguments("--out", str(folder))], capture_output=True, text=True)
    return folder, done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def results(finished):
    return json.loads((finished[0] / "distributed.json").read_text())


def test_command_succeeds_and_writes_json_and_plot(finished, results):
    folder, code, text = finished
    assert code == 0, text
    assert "All limits hold" in text and "distance from one process" in text
    assert (folder / "distributed.png").read_bytes().startswith(b"\x89PNG")
    assert results["ranks"] == RANKS and results["failures"] == []


def test_json_has_every_call_and_tensor(results):
    rows = results["parity"]
    cases = {case.name: case for case in sharded.cases(N, RANKS)}
    assert {row["case"] for row in rows} == set(cases)
    for name, case in cases.items():
        expected = {"out", "grad_query", "grad_key", "grad_value"} | ({"lse"} if not case.linear else set())
        assert {row["tensor"] for row in rows if row["case"] == name} >= expected, name
    for row in rows:
        assert row["passed"] is True and row["tiled"] <= row["limit"] and row["largest"] <= row["largest_limit"], row
    # Something was compared: ranks add in another order.
    assert max(row["tiled"] for row in rows) > 0 and min(row["limit"] for row in rows) > 0


def test_json_has_work_memory_time_and_traffic(results):
    shares = {row["layout"]: row["shares"] for row in results["work"]}
    assert set(shares) == {"zigzag", "contiguous"} and all(len(row) == RANKS for row in shares.values())
    assert max(shares["zigzag"]) <= 1.05 < 1.4 < max(shares["contiguous"])  # one piece each: 1/4 and 3/4 of the pairs
    assert {(row["operator"], row["n"]) for row in results["measured"]} == {(name, N - N % (2 * RANKS)) for name in distributed.OPERATORS}
    for row in results["measured"]:
        assert len(row["bytes"]) == RANKS and row["seconds"] > 0 and row["one_seconds"] > 0
    assert [(row["operator"], row["direction"]) for row in results["sent"]] == [
        (name, direction) for name in distributed.OPERATORS for direction in ("forward", "backward")
    ]
    for row in results["sent"]:
        assert row["bytes"] is None or row["formula"] <= sum(row["bytes"]) <= row["limit"] < 2 * row["formula"]
    assert sys.platform != "linux" or all(row["bytes"] for row in results["sent"])


def test_json_fields_are_documented(results):
    import tiled_attention.compare as package

    documented = Path(package.__file__).read_text().split("--distributed N", 1)[1]
    for name in results:
        assert name in documented, name


def test_a_wrong_result_is_found(monkeypatch):
    """The judge alone, on the shards of one process: right as they are, and not with one wrong element."""
    case = sharded.cases(N, RANKS)[1]
    monkeypatch.setattr(sharded, "cases", lambda n, num_ranks: [case])
    whole, positions = sharded.alone(case), torch.arange(N)
    parts = [{name: tensor[:, :, rank::RANKS].clone() for name, tensor in whole.items()} for rank in range(RANKS)]
    found = [{"parity": [part | {"positions": positions[rank::RANKS]}]} for rank, part in enumerate(parts)]
    assert all(row["tiled"] == 0 and row["passed"] for row in distributed.parity_rows(N, found))
    parts[1]["grad_key"][0, 0, 0, 0] += 1e-4
    found[1]["parity"][0]["grad_key"] = parts[1]["grad_key"]
    assert [row["tensor"] for row in distributed.parity_rows(N, found) if not row["passed"]] == ["grad_key"]
    found[1]["parity"][0]["lse"][0, 0, 0] = -math.inf
    broken = {row["tensor"]: row["tiled"] for row in distributed.parity_rows(N, found) if not row["passed"]}
    assert broken["lse"] == math.inf and set(broken) == {"lse", "grad_key"}


@pytest.mark.parametrize("part", ["parity", "work", "measured", "sent"])
def test_exit_code_tells_of_a_broken_limit(part, results, monkeypatch, capsys):
    earlier = json.loads(json.dumps(results))
    row = next(row for row in earlier[part] if row["passed"] is not None or part == "measured")
    row["passed"] = False
    earlier["failures"] = distributed.failures(earlier)
    monkeypatch.setattr(distributed, "run", lambda *_: earlier)
    assert main(arguments()) == 1
    text = capsys.readouterr().out.replace("\n", " ")
    assert "Something is broken" in text and (row.get("case") or row.get("layout") or row["operator"]) in text


def child_of_rank(rank: int, seconds: float) -> int:
    """The process id of a rank that this process started, when it has come so far as to know it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            try:
                if f"\0RANK={rank}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
                    return int(child)
            except OSError:
                pass
        time.sleep(0.05)
    raise AssertionError(f"no rank {rank} was started within {seconds} s")


@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="needs Linux's /proc/PID/task/TID/children")
def test_a_killed_rank_ends_the_command(capsys):
    def kill() -> None:
        os.kill(child_of_rank(1, 60), signal.SIGKILL)

    handlers, environment = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], dict(os.environ)
    killer = threading.Thread(target=kill)
    killer.start()
    assert main(arguments()) == 1
    killer.join()
    assert "--distributed 2: rank 1 failed: killed by signal 9 (SIGKILL)" in capsys.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers and dict(os.environ) == environment


PROGRAM = """
import os, sys, time
rank = os.environ["RANK"]
if rank != "1":
    time.sleep(600)
if sys.argv[1] == "raises":
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def main():
        raise ValueError("query: expected something else")
    main()
print("the last line", file=sys.stderr, flush=True)
os._exit(3)
"""


@pytest.mark.parametrize(
    ("kind", "error"), [("raises", "ValueError: query: expected something else"), ("exits", "exit code 3\nthe last line")]
)
def test_the_error_of_a_rank_is_told(kind, error, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    with pytest.raises(RankFailed) as failed:
        launch([str(tmp_path / "program.py"), kind], 2)
    assert failed.value.errors == {1: error} and str(failed.value) == f"rank 1 failed: {error}"


def test_bytes_to_other_ranks_are_counted(monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client, server.accept()[0]:
        before = ranks.sent_bytes()
        if before is None:
            assert sys.platform != "linux"
            return
        client.sendall(b"x" * 1000)
        assert ranks.sent_bytes() - before == 1000
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))  # then it is the way to the store
        before = ranks.sent_bytes()
        client.sendall(b"x" * 1000)
        assert ranks.sent_bytes() == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(["--distributed", "0"], "at least 1, got 0"), (["--distributed", "two"], "'two'"), (["--timeout", "0"], "got 0")],
)
def test_bad_arguments_are_refused(wrong, message, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["compare", *wrong])
    assert refused.value.code == 2
    error = capsys.readouterr().err
    assert wrong[0] in error and message in error


def test_a_torch_without_gloo_is_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert main(arguments()) == 2
    assert "--distributed: this torch is built without" in capsys.readouterr().err


def test_full_run_measures_each_length_in_fresh_processes():
    quick, full = (distributed.jobs(quick, None, 4, 2, 60.0) for quick in (True, False))
    assert len(quick) == 1 and len(full) == len(distributed.FULL_MEASURED)
    assert [job["parity"] for job in full] == [None] * (len(full) - 1) + [distributed.FULL_PARITY]
    assert all(job["threads"] == 1 and job["timeout"] == 60.0 for job in quick + full)
    assert command.EXTRAS  # the command asks for them with --distributed too


def test_two_hosts_have_the_results_of_one_process():
    done = subprocess.run([sys.executable, str(ROOT / "tools/check_two_hosts.py"), "--n", str(N)], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "host a, 10.77.0.1: " in done.stdout and "host b, 10.77.0.2: " in done.stdout
