"""`ta.attention` against float64 for every named case, on every instruction set of the machine: values, lse, all first gradients."""

import pytest
import torch

import cases
from checks import check
from tiled_attention.testing import Case

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.id)
def test_small(case: Case, isa: str):
    check(case)


@pytest.mark.parametrize("case", cases.BOUNDARY, ids=lambda case: case.id)
def test_boundary(case: Case, isa: str):
    check(case)


@pytest.mark.parametrize("case", cases.FEATURES, ids=lambda case: case.id)
def test_features(case: Case, isa: str):
    check(case)


@pytest.mark.parametrize("case", cases.ADVERSARIAL, ids=lambda case: case.id)
def test_adversarial(case: Case, isa: str):
    check(case)


@pytest.mark.parametrize("case", cases.SLOW, ids=lambda case: case.id)
def test_slow(case: Case, isa: str):
    check(case)


def test_instruction_sets_can_be_chosen(isa: str):
    assert torch.ops.tiled_attention._isa() == isa


def test_unknown_instruction_set_is_refused():
    before = torch.ops.tiled_attention._isa()
    with pytest.raises((ValueError, RuntimeError), match="isa"):
        torch.ops.tiled_attention._set_isa("pentium")
    assert torch.ops.tiled_attention._isa() == before
