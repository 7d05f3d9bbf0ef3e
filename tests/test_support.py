"""The support matrix of the README says what the operators accept: every cell of it is tried, on whatever library is loaded."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiled_attention as ta

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
REFUSED = (TypeError, ValueError, RuntimeError)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Column of the matrix -> operator.
OPERATORS: dict[str, Callable[..., Any]] = {
    "attention": ta.attention,
    "varlen": ta.attention_varlen,
    "decode": ta.attention_decode,
    "additive": ta.additive_attention,
    "luong": ta.luong_attention,
    "gaussian": ta.gaussian_attention,
    "lsh": ta.lsh_attention,
    "linear": ta.linear_attention,
}
HEADS, ROWS, DIM = 2, 6, 8


def table(first: str) -> tuple[list[str], dict[str, list[str]]]:
    """The columns and the rows of the table of the README whose head begins with `first`."""
    lines = README[README.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return cells[0][1:], {row[0]: row[1:] for row in cells[2:]}


COLUMNS, MATRIX = table("option")
CELLS = [(option, operator, cell) for option, row in MATRIX.items() for operator, cell in zip(COLUMNS, row, strict=True)]


def arguments(
    operator: str, dtype: torch.dtype, *, heads_kv: int = HEADS, dim_v: int = DIM, lead: tuple[int, ...] = (1,)
) -> dict[str, Any]:
    """A small call of an operator, the same numbers for every dtype."""
    draw = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    query = tensor(*lead, HEADS, ROWS, DIM)
    key, value = tensor(*lead, heads_kv, ROWS, DIM), tensor(*lead, heads_kv, ROWS, dim_v)
    if operator == "varlen":
        if len(lead) == 1:
            query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        offsets = torch.tensor([0, 2, ROWS], dtype=torch.int32)
        return dict(query=query, key=key, value=value, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=4, max_seqlen_kv=4)
    if operator == "decode":
        lengths = torch.full((1,), ROWS, dtype=torch.int32)
        return dict(query=query[..., -2:, :], key_cache=key, value_cache=value, cache_seqlens=lengths)
    if operator == "lsh":
        return dict(query_key=key if heads_kv != HEADS else query, value=tensor(*lead, HEADS, ROWS, dim_v)) | dict(
            num_hashes=1, bucket_size=3, causal=False, seed=0
        )
    extra = {"additive": dict(score_weight=tensor(DIM)), "gaussian": dict(bandwidth=1.5), "linear": dict(normalize=False)}
    return dict(query=query, key=key, value=value) | extra.get(operator, {})


def out_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def run(operator: str, call: dict[str, Any]) -> Tensor:
    torch.manual_seed(0)
    return out_of(OPERATORS[operator](**call))


def given(name: str, value: Any, operator: str) -> None:
    """An option that is accepted changes the result; one that is not raises and changes nothing."""
    call = arguments(operator, torch.float32)
    plain = run(operator, call)
    changed = run(operator, call | {name: value})
    assert changed.isfinite().all() and not torch.equal(changed, plain), f"{name} was accepted and had no effect"


def bias_gradient(operator: str) -> None:
    bias = torch.zeros(ROWS, requires_grad=True)
    run(operator, arguments(operator, torch.float32) | dict(bias=bias)).square().sum().backward()
    assert bias.grad is not None and bias.grad.abs().max() > 0


def offset(operator: str) -> None:
    call = arguments(operator, torch.float32) | dict(mask=ta.Causal())
    assert not torch.equal(run(operator, call), run(operator, call | dict(query_offset=-1)))


def log_sum_exp(operator: str) -> None:
    out, lse = OPERATORS[operator](**arguments(operator, torch.float32), return_lse=True)
    assert isinstance(lse, Tensor) and lse.numel() == out.numel() // DIM


def shaped(operator: str, **sizes: Any) -> None:
    out = run(operator, arguments(operator, torch.float32, **sizes))
    assert out.isfinite().all() and out.shape[-1] == sizes.get("dim_v", DIM)
    if "lead" in sizes:
        assert out.shape[: len(sizes["lead"])] == sizes["lead"]


def gradients(operator: str) -> None:
    call = arguments(operator, torch.float32)
    tensors = {name: x.requires_grad_() for name, x in call.items() if isinstance(x, Tensor) and x.is_floating_point()}
    grads = torch.autograd.grad(run(operator, call).square().sum(), list(tensors.values()))
    assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in grads)


def second_gradients(operator: str) -> None:
    call = arguments(operator, torch.float64)
    value = call["value_cache" if operator == "decode" else "value"].requires_grad_()
    (grad,) = torch.autograd.grad(run(operator, call).square().sum(), value, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), value)
    assert second.isfinite().all() and second.abs().max() > 0


def state(operator: str) -> None:
    out, after = OPERATORS[operator](**arguments(operator, torch.float32), causal=True, return_state=True)
    again = OPERATORS[operator](**arguments(operator, torch.float32), causal=True, initial_state=after)
    assert not torch.equal(out, again)


Trial = Callable[[str], None]
INTERVALS = [
    *(ta.Causal(), ta.SlidingWindow(1, 0), ta.PrefixLM(1), ta.Chunked(2), ta.Sinks(1), ta.KeyLengths(torch.tensor(1))),
    *(ta.Documents(torch.tensor([0, 1, ROWS])), ta.Causal() & (ta.SlidingWindow(1, 1) | ta.Sinks(1))),
]
PATTERNS = [
    *(ta.Strided(2), ta.Dilated(1, 2), ta.Global((0,)), ta.RandomBlocks(1, block_size=2)),
    *(ta.BlockSparse(torch.eye(3, dtype=torch.bool), 2), ta.Causal() & (ta.Strided(3) | ta.SlidingWindow(1, 0))),
]
SLOPES, LOGITS = torch.tensor([0.5, 0.25]), torch.tensor([0.5, -0.5])
SEEN = torch.rand(ROWS, ROWS, generator=torch.Generator().manual_seed(1)) < 0.7
LAST_HIDDEN = torch.arange(ROWS) < ROWS - 1
# Row of the matrix -> what tries it, given the operator.
TRIALS: dict[str, Trial | list[Trial]] = {
    "masks of intervals": [partial(given, "mask", mask) for mask in INTERVALS],
    "patterns": [partial(given, "mask", mask) for mask in PATTERNS],
    "mask of bools": partial(given, "mask", SEEN),
    "`causal=`": partial(given, "causal", True),
    "`key_mask=`": partial(given, "key_mask", LAST_HIDDEN),
    "`bias=`, and its gradient": bias_gradient,
    "`scale=`": partial(given, "scale", 0.5),
    "`softcap=`": partial(given, "softcap", 1.0),
    "`alibi_slopes=`": partial(given, "alibi_slopes", SLOPES),
    "`sinks=`": partial(given, "sinks", LOGITS),
    "`rotary=`": partial(given, "rotary", ta.RotaryEmbedding(DIM)),
    "`dropout_p=`": partial(given, "dropout_p", 0.5),
    "`query_offset=`": offset,
    "`log_decay=`": lambda operator: out_of(
        OPERATORS[operator](**arguments(operator, torch.float32), causal=True, log_decay=-torch.ones(1, HEADS, ROWS))
    ).sum(),
    "state in and out": state,
    "`return_lse=`": log_sum_exp,
    "fewer heads of key and value": partial(shaped, heads_kv=1),
    "`head_dim_v` of its own": partial(shaped, dim_v=3),
    "any leading dimensions": partial(shaped, lead=(2, 1, 3)),
    "gradients": gradients,
    "second derivatives": second_gradients,
}


def test_the_matrix_is_whole():
    assert list(OPERATORS) == COLUMNS
    assert set(MATRIX) == set(TRIALS)
    assert {cell for _, _, cell in CELLS} == {"yes", ""}


@pytest.mark.parametrize("option, operator, cell", CELLS, ids=[f"{operator}-{list(MATRIX).index(option)}" for option, operator, _ in CELLS])
def test_cell(option: str, operator: str, cell: str):
    trials = TRIALS[option]
    for trial in trials if isinstance(trials, list) else [trials]:
        if cell == "yes":
            trial(operator)
        else:
            with pytest.raises(REFUSED):
                trial(operator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_has_every_dtype(operator: str, dtype: str):
    """Results and gradients in the four dtypes are those of float64, up to their rounding."""
    words = re.search(r"All of them take (.*?) on CPU and CUDA", " ".join(README.split()))
    assert words and dtype in words[1] and len(re.findall(r"float\d+", words[1])) == len(DTYPES)
    exact, out = (run(operator, arguments(operator, kind)) for kind in (torch.float64, DTYPES[dtype]))
    assert out.dtype == DTYPES[dtype]
    error = (out.double() - exact).abs().max() / exact.abs().max()
    assert error < 16 * torch.finfo(DTYPES[dtype]).eps


def test_the_results_are_those_of_the_list():
    """Every number of the README's results stands in the measured list that it names."""
    measured = (Path(__file__).resolve().parent.parent / "benchmarks/results/zen4_2_cores.md").read_text()
    _, rows = table("call")
    numbers = [number for row in rows.values() for number in re.findall(r"\d+(?:\.\d+)?", " ".join(row[1:]))]
    assert len(numbers) > 20
    for number in [*numbers, "60 MiB", "8.6 us"]:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]\d)", measured), number
