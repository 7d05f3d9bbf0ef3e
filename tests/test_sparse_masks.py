"""Strided, dilated, global, random and block-sparse masks: their definitions and block lists against the dense matrix."""

import math
import random
from functools import lru_cache

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import tiled_attention as ta
from checks import run_with_mask as run
from oracle import philox
from tiled_attention import block_list, lowering
from tiled_attention.testing import Case

ops = torch.ops.tiled_attention
CPU = torch.device("cpu")


@lru_cache
def random_blocks(mask: ta.RandomBlocks, seqlen_kv: int, query_block: int) -> set[int]:
    """The key blocks that a query block sees: those of the smallest words."""
    if query_block < 0:
        return set()
    count = math.ceil(seqlen_kv / mask.block_size)
    key = (mask.seed & 0xFFFFFFFF, mask.seed >> 32)
    words = [int(philox(np.array([b // 4, query_block, 0, 0], dtype=np.uint32), key)[b % 4]) for b in range(count)]
    return set(sorted(range(count), key=lambda b: (words[b], b))[: mask.num_blocks])


def sees(mask: ta.Mask, seqlen_kv: int, head: int, i: int, p: int, j: int) -> bool:
    if isinstance(mask, ta.Strided):
        return (p - j) % mask.stride == 0
    if isinstance(mask, ta.Dilated):
        return abs(p - j) <= mask.window * mask.dilation and (p - j) % mask.dilation == 0
    if isinstance(mask, ta.Global):
        return p in tuple(mask.positions) or j in tuple(mask.positions)
    if isinstance(mask, ta.RandomBlocks):
        return j // mask.block_size in random_blocks(mask, seqlen_kv, p // mask.block_size)
    assert isinstance(mask, ta.BlockSparse)
    return bool(mask.block_mask[head, i // mask.block_size, j // mask.block_size])


@pytest.mark.parametrize("lengths", [(9, 14), (14, 9), (12, 12)])
@pytest.mark.parametrize("offset", [None, 3, -4])
def test_definitions(lengths: tuple[int, int], offset: int | None):
    seqlen_q, seqlen_kv = lengths
    layout = torch.rand(2, math.ceil(seqlen_q / 5), math.ceil(seqlen_kv / 5)) > 0.5
    masks = [ta.Strided(1), ta.Strided(3), ta.Dilated(2, 3), ta.Dilated(0, 1), ta.Global((0, 5, 13)), ta.Global([])]
    masks += [
        ta.RandomBlocks(1, 3, seed=5),
        ta.RandomBlocks(2, 2, 1 << 63),
        ta.RandomBlocks(9, 4),
        ta.RandomBlocks(0),
        ta.BlockSparse(layout, 5),
    ]
    start = seqlen_kv - seqlen_q if offset is None else offset
    for mask in masks:
        dense = mask.dense(seqlen_q, seqlen_kv, query_offset=offset)
        assert dense.shape == ((2,) if isinstance(mask, ta.BlockSparse) else ()) + lengths
        for head, seen in enumerate(dense.view(-1, *lengths)):
            want = [[sees(mask, seqlen_kv, head, i, i + start, j) for j in range(seqlen_kv)] for i in range(seqlen_q)]
            assert torch.equal(seen, torch.tensor(want)), mask
    assert torch.equal(ta.Global(torch.tensor([5, 0, 5])).dense(*lengths), ta.Global((0, 5)).dense(*lengths))


def some_masks(seqlen_q: int, seqlen_kv: int, num_heads: int = 2) -> list[ta.Mask]:
    """Masks and unions, per head, per batch item (of 2) and for all."""
    by_head = torch.rand(num_heads, math.ceil(seqlen_q / 16), math.ceil(seqlen_kv / 16)) > 0.6
    by_item = torch.rand(2, 1, math.ceil(seqlen_q / 100), math.ceil(seqlen_kv / 100)) > 0.5
    by_head[:, -1] = False
    scattered = torch.rand(seqlen_q, seqlen_kv) > 0.95
    scattered[:70, :66] = True
    return [
        ta.BlockSparse(by_head, 16),
        ta.BlockSparse(by_item, 100) & ta.Causal(),
        ta.BlockSparse(by_item, 100) | ta.KeyLengths(torch.tensor([3, 90])),
        ta.Causal() & (ta.Global((0, 70, 71)) | ta.SlidingWindow(20, 5)),
        ta.RandomBlocks(1, 50, seed=7),
        ta.RandomBlocks(1) | ta.SlidingWindow(64, 64) | ta.Global((1,)),
        ta.RandomBlocks(1, 130) | ta.Sinks(3),
        ta.Strided(7) | ta.Global(torch.tensor([64])),
        ta.Dilated(4, 9) & ta.KeyLengths(torch.tensor([80, 130])),
        ta.Strided(5) | scattered,
        ta.BlockSparse(by_head, 16) & scattered,
        ta.Chunked(70) | ta.Documents(torch.tensor([0, 50, 120, 150])),
        ta.PrefixLM(70) | ta.Dilated(2, 40),
        ta.Causal("top_left") | ta.Sinks(65),
    ]


def listed(mask: ta.Mask, seqlen_q: int, seqlen_kv: int, offset: int | Tensor | None) -> Tensor:
    """What C++ reads from the list."""
    blocks = block_list.build([mask], seqlen_q, seqlen_kv, offset, CPU)
    return ops._blocks_dense(*blocks, torch.arange(seqlen_q), seqlen_q, seqlen_kv)


@pytest.mark.parametrize("lengths", [(200, 200), (130, 257), (257, 130), (64, 64), (1, 65)])
def test_lists_are_the_dense_mask(lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    for offset in (None, 5, -20, torch.tensor([3, -70])):
        for mask in some_masks(*lengths):
            dense = mask.dense(*lengths, query_offset=offset)
            got, dense = torch.broadcast_tensors(listed(mask, *lengths, offset), dense)
            assert torch.equal(got, dense), mask
            assert mask.density(*lengths, query_offset=offset) == pytest.approx(dense.double().mean().item(), abs=1e-12)
    monkeypatch.setattr(block_list, "_GRID", 5)  # strips of one row of tiles
    for mask in some_masks(*lengths):
        got, dense = torch.broadcast_tensors(listed(mask, *lengths, 2), mask.dense(*lengths, query_offset=2))
        assert torch.equal(got, dense), mask


def test_lists_cost_what_is_visible():
    n = 1 << 15
    mask = ta.Global((0, 1, 2)) | ta.SlidingWindow(100, 0)
    lowered = lowering.lower(mask, batch_shape=(2,), num_heads=3, seqlen_q=n, seqlen_kv=n, device=CPU)
    assert lowered.mask is None and lowered.block_rows.shape == (n // 64, 2)
    tiles = n // 64
    assert lowered.block_tiles.shape[0] <= 5 * tiles and lowered.block_bits.shape[0] <= 5 * tiles
    again = lowering.lower(mask, batch_shape=(2,), num_heads=3, seqlen_q=n, seqlen_kv=n, device=CPU)
    assert again.block_tiles is lowered.block_tiles
    assert mask.density(n, n) == pytest.approx((3 * n + 3 * n - 9 + 101 * (n - 3) - 5050 - 3 * 101 + 3 + 3 + 1) / n**2, rel=0.01)


def test_a_changed_layout_is_read_again():
    layout = torch.zeros(5, 5, dtype=torch.bool)
    mask, x = ta.BlockSparse(layout, 16), torch.randn(1, 1, 77, 8)
    assert (ta.attention(x, x, x, mask=mask) == 0).all()
    layout[:] = True
    assert torch.equal(ta.attention(x, x, x, mask=mask), ta.attention(x, x, x))


def test_l15_block_sparse():
    layout = torch.rand(2, 5, 5) > 0.5
    layout[:, 2] = False
    layout[:, 0, 0] = True
    n = 77
    dense = layout.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, :n, :n]
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for _ in range(3))
    lower = torch.ones(n, n).tril().bool()
    mask = ta.BlockSparse(layout, 16)
    assert torch.equal(mask.dense(n, n).expand(2, n, n), dense)
    for ours, seen in ((mask, dense), (mask & ta.Causal(), dense & lower)):
        out = ta.attention(q, k, v, mask=ours)
        want = ta.reference.attention(q.double(), k.double(), v.double(), mask=seen)
        torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=1e-5)
        assert (out[:, :, 32:48] == 0).all()
        grad = torch.randn_like(out)
        for a, b in zip(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad.double()), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    rectangle = ta.BlockSparse(layout[:, :2], 16)
    out = ta.attention(q[:, :, :20], k, v, mask=rectangle)
    torch.testing.assert_close(out, ta.reference.attention(q[:, :, :20], k, v, mask=dense[:, :20]))


OPTIONS = {
    "plain": {},
    "dropout": {"dropout_p": 0.3},
    "everything": {"softcap": 2.0, "alibi": True, "sinks": True, "query_offset": 20},
    "bias": {"bias": (4, 1, 1)},
    "offsets": {"query_offset": (3, -40), "dropout_p": 0.5, "sinks": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", [(150, 150), (7, 700), (200, 90)])
def test_listed_attention_has_the_bits_of_the_bool_mask(lengths: tuple[int, int], options: dict[str, object], isa: str):
    """Forward: a key that is not visited changes no bit. Backward adds up the runs of visible keys one by one."""
    rng = random.Random(str((lengths, options)))
    for mask in rng.sample(some_masks(*lengths, num_heads=4), 5):
        dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
        case = Case(
            num_heads=4, num_heads_kv=2, seqlen_q=lengths[0], seqlen_kv=lengths[1], head_dim=20, head_dim_v=12, dtype=dtype, **options
        )
        x = case.inputs()
        x.value[:, :, lengths[1] // 2] = math.nan
        given = {name: getattr(x, name) for name in ("bias", "alibi_slopes", "sinks", "query_offset", "softcap", "dropout_p")}
        given = {name: value for name, value in given.items() if value is not None}
        lowered = lowering.lower(
            mask, batch_shape=(2,), num_heads=4, seqlen_q=lengths[0], seqlen_kv=lengths[1], query_offset=x.query_offset, device=CPU
        )
        assert lowered.block_rows is not None
        ours, dense = run(mask, x, given), run(mask.dense(*lengths, query_offset=x.query_offset), x, given)
        for name in ("out", "lse", "weights"):
            assert torch.equal(ours[name].nan_to_num(7.0), dense[name].nan_to_num(7.0)), (mask, name)
        for name in ours.keys() - {"out", "lse", "weights"}:
            a, b = ours[name], dense[name]
            assert torch.equal(a.isnan(), b.isnan()), (mask, name)
            scale = b.nan_to_num(0.0).abs().max().item() + 1e-6
            eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps * 64 + 4 * torch.finfo(a.dtype).eps
            assert (a - b).nan_to_num(0.0).abs().max().item() <= eps * scale, (mask, name)


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        *((torch.bfloat16, head_dim) for head_dim in (64, 128, 256)),
        *((torch.float16, 128), (torch.float32, 64), (torch.float32, 100), (torch.float64, 64)),
    ],
    ids=str,
)
def test_lists_of_kernels_of_every_size(dtype: torch.dtype, head_dim: int, isa: str):
    """Lists per head, per batch item and of all of them, rows without keys, NaN and inf in what nobody sees, against the definition."""
    n, keys = 150, 203
    layout = torch.rand(2, 10, 13, generator=torch.Generator().manual_seed(2)) > 0.6
    layout[:, :, 11] = False
    layout[:, 4:6] = False
    hidden = ta.BlockSparse(torch.ones(10, 13, dtype=torch.bool).index_fill(1, torch.tensor([11]), False), 16)
    masks = [
        ta.BlockSparse(layout, 16),
        ta.Causal() & ta.BlockSparse(layout[0], 16),
        hidden & (ta.Global((5, 130)) | ta.SlidingWindow(9, 2)) & ta.KeyLengths(torch.tensor([203, 120])),
    ]
    x = Case(num_heads=2, num_heads_kv=1, seqlen_q=n, seqlen_kv=keys, head_dim=head_dim, dtype=dtype).inputs()
    x.key[:, :, 180], x.value[:, :, 181], x.value[:, :, 182] = math.nan, math.nan, math.inf
    for mask in masks:
        lowered = lowering.lower(mask, batch_shape=(2,), num_heads=2, seqlen_q=n, seqlen_kv=keys, device=CPU)
        assert lowered.block_rows is not None
        leaves = [t.detach().requires_grad_() for t in (x.query, x.key, x.value)]
        exact = [t.detach().nan_to_num(0.0, 0.0).double().requires_grad_() for t in leaves]
        out, want = ta.attention(*leaves, mask=mask), ta.reference.attention(*exact, mask=mask.dense(n, keys))
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
        ours = [out, *torch.autograd.grad(out, leaves, direction)]
        right = [want, *torch.autograd.grad(want, exact, direction.double())]
        for a, b in zip(ours, right, strict=True):
            # 16 bit: queries, weights and their gradients are rounded before they are summed.
            limit = (4 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps * b.abs().max().item()
            assert (a.double() - b).abs().max().item() <= limit, mask


def test_a_captured_graph_reads_lists_that_are_there(monkeypatch: pytest.MonkeyPatch):
    sizes = dict(batch_shape=(2,), num_heads=3, seqlen_q=150, seqlen_kv=150, device=CPU)
    mask = ta.Global((1, 77)) | ta.SlidingWindow(5, 0)
    monkeypatch.setattr(block_list, "_captured", {})
    with monkeypatch.context() as capture:
        capture.setattr(block_list, "_captures", lambda device: True)
        lowered = lowering.lower(mask, **sizes)
    assert lowered.block_rows is None and torch.equal(lowered.mask, mask.dense(150, 150))
    built = lowering.lower(mask, **sizes).block_rows
    assert built is not None and not block_list._captured
    with monkeypatch.context() as capture:
        capture.setattr(block_list, "_captures", lambda device: True)
        assert lowering.lower(mask, **sizes).block_rows is built
    assert [blocks.rows is built for blocks in block_list._captured.values()] == [True]


def test_rows_keep_their_bits_alone_and_for_any_number_of_threads():
    n = 300
    x = Case(num_heads=4, num_heads_kv=2, seqlen_q=n, head_dim=24).inputs()
    mask = ta.RandomBlocks(2, 40) | ta.Global((5,)) | ta.SlidingWindow(30, 0)
    torch.set_num_threads(1)
    whole = run(mask, x, {"dropout_p": 0.0})
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        again = run(mask, x, {"dropout_p": 0.0})
        assert all(torch.equal(again[name], whole[name]) for name in whole)
    for first, last in ((0, 1), (37, 50), (63, 130), (299, 300)):
        part = ta.attention(x.query[:, :, first:last], x.key, x.value, mask=mask, query_offset=first)
        assert torch.equal(part, whole["out"][:, :, first:last])
    assert torch.equal(ta.attention(x.query[1:], x.key[1:], x.value[1:], mask=mask), whole["out"][1:])


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0, "sinks": torch.randn(2).double()}, {"dropout_p": 0.3}], ids=["plain", "sinks", "dropout"]
)
def test_second_derivatives_of_listed_attention(options: dict[str, object]):
    mask = ta.BlockSparse(torch.rand(2, 3, 3) > 0.4, 30) | ta.Global((3,))
    inputs = [torch.randn(1, heads, n, 3, dtype=torch.float64, requires_grad=True) for heads, n in ((2, 66), (1, 70), (1, 70))]

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return ta.attention(*inputs, mask=mask, return_lse=True, **options)

    assert gradcheck(call, inputs, fast_mode=True) and gradgradcheck(call, inputs, fast_mode=True)
    weights = lambda q, k: ta.attention_weights(q, k, mask=mask, rows=torch.tensor([65, 3, 3]))
    assert gradcheck(weights, inputs[:2], fast_mode=True)


@pytest.mark.parametrize(
    "mask",
    [ta.Causal() & (ta.Strided(8) | ta.SlidingWindow(7, 0)), ta.Global((0, 9)) | ta.RandomBlocks(1, 20)],
    ids=repr,
)
def test_compile_and_vmap(mask: ta.Mask):
    n = 80
    q, k, v = (torch.randn(2, 2, n, 8, requires_grad=True) for _ in range(3))
    want = ta.reference.attention(q, k, v, mask=mask)
    grads = torch.autograd.grad(want.sum(), (q, k, v))
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: ta.attention(q, k, v, mask=mask), fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    torch.testing.assert_close(out, want)
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), grads, strict=True):
        torch.testing.assert_close(a, b)
    mapped = torch.func.vmap(lambda q: ta.attention(q, k[0], v[0], mask=mask))(q.detach())
    torch.testing.assert_close(mapped, ta.reference.attention(q, k[:1].expand_as(k), v[:1].expand_as(v), mask=mask).detach())


def test_transforms_read_one_list(monkeypatch: pytest.MonkeyPatch):
    n, found = 80, []
    mask, layout = ta.Global((0, 9)) | ta.RandomBlocks(1, 20), torch.rand(2, 5, 5) > 0.4
    q, k, v = (torch.randn(2, 2, n, 8, dtype=torch.float64) for _ in range(3))
    dense, of = mask.dense(n, n), block_list.of
    monkeypatch.setattr(block_list, "of", lambda *args: found.append(of(*args)) or found[-1])

    def attend(q: Tensor, mask: ta.Mask | Tensor = mask) -> Tensor:
        return ta.attention(q, k[0], v[0], mask=mask).square().sum()

    for ours, want in (
        (torch.func.vmap(attend)(q), torch.func.vmap(lambda q: attend(q, dense))(q)),
        (torch.func.grad(attend)(q[0]), torch.func.grad(attend)(q[0], dense)),
        (torch.func.vmap(torch.func.grad(attend))(q), torch.func.vmap(lambda q: torch.func.grad(attend)(q, dense))(q)),
        (torch.func.jvp(attend, (q[0],), (q[1],))[1], torch.func.jvp(lambda q: attend(q, dense), (q[0],), (q[1],))[1]),
        (
            torch.func.jvp(torch.func.grad(attend), (q[0],), (q[1],))[1],
            torch.func.jvp(torch.func.grad(lambda q: attend(q, dense)), (q[0],), (q[1],))[1],
        ),
    ):
        torch.testing.assert_close(ours, want)
    assert len(found) == 5 and all(blocks.rows is found[0].rows for blocks in found)
    monkeypatch.setattr(block_list, "of", lambda *args: pytest.fail("a mapped layout has no list"))
    mapped = torch.func.vmap(lambda layout: attend(q[0], ta.BlockSparse(layout, 16)))(layout)
    monkeypatch.setattr(block_list, "of", of)
    torch.testing.assert_close(mapped, torch.stack([attend(q[0], ta.BlockSparse(one, 16)) for one in layout]))


def test_operators_map_over_lists():
    n = 100
    blocks = block_list.build([ta.BlockSparse(torch.rand(3, 2, 7, 7) > 0.5, 16)], n, n, None, CPU)
    q, k, v = (torch.randn(3, 2, n, 8) for _ in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        return ops.attention_fwd(q, k, v, *(None,) * 8, rows, *blocks[1:], None, None, 0.3, 0.0, 0.0, [], [], False, False, False)[0]

    assert torch.equal(torch.func.vmap(call)(q, k, v, blocks.rows), call(q, k, v, blocks.rows))


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: ta.Strided(0), ValueError, ("Strided", "stride", ">= 1", "0")),
        (lambda: ta.Dilated(-1, 2), ValueError, ("Dilated", "window", "-1")),
        (lambda: ta.Dilated(1, 0), ValueError, ("Dilated", "dilation", "0")),
        (lambda: ta.Global(3), TypeError, ("Global", "positions", "int")),
        (lambda: ta.Global((1, -2)), ValueError, ("Global", "positions", "-2")),
        (lambda: ta.Global((1, 2.0)), TypeError, ("Global", "positions", "2.0")),
        (lambda: ta.Global(torch.tensor([1.0])), TypeError, ("Global", "positions", "float32")),
        (lambda: ta.Global(torch.ones(1, 1, dtype=torch.long)), ValueError, ("positions", "(num_positions,)", "(1, 1)")),
        (lambda: ta.Global(torch.tensor([3, -2])), ValueError, ("positions", ">= 0", "-2")),
        (lambda: ta.Strided(2).dense(-1, 4), ValueError, ("seqlen_q", ">= 0", "-1")),
        (lambda: ta.Strided(2).dense(4, 1.5), TypeError, ("seqlen_kv", "integer", "1.5")),
        (lambda: ta.Strided(2).density(4, -1), ValueError, ("seqlen_kv", ">= 0", "-1")),
        (lambda: ta.RandomBlocks(-1), ValueError, ("RandomBlocks", "num_blocks", "-1")),
        (lambda: ta.RandomBlocks(1, 0), ValueError, ("block_size", "0")),
        (lambda: ta.RandomBlocks(1, seed=1 << 64), ValueError, ("seed", "2 ** 64")),
        (lambda: ta.BlockSparse([[True]], 16), TypeError, ("BlockSparse", "block_mask", "list")),
        (lambda: ta.BlockSparse(torch.ones(2, 2), 16), TypeError, ("block_mask", "bool", "float32")),
        (lambda: ta.BlockSparse(torch.ones(2).bool(), 16), ValueError, ("block_mask", "ceil", "(2,)")),
        (lambda: ta.BlockSparse(torch.ones(2, 2).bool(), 0), ValueError, ("block_size", "0")),
        (
            lambda: ta.BlockSparse(torch.ones(2, 3).bool(), 4).dense(8, 8),
            ValueError,
            ("block_mask", "(..., 2, 2)", "(2, 3)", "block_size 4"),
        ),
        (lambda: attend(ta.BlockSparse(torch.ones(5, 4).bool(), 16)), ValueError, ("block_mask", "(..., 5, 5)", "(5, 4)")),
        (lambda: attend(ta.BlockSparse(torch.ones(3, 5, 5).bool(), 16)), ValueError, ("mask", "(3")),
        (lambda: attend(ta.BlockSparse(torch.ones(5, 5, device="meta").bool(), 16)), ValueError, ("block_mask", "cpu", "meta")),
        (lambda: attend(ta.Global(torch.ones(2, dtype=torch.long, device="meta"))), ValueError, ("positions", "cpu", "meta")),
    ],
)
def test_errors(build, error, words):
    with pytest.raises(error) as raised:
        build()
    assert all(word in str(raised.value) for word in words), raised.value


def attend(mask: ta.Mask) -> Tensor:
    x = torch.randn(1, 2, 77, 8)
    return ta.attention(x, x, x, mask=mask)


def test_pictures():
    pyplot.switch_backend("Agg")
    mask = ta.Causal() & (ta.Strided(8) | ta.SlidingWindow(7, 0))
    for n in (40, 700):
        axes = ta.plot.mask(mask, n, n)
        picture = axes.images[0].get_array()
        size = n if n <= 512 else math.ceil(n / 64)
        assert picture.shape == (size, size) and picture[0, -1] == 0 and picture[-1, -1] > 0
        dense = mask.dense(n, n).double()
        if n > 512:
            assert picture[3, 1] == pytest.approx(dense[192:256, 64:128].mean().item())
        else:
            assert np.array_equal(picture, dense.numpy())
    figure, axes = pyplot.subplots()
    assert ta.plot.mask(torch.ones(3, 4).bool(), 3, 4, axes=axes) is axes
    pyplot.close("all")
    with pytest.raises(ValueError, match=r"seqlen_q must be an integer >= 1, got 0"):
        ta.plot.mask(mask, 0, 4)
    with pytest.raises(TypeError, match="mask must be a mask or a bool tensor, got str"):
        ta.plot.mask("causal", 4, 4)
