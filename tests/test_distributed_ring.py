"""Ring attention: parity of ranks with one process, lost ranks, and what plans and local masks say about the whole."""

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ring_cases
import tiled_attention as ta
from processes import Processes, processes
from ring_parity import leaf, problem
from tiled_attention.distributed import ring_attention, shard_sequence
from tiled_attention.distributed.all_to_all import numbers_sent
from tiled_attention.distributed.layout import lengths_of, runs_of
from tiled_attention.distributed.local_masks import Block, localize, sight_of
from tiled_attention.distributed.schedule import Schedule, make_schedule
from tiled_attention.library import ops
from tiled_attention.lowering import lower

MASKS = [
    None,
    ta.Causal(),
    ta.Causal(align="top_left"),
    ta.SlidingWindow(9, 0),
    ta.SlidingWindow(5, 7),
    ta.PrefixLM(31),
    ta.Chunked(13),
    ta.Causal() & ta.Chunked(8) & ta.Chunked(12),
    ta.KeyLengths(torch.tensor([50, 20])),
    ta.Documents(torch.tensor([0, 9, 9, 33, 55])),
    ta.Causal() & (ta.SlidingWindow(6, 0) | ta.Sinks(3)),
    ta.Strided(5) | ta.SlidingWindow(2, 1),
    ta.Dilated(3, 4),
    ta.Global((0, 17)) | ta.SlidingWindow(1, 1),
    ta.RandomBlocks(2, block_size=8),
    (ta.Causal(align="top_left") | ta.Sinks(2)) & ta.KeyLengths(torch.tensor([40, 64])),
]


@pytest.mark.parametrize("name", ring_cases.CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_with_one_process(size: int, name: str):
    processes(size).run(ring_cases.check, name)


def dense(mask: Any, seqlen_q: int, seqlen_kv: int, offset: int) -> torch.Tensor:
    whole = ta.SlidingWindow(1 << 30, 1 << 30) if mask is None else mask
    return whole.dense(seqlen_q, seqlen_kv, query_offset=offset).expand(2, 1, seqlen_q, seqlen_kv)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("offset", [0, 11, -6])
def test_the_mask_of_a_block_is_the_block_of_the_mask(mask: Any, offset: int):
    seqlen_q, seqlen_kv = 60, 66
    whole = dense(mask, seqlen_q, seqlen_kv, offset)
    sight = sight_of(mask, offset)
    for (row, row_end), (key, key_end) in itertools.product([(0, 60), (0, 17), (17, 44), (44, 60)], [(0, 66), (0, 16), (13, 29), (29, 66)]):
        part = whole[..., row:row_end, key:key_end]
        local = localize(mask, Block(row, row_end, key, key_end, 0, seqlen_q, seqlen_kv, offset), part.device)
        at = offset + row - key
        assert torch.equal(dense(local, row_end - row, key_end - key, at), part)
        assert sight.sees(row, row_end, key, key_end) or not part.any()
        lowered = lower(
            local, batch_shape=(2,), num_heads=1, seqlen_q=row_end - row, seqlen_kv=key_end - key, query_offset=at, device=part.device
        )
        lists = (lowered.key_lengths, lowered.documents, lowered.query_offset)
        seen = ops._mask_dense(lowered.intervals, *lists, 2, row_end - row, key_end - key)[:, None]
        assert torch.equal(seen if lowered.mask is None else seen & lowered.mask, part)


def pairs_of(schedule: Schedule, rank: int, mask: torch.Tensor) -> int:
    """Visible pairs that a rank computes, in the blocks that it visits."""
    total = 0
    for step in ((1, 0), *schedule.steps):
        for piece in schedule.at(rank, step):
            if step[1] == 0 or step[1] in piece.seen_at(step[0]):
                blocks = schedule.blocks(rank, piece)
                total += sum(int(mask[run.begin : run.end, piece.begin : piece.end].sum()) for run in blocks)
    return total


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "mask", [None, ta.Causal(), ta.SlidingWindow(70, 0), ta.SlidingWindow(30, 90), ta.PrefixLM(100), ta.Chunked(96)], ids=str
)
def test_every_visible_pair_is_computed_once(mask: Any, layout: str, size: int, halves: bool):
    length = 500
    lengths = lengths_of(length, size, layout)
    schedule = make_schedule(lengths, lengths, layout, sight_of(mask, 0), halves)
    whole = dense(mask, length, length, 0)[0, 0]
    assert sum(pairs_of(schedule, rank, whole) for rank in range(size)) == int(whole.sum())


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_zigzag_makes_causal_work_equal(size: int):
    length = 8192
    lengths = lengths_of(length, size, "zigzag")
    schedule = make_schedule(lengths, lengths, "zigzag", sight_of(ta.Causal(), 0), True)
    steps = []
    for step in ((1, 0), *schedule.steps):
        work = []
        for rank in range(size):
            pairs = 0
            for piece in schedule.at(rank, step):
                for run in schedule.blocks(rank, piece) if step[1] == 0 or step[1] in piece.seen_at(step[0]) else ():
                    pairs += int((torch.arange(run.begin, run.end) + 1 - piece.begin).clamp(0, piece.length).sum())
            work.append(pairs)
        steps.append(work)
    assert sum(map(sum, steps)) == length * (length + 1) // 2
    for work in (*steps, [sum(pairs) for pairs in zip(*steps, strict=True)]):  # at every step, and in all
        mean = sum(work) / size
        assert max(abs(pairs - mean) for pairs in work) <= 0.05 * mean


def sent(mask: Any, size: int, layout: str = "contiguous", halves: bool = False) -> tuple[list[int], list[int]]:
    lengths = lengths_of(128 * size, size, layout)
    schedule = make_schedule(lengths, lengths, layout, sight_of(mask, 0), halves)
    return [schedule.keys_sent(rank) for rank in range(size)], [schedule.gradients_sent(rank) for rank in range(size)]


def test_shards_go_no_further_than_they_are_seen():
    assert sent(None, 4) == ([3 * 128] * 4, [3 * 128] * 4)
    assert sent(ta.Causal(), 4)[0] == [128, 256, 384, 0]  # rank 0 sends its own, rank 1 two, rank 2 three
    assert sent(ta.SlidingWindow(128, 0), 4) == ([128, 128, 128, 0], [0, 128, 128, 128])
    assert sent(ta.SlidingWindow(129, 0), 4)[0] == [128, 129, 129, 0]
    assert sent(ta.SlidingWindow(128, 128), 8)[0] == [128, *[256] * 6, 128]  # both ways, one hop each
    assert sent(ta.Chunked(128), 4) == ([0] * 4, [0] * 4)
    assert sent(ta.Chunked(256), 4)[0] == [128] * 4
    assert sent(ta.Causal() & (ta.SlidingWindow(128, 0) | ta.Sinks(4)), 4)[0] == [128, 132, 132, 0]
    assert sum(sent(ta.Causal(), 4, "zigzag")[0]) == 12 * 128 - 3 * 64  # the last chunk, of rank 0, is seen by no other rank
    assert sum(sent(ta.Causal(), 4, "zigzag", True)[1]) == 12 * 128 - 64 * (3 + 2 + 1)
    assert numbers_sent((64,) * 4, (64,) * 4, (8, 4), (16, 16)) == 3 * 32 * 256 * (2 + 1)


def test_only_what_is_seen_of_a_shard_is_sent():
    for halves in (False, True):
        assert sent(ta.SlidingWindow(20, 0), 4, halves=halves) == ([20, 20, 20, 0], [0, 20, 20, 20])
        assert sent(ta.SlidingWindow(5, 7), 4, halves=halves)[0] == [5, 12, 12, 7]
        assert sent(ta.SlidingWindow(300, 0), 8, halves=halves)[0] == [128, 256, *[300] * 5, 0]
        assert sum(sent(ta.SlidingWindow(20, 0), 4, "zigzag", halves)[0]) == 6 * 20  # no rank sends over the middle
        assert sent(ta.Documents(torch.tensor([0, 100, 256, 512])), 4, halves=halves)[0] == [28, 128, 128, 128]


@pytest.mark.parametrize("offset", [0, 40, -25])
@pytest.mark.parametrize("mask", [*MASKS[:10], MASKS[15]], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_pieces_hold_what_other_ranks_see(mask: Any, layout: str, offset: int):
    """From its first to its last key, run by run of queries; and all pieces of a rank are apart."""
    seqlen_q, seqlen_kv, size = 60, 66, 4
    seen = dense(mask, seqlen_q, seqlen_kv, offset).any(0)[0]
    lengths = lengths_of(seqlen_q, size, layout), lengths_of(seqlen_kv, size, layout)
    schedule = make_schedule(*lengths, layout, sight_of(mask, offset), False)
    for rank, owner in itertools.permutations(range(size), 2):
        distance = (rank - owner) % size
        held = torch.zeros(seqlen_kv, dtype=torch.int64)
        for piece in schedule.pieces[owner]:
            if distance in piece.ahead or size - distance in piece.behind:
                held[piece.begin : piece.end] += 1
        assert held.max() <= 1
        for run, keys in itertools.product(schedule.rows[rank], schedule.own[owner]):
            visible = seen[run.begin : run.end, keys.begin : keys.end].any(0)
            assert not (visible & (held[keys.begin : keys.end] == 0)).any()


def test_layouts_divide_the_sequence():
    for length, size, layout in itertools.product((0, 1, 7, 64, 101), (1, 2, 3, 5), ("contiguous", "zigzag")):
        lengths = lengths_of(length, size, layout)
        assert max(lengths) - min(lengths) <= (1 if layout == "contiguous" else 2)
        rows = [row for held in runs_of(lengths, layout, "x") for run in held for row in range(run.begin, run.end)]
        assert sorted(rows) == list(range(length))
    assert runs_of((4, 4), "zigzag", "x") == (((0, 2, 0), (6, 8, 2)), ((2, 6, 0),))


@pytest.mark.parametrize(("dtype", "heads"), [("float32", "1"), ("bfloat16", "4")])
def test_errors_and_memory_of_four_ranks_stay_in_their_limits(dtype: str, heads: str):
    """n 8192, forward and backward: what benchmarks/distributed.py holds against one process."""
    script = Path(__file__).parent.parent / "benchmarks/distributed.py"
    command = [sys.executable, str(script), "--heads", heads, "--heads-kv", heads, "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_group():
    x = torch.zeros(1, 1, 4, 4)
    for call in (
        lambda: ta.distributed.ring_attention(x, x, x),
        lambda: ta.distributed.shard_sequence(x),
        lambda: ta.distributed.gather_sequence(x),
    ):
        with pytest.raises(RuntimeError, match="group needs torch.distributed: call torch.distributed.init_process_group first"):
            call()


TIMEOUT = 2.0  # only where a rank is not to come: the first call of a rank in a group may take longer, it connects to the store
_out: list[torch.Tensor] = []  # of this rank, from one call of a test to the next


def tried(call: Any) -> tuple[str, float]:
    """The error of this rank, "" where there is none, and the seconds that passed."""
    begin = time.monotonic()
    try:
        call()
        error = ""
    except RuntimeError as caught:
        error = str(caught)
    return error, time.monotonic() - begin


def try_forward(timeout: float | None = None) -> tuple[str, float]:
    shards = [leaf(shard_sequence(x)) for x in problem(48, 48)]
    return tried(lambda: _out.append(ring_attention(*shards, timeout=timeout)))


def try_backward() -> tuple[str, float]:
    return tried(lambda: _out.pop().sum().backward())


@pytest.fixture
def three() -> Iterator[Processes]:
    """Ranks of which the test loses one, after a call of all."""
    group = Processes(3)
    assert [error for error, _ in group.run(try_forward)] == [""] * 3
    yield group
    group.close()


def test_a_rank_that_does_not_come_is_named_and_hears_it(three: Processes):
    late = "ring_attention: rank 1 did not make this call within 2 s"
    for error, seconds in three.run(try_forward, TIMEOUT, ranks=(0, 2)):
        assert error == late and seconds < 60
    assert three.run(try_forward, TIMEOUT, ranks=(1,))[0][0] == f"ring_attention: rank 0 raised RuntimeError: {late}"
    assert [error for error, _ in three.run(try_forward)] == [""] * 3  # the group is as before


def try_group(port: int, processes: list[int], calls: int) -> list[str]:
    """The errors of calls in a group that these processes make anew, over the store at this port."""
    rank, size = processes.index(os.getpid()), len(processes)
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    return [try_forward()[0] for _ in range(calls)]


def test_a_group_may_be_made_again(three: Processes):
    """With processes that were not in it, each of which has its own number of calls behind it."""
    numbers = three.run(os.getpid)
    for calls, members in enumerate([(0, 1), (0, 2), (0, 1, 2), (1, 0), (2, 1, 0)], 1):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        found = three.run(try_group, store.port, [numbers[member] for member in members], calls, ranks=members)
        assert found == [[""] * calls] * len(members)


@pytest.mark.parametrize("how", ("gone", "silent"))
def test_a_rank_that_is_lost_in_the_middle_is_named(three: Processes, how: str):
    """After the forward pass rank 1 goes away, or falls silent."""
    assert [error for error, _ in three.run(try_forward, TIMEOUT)] == [""] * 3
    if how == "gone":
        three.kill(1)
    for rank, (error, seconds) in zip((0, 2), three.run(try_backward, ranks=(0, 2))):
        # A rank that waits for another one that waits names that one.
        said = re.match(r"(rank \d)\b.* (did not answer within 2.0 s: it is lost, or waits|is lost: .*[Cc]onnection)", error)
        assert said is not None and any(f"rank {other}" in said[0] for other in range(3) if other != rank), error
        assert seconds < 60


def test_a_store_that_is_lost_is_named(three: Processes):
    three.lose_store()
    for error, seconds in three.run(try_forward):
        assert error.startswith("ring_attention: the store of the group is lost, which lies in global rank 0, unless")
        assert seconds < 60
