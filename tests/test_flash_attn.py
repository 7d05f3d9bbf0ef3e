"""The functions of tiled_attention.flash_attn against what flash_attn's documentation says of them."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import tiled_attention as ta
from flash_attn_formula import formula, visible_keys
from tiled_attention import flash_attn as fa

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Of float64 the results are compared at its rounding; of the others at twice the rounding of one weighted sum.
TOLERANCE = {F64: 1e-10, F32: 2e-5, BF16: 3e-2, F16: 4e-3}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "window to the left": {"window_size": (4, -1)},
    "window to the right": {"window_size": (-1, 3)},
    "causal window": {"causal": True, "window_size": (3, 9)},
    "softcap": {"softcap": 1.5},
    "scale": {"softmax_scale": 0.3},
    "alibi": {"alibi_slopes": (4,)},
    "alibi per item": {"alibi_slopes": (2, 4), "causal": True},
    "all": {"causal": True, "window_size": (6, 0), "softcap": 2.0, "alibi_slopes": (2, 4), "softmax_scale": 0.4, "deterministic": True},
}
LENGTHS = ((7, 7), (5, 12), (9, 4), (1, 6))


def rows(*shape: int, dtype: torch.dtype = F64, grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def tensors(seqlen_q: int, seqlen_k: int, dtype: torch.dtype = F64, grad: bool = False) -> list[Tensor]:
    torch.manual_seed(seqlen_q * 100 + seqlen_k)
    return [rows(2, seqlen_q, 4, 8, dtype=dtype, grad=grad), *(rows(2, seqlen_k, 2, 8, dtype=dtype, grad=grad) for _ in range(2))]


def chosen(name: str) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(options["alibi_slopes"])
    return options


def without_hints(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "deterministic"}


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def test_signatures():
    """Names, order and defaults of flash_attn 2.8."""
    tail = "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False"
    tail += " return_attn_probs=False"
    offsets = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    documented = {
        "flash_attn_func": f"q k v {tail}",
        "flash_attn_kvpacked_func": f"q kv {tail}",
        "flash_attn_qkvpacked_func": f"qkv {tail}",
        "flash_attn_varlen_func": f"q k v {offsets} {tail} block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q kv {offsets} {tail}",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {tail}",
        "flash_attn_with_kvcache": (
            "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None "
            "block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True alibi_slopes=None "
            "num_splits=0 return_softmax_lse=False"
        ),
    }
    for name, wanted in documented.items():
        found = inspect.signature(getattr(fa, name)).parameters.values()
        given = [p.name if p.default is p.empty else f"{p.name}={p.default}".replace(" ", "") for p in found]
        assert given == wanted.split() and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in found), name


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "wanted"),
    ((2, 5, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]), (5, 2, [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]])),
)
def test_the_causal_masks_of_the_documentation(seqlen_q: int, seqlen_k: int, wanted: list[list[int]]):
    q, v = torch.zeros(1, seqlen_q, 1, seqlen_k), torch.eye(seqlen_k)[None, :, None]
    seen = fa.flash_attn_func(q, torch.zeros(1, seqlen_k, 1, seqlen_k), v, causal=True)[0, :, 0]
    assert (seen > 0).long().tolist() == wanted == visible_keys(seqlen_q, seqlen_k, True, (-1, -1)).long().tolist()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients(name: str, lengths: tuple[int, int]):
    inputs, options = tensors(*lengths, grad=True), chosen(name)
    out, lse, _ = fa.flash_attn_func(*inputs, **options, return_attn_probs=True)
    wanted, wanted_lse, _ = formula(*inputs, **without_hints(options))
    assert close(out, wanted) and close(lse, wanted_lse) and out.is_contiguous()
    seed = torch.randn_like(out)
    grads, wanted_grads = (torch.autograd.grad(result, inputs, seed) for result in (out, wanted))
    assert all(close(a, b) for a, b in zip(grads, wanted_grads))
    with torch.no_grad():
        assert torch.equal(fa.flash_attn_func(*inputs, **options), out)


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=str)
@pytest.mark.parametrize("name", ("plain", "all"))
def test_every_dtype(name: str, dtype: torch.dtype):
    inputs, options = tensors(33, 70, dtype, grad=True), chosen(name)
    out, lse, _ = fa.flash_attn_func(*inputs, **options, return_attn_probs=True)
    wanted, wanted_lse, _ = formula(*inputs, **without_hints(options))
    assert (out.dtype, lse.dtype) == (dtype, F32)
    assert close(out, wanted, TOLERANCE[dtype]) and close(lse, wanted_lse, TOLERANCE[dtype])
    grads, wanted_grads = (torch.autograd.grad(x.double().sin().sum(), inputs) for x in (out, wanted))
    assert all(close(a, b, 5 * TOLERANCE[dtype]) for a, b in zip(grads, wanted_grads))


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("name", ("plain", "causal", "all"))
def test_packed_tensors(name: str, grad: bool):
    options = chosen(name)
    torch.manual_seed(0)
    qkv = rows(2, 9, 3, 4, 8, grad=grad)
    parts = qkv.unbind(2)
    wanted = fa.flash_attn_func(*parts, **options)
    out = fa.flash_attn_qkvpacked_func(qkv, **options)
    assert torch.equal(out, wanted)
    q, kv = rows(2, 6, 8, 8, grad=grad), rows(2, 9, 2, 2, 8, grad=grad)
    several = {**options, "alibi_slopes": options["alibi_slopes"].repeat(1, 2)} if "alibi_slopes" in options else options
    wanted_kv = fa.flash_attn_func(q, *kv.unbind(2), **several)
    out_kv = fa.flash_attn_kvpacked_func(q, kv, **several)
    assert torch.equal(out_kv, wanted_kv)
    if grad:
        pairs = ((out, wanted, [qkv]), (out_kv, wanted_kv, [q, kv]))
        for ours, reference, leaves in pairs:
            assert all(torch.equal(*pair) for pair in zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (ours, reference))))


@pytest.mark.parametrize("packed", (False, True))
def test_probabilities_show_what_dropout_kept(packed: bool):
    q, k, v = tensors(6, 11, grad=True)
    options: dict[str, Any] = {"dropout_p": 0.3, "causal": True, "softcap": 2.0, "alibi_slopes": torch.rand(2, 4)}
    torch.manual_seed(5)
    if packed:
        kv = torch.stack([k, v], 2)
        out, lse, s_dmask = fa.flash_attn_kvpacked_func(q, kv, **options, return_attn_probs=True)
    else:
        out, lse, s_dmask = fa.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    torch.manual_seed(5)
    kept = ta.dropout_mask(2, 4, 6, 11, 0.3)
    wanted, wanted_lse, probabilities = formula(q, k, v, **options, kept=kept)
    assert close(out, wanted) and close(lse, wanted_lse)
    assert close(s_dmask.abs(), probabilities) and torch.equal(torch.signbit(s_dmask), ~kept) and not s_dmask.requires_grad
    assert all(close(*pair) for pair in zip(*(torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (out, wanted))))
    torch.manual_seed(5)
    assert torch.equal(fa.flash_attn_func(q, k, v, **options), out)
    assert fa.flash_attn_func(q, k, v, return_attn_probs=True)[2].shape == (0,)


def test_slopes_and_the_lse_have_gradients_too():
    q, k, v = tensors(5, 8, grad=True)
    for shape in ((4,), (2, 4)):
        slopes = torch.rand(shape, dtype=F64, requires_grad=True)
        out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)
        wanted, wanted_lse, _ = formula(q, k, v, causal=True, alibi_slopes=slopes)
        leaves = (q, k, v, slopes)
        grads, wanted_grads = (torch.autograd.grad(a.sin().sum() + b.cos().sum(), leaves) for a, b in ((out, lse), (wanted, wanted_lse)))
        assert all(close(a, b) for a, b in zip(grads, wanted_grads))


@pytest.mark.parametrize("name", ("plain", "causal", "softcap", "alibi per item"))
def test_the_result_may_be_changed_in_place_where_it_is_not_saved(name: str):
    inputs, options, weight = tensors(5, 7), chosen(name), rows(2, 5, 4, 8, grad=True)
    wanted = (fa.flash_attn_func(*inputs, **options) * 2 + weight).sin().sum()
    out = fa.flash_attn_func(*inputs, **options)
    out *= 2
    out += weight
    assert close(*(torch.autograd.grad(x, weight)[0] for x in (out.sin().sum(), wanted)))
    out = fa.flash_attn_func(*(x.requires_grad_() for x in inputs), **options)
    out *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


FORMS: dict[str, tuple[Any, Any]] = {
    "apart": (fa.flash_attn_func, lambda q, k, v: (q, k, v)),
    "kvpacked": (fa.flash_attn_kvpacked_func, lambda q, k, v: (q, torch.stack([k, v], 2))),
    "qkvpacked": (fa.flash_attn_qkvpacked_func, lambda q, k, v: (torch.stack([q, k, v], 2),)),
}


def leaves_of(form: str, seqlen: int = 3) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(seqlen)
    function, pack = FORMS[form]
    return function, [x.detach().requires_grad_() for x in pack(*(rows(1, seqlen, 2, 3) for _ in range(3)))]


@pytest.mark.parametrize("form", FORMS)
def test_recorded_calls_are_differentiable_in_every_way(form: str):
    function, leaves = leaves_of(form)

    def call(*leaves: Tensor) -> Any:
        return function(*leaves, causal=True, return_attn_probs=True)[:2]

    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, leaves, check_fwd_over_rev=True)
    out, lse = call(*leaves)
    moved = [torch.randn_like(x) for x in (out, lse)]
    with forward_ad.dual_level():  # a backward pass in forward mode, of what was recorded outside of it
        seeds = [forward_ad.make_dual(torch.ones_like(x), moving) for x, moving in zip((out, lse), moved)]
        tangents = [forward_ad.unpack_dual(x).tangent for x in torch.autograd.grad((out, lse), leaves, seeds, retain_graph=True)]
    assert all(close(*pair) for pair in zip(tangents, torch.autograd.grad((out, lse), leaves, moved)))


@pytest.mark.parametrize("form", FORMS)
def test_each_gradient_by_itself(form: str):
    function, leaves = leaves_of(form, 5)
    wanted = torch.autograd.grad(function(*leaves).sin().sum(), leaves)
    for at, leaf in enumerate(leaves):
        alone = [x if x is leaf else x.detach() for x in leaves]
        assert torch.equal(torch.autograd.grad(function(*alone).sin().sum(), leaf)[0], wanted[at])
        slopes = torch.rand(2, dtype=F64, requires_grad=True)
        alone = [x.detach() for x in leaves]
        by_slopes, by_all = (torch.autograd.grad(function(*x, alibi_slopes=slopes).sin().sum(), slopes)[0] for x in (alone, leaves))
        assert torch.equal(by_slopes, by_all)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_saved_may_not_be_changed(form: str):
    function, leaves = leaves_of(form)
    for at in range(len(leaves)):
        inputs = [x * 1 for x in leaves]
        out = function(*inputs)
        inputs[at].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("form", ("kvpacked", "qkvpacked"))
def test_a_packed_gradient_is_made_in_one_tensor(form: str):
    function, leaves = leaves_of(form, 9)
    out = function(*leaves, causal=True)
    with Copies(leaves[-1].numel()) as copies:
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert copies.names == {"aten::stack"} and all(grad.is_contiguous() for grad in grads)


def test_derivatives_of_every_kind():
    q, k, v = (rows(1, n, 2, 3, grad=True) for n in (3, 4, 4))
    slopes = torch.rand(2, dtype=F64, requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
        return fa.flash_attn_func(q, k, v, causal=True, softcap=2.0, alibi_slopes=slopes, return_attn_probs=True)[:2]

    assert torch.autograd.gradcheck(call, (q, k, v, slopes), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, (q, k, v, slopes))
    several = rows(3, 1, 3, 2, 3)
    mapped = torch.func.vmap(lambda q: fa.flash_attn_func(q, k, v))(several)
    assert torch.equal(mapped, torch.stack([fa.flash_attn_func(q, k, v) for q in several]))
    results = []
    for run in (lambda call, *x: call(*x), partial(checkpoint, use_reentrant=False)):
        torch.manual_seed(3)
        results.append(torch.autograd.grad(run(fa.flash_attn_func, q, k, v, 0.5).sum(), q)[0])
    assert torch.equal(*results)
    with torch.autocast("cpu", dtype=BF16):
        assert fa.flash_attn_func(q.float(), k.float(), v.float()).dtype == BF16


class Copies(TorchDispatchMode):
    """Names the operators of torch that fill new memory of at least `elements`."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.names, self.ran = elements, set(), set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ran.add(func._schema.name)
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            fresh = isinstance(x, Tensor) and x.numel() >= self.elements and x.untyped_storage().data_ptr() not in known
            if fresh and not func._schema.name.startswith("tiled_attention::"):
                self.names.add(func._schema.name)
        return result


@pytest.mark.parametrize("grad", (False, True))
def test_nothing_is_copied(grad: bool):
    q, k, v = (rows(2, 20, 4, 16, grad=grad)[:, ::2, :, 1:9] for _ in range(3))
    qkv, offsets = rows(2, 10, 3, 4, 8, grad=grad), torch.tensor([0, 4, 10])
    with Copies(q[0].numel()) as copies:
        fa.flash_attn_func(q, k, v, causal=True, softcap=2.0)
        fa.flash_attn_func(q, k, v, alibi_slopes=torch.ones(2, 4))
        fa.flash_attn_qkvpacked_func(qkv, causal=True)
        fa.flash_attn_varlen_func(q[0], k[0], v[0], offsets, offsets, 6, 6, causal=True)
        fa.flash_attn_varlen_qkvpacked_func(qkv[0], offsets, 6)
    assert not copies.names and copies.ran >= {"tiled_attention::attention_fwd", "tiled_attention::attention_varlen_fwd"}
    cache, pages, items = rows(3, 16, 4, 8), torch.tensor([[2], [0]], dtype=torch.int32), torch.tensor([2, 0])
    with Copies(q.numel()) as copies, torch.no_grad():
        fa.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=9, cache_batch_idx=items, causal=True)
        fa.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=9, block_table=pages)
        fa.flash_attn_with_kvcache(q, cache[:2], cache[:2], q[:, :2], q[:, :2], cache_seqlens=9, cache_leftpad=torch.tensor([1, 2]))
    assert not copies.names and "tiled_attention::attention_decode" in copies.ran


@pytest.mark.parametrize("name", ("plain", "window", "all"))
def test_it_compiles_into_one_graph(name: str):
    torch._dynamo.reset()
    inputs, options = tensors(6, 6, F32, grad=True), chosen(name)
    offsets = torch.tensor([0, 4, 6], dtype=torch.int32)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"].detach()
    one_each = {**options, "alibi_slopes": options["alibi_slopes"][0]} if "alibi_slopes" in options else options

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = fa.flash_attn_func(q, k, v, **options) + fa.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options).sin()
        return (
            out.sum()
            + fa.flash_attn_qkvpacked_func(torch.stack([q] * 3, 2), **options).cos().sum()
            + fa.flash_attn_varlen_func(q[0], k[0], v[0], offsets, offsets, 4, 4, **one_each).sin().sum()
        )

    wanted, got = run(*inputs), torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs)
    assert close(got, wanted, 1e-5)
    assert all(close(*pair, 1e-5) for pair in zip(*(torch.autograd.grad(x, inputs) for x in (got, wanted))))


def test_cuda_tensors_are_traced():
    with FakeTensorMode(allow_non_fake_inputs=False), torch.no_grad():
        q, k = torch.empty(2, 5, 4, 8, device="cuda", dtype=BF16), torch.empty(2, 7, 2, 8, device="cuda", dtype=BF16)
        offsets, rows_q, rows_k = torch.empty(3, dtype=torch.int32, device="cuda"), q.flatten(0, 1), k.flatten(0, 1)
        results = [
            *fa.flash_attn_func(q, k, k, causal=True, return_attn_probs=True),
            fa.flash_attn_func(q, k, k, alibi_slopes=torch.empty(2, 4, device="cuda"), window_size=(2, 2)),
            *fa.flash_attn_varlen_func(rows_q, rows_k, rows_k, offsets, offsets, 5, 7, softcap=2.0, return_attn_probs=True),
            fa.flash_attn_with_kvcache(q, k, k, cache_seqlens=3, causal=True),
        ]
    shapes = [(2, 5, 4, 8), (2, 4, 5), (0,), (2, 5, 4, 8), (10, 4, 8), (4, 10), (0,), (2, 5, 4, 8)]
    assert [tuple(x.shape) for x in results] == shapes and all(x.device.type == "cuda" for x in results)


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return fa.flash_attn_func(q, k, v, causal=True, **options)


def test_a_recording_sees_the_weights():
    q, k, v = tensors(5, 8)
    layer = Layer()
    with ta.record_attention(layer) as recording:
        layer(q, k, v)
        layer(q, k, v, dropout_p=0.5, return_attn_probs=True)
    assert len(recording) == 2
    for found in recording:
        assert close(found.weights(), formula(q, k, v, causal=True)[2], 1e-6)


Q, K = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8)
QKV, KV = torch.zeros(2, 5, 3, 4, 8), torch.zeros(2, 7, 2, 2, 8)
ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "rank": (
        lambda: fa.flash_attn_func(Q[0], K, K),
        RuntimeError,
        r"q must have shape \(batch_size, seqlen_q, nheads, headdim\), got \(5, 4, 8\)",
    ),
    "no tensor": (lambda: fa.flash_attn_func([1.0], K, K), TypeError, "q must be a tensor, got list"),
    "no tensor v": (lambda: fa.flash_attn_func(Q, K, None), TypeError, "v must be a tensor, got NoneType"),
    "dtype": (
        lambda: fa.flash_attn_func(Q, K.double(), K),
        RuntimeError,
        r"k must have the dtype of q \(torch.float32\), got torch.float64",
    ),
    "integers": (lambda: fa.flash_attn_func(Q.int(), K.int(), K.int()), RuntimeError, "q must be float16, bfloat16, float32 or float64"),
    "batch": (
        lambda: fa.flash_attn_func(Q, K[:1], K[:1]),
        RuntimeError,
        r"k must have shape .* with batch_size 2, as in q, got \(1, 7, 2, 8\)",
    ),
    "head_dim": (lambda: fa.flash_attn_func(Q, K[..., :4], K), RuntimeError, r"k must have shape .* with headdim 8, as in q"),
    "seqlen_k": (lambda: fa.flash_attn_func(Q, K, K[:, :6]), RuntimeError, r"v must have shape .* with seqlen_k 7, as in k"),
    "heads of v": (
        lambda: fa.flash_attn_func(Q, K, Q[:, :1].expand(2, 7, 4, 8)),
        RuntimeError,
        "v must have shape .* with nheads_k 2, as in k",
    ),
    "heads": (
        lambda: fa.flash_attn_func(Q[:, :, :3], K, K),
        RuntimeError,
        "k must have a number of heads that divides that of q, got 2 and 3",
    ),
    "heads with grad": (
        lambda: fa.flash_attn_func(Q[:, :, :3].clone().requires_grad_(), K, K),
        RuntimeError,
        "k must have a number of heads that divides",
    ),
    "window": (lambda: fa.flash_attn_func(Q, K, K, window_size=(1,)), TypeError, r"window_size must be two integers \(left, right\)"),
    "window none": (lambda: fa.flash_attn_func(Q, K, K, window_size=(None, 2)), TypeError, "window_size must be two integers"),
    "softcap": (lambda: fa.flash_attn_func(Q, K, K, softcap="1"), TypeError, "softcap must be a number, got '1'"),
    "dropout": (lambda: fa.flash_attn_func(Q, K, K, dropout_p=1.5), ValueError, r"dropout_p must be a number in \[0, 1\], got 1.5"),
    "scale": (lambda: fa.flash_attn_func(Q, K, K, softmax_scale=float("nan")), ValueError, "softmax_scale must be finite, got nan"),
    "slopes": (lambda: fa.flash_attn_func(Q, K, K, alibi_slopes=torch.ones(3)), ValueError, r"alibi_slopes must have shape \(4,\)"),
    "slopes 2d": (
        lambda: fa.flash_attn_func(Q, K, K, alibi_slopes=torch.ones(1, 4)),
        ValueError,
        r"alibi_slopes must have shape \(4,\) or \(2, 4\)",
    ),
    "slopes int": (lambda: fa.flash_attn_func(Q, K, K, alibi_slopes=torch.ones(4).int()), TypeError, "alibi_slopes must be a float tensor"),
    "qkv": (
        lambda: fa.flash_attn_qkvpacked_func(QKV[:, :, :2]),
        RuntimeError,
        r"qkv must have shape \(batch_size, seqlen, 3, nheads, headdim\), got",
    ),
    "qkv dtype": (lambda: fa.flash_attn_qkvpacked_func(QKV.long()), RuntimeError, "qkv must be float16"),
    "kv": (
        lambda: fa.flash_attn_kvpacked_func(Q, KV[:, :, :1]),
        RuntimeError,
        r"kv must have shape \(batch_size, seqlen_k, 2, nheads_k, headdim\), got",
    ),
    "kv heads": (
        lambda: fa.flash_attn_kvpacked_func(Q[:, :, :3], KV),
        RuntimeError,
        "kv must have a number of heads that divides that of q",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str):
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()
