"""Counts by formula: beside torch's counter, beside the tensors that autograd saves, beside the parameters of real layers."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tiled_attention as ta
from tiled_attention.testing import Case


def counted(function, *tensors: torch.Tensor) -> tuple[int, int]:
    """Forward and backward operations by torch's counter."""
    leaves = [tensor.requires_grad_() for tensor in tensors]
    with FlopCounterMode(display=False) as forward:
        out = function(*leaves)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


SHAPES = {
    "square": ((2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8)),
    "grouped": ((2, 6, 5, 8), (2, 2, 9, 8), (2, 2, 9, 3)),
    "leading": ((2, 3, 1, 7, 4), (2, 3, 1, 7, 4), (2, 3, 1, 7, 6)),
}


def tensors(name: str) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in SHAPES[name]]


@pytest.mark.parametrize("name", SHAPES)
def test_ours_are_counted_by_torch(name):
    assert tuple(ta.flops(*SHAPES[name])) == counted(ta.attention, *tensors(name))
    for causal in (False, True):
        if causal and name == "grouped":  # lengths are equal there
            continue
        linear = lambda *x, causal=causal: ta.linear_attention(*x, causal=causal)
        assert tuple(ta.flops(*SHAPES[name], operator="linear_attention", causal=causal)) == counted(linear, *tensors(name))


@pytest.mark.parametrize("name", ("square", "grouped"))
def test_scaled_dot_product_attention_is_counted_the_same(name):
    query, key, value = tensors(name)
    grouped = query.shape[1] != key.shape[1]

    def materialised(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped)

    forward, backward = counted(materialised, query, key, value)
    ours = ta.flops(*SHAPES[name])
    pairs = query.shape[:-1].numel() * key.shape[-2]
    assert forward == ours.forward and backward == ours.backward - 2 * pairs * query.shape[-1]  # it keeps the scores
    torch_formula = torch.utils.flop_counter.sdpa_backward_flop_count
    assert ours.backward == torch_formula((*query.shape[:-1], value.shape[-1]), query.shape, key.shape, value.shape)
    assert ours.forward == torch.utils.flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape)
    assert ours.total == ours.forward + ours.backward


def test_multihead_attention_is_counted_the_same():
    x = torch.randn(2, 16, 32)
    stock, ours = (kind(32, 4, batch_first=True) for kind in (nn.MultiheadAttention, ta.MultiheadAttention))
    projections = 2 * 2 * 16 * 32 * 4 * 32
    expected = projections + ta.flops((2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8)).forward
    for layer in (stock, ours):
        with FlopCounterMode(display=False) as counter:
            layer(x, x, x, need_weights=layer is stock)  # with weights torch multiplies matrices, which its counter sees on any device
        assert counter.get_total_flops() == expected


MASKS = [
    None, "Causal()", "Causal('top_left')", "SlidingWindow(3, 1)", "Causal() & (SlidingWindow(2, 0) | Sinks(2))", "KeyLengths((3, 20))",
    "Documents((0, 4, 9, 14))", "Chunked(4) & Bool(2, 1, 1, 14)", "Bool(9, 14)", "Bool(4, 9, 14)", "Bool(14)",
]  # fmt: skip


@pytest.mark.parametrize("offset", (None, 2, (0, 5)))
@pytest.mark.parametrize("mask", MASKS)
def test_visible_pairs(mask, offset):
    case = Case(num_heads=4, seqlen_q=9, seqlen_kv=14, mask=mask, query_offset=offset, head_dim_v=5)
    x = case.inputs()
    found = ta.flops(x.query, x.key, x.value, mask=x.mask, query_offset=x.query_offset)
    assert found == (case.flops(), case.flops(backward=True))


def test_large_masks_are_counted_in_blocks():
    shape = (1, 1, 6_000, 64)
    found = ta.flops(shape, shape, shape, mask=ta.Causal() & ta.SlidingWindow(99, 0))
    pairs = 6_000 * 100 - 99 * 100 // 2
    assert found.forward == 2 * pairs * 128


def test_shapes_of_any_kind():
    meta = [torch.empty(shape, device="meta") for shape in SHAPES["grouped"]]
    assert ta.flops(*meta) == ta.flops(*SHAPES["grouped"]) == ta.flops(*(list(shape) for shape in SHAPES["grouped"]))
    assert ta.flops((2, 4, 0, 8), (2, 4, 5, 8), (2, 4, 5, 8), mask=ta.Causal()) == (0, 0)
    assert ta.flops((2, 4, 3, 8), (2, 4, 0, 8), (2, 4, 0, 8)) == (0, 0)


def test_additive_attention_is_counted_by_torch():
    additive = pytest.importorskip("tiled_attention.additive_attention")
    query, key, value = tensors("grouped")
    run = lambda *x: additive.additive_attention(*x, torch.ones(8))
    assert tuple(ta.flops(query, key, value, operator="additive_attention")) == counted(run, query, key, value)


# Memory


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("operator", ("attention", "linear_attention"))
def test_memory(operator, name, dtype):
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors(name)]
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if operator == "attention":
            outputs = ta.attention(*leaves, return_lse=True)
        else:
            out, state = ta.linear_attention(*leaves, return_state=True)
            outputs = (out, *state)
    owned = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    size = lambda found: sum(tensor.numel() * tensor.itemsize for tensor in found)
    expected = ta.memory(*leaves, operator=operator)
    assert expected.inputs == expected.gradients == size(leaves)
    assert expected.outputs == size(outputs)
    assert expected.saved == sum(size for place, size in saved.items() if place not in owned)
    assert expected == ta.memory(*SHAPES[name], dtype=dtype, operator=operator)
    weights = ta.attention_weights(*leaves[:2])
    assert expected.dense == size([weights])


# Parameters


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_parameters_of_multihead_attention():
    for bias, add_bias_kv, kdim, vdim in itertools.product((True, False), (True, False), (None, 5), (None, 7)):
        options = dict(bias=bias, add_bias_kv=add_bias_kv, kdim=kdim, vdim=vdim)
        expected = ta.parameter_count("MultiheadAttention", embed_dim=12, **options)
        assert expected == parameters(nn.MultiheadAttention(12, 3, **options)) == parameters(ta.MultiheadAttention(12, 3, **options))


@pytest.mark.parametrize(
    ("layer", "sizes", "others"),
    [
        ("LinearAttention", dict(embed_dim=12), dict(num_heads=3)),
        ("LinearAttention", dict(embed_dim=12, bias=False), dict(num_heads=3)),
        ("LuongAttention", dict(query_dim=4, key_dim=4, score="dot"), {}),
        ("LuongAttention", dict(query_dim=4, key_dim=3), {}),
        ("LuongAttention", dict(query_dim=4, key_dim=3, score="concat"), {}),
        ("LuongAttention", dict(query_dim=4, key_dim=3, score="concat", hidden_dim=9), {}),
        ("AdditiveAttention", dict(query_dim=4, key_dim=3, hidden_dim=6), dict(num_heads=2)),
        ("LearnedEmbedding", dict(max_len=9, dim=4), {}),
        ("RelativeBias", dict(num_heads=3), {}),
        ("RelativeBias", dict(num_heads=3, max_distance=40, num_buckets=8), {}),
        ("RelativeBias", dict(num_heads=3, max_distance=40, num_buckets=None), {}),
        ("RelativeBias", dict(num_heads=3, max_distance=40, num_buckets=None, bidirectional=False), {}),
    ],
)
def test_parameters(layer, sizes, others):
    if layer == "AdditiveAttention":
        pytest.importorskip("tiled_attention.additive_attention")
    assert ta.parameter_count(layer, **sizes) == parameters(getattr(ta, layer)(**sizes, **others))


S = SHAPES["square"]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: ta.flops(S[0][1:][1:], S[1], S[2]), "query"),
        (lambda: ta.flops((2, 4, -1, 8), S[1], S[2]), "query"),
        (lambda: ta.flops((2, 4, 1.5, 8), S[1], S[2]), "query"),
        (lambda: ta.flops(S[0], (2, 3, 16, 8), (2, 3, 16, 8)), "key"),
        (lambda: ta.flops(S[0], (2, 4, 16, 7), S[2]), "key"),
        (lambda: ta.flops(S[0], S[1], (2, 4, 15, 8)), "value"),
        (lambda: ta.flops(*S, operator="sparse"), "operator"),
        (lambda: ta.flops(*S, causal=True), "causal"),
        (lambda: ta.flops(*S, operator="linear_attention", mask=ta.Causal()), "mask"),
        (lambda: ta.flops(*S, mask=torch.ones(16, 16)), "mask"),
        (lambda: ta.flops(*S, mask="causal"), "mask"),
        (lambda: ta.flops(*S, mask=torch.ones(3, 16, 16, dtype=torch.bool)), "mask"),
        (lambda: ta.flops(*S, mask=torch.ones(15, 16, dtype=torch.bool)), "mask"),
        (lambda: ta.flops(None, S[1], S[2]), "query must be a tensor or a shape, got NoneType"),
        (lambda: ta.memory(*S, operator="sparse"), "operator"),
        (lambda: ta.memory(*S, dtype="float32"), "dtype must be a torch.dtype, got 'float32'"),
        (lambda: ta.parameter_count("MultiheadAttention"), "MultiheadAttention.*embed_dim"),
        (lambda: ta.parameter_count("LearnedEmbedding", max_len=1, dim=1, size=2), "LearnedEmbedding.*size"),
        (lambda: ta.memory(S[0], S[1], (2, 4, 15, 8)), "value"),
        (lambda: ta.parameter_count("Attention"), "layer"),
        (lambda: ta.parameter_count("LearnedEmbedding", max_len=-1, dim=2), "max_len"),
        (lambda: ta.parameter_count("LearnedEmbedding", max_len=1), "dim"),
        (lambda: ta.parameter_count("LuongAttention", query_dim=1, key_dim=1, score="x"), "score"),
    ],
)
def test_errors_name_the_argument(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()
