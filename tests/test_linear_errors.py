"""Bad input to linear attention: every argument, each error naming it with what was expected and what came."""

import math
import re

import pytest
import torch
from torch import Tensor

import tiled_attention as ta

ERRORS = (ValueError, TypeError, RuntimeError)
NAN, INF = math.nan, math.inf


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def good(dtype: torch.dtype = torch.float32, n: int = 5) -> dict[str, Tensor]:
    """query (2, 4, n, 8), key (2, 2, n, 8), value (2, 2, n, 6)"""
    shapes = {"query": (2, 4, n, 8), "key": (2, 2, n, 8), "value": (2, 2, n, 6)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def state_of(*lead: int, dim: int = 8, dim_v: int = 6, dtype: torch.dtype = torch.float32, device: str = "cpu") -> ta.LinearState:
    return ta.LinearState(zeros(*lead, dim, dim_v, dtype=dtype, device=device), zeros(*lead, dim, dtype=dtype, device=device))


STATE = state_of(2, 2)

# Argument to name, what is passed for which arguments, and words that the message must hold too.
INPUTS = {
    "query of rank 2": ("query", {"query": zeros(5, 8)}, ["5, 8"]),
    "query of rank 0": ("query", {"query": zeros()}, []),
    "key of rank 3": ("key", {"key": zeros(2, 5, 8)}, ["2, 5, 8"]),
    "value of rank 3": ("value", {"value": zeros(2, 5, 6)}, ["2, 5, 6"]),
    "query not a tensor": ("query", {"query": [[1.0]]}, ["list"]),
    "key not a tensor": ("key", {"key": None}, ["None"]),
    "value not a tensor": ("value", {"value": 3.0}, ["float"]),
    "query of integers": ("query", {"query": zeros(2, 4, 5, 8, dtype=torch.int64)}, ["int64"]),
    "query complex": ("query", {"query": zeros(2, 4, 5, 8, dtype=torch.complex64)}, ["complex64"]),
    "key of another dtype": ("key", {"key": zeros(2, 2, 5, 8, dtype=torch.float64)}, ["float64", "float32"]),
    "value of another dtype": ("value", {"value": zeros(2, 2, 5, 6, dtype=torch.bfloat16)}, ["bfloat16", "float32"]),
    "key on another device": ("key", {"key": zeros(2, 2, 5, 8, device="meta")}, ["meta", "cpu"]),
    "value on another device": ("value", {"value": zeros(2, 2, 5, 6, device="meta")}, ["meta", "cpu"]),
    "key of another batch": ("key", {"key": zeros(1, 2, 5, 8)}, ["1, 2, 5, 8"]),
    "key of another head_dim": ("key", {"key": zeros(2, 2, 5, 9)}, ["2, 2, 5, 9"]),
    "value of another length": ("value", {"value": zeros(2, 2, 6, 6)}, ["2, 2, 6, 6"]),
    "heads that do not divide": ("key", {"key": zeros(2, 3, 5, 8), "value": zeros(2, 3, 5, 6)}, ["4", "3"]),
    "no key heads": ("key", {"key": zeros(2, 0, 5, 8), "value": zeros(2, 0, 5, 6)}, ["4", "0"]),
}
OPTIONS = {
    "normalize a number": ("normalize", {"normalize": 1}, ["1"]),
    "scale a string": ("scale", {"scale": "1"}, ["1"]),
    "scale NaN": ("scale", {"scale": NAN, "normalize": False}, ["nan"]),
    "scale infinite": ("scale", {"scale": INF}, ["inf"]),
    "unknown map": ("feature_map", {"feature_map": "gelu"}, ["gelu", "elu, relu"]),
    "map a number": ("feature_map", {"feature_map": 2}, ["int"]),
    "map None": ("feature_map", {"feature_map": None}, ["None"]),
    "three maps": ("feature_map", {"feature_map": ("elu", "elu", "elu")}, ["3"]),
    "unknown map of a pair": ("feature_map", {"feature_map": ("elu", "tanh")}, ["tanh"]),
    "map that changes the length": ("feature_map", {"feature_map": lambda x: x.repeat_interleave(2, -2)}, ["query", "10"]),
    "map that drops dimensions": ("feature_map", {"feature_map": ("elu", lambda x: x.sum(-1))}, ["key", "2, 2, 5"]),
    "map that narrows the dtype": ("feature_map", {"feature_map": lambda x: x.half()}, ["float16", "float32"]),
    "map that returns no tensor": ("feature_map", {"feature_map": lambda x: None}, ["None"]),
    "maps of two sizes": ("feature_map", {"feature_map": (lambda x: x[..., :3], "elu")}, ["3", "8"]),
    "mask of integers": ("key_mask", {"key_mask": zeros(5, dtype=torch.int64)}, ["int64", "bool"]),
    "mask of floats": ("key_mask", {"key_mask": zeros(5)}, ["float32", "bool"]),
    "mask not a tensor": ("key_mask", {"key_mask": ta.Causal()}, ["Causal"]),
    "mask too long": ("key_mask", {"key_mask": zeros(2, 6, dtype=torch.bool)}, ["2, 6", "2, 5"]),
    "mask per head": ("key_mask", {"key_mask": zeros(2, 4, 5, dtype=torch.bool)}, ["2, 4, 5", "2, 5"]),
    "mask on another device": ("key_mask", {"key_mask": zeros(5, dtype=torch.bool, device="meta")}, ["meta", "cpu"]),
    "decay positive": ("log_decay", {"log_decay": zeros(2, 2, 5) + 1e-6}, ["0"]),
    "decay NaN": ("log_decay", {"log_decay": zeros(2, 2, 5) + NAN}, ["nan"]),
    "decay of one positive": ("log_decay", {"log_decay": torch.eye(5, 8)[None, None] * 3}, ["3"]),
    "decay a positive parameter": ("log_decay", {"log_decay": torch.nn.Parameter(zeros(2, 2, 5) + 1)}, ["1.0"]),
    "decay of integers": ("log_decay", {"log_decay": zeros(2, 2, 5, dtype=torch.int64)}, ["int64"]),
    "decay a number": ("log_decay", {"log_decay": -0.1}, ["float"]),
    "decay of rank 2": ("log_decay", {"log_decay": zeros(2, 5)}, ["(2, 5)", "rank 3 or 4"]),
    "decay of rank 5": ("log_decay", {"log_decay": zeros(1, 2, 2, 5, 8)}, ["(1, 2, 2, 5, 8)"]),
    "decay of other heads": ("log_decay", {"log_decay": zeros(2, 3, 5)}, ["(2, 3, 5)"]),
    "decay of another length": ("log_decay", {"log_decay": zeros(2, 2, 4)}, ["(2, 2, 4)"]),
    "decay of another head_dim": ("log_decay", {"log_decay": zeros(2, 2, 5, 6)}, ["(2, 2, 5, 6)", "8"]),
    "decay on another device": ("log_decay", {"log_decay": zeros(2, 2, 5, device="meta")}, ["meta", "cpu"]),
}
STATES = {
    "a tensor": (zeros(2, 2, 8, 6), ["Tensor"]),
    "a pair of numbers": ((1.0, 2.0), ["LinearState", "tuple"]),
    "three tensors": ((*STATE, zeros(1)), ["LinearState"]),
    "of another batch": (state_of(1, 2), ["kv", "(1, 2, 8, 6)", "(2, 2, 8, 6)"]),
    "of other heads": (state_of(2, 3), ["kv", "(2, 3, 8, 6)"]),
    "of another head_dim": (state_of(2, 2, dim=7), ["kv", "(2, 2, 7, 6)"]),
    "transposed": (ta.LinearState(zeros(2, 2, 6, 8), STATE.k_sum), ["kv", "(2, 2, 6, 8)"]),
    "of another rank": (state_of(2), ["kv", "(2, 8, 6)"]),
    "with another k_sum": (ta.LinearState(STATE.kv, zeros(2, 2, 6)), ["k_sum", "(2, 2, 6)"]),
    "with k_sum per query head": (ta.LinearState(STATE.kv, zeros(2, 4, 8)), ["k_sum", "(2, 4, 8)"]),
    "of 16 bits": (state_of(2, 2, dtype=torch.bfloat16), ["kv", "bfloat16", "float32"]),
    "of doubles": (state_of(2, 2, dtype=torch.float64), ["kv", "float64", "float32"]),
    "of integers": (ta.LinearState(STATE.kv, zeros(2, 2, 8, dtype=torch.int64)), ["k_sum", "int64"]),
    "on another device": (state_of(2, 2, device="meta"), ["kv", "meta", "cpu"]),
}


def refused(call, argument: str, words: list[str]) -> None:
    with pytest.raises(ERRORS) as caught:
        call()
    message = str(caught.value).replace("[", "(").replace("]", ")")
    for word in (argument, *words):
        assert word in message, f"{word!r} is not in {message!r}"
    assert re.search("expected|must|does not broadcast to", message), f"what was expected is not in {message!r}"


def requiring_grad(arguments: dict) -> dict:
    for name in ("query", "key", "value"):
        if isinstance(arguments.get(name), Tensor) and arguments[name].is_floating_point():
            arguments[name] = arguments[name].detach().requires_grad_()
    return arguments


GRAD = pytest.mark.parametrize("grad", (False, True), ids=("no_grad", "grad"))


@GRAD
@pytest.mark.parametrize("name", INPUTS | OPTIONS)
def test_bad_input_is_refused_by_name(name, grad):
    argument, changes, words = (INPUTS | OPTIONS)[name]
    arguments = {**good(), **changes}
    refused(lambda: ta.linear_attention(**(requiring_grad(arguments) if grad else arguments), causal=True), argument, words)


@GRAD
@pytest.mark.parametrize("name", [name for name in INPUTS | OPTIONS if "one positive" not in name])
def test_a_step_refuses_it_too(name, grad):
    argument, changes, words = (INPUTS | OPTIONS)[name]
    cut = lambda x: x[..., :1, :] if isinstance(x, Tensor) and x.dim() > 2 else x
    arguments = {**good(n=1), **{key: cut(x) if key in ("query", "key", "value") else x for key, x in changes.items()}}
    if name == "value of another length":
        arguments["value"] = zeros(2, 2, 2, 6)
    if argument == "log_decay" and isinstance(changes["log_decay"], Tensor) and changes["log_decay"].shape[2:3] == (5,):
        arguments["log_decay"] = changes["log_decay"].detach()[:, :, :1]
    arguments = requiring_grad(arguments) if grad else arguments
    refused(lambda: ta.linear_attention_step(**arguments, state=STATE), argument, [])


@GRAD
@pytest.mark.parametrize("name", STATES)
def test_bad_states(name, grad):
    state, words = STATES[name]
    make = lambda n: requiring_grad(good(n=n)) if grad else good(n=n)
    refused(lambda: ta.linear_attention(**make(5), causal=True, initial_state=state), "initial_state", words)
    refused(lambda: ta.linear_attention_step(**make(1), state=state), words[0] if words[0] in ("kv", "k_sum") else "state", [])
    refused(lambda: ta.linear_attention_step(**make(1), state=state, log_decay=zeros(2, 2, 1)), "state", words)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_the_dtype_of_a_state_follows_from_that_of_query(dtype):
    wrong = state_of(2, 2, dtype=torch.float32 if dtype == torch.float64 else dtype)
    refused(lambda: ta.linear_attention(**good(dtype), causal=True, initial_state=wrong), "initial_state.kv", [str(dtype)])


def test_what_belongs_to_causal():
    x = good()
    refused(lambda: ta.linear_attention(**x, log_decay=zeros(2, 2, 5)), "log_decay", ["causal"])
    refused(lambda: ta.linear_attention(**x, initial_state=STATE), "initial_state", ["causal"])
    refused(lambda: ta.linear_attention(**x, causal=1), "causal", ["1"])
    x["query"] = x["query"][:, :, :3]
    refused(lambda: ta.linear_attention(**x, causal=True), "key", ["causal", "(2, 4, 3, 8)", "(2, 2, 5, 8)"])
    assert ta.linear_attention(**x).shape == (2, 4, 3, 6)


@pytest.mark.parametrize("n", (0, 2))
@GRAD
def test_a_step_takes_one_token(n, grad):
    x = requiring_grad(good(n=n)) if grad else good(n=n)
    for options in ({}, {"normalize": False, "scale": 1.0}, {"inplace": True}):
        with torch.set_grad_enabled(grad and not options.get("inplace")):
            refused(lambda options=options: ta.linear_attention_step(**x, state=STATE, **options), "query", [str(n)])


def test_a_step_needs_a_state():
    refused(lambda: ta.linear_attention_step(**good(n=1), state=None), "state", ["None"])
    with pytest.raises(TypeError, match="state"):
        ta.linear_attention_step(**good(n=1))


def test_in_place():
    x, state = good(n=1), state_of(2, 2)
    refused(lambda: ta.linear_attention_step(**x, state=state, inplace=1), "inplace", ["1"])
    for name in ("query", "key", "value"):
        changed = {**x, name: x[name].clone().requires_grad_()}
        refused(lambda changed=changed: ta.linear_attention_step(**changed, state=state, inplace=True), "inplace", ["True"])
    gate = zeros(2, 2, 1).requires_grad_()
    refused(lambda: ta.linear_attention_step(**x, state=state, log_decay=gate, inplace=True), "inplace", [])
    recorded = ta.LinearState(state.kv, state.k_sum.clone().requires_grad_())
    refused(lambda: ta.linear_attention_step(**x, state=recorded, inplace=True), "inplace", [])
    step = lambda query: ta.linear_attention_step(query, x["key"], x["value"], state, inplace=True)[0]
    refused(lambda: torch.vmap(step)(x["query"][None]), "inplace", [])
    for transform in (torch.func.jacfwd(step), torch.func.grad(lambda query: step(query).sum())):
        refused(lambda transform=transform: transform(x["query"]), "inplace", [])
    refused(lambda: ta.linear_attention_step(**x, state=state, log_decay=zeros(2, 4, 1), inplace=True), "state", ["4 heads"])
    shared = ta.LinearState(zeros(1).expand(2, 2, 8, 6), state.k_sum)
    refused(lambda: ta.linear_attention_step(**x, state=shared, inplace=True), "state.kv", ["strides"])
    assert all((part == 0).all() for part in state)


def test_in_place_is_seen_by_autograd():
    x, state = good(n=1), state_of(2, 2)
    query = x["query"].clone().requires_grad_()
    out = ta.linear_attention(query, x["key"], x["value"], causal=True, initial_state=state)
    ta.linear_attention_step(**x, state=state, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_missing_and_unknown_arguments():
    x = good()
    with pytest.raises(TypeError, match="value"):
        ta.linear_attention(x["query"], x["key"])
    with pytest.raises(TypeError, match="mask"):
        ta.linear_attention(**x, mask=None)
    with pytest.raises(TypeError, match="positional"):
        ta.linear_attention(*x.values(), "elu")


LEGAL = (
    {"scale": 0},
    {"scale": -1, "normalize": False},
    {"feature_map": ["elu", "exp"]},
    {"feature_map": lambda x: x.exp()[..., :0]},
    {"feature_map": torch.nn.Softplus()},
    {"key_mask": torch.tensor(True)},
    {"key_mask": torch.ones(1, 5).bool()},
    {"log_decay": zeros(1, 1, 1)},
    {"log_decay": zeros(1, 1, 1, 1)},
    {"log_decay": zeros(2, 4, 5, dtype=torch.float64)},
    {"log_decay": zeros(1, 1, 5, 8, dtype=torch.float16) - INF},
    {"initial_state": tuple(STATE)},
    {"initial_state": state_of(2, 4)},
    {"initial_state": state_of(2, 2), "log_decay": zeros(2, 4, 5)},
    {"initial_state": state_of(2, 4), "log_decay": zeros(2, 2, 5)},
)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_what_looks_odd_and_is_legal(dtype):
    for options in LEGAL:
        out, state = ta.linear_attention(**good(dtype), **options, causal=True, return_state=True)
        assert out.isfinite().all() and all(part.isfinite().all() for part in state)


def test_values_of_gates_are_read_in_eager_mode_alone():
    x, gate = good(), zeros(2, 2, 5) + 1
    run = lambda gate: ta.linear_attention(**x, causal=True, log_decay=gate)
    refused(lambda: run(gate), "log_decay", ["1.0"])
    assert torch.vmap(run)(gate[None]).shape == (1, 2, 4, 5, 6)


def test_inputs_are_not_changed_and_an_error_leaves_nothing_behind():
    x, state = good(), ta.LinearState(torch.randn(2, 2, 8, 6), torch.rand(2, 2, 8))
    kept = {name: tensor.clone() for name, tensor in x.items()}, [part.clone() for part in state]
    want = ta.linear_attention(**x, causal=True, initial_state=state)
    for name in ("decay NaN", "mask too long"):
        with pytest.raises(ERRORS):
            ta.linear_attention(**x, causal=True, initial_state=state, **OPTIONS[name][1])
    assert torch.equal(ta.linear_attention(**x, causal=True, initial_state=state), want)
    ta.linear_attention_step(*(tensor[:, :, :1] for tensor in x.values()), state)
    assert all(torch.equal(tensor, kept[0][name]) for name, tensor in x.items())
    assert all(torch.equal(*parts) for parts in zip(state, kept[1]))
