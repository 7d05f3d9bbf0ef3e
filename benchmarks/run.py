"""Measures the numbers that the operators are to reach, and says for each whether it does.

    python benchmarks/run.py [attention | linear | decode | ...] [--only NAME ...] [--json FILE] [--threads 2] [--rounds 30] [--seconds 10]

Both sides alternate in one process; times are medians. A result is checked before it is timed. The exit code is 1 when a result was wrong
and 0 otherwise, whatever the times are.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import additive
import claims
import decode
import interface
import linear
import lsh
import sparse
import torch
import torch.nn.functional as F
import varlen
from rich import box
from rich.console import Console
from rich.table import Table
from rows import Row
from shapes import Measurement, measurements

from tiled_attention.compare import machine, peers
from tiled_attention.compare.problem import Problem, make_problem
from tiled_attention.compare.report import machine_lines
from tiled_attention.compare.timing import alternate
from tiled_attention.library import ops
from tiled_attention.testing import Case, largest

WIDTH = 150
# Operators beside exact attention: modules with CLAIMS of their own.
PARTS = {"linear": linear, "additive": additive, "decode": decode, "lsh": lsh, "sparse": sparse, "varlen": varlen, "interface": interface}
# A result further away than this share of its largest element is wrong; accuracy itself is what the tests and `compare` look at.
WRONG = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Settings:
    """How to time: threads of both sides, the most rounds, and seconds for one pair."""

    threads: int
    rounds: int
    seconds: float


def sdpa(problem: Problem) -> torch.Tensor:
    """PyTorch's own on the same inputs, told of causality and dropout the way its fast paths want."""
    case, inputs = problem.case, problem.inputs
    causal = case.mask == "Causal()"
    mask = inputs.bias if inputs.visible is None or causal else inputs.visible
    return F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, mask, case.dropout_p, causal, scale=case.scale)


def prepare(case: Case, bias_gradient: bool) -> Problem:
    """The case's tensors; the bias is a leaf only where its gradient is measured."""
    problem = make_problem(case)
    if problem.inputs.bias is not None:
        problem.inputs.bias.requires_grad_(bias_gradient)
    return problem


def gradients(problem: Problem, out: torch.Tensor, retain_graph: bool = False) -> tuple[torch.Tensor, ...]:
    """Of every leaf that asks for one."""
    leaves = [leaf for leaf in problem.inputs.leaves().values() if leaf.requires_grad]
    return torch.autograd.grad(out, leaves, problem.grad_out, retain_graph=retain_graph)


def is_right(problem: Problem, backward: bool) -> bool:
    """Ours against PyTorch's; under dropout against plain math with the same weights dropped."""
    other = sdpa if problem.case.dropout_p == 0 else peers.plain_math
    results = []
    for function in (peers.tiled, other):
        with torch.set_grad_enabled(backward):
            out = function(problem)
        results.append((out.detach(), *(gradients(problem, out) if backward else ())))
    return all(
        largest(ours.double() - theirs.double()) <= WRONG[problem.case.dtype] * largest(theirs) and not ours.isnan().any()
        for ours, theirs in zip(*results)
    )


def timed_call(problem: Problem, function: Callable[[Problem], torch.Tensor], direction: str) -> Callable[[], object]:
    """What the clock sees."""
    if direction == "forward":

        def forward() -> None:
            with torch.no_grad():
                function(problem)

        return forward
    if direction == "backward":
        out = function(problem)
        return lambda: gradients(problem, out, retain_graph=True)
    return lambda: gradients(problem, function(problem))


def measure(measurement: Measurement, settings: Settings) -> Row:
    """Check, then time, one pair."""
    case, direction = measurement.case, measurement.direction
    problem = prepare(case, measurement.bias_gradient)
    row = Row(measurement.claim, f"{case.id} {direction}" + (f" {measurement.isa}" if measurement.isa else ""), unit="ms")
    row.against = "SDPA" if measurement.base is None else f"ours, {measurement.base.id}"
    if not is_right(problem, direction != "forward"):
        return replace(row, wrong=True)
    if measurement.base is None:
        other = timed_call(problem, sdpa, direction)
    else:
        other = timed_call(prepare(measurement.base, False), peers.tiled, direction)
    calls = {"ours": timed_call(problem, peers.tiled, direction), "theirs": other}
    seconds = alternate(calls, rounds=settings.rounds, seconds=settings.seconds)
    row.ours, row.theirs = seconds["ours"] * 1e3, seconds["theirs"] * 1e3
    peak = float(ops._peak(machine.PEAK_CODES[case.dtype])) * settings.threads * 1e9
    flops = sum(case.flops(backward) for backward in (False, True) if direction in ("forward+backward", ("forward", "backward")[backward]))
    row.share = flops / seconds["ours"] / peak
    row.want(at_least=measurement.at_least, at_most=measurement.at_most, min_share=measurement.min_share)
    return row


def run_pairs(settings: Settings, wanted: Callable[[str], bool]) -> Iterator[Row]:
    """All measurements of shapes.py, each on its instruction set."""
    best, available = str(ops._isa()), str(ops._available_isas()).split()
    isas = [isa for isa in available if isa != best] + [best]
    for measurement in measurements(isas):
        if not wanted(measurement.claim):
            continue
        ops._set_isa(measurement.isa or best)
        try:
            yield measure(measurement, settings)
        finally:
            ops._set_isa(best)


def show(console: Console, rows: list[Row]) -> None:
    """One line per row."""
    table = Table(title="Numbers to reach; ratio is theirs over ours", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(("claim", "what", "against", "ours", "theirs", "", "ratio", "of peak", "target", "met")):
        table.add_column(column, justify="left" if index < 3 else "right")
    for row in rows:
        table.add_row(*row.cells())
    console.print(table)


def main() -> int:
    """Measure what was asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    exact = dict.fromkeys([*(item.claim for item in measurements(["bf16"])), "sixteen_bit", *claims.CLAIMS])
    names = [*exact, *(name for part in PARTS.values() for name in part.CLAIMS)]
    parser.add_argument("operator", nargs="?", choices=["attention", *PARTS], help="which operator (default: all)")
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="of " + ", ".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write {machine, rows} there")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="the most timings of each side (default: 30)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="no round starts after these seconds, three are always taken (default: 10)"
    )
    arguments = parser.parse_args()
    settings = Settings(arguments.threads, arguments.rounds, arguments.seconds)

    def wanted(claim: str) -> bool:
        operator = next((name for name, part in PARTS.items() if claim in part.CLAIMS), "attention")
        return arguments.operator in (None, operator) and (arguments.only is None or claim in arguments.only)

    console = Console(width=max(WIDTH, Console().width))
    torch.manual_seed(0)
    rows: list[Row] = []
    described: dict[str, Any] = machine.describe(settings.threads)
    with machine.pinned(settings.threads):
        for row in run_pairs(settings, wanted):
            console.print(row.line(), highlight=False, soft_wrap=True)
            rows.append(row)
    for name, claim in itertools.chain(*(part.CLAIMS.items() for part in (claims, *PARTS.values()))):
        if wanted(name):
            for row in claim(settings.threads, settings.rounds, settings.seconds):
                console.print(row.line(), highlight=False, soft_wrap=True)
                rows.append(row)
    show(console, rows)
    for line in machine_lines(described):
        console.print(line, highlight=False)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": described, "rows": [asdict(row) for row in rows]}, indent=1))
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
