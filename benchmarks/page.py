"""The page of `plot.html` at 512 tokens: bytes, error, time to make, to draw and to answer the pointer, in Chromium.

    python benchmarks/page.py [--models] [--json FILE]

`draw` is the time from the start of the navigation until everything is painted, `hover` that from a pointer event to the end of the frame
that answers it, median and largest over 64 tokens. Without --models, weights are made up: 12 layers of 12 heads.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tiled_attention as ta
from tiled_attention.compare.models import decoder_model, sentence_model
from tiled_attention.compare.text import hamlet, spoken

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from browser import chromium

TOKENS, LAYERS, HEADS, HOVERS = 512, 12, 12, 64
HOVER = """
const done = arguments[arguments.length - 1], times = [];
(async () => {
  for (let i = 0; i < arguments[0]; i++) {
    const chip = chips.queries[(i * 37) % numQueries], start = performance.now();
    chip.dispatchEvent(new PointerEvent("pointerover", { bubbles: true, pointerType: "mouse" }));
    await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    times.push(performance.now() - start);
  }
  done(times);
})();
"""


def made_up(scale: float, mask: ta.Mask | None = None) -> tuple[torch.Tensor, list[str]]:
    """Weights whose scores are normal with the given deviation."""
    query, key = scale * torch.randn(LAYERS, HEADS, TOKENS, 64), torch.randn(LAYERS, HEADS, TOKENS, 64)
    return ta.attention_weights(query, key, mask=mask), [f"token{i}" for i in range(TOKENS)]


def of_model(load: Callable[[], tuple[Any, Any]]) -> tuple[Any, list[str]]:
    """A recording of the first tokens of Hamlet."""
    tokenizer, model = load()
    ids = tokenizer(spoken(hamlet())[: 16 * TOKENS], return_tensors="pt", truncation=True, max_length=TOKENS).input_ids
    with torch.no_grad(), ta.record_attention(model) as recording:
        model(ids)
    return recording, tokenizer.convert_ids_to_tokens(ids[0])


CASES: dict[str, Callable[[], tuple[Any, list[str]]]] = {
    "equal weights": lambda: made_up(0.0),
    "normal scores": lambda: made_up(1.0),
    "normal scores, causal": lambda: made_up(1.0, ta.Causal()),
    "normal scores x 3": lambda: made_up(3.0),
}
MODELS = {"all-MiniLM-L6-v2": lambda: of_model(sentence_model), "SmolLM2-135M": lambda: of_model(decoder_model)}


def measure(name: str, session: Any, folder: Path) -> dict[str, Any]:
    """One row of the table; the page's answer is checked against the weights before it is timed."""
    torch.manual_seed(0)
    weights, tokens = (CASES | MODELS)[name]()
    start = time.perf_counter()
    page = ta.plot.html(weights, tokens)
    seconds = time.perf_counter() - start
    path = page.save(folder / "page.html")
    session.get(path.as_uri())
    while session.execute_script("return document.documentElement.dataset.drawn") is None:
        time.sleep(0.01)
    shown = torch.tensor(session.execute_script("look(100); return [...weights].map((w) => Number.isNaN(w) ? 0 : w)"))
    exact = weights[0].weights(rows=[100])[0, 0, 0] if not isinstance(weights, torch.Tensor) else weights[0, 0, 100]
    assert (shown - exact).abs().max() <= page.error["largest"] * 1.001 + 1e-7, name
    times = session.execute_async_script(HOVER, HOVERS)
    return {
        "weights": name,
        "maps": session.execute_script("return document.querySelectorAll('#heads button').length"),
        "megabytes": path.stat().st_size / 1e6,
        "kept": page.kept,
        "error": page.error,
        "make_seconds": seconds,
        "draw_ms": float(session.execute_script("return document.documentElement.dataset.drawn")),
        "hover_ms": {"median": statistics.median(times), "largest": max(times)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", action="store_true", help="also of the two models of `compare`, on the first tokens of Hamlet")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows into this file")
    arguments = parser.parse_args()
    table = Table("weights", "maps", "MB", "error, of the row's largest", "mean error", "make", "draw", "hover, median", "largest")
    rows = []
    with tempfile.TemporaryDirectory() as folder, chromium() as session:
        session.set_script_timeout(60)
        for name in [*CASES, *(MODELS if arguments.models else ())]:
            row = measure(name, session, Path(folder))
            rows.append(row)
            error, hover = row["error"], row["hover_ms"]
            size = (f"{row['megabytes']:.1f}", f"{error['largest_of_row']:.2%}", f"{error['mean']:.2g}")
            times = [f"{row['make_seconds']:.1f} s", *(f"{ms:.0f} ms" for ms in (row["draw_ms"], hover["median"], hover["largest"]))]
            table.add_row(name, str(row["maps"]), *size, *times)
    Console(width=140).print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
