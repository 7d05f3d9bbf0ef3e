"""Packed sequences: against the definition in float64, against `attention` on each sequence, derivatives, bad input."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import tiled_attention as ta
from checks import on_dot_path, same_bits
from tiled_attention.testing import DTYPES, error, largest, lay_out, poisoned_memory, real_dtype, rounding, ulp

F64 = torch.float64
STREAMING = ta.Causal() & (ta.SlidingWindow(7, 0) | ta.Sinks(3))
# (lengths of queries, lengths of keys): empty ones in every place, tiles of 16, 64, 96 and 128 rows just missed and just passed.
PACKINGS = {
    "even": ([5, 5, 5], [5, 5, 5]),
    "no queries or no keys": ([0, 1, 0, 4, 2, 0], [3, 3, 0, 5, 0, 0]),
    "one": ([37], [53]),
    "around tiles": ([15, 16, 17, 63, 1, 65], [17, 65, 16, 15, 64, 63]),
    "long and short": ([129, 3, 97, 1], [97, 129, 2, 70]),
}
MASKS = {
    "all": None,
    "causal": ta.Causal(),
    "top left": ta.Causal(align="top_left"),
    "window": ta.SlidingWindow(3, 2),
    "streaming": STREAMING,
    "prefix": ta.PrefixLM(4),
    "chunks": ta.Chunked(8),
}


def offsets(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


class Packed:
    """Inputs of one packing, and calls on them."""

    def __init__(self, lengths, dtype=torch.float32, heads=4, heads_kv=2, head_dim=16, head_dim_v=16, seed=0, slopes=False, sinks=False):
        self.rows, self.keys = lengths
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, dtype=F64, generator=generator)
        self.tensors = {
            "query": draw(sum(self.rows), heads, head_dim).to(dtype),
            "key": draw(sum(self.keys), heads_kv, head_dim).to(dtype),
            "value": draw(sum(self.keys), heads_kv, head_dim_v).to(dtype),
        }
        if slopes:
            self.tensors["alibi_slopes"] = draw(heads).abs().to(real_dtype(dtype)) / 8
        if sinks:
            self.tensors["sinks"] = draw(heads).to(real_dtype(dtype))
        self.grad_out = draw(sum(self.rows), heads, head_dim_v).to(dtype)
        self.grad_lse = draw(heads, sum(self.rows)).to(real_dtype(dtype))
        self.cu = offsets(self.rows), offsets(self.keys)
        self.longest = max(self.rows), max(self.keys)

    def call(self, **options) -> tuple[Tensor, Tensor]:
        query, key, value, *_ = self.tensors.values()
        others = {name: tensor for name, tensor in self.tensors.items() if name in ("alibi_slopes", "sinks")}
        return ta.attention_varlen(query, key, value, *self.cu, *self.longest, return_lse=True, **others, **options)

    def run(self, **options) -> dict[str, Tensor]:
        """out, lse and the gradient of every input."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self.tensors.items()}
        self.tensors = leaves
        out, lse = self.call(**options)
        gradients = torch.autograd.grad([out, lse], list(leaves.values()), [self.grad_out, self.live_grad_lse(lse)])
        return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}

    def live_grad_lse(self, lse: Tensor) -> Tensor:
        return torch.where(lse.detach() == -torch.inf, 0.0, self.grad_lse.to(lse.dtype))

    def expected(self, dtype=F64, dropout_mask=None, **options) -> dict[str, Tensor]:
        """The same by the definition, computed in `dtype`."""
        leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in self.tensors.items()}
        query, key, value = leaves["query"], leaves["key"], leaves["value"]
        others = {name: tensor for name, tensor in leaves.items() if name in ("alibi_slopes", "sinks")}
        out, lse = ta.reference.attention_varlen(
            query, key, value, *self.cu, dropout_mask=dropout_mask, return_lse=True, **others, **options
        )
        grads = [self.grad_out.to(dtype), self.live_grad_lse(lse).to(lse.dtype)]
        gradients = torch.autograd.grad([out, lse], list(leaves.values()), grads, materialize_grads=True)
        return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}

    def sequence(self, b: int, **options) -> dict[str, Tensor]:
        """`attention` on sequence b alone: out, lse and gradients, laid out as in the packed tensors."""
        rows, keys = (slice(*cu[b : b + 2].tolist()) for cu in self.cu)
        leaves = {}
        for name, tensor in self.tensors.items():
            part = tensor.detach() if tensor.dim() == 1 else tensor.detach()[rows if name == "query" else keys].transpose(0, 1)
            leaves[name] = part.requires_grad_()
        out, lse = ta.attention(**leaves, return_lse=True, **options)
        grads = [self.grad_out[rows].transpose(0, 1), self.grad_lse[:, rows].to(lse.dtype)]
        grads[1] = torch.where(lse.detach() == -torch.inf, 0.0, grads[1])
        gradients = torch.autograd.grad([out, lse], list(leaves.values()), grads)
        found = {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}
        return {name: x if x.dim() == 1 else x.transpose(0, 1) for name, x in found.items()} | {"lse": lse.detach()}


def check_accuracy(x: Packed, got: dict[str, Tensor], dropout_mask: Tensor | None = None, **options) -> None:
    """Within twice the error of the definition in the dtype itself, plus an ulp; in 16 bits within a few roundings of the exact values."""
    exact = x.expected(dropout_mask=dropout_mask, **options)
    dtype = x.tensors["query"].dtype
    plain = x.expected(real_dtype(dtype), dropout_mask=dropout_mask, **options)
    for name, want in exact.items():
        stored = real_dtype(dtype) if name in ("lse", "alibi_slopes", "sinks") else dtype
        assert got[name].dtype == stored and got[name].shape == want.shape, name
        # The definition rounds in one order of summation only, and float64 is its own exact value.
        limit = 2 * error(plain[name], want) + ulp(largest(want), real_dtype(dtype)) * (32 if dtype == F64 else 4)
        if dtype.itemsize == 2:
            rounded = rounding(want, dtype)
            limit += rounded * (1.5 if name == "out" else (4 if on_dot_path(dtype) else 2)) if name != "lse" else 0
            if name in ("alibi_slopes", "sinks", "lse") and on_dot_path(dtype):
                limit += 4 * rounded
        for pattern in (torch.isnan, torch.isinf):
            assert torch.equal(pattern(got[name]), pattern(want)), f"{name}: {pattern.__name__} differs"
        assert error(got[name], want) <= limit, f"{name}: error {error(got[name], want):.3e} above {limit:.3e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
def test_against_the_definition(packing, dtype):
    mask = list(MASKS.values())[(len(packing) + DTYPES.index(dtype)) % len(MASKS)]
    x = Packed(PACKINGS[packing], dtype, slopes=True, sinks=dtype != torch.float16)
    with poisoned_memory():
        got = x.run(mask=mask, softcap=4.0)
    check_accuracy(x, got, mask=mask, softcap=4.0)


@pytest.mark.parametrize("mask", MASKS)
def test_masks_act_inside_each_sequence(mask):
    x = Packed(PACKINGS["around tiles"], heads=2, heads_kv=1)
    check_accuracy(x, x.run(mask=MASKS[mask]), mask=MASKS[mask])


def test_key_lengths_are_one_per_sequence():
    x = Packed(([4, 3, 5], [6, 7, 5]), F64)
    lengths = torch.tensor([4, 0, 9])
    got = x.run(mask=ta.KeyLengths(lengths))
    out = [x.sequence(b, mask=ta.KeyLengths(lengths[b])) for b in range(3)]
    for b, (begin, end) in enumerate(itertools.pairwise(x.cu[0].tolist())):
        assert same_bits(got["out"][begin:end], out[b]["out"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", ["no queries or no keys", "around tiles", "long and short"])
def test_a_sequence_has_the_bits_it_has_alone(packing, dtype):
    x = Packed(PACKINGS[packing], dtype, head_dim=20, head_dim_v=12, slopes=True, sinks=True)
    options = dict(mask=STREAMING, softcap=3.0)
    got = x.run(**options)
    slopes = torch.zeros(4, dtype=F64)
    for b, (rows, keys) in enumerate(zip(*(itertools.pairwise(cu.tolist()) for cu in x.cu), strict=True)):
        alone = x.sequence(b, **options)
        for name, part in (("out", rows), ("query", rows), ("key", keys), ("value", keys)):
            assert same_bits(got[name][slice(*part)], alone[name]), f"{name} of sequence {b}"
        assert same_bits(got["lse"][:, slice(*rows)], alone["lse"]), f"lse of sequence {b}"
        slopes += alone["alibi_slopes"]
    torch.testing.assert_close(got["alibi_slopes"], slopes.to(got["alibi_slopes"].dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_leaks_between_sequences(dtype):
    lengths = PACKINGS["long and short"]
    x, y = (Packed(lengths, dtype) for _ in range(2))
    rows, keys = slice(*x.cu[0][1:3].tolist()), slice(*x.cu[1][1:3].tolist())
    for name, part in (("query", rows), ("key", keys), ("value", keys)):
        y.tensors[name][part] = torch.nan if name == "value" else 7.0
    y.grad_out[rows] = torch.inf
    a, b = x.run(mask=ta.Causal()), y.run(mask=ta.Causal())
    for name, part in (("out", rows), ("query", rows), ("key", keys), ("value", keys)):
        others = torch.ones(len(a[name]), dtype=torch.bool)
        others[part] = False
        assert same_bits(a[name][others], b[name][others]), name
        assert not same_bits(a[name][part], b[name][part]), name


@pytest.mark.parametrize("lengths", [([0, 1, 0, 1], [3, 3, 0, 5]), ([0, 0, 0, 1], [0, 0, 0, 1]), ([2, 0, 4], [2, 5, 0])], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_empty_sequences(lengths, dtype):
    x = Packed(lengths, dtype, head_dim=8, head_dim_v=8, sinks=True)
    with poisoned_memory():
        got = x.run(mask=ta.Causal())
    check_accuracy(x, got, mask=ta.Causal())
    for n, begin, end in zip(x.rows, x.cu[1], x.cu[1][1:], strict=False):
        assert n > 0 or ((got["key"][begin:end] == 0).all() and (got["value"][begin:end] == 0).all())


@pytest.mark.parametrize("shape", [(0, 0, 3), (0, 4, 3), (4, 0, 3), (4, 4, 0)], ids=str)
def test_empty_tensors(shape):
    rows, keys, head_dim = shape
    x = Packed(([rows], [keys]), head_dim=head_dim, sinks=True)
    check_accuracy(x, x.run())


def test_no_sequences():
    x = Packed(([0], [0]))
    x.cu = offsets([]), offsets([])
    assert x.run()["out"].shape == (0, 4, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_is_that_of_the_padded_batch(dtype):
    x = Packed(([5, 0, 33, 7], [9, 2, 41, 6]), dtype)
    torch.manual_seed(3)
    got = x.run(mask=ta.Causal(), dropout_p=0.4)
    torch.manual_seed(3)
    kept = ta.dropout_mask(4, 4, *x.longest, 0.4)
    check_accuracy(x, got, dropout_mask=kept, mask=ta.Causal(), dropout_p=0.4)
    torch.manual_seed(3)
    with torch.no_grad():
        assert same_bits(x.call(mask=ta.Causal(), dropout_p=0.4)[0], got["out"])


@pytest.mark.parametrize("layout", ["heads_last", "dim_first", "strided", "gapped", "offset", "negated", "rows_expanded"])
def test_strides(layout):
    x = Packed(PACKINGS["around tiles"])
    for name in ("query", "key", "value"):
        x.tensors[name] = lay_out(x.tensors[name].transpose(0, 1), layout).transpose(0, 1)
    x.grad_out = lay_out(x.grad_out, "strided")
    check_accuracy(x, x.run(mask=ta.Causal()), mask=ta.Causal())


def test_offsets_of_32_bits_and_larger_maxima():
    x = Packed(PACKINGS["around tiles"])
    want = x.call(mask=ta.Causal())
    x.cu = tuple(cu.int() for cu in x.cu)
    x.longest = (1000, 70_000)
    for a, b in zip(x.call(mask=ta.Causal()), want, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("lengths", [([300, 5, 0, 70], [300, 9, 4, 70]), ([40] * 9, [40] * 9)], ids=["uneven", "even"])
def test_same_bits_for_every_number_of_threads(lengths, threads):
    x = Packed(lengths, slopes=True, sinks=True)
    torch.set_num_threads(1)
    want = x.run(mask=ta.Causal())
    torch.set_num_threads(threads)
    for name, tensor in x.run(mask=ta.Causal()).items():
        assert same_bits(tensor, want[name]), name


def test_every_instruction_set(isa):
    for dtype in DTYPES:
        x = Packed(PACKINGS["long and short"], dtype, slopes=True, sinks=True)
        check_accuracy(x, x.run(mask=STREAMING), mask=STREAMING)


def test_numpy():
    x = Packed(PACKINGS["around tiles"], F64, heads=2, heads_kv=2)
    want = ta.numpy_reference.attention_varlen(*(t.numpy() for t in (*x.tensors.values(), *x.cu)), causal=True)
    np.testing.assert_allclose(x.call(mask=ta.Causal())[0].numpy(), want, rtol=1e-10, atol=1e-12)


DERIVED = {
    "plain": dict(),
    "causal": dict(mask=ta.Causal()),
    "lengths": dict(mask=ta.KeyLengths(torch.tensor([1, 1, 1])) & ta.SlidingWindow(1, 1)),
    "softcap, dropout": dict(softcap=2.0, scale=0.8, dropout_p=0.3),
}


def derived(options: dict, names: tuple[str, ...] = (), seeds: bool = True):
    def run(query, key, value, *others):
        if seeds:
            torch.manual_seed(1)
        given = dict(zip(names, others, strict=True))
        return ta.attention_varlen(query, key, value, offsets([2, 0, 1]), offsets([1, 1, 2]), 2, 2, return_lse=True, **options, **given)

    return run


def leaves(*extra: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=F64).requires_grad_() for shape in ((3, 2, 2), (4, 1, 2), (4, 1, 2), *extra)]


@pytest.mark.parametrize("options", DERIVED)
def test_gradcheck(options):
    run, inputs = derived(DERIVED[options], ("alibi_slopes", "sinks")), leaves((2,), (2,))
    assert gradcheck(run, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(run, inputs, fast_mode=options != "causal")


def test_func_transforms():
    run, inputs = derived(DERIVED["causal"]), [x.detach() for x in leaves()]
    want = torch.autograd.functional.jacobian(lambda q: run(q, *inputs[1:])[0].sum(), inputs[0])
    torch.testing.assert_close(torch.func.grad(lambda q: run(q, *inputs[1:])[0].sum())(inputs[0]), want)
    stacked = torch.randn(4, *inputs[0].shape, dtype=F64)
    mapped = torch.func.vmap(lambda q: run(q, *inputs[1:])[0])(stacked)
    torch.testing.assert_close(mapped, torch.stack([run(q, *inputs[1:])[0] for q in stacked]), rtol=0, atol=0)
    of_sum = lambda q: run(q, *inputs[1:])[0].square().sum()
    torch.testing.assert_close(torch.func.hessian(of_sum)(inputs[0]), torch.autograd.functional.hessian(of_sum, inputs[0]))


def test_opcheck():
    for dtype in (torch.float32, torch.bfloat16):
        x = Packed(([3, 0, 5], [4, 2, 5]), dtype, slopes=True, sinks=True)
        tensors = [t.requires_grad_(t.dim() == 3) for t in x.tensors.values()]
        tables = torch.randn(8, 4), torch.randn(11, 4)
        args = (*tensors[:3], *x.cu, *tensors[3:], None, None, None, None, *tables, *x.longest, 0.25, 2.0, 0.0, [], [], True)
        utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
        torch.library.opcheck(torch.ops.tiled_attention.attention_varlen.default, (*args, True), test_utils=utils)
        args = [a.detach() if isinstance(a, Tensor) else a for a in args]
        out, lse, residual = torch.ops.tiled_attention.attention_varlen_fwd(*args, True)
        torch.library.opcheck(torch.ops.tiled_attention.attention_varlen_fwd.default, (*args, True), test_utils=utils[:3])
        backward = (x.grad_out, None, *args, out, lse, residual, 0b11111)
        torch.library.opcheck(torch.ops.tiled_attention.attention_varlen_bwd.default, backward, test_utils=utils[:3])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile(backend):
    run, inputs = derived(DERIVED["softcap, dropout"], ("alibi_slopes", "sinks"), seeds=False), leaves((2,), (2,))
    results = []
    for call in (torch.compile(run, fullgraph=True, backend=backend), run):
        torch.manual_seed(1)
        out, lse = call(*inputs)
        results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), inputs)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_compile_with_other_lengths():
    run = lambda q, cu, n: ta.attention_varlen(q, q, q, cu, cu, n, n, mask=ta.Causal())
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([2, 3], [4, 1], [7, 7, 2]):
        q = torch.randn(sum(lengths), 2, 4)
        assert same_bits(compiled(q, offsets(lengths), max(lengths)), run(q, offsets(lengths), max(lengths)))


def test_flops_count_the_pairs_inside_sequences():
    from torch.utils.flop_counter import FlopCounterMode

    x = Packed(([3, 0, 5], [4, 2, 5]), head_dim=8, head_dim_v=6)
    x.tensors["query"].requires_grad_()
    with FlopCounterMode(display=False) as counter:
        out, _ = x.call()
        out.sum().backward()
    pairs = 4 * (3 * 4 + 5 * 5)
    assert counter.get_total_flops() == 2 * pairs * (8 + 6) + 2 * pairs * (3 * 8 + 2 * 6)


GOOD = offsets([2, 3])
BAD_OFFSETS = {
    "start": (GOOD + 1, "must start at 0, got 1"),
    "end": (torch.tensor([0, 2, 4]), "must end at total_(q|kv) \\(5\\), got 4"),
    "beyond": (torch.tensor([0, 2, 9]), "rows in sequence|must end"),
    "decreasing": (torch.tensor([0, 7, 5]), "must be at least|must not decrease"),
    "negative": (torch.tensor([0, -1, 5]), "must not decrease, got 0 before -1"),
    "too few": (GOOD[:-1], "cu_seqlens"),
    "reversed": (GOOD.flip(0), "must start at 0, got 5"),
    "float": (GOOD.float(), "int32 or int64 tensor, got torch.float32"),
    "int16": (GOOD.short(), "int32 or int64 tensor, got torch.int16"),
    "matrix": (GOOD[None], "shape \\(num_sequences \\+ 1,\\)"),
    "nothing": (GOOD[:0], "shape \\(num_sequences \\+ 1,\\)"),
    "list": ([0, 2, 5], "tensor, got list"),
}


@pytest.mark.parametrize("side", ["cu_seqlens_q", "cu_seqlens_kv"])
@pytest.mark.parametrize("bad", BAD_OFFSETS)
def test_bad_offsets(bad, side):
    query, (wrong, text) = torch.randn(5, 2, 8), BAD_OFFSETS[bad]
    given = {"cu_seqlens_q": GOOD, "cu_seqlens_kv": GOOD} | {side: wrong}
    with pytest.raises((ValueError, TypeError, RuntimeError), match="cu_seqlens") as raised:
        ta.attention_varlen(query, query, query, **given, max_seqlen_q=5, max_seqlen_kv=5)
    raised.match(text)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (dict(max_seqlen_q=2), RuntimeError, "max_seqlen_q must be at least the length of every sequence, got 2 and 3"),
        (dict(max_seqlen_kv=2), RuntimeError, "max_seqlen_kv must be at least"),
        (dict(max_seqlen_kv=-1), ValueError, "max_seqlen_kv must be an integer >= 0, got -1"),
        (dict(max_seqlen_q=3.0), TypeError, "max_seqlen_q must be an integer"),
        (dict(query=torch.randn(1, 5, 2, 8)), ValueError, "query must have shape"),
        (dict(query=torch.randn(5, 3, 8)), RuntimeError, "multiple of num_heads_kv"),
        (dict(key=torch.randn(5, 2, 7)), RuntimeError, "key must have the head_dim of query"),
        (dict(value=torch.randn(4, 2, 8)), RuntimeError, "value must have the total_kv"),
        (dict(value=torch.randn(5, 2, 8).double()), RuntimeError, "value must have the dtype of query"),
        (dict(mask=torch.ones(5, 5).bool()), TypeError, "mask must be a mask"),
        (dict(mask=ta.Causal() & torch.ones(5, 5).bool()), ValueError, "mask must be made of intervals"),
        (dict(mask=ta.KeyLengths(torch.tensor([1, 2, 3]))), ValueError, "lengths"),
        (dict(alibi_slopes=torch.ones(3)), ValueError, "alibi_slopes must have shape \\(2,\\)"),
        (dict(softcap=0.0), ValueError, "softcap"),
        (dict(dropout_p=1.5), ValueError, "dropout_p"),
        (dict(bias=torch.zeros(5)), TypeError, "bias"),
    ],
)
def test_bad_arguments(change, kind, text):
    x = torch.randn(5, 2, 8)
    given = dict(query=x, key=x, value=x, cu_seqlens_q=GOOD, cu_seqlens_kv=GOOD, max_seqlen_q=3, max_seqlen_kv=3)
    with pytest.raises(kind, match=text):
        ta.attention_varlen(**(given | change))


def nested(lengths: list[int], heads: int, dim: int, grad: bool = True) -> Tensor:
    parts = [torch.randn(n, heads, dim) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=grad)


@pytest.mark.parametrize("is_causal", [False, True])
def test_nested_tensors_run_packed(is_causal):
    leaves_of = [nested([3, 6, 1], 4, 8), nested([3, 6, 1], 2, 8), nested([3, 6, 1], 2, 8)]
    query, key, value = (x.transpose(1, 2) for x in leaves_of)
    out = ta.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
    assert out.is_nested and out.shape == query.shape
    grads = torch.autograd.grad(out.transpose(1, 2).values().square().sum(), leaves_of)
    plain = [x.detach().unbind() for x in leaves_of]
    for b in range(3):
        parts = [x[b].transpose(0, 1).double().requires_grad_() for x in plain]
        want = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=is_causal, enable_gqa=True)
        torch.testing.assert_close(out.unbind()[b].double(), want, rtol=1e-5, atol=1e-6)
        for got, exact in zip(grads, torch.autograd.grad(want.square().sum(), parts), strict=True):
            torch.testing.assert_close(got.unbind()[b].transpose(0, 1).double(), exact, rtol=1e-4, atol=1e-5)


def test_nested_tensors_of_other_lengths_on_both_sides():
    query, key = nested([3, 2], 2, 8, grad=False).transpose(1, 2), nested([5, 1], 2, 8, grad=False).transpose(1, 2)
    out = ta.scaled_dot_product_attention(query, key, key)
    for got, a, b in zip(out.unbind(), query.unbind(), key.unbind(), strict=True):
        torch.testing.assert_close(got, torch.nn.functional.scaled_dot_product_attention(a, b, b))
