"""`python -m tiled_attention info`."""

import os
import subprocess
import sys

import pytest
import torch

from tiled_attention import info
from tiled_attention.__main__ import main


def test_info_names_build_isa_torch_and_threads(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for name in ("tiled-attention", "operator library", "instruction set", "CUDA", "torch", "processor", "threads"):
        assert name in printed
    assert torch.__version__ in printed


def test_info_needs_no_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(info.information())
    assert any(line.startswith("instruction set ") for line in lines)


def test_chosen_isa_is_among_those_here():
    rows = info.information()
    assert rows["instruction set"] in rows["instruction sets here"].split()


def test_environment_variable_forces_the_isa():
    isa = info.information()["instruction sets here"].split()[0]
    environment = os.environ | {"TILED_ATTENTION_ISA": isa}
    code = "from tiled_attention import info; print(info.information()['instruction set'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == isa


@pytest.mark.parametrize("arguments", [[], ["no-such-command"]])
def test_unknown_commands_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert "info" in capsys.readouterr().err
