"""The tests of the operators on the kernels of csrc/cuda, run on the CPU by the emulator: the same files, in a process of their own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from build_emulated import build

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
pytestmark = pytest.mark.native

PACKED = (
    *("against_the_definition", "a_sequence_has_the_bits_it_has_alone", "nothing_leaks_between_sequences", "empty_sequences"),
    *("dropout_is_that_of_the_padded_batch", "strides", "bad_offsets"),
)
ROTARY = ("is_attention_of_turned_rows", "packed_sequences_have_the_bits_that_they_have_alone", "decoding_gives_what_the_whole_gives")
PACKED_LINEAR = ("each_sequence_has_the_bits_it_has_alone", "against_the_definition", "no_tokens", "bad_offsets")
LISTS = (
    "lists_of_kernels_of_every_size",
    "a_captured_graph_reads_lists_that_are_there",
    "operators_map_over_lists",
    "lists_cost_what_is_visible",
)
# The longest first.
SMALL = (
    "tests/test_attention_isa.py::test_features",
    "tests/test_attention_isa.py::test_boundary",
    "tests/test_attention_isa.py::test_adversarial",
    "tests/test_linear_attention.py",
    "tests/test_attention_isa.py::test_small",
    " ".join(f"tests/test_attention_varlen.py::test_{name}" for name in PACKED),
    " ".join(f"tests/test_rotary_attention.py::test_{name}" for name in ROTARY),
    " ".join(f"tests/test_linear_varlen.py::test_{name}" for name in PACKED_LINEAR),
    "tests/test_attention_decode.py tests/test_kv_cache.py --deselect tests/test_kv_cache.py::TestCompile",
    "tests/test_additive_attention.py",
    "tests/test_dropout.py",
    " ".join(f"tests/test_sparse_masks.py::test_{name}" for name in LISTS),
    "tests/test_masks.py tests/test_rotate.py tests/test_bias_by_distance.py tests/test_tf32.py",
    "tests/test_library_errors.py tests/test_errors.py tests/test_linear_errors.py tests/test_support.py",
)
ALL = (
    *SMALL,
    "tests/test_autograd.py",
    "tests/test_linear_autograd.py",
    "tests/test_additive_derivatives.py",
    "tests/test_attention.py",
    "tests/test_attention_varlen.py tests/test_linear_varlen.py",
    "tests/test_attention_isa.py::test_slow",
    "tests/test_vmap.py tests/test_linear_vmap.py",
    "tests/test_weights.py",
    "tests/test_rotary_attention.py",
    "tests/test_accuracy.py tests/test_linear_accuracy.py tests/test_additive_accuracy.py",
    "tests/test_compile.py tests/test_linear_compile.py",
    "tests/test_sparse_masks.py tests/test_residues.py",
    "tests/test_library.py::TestLayout tests/test_library.py::TestEmptySizes",
)


@pytest.fixture(scope="session")
def library() -> Path:
    return build()


def run_tests(library: Path, selection: Sequence[str], size: str) -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-p", "emulated_selection", f"--emulated={size}"]
    environment = os.environ | {"TILED_ATTENTION_LIBRARY": str(library), "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *selection], cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    print(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("selection", SMALL)
def test_small(selection: str, library: Path):
    run_tests(library, selection.split(), "small")


@pytest.mark.slow
@pytest.mark.parametrize("selection", ALL)
def test_all(selection: str, library: Path):
    run_tests(library, selection.split(), "all")
