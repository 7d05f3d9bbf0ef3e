"""The named lists of cases. Lengths stand one below, at and above the multiples of 6, 12, 16, 32, 96, 256 and 4096 where tiles may end."""

import itertools
import math

from tiled_attention.testing import DTYPES, LAYOUTS, Case

F32, F64, BF16, F16 = DTYPES
INF, NAN = math.inf, math.nan
# fmt: off
LENGTHS = (1, 2, 3, 4, 7, 8, 11, 12, 13, 16, 31, 32, 33, 48, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193,
           255, 256, 257, 511, 512, 513, 1023, 1024, 1025)
HEAD_DIMS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 72, 80, 96, 128, 129, 257)
# fmt: on
STREAMING = "Causal() & (SlidingWindow(7, 0) | Sinks(3))"

SMALL = [
    *(Case(dtype=dtype, mask=mask) for dtype in DTYPES for mask in (None, "Causal()")),
    Case(num_heads=6, num_heads_kv=2, seqlen_q=5, seqlen_kv=70, mask=STREAMING, softcap=2.0, alibi=True, sinks=True),
    Case(seqlen_q=17, seqlen_kv=5, mask="Causal() & Bool(17, 5)", bias=(2, 1, 1, 5)),
    Case(dropout_p=0.3, seqlen_q=33, head_dim_v=5),
]


def _boundary() -> list[Case]:
    cases = []
    for k, n in enumerate(LENGTHS):
        few = {"batch": (1,), "num_heads": 1} if n > 300 else {"batch": (2,), "num_heads": 2}
        dtypes = DTYPES if n < 300 else (DTYPES[k % 4], DTYPES[(k + 1) % 4])
        for m, dtype in enumerate(dtypes):
            square = Case(**few, seqlen_q=n, head_dim=16, dtype=dtype, mask=(None, "Causal()")[(k + m) % 2], seed=k)
            keys = Case(num_heads=4, num_heads_kv=2, seqlen_q=(1, 3, 13, 33)[(k + m) % 4], seqlen_kv=n, dtype=dtype, seed=k)
            queries = Case(seqlen_q=n, seqlen_kv=(5, 17, 40)[(k + m) % 3], dtype=dtype, mask="SlidingWindow(2, 1)", head_dim_v=12, seed=k)
            cases += [square, keys, queries.replace(query_offset=0)]
        window = (n // 2, n - 1, 0)[k % 3]
        cases.append(Case(**few, seqlen_q=n, mask=f"SlidingWindow({window}, 0)", dtype=DTYPES[(k + 2) % 4], seed=k))
    for k, d in enumerate(HEAD_DIMS):
        cases += [Case(seqlen_q=9, seqlen_kv=11, head_dim=d, head_dim_v=dv, seed=k) for dv in sorted({1, 5, d, 2 * d})]
        for m, dtype in enumerate(DTYPES):
            dv = (d, 2 * d, 5, 1)[(k + m) % 4]
            cases.append(Case(batch=(1,), seqlen_q=70, seqlen_kv=67, head_dim=d, head_dim_v=dv, dtype=dtype, mask="Causal()", seed=k))
    return cases


BOUNDARY = _boundary()

MASKS = (
    "Causal()",
    "Causal(align='top_left')",
    "SlidingWindow(5, 0)",
    "SlidingWindow(3, 4)",
    "SlidingWindow(0, 0)",
    "SlidingWindow(100, 100)",
    "PrefixLM(9)",
    "Chunked(8)",
    "KeyLengths((50, 21))",
    "KeyLengths((0, 7))",
    "Documents((0, 11, 30, 53))",
    "Documents((0, 20, 40))",
    "Sinks(3)",
    "Sinks(100)",
    STREAMING,
    "Causal() & SlidingWindow(7, 2)",
    "Causal() & KeyLengths((50, 21))",
    "Causal(align='top_left') & SlidingWindow(25, 0)",
    "Causal() & Causal(align='top_left')",
    "SlidingWindow(3, 3) | Sinks(2)",
    "PrefixLM(9) & SlidingWindow(12, 12)",
    "PrefixLM(9) & KeyLengths((50, 21)) & Chunked(16)",
    "Chunked(8) & Causal()",
    "Chunked(8) & Chunked(12)",
    "Documents((0, 11, 30, 53)) & Causal()",
    "Documents((0, 11, 30, 53)) & Causal() & (SlidingWindow(4, 0) | Sinks(14))",
    "KeyLengths((50, 21)) & Chunked(16) & (SlidingWindow(4, 1) | Sinks(2))",
    "SlidingWindow(9, 9) & SlidingWindow(4, 20) & (SlidingWindow(6, 2) | Sinks(4))",
    "Causal() | Sinks(20)",
    "Chunked(8) | SlidingWindow(1, 1)",
    "Causal() & Bool(37, 53)",
    "SlidingWindow(3, 4) | Bool(2, 1, 37, 53)",
)
BROADCASTS = (
    *((), (1,), (53,), (37, 53), (1, 53), (37, 1), (1, 1, 1, 53), (2, 1, 1, 53), (2, 1, 37, 1), (1, 4, 37, 53), (4, 1, 53)),
    *((4, 1, 1), (2, 4, 37, 53), (2, 1, 37, 53), (2, 4, 1, 1), (2, 4, 37, 1)),
)
BASE = Case(num_heads=4, num_heads_kv=2, seqlen_q=37, seqlen_kv=53, head_dim=16, head_dim_v=24)
NARROW = Case(batch=(1,), num_heads=2, num_heads_kv=1, seqlen_q=1150, head_dim=16, sinks=True)
TALL = BASE.replace(seqlen_q=53, seqlen_kv=37)  # more queries than keys: causal rows that see nothing

# Each option by itself; any two with different fields also make a pair.
OPTIONS = (
    {"mask": "Causal()"},
    {"mask": STREAMING},
    {"mask": "KeyLengths((30, 0))"},
    {"mask": "Chunked(8) & Causal()"},
    {"mask": "Bool(2, 4, 1, 1, keep=0.5)"},
    {"mask": "Bool(53, keep=0.5)"},
    {"bias": (53,)},
    {"bias": (2, 4, 37, 53), "bias_hidden": 0.3},
    {"bias": (4, 1, 1)},
    {"query_offset": 5},
    {"query_offset": (3, 16)},
    {"softcap": 1.5},
    {"alibi": True},
    {"sinks": True},
    {"dropout_p": 0.25},
    {"scale": -0.3},
    {"layout": ("heads_last", "dim_first", "strided")},
    {"num_heads_kv": 1},
    {"num_heads_kv": 4, "batch": (2,)},
)


def _features() -> list[Case]:
    cases = []
    for k, mask in enumerate(MASKS):
        cases += [BASE.replace(mask=mask, dtype=dtype, seed=k) for dtype in (F32, DTYPES[1 + k % 3])]
        if "Bool" not in mask:
            cases += [
                TALL.replace(mask=mask, dtype=DTYPES[k % 4], seed=k),
                BASE.replace(mask=mask, query_offset=(40, -9), dtype=F64, seed=k),
            ]
            cases.append(TALL.replace(mask=mask, query_offset=(-20, 3, 25)[k % 3], dtype=DTYPES[(k + 3) % 4], seed=k))
    for k, shape in enumerate(BROADCASTS):
        cases.append(BASE.replace(mask=f"Bool{shape}", dtype=DTYPES[k % 4], seed=k))
        cases += [BASE.replace(bias=shape, bias_hidden=0.2 * (m % 2), dtype=dtype, seed=k) for m, dtype in enumerate((F32, F64, BF16, F16))]
        cases.append(BASE.replace(mask="Causal() & KeyLengths((50, 21))", bias=shape, dtype=DTYPES[(k + 1) % 4], seed=k))
    bias_dtypes = itertools.product(DTYPES, DTYPES, ((37, 53), (4, 1, 53)))
    cases += [BASE.replace(dtype=dtype, bias=shape, bias_dtype=bias, bias_hidden=0.1) for dtype, bias, shape in bias_dtypes]
    for k, (first, second) in enumerate(itertools.combinations(OPTIONS, 2)):
        if not first.keys() & second.keys():
            pair = BASE.replace(**first | second, dtype=DTYPES[k % 4], seed=k)
            cases.append(pair if pair.bias or "53" in (pair.mask or "") or k % 3 else pair.replace(seqlen_q=53, seqlen_kv=37))
    cases += [BASE.replace(**option, dtype=dtype) for option in OPTIONS for dtype in DTYPES]
    everything = {
        "mask": STREAMING,
        "bias": (4, 37, 53),
        "bias_hidden": 0.1,
        "query_offset": (3, 16),
        "softcap": 3.0,
        "alibi": True,
        "sinks": True,
        "dropout_p": 0.1,
    }
    cases += [BASE.replace(**everything, dtype=dtype) for dtype in DTYPES]
    cases += [
        Case(batch=batch, num_heads=3, seqlen_q=5, seqlen_kv=7, dtype=F64, bias=(7,))
        for batch in ((), (1,), (2, 3), (2, 1, 3), (1, 2, 1, 2, 2))
    ]
    cases += [Case(num_heads=6, num_heads_kv=h, seqlen_q=7, seqlen_kv=20, bias=(6, 7, 20), sinks=True, alibi=True) for h in (1, 2, 3, 6)]
    return list(dict.fromkeys(cases))


FEATURES = _features()

ADVERSARIAL = [
    # What nobody sees.
    *(
        BASE.replace(mask=mask, hidden=bad, bias=(2, 4, 37, 53), dtype=DTYPES[k % 4])
        for k, (mask, bad) in enumerate(
            itertools.product(
                ("KeyLengths((50, 21))", "KeyLengths((0, 7))", "Bool(2, 1, 1, 53)", "SlidingWindow(2, 0)", "Sinks(3)"), (NAN, INF, -INF)
            )
        )
    ),
    # The same beside an odd number of rows, the last of which pairs with none.
    *(Case(seqlen_q=7, seqlen_kv=90, mask="KeyLengths((50, 21))", hidden=bad, dtype=dtype) for dtype in DTYPES for bad in (NAN, INF)),
    # Scores far from 0, equal, or tiny.
    *(BASE.replace(spread=20.0, dtype=dtype) for dtype in (F32, F64)),
    *(BASE.replace(spread=200.0, softcap=50.0, dtype=dtype) for dtype in (F32, F64)),
    *(BASE.replace(scale=scale, mask="Causal()", dtype=dtype) for scale in (0.0, 1e-6, -1.0, 3.0) for dtype in DTYPES),
    *(BASE.replace(spread=1e-3, dtype=dtype) for dtype in DTYPES),
    *(BASE.replace(spread=1e-18, scale=1.0, dtype=dtype) for dtype in (F32, F64)),
    # delta taken from a rounded output shows when all keys and values share an offset.
    *(
        BASE.replace(shift=3.0, seqlen_kv=200, head_dim=64, head_dim_v=64, dtype=dtype, mask=mask)
        for dtype in DTYPES
        for mask in (None, "Causal()")
    ),
    # Every layout for all three, and alternating.
    *(BASE.replace(layout=layout, mask="Causal()", dtype=dtype) for layout in LAYOUTS[:-1] for dtype in DTYPES),
    *(
        BASE.replace(layout=(a, b, c), dtype=F32)
        for a, b, c in zip(LAYOUTS[:8], LAYOUTS[3:8] + LAYOUTS[:3], LAYOUTS[5:8] + LAYOUTS[:5], strict=True)
    ),
    # Dropout that drops all, nothing, or a share below half a step of 2^-16.
    *(BASE.replace(dropout_p=p, dtype=dtype) for p in (1.0, 1e-6, 0.999) for dtype in (F32, BF16)),
    # Rows and heads that see nothing.
    BASE.replace(mask="Bool(37, 1, keep=0.5)"),
    BASE.replace(mask="Bool(4, 1, 1, keep=0.5)", bias=(53,), sinks=True),
    BASE.replace(mask="KeyLengths((0, 0))", sinks=True, alibi=True, bias=(37, 53)),
    BASE.replace(bias=(37, 53), bias_hidden=1.0, dtype=F64),
    BASE.replace(mask="SlidingWindow(5, 0)", query_offset=1 << 35),
    BASE.replace(mask="Causal()", query_offset=-(1 << 35)),
    # The first keys are all hidden: the running maximum stays -inf for whole tiles.
    *(Case(batch=(1,), seqlen_q=n, mask="SlidingWindow(9, 0)", dtype=DTYPES[k % 4]) for k, n in enumerate((63, 64, 65, 129, 640))),
    *(Case(batch=(1,), num_heads=1, seqlen_q=3, seqlen_kv=700, bias=(1, 700), bias_hidden=0.99, dtype=dtype) for dtype in DTYPES),
    # Windows much narrower than the keys are many, with few heads and with many, and with scores that are normalised again.
    *(
        NARROW.replace(mask=mask, hidden=NAN, dtype=dtype)
        for mask, dtype in (
            ("Causal() & (SlidingWindow(63, 0) | Sinks(4))", F32),
            ("SlidingWindow(20, 30)", BF16),
            ("SlidingWindow(300, 0) & Chunked(90)", F16),
        )
    ),
    NARROW.replace(mask="SlidingWindow(9, 70) & Documents((0, 500, 510, 1100))", query_offset=-40, scale=30.0),
    NARROW.replace(
        batch=(2,), num_heads=10, num_heads_kv=5, seqlen_q=90, seqlen_kv=1100, mask="SlidingWindow(9, 9)", query_offset=(700, 30)
    ),
    NARROW.replace(num_heads=8, num_heads_kv=8, seqlen_q=600, seqlen_kv=600, mask="SlidingWindow(30, 0)"),
]

SLOW = [
    *(Case(batch=(1,), num_heads=1, seqlen_q=3, seqlen_kv=n, dtype=dtype) for n in (4095, 4096, 4097, 8193) for dtype in DTYPES),
    *(
        Case(batch=(1,), num_heads=2, num_heads_kv=1, seqlen_q=n, head_dim=64, mask=STREAMING, dtype=dtype)
        for n in (1537,)
        for dtype in DTYPES
    ),
    Case(batch=(1,), num_heads=1, seqlen_q=2049, mask="Causal()", head_dim=32, sinks=True, alibi=True, softcap=5.0),
    Case(batch=(1,), num_heads=1, seqlen_q=2049, bias=(2049, 2049), dropout_p=0.1, head_dim=32),
]
