"""The operator of rotary positions, against its formula in float64."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tiled_attention.library import ops
from tiled_attention.rotate import rotate

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# (shape of rows, rotary_dim): whole vectors, ragged ones, partial rotation, nothing to rotate, empty.
SHAPES = [
    ((2, 3, 5, 64), 64),
    ((1, 2, 33, 40), 40),
    ((3, 7, 6), 2),
    ((2, 2, 4, 70), 30),
    ((1, 1, 3, 8), 0),
    ((2, 0, 3, 4), 4),
    ((1, 2, 3, 0), 0),
]


def definition(rows: Tensor, table: Tensor, interleaved: bool, transposed: bool) -> Tensor:
    half = table.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:] * (-1 if transposed else 1)
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    result = rows.clone()
    result[..., first] = rows[..., first] * cos - rows[..., second] * sin
    result[..., second] = rows[..., second] * cos + rows[..., first] * sin
    return result


def make(shape: Any, rotary_dim: int, dtype: torch.dtype, table_shape: Any = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    table = torch.randn((*(table_shape or (shape[-2],)), rotary_dim), generator=generator, dtype=torch.float64).to(real)
    return rows, table


def assert_rounded(got: Tensor, want: Tensor) -> None:
    """Within the rounding of two products and their sum."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2 * eps * max(1.0, want.abs().amax().item() if want.numel() else 0.0))


@pytest.mark.parametrize(("shape", "rotary_dim"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("interleaved", [False, True])
def test_equals_its_formula(shape: Any, rotary_dim: int, dtype: torch.dtype, interleaved: bool, isa: str) -> None:
    rows, table = make(shape, rotary_dim, dtype)
    for transposed in (False, True):
        got = rotate(rows, table, interleaved, transposed)
        assert got.dtype == dtype and got.stride() == torch.empty_like(rows).stride()
        assert_rounded(got, definition(rows.double(), table.double(), interleaved, transposed))


@pytest.mark.parametrize("interleaved", [False, True])
def test_any_strides_and_tables_per_batch_item(interleaved: bool) -> None:
    rows, table = make((2, 5, 3, 24), 16, torch.float32, table_shape=(2, 1, 5))
    want = definition(rows.transpose(1, 2).double(), table.double(), interleaved, False)
    for tensor in (rows.transpose(1, 2), rows.transpose(1, 2).flip(-1).flip(-1), rows.mT.contiguous().mT.transpose(1, 2)):
        for given in (table, table.mT.contiguous().mT):
            assert_rounded(rotate(tensor, given, interleaved), want)
    assert rotate(rows.transpose(1, 2), table).stride() == rows.transpose(1, 2).stride()


def test_threads_do_not_change_bits() -> None:
    rows, table = make((2, 4, 130, 64), 64, torch.float32)
    want = rotate(rows, table)
    threads = torch.get_num_threads()
    try:
        for count in (2, 3, 7):
            torch.set_num_threads(count)
            assert torch.equal(rotate(rows, table), want)
    finally:
        torch.set_num_threads(threads)


def test_derivatives() -> None:
    for shape, interleaved in product(((2, 2, 3, 6), (2, 3, 7)), (False, True)):
        rows, table = make(shape, 4, torch.float64)
        rows.requires_grad_()
        call = lambda x, table=table, interleaved=interleaved: rotate(x, table, interleaved)
        torch.autograd.gradcheck(call, rows, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
        torch.autograd.gradgradcheck(call, rows, check_fwd_over_rev=True)


def test_vmap() -> None:
    rows, table = make((3, 2, 2, 5, 6), 4, torch.float32, table_shape=(3, 5))
    got = torch.func.vmap(rotate)(rows, table)
    assert torch.equal(got, torch.stack([rotate(r, t) for r, t in zip(rows, table)]))
    assert torch.equal(torch.func.vmap(rotate, (None, 0))(rows[0], table), torch.stack([rotate(rows[0], t) for t in table]))
    assert torch.equal(torch.func.vmap(rotate, (1, None), 1)(rows, table[0]), rotate(rows, table[0]))


def test_operator() -> None:
    for dtype, interleaved in product((torch.float32, torch.bfloat16), (False, True)):
        rows, table = make((2, 3, 4, 10), 6, dtype)
        torch.library.opcheck(ops.rotate.default, (rows.transpose(0, 1), table, interleaved, False))
        torch.library.opcheck(ops.rotate.default, (rows.requires_grad_(), table, interleaved, True))


def test_compiles_with_its_gradient() -> None:
    rows, table = make((2, 2, 5, 8), 8, torch.float32)
    rows.requires_grad_()
    compiled = torch.compile(lambda x, t: rotate(x, t).square().sum(), fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(rows, table), rows)
    (want,) = torch.autograd.grad(rotate(rows, table).square().sum(), rows)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("rows", "table", "says"),
    [
        (torch.zeros(3, 4), torch.zeros(3, 4), "rows must have shape"),
        (torch.zeros(1, 3, 4), torch.zeros(3, 3), "table must have an even number of columns, at most head_dim"),
        (torch.zeros(1, 3, 4), torch.zeros(3, 6), "table must have an even number of columns, at most head_dim"),
        (torch.zeros(1, 3, 4), torch.zeros(2, 4), "table of shape .* does not broadcast to"),
        (torch.zeros(1, 3, 4), torch.zeros(3, 4, dtype=torch.float64), "table must be float32"),
        (torch.zeros(1, 3, 4, dtype=torch.int64), torch.zeros(3, 4), "rows must be float32"),
        (torch.zeros(1, 3, 4, requires_grad=True), torch.zeros(3, 4, requires_grad=True), "table must not require grad"),
    ],
)
def test_errors(rows: Tensor, table: Tensor, says: str) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError), match=says):
        rotate(rows, table)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=says):
        rotate(rows.to("meta"), table.to("meta"))
