"""Bad input: every argument, each error naming it with what was expected and what came."""

import math
import re

import pytest
import torch
from torch import Tensor

import tiled_attention as ta

ERRORS = (ValueError, TypeError, RuntimeError)
NAN, INF = math.nan, math.inf


def good(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """query (2, 4, 5, 8), key (2, 2, 7, 8), value (2, 2, 7, 6)"""
    return {
        "query": torch.randn(2, 4, 5, 8).to(dtype),
        "key": torch.randn(2, 2, 7, 8).to(dtype),
        "value": torch.randn(2, 2, 7, 6).to(dtype),
    }


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


# Argument to name, what is passed for which arguments, and words that the message must hold too.
BAD = {
    # Rank.
    "query of rank 2": ("query", {"query": zeros(5, 8)}, ["5, 8"]),
    "query of rank 0": ("query", {"query": zeros()}, []),
    "key of rank 3": ("key", {"key": zeros(2, 7, 8)}, ["2, 7, 8"]),
    "key of rank 5": ("key", {"key": zeros(1, 2, 2, 7, 8)}, ["1, 2, 2, 7, 8"]),
    "value of rank 3": ("value", {"value": zeros(2, 7, 8)}, ["2, 7, 8"]),
    "value of rank 2": ("value", {"value": zeros(7, 8)}, ["7, 8"]),
    # Kind of object.
    "query not a tensor": ("query", {"query": [[1.0]]}, ["list"]),
    "key not a tensor": ("key", {"key": None}, []),
    "value not a tensor": ("value", {"value": 3.0}, []),
    "mask not a mask": ("mask", {"mask": "causal"}, ["str"]),
    "mask a class": ("mask", {"mask": ta.Causal}, []),
    "mask a number": ("mask", {"mask": True}, ["bool"]),
    "bias a number": ("bias", {"bias": 1.0}, ["float"]),
    "bias a mask": ("bias", {"bias": ta.Causal()}, ["Causal"]),
    "sinks a number": ("sinks", {"sinks": 0.0}, ["float"]),
    "slopes a list": ("alibi_slopes", {"alibi_slopes": [1.0] * 4}, ["list"]),
    "scale a string": ("scale", {"scale": "1"}, ["1"]),
    "softcap a string": ("softcap", {"softcap": "1"}, ["1"]),
    "dropout_p a string": ("dropout_p", {"dropout_p": "0.1"}, ["0.1"]),
    "dropout_p None": ("dropout_p", {"dropout_p": None}, []),
    "generator a number": ("generator", {"generator": 3, "dropout_p": 0.1}, ["int"]),
    "query_offset a float": ("query_offset", {"query_offset": 1.5}, ["1.5"]),
    "query_offset a string": ("query_offset", {"query_offset": "1"}, []),
    # Dtype.
    "query of integers": ("query", {"query": zeros(2, 4, 5, 8, dtype=torch.int64)}, ["int64"]),
    "query complex": ("query", {"query": zeros(2, 4, 5, 8, dtype=torch.complex64)}, ["complex64"]),
    "query bool": ("query", {"query": zeros(2, 4, 5, 8, dtype=torch.bool)}, ["bool"]),
    "key of another dtype": ("key", {"key": zeros(2, 2, 7, 8, dtype=torch.float64)}, ["float64", "float32"]),
    "key of 16 bits": ("key", {"key": zeros(2, 2, 7, 8, dtype=torch.float16)}, ["float16", "float32"]),
    "value of another dtype": ("value", {"value": zeros(2, 2, 7, 6, dtype=torch.bfloat16)}, ["bfloat16", "float32"]),
    "value of integers": ("value", {"value": zeros(2, 2, 7, 6, dtype=torch.int32)}, ["int32"]),
    "mask of integers": ("mask", {"mask": zeros(5, 7, dtype=torch.int64)}, ["int64", "bool"]),
    "mask of bytes": ("mask", {"mask": zeros(5, 7, dtype=torch.uint8)}, ["uint8", "bool"]),
    "mask of floats": ("mask", {"mask": zeros(5, 7)}, ["float32", "bool"]),
    "mask complex": ("mask", {"mask": zeros(5, 7, dtype=torch.complex64)}, ["complex64"]),
    "bias bool": ("bias", {"bias": zeros(5, 7, dtype=torch.bool)}, ["bool"]),
    "bias of integers": ("bias", {"bias": zeros(5, 7, dtype=torch.int64)}, ["int64"]),
    "bias complex": ("bias", {"bias": zeros(5, 7, dtype=torch.complex64)}, ["complex64"]),
    "sinks of integers": ("sinks", {"sinks": zeros(4, dtype=torch.int64)}, ["int64"]),
    "slopes of integers": ("alibi_slopes", {"alibi_slopes": zeros(4, dtype=torch.int32)}, ["int32"]),
    "query_offset of floats": ("query_offset", {"query_offset": zeros(2)}, ["float32"]),
    # Device.
    "key on another device": ("key", {"key": zeros(2, 2, 7, 8, device="meta")}, ["meta", "cpu"]),
    "value on another device": ("value", {"value": zeros(2, 2, 7, 6, device="meta")}, ["meta", "cpu"]),
    "mask on another device": ("mask", {"mask": zeros(5, 7, dtype=torch.bool, device="meta")}, ["meta", "cpu"]),
    "bias on another device": ("bias", {"bias": zeros(5, 7, device="meta")}, ["meta", "cpu"]),
    "sinks on another device": ("sinks", {"sinks": zeros(4, device="meta")}, ["meta", "cpu"]),
    "slopes on another device": ("alibi_slopes", {"alibi_slopes": zeros(4, device="meta")}, ["meta", "cpu"]),
    "query_offset on another device": ("query_offset", {"query_offset": zeros(2, dtype=torch.int64, device="meta")}, ["meta", "cpu"]),
    "lengths on another device": ("lengths", {"mask": ta.KeyLengths(zeros(2, dtype=torch.int64, device="meta"))}, ["meta", "cpu"]),
    # Relations of shapes.
    "key of another batch": ("key", {"key": zeros(3, 2, 7, 8), "value": zeros(3, 2, 7, 6)}, ["3, 2, 7, 8"]),
    "key of batch 1": ("key", {"key": zeros(1, 2, 7, 8), "value": zeros(1, 2, 7, 6)}, ["1, 2, 7, 8"]),
    "value of another batch": ("value", {"value": zeros(1, 2, 7, 6)}, ["1, 2, 7, 6"]),
    "key of another head_dim": ("key", {"key": zeros(2, 2, 7, 9)}, ["2, 2, 7, 9"]),
    "key of head_dim 0": ("key", {"key": zeros(2, 2, 7, 0)}, ["2, 2, 7, 0"]),
    "value of another length": ("value", {"value": zeros(2, 2, 8, 6)}, ["2, 2, 8, 6"]),
    "value of other heads": ("value", {"value": zeros(2, 4, 7, 6)}, ["2, 4, 7, 6"]),
    "heads that do not divide": ("key", {"key": zeros(2, 3, 7, 8), "value": zeros(2, 3, 7, 6)}, ["4", "3"]),
    "more key heads than query heads": ("key", {"key": zeros(2, 8, 7, 8), "value": zeros(2, 8, 7, 6)}, ["4", "8"]),
    "no key heads": ("key", {"key": zeros(2, 0, 7, 8), "value": zeros(2, 0, 7, 6)}, ["4", "0"]),
    "mask too long": ("mask", {"mask": zeros(5, 8, dtype=torch.bool)}, ["5, 8", "5, 7"]),
    "mask of wrong heads": ("mask", {"mask": zeros(2, 5, 7, dtype=torch.bool)}, ["2, 5, 7", "2, 4, 5, 7"]),
    "mask of too many dimensions": ("mask", {"mask": zeros(1, 2, 4, 5, 7, dtype=torch.bool)}, ["1, 2, 4, 5, 7"]),
    "mask inside an expression": ("mask", {"mask": ta.Causal() & zeros(5, 8, dtype=torch.bool)}, ["5, 8"]),
    "bias too long": ("bias", {"bias": zeros(5, 8)}, ["5, 8", "5, 7"]),
    "bias of wrong heads": ("bias", {"bias": zeros(2, 1, 7)}, ["2, 1, 7"]),
    "bias of too many dimensions": ("bias", {"bias": zeros(1, 2, 4, 5, 7)}, ["1, 2, 4, 5, 7"]),
    "sinks too short": ("sinks", {"sinks": zeros(2)}, ["4", "2"]),
    "sinks of one": ("sinks", {"sinks": zeros(1)}, ["4", "1"]),
    "sinks of rank 2": ("sinks", {"sinks": zeros(1, 4)}, ["1, 4"]),
    "sinks of rank 0": ("sinks", {"sinks": zeros()}, []),
    "slopes too long": ("alibi_slopes", {"alibi_slopes": zeros(5)}, ["4", "5"]),
    "slopes of rank 2": ("alibi_slopes", {"alibi_slopes": zeros(4, 1)}, ["4, 1"]),
    "slopes of rank 0": ("alibi_slopes", {"alibi_slopes": zeros()}, []),
    "query_offset of another batch": ("query_offset", {"query_offset": zeros(3, dtype=torch.int64)}, ["3", "2"]),
    "query_offset of rank 2": ("query_offset", {"query_offset": zeros(2, 1, dtype=torch.int64)}, ["2, 1"]),
    "lengths of another batch": ("lengths", {"mask": ta.KeyLengths(zeros(3, dtype=torch.int64))}, ["3", "2"]),
    # Numbers.
    "dropout_p negative": ("dropout_p", {"dropout_p": -0.1}, ["-0.1"]),
    "dropout_p above 1": ("dropout_p", {"dropout_p": 1.1}, ["1.1"]),
    "dropout_p NaN": ("dropout_p", {"dropout_p": NAN}, ["nan"]),
    "dropout_p infinite": ("dropout_p", {"dropout_p": INF}, ["inf"]),
    "scale NaN": ("scale", {"scale": NAN}, ["nan"]),
    "softcap zero": ("softcap", {"softcap": 0.0}, ["0"]),
    "softcap negative": ("softcap", {"softcap": -1.0}, ["-1"]),
    "softcap NaN": ("softcap", {"softcap": NAN}, ["nan"]),
}


@pytest.mark.parametrize("grad", (False, True), ids=("no_grad", "grad"))
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(name: str, grad: bool):
    argument, changes, words = BAD[name]
    arguments = {**good(), **changes}
    if grad:
        for tensor in ("query", "key", "value", "bias", "sinks", "alibi_slopes"):
            if isinstance(arguments.get(tensor), Tensor) and arguments[tensor].is_floating_point():
                arguments[tensor] = arguments[tensor].detach().requires_grad_()
    with pytest.raises(ERRORS) as caught:
        ta.attention(**arguments)
    message = str(caught.value).replace("[", "(").replace("]", ")")
    for word in (argument, *words):
        assert word in message, f"{word!r} is not in {message!r}"
    assert re.search("expected|must|does not broadcast to", message), f"what was expected is not in {message!r}"


REFUSED_BY_BOTH = (
    "query of integers",
    "key of another dtype",
    "value of another dtype",
    "key on another device",
    "key of another head_dim",
    "value of another length",
    "dropout_p negative",
    "dropout_p NaN",
    "key not a tensor",
)


@pytest.mark.parametrize("name", REFUSED_BY_BOTH)
def test_the_drop_in_refuses_it_too(name: str):
    argument, changes, _ = BAD[name]
    arguments = {**good(), **changes}
    query, key, value = (arguments.pop(tensor) for tensor in ("query", "key", "value"))
    with pytest.raises(ERRORS, match=argument):
        ta.scaled_dot_product_attention(query, key, value, **arguments, enable_gqa=True)


def test_missing_and_unknown_arguments():
    x = good()
    with pytest.raises(TypeError, match="value"):
        ta.attention(x["query"], x["key"])
    with pytest.raises(TypeError, match="is_causal"):
        ta.attention(*x.values(), is_causal=True)
    with pytest.raises(TypeError, match="positional"):
        ta.attention(*x.values(), ta.Causal())


LEGAL = (
    {"scale": 0},
    {"scale": -1},
    {"softcap": 1},
    {"dropout_p": 0},
    {"dropout_p": 1},
    {"query_offset": 0},
    {"query_offset": -100},
    {"query_offset": torch.tensor([0, 3], dtype=torch.int32)},
    {"mask": torch.zeros(1, dtype=torch.bool)},
    {"mask": ta.KeyLengths(torch.tensor([0, 100], dtype=torch.int32))},
    {"mask": ta.KeyLengths(torch.tensor([3]))},
    {"bias": torch.zeros((), dtype=torch.float64)},
    {"bias": torch.zeros(7, dtype=torch.float16)},
    {"sinks": torch.zeros(4, dtype=torch.float16)},
    {"alibi_slopes": torch.zeros(4, dtype=torch.float64)},
    {"alibi_slopes": torch.zeros(8)[::2]},
    {"generator": torch.Generator()},
)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_what_looks_odd_and_is_legal(dtype: torch.dtype):
    x = good(dtype)
    for options in LEGAL:
        assert ta.attention(**x, **options).isfinite().all()


def test_an_error_leaves_nothing_behind():
    x = good()
    want = ta.attention(**x)
    state = torch.get_rng_state()
    for name in ("mask too long", "dropout_p NaN", "key of another dtype"):
        with pytest.raises(ERRORS):
            ta.attention(**{**x, **BAD[name][1]})
    assert torch.equal(ta.attention(**x), want) and torch.equal(torch.get_rng_state(), state)
