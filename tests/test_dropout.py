"""Dropout: the mask of `ta.dropout_mask` is the Philox of the contract, and attention drops exactly that, forward and backward."""

import itertools
import math

import numpy as np
import pytest
import torch

import oracle
import tiled_attention as ta
from checks import check, run
from oracle import tolerance
from tiled_attention.testing import DTYPES, Case, assert_accurate, largest

ops = torch.ops.tiled_attention
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SEEDS = (0, 1, -1, 42, 2**32 - 1, 2**32, 0x0123456789ABCDEF, -(2**63), 2**63 - 1)


def test_the_philox_of_these_tests_gives_the_known_answers():
    """The three published answers of Philox4x32-10 (Random123, kat_vectors)."""
    digits = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    answers = [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*digits, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]
    for counter, key, answer in answers:
        assert tuple(oracle.philox(np.array(counter, dtype=np.uint32), key).tolist()) == answer


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", ((1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 33, 66), (3, 1, 2, 129), (1, 1, 97, 4)), ids=str)
def test_the_mask_is_the_philox_of_the_contract(shape: tuple[int, int, int, int], seed: int, isa: str):
    for p in (0.1, 0.5, 0.999):
        got = ops.dropout_mask(torch.tensor(seed), p, *shape, [])
        assert got.dtype == torch.bool and torch.equal(got, oracle.dropout_mask(seed, p, shape))


@pytest.mark.parametrize(
    "offsets", ((0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (3, 5, 7, 9), (0, 0, 2**31 + 1, 2**32 - 99)), ids=str
)
def test_offsets_shift_the_counters(offsets: tuple[int, int, int, int], isa: str):
    shape = (2, 3, 9, 21)
    assert torch.equal(ops.dropout_mask(torch.tensor(7), 0.4, *shape, list(offsets)), oracle.dropout_mask(7, 0.4, shape, offsets))


def test_a_shard_agrees_with_the_whole(isa: str):
    whole = ops.dropout_mask(torch.tensor(11), 0.3, 3, 4, 40, 50, [])
    for b, h, q, k in ((1, 2, 5, 6), (2, 0, 39, 49), (0, 3, 12, 16), (0, 0, 1, 3)):
        assert torch.equal(ops.dropout_mask(torch.tensor(11), 0.3, 3 - b, 4 - h, 40 - q, 50 - k, [b, h, q, k]), whole[b:, h:, q:, k:])


@by_dtype
def test_attention_of_a_shard_agrees_with_the_whole(dtype: torch.dtype, isa: str):
    x = Case(batch=(3,), num_heads=4, seqlen_q=40, seqlen_kv=50, dtype=dtype).inputs()

    def call(query, key, value, offsets):
        options = (None,) * 7 + (torch.tensor(5), *(None,) * 5, 0.3, 0.0, 0.4, [], offsets, False, False, False)
        return ops.attention_fwd(query, key, value, *options)[0]

    whole = call(x.query, x.key, x.value, [])
    for b, h, q in ((1, 2, 5), (2, 0, 39), (0, 3, 12), (0, 1, 1)):
        part = call(x.query[b:, h:, q:], x.key[b:, h:], x.value[b:, h:], [b, h, q, 0])
        assert_accurate(part, whole[b:, h:, q:].double(), tolerance(dtype, largest(whole)), "out")


@pytest.mark.parametrize("p", (0.0, 1e-7, 7e-6, 1 / 65536, 3 / 65536, 0.1, 0.25, 0.5, 1 - 1 / 65536, 1 - 1e-7, 1.0))
def test_p_is_quantised_to_steps_of_2_to_the_minus_16(p: float, isa: str):
    shape = (2, 4, 128, 256)
    kept = ops.dropout_mask(torch.tensor(3), p, *shape, [])
    assert torch.equal(kept, oracle.dropout_mask(3, p, shape))
    share, n = round(p * 65536) / 65536, math.prod(shape)
    assert abs((~kept).sum().item() - share * n) <= 6 * math.sqrt(n * share * (1 - share))


@pytest.mark.parametrize("p", (7e-6, 0.1, 0.3, 0.999))
@by_dtype
def test_kept_weights_are_scaled_by_the_quantised_share(p: float, dtype: torch.dtype, isa: str):
    check(Case(num_heads=4, num_heads_kv=2, seqlen_q=35, seqlen_kv=70, dtype=dtype, dropout_p=p, seed=2))
    query, key = torch.zeros(1, 1, 33, 4, dtype=dtype), torch.zeros(1, 1, 64, 4, dtype=dtype)
    value = torch.eye(64, dtype=dtype)[None, None]
    torch.manual_seed(1)
    kept = ta.dropout_mask(1, 1, 33, 64, p)
    torch.manual_seed(1)
    out = ta.attention(query, key, value, dropout_p=p)
    want = kept.double() / 64 / (1 - round(p * 65536) / 65536)
    assert torch.equal(out == 0, ~kept)
    assert_accurate(out, want, tolerance(dtype) * largest(want) * 2, "out")


def test_below_half_a_step_nothing_is_dropped():
    x = Case(seqlen_q=40).inputs()
    assert ta.dropout_mask(2, 2, 40, 40, 7e-6).all()
    assert torch.equal(ta.attention(x.query, x.key, x.value, dropout_p=7e-6), ta.attention(x.query, x.key, x.value))


@pytest.mark.parametrize("batch", ((), (2,), (2, 3)), ids=str)
def test_dropout_mask_draws_the_seed_that_the_call_draws(batch: tuple[int, ...]):
    x = Case(batch=batch, num_heads=4, num_heads_kv=2, seqlen_q=9, seqlen_kv=20, dtype=torch.float64, dropout_p=0.4).inputs()
    for generator in (None, torch.Generator()):
        seed = generator.manual_seed if generator else torch.manual_seed
        seed(5)
        first = ta.dropout_mask(math.prod(batch), 4, 9, 20, 0.4, generator=generator)
        second = ta.dropout_mask(math.prod(batch), 4, 9, 20, 0.4, generator=generator)
        assert first.shape == (math.prod(batch), 4, 9, 20) and not torch.equal(first, second)
        seed(5)
        for kept in (first, second):
            out = ta.attention(**x.arguments(), generator=generator)
            want, _ = oracle.attention(x, kept.view(*batch, 4, 9, 20))
            assert_accurate(out, want, 1e-12, "out")


def test_a_generator_is_independent_of_the_global_state():
    x = Case(seqlen_q=20).inputs()
    state = torch.get_rng_state()
    first = ta.attention(x.query, x.key, x.value, dropout_p=0.5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    assert torch.equal(ta.attention(x.query, x.key, x.value, dropout_p=0.5, generator=torch.Generator().manual_seed(1)), first)


def test_without_dropout_no_random_number_is_drawn():
    x = Case().inputs().requires_grad_()
    state = torch.get_rng_state()
    ta.attention(x.query, x.key, x.value).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_lse_knows_nothing_of_dropout(isa: str):
    x = Case(seqlen_q=33, sinks=True).inputs()
    _, lse = ta.attention(x.query, x.key, x.value, sinks=x.sinks, dropout_p=0.7, return_lse=True)
    assert torch.equal(lse, ta.attention(x.query, x.key, x.value, sinks=x.sinks, return_lse=True)[1])


@by_dtype
def test_the_mask_is_that_of_the_pair_whatever_hides_others(dtype: torch.dtype, isa: str):
    """Hiding keys, by an interval or by bits, moves no other pair's random number."""
    for mask, (seqlen_q, seqlen_kv) in itertools.product(
        ("SlidingWindow(5, 2)", "Bool(1, 2, 1, 130, keep=0.5)", "Chunked(16) & Causal()"), ((7, 130), (150, 130))
    ):
        check(Case(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, mask=mask, dtype=dtype, dropout_p=0.3))


@by_dtype
def test_no_dropped_weight_reaches_the_gradient(dtype: torch.dtype, isa: str):
    case = Case(batch=(1,), num_heads=1, seqlen_q=1, seqlen_kv=66, dtype=dtype, dropout_p=0.5)
    torch.manual_seed(case.seed)
    kept = ta.dropout_mask(1, 1, 1, 66, 0.5)[0, 0, 0]
    got = run(case, case.inputs(), torch.ones(1, 1, 1, 8, dtype=dtype))
    assert (got["value"][0, 0, ~kept] == 0).all() and (got["value"][0, 0, kept] != 0).all()
