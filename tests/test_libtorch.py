"""C++ without Python: examples/libtorch built and run, the same numbers as torch's, and what a user reads where something is missing."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiled_attention as ta
from tiled_attention import library
from tiled_attention.__main__ import main
from tiled_attention.arguments import NO_INTERVALS, UNBOUNDED
from tiled_attention.lowering import lower

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples/libtorch"
PACKAGE = Path(ta.__file__).parent


def run(*command: object, expect: int = 0, **environment: str) -> str:
    """What the command printed; fails with that where its exit code is another one."""
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == expect, f"exit code {done.returncode}, expected {expect}:\n{done.stdout}"
    return done.stdout


def cmake(*arguments: object, expect: int = 0) -> str:
    # The one of the test extra; it lies beside the interpreter, which need not be on the PATH.
    found = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    assert found is not None, "cmake is missing: pip install cmake"
    return run(found, *arguments, expect=expect)


def configure(build: Path, prefix: str, *arguments: object, expect: int = 0) -> str:
    return cmake("-S", EXAMPLE, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}", *arguments, expect=expect)


def printed(capsys: pytest.CaptureFixture[str], option: str) -> str:
    assert main(["info", option]) == 0
    return capsys.readouterr().out.strip()


def test_info_says_where_the_library_is(capsys: pytest.CaptureFixture[str]):
    assert printed(capsys, "--library") == str(library.path)
    assert printed(capsys, "--cmake-prefix-path") == f"{PACKAGE};{torch.utils.cmake_prefix_path}"
    with pytest.raises(SystemExit):
        main(["info", "--library", "--cmake-prefix-path"])


@pytest.mark.slow
def test_operators_through_the_dispatcher(tmp_path: Path):
    # The library lies elsewhere than it was built, and then nowhere.
    prefix, build = tmp_path / "installed", tmp_path / "build"
    shutil.copytree(PACKAGE / "cmake", prefix / "cmake")
    here = f"{prefix};{torch.utils.cmake_prefix_path}"
    said = configure(build, here, expect=1)
    assert f"the operator library {prefix / '_cpu.abi3.so'} is missing" in re.sub(r"\s+", " ", said)
    old = tmp_path / "old/Torch"
    old.mkdir(parents=True)
    (old / "TorchConfig.cmake").write_text("set(Torch_FOUND TRUE)\n")
    (old / "TorchConfigVersion.cmake").write_text('set(PACKAGE_VERSION "2.9.0")\n')
    said = configure(tmp_path / "other build", f"{prefix};{old.parent}", expect=1)
    assert 'compatible with requested version "2.10"' in re.sub(r"\s+", " ", said) and "version: 2.9.0" in said

    shutil.copy(library.path, prefix / "_cpu.abi3.so")
    shutil.rmtree(build)
    configure(build, here)
    cmake("--build", build, "--target", "attention")
    lines = run(build / "attention").splitlines()
    assert lines[-1] == "all right"
    assert sum(" error " in line and "WRONG" not in line for line in lines) == 25
    alone = next(line for line in lines if line.startswith("attention_fwd alone: no gradient; torch says: "))
    assert "tiled_attention::attention_fwd: an autograd kernel was not registered" in alone

    (prefix / "_cpu.abi3.so").unlink()
    assert "_cpu.abi3.so: cannot open shared object file" in run(build / "attention", expect=127)


@pytest.mark.slow
def test_package_without_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    build = tmp_path / "build"
    configure(build, printed(capsys, "--cmake-prefix-path"))
    cmake("--build", build, "--target", "run_package")
    spec = importlib.util.spec_from_file_location("export_package", EXAMPLE / "export_package.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}):
        example.main(["--out", str(tmp_path)])

    runs, files = build / "run_package", (tmp_path / "model.pt2", tmp_path / "samples.pt")
    lines = run(runs, printed(capsys, "--library").splitlines()[-1], *files).splitlines()
    assert lines[-1] == "all right"
    assert [line.split(":")[0].split() for line in lines[:-1]] == [["seqlen", str(length)] for length in example.LENGTHS]

    # A model that is another one, and what is missing.
    samples = torch.load(files[1])
    torch.save([(x, expected + 1e-3) for x, expected in samples], tmp_path / "others.pt")
    assert run(runs, library.path, files[0], tmp_path / "others.pt", expect=1).count("WRONG") == len(samples)
    nowhere = tmp_path / "nowhere.so"
    said = run(runs, nowhere, *files, expect=2)
    assert f"the operator library cannot be loaded: {nowhere}: cannot open shared object file" in said
    other = next(Path(torch.__file__).parent.glob("lib/libc10.so"))
    assert "Could not find schema for tiled_attention::attention" in run(runs, other, *files, expect=2)


STREAMING = ta.Causal() & (ta.SlidingWindow(3, 0) | ta.Sinks(2))


@pytest.mark.parametrize(
    "mask", [ta.Causal(), ta.Causal(align="top_left"), ta.SlidingWindow(3, 4), STREAMING, ta.PrefixLM(5), ta.Chunked(4)], ids=repr
)
def test_masks_are_the_numbers_that_the_page_says(mask: ta.Mask):
    """Names and defaults as in operators.h, in the order in which it lists them."""
    header, page = (EXAMPLE / "operators.h").read_text(), (ROOT / "docs/libtorch.md").read_text()
    listed = re.search(r"list\(\) const \{\s*return \{(.*?)\}", header, re.DOTALL)
    assert listed is not None
    order = re.split(r",\s*", listed[1])
    numbers = lower(mask, batch_shape=(1,), num_heads=1, seqlen_q=8, seqlen_kv=9).intervals
    said = {f"{name} = {number}" for name, number, default in zip(order, numbers, NO_INTERVALS, strict=True) if number != default}
    defaults = dict(re.findall(r"(\w+) = (kUnbounded|-?\d+)[,;]", header[: listed.start()].split("struct Intervals {")[1]))
    assert [str(default).replace(str(UNBOUNDED), "kUnbounded") for default in NO_INTERVALS] == [defaults[name] for name in order]
    rows = re.findall(r"^\| .*?`ta\..* \| `(\w+ = .*)` \|$", page, re.MULTILINE)
    assert said in [set(row.split(", ")) for row in rows]


class EveryOperator(torch.nn.Module):
    """(2, 2, 8, 4) and packed boundaries, lengths of a cache -> one number for each operator that takes a list of integers."""

    def forward(self, x: Tensor, cu_seqlens: Tensor, lengths: Tensor) -> list[Tensor]:
        packed, weight = x[0].transpose(0, 1), x[0, 0, 0]
        results = [
            ta.attention(x, x, x, dropout_p=0.5),
            ta.attention_weights(x, x),
            ta.attention_varlen(packed, packed, packed, cu_seqlens, cu_seqlens, 8, 8),
            ta.attention_decode(x[:, :, :1], x, x, cache_seqlens=lengths),
            ta.additive_attention(x, x, x, weight),
            ta.additive_attention_weights(x, x, weight),
            ta.luong_attention(x, x, x),
            ta.gaussian_attention(x, x, x, 1.0),
            ta.scaled_dot_product_attention(x, x, x, is_causal=True),
            ta.dropout_mask(2, 2, 8, 8, 0.5),
        ]
        return [result.sum() for result in results]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_no_empty_list(strict: bool):
    arguments = torch.randn(2, 2, 8, 4), torch.tensor([0, 3, 8]), torch.tensor([5, 8])
    program = torch.export.export(EveryOperator(), arguments, strict=strict)
    ours = [node for node in program.graph.nodes if str(node.target).startswith("tiled_attention.")]
    names = {node.target._schema.name.split("::")[1] for node in ours}
    assert names >= {"attention", "attention_weights", "attention_varlen", "attention_decode", "additive_attention"}
    assert names >= {"additive_attention_weights", "dropout_mask"}
    for node in ours:
        assert () not in node.args and [] not in node.args, node.format_node()
    program.module()(*arguments)


def test_kernels_without_torch(tmp_path: Path):
    """The command of the example, for any processor and compiler, and faster to compile."""
    command = re.search(r"^//   (g\+\+ .*)\n//     (.*)$", (EXAMPLE / "plain.cpp").read_text(), re.MULTILINE)
    assert command is not None
    compiler, *words = shlex.split(f"{command[1]} {command[2]}")
    assert compiler == "g++" and words[-2:] == ["-o", "plain"]
    compiler = os.environ.get("CXX") or shutil.which("g++") or "clang++"
    for_here = {"-O3": "-O0", "-DKERNEL_ISA=avx2": "-DKERNEL_ISA=baseline", "plain": str(tmp_path / "plain")}
    done = subprocess.run([compiler, *(for_here.get(word, word) for word in words if not word.startswith("-m"))], cwd=ROOT, timeout=600)
    assert done.returncode == 0
    assert re.fullmatch(r"largest error of out \S+, of lse \S+\n", run(tmp_path / "plain"))
