"""What every rank of a group checks of ring_attention, by name in `CASES`."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import tiled_attention as ta
from processes import Wire
from ring_parity import NAMES, close, compare, leaf, problem, raises, rms
from tiled_attention import parts
from tiled_attention.distributed import ring_attention, shard_sequence
from tiled_attention.distributed.layout import lengths_of

CASES: dict[str, Callable[[int, int], None]] = {}


def case(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[function.__name__] = function
    return function


def check(name: str) -> None:
    CASES[name](dist.get_rank(), dist.get_world_size())


def masks(seqlen_q: int, seqlen_kv: int) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(3)
    table = torch.rand(2, 1, seqlen_q, seqlen_kv, generator=gen) < 0.6
    blocks = torch.rand(4, -(-seqlen_q // 16), -(-seqlen_kv // 16), generator=gen) < 0.5
    cuts = [0, seqlen_kv // 7, seqlen_kv // 3, seqlen_kv // 3, seqlen_kv - 9]
    return {
        "none": None,
        "causal": ta.Causal(),
        "top_left": ta.Causal(align="top_left"),
        "window": ta.SlidingWindow(9, 0),
        "both_sides": ta.SlidingWindow(5, 7),
        "prefix": ta.PrefixLM(seqlen_kv // 2),
        "chunks": ta.Chunked(16),
        "odd_chunks": ta.Causal() & ta.Chunked(13),
        "lengths": ta.KeyLengths(torch.tensor([seqlen_kv - 5, seqlen_kv // 3])),
        "documents": ta.Documents(torch.tensor(cuts)),
        "causal_documents": ta.Causal() & ta.Documents(torch.tensor(cuts)),
        "streaming": ta.Causal() & (ta.SlidingWindow(11, 0) | ta.Sinks(3)),
        "strided": ta.Causal() & (ta.Strided(5) | ta.SlidingWindow(4, 0)),
        "dilated": ta.Dilated(6, 3),
        "global": ta.SlidingWindow(6, 6) | ta.Global((2, seqlen_kv // 2)),
        "random": ta.RandomBlocks(2, block_size=8),
        "blocks": ta.BlockSparse(blocks, 16),
        "table": lambda rows: rows(table),
        "causal_table": lambda rows: ta.Causal() & rows(table),
        "table_or": lambda rows: ta.SlidingWindow(6, 0) | (rows(table) & ta.Sinks(seqlen_kv // 2)),
    }


def _add_masks() -> None:
    for layout in ("contiguous", "zigzag"):
        for name in masks(64, 64):

            def run(rank: int, size: int, name: str = name, layout: str = layout) -> None:
                for lengths in ((101, 101), (70, 150)):
                    if name == "blocks" and lengths[0] != lengths[1]:
                        continue
                    compare(rank, size, problem(*lengths), layout=layout, mask=masks(*lengths)[name])

            CASES[f"mask_{name}_{layout}"] = run


_add_masks()


@case
def scores(rank: int, size: int) -> None:
    gen = torch.Generator().manual_seed(5)
    bias = torch.randn(4, 90, 110, generator=gen, dtype=torch.float64)
    vectors = dict(alibi_slopes=torch.rand(4, generator=gen, dtype=torch.float64), sinks=torch.randn(4, generator=gen, dtype=torch.float64))
    for layout in ("contiguous", "zigzag"):
        compare(rank, size, problem(90, 110), layout=layout, mask=ta.Causal(), scale=0.7, softcap=3.0, **vectors, by_rows=dict(bias=bias))
        for part in (bias[:1, :1], bias[0, 0], bias[:, :1, :1], torch.randn(4, 1, 199, generator=gen, dtype=torch.float64)):
            compare(rank, size, problem(90, 110), layout=layout, mask=ta.SlidingWindow(40, 3), bias=part)
        compare(rank, size, problem(90, 110), layout=layout, query_offset=-7, mask=ta.Causal() & ta.Chunked(21), **vectors)
        compare(rank, size, problem(90, 110), layout=layout, query_offset=[3, 25], mask=ta.Causal() | ta.Sinks(4), **vectors)
        compare(rank, size, problem(90, 110, batch=()), layout=layout, sinks=vectors["sinks"], with_lse=False)
        compare(rank, size, problem(90, 110, batch=(2, 1, 3), heads=(3, 3)), layout=layout, mask=ta.Causal())


@case
def sinks_of_rows_that_see_nothing(rank: int, size: int) -> None:
    sinks = torch.tensor([0.5, -math.inf, 2.0, -1.0], dtype=torch.float64)
    compare(rank, size, problem(60, 60), mask=ta.KeyLengths(torch.tensor([0, 11])), sinks=sinks)
    compare(rank, size, problem(60, 60), mask=ta.KeyLengths(torch.tensor([0, 11])), layout="zigzag")


@case
def large_scores(rank: int, size: int) -> None:
    """Rows whose lse is so large that the operator would normalise them again from the keys of its call."""
    gen = torch.Generator().manual_seed(6)
    bias = torch.randn(4, 90, 90, generator=gen, dtype=torch.float64)
    band = torch.randn(4, 1, 179, generator=gen, dtype=torch.float64)
    for options in ({}, {"by_rows": {"bias": bias}}, {"bias": band}, {"bias": bias[:, :1]}, {"sinks": torch.full((4,), 90.0).double()}):
        query, key, value = problem(90, 90)
        compare(rank, size, [query * 40, key, value], mask=ta.Causal(), layout="zigzag", tolerance=1e-11, **options)


@case
def hidden_nan(rank: int, size: int) -> None:
    query, key, value = problem(64, 64, heads=(8, 4))
    key[..., -10:, :], value[..., -10:, :] = math.nan, math.inf
    compare(rank, size, [query, key, value], mask=ta.KeyLengths(torch.tensor([54, 20])))
    compare(rank, size, [query, key, value], mask=ta.KeyLengths(torch.tensor([54, 20])), method="all_to_all", tolerance=1e-11)


@case
def rotary(rank: int, size: int) -> None:
    turns = [
        ta.RotaryEmbedding(16),
        ta.RotaryEmbedding(16, interleaved=True),
        ta.RotaryEmbedding(16, scaling=ta.RotaryScaling("dynamic", 2.0, original_max_len=32)),
    ]
    for turn in turns:
        for layout in ("contiguous", "zigzag"):
            compare(rank, size, problem(60, 90), layout=layout, rotary=turn, mask=ta.Causal(), tolerance=1e-11)
        compare(rank, size, problem(60, 90), rotary=turn, query_offset=[3, 40], tolerance=1e-11)
        compare(rank, size, problem(60, 90, heads=(8, 4)), rotary=turn, method="all_to_all", tolerance=1e-11)


@case
def relative_bias(rank: int, size: int) -> None:
    torch.manual_seed(0)
    bias = ta.RelativeBias(4, 20).double()
    query, key, value = problem(60, 90)
    out = ta.attention(query, key, value, bias=bias, mask=ta.Causal())
    out.sum().backward()
    want, bias.weight.grad = bias.weight.grad, None
    ours = ring_attention(*(shard_sequence(x) for x in (query, key, value)), bias=bias, mask=ta.Causal())
    ours.sum().backward()
    dist.all_reduce(bias.weight.grad)
    close(bias.weight.grad, want, 1e-12, "weight")
    close(ours, shard_sequence(out), 1e-12, "out")


@case
def dropout(rank: int, size: int) -> None:
    for method in ("ring", "all_to_all"):
        for layout in ("contiguous", "zigzag"):
            for p in (0.3, 1.0):
                options = dict(layout=layout, method=method, dropout_p=p, seed=11, tolerance=1e-11)
                compare(rank, size, problem(101, 101, heads=(8, 4)), mask=ta.Causal(), **options)
                compare(rank, size, problem(70, 90, heads=(8, 4)), **options)
    generator = torch.Generator().manual_seed(rank)  # other seeds: that of rank 0 counts
    query, key, value = problem(64, 64)
    out = ring_attention(*(shard_sequence(x) for x in (query, key, value)), dropout_p=0.5, generator=generator)
    want = ta.attention(query, key, value, dropout_p=0.5, generator=torch.Generator().manual_seed(0))
    close(out, shard_sequence(want), 1e-12, "out")


@case
def by_heads(rank: int, size: int) -> None:
    gen = torch.Generator().manual_seed(8)
    vectors = dict(alibi_slopes=torch.rand(8, generator=gen, dtype=torch.float64), sinks=torch.randn(8, generator=gen, dtype=torch.float64))
    blocks = torch.rand(8, 6, 6, generator=gen) < 0.6
    for heads in ((8, 8), (8, 4), (8, 2), (8, 1)):
        for layout in ("contiguous", "zigzag"):
            compare(rank, size, problem(90, 90, heads=heads), layout=layout, method="all_to_all", mask=ta.Causal(), **vectors)
    bias = torch.randn(8, 1, 90, generator=gen, dtype=torch.float64)
    compare(rank, size, problem(90, 90, heads=(8, 8)), method="all_to_all", mask=ta.BlockSparse(blocks, 16), bias=bias, softcap=2.0)
    lengths = tuple(5 * (r % 3) for r in range(size)), tuple(7 * (r % 2) + 1 for r in range(size))
    compare(rank, size, problem(sum(lengths[0]), sum(lengths[1]), heads=(8, 4)), method="all_to_all", lengths=lengths)
    with raises(ValueError, "needs a number of ranks that divides num_heads"):
        ring_attention(*(shard_sequence(x) for x in problem(32, 32, heads=(3, 3))), method="all_to_all")
    with raises(ValueError, "one row for all queries"):
        q, k, v = (shard_sequence(x) for x in problem(32, 32, heads=(8, 4)))
        ring_attention(q, k, v, method="all_to_all", bias=torch.zeros(q.shape[-2], 32))


@case
def twice(rank: int, size: int) -> None:
    """Double backward by heads; a named error of the ring."""
    tensors = [leaf(shard_sequence(x)) for x in problem(16, 16, heads=(8, 4), dims=(4, 4))]
    whole = [leaf(x) for x in problem(16, 16, heads=(8, 4), dims=(4, 4))]
    results = []
    for inputs, function in ((tensors, lambda *x: ring_attention(*x, method="all_to_all")), (whole, ta.attention)):
        (grad,) = torch.autograd.grad(function(*inputs).square().sum(), inputs[1], create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), inputs[0])[0])
    close(results[0], shard_sequence(results[1]), 1e-10, "double backward")
    out = ring_attention(*tensors)
    with raises(RuntimeError, "cannot be differentiated twice"):
        torch.autograd.grad(out.sum(), tensors[0], create_graph=True)


@case
def uneven_and_empty_shards(rank: int, size: int) -> None:
    bias = torch.randn(4, 12, size * 2 - 1, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    one_key = lengths_of(12, size, "contiguous"), (1,) * (size - 1) + (size,)
    for options in ({}, {"sinks": torch.ones(4, dtype=torch.float64)}):
        compare(rank, size, problem(12, size * 2 - 1), lengths=one_key, by_rows=dict(bias=bias), **options)
        compare(rank, size, problem(12, size * 2 - 1), lengths=one_key, bias=bias[:, :1], **options)
        compare(rank, size, problem(12, size * 2 - 1), lengths=one_key, by_rows=dict(bias=bias[..., :1]), **options)
        compare(rank, size, problem(12, size * 2 - 1), lengths=one_key, bias=bias.new_ones(4, 1, 12 + size * 2 - 2), **options)
    for lengths_q, lengths_kv in (
        ([7, 0, 33, 5], [1, 40, 0, 12]),
        ([0, 0, 9, 0], [0, 30, 0, 0]),
        ([3, 4, 0, 5], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [3, 3, 2, 0]),
    ):
        lengths = tuple((lengths_q * size)[:size]), tuple((lengths_kv * size)[:size])
        compare(rank, size, problem(sum(lengths[0]), sum(lengths[1])), lengths=lengths)
        compare(rank, size, problem(sum(lengths[0]), sum(lengths[1])), lengths=lengths, mask=ta.Causal())
    compare(rank, size, problem(5, 5), layout="zigzag", mask=ta.Causal())  # fewer rows than chunks
    compare(rank, size, problem(40, 40, batch=(0,)))
    compare(rank, size, problem(40, 40, heads=(2, 2), dims=(0, 5)))


@case
def strides(rank: int, size: int) -> None:
    shard = [leaf(shard_sequence(x).transpose(-2, -3).contiguous()) for x in problem(64, 64)]
    out = ring_attention(*(x.transpose(-2, -3) for x in shard), mask=ta.Causal())
    assert out.transpose(-2, -3).is_contiguous()
    out.sum().backward()
    whole = [leaf(x) for x in problem(64, 64)]
    ta.attention(*whole, mask=ta.Causal()).sum().backward()
    for x, y in zip(shard, whole):
        close(x.grad, shard_sequence(y.grad).transpose(-2, -3), 1e-12, "strided")


@case
def joined_by_lse(rank: int, size: int) -> None:
    """As on CUDA, where no operator adds in place."""
    parts.CPU_ADDS = False
    try:
        accuracy(rank, size)
        sinks = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        compare(rank, size, problem(90, 110), layout="zigzag", mask=ta.Causal(), sinks=sinks, alibi_slopes=sinks.abs())
        compare(rank, size, problem(60, 60), mask=ta.KeyLengths(torch.tensor([0, 11])))
        compare(rank, size, problem(60, 60), mask=ta.Causal(), dropout_p=0.3, seed=3, tolerance=1e-11)
    finally:
        parts.CPU_ADDS = True


@case
def accuracy(rank: int, size: int) -> None:
    """Errors against float64 of 32-bit and 16-bit inputs: of one process, and of ranks."""
    for dtype, limit in ((torch.float32, 2.0), (torch.bfloat16, 2.0), (torch.float16, 2.0)):
        tensors = problem(512, 512, dims=(64, 64), dtype=dtype)
        grad_out = torch.randn(2, 4, 512, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        found = []
        for kind in ("exact", "one", "ranks"):
            inputs = [
                leaf(x.double() if kind == "exact" else shard_sequence(x, layout="zigzag") if kind == "ranks" else x) for x in tensors
            ]
            if kind == "ranks":
                out = ring_attention(*inputs, mask=ta.Causal(), layout="zigzag")
                out.backward(shard_sequence(grad_out, layout="zigzag"))
                found.append([ta.distributed.gather_sequence(x.detach(), layout="zigzag") for x in (out, *(x.grad for x in inputs))])
            else:
                out = ta.attention(*inputs, mask=ta.Causal())
                out.backward(grad_out.to(out.dtype))
                found.append([out.detach(), *(x.grad for x in inputs)])
        for name, exact, one, ours in zip(("out", *NAMES), *found):
            rounding = max(rms(exact, exact.to(dtype)), rms(exact, one))
            assert rms(exact, ours) <= limit * rounding, f"{dtype} {name}: {rms(exact, ours):.3g}, one process {rms(exact, one):.3g}"


@case
def lse_is_rounded_once(rank: int, size: int) -> None:
    """However many parts are joined in place."""
    tensors = problem(512, 512, dims=(64, 64), dtype=torch.float32)
    exact, one = (shard_sequence(ta.attention(*x, return_lse=True)[1], dim=-1) for x in ([y.double() for y in tensors], tensors))
    _, lse = ring_attention(*(shard_sequence(x) for x in tensors), return_lse=True)
    assert rms(exact, lse) <= 1.1 * rms(exact, one), f"{rms(exact, lse):.3g}, one process {rms(exact, one):.3g}"


@case
def sequences(rank: int, size: int) -> None:
    x = torch.arange(2 * 37 * 3, dtype=torch.float64).view(2, 37, 3)
    for layout in ("contiguous", "zigzag"):
        shard = leaf(shard_sequence(x, dim=1, layout=layout))
        whole = ta.distributed.gather_sequence(shard, dim=1, layout=layout)
        assert torch.equal(whole, x)
        (whole * (rank + 1)).sum().backward()  # each rank its own loss
        assert torch.equal(shard.grad, torch.full_like(shard, size * (size + 1) / 2))
        positions = shard_sequence(torch.arange(37), dim=0, layout=layout)
        assert torch.equal(shard, x[:, positions])
    uneven = torch.full((rank * 2, 3), float(rank))
    assert torch.equal(ta.distributed.gather_sequence(uneven, dim=0), torch.cat([torch.full((r * 2, 3), float(r)) for r in range(size)]))
    with raises(ValueError, "shape must be equal on all ranks: rank 0 has [-1, 3], rank 1 has [-1, 4]"):
        ta.distributed.gather_sequence(torch.zeros(2, 4 if rank == 1 else 3), dim=0)
    with raises(ValueError, "x must have zigzag shards of"):
        ta.distributed.gather_sequence(torch.zeros(2 + 5 * rank, 3), dim=0, layout="zigzag")
    with raises(ValueError, "layout must be 'contiguous' or 'zigzag', got 'striped'"):
        shard_sequence(x, layout="striped")
    with raises(ValueError, "dim must be a dimension of x"):
        shard_sequence(x, dim=3)


@case
def groups(rank: int, size: int) -> None:
    query, key, value = problem(40, 40)
    alone = [dist.new_group([r]) for r in range(size)][rank]
    a = ring_attention(query, key, value, group=alone, mask=ta.Causal())
    assert torch.equal(a, ta.attention(query, key, value, mask=ta.Causal()))
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    out = ring_attention(*(shard_sequence(x, mesh) for x in (query, key, value)), group=mesh)
    close(out, shard_sequence(ta.attention(query, key, value)), 1e-12, "mesh")
    some = dist.new_group(list(range(1, size)))
    if rank == 0:
        with raises(RuntimeError, "group must have this process as a member"):
            ring_attention(query, key, value, group=some)
    else:
        out = ring_attention(*(shard_sequence(x, some) for x in (query, key, value)), group=some)
        close(out, shard_sequence(ta.attention(query, key, value), some), 1e-12, "group")
    with raises(TypeError, "group must be a process group, a mesh of one dimension or None, got str"):
        ring_attention(query, key, value, group="world")


@case
def disagreement(rank: int, size: int) -> None:
    last = size - 1

    def call(**changed: Any) -> None:
        """As the other ranks, but for the last one."""
        given: dict[str, Any] = dict(zip(NAMES, (shard_sequence(x) for x in problem(32, 32))))
        if rank == last:
            given.update(changed)
        ring_attention(given.pop("query"), given.pop("key"), given.pop("value"), **given)

    query, key, value = (shard_sequence(x) for x in problem(32, 32))
    names = f"rank 0 has {{}}, rank {last} has {{}}"
    with raises(ValueError, "dtype must be equal on all ranks: " + names.format("torch.float64", "torch.float32")):
        call(query=query.float(), key=key.float(), value=value.float())
    with raises(ValueError, "num_heads must be equal on all ranks: " + names.format(4, 2)):
        call(query=query[:, :2])
    with raises(ValueError, "head_dim_v must be equal on all ranks: " + names.format(8, 4)):
        call(value=value[..., :4])
    with raises(ValueError, "batch must be equal on all ranks: " + names.format("(2,)", "(1,)")):
        call(query=query[:1], key=key[:1], value=value[:1])
    with raises(ValueError, "mask must be equal on all ranks: " + names.format("None", "Causal(align=bottom_right)")):
        call(mask=ta.Causal())
    with raises(ValueError, "scale must be equal on all ranks"):
        call(scale=0.3)
    with raises(ValueError, "sinks must be equal on all ranks: " + names.format("None", "given")):
        call(sinks=torch.zeros(4, dtype=torch.float64))
    with raises(ValueError, "layout must be equal on all ranks: " + names.format("contiguous", "zigzag")):
        call(layout="zigzag")
    with raises(ValueError, "requires_grad must be equal on all ranks: " + names.format("[]", "['key']")):
        call(key=leaf(key))
    with raises(ValueError, "function must be equal on all ranks"):
        ta.distributed.gather_sequence(query) if rank == 0 else ring_attention(query, key, value)
    with raises(*((TypeError, "softcap must be") if rank == last else (RuntimeError, f"rank {last} raised TypeError: softcap must be"))):
        call(softcap="many")
    with raises(*((TypeError, "timeout must be") if rank == last else (RuntimeError, f"rank {last} raised TypeError: timeout must be"))):
        call(timeout="soon")
    with raises(*((ValueError, "value must have") if rank == last else (RuntimeError, f"rank {last} raised ValueError: value must have"))):
        call(value=value[..., 1:, :])
    with raises(*((TypeError, "query must be a tensor") if rank == last else (RuntimeError, f"rank {last} raised TypeError: query"))):
        call(query=None)
    with raises(ValueError, "query must have zigzag shards of"):
        q, k, v = (x[..., : x.shape[-2] - (rank == last), :] for x in (query, key, value))
        ring_attention(q, k, v, layout="zigzag")
    with raises(ValueError, "mask must have the 32 keys of all ranks, or 1, in its last dimension, got 8"):
        ring_attention(query, key, value, mask=torch.ones(query.shape[-2], 8, dtype=torch.bool))
    with raises(ValueError, "mask: expected a shape that broadcasts to"):
        ring_attention(query, key, value, mask=torch.ones(query.shape[-2] + 1, 32, dtype=torch.bool))
    with raises(ValueError, "bias must have the 32 keys of all ranks, or 1, in its last dimension, or be (..., 1, 63) by distance"):
        ring_attention(query, key, value, bias=torch.zeros(1, 62))
    with raises(ValueError, "method must be 'ring', 'all_to_all' or 'auto', got 'tree'"):
        ring_attention(query, key, value, method="tree")
    with raises(ValueError, "timeout must be a number of seconds > 0 or None, got -1"):
        ring_attention(query, key, value, timeout=-1)
    out = ring_attention(query, key, value)  # the group is as before
    close(out, shard_sequence(ta.attention(*problem(32, 32))), 1e-12, "out")


@case
def volume(rank: int, size: int) -> None:
    """Bytes sent by all ranks are those of the formulas in docs/distributed.md."""
    length, heads, dim = 64 * size, 4, 8
    row = 2 * heads * dim  # numbers of a key and its value
    for dtype in (torch.float32, torch.bfloat16):
        for layout, mask, rows in (  # of keys with their values, over all hops
            ("contiguous", None, 64 * size * (size - 1)),
            ("zigzag", ta.Causal(), 64 * size * (size - 1)),
            ("contiguous", ta.Causal(), 64 * size * (size - 1) // 2),
            ("contiguous", ta.SlidingWindow(63, 0), 63 * (size - 1)),
            ("contiguous", ta.SlidingWindow(100, 0), 64 * (size - 1) + 36 * (size - 2)),
            ("contiguous", ta.SlidingWindow(64, 20), 84 * (size - 1)),
            ("zigzag", ta.SlidingWindow(20, 0), 20 * (2 * size - 2)),
            (
                "contiguous",
                ta.Causal() & (ta.SlidingWindow(9, 0) | ta.Sinks(4)),
                64 + (9 + 4) * (size - 2),
            ),  # rank 1 sees both ends of rank 0
            ("contiguous", ta.Chunked(64), 0),
            ("contiguous", ta.Documents(torch.arange(size + 1) * 64), 0),
        ):
            inputs = [
                leaf(shard_sequence(x, layout=layout))
                for x in problem(length, length, batch=(1,), heads=(heads, heads), dims=(dim, dim), dtype=dtype)
            ]
            with Wire() as forward:
                out = ring_attention(*inputs, mask=mask, layout=layout)
            with Wire() as backward:
                out.sum().backward()
            total = torch.tensor([forward.sent(), backward.sent()])
            dist.all_reduce(total)
            want = rows * row * dtype.itemsize
            gradients = rows * row * 4
            # The later half of a zigzag shard is seen by the ranks before its owner only: that of rank 0 by none.
            if isinstance(mask, ta.Causal) and layout == "zigzag":
                want -= (size - 1) * 32 * row * dtype.itemsize
                gradients -= 4 * 32 * row * sum(size - 1 - owner for owner in range(size))
            assert total.tolist() == [want, want + gradients], f"{layout} {mask} {dtype}: {total.tolist()}, not {[want, want + gradients]}"
    for heads, heads_kv in ((8, 4), (8, 1)):
        inputs = [
            leaf(shard_sequence(x))
            for x in problem(length, length, batch=(1,), heads=(heads, heads_kv), dims=(dim, dim), dtype=torch.float32)
        ]
        with Wire() as forward:
            out = ring_attention(*inputs, method="all_to_all")
        with Wire() as backward:
            out.sum().backward()
        kept = max(heads_kv // size, 1)
        want = (size - 1) * 64 * (heads // size + kept) * 2 * dim * 4
        assert [forward.sent(), backward.sent()] == [want, want], f"{[forward.sent(), backward.sent()]}, not {want}"
    # "auto": the same heads, a ring where keys and values have few heads, an exchange where they have many.
    for heads_kv, less in ((8, "all_to_all"), (1, "ring")) if size == 4 else ():
        inputs = [shard_sequence(x) for x in problem(length, length, batch=(1,), heads=(8, heads_kv), dims=(dim, dim), dtype=torch.float32)]
        sent = {}
        for method in ("ring", "all_to_all", "auto"):
            with Wire() as counted:
                ring_attention(*inputs, method=method)
            sent[method] = counted.sent()
        assert sent["auto"] == sent[less] == min(sent.values()), f"{heads_kv}: {sent}"
