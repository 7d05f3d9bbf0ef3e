"""Tables of the results, for a terminal. Everything they show also stands in the JSON."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def _number(value: float | None, form: str = ".2e") -> str:
    return "-" if value is None else format(value, form)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.3g}"


def _mark(passed: bool) -> str:
    return "[green]yes[/]" if passed else "[bold red]no[/]"


def _table(title: str, columns: str, rows: Iterable[Sequence[str]], left: int = 1, caption: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns.split(", ")):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=index < left)
    for row in rows:
        table.add_row(*row)
    return table


def machine_lines(machine: Mapping[str, Any]) -> list[str]:
    """The machine in words, with both figures for its peak."""
    peaks = ", ".join(f"{dtype} {value:.0f}" for dtype, value in machine["peak_gflops"].items())
    clock = machine["clock_peak_gflops"]
    source = f"{machine['clock_mhz']:.0f} MHz ({machine['clock_source']})" if machine["clock_mhz"] else "no clock can be read"
    by_clock = source if clock is None else f"float32 {clock:.0f} at {source}"
    return [
        f"{machine['cpu']}, {machine['threads']} threads of {machine['usable_cpus']} processors, {machine['memory_gib']} GiB",
        f"instruction set {machine['isa']} of {' '.join(machine['isas'])}; torch {machine['torch']}, Python {machine['python']}",
        f"peak in GFLOP/s, measured by a multiply-add loop: {peaks}; by the stated clock: {by_clock}",
    ]


def _nearest_to_limit(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One row per case and dtype."""
    worst: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in rows:
        key = row["case"], row["dtype"]
        if key not in worst or row["tiled"] / row["limit"] > worst[key]["tiled"] / worst[key]["limit"]:
            worst[key] = row
    return list(worst.values())


def parity_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Per case and dtype the tensor that comes closest to its limit; then what breaks a limit, in full."""
    columns = "case, dtype, tensor, tiled, limit, SDPA, nn.MHA, within"

    def line(row: Mapping[str, Any]) -> list[str]:
        numbers = [_number(row[name]) for name in ("tiled", "limit", "sdpa", "multihead")]
        return [row["case"], row["dtype"], row["tensor"], *numbers, _mark(row["passed"])]

    tables = [
        _table(
            "Parity: largest error against float64, of the tensor nearest to its limit",
            columns,
            map(line, _nearest_to_limit(rows)),
            left=3,
            caption=f"{len(rows)} tensors, {sum(row['passed'] for row in rows)} within their limit; nn.MHA is nn.MultiheadAttention; "
            "- where PyTorch lacks the option",
        )
    ]
    broken = [row for row in rows if not row["passed"]]
    if broken:
        tables.append(_table("Outside their limit", columns, map(line, broken), left=3))
    return tables


def speed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Times in ms, ratios above 1 where this package is faster."""
    columns = "variant, dtype, direction, n, tiled ms, SDPA ms, math ms, SDPA, math, nn.MHA, of peak"

    def line(row: Mapping[str, Any]) -> list[str]:
        share = row["share_of_peak"]
        return [
            *(row["variant"], row["dtype"], row["direction"], str(row["n"])),
            *(_milliseconds(row["seconds"].get(name)) for name in ("tiled", "sdpa", "math")),
            *(_ratio(row[name]) for name in ("sdpa_ratio", "math_ratio", "multihead_ratio")),
            "-" if share is None else f"{share:.0%}",
        ]

    shape = rows[0]["shape"] if rows else [1, 0, 0, 0]
    caption = (
        f"batch 1, {shape[1]} heads of {shape[3]}; medians, all sides alternating in one process; ratios are their time over ours; "
        f"nn.MHA against ta.MultiheadAttention of embed_dim {shape[1] * shape[3]}; share of peak over visible pairs"
    )
    return _table("Speed", columns, map(line, rows), left=3, caption=caption)


def memory_parts(memory: Mapping[str, Any]) -> list[Table | str]:
    """One line per length; then what stopped, and the line that is quoted."""
    by_n: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in memory["rows"]:
        by_n.setdefault(row["n"], {})[row["implementation"]] = row

    def cell(row: Mapping[str, Any]) -> str:
        return "stopped" if row["stopped"] else f"{row['bytes'] / 2**20:.1f}"

    stops = [f"n = {row['n']}: {row['implementation']} {row['stopped']}" for row in memory["rows"] if row["stopped"]]
    lines = ([str(n), *(cell(found[name]) for name in ("tiled", "sdpa", "math"))] for n, found in by_n.items())
    title = f"Memory: peak MiB beyond the inputs, one head of {memory['head_dim']}, {memory['dtype']}, {memory['direction']}"
    return [_table(title, "n, tiled, SDPA, math", lines), *stops, *filter(None, [memory["quoted"]])]


def _definition_table(title: str, parity: Sequence[Mapping[str, Any]]) -> Table:
    """Parity with a definition: per case and dtype the tensor that comes closest to its limit; then what breaks a limit."""
    shown = [*_nearest_to_limit(parity), *(row for row in parity if not row["passed"])]
    lines = (
        [row["case"], row["dtype"], row["tensor"], *(_number(row[name]) for name in ("tiled", "definition", "limit")), _mark(row["passed"])]
        for row in shown
    )
    return _table(title, "case, dtype, tensor, tiled, definition, limit, within", lines, left=3)


def linear_tables(linear: Mapping[str, Any]) -> list[Table | str]:
    """Parity, speed, crossover, memory and decoding of linear attention, and FAVOR+ in a trained model."""
    parts: list[Table | str] = [_definition_table("Linear attention: largest error against its definition in float64", linear["parity"])]
    speed = (
        [
            *(row["variant"], row["dtype"], row["direction"], str(row["n"])),
            *(_milliseconds(row["seconds"].get(name)) for name in ("linear", "composite", "sdpa", "exact")),
            *(_ratio(row[f"{name}_ratio"]) for name in ("composite", "sdpa", "exact")),
            "-" if row["share_of_peak"] is None else f"{row['share_of_peak']:.0%}",
        ]
        for row in linear["speed"]
    )
    columns = "variant, dtype, direction, n, linear ms, composite ms, SDPA ms, exact ms, composite, SDPA, exact, of peak"
    caption = (
        f"batch 1, {linear['num_heads']} heads of {linear['head_dim']}; composite: the same formula in PyTorch's operators; "
        "exact: ta.attention; ratios are their time over ours"
    )
    parts.append(_table("Linear attention: speed", columns, speed, left=3, caption=caption))
    for direction, length in linear["crossover"].items():
        parts.append(
            f"{direction}: "
            + (
                "never faster than exact causal attention here"
                if length is None
                else f"faster than exact causal attention from n = {length}"
            )
        )
    by_n: dict[int, dict[str, str]] = {}
    for row in linear["memory"]:
        by_n.setdefault(row["n"], {})[row["implementation"]] = "-" if row["bytes"] is None else f"{row['bytes'] / 2**20:.1f}"
    names = ("linear", "chunked", "sdpa")
    lines = ([str(n), *(found[name] for name in names)] for n, found in by_n.items())
    parts.append(_table("Linear attention: peak MiB beyond the inputs, one head, forward+backward", "n, linear, composite, SDPA", lines))
    decode = (
        [
            str(row["position"]),
            *(f"{row['seconds'][name] * 1e6:.1f}" for name in ("linear", "exact")),
            *(f"{row['bytes'][name] / 2**10:.0f}" for name in ("linear", "exact")),
        ]
        for row in linear["decode"]
    )
    parts.append(_table("Decoding one token", "position, step us, exact us, state KiB, keys and values KiB", decode))
    favor = linear["favor"]
    if "missing" in favor:
        return [*parts, f"FAVOR+: {favor['missing']}"]
    lines = (
        [row["kind"], str(row["num_features"]), *(f"{row[name]:.3f}" for name in ("error", "cosine", "nearest"))] for row in favor["rows"]
    )
    title = f"{favor['model']} with its softmax replaced by FAVOR+, {favor['sentences']} sentences: embeddings against the exact ones"
    return [*parts, _table(title, "features, m, error, cosine, nearest stays", lines)]


def operator_tables(operators: Mapping[str, Any]) -> list[Table | str]:
    """Parity, speed and memory of the other operators, densities of masks, what LSH finds, counts."""
    title = "Other operators: largest error against their definition in float64"
    parts: list[Table | str] = [_definition_table(title, operators["parity"])]
    speed = (
        [
            *(row["case"], row["dtype"], row["direction"], peer, str(row["n"])),
            *(_milliseconds(row["seconds"][name]) for name in ("tiled", peer)),
            _ratio(ratio),
            "-" if row["share"] is None else f"{row['share']:.1%}",
        ]
        for row in operators["speed"]
        for peer, ratio in row["ratios"].items()
    )
    columns = "operator, dtype, direction, beside, n, tiled ms, theirs ms, ratio, pairs seen"
    caption = "medians, all sides alternating in one process; ratios are their time over ours; exact: ta.attention"
    parts.append(_table("Other operators: speed", columns, speed, left=4, caption=caption))
    lines = ([row["implementation"], str(row["n"]), f"{row['bytes'] / 2**20:.2f}"] for row in operators["memory"])
    if operators["memory"]:
        parts.append(_table("Peak MiB beyond the inputs, one head, forward+backward", "implementation, n, MiB", lines))
    lines = (
        [row["mask"], str(row["n"]), f"{row['density']:.4f}", f"{row['dense']:.4f}", _mark(row["passed"])] for row in operators["densities"]
    )
    parts.append(_table("Masks: visible share of the pairs", "mask, n, density, of the dense mask, equal", lines))
    lines = (
        [str(row["num_hashes"]), *(f"{row[name]:.1%}" for name in ("pairs", "recall", "weight", "error")), _mark(row["passed"])]
        for row in operators["recall"]
    )
    title = "LSH attention on clusters of tokens: what its hashes find of exact attention"
    parts.append(_table(title, "rounds, pairs seen, recall, weight, error, above chance", lines))
    lines = (
        [row["what"], *("-" if row[name] is None else str(row[name]) for name in ("formula", "counted", "torch")), _mark(row["passed"])]
        for row in operators["counts"]
    )
    return [*parts, _table("Counts", "what, formula, counted, torch, equal", lines)]


def model_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table | str]:
    """Differences and times per model and way; greedy texts where the model writes some."""
    parts: list[Table | str] = []
    lines, greedy = [], []
    for row in rows:
        if row["missing"]:
            parts.append(f"{row['model']}: {row['missing']}")
            continue
        for name, way in row["ways"].items():
            lines.append(
                [
                    *(row["model"], name, _number(way["difference"]), _number(row["limit"]), _mark(way["passed"])),
                    f"{sum(count > 0 for count in way['served'].values())} of {len(way['served'])}",
                    *(_number(row.get("loss"), ".6f"), _number(way.get("loss"), ".6f")),
                    *(_milliseconds(row["seconds"]), _milliseconds(way["seconds"]), _ratio(row["seconds"] / way["seconds"])),
                ]
            )
        for index, text in enumerate(row.get("generation", [])):
            for name, way in text["ways"].items():
                label = f"{index + 1}" + (f" (batch of {len(text['prompts'])})" if len(text["prompts"]) > 1 else "")
                verdict = "equal" if way["equal"] else f"part at a gap of {way['gap']:.1e}"
                times = [f"{value:.2f}" for value in (text["seconds"], way["seconds"])]
                greedy.append([row["model"], label, name, verdict, _mark(way["passed"]), *times])
    if lines:
        columns = "model, replaced by, difference, limit, within, served, loss, loss replaced, ms, ms replaced, ratio"
        parts.append(_table("Real models on Hamlet: embeddings or logits as they are and with attention replaced", columns, lines, left=2))
    if greedy:
        columns = "model, prompt, replaced by, greedy text, within, s, s replaced"
        parts.append(_table("Greedy texts, 128 tokens", columns, greedy, left=3))
    return parts


def training_table(training: Mapping[str, Any]) -> Table:
    """The losses at a few steps."""
    steps = training["steps"]
    chosen = sorted({0, *range(steps // 5, steps, max(1, steps // 5)), steps - 1})
    lines = [[str(step), *(f"{training[name][step]:.6f}" for name in ("stock_losses", "tiled_losses"))] for step in chosen]
    lines.append(["eval", *(f"{training[name]:.6f}" for name in ("stock_eval_loss", "tiled_eval_loss"))])
    served = training["served"]
    caption = (
        f"{training['text']}; largest difference {training['difference']:.1e}, limit {training['limit']:.1e}; "
        f"{sum(count > 0 for count in served.values())} of {len(served)} layers served"
    )
    return _table("nn.TransformerEncoder in training", "step, loss, loss converted", lines, caption=caption)


def distributed_tables(results: Mapping[str, Any]) -> list[Table]:
    """Of `compare --distributed`: parity with one process, work, memory, time and traffic of the ranks."""
    ranks, parity = results["ranks"], results["parity"]

    def line(row: Mapping[str, Any]) -> list[str]:
        names = ("one_process", "tiled", "limit", "largest", "largest_limit")
        return [row["case"], row["dtype"], row["tensor"], *(_number(row[name]) for name in names), _mark(row["passed"])]

    def judged(row: Mapping[str, Any]) -> str:
        return "-" if row["passed"] is None else _mark(row["passed"])

    shown = [*_nearest_to_limit(parity), *(row for row in parity if not row["passed"])]
    caption = (
        f"{len(parity)} tensors, {sum(row['passed'] for row in parity)} within their limit; root mean squares of the distance "
        "of one process from float64 and of the ranks from one process; largest: error of the ranks against float64"
    )
    title = f"{ranks} ranks: distance from one process, of the tensor nearest to its limit"
    tables = [
        _table(
            title, "case, dtype, tensor, one process, ranks, limit, largest, its limit, within", map(line, shown), left=3, caption=caption
        )
    ]
    work = (
        [row["layout"], str(row["n"]), *(f"{share:.3f}" for share in (min(row["shares"]), max(row["shares"]))), judged(row)]
        for row in results["work"]
    )
    tables.append(_table("Causal pairs of a rank, over the mean", "positions, n, least, most, within", work))

    measured = (
        [
            *(row["operator"], str(row["n"])),
            *(f"{value / 2**20:.1f}" for value in (row["one_bytes"], max(row["bytes"]), row["limit"])),
            judged(row),
            *(_milliseconds(row[name]) for name in ("one_seconds", "seconds")),
        ]
        for row in results["measured"]
    )
    columns = "operator, n, one process MiB, rank MiB, limit, within, one process ms, ranks ms"
    caption = (
        f"batch 1, {results['num_heads']} heads of {results['head_dim']}, float32, causal, forward and backward; MiB: above the baseline "
        f"of the interpreter, the most of any rank; {results['machine']['threads']} threads in one process, and shared out to the ranks; - "
        "where it is too small to judge"
    )
    tables.append(_table("Memory and time", columns, measured, caption=caption))
    sent = (
        [
            *(row["operator"], row["direction"], str(row["n"])),
            *("-" if value is None else f"{value / 2**10:.1f}" for value in (row["bytes"] and sum(row["bytes"]), row["formula"])),
            judged(row),
        ]
        for row in results["sent"]
    )
    caption = "of all ranks, over their connections to each other, with headers; what goes to the store is left out"
    return [*tables, _table("Traffic: KiB sent", "operator, direction, n, counted, by formula, equal", sent, left=2, caption=caption)]


def _verdict(console: Console, results: Mapping[str, Any], held: str) -> None:
    for line in machine_lines(results["machine"]):
        console.print(line, highlight=False)
    for failure in results["failures"]:
        console.print(f"[bold red]{failure}[/]")
    console.print("[bold red]Something is broken: see above.[/]" if results["failures"] else f"[bold green]{held}[/]")


def show(console: Console, results: Mapping[str, Any]) -> None:
    """Everything that was measured, and the verdict."""
    parts: list[Table | str] = list(parity_tables(results["parity"]))
    parts += [
        speed_table(results["speed"]),
        *memory_parts(results["memory"]),
        *linear_tables(results["linear"]),
        *operator_tables(results["operators"]),
        *model_tables(results["models"]),
    ]
    parts.append(training_table(results["training"]))
    for part in parts:
        console.print(part)
        console.print()
    _verdict(console, results, "All limits hold; every replaced layer was served.")


def show_distributed(console: Console, results: Mapping[str, Any]) -> None:
    """The same of `compare --distributed`."""
    for table in distributed_tables(results):
        console.print(table)
        console.print()
    _verdict(console, results, "All limits hold.")
