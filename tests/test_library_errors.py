"""What the raw operators refuse: each message names the argument, what was expected and what came, and the interpreter lives on."""

import math

import pytest
import torch
from torch import Tensor

from test_library import CAUSAL, attention_arguments, backward, forward, inputs
from tiled_attention.library import ops

INT64_MAX = (1 << 63) - 1


def interval(index: int, number: int) -> list[int]:
    return [*CAUSAL[:index], number, *CAUSAL[index + 1 :]]


def shrunk(*sizes: int, nbytes: int = 0) -> Tensor:
    """A tensor whose storage was taken away."""
    tensor = torch.randn(sizes)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


ROWS, TILES, BITS = torch.tensor([[0, 1]]).int(), torch.tensor([[0, 0]]).int(), torch.ones(1, 64, dtype=torch.int64)


def blocks(**change: torch.Tensor) -> dict[str, torch.Tensor]:
    """A block list of one partial tile, but for `change`."""
    return {"block_rows": ROWS, "block_tiles": TILES, "block_bits": BITS} | change


TABLE = torch.randn(5, 4)


def tables(**change: torch.Tensor) -> dict[str, torch.Tensor]:
    """Those of rotary positions, for 5 queries and 7 keys, but for `change`."""
    return {"query_table": TABLE, "key_table": torch.randn(7, 4)} | change


FORWARD_ERRORS = {
    "query_none": ({"query": None}, r"query must be a tensor, got None"),
    "query_rank": ({"query": torch.randn(5, 8)}, r"query must have shape \(\.\.\., num_heads, seqlen_q, head_dim\), got \(5, 8\)"),
    "query_dtype": ({"query": torch.ones(2, 4, 5, 8, dtype=torch.int32)}, r"query must be float32, .* got int32"),
    "query_complex": ({"query": torch.ones(2, 4, 5, 8, dtype=torch.complex64)}, r"query must be float32, .* got complex64"),
    "query_meta": ({"query": torch.empty(2, 4, 5, 8, device="meta")}, r"(?i)meta"),
    "query_sparse": ({"query": torch.zeros(2, 4, 5, 8).to_sparse()}, r"(?i)sparse"),
    "query_long": ({"query": torch.zeros(1).expand(2, 4, 1 << 31, 8)}, r"seqlen_q of query must be in \[0, 2147479552\), got 2147483648"),
    "head_dim_v_long": ({"value": torch.zeros(1).expand(2, 2, 7, 1 << 32)}, r"head_dim_v of value must be at most 1048576, got 4294967296"),
    "query_storage": ({"query": shrunk(2, 4, 5, 8)}, r"query of shape \(2, 4, 5, 8\) reaches beyond its storage of 0 elements"),
    "key_none": ({"key": None}, r"key must be a tensor, got None"),
    "key_rank": (
        {"key": torch.randn(2, 7, 8)},
        r"key must have the leading dimensions of query, of shape \(2, 4, 5, 8\), got shape \(2, 7, 8\)",
    ),
    "key_leading": ({"key": torch.randn(3, 2, 7, 8)}, r"key must have the leading dimensions of query, .* got shape \(3, 2, 7, 8\)"),
    "key_dtype": ({"key": torch.randn(2, 2, 7, 8).bfloat16()}, r"key must have the dtype of query \(float32\), got bfloat16"),
    "key_head_dim": ({"key": torch.randn(2, 2, 7, 9)}, r"key must have the head_dim of query \(8\), got shape \(2, 2, 7, 9\)"),
    "key_heads": ({"key": torch.randn(2, 3, 7, 8), "value": torch.randn(2, 3, 7, 8)}, r"multiple of num_heads_kv of key, got 4 and 3"),
    "key_no_heads": ({"key": torch.randn(2, 0, 7, 8), "value": torch.randn(2, 0, 7, 8)}, r"multiple of num_heads_kv of key, got 4 and 0"),
    "key_storage": ({"key": shrunk(2, 2, 7, 8, nbytes=890)}, r"key of shape \(2, 2, 7, 8\) reaches beyond its storage of 222 elements"),
    "value_none": ({"value": None}, r"value must be a tensor, got None"),
    "value_seqlen": (
        {"value": torch.randn(2, 2, 6, 8)},
        r"value must have the num_heads_kv and seqlen_kv of key, .* got shape \(2, 2, 6, 8\)",
    ),
    "value_heads": (
        {"value": torch.randn(2, 1, 7, 8)},
        r"value must have the num_heads_kv and seqlen_kv of key, .* got shape \(2, 1, 7, 8\)",
    ),
    "value_dtype": ({"value": torch.randn(2, 2, 7, 8).double()}, r"value must have the dtype of query \(float32\), got float64"),
    "mask_shape": ({"mask": torch.ones(5, 9).bool()}, r"mask of shape \(5, 9\) does not broadcast to \(2, 4, 5, 7\)"),
    "mask_rank": ({"mask": torch.ones(1, 2, 4, 5, 7).bool()}, r"mask of shape \(1, 2, 4, 5, 7\) does not broadcast to \(2, 4, 5, 7\)"),
    "mask_dtype": ({"mask": torch.ones(5, 7, dtype=torch.uint8)}, r"mask must be bool, got uint8"),
    "bias_shape": ({"bias": torch.zeros(3, 5, 7)}, r"bias of shape \(3, 5, 7\) does not broadcast to \(2, 4, 5, 7\)"),
    "bias_dtype": (
        {"bias": torch.zeros(5, 7).double()},
        r"bias must be float32, bfloat16 or float16 beside a query of float32, got float64",
    ),
    "slopes_shape": ({"alibi_slopes": torch.zeros(3)}, r"alibi_slopes must have shape \(4,\), got \(3,\)"),
    "slopes_dtype": ({"alibi_slopes": torch.zeros(4).half()}, r"alibi_slopes must be float32, got float16"),
    "sinks_shape": ({"sinks": torch.zeros(4, 1)}, r"sinks must have shape \(4,\), got \(4, 1\)"),
    "sinks_dtype": ({"sinks": torch.zeros(4).double()}, r"sinks must be float32, got float64"),
    "lengths_shape": ({"key_lengths": torch.tensor([1, 2, 3])}, r"key_lengths must have shape \(2,\), got \(3,\)"),
    "lengths_dtype": ({"key_lengths": torch.tensor([1, 2]).int()}, r"key_lengths must be int64, got int32"),
    "documents_shape": ({"documents": torch.zeros(0, dtype=torch.int64)}, r"documents must have shape \(num_documents \+ 1,\), got \(0,\)"),
    "documents_rank": ({"documents": torch.tensor(3)}, r"documents must have shape \(num_documents \+ 1,\), got \(\)"),
    "documents_dtype": ({"documents": torch.tensor([0.0, 7.0])}, r"documents must be int64, got float32"),
    "documents_order": ({"documents": torch.tensor([0, 5, 4])}, r"documents must not decrease, got 5 before 4 at 1"),
    "documents_start": ({"documents": torch.tensor([-1, 5])}, r"documents must start at 0 or above, got -1"),
    "offset_shape": ({"query_offset": torch.tensor([[1, 2]])}, r"query_offset must have shape \(2,\), got \(1, 2\)"),
    "offset_range": (
        {"query_offset": torch.tensor([0, INT64_MAX])},
        r"query_offset must be within 2\^40 of 0, got 9223372036854775807 at 1",
    ),
    "tables_some": ({"query_table": TABLE}, r"query_table and key_table must be given together, got only query_table"),
    "table_dtype": (tables(query_table=TABLE.double()), r"query_table must be float32, got float64"),
    "table_odd": (
        tables(query_table=TABLE[:, :3]),
        r"query_table must have an even number of columns, at most head_dim \(8\), got \(5, 3\)",
    ),
    "table_wide": (
        tables(key_table=torch.randn(7, 10)),
        r"key_table must have an even number of columns, at most head_dim \(8\), got \(7, 10\)",
    ),
    "table_rank": (tables(query_table=TABLE[0]), r"query_table must have an even number of columns, .* got \(4,\)"),
    "table_rows": (tables(key_table=TABLE), r"key_table of shape \(5, 4\) does not broadcast to \(2, 2, 7, 4\)"),
    "table_columns": (tables(key_table=torch.randn(7, 6)), r"key_table must have the columns of query_table \(4\), got \(7, 6\)"),
    "table_storage": (tables(query_table=shrunk(5, 4)), r"query_table of shape \(5, 4\) reaches beyond its storage"),
    "blocks_some": ({"block_rows": ROWS, "block_tiles": TILES}, r"block_rows, block_tiles and block_bits must be given together"),
    "blocks_dtype": (blocks(block_rows=ROWS.long()), r"block_rows must be int32, got int64"),
    "blocks_bits_dtype": (blocks(block_bits=BITS.int()), r"block_bits must be int64, got int32"),
    "blocks_shape": (blocks(block_rows=ROWS.expand(3, 1, 2)), r"block_rows of shape \(3, 1, 2\) does not broadcast to \(2, 4, 1, 2\)"),
    "blocks_rows": (blocks(block_rows=torch.zeros(2, 2, dtype=torch.int32)), r"block_rows of shape \(2, 2\) does not broadcast"),
    "blocks_tiles": (blocks(block_tiles=TILES[:, :1]), r"block_tiles must have shape \(1, 2\), got \(1, 1\)"),
    "blocks_words": (blocks(block_bits=BITS[:, :7]), r"block_bits must have shape \(1, 64\), got \(1, 7\)"),
    "blocks_range": (blocks(block_rows=torch.tensor([[0, 2]]).int()), r"block_rows must hold ranges in \[0, 1\], got \[0, 2\) at 0"),
    "blocks_backwards": (blocks(block_rows=torch.tensor([[1, 0]]).int()), r"block_rows must hold ranges in \[0, 1\], got \[1, 0\) at 0"),
    "blocks_key_tile": (blocks(block_tiles=torch.tensor([[1, 0]]).int()), r"tiles of keys in \[0, 1\) .* below 1, got 1 and 0 at 0"),
    "blocks_place": (blocks(block_tiles=torch.tensor([[0, 1]]).int()), r"tiles of keys in \[0, 1\) .* below 1, got 0 and 1 at 0"),
    "seed_missing": ({"dropout_p": 0.5}, r"dropout_seed must be given when dropout_p > 0, got None"),
    "seed_shape": ({"dropout_seed": torch.tensor([1])}, r"dropout_seed must have shape \(\), got \(1,\)"),
    "seed_dtype": ({"dropout_seed": torch.tensor(1.0)}, r"dropout_seed must be int64, got float32"),
    "dropout_large": ({"dropout_p": 1.5}, r"dropout_p must be in \[0, 1\], got 1\.5"),
    "dropout_negative": ({"dropout_p": -0.1}, r"dropout_p must be in \[0, 1\], got -0\.1"),
    "dropout_nan": ({"dropout_p": math.nan}, r"dropout_p must be in \[0, 1\], got nan"),
    "scale_nan": ({"scale": math.nan}, r"scale must be finite, got nan"),
    "scale_inf": ({"scale": math.inf}, r"scale must be finite, got inf"),
    "softcap_negative": ({"softcap": -1.0}, r"softcap must be positive, or 0 for none, got -1"),
    "softcap_nan": ({"softcap": math.nan}, r"softcap must be finite, got nan"),
    "intervals_few": ({"intervals": [1, 2]}, r"intervals must have 0 or 10 numbers, got 2"),
    "intervals_many": ({"intervals": [1] * 1000}, r"intervals must have 0 or 10 numbers, got 1000"),
    "intervals_offset": ({"intervals": interval(0, INT64_MAX)}, r"intervals\[0\] \(query_offset\) must be in .*, got 9223372036854775807"),
    "intervals_window": ({"intervals": interval(1, -(1 << 41))}, r"intervals\[1\] \(window_left\) must be in"),
    "intervals_prefix": ({"intervals": interval(5, -2)}, r"intervals\[5\] \(prefix\) must be in \[-1, 1099511627776\], got -2"),
    "intervals_chunk": ({"intervals": interval(6, -1)}, r"intervals\[6\] \(chunk\) must be in \[0, 1099511627776\], got -1"),
    "intervals_sinks": ({"intervals": interval(8, -1)}, r"intervals\[8\] \(num_sinks\) must be in \[0, 1099511627776\], got -1"),
    "intervals_top_left": ({"intervals": interval(9, 2)}, r"intervals\[9\] \(top_left\) must be in \[0, 1\], got 2"),
    "offsets_count": ({"dropout_offsets": [1, 2, 3]}, r"dropout_offsets must have 0 or 4 numbers .*, got 3"),
    "offsets_range": ({"dropout_offsets": [0, 0, 0, -1]}, r"dropout_offsets\[3\] must be in \[0, 2\^32\), got -1"),
    "memory": (
        {name: torch.zeros(1).expand(1 << 30, 1 << 20, 32, 8) for name in ("query", "key", "value")},
        r"cannot allocate out of shape",
    ),
}


@pytest.mark.parametrize("change,message", FORWARD_ERRORS.values(), ids=FORWARD_ERRORS)
def test_forward(change: dict[str, object], message: str) -> None:
    query, key, value = inputs(2)
    # ValueError: from the rules for tensors without data.
    with pytest.raises((RuntimeError, ValueError), match=message):
        forward(**({"query": query, "key": key, "value": value} | change))


def test_float64_takes_no_float32_beside_it() -> None:
    tensors = inputs(2, dtype=torch.float64)
    for name, tensor in {"bias": torch.zeros(5, 7), "sinks": torch.zeros(4), "alibi_slopes": torch.zeros(4)}.items():
        with pytest.raises(RuntimeError, match=rf"{name} must be float64.*, got float32"):
            forward(*tensors, **{name: tensor})


def backward_arguments(**change: object) -> list[object]:
    query, key, value = inputs(2)
    out, lse, residual = forward(query, key, value)
    names = {"grad_out": out, "grad_lse": None, "out": out, "lse": lse, "residual": residual, "gradients": 7} | change
    before, after = [names["grad_out"], names["grad_lse"]], [names["out"], names["lse"], names["residual"], names["gradients"]]
    return [*before, *attention_arguments(query, key, value), *after]


BACKWARD_ERRORS = {
    "grad_out_shape": ({"grad_out": torch.zeros(2, 4, 5, 7)}, r"grad_out must have shape \(2, 4, 5, 8\), got \(2, 4, 5, 7\)"),
    "grad_out_dtype": ({"grad_out": torch.zeros(2, 4, 5, 8).half()}, r"grad_out must have the dtype of query \(float32\), got float16"),
    "out_shape": ({"out": torch.zeros(2, 4, 5)}, r"out must have shape \(2, 4, 5, 8\), got \(2, 4, 5\)"),
    "out_none": ({"out": None}, r"out must be a tensor, got None"),
    "lse_shape": ({"lse": torch.zeros(2, 4)}, r"lse must have shape \(2, 4, 5\), got \(2, 4\)"),
    "lse_dtype": ({"lse": torch.zeros(2, 4, 5).double()}, r"lse must be float32, got float64"),
    "grad_lse_shape": ({"grad_lse": torch.zeros(2, 4, 5, 1)}, r"grad_lse must have shape \(2, 4, 5\), got \(2, 4, 5, 1\)"),
    "residual_shape": ({"residual": torch.zeros(3)}, r"residual must have shape \(2, 4, 5, 8\), got \(3,\)"),
    "residual_float32": ({"residual": torch.zeros(2, 4, 5, 8)}, r"residual must have shape \(0,\) beside a query of float32"),
    "gradients_high": ({"gradients": 64}, r"gradients must be in \[0, 64\), got 64"),
    "gradients_negative": ({"gradients": -1}, r"gradients must be in \[0, 64\), got -1"),
    "gradients_bias": ({"gradients": 8}, r"gradients asks for grad_bias, which needs bias, got None"),
    "gradients_slopes": ({"gradients": 16}, r"gradients asks for grad_alibi_slopes, which needs alibi_slopes, got None"),
    "gradients_sinks": ({"gradients": 32}, r"gradients asks for grad_sinks, which needs sinks, got None"),
}


@pytest.mark.parametrize("change,message", BACKWARD_ERRORS.values(), ids=BACKWARD_ERRORS)
def test_backward(change: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.attention_bwd(*backward_arguments(**change))


def test_what_is_not_wanted_is_empty() -> None:
    options = {"bias": torch.randn(5, 7), "alibi_slopes": torch.rand(4), "sinks": torch.randn(4)}
    tensors = inputs(2)
    shapes = [*(x.shape for x in tensors), (5, 7), (4,), (4,)]
    everything = backward(*tensors, gradients=63, **options)
    for bit in range(6):
        for i, grad in enumerate(backward(*tensors, gradients=1 << bit, **options)):
            assert grad.shape == (shapes[i] if i == bit else (0,))
            assert i != bit or torch.equal(grad, everything[i])


def test_expanded_gradients_are_read_as_they_lie() -> None:
    tensors = inputs(2)
    out, lse, residual = forward(*tensors)
    ones = torch.ones(()).expand(out.shape), torch.ones(()).expand(lse.shape)
    dense = [x.contiguous() for x in ones]
    arguments = [*attention_arguments(*tensors), out, lse, residual, 7]
    for a, b in zip(ops.attention_bwd(*ones, *arguments), ops.attention_bwd(*dense, *arguments), strict=True):
        assert torch.equal(a, b)


WEIGHTS_ERRORS = {
    "rows_dtype": ({"rows": torch.tensor([0]).int()}, r"rows must be int64, got int32"),
    "rows_shape": ({"rows": torch.tensor(0)}, r"rows must have shape \(num_rows,\), got \(\)"),
    "rows_high": ({"rows": torch.tensor([0, 5])}, r"rows must be in \[0, seqlen_q = 5\), got 5 at 1"),
    "rows_negative": ({"rows": torch.tensor([-1])}, r"rows must be in \[0, seqlen_q = 5\), got -1 at 0"),
    "lse_shape": ({"lse": torch.zeros(2, 4, 4)}, r"lse must have shape \(2, 4, 5\), got \(2, 4, 4\)"),
}


@pytest.mark.parametrize("change,message", WEIGHTS_ERRORS.values(), ids=WEIGHTS_ERRORS)
def test_weights(change: dict[str, object], message: str) -> None:
    query, key, _ = inputs(2)
    names = {"lse": torch.zeros(2, 4, 5), "rows": None} | change
    with pytest.raises(RuntimeError, match=message):
        ops.attention_weights(query, key, *[None] * 12, 0.5, 0.0, 0.0, [], [], False, False, names["lse"], names["rows"], False)


def test_dropout_mask_and_mask_dense() -> None:
    seed = torch.tensor(1)
    with pytest.raises(RuntimeError, match=r"num_heads must not be negative, got -1"):
        ops.dropout_mask(seed, 0.5, 2, -1, 3, 4, [])
    with pytest.raises(RuntimeError, match=r"more than 2\^63 elements"):
        ops.dropout_mask(seed, 0.5, 1 << 40, 1 << 40, 3, 4, [])
    with pytest.raises(RuntimeError, match=r"cannot allocate the dropout mask of shape \(1048576, 1048576, 3, 4\)"):
        ops.dropout_mask(seed, 0.5, 1 << 20, 1 << 20, 3, 4, [])
    with pytest.raises(RuntimeError, match=r"dropout_p must be in \[0, 1\], got 2"):
        ops.dropout_mask(seed, 2.0, 1, 1, 3, 4, [])
    with pytest.raises(RuntimeError, match=r"seqlen_kv must be in \[0, 2147479552\), got 2147483648"):
        ops._mask_dense(CAUSAL, None, None, None, 1, 3, 1 << 31)
    with pytest.raises(RuntimeError, match=r"key_lengths must have shape \(2,\), got \(1,\)"):
        ops._mask_dense(CAUSAL, torch.tensor([1]), None, None, 2, 3, 4)
