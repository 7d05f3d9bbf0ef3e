"""LSH attention: time beside reformer-pytorch and beside our own exact attention, and how much of exact attention its hashes find.

(batch, num_heads, seqlen, head_dim) throughout; shared query and key, buckets of 64 tokens.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from rows import Row

import tiled_attention as ta
from tiled_attention.compare import machine
from tiled_attention.compare.timing import alternate

BUCKET_SIZE = 64
TOP = 16  # keys of a query that recall is about
Tensors = tuple[torch.Tensor, torch.Tensor]


def _call(function: Callable[..., torch.Tensor], tensors: Tensors, backward: bool) -> Callable[[], object]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    if backward:
        return lambda: torch.autograd.grad(function(*leaves).sum(), leaves)

    def forward() -> None:
        with torch.no_grad():
            function(*leaves)

    return forward


def _is_right(num_hashes: int, causal: bool) -> bool:
    query_key, value = torch.randn(1, 2, 512, 64), torch.randn(1, 2, 512, 64)
    options = {"num_hashes": num_hashes, "bucket_size": BUCKET_SIZE, "causal": causal, "seed": 0}
    seen = ta.reference.lsh_pairs(query_key, **options)
    expected = ta.attention(query_key, F.normalize(query_key, dim=-1), value, mask=seen)
    return torch.allclose(ta.lsh_attention(query_key, value, **options), expected, rtol=1e-4, atol=1e-5)


def time(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Against reformer-pytorch, which counts pairs that several rounds show once or as often as they come, and against exact attention."""
    peer = importlib.util.find_spec("reformer_pytorch") is not None
    if not peer:
        yield Row("lsh", "reformer-pytorch is not installed")
    with machine.pinned(threads):
        for seqlen, num_hashes in ((4096, 4), (16384, 4), (16384, 8)):
            tensors = (torch.randn(1, 8, seqlen, 64), torch.randn(1, 8, seqlen, 64))
            options = {"num_hashes": num_hashes, "bucket_size": BUCKET_SIZE, "causal": True, "seed": 0}
            others: dict[str, Callable[..., torch.Tensor]] = {"ours, exact causal": _exact}
            if peer:
                others |= {
                    f"reformer-pytorch, {name}": _reformer(num_hashes, repeated)
                    for name, repeated in (("each pair once", False), ("repeated pairs", True))
                }
            for backward in (False, True):
                what = f"(1, 8, {seqlen}, 64) causal, {num_hashes} rounds, {'forward+backward' if backward else 'forward'}"
                if not _is_right(num_hashes, True):
                    yield Row("lsh", what, wrong=True)
                    continue
                for against, other in others.items():
                    ours = _call(partial(ta.lsh_attention, **options), tensors, backward)
                    found = alternate({"ours": ours, "theirs": _call(other, tensors, backward)}, rounds=rounds, seconds=seconds)
                    yield Row("lsh", what, against, "ms", found["ours"] * 1e3, found["theirs"] * 1e3)


def _exact(query_key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return ta.attention(query_key, F.normalize(query_key, dim=-1), value, mask=ta.Causal())


def _reformer(num_hashes: int, repeated: bool) -> Callable[..., torch.Tensor]:
    from reformer_pytorch.reformer_pytorch import LSHAttention

    layer = LSHAttention(bucket_size=BUCKET_SIZE, n_hashes=num_hashes, causal=True, allow_duplicate_attention=repeated)

    def call(query_key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out, *_ = layer(query_key.flatten(0, 1), value.flatten(0, 1))
        return out.view(value.shape)

    return call


def recall(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Of the keys with the largest scores, and of the weight, the share that is seen; and the error of the output."""
    seqlen, head_dim = 4096, 64
    for name, spread, sharpness in (
        ("independent tokens", None, 8.0),
        ("clusters of 32, near", 0.3, 8.0),
        ("clusters of 32, wide", 1.0, 8.0),
    ):
        generator = torch.Generator().manual_seed(0)
        query_key = torch.randn(1, 2, seqlen, head_dim, generator=generator)
        if spread is not None:
            centers = torch.randn(1, 2, seqlen // 32, head_dim, generator=generator).repeat_interleave(32, 2)
            query_key = (centers + spread * query_key)[:, :, torch.randperm(seqlen, generator=generator)]
        query_key, value = sharpness * query_key, torch.randn(1, 2, seqlen, head_dim, generator=generator)
        key = F.normalize(query_key, dim=-1)
        others = ~torch.eye(seqlen, dtype=torch.bool)
        weights = ta.attention_weights(query_key, key, mask=others)
        top = weights.topk(TOP).indices
        exact = weights @ value
        for num_hashes in (1, 2, 4, 8, 16):
            options = {"num_hashes": num_hashes, "bucket_size": BUCKET_SIZE, "causal": False, "seed": 0}
            seen = ta.reference.lsh_pairs(query_key, **options)
            out = ta.lsh_attention(query_key, value, **options)
            what = f"{name}, {num_hashes} rounds"
            yield Row("lsh_recall", f"{what}: pairs seen", unit="%", ours=100 * float(seen.float().mean()))
            yield Row("lsh_recall", f"{what}: of the {TOP} nearest keys", unit="%", ours=100 * float(seen.gather(-1, top).float().mean()))
            yield Row("lsh_recall", f"{what}: of the weight", unit="%", ours=100 * float((weights * seen).sum(-1).mean()))
            yield Row("lsh_recall", f"{what}: error of out", unit="%", ours=100 * float((out - exact).norm() / exact.norm()))


CLAIMS: dict[str, Callable[[int, int, float], Iterator[Row]]] = {"lsh": time, "lsh_recall": recall}
