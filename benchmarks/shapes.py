"""What the benchmarks measure, and the number that each is to reach. Two threads; (batch, num_heads, seqlen, head_dim)."""

from dataclasses import dataclass

import torch

from tiled_attention.testing import Case

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CAUSAL = "Causal()"


@dataclass(frozen=True)
class Measurement:
    """One timed pair.

    base: the case that ours is timed against, run here too; None: F.scaled_dot_product_attention on the same inputs.
    at_least: their time over ours. at_most: our time over theirs. min_share: of the machine's peak, over visible pairs.
    isa: the instruction set of both, None for the machine's best. bias_gradient: whether the bias of the case asks for one.
    """

    claim: str
    case: Case
    direction: str  # forward, backward, forward+backward
    base: Case | None = None
    at_least: float | None = None
    at_most: float | None = None
    min_share: float | None = None
    isa: str | None = None
    bias_gradient: bool = False


def shape(batch: int, num_heads: int, seqlen: int, head_dim: int, dtype: torch.dtype = F32, mask: str | None = None) -> Case:
    """A plain case."""
    return Case(batch=(batch,), num_heads=num_heads, seqlen_q=seqlen, head_dim=head_dim, dtype=dtype, mask=mask)


def _long(claim: str, full: float, shares: tuple[float, dict[int, float]], causal: dict[int, float]) -> list[Measurement]:
    found = []
    for head_dim in (64, 128):
        for seqlen in (512, 1024, 2048, 4096):
            long = seqlen >= 1024
            found += [
                Measurement(
                    claim,
                    shape(1, 8, seqlen, head_dim),
                    claim,
                    at_least=full if long else None,
                    min_share=shares[0] if long else None,
                ),
                Measurement(
                    claim,
                    shape(1, 8, seqlen, head_dim, mask=CAUSAL),
                    claim,
                    at_least=causal[seqlen],
                    min_share=shares[1].get(seqlen),
                ),
            ]
    return found


FORWARD = _long("forward", 1.15, (0.82, {1024: 0.76, 2048: 0.80, 4096: 0.80}), {512: 2.1, 1024: 1.6, 2048: 1.35, 4096: 1.25})
BACKWARD = _long("backward", 1.2, (0.78, {1024: 0.76, 2048: 0.76, 4096: 0.76}), {512: 2.2, 1024: 1.6, 2048: 1.4, 4096: 1.3})

SHORT = [
    Measurement("short", shape(*sizes), direction, at_least=reach)
    for sizes, reaches in (
        ((16, 12, 128, 64), (1.5, 1.35)),  # BERT
        ((8, 12, 197, 64), (1.4, 1.25)),  # ViT
        ((8, 12, 128, 32), (1.3, 1.2)),  # MiniLM
    )
    for direction, reach in zip(("forward", "backward"), reaches)
]


def sixteen_bit(isas: list[str]) -> list[Measurement]:
    """Both 16-bit types on every instruction set; the targets depend on whether it has the bf16 dot product."""
    found = []
    for isa in isas:
        dot = "bf16" in isa
        for dtype, forward, backward in ((BF16, 2.0, 1.5), (F16, 1.7, 10.0)):
            fast = dot and dtype == BF16
            for direction, reach in (("forward", forward), ("backward", backward)):
                case, base = shape(1, 8, 2048, 64, dtype), shape(1, 8, 2048, 64)
                own = {"at_least": 1.6} if fast else {"at_most": 1.06}
                found.append(Measurement("bfloat16" if fast else "sixteen_bit", case, direction, base=base, isa=isa, **own))
                if fast or (dtype == F16 and isa == isas[-1]):
                    found.append(Measurement("bfloat16" if fast else "sixteen_bit", case, direction, at_least=reach, isa=isa))
    return found


_N = 2048
_PLAIN = shape(1, 8, _N, 64)
_BOOL, _FLOAT = _PLAIN.replace(mask=f"Bool({_N}, {_N})"), _PLAIN.replace(bias=(_N, _N))
_BIAS = _PLAIN.replace(bias=(1, 8, _N, _N))
_DROPOUT = _PLAIN.replace(dropout_p=0.1)
_WIDE = shape(1, 8, 4096, 64)
_WINDOW = _WIDE.replace(mask="SlidingWindow(256, 0)")
WINDOW_SHARE = _WINDOW.visible_pairs() / _WIDE.visible_pairs()

MASKS = [
    measurement
    for direction in ("forward", "backward")
    for measurement in (
        Measurement("masks", _BOOL, direction, at_least=2.5),
        Measurement("masks", _FLOAT, direction, at_least=1.1),
        Measurement("masks", _BOOL, direction, base=_PLAIN, at_most=1.25),
        Measurement("masks", _FLOAT, direction, base=_PLAIN, at_most=1.25),
    )
]
BIAS = [Measurement("bias", _BIAS, "forward+backward", at_least=2.0, bias_gradient=True)]
DROPOUT = [
    Measurement("dropout", _DROPOUT, "forward", at_least=6.0),
    Measurement("dropout", _DROPOUT, "forward+backward", at_least=3.0),
    Measurement("dropout", _DROPOUT, "forward", base=_PLAIN, at_most=1.15),
    Measurement("dropout", _DROPOUT, "backward", base=_PLAIN, at_most=1.10),
]
WINDOW = [
    measurement
    for direction in ("forward", "backward")
    for measurement in (
        Measurement("window", _WINDOW, direction, base=_WIDE, at_most=1.3 * WINDOW_SHARE),
        Measurement("window", _WINDOW, direction, at_least=9.0),
    )
]


def measurements(isas: list[str]) -> list[Measurement]:
    """Every pair, for the instruction sets of the machine, the best last."""
    return [*FORWARD, *BACKWARD, *SHORT, *sixteen_bit(isas), *MASKS, *BIAS, *DROPOUT, *WINDOW]
