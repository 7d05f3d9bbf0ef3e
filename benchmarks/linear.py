"""Linear attention: against the same formula in PyTorch's operators, our own exact attention, and its own other dtypes.

(batch, num_heads, seqlen, head_dim); phi = elu + 1 throughout. Shares of the peak count 4 n d (d + 32) multiply-adds and additions when
causal, whatever chunk is used, and 2.5 times the forward's for the backward.
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from rows import Row

import tiled_attention as ta
from tiled_attention.compare import linear_peers, machine
from tiled_attention.compare.memory import in_fresh_process
from tiled_attention.compare.timing import alternate
from tiled_attention.library import ops
from tiled_attention.linear_testing import LinearCase

DIRECTIONS = ("forward", "backward", "forward+backward")
Function = Callable[..., torch.Tensor]


def _shape(seqlen: int, head_dim: int = 64, causal: bool = True, dtype: torch.dtype = torch.float32) -> LinearCase:
    return LinearCase(batch=(1,), num_heads=8, seqlen_q=seqlen, head_dim=head_dim, causal=causal, dtype=dtype)


def _name(case: LinearCase) -> str:
    return f"(1, 8, {case.seqlen_q}, {case.head_dim}) {machine.dtype_name(case.dtype)}{'' if case.causal else ' not causal'}"


def _call(function: Function, case: LinearCase, direction: str) -> Callable[[], object]:
    """What the clock sees: `function(query, key, value)`."""
    inputs = case.inputs()
    tensors = [inputs[name].requires_grad_() for name in ("query", "key", "value")]
    grad_out = torch.ones_like(inputs["value"])
    if direction == "forward":

        def forward() -> None:
            with torch.no_grad():
                function(*tensors)

        return forward
    if direction == "backward":
        out = function(*tensors)
        return lambda: torch.autograd.grad(out, tensors, grad_out, retain_graph=True)
    return lambda: torch.autograd.grad(function(*tensors), tensors, grad_out)


def _is_right(case: LinearCase, ours: Function, theirs: Function) -> bool:
    inputs = case.inputs()
    results = []
    for function in (ours, theirs):
        tensors = [inputs[name].clone().requires_grad_() for name in ("query", "key", "value")]
        out = function(*tensors)
        results.append((out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out))))
    return all(bool((a - b).double().abs().max() <= 1e-3 * b.double().abs().max()) for a, b in zip(*results))


def _pair(
    claim: str, case: LinearCase, direction: str, against: str, theirs: Callable[[], object], settings: tuple[int, int, float]
) -> Row:
    """One timed pair; `theirs` is a ready call."""
    threads, rounds, seconds = settings
    ours = partial(ta.linear_attention, causal=case.causal)
    found = alternate({"ours": _call(ours, case, direction), "theirs": theirs}, rounds=rounds, seconds=seconds)
    row = Row(claim, f"{_name(case)} {direction}", against, "ms", found["ours"] * 1e3, found["theirs"] * 1e3)
    flops = sum(case.flops(backward) for backward in (False, True) if direction in ("forward+backward", DIRECTIONS[backward]))
    row.share = flops / found["ours"] / (float(ops._peak(machine.PEAK_CODES[case.dtype])) * threads * 1e9)
    return row


def composite(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Causal against the chunked composite, not causal against two products."""
    reach = {"forward": {4096: 3.5, 16384: 7.0}, "backward": {}, "forward+backward": {4096: 2.7, 16384: 5.0}}
    shares = {"forward": 0.65, "backward": 0.60, "forward+backward": None}
    with machine.pinned(threads):
        for head_dim, seqlen, direction in itertools.product((64, 128), (4096, 16384), DIRECTIONS):
            case = _shape(seqlen, head_dim)
            if seqlen == 4096 and not _is_right(case, partial(ta.linear_attention, causal=True), linear_peers.chunked):
                yield Row("linear", _name(case), wrong=True)
                continue
            theirs = _call(linear_peers.chunked, case, direction)
            row = _pair("linear", case, direction, "chunked composite", theirs, (threads, rounds, seconds))
            yield row.want(at_least=reach[direction].get(seqlen) if head_dim == 64 else None, min_share=shares[direction])
        case = _shape(4096, causal=False)
        for direction in DIRECTIONS[:2]:
            theirs = _call(linear_peers.two_products, case, direction)
            yield _pair("linear", case, direction, "two products", theirs, (threads, rounds, seconds)).want(at_least=2.5)


def dtypes(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """16-bit types against float32."""
    with machine.pinned(threads):
        for dtype, direction in itertools.product((torch.bfloat16, torch.float16), DIRECTIONS[:2]):
            theirs = _call(partial(ta.linear_attention, causal=True), _shape(4096), direction)
            row = _pair("linear_dtypes", _shape(4096, dtype=dtype), direction, "ours, float32", theirs, (threads, rounds, seconds))
            row.share = None
            yield row.want(at_most=1.1)


def decays(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """A decay per token and per feature against none."""
    with machine.pinned(threads):
        for shape, direction in itertools.product(((1, 8, 4096), (1, 8, 4096, 64)), DIRECTIONS[:2]):
            log_decay = -0.02 * torch.rand(shape)
            case = _shape(4096)
            calls = {
                "ours": _call(partial(ta.linear_attention, causal=True, log_decay=log_decay), case, direction),
                "theirs": _call(partial(ta.linear_attention, causal=True), case, direction),
            }
            found = alternate(calls, rounds=rounds, seconds=seconds)
            what = f"{_name(case)} {direction}, log_decay {tuple(shape)}"
            yield Row("linear_decays", what, "ours, none", "ms", found["ours"] * 1e3, found["theirs"] * 1e3)


def exact(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Against our own exact causal attention: from which length linear attention is faster."""
    with machine.pinned(threads):
        for seqlen, direction in itertools.product((128, 256, 512, 1024, 4096, 16384), DIRECTIONS[:2]):
            theirs = _call(partial(ta.attention, mask=ta.Causal()), _shape(seqlen), direction)
            row = _pair("linear_exact", _shape(seqlen), direction, "ours, exact causal", theirs, (threads, rounds, seconds))
            reach = {16384: 30.0}.get(seqlen, 1.0 if seqlen >= 512 else None)
            yield row.want(at_least=reach if direction == "forward" else None)


def one_head(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """One head: all threads against one thread."""
    with machine.pinned(threads):
        for causal, direction in itertools.product((True, False), DIRECTIONS[:2]):
            call = _call(partial(ta.linear_attention, causal=causal), _shape(16384, causal=causal).replace(num_heads=1), direction)

            def on(number: int, call: Callable[[], object] = call) -> None:
                torch.set_num_threads(number)
                call()

            found = alternate({"ours": partial(on, threads), "theirs": partial(on, 1)}, rounds=rounds, seconds=seconds)
            what = f"(1, 1, 16384, 64){'' if causal else ' not causal'} {direction}, {threads} threads"
            yield Row("linear_one_head", what, "ours, 1 thread", "ms", found["ours"] * 1e3, found["theirs"] * 1e3)
        torch.set_num_threads(threads)


def step(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """One token with the call, early and after 10^6 tokens."""
    with machine.pinned(threads), torch.no_grad():
        tokens = [torch.randn(1, 8, 1, 64) for _ in range(3)]
        first = ta.LinearState(torch.zeros(1, 8, 64, 64), torch.zeros(1, 8, 64))
        late = first
        for inplace in (False, True):
            found = alternate(
                {"ours": lambda state=first, inplace=inplace: ta.linear_attention_step(*tokens, state, inplace=inplace)},
                rounds=max(rounds, 2000),
                seconds=seconds,
            )
            what = f"(1, 8, 1, 64){' in place' if inplace else ''}"
            yield Row("linear_step", what, unit="us", ours=found["ours"] * 1e6).want_value(at_most=15.0)
        for _ in range(10**6):
            ta.linear_attention_step(*tokens, late, inplace=True)
        calls = {name: partial(ta.linear_attention_step, *tokens, state) for name, state in (("ours", late), ("theirs", first))}
        found = alternate(calls, rounds=max(rounds, 2000), seconds=seconds)
        yield Row("linear_step", "(1, 8, 1, 64) after 10^6 tokens", "the first", "us", found["ours"] * 1e6, found["theirs"] * 1e6)


PACKED_LENGTHS = (2048, 16, 700, 64, 1500, 128, 33, 1024, 300, 512, 90, 1200, 256, 17, 1800, 48)  # 16 to 2048


def packed(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Packed sequences of mixed lengths against one sequence of the same total, and against a call for each of them."""
    lengths = torch.tensor((0, *PACKED_LENGTHS))
    cu_seqlens = lengths.cumsum(0)
    total = int(cu_seqlens[-1])
    ours = partial(ta.linear_attention, causal=True, cu_seqlens=cu_seqlens)
    whole = partial(ta.linear_attention, causal=True)

    def one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        parts = zip(*(tensor.split(PACKED_LENGTHS, 2) for tensor in (query, key, value)))
        return torch.cat([whole(*part) for part in parts], 2)

    with machine.pinned(threads):
        for num_heads, direction in itertools.product((8, 1), DIRECTIONS[:2]):
            case = _shape(total).replace(num_heads=num_heads)
            if not _is_right(case, ours, one_by_one):
                yield Row("linear_packed", _name(case), wrong=True)
                continue
            calls = {name: _call(function, case, direction) for name, function in (("ours", ours), ("theirs", whole), ("loop", one_by_one))}
            found = alternate(calls, rounds=rounds, seconds=seconds)
            what = f"(1, {num_heads}, {total}, 64) float32, {len(PACKED_LENGTHS)} sequences, {direction}"
            yield Row("linear_packed", what, "ours, one sequence", "ms", found["ours"] * 1e3, found["theirs"] * 1e3)
            yield Row("linear_packed", what, "ours, a call each", "ms", found["ours"] * 1e3, found["loop"] * 1e3).want(at_least=1.0)


def memory(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """Slope of the peak beyond the inputs over n, forward+backward, against the size of outputs and gradients."""
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        peaks = {}
        for n in (16384, 32768):
            options = {"implementation": "linear", "n": n, "num_heads": 8, "head_dim": 64, "threads": threads, "timed_calls": 0}
            peaks[n] = in_fresh_process(**options, dtype=dtype)["bytes"]
        slope = (peaks[32768] - peaks[16384]) / 16384
        # Inputs, out, grad_out and three gradients; the inputs are there before.
        allowed = 1.1 * 8 * 64 * itemsize * 8 - 3 * 8 * 64 * itemsize
        row = Row("linear_memory", f"(1, 8, n, 64) {dtype} forward+backward, bytes per token", unit="B", ours=slope)
        yield row.want_value(at_most=allowed)


def fast_transformers(threads: int, rounds: int, seconds: float) -> Iterator[Row]:
    """The causal kernel and the layer of pytorch-fast-transformers, where it is installed."""
    if importlib.util.find_spec("fast_transformers") is None:
        yield Row("linear_peer", "pytorch-fast-transformers is not installed")
        return
    from fast_transformers.attention import CausalLinearAttention
    from fast_transformers.causal_product import causal_dot_product
    from fast_transformers.masking import LengthMask, TriangularCausalMask

    layer = CausalLinearAttention(64)
    case = _shape(4096)
    lengths, causal = LengthMask(torch.tensor([4096])), TriangularCausalMask(4096)

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        phi_q, phi_k = torch.nn.functional.elu(query) + 1, torch.nn.functional.elu(key) + 1
        denominator = (phi_q * phi_k.cumsum(-2)).sum(-1, keepdim=True)
        return causal_dot_product(phi_q, phi_k, value) / denominator

    def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads_last = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return layer(*heads_last, causal, lengths, lengths).transpose(1, 2)

    with machine.pinned(threads):
        for name, function, reaches in (("its kernel", kernel, (3.0, None, 3.0)), ("its layer", whole, (8.0, None, 3.0))):
            if not _is_right(case, partial(ta.linear_attention, causal=True), function):
                yield Row("linear_peer", f"{_name(case)}, {name}", wrong=True)
                continue
            for direction, reach in zip(DIRECTIONS, reaches):
                theirs = _call(function, case, direction)
                row = _pair("linear_peer", case, direction, f"fast-transformers, {name}", theirs, (threads, rounds, seconds))
                yield row.want(at_least=reach)


CLAIMS: dict[str, Callable[[int, int, float], Iterator[Row]]] = {
    "linear": composite,
    "linear_dtypes": dtypes,
    "linear_decays": decays,
    "linear_exact": exact,
    "linear_one_head": one_head,
    "linear_step": step,
    "linear_packed": packed,
    "linear_memory": memory,
    "linear_peer": fast_transformers,
}
