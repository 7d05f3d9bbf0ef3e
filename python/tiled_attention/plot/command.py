"""The heatmap command: a text, a model, a page that shows where each token looks."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..compare.models import decoder_model, sentence_model, transformers_folder
from ..compare.text import Missing
from ..record import record_attention
from .html import html

MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {"all-MiniLM-L6-v2": sentence_model, "SmolLM2-135M": decoder_model}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", help="the text")
    text.add_argument("--file", type=Path, help="a file that holds it (UTF-8)")
    parser.add_argument(
        "--model",
        default="all-MiniLM-L6-v2",
        metavar="NAME",
        help=f"{' or '.join(MODELS)} (the models of compare), or a folder of a Hugging Face model (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, metavar="PAGE.html", help="write the page here")
    parser.add_argument("--png", type=Path, metavar="PICTURE.png", help="write all heads as one picture here (needs matplotlib)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="use the first N tokens of the text")
    parser.add_argument("--title", help="of the page (default: the name of the model)")


class UsageError(Exception):
    """What was asked for cannot be done; the text says why."""


def _load(name: str) -> tuple[Any, Any]:
    known = {model.lower(): load for model, load in MODELS.items()}
    if name.lower() in known:
        return known[name.lower()]()
    if Path(name).is_dir():
        return transformers_folder(Path(name))
    raise UsageError(f"--model must be {', '.join(MODELS)} or a folder, got {name!r}")


def token_labels(tokenizer: Any, ids: list[int]) -> list[str]:
    """What each token stands for; its own name where that is not text, as half of a character is not."""
    names = tokenizer.convert_ids_to_tokens(ids)
    texts = [name if name.startswith("##") else tokenizer.decode([token]) for token, name in zip(ids, names)]
    return [name if not text or "\ufffd" in text else text for text, name in zip(texts, names)]


def _tokens(arguments: argparse.Namespace, tokenizer: Any, model: Any) -> torch.Tensor:
    """(1, seqlen)"""
    if arguments.file is not None:
        try:
            text = arguments.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--file {arguments.file} cannot be read as UTF-8: {error}") from error
    else:
        text = arguments.text
    if not text.strip():
        raise UsageError("--text must hold a word at least, got none")
    limit = int(getattr(model.config, "max_position_embeddings", 0)) or None
    wanted = arguments.max_tokens
    if wanted is not None and wanted < 1:
        raise UsageError(f"--max-tokens must be at least 1, got {wanted}")
    options = {} if wanted is None else {"truncation": True, "max_length": wanted}
    ids: torch.Tensor = tokenizer(text, return_tensors="pt", **options).input_ids
    if limit is not None and ids.shape[1] > limit:
        raise UsageError(f"the text has {ids.shape[1]} tokens, {arguments.model} takes {limit}: --max-tokens {limit} uses the first ones")
    return ids


def run(arguments: argparse.Namespace) -> int:
    """Writes what was asked for; 0, or 2 with a message where that cannot be."""
    try:
        if arguments.out is None and arguments.png is None:
            raise UsageError("nothing to write: give --out PAGE.html, --png PICTURE.png or both")
        for path in (arguments.out, arguments.png):
            if path is not None and not path.absolute().parent.is_dir():
                raise UsageError(f"{path.parent} is not a folder")
        tokenizer, model = _load(arguments.model)
        ids = _tokens(arguments, tokenizer, model)
    except (UsageError, Missing) as error:
        print(f"heatmap: {error}", file=sys.stderr)
        return 2
    with torch.no_grad(), record_attention(model) as recording:
        model(ids)
    names = [f"layer {index}" for index in range(len(recording))]
    tokens = token_labels(tokenizer, ids[0].tolist())
    known = {name.lower(): name for name in MODELS}
    title = arguments.title or known.get(arguments.model.lower(), Path(arguments.model).name)
    print(f"{title}: {len(tokens)} tokens, {len(recording)} layers, {sum(len(layer.heads) for layer in recording)} heads")
    if arguments.out is not None:
        page = html(recording, tokens, title=title, layer_names=names)
        size = len(str(page).encode()) / 1e6
        kept = "every weight" if page.kept == "all" else "the largest weights of each row"
        print(f"{page.save(arguments.out)}: {size:.1f} MB, {kept}, within {page.error['largest_of_row']:.2%} of the largest in its row")
    if arguments.png is not None:
        _picture(recording, tokens, title, arguments.png)
        print(arguments.png)
    return 0


def _picture(recording: Any, tokens: list[str], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from .heatmap import heatmap

    grid = heatmap(recording, tokens=tokens, title=title)
    figure = grid.flat[0].figure if hasattr(grid, "flat") else grid.figure
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
