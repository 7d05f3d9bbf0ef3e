"""The emulator itself: what it computes, and that every fault is seen by the job that should see it."""

import re
import subprocess

import pytest
from simt_build import FAULT, SANITIZER, WRONG_RESULT, build, run

pytestmark = pytest.mark.native
RIGHT = 0
sanitized = pytest.mark.slow  # compiled with a sanitizer: all of them in `make test-native-all`, one in `make test-native`


@pytest.mark.parametrize("what", ["formats", "layouts", "collectives", "launches", "conflicts"])
@pytest.mark.parametrize("seed", ["0", "7"])
def test_against_tables(what: str, seed: str):
    """Conversions of all halves, fragments as in the figures of the PTX ISA, shuffles, ballots, early exits, grids, bank conflicts."""
    done = run(build("simt_checks.cpp", "plain"), what, SIMT_SEED=seed)
    assert done.returncode == 0, done.stdout


@sanitized
@pytest.mark.parametrize("job", ["asan", "tsan"])
@pytest.mark.parametrize("what", ["layouts", "collectives", "launches"])
def test_against_tables_sanitized(what: str, job: str):
    done = run(build("simt_checks.cpp", job), what)
    assert done.returncode == 0, done.stdout


def test_conflicts_of_every_access():
    done = run(build("simt_checks.cpp", "trace"), "conflicts")
    assert done.returncode == 0, done.stdout


def test_threads_of_the_host():
    done = run(build("simt_checks.cpp", "plain"), "launches", SIMT_THREADS="3", SIMT_SEED="5")
    assert done.returncode == 0, done.stdout


# What each job says of each kernel of simt_faults.cpp: how the program ends, and a part of what it prints.
# RIGHT: this job cannot see the fault.
# The plain job sees it through the emulator, or through NaN in the result.
WRONG = (WRONG_RESULT, "wrong result")
NOTHING = (RIGHT, "right result")
RACE = (SANITIZER, "data race")
PLAIN = {
    "ok_block": NOTHING,
    "ok_warp": NOTHING,
    "ok_async": NOTHING,
    "ok_carved": NOTHING,
    "race_block": WRONG,
    "race_warp": WRONG,
    "race_write_after_read": WRONG,
    "race_shuffle": NOTHING,
    "race_grid": NOTHING,
    "outside_dynamic": (FAULT, "0 bytes behind the end of a dynamic shared array of 128 bytes"),
    "outside_static": (FAULT, "0 bytes behind the end of a static shared array of 128 bytes"),
    "outside_carved": (FAULT, "0 bytes behind the end of a dynamic shared array of 128 bytes"),
    "outside_read": WRONG,
    "carved_too_much": (FAULT, "need more shared memory"),
    "carved_apart": (FAULT, "carve its shared memory in different ways"),
    "never_written": WRONG,
    "misaligned": NOTHING,
    "barrier_divergent": (FAULT, "divergent __syncthreads"),
    "deadlock": (FAULT, r"deadlock: 32 of 32 threads are left(.|\n)*bar.warp(.|\n)*16 threads wait in __syncthreads"),
    "shuffle_exited": (FAULT, "names a lane that has exited"),
    "shuffle_left": (FAULT, "a thread ends while others wait for it at shfl.bfly"),
    "shuffle_divergent": (FAULT, "divergent warp collective"),
    "shuffle_outside_mask": (FAULT, "reads lane 8, not in the mask"),
    "mask_without_caller": (FAULT, "the calling lane is not in the mask"),
    "async_without_wait": WRONG,
    "async_wrong_group": WRONG,
    "async_without_commit": (FAULT, "while its cp.async copies are in flight"),
    "async_left_behind": (FAULT, "while its cp.async copies are in flight"),
    "async_without_barrier": WRONG,
    "async_misaligned": (FAULT, "not aligned to 16 bytes"),
    "ldmatrix_misaligned": (FAULT, "not aligned to 16 bytes"),
    "ldmatrix_outside": (FAULT, "outside the block's shared memory"),
}
ASAN = {
    "ok_block": NOTHING,
    "ok_warp": NOTHING,
    "ok_async": NOTHING,
    "ok_carved": NOTHING,
    "race_shuffle": NOTHING,
    "race_grid": NOTHING,
    "outside_dynamic": (SANITIZER, "use-after-poison"),
    "outside_static": (None, "index 32 out of bounds"),
    "outside_carved": (SANITIZER, "use-after-poison"),
    "outside_read": (SANITIZER, "use-after-poison"),
    "outside_global": (SANITIZER, "heap-buffer-overflow"),
    "outside_local": (None, "index 4 out of bounds"),
    "misaligned": (None, "misaligned address"),
    "overflow": (None, "signed integer overflow"),
    "barrier_divergent": (FAULT, "divergent __syncthreads"),
    "deadlock": (FAULT, "deadlock"),
    "async_left_behind": (FAULT, "while its cp.async copies are in flight"),
}
TSAN = {
    "ok_block": NOTHING,
    "ok_warp": NOTHING,
    "ok_async": NOTHING,
    "ok_carved": NOTHING,
    "race_block": RACE,
    "race_warp": RACE,
    "race_write_after_read": RACE,
    "race_shuffle": RACE,
    "race_grid": RACE,
    "overflow": NOTHING,
    "async_without_barrier": RACE,
    "async_without_wait": RACE,
    "never_written": WRONG,
    "barrier_divergent": (FAULT, "divergent __syncthreads"),
    "deadlock": (FAULT, "deadlock"),
}


def check_fault(kernel: str, job: str, expected: tuple[int | None, str]) -> None:
    done = run(build("simt_faults.cpp", job), kernel)
    code, message = expected
    assert done.returncode != 0 if code is None else done.returncode == code, done.stdout
    assert re.search(message, done.stdout), done.stdout


@pytest.mark.parametrize("kernel", PLAIN)
def test_fault(kernel: str):
    check_fault(kernel, "plain", PLAIN[kernel])


@pytest.mark.parametrize("kernel", ["ok_block", "outside_dynamic", "outside_global", "misaligned"])
def test_fault_under_one_sanitizer(kernel: str):
    check_fault(kernel, "asan", ASAN[kernel])


@sanitized
@pytest.mark.parametrize("kernel", ASAN)
def test_fault_asan(kernel: str):
    check_fault(kernel, "asan", ASAN[kernel])


@sanitized
@pytest.mark.parametrize("kernel", TSAN)
def test_fault_tsan(kernel: str):
    check_fault(kernel, "tsan", TSAN[kernel])


def test_every_fault_is_seen():
    """Each kernel that is not right is seen by some job."""
    kernels = subprocess.run([build("simt_faults.cpp", "plain")], capture_output=True, text=True).stdout.split()
    seen = {kernel for jobs in (PLAIN, ASAN, TSAN) for kernel, expected in jobs.items() if expected != NOTHING}
    assert {kernel for kernel in kernels if not kernel.startswith("ok_")} == seen


@pytest.mark.parametrize("mode", ["0", "2"])
def test_strict_copies_are_what_sees_a_missing_wait(mode: str):
    """Copies at once hide the fault; copies at the wait leave the NaN of shared memory that nobody wrote."""
    done = run(build("simt_faults.cpp", "plain"), "async_without_wait", SIMT_ASYNC=mode)
    assert done.returncode == (RIGHT if mode == "0" else WRONG_RESULT), done.stdout
