"""Threads: the same bits for every number of them, from several at once, and after a fork."""

import multiprocessing
import threading

import pytest
import torch
from torch import Tensor

import cases
import tiled_attention as ta
from checks import gradients_of
from tiled_attention.testing import DTYPES, Case

COUNTS = (1, 2, 3, 7)
SHAPES = [
    # Fewer heads than threads, one head, many heads, many queries, many keys.
    *(
        Case(batch=(1,), num_heads=1, seqlen_q=n, seqlen_kv=m, head_dim=16, mask=mask)
        for n, m, mask in ((700, 700, "Causal()"), (1, 5000, None), (3, 900, None))
    ),
    Case(batch=(1,), num_heads=4, num_heads_kv=1, seqlen_q=200, seqlen_kv=333, bias=(200, 333), sinks=True, alibi=True),
    Case(
        batch=(3,),
        num_heads=6,
        num_heads_kv=2,
        seqlen_q=97,
        seqlen_kv=130,
        mask=cases.STREAMING,
        bias=(130,),
        dropout_p=0.2,
        sinks=True,
        alibi=True,
    ),
    Case(
        batch=(2,), num_heads=2, seqlen_q=130, seqlen_kv=65, mask="Bool(2, 1, 130, 65)", bias=(2, 1, 1), softcap=3.0, sinks=True, alibi=True
    ),
    cases.NARROW.replace(mask="Causal() & (SlidingWindow(63, 0) | Sinks(4))"),
    Case(batch=(1,), num_heads=2, seqlen_q=2050, seqlen_kv=40, bias=(1, 40), alibi=True, sinks=True),
]


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """The names that differ."""
    return [name for name in want if not torch.equal(got[name], want[name])]


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_threads_gives_the_same_bits(case: Case, dtype: torch.dtype, isa: str):
    case = case.replace(dtype=dtype)
    torch.set_num_threads(1)
    want = gradients_of(case)
    for count in COUNTS[1:]:
        torch.set_num_threads(count)
        assert not same(gradients_of(case), want), f"{count} threads"


def test_the_number_of_threads_may_change_between_forward_and_backward(isa: str):
    x = Case(num_heads=3, seqlen_q=300, mask="Causal()", alibi=True, sinks=True, bias=(300, 300)).inputs().requires_grad_()
    leaves = list(x.leaves().values())
    results = []
    for forward, backward in ((1, 1), (1, 7), (7, 1), (3, 2)):
        torch.set_num_threads(forward)
        out = ta.attention(**x.arguments())
        torch.set_num_threads(backward)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_several_python_threads_at_once():
    work = [
        Case(num_heads=4, num_heads_kv=2, seqlen_q=40 + 17 * k, mask="Causal()", bias=(1, 1), seed=k, dtype=DTYPES[k % 4]) for k in range(8)
    ]
    want = [gradients_of(case) for case in work]
    wrong: list[object] = []

    def worker(k: int) -> None:
        try:
            for _ in range(10):
                wrong.extend(same(gradients_of(work[k]), want[k]))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=worker, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_a_call_inside_a_parallel_backward():
    """Two independent branches, whose backward the engine may run in other threads than the one that called."""
    x = torch.randn(2, 4, 90, 16, requires_grad=True)
    first = ta.attention(x, x, x, mask=ta.Causal())
    second = ta.attention(first, x, x)
    (want,) = torch.autograd.grad((first + second).square().sum(), x, retain_graph=True)
    results: list[Tensor] = []
    threads = [
        threading.Thread(target=lambda: results.extend(torch.autograd.grad((first + second).square().sum(), x, retain_graph=True)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4 and all(torch.equal(got, want) for got in results)


# Tensors below 32768 elements, which torch's own operators do not share out: a child may not use the pool that its parent started.
FORKED = Case(num_heads=8, num_heads_kv=2, seqlen_q=150, mask="Causal()", bias=(150,), sinks=True, alibi=True, dropout_p=0.1)


def _answer(connection, threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    connection.send({name: tensor.numpy() for name, tensor in gradients_of(FORKED).items()})


def _ask(context, threads: int | None) -> dict[str, Tensor]:
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, threads))
    child.start()
    sender.close()
    try:
        assert receiver.poll(60), "the child does not answer"
        return {name: torch.from_numpy(array) for name, array in receiver.recv().items()}
    finally:
        child.join(10)
        if child.exitcode is None:
            child.kill()


@pytest.mark.parametrize("threads", (None, 1, 3))
def test_a_forked_child_gives_the_same_bits(threads: int | None):
    torch.set_num_threads(2)
    want = gradients_of(FORKED)
    assert not same(_ask(multiprocessing.get_context("fork"), threads), want)
    assert not same(gradients_of(FORKED), want)


def test_children_forked_from_a_thread_and_from_a_child():
    torch.set_num_threads(2)
    want = gradients_of(FORKED)
    answers: list[dict[str, Tensor]] = []
    context = multiprocessing.get_context("fork")
    thread = threading.Thread(target=lambda: answers.append(_ask(context, None)))
    thread.start()
    thread.join(90)
    assert len(answers) == 1 and not same(answers[0], want)
