"""Masks: `dense` against the definitions one pair at a time, and the lowered numbers against `dense`."""

import copy
import itertools
import pickle
import random

import pytest
import torch
from torch import Tensor

from tiled_attention import lowering
from tiled_attention.lowering import Lowered
from tiled_attention.masks import And, Causal, Chunked, Documents, KeyLengths, Mask, Or, PrefixLM, Sinks, SlidingWindow

U = 1 << 40
LENGTHS = [(1, 1), (5, 5), (4, 9), (9, 4), (1, 8), (0, 3), (3, 0), (7, 8)]
BATCH_SHAPES = [(), (2,), (2, 3)]


def long(*values: int) -> Tensor:
    return torch.tensor(values)


def sees(mask: Mask | Tensor, item: tuple[int, ...], batch_shape: tuple[int, ...], i: int, j: int, p: int) -> bool:
    """Whether query i of the batch item, standing at position p, sees key j. Straight from the definitions."""
    if isinstance(mask, Tensor):
        return bool(mask[i, j])
    if isinstance(mask, And):
        return all(sees(part, item, batch_shape, i, j, p) for part in (mask.left, mask.right))
    if isinstance(mask, Or):
        return any(sees(part, item, batch_shape, i, j, p) for part in (mask.left, mask.right))
    if isinstance(mask, Causal):
        return j <= i if mask.align == "top_left" else j <= p
    if isinstance(mask, SlidingWindow):
        return -mask.left <= j - p <= mask.right
    if isinstance(mask, PrefixLM):
        return j < mask.prefix or j <= p
    if isinstance(mask, Chunked):
        return p >= 0 and p // mask.size == j // mask.size
    if isinstance(mask, Sinks):
        return j < mask.n
    if isinstance(mask, KeyLengths):
        return j < int(mask.lengths.expand(batch_shape)[item])
    assert isinstance(mask, Documents)
    bounds = mask.cu_seqlens.tolist()
    return any(begin <= p < end and begin <= j < end for begin, end in itertools.pairwise(bounds))


def definition(
    mask: Mask | Tensor, batch_shape: tuple[int, ...], seqlen_q: int, seqlen_kv: int, query_offset: int | Tensor | None
) -> Tensor:
    """bool (batch..., 1, seqlen_q, seqlen_kv)."""
    result = torch.zeros((*batch_shape, 1, seqlen_q, seqlen_kv), dtype=torch.bool)
    for item in itertools.product(*(range(size) for size in batch_shape)):
        offset = seqlen_kv - seqlen_q if query_offset is None else query_offset
        offset = int(offset.expand(batch_shape)[item]) if isinstance(offset, Tensor) else offset
        for i, j in itertools.product(range(seqlen_q), range(seqlen_kv)):
            result[(*item, 0, i, j)] = sees(mask, item, batch_shape, i, j, i + offset)
    return result


def row_rule(lowered: Lowered, batch_shape: tuple[int, ...], seqlen_q: int, seqlen_kv: int) -> Tensor:
    """What the operator makes of its arguments, bool (batch..., 1, seqlen_q, seqlen_kv). The `mask` argument is left to the caller."""
    batch = torch.Size(batch_shape).numel()
    result = torch.zeros((batch, seqlen_q, seqlen_kv), dtype=torch.bool)
    numbers = lowered.intervals or [U, U, U, U, U, -1, 0, U, 0, 0]
    assert len(numbers) == 10 and all(type(number) is int for number in numbers)
    shared_offset, window_left, window_right, limit_left, limit_right, prefix, chunk, key_end, num_sinks, top_left = numbers
    bounds = None if lowered.documents is None else lowered.documents.tolist()
    for b, i, j in itertools.product(range(batch), range(seqlen_q), range(seqlen_kv)):
        p = i + (seqlen_kv - seqlen_q if shared_offset == U else shared_offset)
        if lowered.query_offset is not None:
            p = i + int(lowered.query_offset[b])
        keep = p - window_left <= j <= p + window_right or j < num_sinks
        keep = keep and p - limit_left <= j <= p + limit_right and j < key_end
        keep = keep and (prefix == -1 or j < max(prefix, p + 1))
        keep = keep and (chunk == 0 or (p >= 0 and j // chunk == p // chunk))
        keep = keep and (not top_left or j <= i)
        keep = keep and (lowered.key_lengths is None or j < int(lowered.key_lengths[b]))
        keep = keep and (bounds is None or any(x <= p < y and x <= j < y for x, y in itertools.pairwise(bounds)))
        result[b, i, j] = keep
    return result.view(*batch_shape, 1, seqlen_q, seqlen_kv)


def lower(mask, batch_shape, seqlen_q, seqlen_kv, query_offset=None, num_heads=1) -> Lowered:
    return lowering.lower(
        mask,
        batch_shape=batch_shape,
        num_heads=num_heads,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        query_offset=query_offset,
        device=torch.device("cpu"),
    )


def check_lowered(lowered: Lowered, batch_shape: tuple[int, ...], seqlen_q: int, seqlen_kv: int, expected: Tensor) -> None:
    batch = torch.Size(batch_shape).numel()
    for vector, shape in ((lowered.key_lengths, (batch,)), (lowered.query_offset, (batch,))):
        assert vector is None or (vector.dtype == torch.int64 and vector.shape == shape and vector.is_contiguous())
    if lowered.documents is not None:
        bounds = lowered.documents
        assert bounds.dtype == torch.int64 and bounds.dim() == 1 and bounds.is_contiguous() and (bounds.diff() >= 0).all()
    visible = row_rule(lowered, batch_shape, seqlen_q, seqlen_kv)
    if lowered.mask is not None:
        assert lowered.mask.dtype == torch.bool
        visible = visible & lowered.mask
    assert torch.equal(visible.expand(expected.shape), expected)


def random_vector(rng: random.Random, batch_shape: tuple[int, ...], low: int, high: int) -> Tensor:
    shape = [size if rng.random() < 0.7 else 1 for size in batch_shape]
    dtype = rng.choice([torch.int64, torch.int32])
    return torch.tensor([rng.randint(low, high) for _ in range(torch.Size(shape).numel())], dtype=dtype).view(shape)


def random_leaf(rng: random.Random, batch_shape: tuple[int, ...]) -> Mask:
    kind = rng.randrange(8)
    if kind == 0:
        return Causal()
    if kind == 1:
        return Causal("top_left")
    if kind == 2:
        return SlidingWindow(rng.randint(0, 5), rng.randint(0, 5))
    if kind == 3:
        return PrefixLM(rng.randint(0, 6))
    if kind == 4:
        return Chunked(rng.randint(1, 6))
    if kind == 5:
        return Sinks(rng.randint(0, 8))
    if kind == 6:
        return KeyLengths(random_vector(rng, batch_shape, -1, 10))
    steps = [rng.randint(0, 4) for _ in range(rng.randint(0, 4))]
    return Documents(torch.tensor([0, *itertools.accumulate(steps)], dtype=rng.choice([torch.int64, torch.int32])))


def random_mask(rng: random.Random, batch_shape: tuple[int, ...], depth: int) -> Mask:
    if depth == 0 or rng.random() < 0.2:
        return random_leaf(rng, batch_shape)
    left, right = random_mask(rng, batch_shape, depth - 1), random_mask(rng, batch_shape, depth - 1)
    return left & right if rng.random() < 0.6 else left | right


def random_offset(rng: random.Random, batch_shape: tuple[int, ...]) -> int | Tensor | None:
    return rng.choice([None, rng.randint(-4, 12), random_vector(rng, batch_shape, -4, 12)])


def nest(rng: random.Random, parts: list[Mask]) -> Mask:
    """All of them by `&`, in a random order and a random tree."""
    parts = list(parts)
    while len(parts) > 1:
        a, b = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        parts.append(a & b)
    return parts[0]


@pytest.mark.parametrize("seed", range(40))
def test_dense_and_lowering_are_the_definition(seed):
    rng = random.Random(seed)
    for _ in range(6):
        batch_shape, (seqlen_q, seqlen_kv) = rng.choice(BATCH_SHAPES), rng.choice(LENGTHS)
        mask, offset = random_mask(rng, batch_shape, rng.randint(0, 3)), random_offset(rng, batch_shape)
        if rng.random() < 0.2:
            tensor = torch.tensor([[rng.random() < 0.7 for _ in range(seqlen_kv)] for _ in range(seqlen_q)], dtype=torch.bool)
            tensor = tensor.view(seqlen_q, seqlen_kv)
            mask = rng.choice([mask & tensor, tensor & mask, mask | tensor, tensor | mask])
        expected = definition(mask, batch_shape, seqlen_q, seqlen_kv, offset)
        dense = mask.dense(seqlen_q, seqlen_kv, query_offset=offset)
        assert dense.dtype == torch.bool and dense.shape[-2:] == (seqlen_q, seqlen_kv) and dense.is_contiguous()
        assert torch.equal(dense.expand(expected.shape), expected), mask
        check_lowered(lower(mask, batch_shape, seqlen_q, seqlen_kv, offset), batch_shape, seqlen_q, seqlen_kv, expected)


@pytest.mark.parametrize("seed", range(40))
def test_intersections_of_intervals_never_become_dense(seed):
    rng = random.Random(seed)
    for _ in range(8):
        batch_shape, (seqlen_q, seqlen_kv) = rng.choice(BATCH_SHAPES), rng.choice(LENGTHS)
        n = rng.randint(0, 5)
        streams = [SlidingWindow(rng.randint(0, 5), rng.randint(0, 5)) | Sinks(n), Sinks(n) | Causal(), PrefixLM(n + 1) | Sinks(n)]
        streams += [(Causal() & SlidingWindow(2, 3)) | Sinks(n), (Causal() & Sinks(n)) | (SlidingWindow(1, 0) & Causal())]
        parts = [random_leaf(rng, batch_shape) for _ in range(rng.randint(1, 5))] + rng.sample(streams, rng.randint(0, 2))
        mask, offset = nest(rng, parts), random_offset(rng, batch_shape)
        lowered = lower(mask, batch_shape, seqlen_q, seqlen_kv, offset)
        assert lowered.mask is None, mask
        check_lowered(lowered, batch_shape, seqlen_q, seqlen_kv, definition(mask, batch_shape, seqlen_q, seqlen_kv, offset))


@pytest.mark.parametrize(
    "mask",
    [
        Sinks(2) | Sinks(4),
        SlidingWindow(3, 0) | SlidingWindow(1, 2),
        SlidingWindow(3, 0) | Causal(),
        PrefixLM(3) | Sinks(5),
        PrefixLM(3) | Causal(),
        PrefixLM(2) | PrefixLM(4),
        (SlidingWindow(3, 0) | Sinks(2)) | (SlidingWindow(1, 1) | Sinks(3)),
        (Causal() & SlidingWindow(3, 1)) | (Causal() & Sinks(2)),
        (Causal() & Sinks(2)) | SlidingWindow(2, 1),
        (SlidingWindow(1, 4) & Sinks(3)) | SlidingWindow(4, 1),
        Sinks(0) | SlidingWindow(2, 1),
        Sinks(0) | Sinks(0),
        Sinks(0) | (SlidingWindow(1, 1) & Sinks(3)),
        PrefixLM(0) | Sinks(2),
        PrefixLM(0) | SlidingWindow(2, 1),
        Sinks(3) & (SlidingWindow(1, 0) | Sinks(4)) & (SlidingWindow(0, 1) | Sinks(2)),
        Chunked(4) & (Sinks(1) | SlidingWindow(2, 0)),
        (Chunked(4) & Sinks(6)) | (Chunked(4) & SlidingWindow(2, 0)),
        Chunked(2) & Chunked(4) & Chunked(8),
        Chunked(4) & Chunked(6) & Chunked(9),
        Chunked(4) & Chunked(6) & Documents(long(0, 3, 7, 20)),
        Documents(long(0, 3, 7, 20)) & Documents(long(0, 5, 5, 9)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("lengths", [(9, 13), (13, 9)])
def test_unions_and_boundaries_that_stay_intervals(mask, lengths):
    for offset in (None, 0, 5, -2, long(3, -1)):
        batch_shape = (2,) if isinstance(offset, Tensor) else ()
        lowered = lower(mask, batch_shape, *lengths, offset)
        assert lowered.mask is None
        check_lowered(lowered, batch_shape, *lengths, definition(mask, batch_shape, *lengths, offset))


@pytest.mark.parametrize(
    "mask",
    [
        (SlidingWindow(5, 5) & Sinks(2)) | (SlidingWindow(1, 1) & Sinks(4)),
        (SlidingWindow(5, 0) | Sinks(2)) & (SlidingWindow(3, 0) | Sinks(4)),
        Causal("top_left") | Sinks(3),
        Chunked(3) | SlidingWindow(1, 0),
    ],
    ids=repr,
)
def test_what_two_intervals_cannot_say_is_dense(mask):
    lowered = lower(mask, (), 9, 13)
    assert lowered.mask is not None
    check_lowered(lowered, (), 9, 13, definition(mask, (), 9, 13, None))


def test_numbers_of_the_schema():
    assert lower(None, (2,), 4, 6) == Lowered([])
    assert lower(SlidingWindow(U, U + 7), (2,), 4, 6) == Lowered([])
    assert lower(Causal(), (), 4, 6).intervals == [U, U, U, U, 0, -1, 0, U, 0, 0]
    assert lower(Causal("top_left"), (), 4, 6).intervals == [U, U, U, U, U, -1, 0, U, 0, 1]
    assert lower(Causal() & (SlidingWindow(3, 0) | Sinks(2)), (), 4, 6).intervals == [U, 3, 0, U, 0, -1, 0, U, 2, 0]
    assert lower(Sinks(3), (), 4, 6).intervals == [U, U, U, U, U, -1, 0, 3, 0, 0]
    assert lower(PrefixLM(3), (), 4, 6).intervals == [U, U, U, U, U, 3, 0, U, 0, 0]
    assert lower(Chunked(3), (), 4, 6).intervals == [U, U, U, U, U, -1, 3, U, 0, 0]
    assert lower(None, (2,), 4, 6, query_offset=-3).intervals == [-3, U, U, U, U, -1, 0, U, 0, 0]
    lengths, offsets = long(3, 4), torch.tensor([5, 6], dtype=torch.int32)
    lowered = lower(KeyLengths(lengths), (2,), 4, 6, query_offset=offsets)
    assert lowered.intervals == [] and lowered.key_lengths.tolist() == [3, 4] and lowered.query_offset.tolist() == [5, 6]


def test_only_the_part_without_intervals_is_dense():
    tensor = torch.rand(2, 1, 5, 7) > 0.5
    for mask in (tensor & Causal(), Causal() & tensor):
        lowered = lower(mask, (2,), 5, 7)
        assert lowered.intervals == lower(Causal(), (2,), 5, 7).intervals and lowered.mask is tensor
    lowered = lower((Chunked(3) | Causal()) & SlidingWindow(2, 1) & KeyLengths(long(4, 6)), (2,), 5, 7)
    assert lowered.intervals == lower(SlidingWindow(2, 1), (2,), 5, 7).intervals and lowered.key_lengths.tolist() == [4, 6]
    assert torch.equal(lowered.mask, (Chunked(3) | Causal()).dense(5, 7))
    assert lower(tensor, (2,), 5, 7).mask is tensor


def test_interval_masks_cost_nothing_by_length():
    n = 1 << 34  # a dense mask of this size has 2 ** 68 elements
    for mask in (Causal(), Causal() & (SlidingWindow(5, 0) | Sinks(4)), Chunked(1 << 20), PrefixLM(7), KeyLengths(long(n, 3)) & Causal()):
        assert lower(mask, (2,), n, n).mask is None


def test_dense_shapes_and_devices():
    assert Causal().dense(3, 5).shape == (3, 5)
    assert KeyLengths(long(3, 4)).dense(3, 5).shape == (2, 1, 3, 5)
    assert KeyLengths(long(3, 4).view(2, 1)).dense(3, 5).shape == (2, 1, 1, 3, 5)
    assert Causal().dense(3, 5, query_offset=long(1, 2)).shape == (2, 1, 3, 5)
    assert Causal().dense(3, 5, device="meta").device.type == "meta"
    assert (KeyLengths(torch.ones(2, dtype=torch.long, device="meta")) & Causal()).dense(3, 5).device.type == "meta"
    assert torch.equal((torch.tensor([True, False, True]) & Causal()).dense(3, 3), torch.tensor([[1, 0, 0], [1, 0, 0], [1, 0, 1]]).bool())


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: Causal("left"), ValueError, ("align", "bottom_right", "top_left", "'left'")),
        (lambda: SlidingWindow(-1, 0), ValueError, ("left", ">= 0", "-1")),
        (lambda: SlidingWindow(1, -2), ValueError, ("right", ">= 0", "-2")),
        (lambda: SlidingWindow(1.0, 0), TypeError, ("left", "integer", "1.0")),
        (lambda: SlidingWindow(None, 0), TypeError, ("left", "integer", "None")),
        (lambda: PrefixLM(-3), ValueError, ("prefix", "-3")),
        (lambda: PrefixLM(True), TypeError, ("prefix", "integer", "True")),
        (lambda: Chunked(0), ValueError, ("size", ">= 1", "0")),
        (lambda: Chunked(torch.tensor(4)), TypeError, ("size", "integer")),
        (lambda: Sinks(-1), ValueError, ("n", "-1")),
        (lambda: KeyLengths([3, 4]), TypeError, ("lengths", "tensor", "list")),
        (lambda: KeyLengths(torch.tensor([3.0])), TypeError, ("lengths", "integer", "float32")),
        (lambda: KeyLengths(torch.tensor([True])), TypeError, ("lengths", "integer", "bool")),
        (lambda: Documents(torch.tensor([0.0, 3.0])), TypeError, ("cu_seqlens", "integer", "float32")),
        (lambda: Documents(torch.zeros(1, 3, dtype=torch.long)), ValueError, ("cu_seqlens", "(num_documents + 1,)", "(1, 3)")),
        (lambda: Documents(torch.zeros(0, dtype=torch.long)), ValueError, ("cu_seqlens", "(0,)")),
        (lambda: Documents(long(1, 3)), ValueError, ("cu_seqlens", "non-decreasing", "[1, 3]")),
        (lambda: Documents(long(0, 3, 2)), ValueError, ("cu_seqlens", "non-decreasing", "[0, 3, 2]")),
        (lambda: Causal() & torch.ones(3, 3), TypeError, ("mask", "bool", "float32")),
        (lambda: torch.ones(3, 3, dtype=torch.long) | Causal(), TypeError, ("mask", "bool", "int64")),
        (lambda: And(Causal(), None), TypeError, ("mask", "NoneType")),
        (lambda: Causal() & 3, TypeError, ("&",)),
        (lambda: (Causal() & torch.ones(4, 7, dtype=torch.bool)).dense(5, 7), ValueError, ("mask", "(5, 7)", "(4, 7)")),
        (lambda: lower(KeyLengths(long(1, 2, 3)), (2,), 4, 5), ValueError, ("lengths", "(2,)", "(3,)")),
        (lambda: lower(KeyLengths(long(1, 2)) | Chunked(2), (3,), 4, 5), ValueError, ("lengths", "(3,)", "(2,)")),
        (lambda: lower(KeyLengths(torch.ones(2, dtype=torch.long, device="meta")), (2,), 4, 5), ValueError, ("lengths", "cpu", "meta")),
        (lambda: lower(Documents(torch.ones(2, dtype=torch.long, device="meta")), (2,), 4, 5), ValueError, ("cu_seqlens", "cpu", "meta")),
        (lambda: lower(None, (2,), 4, 5, query_offset=long(1, 2, 3)), ValueError, ("query_offset", "(2,)", "(3,)")),
        (lambda: lower(None, (2,), 4, 5, query_offset=torch.ones(2)), TypeError, ("query_offset", "integer", "float32")),
        (lambda: lower(Causal(), (2,), 4, 5, query_offset=0.5), TypeError, ("query_offset", "integer", "0.5")),
        (lambda: lower(None, (2,), 4, 5, query_offset=U), ValueError, ("query_offset", str(U))),
        (lambda: lower(torch.ones(4, 5), (2,), 4, 5), TypeError, ("mask", "bool", "float32")),
        (lambda: lower(torch.ones(4, 6, dtype=torch.bool), (2,), 4, 5), ValueError, ("mask", "(2, 1, 4, 5)", "(4, 6)")),
        (lambda: lower(Causal() & torch.ones(2, 1, 1, 4, 5, dtype=torch.bool), (2,), 4, 5), ValueError, ("mask", "(2, 1, 4, 5)")),
        (lambda: lower("causal", (2,), 4, 5), TypeError, ("mask", "str")),
    ],
)
def test_errors_name_field_expected_and_given(build, error, words):
    with pytest.raises(error) as caught:
        build()
    assert all(word in str(caught.value) for word in words), str(caught.value)


class Whole:
    """An integer that is no int."""

    def __index__(self) -> int:
        return 3


def test_integers_of_other_types_are_taken():
    assert SlidingWindow(Whole(), 0) == SlidingWindow(3, 0) and type(SlidingWindow(Whole(), 0).left) is int


VALUES = [
    Causal(),
    Causal("top_left"),
    SlidingWindow(3, 1),
    PrefixLM(2),
    Chunked(4),
    Sinks(1),
    KeyLengths(long(2, 3)),
    Documents(long(0, 2, 5)),
    Causal() & (SlidingWindow(3, 0) | Sinks(2)),
    KeyLengths(long(2, 3)) & Documents(long(0, 3, 5)) & (torch.rand(5, 5) > 0.5),
]


@pytest.mark.parametrize("mask", VALUES, ids=repr)
def test_masks_are_values(mask):
    lower(mask, (2,), 5, 5)
    assert mask == mask and hash(mask) == hash(mask) and mask != Causal("top_left") & Sinks(9)
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), copy.copy(mask)):
        assert type(other) is type(mask) and torch.equal(other.dense(5, 5), mask.dense(5, 5))
    with pytest.raises(AttributeError):
        mask.left = 5
    leaves, spec = torch.utils._pytree.tree_flatten(mask)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    assert torch.equal(torch.utils._pytree.tree_unflatten(leaves, spec).dense(5, 5), mask.dense(5, 5))
    torch.utils._pytree.tree_map(lambda leaf: None, mask)
    paths = torch.utils._pytree.tree_flatten_with_path(mask)[0]
    assert [leaf for _, leaf in paths] == leaves


def test_equality():
    assert SlidingWindow(3, 0) == SlidingWindow(3, 0) != SlidingWindow(3, 1)
    assert len({SlidingWindow(3, 0), SlidingWindow(3, 0), Causal(), Causal(), Causal("top_left")}) == 3
    assert Causal() & Sinks(2) == Causal() & Sinks(2) != Causal() | Sinks(2)
    lengths, tensor = long(1, 2), torch.ones(3, 3, dtype=torch.bool)
    padding = KeyLengths(lengths)
    assert padding & Causal() == padding & Causal() and padding != KeyLengths(lengths.clone())
    assert Causal() & tensor == Causal() & tensor and Causal() & tensor != Causal() & tensor.clone()


def test_repr_can_be_read():
    assert repr(Causal() & (SlidingWindow(3, 0) | Sinks(2))) == (
        "(Causal(align='bottom_right') & (SlidingWindow(left=3, right=0) | Sinks(n=2)))"
    )
    assert repr(KeyLengths(long(1, 2))) == "KeyLengths(lengths=tensor([1, 2]))"
    assert "shape=(3, 3)" in repr(Causal() | torch.ones(3, 3, dtype=torch.bool))


def test_weights_only_files(tmp_path):
    mask = Causal() & KeyLengths(long(2, 3))
    torch.save({"mask": mask}, tmp_path / "mask.pt")
    assert torch.equal(torch.load(tmp_path / "mask.pt", weights_only=True)["mask"].dense(5, 5), mask.dense(5, 5))


class Lowering(torch.nn.Module):
    """Lowering as a model that has a graph: the numbers times x, and the tensors."""

    def __init__(self, mask: Mask | None = None) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor, mask: Mask | None = None) -> list[Tensor]:
        lowered = lowering.lower(
            self.mask if mask is None else mask,
            batch_shape=x.shape[:1],
            num_heads=x.shape[1],
            seqlen_q=x.shape[2],
            seqlen_kv=x.shape[2],
            device=x.device,
        )
        return [x * number for number in lowered.intervals] + [tensor for tensor in lowered[1:] if tensor is not None]


TRACED = [*VALUES[:9], Chunked(4) & Chunked(6), Chunked(3) | Causal(), KeyLengths(long(2, 3)) & KeyLengths(long(4)) & Documents(long(0, 9))]


@pytest.mark.parametrize("mask", TRACED, ids=repr)
def test_compile_and_export(mask):
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    expected = Lowering()(x, mask)
    torch._dynamo.reset()
    options = {"fullgraph": True, "dynamic": True, "backend": "aot_eager"}
    programs = [
        lambda: torch.compile(Lowering(), **options)(x, mask),
        lambda: torch.compile(Lowering(mask), **options)(x),
        lambda: torch.compile(lambda x: Lowering()(x, mask), **options)(x),
        lambda: torch.export.export(Lowering(), (x, mask)).module()(x, mask),
        lambda: torch.export.export(Lowering(mask), (x,)).module()(x),
    ]
    for program in programs:
        got = program()
        assert len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_masks_made_inside_compiled_code_do_not_recompile():
    def f(x, lengths):
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        mask = Causal() & SlidingWindow(x.shape[2] // 2, 0) & KeyLengths(lengths) & Documents(bounds) & (Chunked(4) | Sinks(2))
        return Lowering()(x, mask)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=counter)
    for seqlen in (6, 9, 32):
        x, lengths = torch.randn(2, 3, seqlen, 4), long(2, seqlen - 1)
        assert all(torch.equal(a, b) for a, b in zip(compiled(x, lengths), f(x, lengths), strict=True))
    assert counter.frame_count == 1


def test_fake_tensors_and_vmap():
    with torch._subclasses.FakeTensorMode():
        mask = KeyLengths(torch.empty(2, dtype=torch.int32)) & Documents(torch.empty(4, dtype=torch.long)) & (Chunked(2) | Causal())
        lowered = lower(mask, (2,), 5, 7, query_offset=torch.empty(2, dtype=torch.long))
        assert [tuple(tensor.shape) for tensor in lowered[1:] if tensor is not None] == [(2,), (4,), (2,), (2, 1, 5, 7)]
    lengths = long(1, 2, 3, 4, 5, 6).view(3, 2)
    got = torch.func.vmap(lambda each: lower(KeyLengths(each) & Causal(), (2,), 5, 7).key_lengths)(lengths)
    assert torch.equal(got, lengths)
    bounds = long(0, 2, 5, 0, 3, 5).view(2, 3)
    dense = torch.func.vmap(lambda each: Documents(each).dense(5, 5))(bounds)
    assert torch.equal(dense, torch.stack([Documents(each).dense(5, 5) for each in bounds]))


@pytest.mark.parametrize("seed", range(20))
def test_operator_row_rule_is_dense(seed):
    """`_mask_dense` fills a matrix from the row rule that the kernels follow."""
    rng = random.Random(1000 + seed)
    lengths = [*LENGTHS, (33, 70), (70, 33)]
    for _ in range(10):
        batch_shape, (seqlen_q, seqlen_kv) = rng.choice(BATCH_SHAPES), rng.choice(lengths)
        mask, offset = random_mask(rng, batch_shape, rng.randint(0, 3)), random_offset(rng, batch_shape)
        lowered = lower(mask, batch_shape, seqlen_q, seqlen_kv, offset)
        batch = torch.Size(batch_shape).numel()
        got = torch.ops.tiled_attention._mask_dense(
            lowered.intervals, lowered.key_lengths, lowered.documents, lowered.query_offset, batch, seqlen_q, seqlen_kv
        )
        assert got.shape == (batch, seqlen_q, seqlen_kv)
        got = got.view(*batch_shape, 1, seqlen_q, seqlen_kv)
        got = got if lowered.mask is None else got & lowered.mask
        assert torch.equal(got, mask.dense(seqlen_q, seqlen_kv, query_offset=offset).expand(got.shape)), mask
