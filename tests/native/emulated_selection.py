"""Pytest plugin of test_emulated.py: refuses to run on anything but the emulator, and leaves out what is large for it."""

import math
from typing import Any

import pytest
import torch

import tiled_attention

TILE = 64
# Multiply-adds of whole tiles that a case may take: in "small", lengths up to two tiles and a ragged one in a few heads.
LIMITS = {"small": 2.5e7, "all": 3e8}
# Tests by name that are of the CPU alone, or of sizes that only a device has.
NOT_HERE = (
    "test_memory_of_second_derivatives_is_linear",
    "test_average_holds_one_head_in_memory",
    "test_many_batch_items_and_heads",
    "test_seventy_thousand_rows",
    "test_unknown_instruction_set_is_refused",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulated", choices=LIMITS, default="small", help="how large the cases may be")


def pytest_sessionstart() -> None:
    isa = torch.ops.tiled_attention._isa()
    assert isa == "emulated", f"TILED_ATTENTION_LIBRARY must name the emulated library, {tiled_attention.__file__} runs {isa}"


def work(case: Any) -> float:
    """Multiply-adds of the scores of all tiles and of their products with value; a linear case has no more tiles than rows of them, and a
    case of decode counts for itself."""
    if hasattr(case, "multiply_adds"):
        return case.multiply_adds()
    keys = case.seqlen_q if case.seqlen_kv is None else case.seqlen_kv
    head_dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v
    rows, columns = math.ceil(case.seqlen_q / TILE), math.ceil(keys / TILE)
    tiles = rows + columns if hasattr(case, "decay") else rows * columns
    features = TILE * math.ceil(case.head_dim / TILE) + TILE * math.ceil(head_dim_v / TILE)
    return math.prod(case.batch) * case.num_heads * tiles * TILE * TILE * features


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limit = LIMITS[config.getoption("--emulated")]
    kept, left_out = [], []
    for item in items:
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")
        large = hasattr(case, "seqlen_q") and work(case) > limit
        name = getattr(item, "originalname", item.name)
        (left_out if large or name in NOT_HERE else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
