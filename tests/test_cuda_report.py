"""tools/cuda_report.py on recorded output of ptxas and cuobjdump, and on small flow graphs."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[1]
RECORDED = Path(__file__).parent / "cuda_report"  # of nvcc 13.0 for sm_90
PRODUCTS = "_ZN4demo15products_kernelI4bf16Li2EEEvPKjPKfPfii"
SUMS, ARRAY, SPILLS = "_ZN4demo4sumsEPKfPfi", "_ZN4demo5arrayEPKiPii", "_ZN4demo6spillsEPf"


def load(name: str) -> Any:
    sys.path.insert(0, str(PROJECT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


sass, report = load("cuda_sass"), load("cuda_report")


@pytest.fixture
def kernels() -> dict[str, Any]:
    return sass.parse_sass((RECORDED / "small.sass").read_text())


@pytest.fixture
def resources() -> dict[str, Any]:
    return sass.parse_ptxas((RECORDED / "small.ptxas").read_text())


def test_resources(resources):
    assert list(resources) == [ARRAY, SUMS, PRODUCTS, SPILLS]
    products = resources[PRODUCTS]
    assert (products.arch, products.registers, products.barriers, products.static_shared) == (90, 30, 1, 0)
    assert (products.stack_frame, products.spill_stores, products.spill_loads) == (0, 0, 0)
    spills = resources[SPILLS]
    assert (spills.registers, spills.barriers, spills.static_shared) == (255, 2, 1024)
    assert (spills.stack_frame, spills.spill_stores, spills.spill_loads) == (24, 20, 36)
    assert resources[ARRAY].stack_frame == 160


def test_instructions(kernels):
    assert [len(kernels[name]) for name in (ARRAY, SUMS, PRODUCTS)] == [37, 26, 61]
    branch = kernels[SUMS][0x150 // 16]
    assert (branch.address, branch.opcode, branch.predicate, branch.target) == (0x150, "BRA", "@!P0", 0xE0)
    wide = next(i for i in kernels[PRODUCTS] if i.opcode == "LDG.E.128")
    assert (wide.kind, wide.bytes_per_thread) == ("global", 16)
    assert next(i for i in kernels[PRODUCTS] if i.opcode.startswith("BAR")).kind == "barrier"
    assert {i.kind for i in kernels[ARRAY] if i.name in ("STL", "LDL")} == {"local"}


@pytest.mark.parametrize(
    "text, predicate, target",
    [
        ("@P1 BRA P2, 0x40", "@P1", 0x40),
        ("BRA P2, 0x40", "@P2", 0x40),
        ("BRA.DIV UR4, 0x40", "@UR4", 0x40),
        ("BRA.U !UP0, 0x40", "@!UP0", 0x40),
        ("BRA 0x40", "", 0x40),
        ("BSSY B0, 0x40", "", None),
        ("WARPSYNC.COLLECTIVE R3, 0x40", "", None),
        ("@!UPT UIADD3 URZ, URZ, URZ, URZ", "@!UPT", None),
    ],
)
def test_branches(text, predicate, target):
    (code,) = sass.parse_sass(f"\t\tFunction : f\n        /*0010*/         {text} ;  /* 0x0 */\n").values()
    assert [(i.predicate, i.target) for i in code] == [(predicate, target)]


@pytest.mark.parametrize(
    "opcode, kind, width",
    [
        ("LDG.E.U16", "global", 2),
        ("LDG.E.U8.CONSTANT", "global", 1),
        ("LDG.E.64", "global", 8),
        ("STG.E", "global", 4),
        ("LDGSTS.E.BYPASS.128.ZFILL", "global", 16),
        ("HMMA.16816.F32", "tensor", 4),
        ("HMMA.1688.F32.TF32", "tensor", 4),
        ("DMMA.884", "tensor", 4),
        ("HGMMA.64x128x16.F32.BF16", "tensor", 4),
        ("LDSM.16.MT88.4", "ldmatrix", 4),
        ("LDS.128", "shared", 16),
        ("MUFU.EX2", "mufu", 4),
        ("F2FP.BF16.F32.PACK_AB", "convert", 4),
        ("FMNMX", "compare", 4),
        ("IMAD.MOV.U32", "integer", 4),
        ("HFMA2.MMA", "integer", 4),
        ("DEPBAR.LE", "barrier", 4),
    ],
)
def test_kinds(opcode, kind, width):
    instruction = sass.Instruction(0, opcode, "", None)
    assert (instruction.kind, instruction.bytes_per_thread) == (kind, width)


def test_main_loop_with_tensor_cores(kernels):
    loop = sass.main_loop(kernels[PRODUCTS])
    assert (loop.body[0].address, loop.body[-1].address) == (0x140, 0x340)
    assert loop.tensor and loop.products == 2 and loop.path == loop.body and len(loop.path) == 31
    counts = {"tensor": 2, "barrier": 1, "mufu": 4, "global": 5, "constant": 1, "fma": 4, "branch": 1, "integer": 13}
    assert sass.count_kinds(loop.path) == counts
    assert sass.narrow_accesses(loop.path) == 4 and sass.narrow_accesses(kernels[PRODUCTS]) == 12


def test_main_loop_of_multiply_adds(kernels):
    loop = sass.main_loop(kernels[SUMS])
    assert not loop.tensor and loop.products == 1 and len(loop.path) == 8
    assert sass.main_loop(kernels[ARRAY]) is None


def program(*lines: str) -> list[Any]:
    text = "".join(f"        /*{16 * at:04x}*/    {line} ;\n" for at, line in enumerate(lines))
    return sass.parse_sass("\t\tFunction : f\n" + text)["f"]


def test_the_fast_path_takes_the_copies_and_leaves_the_mask():
    code = program(
        "MOV R0, RZ",
        "@P0 BRA 0x50",  # head 0x10: skip the copy on the last round
        "LDGSTS.E.BYPASS.128 [R0], desc[UR0][R2.64]",
        "LDGDEPBAR",
        "NOP",
        "HMMA.16816.F32 R0, R4, R8, R0",
        "@P1 BRA 0x90",  # no mask
        "ISETP.GE.AND P2, PT, R0, R1, PT",
        "FSEL R0, R0, -INF , P2",
        "MUFU.EX2 R0, R0",
        "@P3 BRA 0x10",
        "EXIT",
    )
    loop = sass.main_loop(code)
    assert [i.address for i in loop.body] == list(range(0x10, 0xB0, 0x10))
    assert [i.address for i in loop.path] == [0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x90, 0xA0]
    assert loop.products == 1


def test_of_nested_loops_the_one_that_itself_multiplies_counts():
    code = program(
        "MOV R0, RZ",
        "HMMA.16816.F32 R0, R4, R8, R0",  # outer 0x10
        "HMMA.16816.F32 R0, R4, R8, R0",
        "HMMA.16816.F32 R0, R4, R8, R0",  # inner 0x30
        "HMMA.16816.F32 R0, R4, R8, R0",
        "HMMA.16816.F32 R0, R4, R8, R0",
        "@P0 BRA 0x30",
        "@P1 BRA 0x10",
        "EXIT",
    )
    assert [i.address for i in sass.main_loop(code).body] == [0x30, 0x40, 0x50, 0x60]
    twice = code[:2] + code[1:2] * 3 + code[2:]
    moved = program(*(f"{i.predicate} {i.opcode}" + (f" 0x{i.target + 0x30 * (i.target > 0x10):x}" if i.target else "") for i in twice))
    assert sass.main_loop(moved).path[0].address == 0x10


def test_a_branch_back_from_out_of_line_code_is_no_loop():
    code = program(
        "BRA.DIV UR4, 0x40",
        "SHFL.BFLY PT, R0, R0, 0x1, 0x1f",
        "FFMA R0, R0, R0, R0",  # 0x20: two ways in
        "EXIT",
        "WARPSYNC.COLLECTIVE R3, 0x50",
        "BRA 0x20",
    )
    assert sass.loops(sass.flow(code)) == {}
    assert sass.main_loop(code) is None


# Recorded from cudaOccMaxActiveBlocksPerMultiprocessor of cuda_occupancy.h, CUDA 13.0, with the limits of LIMITS.
@pytest.mark.parametrize(
    "arch, threads, registers, shared, blocks",
    [
        *((80, 128, 168, 49152, 3), (80, 128, 250, 81920, 2), (80, 256, 255, 0, 1), (80, 32, 16, 0, 32), (80, 1024, 32, 0, 2)),
        *((80, 1024, 65, 0, 0), (90, 128, 168, 98304, 2), (90, 128, 128, 49152, 4), (90, 192, 80, 1000, 4), (90, 256, 255, 101376, 1)),
        *((100, 128, 96, 101376, 2), (100, 96, 40, 0, 16), (120, 128, 128, 98304, 1), (120, 128, 128, 49152, 2), (120, 512, 40, 0, 3)),
        *((120, 64, 16, 0, 24), (120, 128, 128, 101376, 1), (120, 128, 128, 101377, 0)),
    ],
)
def test_occupancy(arch, threads, registers, shared, blocks):
    held = sass.occupancy(arch, threads, registers, shared)
    assert held.blocks == blocks and held.warps == blocks * -(-threads // 32)


def test_what_limits_occupancy():
    assert sass.occupancy(80, 128, 250, 81920).limit == "registers, shared memory"
    assert sass.occupancy(120, 128, 40, 98304).limit == "shared memory"
    assert sass.occupancy(90, 1024, 32, 0).limit == "registers, warps"
    assert sass.occupancy(90, 32, 16, 0).limit == "blocks"


@pytest.mark.parametrize(
    "name, short",
    [
        ("void demo::products_kernel<bf16, 2>(unsigned int const*, float const*, float*, int, int)", "demo::products<bf16, 2>"),
        (
            "void tiled_attention::cuda::(anonymous namespace)::attention_fwd_kernel<tiled_attention::cuda::(anonymous namespace)::"
            "ForwardTile<bf16, 128, (bool)1> >(tiled_attention::AttentionParams, tiled_attention::cuda::RowTable)",
            "attention_fwd<bf16, 128, true>",
        ),
        (
            "void tiled_attention::cuda::_GLOBAL__N__cf6b_9_f_cu::f_kernel<float, (tiled_attention::baseline::FeatureMap)2, (int)-1>(int)",
            "f<float, 2, -1>",
        ),
        ("tiled_attention::cuda::fill_kernel(float*, long)", "fill"),
    ],
)
def test_short_names(name, short):
    assert report.shorten(name) == short


def compiled(text: str) -> Any:
    return report.Compiled(Path("small.cu"), 90, Path("small.o"), text)


def test_report_names_what_must_not_be(kernels):
    text = (RECORDED / "small.ptxas").read_text()
    launches = {PRODUCTS: [(128, 49152), (128, 102400)], SUMS: [(32, 0)]}
    rows = report.describe(compiled(text), kernels, launches)
    problems = [problem for row in rows for problem in row.problems()]
    found = {problem.split(" on ")[0] for problem in problems}
    assert found == {"demo::array", "demo::spills", "demo::products<bf16, 2>"}
    assert "demo::spills on sm_90: 24 bytes of stack frame, 20 bytes of spill stores, 36 bytes of spill loads" in problems
    assert "demo::array on sm_90: 160 bytes of stack frame, 2 accesses of local memory" in problems
    assert "demo::products<bf16, 2> on sm_90: 102400 bytes of shared memory, at most 101376 on every target" in problems
    assert all("sums" not in problem for problem in problems)


def test_table_and_json(kernels):
    text = (RECORDED / "small.ptxas").read_text()
    rows = report.describe(compiled(text), kernels, {PRODUCTS: [(128, 49152)]})
    lines = report.table(rows, detail=True).splitlines()
    line = next(line for line in lines if line.startswith("demo::products<bf16, 2>"))
    assert line.split() == [
        *("demo::products<bf16,", "2>", "90", "30", "0", "49152", "128", "4", "16", "shared", "memory"),
        *("61", "31", "2", "mma", "14.50", "4", "1", "4/12"),
    ]
    assert any(line.strip().startswith("path 31: tensor 2") for line in lines)
    plain = report.Report(rows, [], []).as_json()
    products = next(row for row in plain["rows"] if row["kernel"].startswith("demo::products"))
    assert products["loop"]["others_per_product"] == 14.5 and products["occupancy"]["limit"] == "shared memory"


def test_copies_of_a_kernel_are_one_row(kernels):
    text = (RECORDED / "small.ptxas").read_text()
    other = report.Compiled(Path("other.cu"), 90, Path("other.o"), text)
    rows = report.merge(report.describe(compiled(text), kernels, {}) + report.describe(other, kernels, {SUMS: [(32, 0)]}))
    assert [(row.kernel, row.sources) for row in rows] == [
        ("demo::array", ["small.cu", "other.cu"]),
        ("demo::products<bf16, 2>", ["small.cu", "other.cu"]),
        ("demo::spills", ["small.cu", "other.cu"]),
        ("demo::sums", ["other.cu", "small.cu"]),
    ]
    assert [row.threads for row in rows] == [None, None, None, 32]
    assert "demo::array (2 files)" in report.table(rows, detail=False)


def test_objects_are_found_again_until_something_changes(tmp_path):
    header, source = tmp_path / "a.cuh", tmp_path / "a.cu"
    header.write_text("int a;\n")
    source.write_text('#include "a.cuh"\n')
    assert report.closure(source) == sorted([header, source])
    first = report.fingerprint(source, "-O3")
    assert report.fingerprint(source, "-O3") == first != report.fingerprint(source, "-O2")
    header.write_text("int b;\n")
    assert report.fingerprint(source, "-O3") != first
