"""Kernels of csrc/cuda under every sanitizer, and the attention forward with faults built in that a named job must see."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from simt_build import PROJECT, SANITIZER, WRONG_RESULT, build, run

pytestmark = pytest.mark.native
KERNEL = PROJECT / "csrc/cuda/attention_fwd.cuh"
DECODE = PROJECT / "csrc/cuda/attention_decode.cuh"
LIST = PROJECT / "csrc/cuda/block_list.cuh"
MISSING_BARRIER, MISSING_WAIT, NO_SWIZZLE, MASK_OFF_BY_ONE, ONE_ROW_TOO_MANY = range(1, 6)


def run_fault(fault: int, job: str, problems: str = "few") -> subprocess.CompletedProcess[str]:
    return run(build("simt_attention.cpp", job, f"-DSIMT_FAULT={fault}"), problems)


def extra_wavefronts(output: str, kind: str) -> int:
    counts = re.search(rf"(\d+) {kind} with (\d+) extra wavefronts", output)
    assert counts and int(counts[1]) > 0, output
    return int(counts[2])


@pytest.mark.parametrize(
    "environment", [{}, {"SIMT_SEED": "1"}, {"SIMT_SEED": "2", "SIMT_ASYNC": "2"}, {"SIMT_SEED": "3", "SIMT_THREADS": "2"}]
)
def test_plain(environment: dict[str, str]):
    done = run(build("simt_attention.cpp", "plain", "-DSIMT_FAULT=0"), "all", **environment)
    assert done.returncode == 0, done.stdout
    assert extra_wavefronts(done.stdout, "ldmatrix") == 0


@pytest.mark.parametrize(
    "job, problems",
    [("asan", "few"), pytest.param("asan", "all", marks=pytest.mark.slow), pytest.param("tsan", "all", marks=pytest.mark.slow)],
)
def test_sanitized(job: str, problems: str):
    done = run_fault(0, job, problems)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize("source", ["simt_attention_grad.cpp", "simt_attention_tf32.cpp", "simt_linear.cpp"])
@pytest.mark.parametrize("job", ["plain", pytest.param("asan", marks=pytest.mark.slow), pytest.param("tsan", marks=pytest.mark.slow)])
def test_gradients(source: str, job: str):
    done = run(build(source, job))
    assert done.returncode == 0, done.stdout[-5000:]
    assert done.stdout.count("right ") > 1 and "wrong" not in done.stdout, done.stdout


@pytest.mark.parametrize("job", ["plain", *(pytest.param(job, marks=pytest.mark.slow) for job in ("asan", "tsan"))])
def test_packed_linear_attention_with_wrong_offsets(job: str):
    done = run(build("simt_linear_varlen.cpp", job))
    assert done.returncode == 0 and done.stdout.count("right ") == 4, done.stdout[-5000:]


@pytest.mark.parametrize("flags", [(), ("-DSIMT_FMA",)], ids=["tensor cores", "fma"])
@pytest.mark.parametrize("job", ["plain", pytest.param("asan", marks=pytest.mark.slow)])
def test_packed_sequences_with_wrong_offsets(job: str, flags: tuple[str, ...]):
    done = run(build("simt_varlen.cpp", job, *flags))
    assert done.returncode == 0 and done.stdout.count("right ") == 2, done.stdout[-5000:]


@pytest.mark.parametrize("job", ["plain", *(pytest.param(job, marks=pytest.mark.slow) for job in ("asan", "tsan"))])
def test_decode_of_any_lengths_and_pages(job: str):
    done = run(build("simt_decode.cpp", job))
    assert done.returncode == 0, done.stdout[-5000:]
    assert done.stdout.count("right ") == 9 and "wrong" not in done.stdout, done.stdout


@pytest.mark.parametrize("flags", [(), ("-DSIMT_FMA",)], ids=["tensor cores", "fma"])
@pytest.mark.parametrize("job", ["plain", *(pytest.param(job, marks=pytest.mark.slow) for job in ("asan", "tsan"))])
def test_lists_of_any_numbers(job: str, flags: tuple[str, ...]):
    done = run(build("simt_lists.cpp", job, *flags))
    assert done.returncode == 0, done.stdout[-5000:]
    assert done.stdout.count("right ") == (5 if flags else 6) and "wrong" not in done.stdout, done.stdout


def test_one_row_too_many_asan():
    done = run_fault(ONE_ROW_TOO_MANY, "asan")
    assert done.returncode == SANITIZER and "heap-buffer-overflow" in done.stdout, done.stdout[-5000:]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [MISSING_WAIT, MASK_OFF_BY_ONE])
def test_fault_plain(fault: int):
    done = run_fault(fault, "plain")
    assert done.returncode == WRONG_RESULT and "wrong result" in done.stdout, done.stdout


@pytest.mark.slow
def test_missing_barrier_tsan():
    done = run_fault(MISSING_BARRIER, "tsan")
    assert done.returncode == SANITIZER and "data race" in done.stdout, done.stdout[-5000:]


@pytest.mark.slow
def test_no_swizzle_shows_as_bank_conflicts():
    done = run_fault(NO_SWIZZLE, "plain")
    assert done.returncode == 0 and extra_wavefronts(done.stdout, "ldmatrix") > 0, done.stdout


def main_loop(kernel: Path, first_line: str) -> range:
    """Its lines."""
    lines = kernel.read_text().splitlines()
    begin = lines.index(first_line)
    return range(begin + 1, lines.index("  }", begin) + 2)


def conflict_places(program: Path, output: str) -> list[tuple[Path, int]]:
    """Files and lines of the accesses with bank conflicts, those of the callers of inlined functions too."""
    places: list[tuple[Path, int]] = []
    for offset in re.findall(r"\+(0x[0-9a-f]+)", output):
        before = hex(int(offset, 16) - 1)  # the access returns to what comes after it
        frames = subprocess.run(["addr2line", "-ie", program, before], capture_output=True, text=True, check=True).stdout
        found = re.findall(r"^(.*):(\d+)", frames, re.MULTILINE)
        assert found, frames
        places += [(Path(file), int(line)) for file, line in found]
    return places


@pytest.mark.slow
def test_conflicts_of_every_access():
    """Loads and stores beside ldmatrix too: none in the main loop, and none in a function called from it."""
    program = build("simt_attention.cpp", "trace", "-DSIMT_FAULT=0")
    done = run(program, "few")
    assert done.returncode == 0, done.stdout
    assert extra_wavefronts(done.stdout, "ldmatrix") == 0
    places = conflict_places(program, done.stdout)
    assert bool(places) == (extra_wavefronts(done.stdout, "traced accesses") > 0), done.stdout
    assert all(file == KERNEL and line not in main_loop(KERNEL, "  while (tile >= 0) {") for file, line in places), places


@pytest.mark.slow
def test_conflicts_of_decode():
    program = build("simt_decode.cpp", "trace")
    done = run(program)
    assert done.returncode == 0, done.stdout
    loop = main_loop(DECODE, "  for (int block = begin; block < end; block++) {")
    assert all(file != DECODE or line not in loop for file, line in conflict_places(program, done.stdout)), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-DSIMT_FMA",)], ids=["tensor cores", "fma"])
def test_conflicts_of_lists(flags: tuple[str, ...]):
    """What a list shows is read without conflicts, and in the main loop of the forward on tensor cores nothing else has any."""
    program = build("simt_lists.cpp", "trace", *flags)
    done = run(program)
    assert done.returncode == 0, done.stdout
    places = conflict_places(program, done.stdout)
    assert places, "rows of 20 columns are copied element by element"
    assert all(file != LIST for file, line in places)
    assert all(file != KERNEL or line not in main_loop(KERNEL, "  while (tile >= 0) {") for file, line in places), places


@pytest.mark.slow
def test_tf32_has_no_conflicts():
    done = run(build("simt_attention_tf32.cpp", "trace"))
    assert done.returncode == 0, done.stdout
    assert extra_wavefronts(done.stdout, "ldmatrix") == extra_wavefronts(done.stdout, "traced accesses") == 0, done.stdout


def can_fuzz() -> bool:
    clang = shutil.which("clang++")
    if not clang:
        return False
    probe = [clang, "-fsanitize=fuzzer", "-x", "c++", "-", "-o", "/dev/null"]
    source = 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
    return subprocess.run(probe, input=source, text=True, capture_output=True).returncode == 0


@pytest.mark.slow
def test_random_inputs_asan():
    """60 seconds of inputs drawn at random; libFuzzer's need clang and are in test_fuzz."""
    done = run(build("fuzz_attention.cpp", "asan", "-DSIMT_FAULT=0", "-DSIMT_RANDOM_DRIVER"), "60")
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.search(r"(\d+) inputs", done.stdout)[1]) > 20, done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not can_fuzz(), reason="needs clang++ with libFuzzer")
def test_fuzz():
    program = build("fuzz_attention.cpp", "asan", "-DSIMT_FAULT=0", "-fsanitize=fuzzer", compiler="clang++")
    done = run(program, "-max_total_time=60", "-max_len=10", "-len_control=0")
    assert done.returncode == 0, done.stdout[-5000:]
