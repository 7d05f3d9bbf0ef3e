"""Fixtures for all tests: a fixed seed, and whatever a test changes globally put back."""

import pytest
import torch

import tiled_attention  # noqa: F401  (loads the operators)
from tiled_attention.testing import poisoned_memory

AVAILABLE_ISAS = torch.ops.tiled_attention._available_isas().split()


@pytest.fixture(autouse=True)
def _restore_globals():
    isa, threads = torch.ops.tiled_attention._isa(), torch.get_num_threads()
    torch.manual_seed(0)
    yield
    if torch.ops.tiled_attention._isa() != isa:
        torch.ops.tiled_attention._set_isa(isa)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(params=AVAILABLE_ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """Runs the test once for each instruction set of this machine."""
    torch.ops.tiled_attention._set_isa(request.param)
    return request.param


@pytest.fixture
def poisoned():
    """Memory that torch allocates uninitialised holds NaN during the test."""
    with poisoned_memory():
        yield
