"""The compare command: its arguments, its steps in order, its verdict."""

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

EXTRAS = ("rich", "matplotlib")
MIN_WIDTH = 120
SMALL_PARITY, FULL_PARITY = (67,), (67, 197, 512)
# The largest error of few elements is a matter of luck, and so is its ratio to another.
MIN_PARITY = 64
SMALL_SPEED, FULL_SPEED = (128, 512, 1024), (128, 256, 512, 1024, 2048, 4096)
SMALL_MEMORY, FULL_MEMORY = (1024, 4096), (1024, 2048, 4096, 8192, 16384)
SMALL_LINEAR, FULL_LINEAR = (256, 1024, 4096), (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--quick", action="store_true", help="smaller sizes and no decoder model; under two minutes on two cores")
    parser.add_argument("--device", default="cpu", choices=["cpu"], help="where to compare (default: cpu)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write compare.json and plots into this folder")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of every implementation (default: torch's)")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="N,N,...",
        help="sequence lengths for parity (at least 64), speed and memory in place of the usual ones",
    )
    parser.add_argument(
        "--distributed",
        type=_at_least(int, 1),
        metavar="N",
        help="compare nothing but N processes that share a sequence with one; with --out it writes distributed.json and a plot",
    )
    parser.add_argument(
        "--timeout",
        type=_at_least(float, 1),
        default=300.0,
        metavar="SECONDS",
        help="with --distributed: how long a process waits for another before that one is lost (default: %(default)g)",
    )


def _at_least(kind: type[int] | type[float], least: int) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least}, got {text}")
        return value

    number.__name__ = "number"
    return number


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if min(sizes) < 8:
        raise argparse.ArgumentTypeError(f"expected lengths of at least 8, got {text}")
    return tuple(sorted(set(sizes)))


def missing_extras() -> list[str]:
    """Packages that the command needs and does not find."""
    return [name for name in EXTRAS if importlib.util.find_spec(name) is None]


def speed_plan(quick: bool, sizes: Sequence[int] | None) -> list[tuple[torch.dtype, str, int]]:
    """(dtype, variant, length) in the order they run."""
    from .speed import VARIANTS

    lengths = sizes or (SMALL_SPEED if quick else FULL_SPEED)
    plan = [(torch.float32, variant, n) for variant in VARIANTS for n in lengths]
    for dtype in (torch.bfloat16, torch.float16):
        chosen, short = (VARIANTS[:2], lengths[:2]) if quick else (VARIANTS, lengths)
        plan += [(dtype, variant, n) for variant in chosen for n in short]
    return plan + ([] if quick else [(torch.float64, variant, n) for variant in VARIANTS[:2] for n in lengths])


def linear_plan(quick: bool, sizes: Sequence[int] | None) -> list[tuple[torch.dtype, str, int]]:
    """The same for linear attention."""
    from .linear import VARIANTS

    lengths = sizes or (SMALL_LINEAR if quick else FULL_LINEAR)
    plan = [(torch.float32, variant, n) for variant in VARIANTS for n in lengths]
    if quick:
        return plan
    return plan + [(dtype, variant, n) for dtype in (torch.bfloat16, torch.float16) for variant in VARIANTS[:2] for n in lengths]


def _unserved(served: dict[str, int]) -> str:
    return f"layers that served no call: {', '.join(name for name, calls in served.items() if not calls) or 'there are no layers'}"


def failures(results: dict[str, Any]) -> list[str]:
    """What breaks a limit or left a layer unserved, one line each."""
    found = [
        f"parity: {row['case']}, {row['dtype']}, {row['tensor']}: error {row['tiled']:.2e} above {row['limit']:.2e}"
        for row in [*results["parity"], *results["linear"]["parity"]]
        if not row["passed"]
    ]
    operators = results["operators"]
    found += [
        f"{row['case']}, n = {row['n']}, {row['dtype']}, {row['tensor']}: error {row['tiled']:.2e} above {row['limit']:.2e}"
        for row in operators["parity"]
        if not row["passed"]
    ]
    for row in operators["densities"]:
        if not row["passed"]:
            found.append(f"{row['mask']}, n = {row['n']}: density {row['density']:.6f}, of the dense mask {row['dense']:.6f}")
    for row in operators["recall"]:
        if not row["passed"]:
            found.append(
                f"lsh_attention: recall {row['recall']:.1%} of {row['num_hashes']} rounds that show {row['pairs']:.1%} of the pairs"
            )
    for row in operators["counts"]:
        if not row["passed"]:
            found.append(f"{row['what']}: {row['formula']} by formula, {row['counted']} counted, {row['torch']} in torch")
    for row in results["models"]:
        for name, way in row.get("ways", {}).items():
            if not way["passed"]:
                found.append(f"{row['model']}, {name}: difference {way['difference']:.2e} above {row['limit']:.2e}")
            if not way["all_served"]:
                found.append(f"{row['model']}, {name}: {_unserved(way['served'])}")
        for text in row.get("generation", []):
            for name, way in text["ways"].items():
                if not way["passed"]:
                    found.append(f"{row['model']}, {name}: the greedy text for {text['prompts'][0]!r} parts at a gap of {way['gap']:.2e}")
    training = results["training"]
    if not training["passed"]:
        found.append(f"training: losses part by {training['difference']:.2e}, limit {training['limit']:.2e}")
    if not training["all_served"]:
        found.append(f"training: {_unserved(training['served'])}")
    return found


def compare(quick: bool, threads: int, sizes: Sequence[int] | None, console: Any) -> dict[str, Any]:
    """Run all steps; the fields of the result are those of the JSON."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from . import favor, linear, machine, memory, models, operators, parity, speed, training
    from .text import Missing

    torch.set_num_threads(threads)
    results: dict[str, Any] = {"version": 1, "quick": quick, "machine": machine.describe(threads), "seconds": {}}
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    parity_sizes = sorted({max(n, MIN_PARITY) for n in sizes or (SMALL_PARITY if quick else FULL_PARITY)})
    memory_sizes = sizes or (SMALL_MEMORY if quick else FULL_MEMORY)
    plan = speed_plan(quick, sizes)
    training_steps = 20 if quick else 100
    linear_lengths = linear_plan(quick, sizes)
    features: dict[str, Any] = (
        {"num_sentences": 32, "kinds": ("positive",), "num_features": (64, 256), "num_seeds": 1} if quick else {"num_sentences": 256}
    )
    draws = math.prod(len(features.get(name, usual)) for name, usual in (("kinds", favor.KINDS), ("num_features", favor.NUM_FEATURES)))
    linear_steps = linear.steps(parity_sizes, linear_lengths, memory_sizes, draws * features.get("num_seeds", favor.NUM_SEEDS) + 1)

    with Progress(*columns, console=console) as progress:

        def step(name: str, total: int, work: Callable[[Callable[[str], None]], Any]) -> None:
            task, start = progress.add_task(name, total=total, now=""), time.perf_counter()
            results[name] = work(lambda now: progress.update(task, advance=1, now=now))
            progress.update(task, completed=total, now="")
            results["seconds"][name] = time.perf_counter() - start

        def run_linear(advance: Callable[[str], None]) -> dict[str, Any]:
            seconds, slowest = (0.1, 0.25) if quick else (1.0, 5.0)
            return linear.run(parity_sizes, linear_lengths, memory_sizes, threads, seconds, slowest, features, advance)

        def run_operators(advance: Callable[[str], None]) -> dict[str, Any]:
            return operators.run(parity_sizes, quick, max(sizes) if sizes else None, threads, 0.05 if quick else 0.3, advance)

        def run_models(advance: Callable[[str], None]) -> list[dict[str, Any]]:
            def encoder() -> dict[str, Any]:
                return models.sentence_encoder(32 if quick else 256, threads, 2.0 if quick else 20.0, advance)

            def decoder() -> dict[str, Any]:
                return models.language_model(threads, 20.0, advance)

            rows = []
            for name, model in [("all-MiniLM-L6-v2", encoder)] + ([] if quick else [("SmolLM2-135M", decoder)]):
                try:
                    rows.append(model())
                except Missing as missing:
                    rows.append({"model": name, "missing": str(missing)})
            return rows

        step("parity", parity.steps(parity_sizes), lambda advance: parity.run(parity_sizes, advance))
        step(
            "speed",
            len(plan) * len(speed.DIRECTIONS),
            lambda advance: speed.run(
                plan, threads, results["machine"]["peak_gflops"], 0.1 if quick else 1.0, 0.25 if quick else 5.0, advance
            ),
        )
        step("memory", len(memory_sizes) * len(memory.IMPLEMENTATIONS), lambda advance: memory.run(memory_sizes, threads, advance))
        step("linear", linear_steps, run_linear)
        step("operators", operators.steps(parity_sizes, quick), run_operators)
        step("models", 3 if quick else 9, run_models)
        step("training", 3 * training_steps, lambda advance: training.run(training_steps, advance))
    results["failures"] = failures(results)
    return results


def run(arguments: argparse.Namespace) -> int:
    """0 when every limit holds, 1 when one breaks or a replaced layer served no call, 2 when the command cannot run."""
    missing = missing_extras()
    if missing:
        print(f"compare needs {', '.join(missing)}: pip install 'tiled-attention[compare]'", file=sys.stderr)
        return 2
    threads = torch.get_num_threads() if arguments.threads is None else arguments.threads
    if threads < 1:
        print(f"--threads: expected a number of at least 1, got {threads}", file=sys.stderr)
        return 2
    from rich.console import Console

    from . import plots, report

    # Narrower, the tables would lose digits.
    console = Console(width=max(MIN_WIDTH, Console().width))
    if arguments.distributed is not None:
        return _run_distributed(arguments, threads, console)
    results = compare(arguments.quick, threads, arguments.sizes, console)
    report.show(console, results)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "compare.json").write_text(json.dumps(results, indent=1))
        paths = [arguments.out / "compare.json", *plots.write(results, arguments.out)]
        console.print("written: " + ", ".join(str(path) for path in paths), highlight=False)
    return 1 if results["failures"] else 0


def _run_distributed(arguments: argparse.Namespace, threads: int, console: Any) -> int:
    """The same of `--distributed`; 1 also where a rank failed or was lost."""
    from . import distributed, plots, report
    from .ranks import RankFailed

    problem = distributed.problem()
    if problem is not None:
        print(f"--distributed: {problem}", file=sys.stderr)
        return 2
    try:
        results = distributed.run(arguments.quick, arguments.sizes, arguments.distributed, threads, arguments.timeout, console)
    except RankFailed as failed:
        print(f"--distributed {arguments.distributed}: {failed}", file=sys.stderr)
        return 1
    report.show_distributed(console, results)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "distributed.json").write_text(json.dumps(results, indent=1))
        paths = [arguments.out / "distributed.json", plots.distributed(results, arguments.out / "distributed.png")]
        console.print("written: " + ", ".join(str(path) for path in paths), highlight=False)
    return 1 if results["failures"] else 0
