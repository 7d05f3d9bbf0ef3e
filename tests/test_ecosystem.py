"""Models and tools of others: transformers under "flash_attention_2", generation, vision models, contexts of backends, the profiler."""

import copy
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import modeling_flash_attention_utils as flash_utils

import tiled_attention as ta
from test_transformers import DECODER, DECODERS, ENCODERS, LENGTH, PADDING, build, close, dense, padding_of, tokens  # noqa: F401
from tiled_attention import flash_attn as fa
from tiled_attention.flash_attn import torch_impl

FLASH = "flash_attention_2"
OF_FLASH = ("llama", "mistral", "gemma2", "bert", "modernbert")  # gpt_oss lists implementations of its own
MODELS = DECODERS | ENCODERS


@pytest.fixture
def flash() -> Iterator[fa.Registration]:
    with fa.register() as registration:
        yield registration


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", OF_FLASH)
def test_logits_and_gradients_under_the_name(name: str, padding: str, flash: fa.Registration, dense: list):  # noqa: F811
    model, ids = build(MODELS, name), tokens()
    mask, present = padding_of(padding)
    results = []
    for implementation in ("eager", FLASH):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        made = len(dense)
        out = model(ids, attention_mask=mask)[0][present]
        out.sin().sum().backward()
        results.append((out, *(p.grad for p in model.parameters() if p.grad is not None)))
    assert model.config._attn_implementation == flash.name == FLASH and len(dense) == made
    assert all(close(a, b, 5e-4) for a, b in zip(*results))


@pytest.mark.parametrize("cache", (None, "static"))
@pytest.mark.parametrize("padding", ("none", "left"))
@pytest.mark.parametrize("name", ("llama", "mistral", "gemma2"))
def test_generation_under_the_name(name: str, padding: str, cache: str | None, flash: fa.Registration):
    model, ids = build(DECODERS, name), tokens()
    mask, texts = padding_of(padding)[1].long(), []
    for implementation in ("eager", FLASH):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 10, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
        texts.append(model.generate(ids, attention_mask=mask, **options))
    assert torch.equal(*texts) and texts[0].shape[1] == LENGTH + 10


@pytest.mark.parametrize("how", ("positions", "offsets"))
@pytest.mark.parametrize("name", ("llama", "mistral", "gemma2"))
def test_packed_sequences_under_the_name(name: str, how: str, flash: fa.Registration):
    model, ids = build(DECODERS, name), tokens(1)
    given: dict[str, Any] = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0]])}
    if how == "offsets":  # as DataCollatorWithFlattening gives them
        offsets = torch.tensor([0, 4, 11, 12], dtype=torch.int32)
        given.update(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=7, max_length_k=7)
    model.set_attn_implementation(FLASH)
    packed = model(ids, use_cache=False, **given).logits
    model.set_attn_implementation("eager")
    assert close(packed, torch.cat([model(part).logits for part in ids.split([4, 7, 1], 1)], 1))


def test_models_that_call_the_functions_themselves(flash: fa.Registration):
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, max_position_embeddings=64, window_size=5,
        attention_types=[[["global", "local"], 1]],
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = transformers.GPTNeoForCausalLM(config).eval(), tokens()
    mask, present = padding_of("left")
    model.set_attn_implementation("eager")
    wanted = model(ids, attention_mask=mask).logits[present]
    model.set_attn_implementation(FLASH)
    assert close(model(ids, attention_mask=mask).logits[present], wanted)


@pytest.mark.parametrize("window", (None, 4))
@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("padding", ("none", "left", "right"))
def test_what_is_written_for_flash_attention_gives_a_padding_mask_or_none(
    padding: str, causal: bool, window: int | None, flash: fa.Registration
):
    """The contract of transformers' own function: (batch, seqlen) or None, causality, window and softcap beside it."""
    torch.manual_seed(0)
    forward = transformers.AttentionInterface()[FLASH]
    query, key, value = (torch.randn(2, heads, LENGTH, 8) for heads in (4, 2, 2))
    mask, present = padding_of(padding)
    module = nn.Module()
    module.is_causal = causal
    options = {"sliding_window": window, "softcap": 2.0, "s_aux": torch.randn(4), "scaling": 0.3}
    out, weights = forward(module, query, key, value, mask, **options)
    seen = ta.Causal() if causal else None
    if window is not None:
        seen = ta.SlidingWindow(window - 1, 0 if causal else window - 1)
    dense_mask = present[:, None, None] & (torch.ones(LENGTH, LENGTH, dtype=torch.bool) if seen is None else seen.dense(LENGTH, LENGTH))
    wanted = ta.reference.attention(query, key, value, mask=dense_mask, softcap=2.0, sinks=options["s_aux"], scale=0.3).transpose(1, 2)
    assert weights is None and close(out[present], wanted[present])
    longer = [F.pad(x, (0, 0, 0, 3), value=float("nan")) for x in (key, value)]  # a static cache with empty slots
    if mask is not None:
        assert close(forward(module, query, *longer, mask, **options)[0][present], wanted[present])


def test_continuous_batching(flash: fa.Registration):
    model, ids = build(DECODERS, "llama"), tokens()
    model.set_attn_implementation("eager")
    wanted = [model.generate(row[None, :n], max_new_tokens=5, do_sample=False)[0, n:].tolist() for row, n in zip(ids, (12, 7))]
    model.set_attn_implementation(FLASH)
    options = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=32, max_blocks_per_request=4)
    prompts = [ids[0].tolist(), ids[1, :7].tolist()]
    results = model.generate_batch(prompts, options, continuous_batching_config=batching, progress_bar=False)
    assert [result.generated_tokens for result in sorted(results.values(), key=lambda result: -len(result.prompt_ids))] == wanted


@pytest.mark.parametrize("padding", ("none", "left"))
def test_compiled_under_the_name(padding: str, flash: fa.Registration):
    torch._dynamo.reset()
    model, ids = build(DECODERS, "mistral"), tokens()
    mask, present = padding_of(padding)
    model.set_attn_implementation("eager")
    wanted = model(ids, attention_mask=mask, use_cache=False).logits
    model.set_attn_implementation(FLASH)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert close(compiled(ids, attention_mask=mask, use_cache=False).logits[present], wanted[present])


def test_decoding_over_the_pages_of_transformers(flash: fa.Registration):
    """Continuous batching on CUDA: one token for each request, written to its page."""
    torch.manual_seed(0)
    module = nn.Module()
    module.projection, module.is_causal, module.config = nn.Linear(8, 8), True, copy.deepcopy(DECODERS["llama"][1])
    module.config._attn_implementation = FLASH
    query, key, value = (torch.randn(1, heads, 2, 8) for heads in (4, 2, 2))
    pages, table, lengths = [torch.randn(5, 4, 2, 8) for _ in range(2)], torch.tensor([[3, 1], [0, 4]], dtype=torch.int32), (6, 3)
    kept = [[cache[row.long()].flatten(0, 1)[: n - 1] for row, n in zip(table, lengths)] for cache in pages]
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 6, 9], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets[0], "cu_seq_lens_k": offsets[1], "max_length_q": 1, "max_length_k": 6}
    forward = transformers.AttentionInterface()[FLASH]
    with torch.no_grad():
        out, _ = forward(module, query, key, value, None, block_table=table, k_cache=pages[0], v_cache=pages[1], **packed)
    for item, n in enumerate(lengths):
        new = [x[0, :, item] for x in (key, value)]
        keys, values = (torch.cat([rows[item], row[None]]).transpose(0, 1)[None] for rows, row in zip(kept, new))
        assert close(out[0, item], ta.reference.attention(query[:, :, item : item + 1], keys, values)[0, :, 0], 1e-5)
        assert torch.equal(pages[0][table[item, (n - 1) // 4].long(), (n - 1) % 4], new[0])


def test_models_are_made_and_loaded_under_the_name(tmp_path: Any, flash: fa.Registration):
    kind, config = DECODERS["mistral"]
    build(DECODERS, "mistral").save_pretrained(tmp_path)
    ids, logits = tokens(), []
    for implementation in ("eager", FLASH):
        logits.append(kind.from_pretrained(tmp_path, attn_implementation=implementation).eval()(ids).logits)
    assert close(*logits)
    assert kind._from_config(copy.deepcopy(config), attn_implementation=FLASH).config._attn_implementation == FLASH
    half = kind.from_pretrained(tmp_path, attn_implementation=FLASH, dtype=torch.bfloat16).eval()(ids).logits
    assert half.dtype == torch.bfloat16 and (half.float() - logits[0]).abs().max() < 0.1 * logits[0].abs().max()


def test_registration_is_counted_and_undone():
    def state() -> tuple[Any, ...]:
        checks = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["general_availability_check"]
        interfaces = (transformers.AttentionInterface, transformers.AttentionMaskInterface)
        dispatch = transformers.PreTrainedModel._flash_attn_can_dispatch
        return (*(interface._global_mapping[FLASH] for interface in interfaces), dispatch, flash_utils._lazy_imports, checks)

    before, model = state(), build(DECODERS, "llama")
    with pytest.raises((ImportError, ValueError)):
        model.set_attn_implementation(FLASH)
    first, second = fa.register(), fa.register()
    first.remove()
    first.remove()
    assert all(a is not b for a, b in zip(state(), before))
    model.set_attn_implementation(FLASH)
    second.remove()
    assert all(a is b for a, b in zip(state(), before)) and flash_utils._loaded_implementation is None
    with pytest.raises((ImportError, ValueError)):
        build(DECODERS, "mistral").set_attn_implementation(FLASH)


def test_other_implementations_stay_refused(flash: fa.Registration):
    with pytest.raises((ImportError, ValueError)):
        build(DECODERS, "llama").set_attn_implementation("flash_attention_3")
    t5 = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(t5)
    if not model._supports_flash_attn:
        with pytest.raises(ValueError, match="does not support"):
            model.set_attn_implementation(FLASH)
    with pytest.raises(Exception, match="flash|kernels"):
        build(DECODERS, "gpt_oss").set_attn_implementation(FLASH)


def test_the_module_flash_attn_is_there_on_request_only():
    assert "flash_attn" not in sys.modules and importlib.util.find_spec("flash_attn") is None
    with fa.install(), fa.install():
        import flash_attn
        from flash_attn.flash_attn_interface import flash_attn_func

        assert flash_attn_func is flash_attn.flash_attn_func is fa.flash_attn_func and importlib.util.find_spec("flash_attn") is not None
        assert tuple(map(int, flash_attn.__version__.split("+")[0].split("."))) >= (2, 6, 0)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("flash_attn.losses")
    assert not [name for name in sys.modules if name.split(".")[0] == "flash_attn"]
    sys.modules["flash_attn"] = type(sys)("flash_attn")
    try:
        with pytest.raises(RuntimeError, match="install: expected no other flash_attn"):
            fa.install()
    finally:
        del sys.modules["flash_attn"]


has_registry = pytest.mark.skipif(not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="needs torch's registry")


@has_registry
def test_torchs_registry_of_flash_attention():
    attention = torch.nn.attention
    assert torch_impl.NAME in attention.list_flash_attention_impls() and attention.current_flash_attention_impl() is None
    operator = "aten::_scaled_dot_product_flash_attention"
    attention.activate_flash_attention_impl(torch_impl.NAME)
    try:
        assert attention.current_flash_attention_impl() == torch_impl.NAME
        served = torch._C._dispatch_dump_table(operator)
    finally:
        attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    assert "CUDA: " in served and served != torch._C._dispatch_dump_table(operator)


@has_registry
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("dropout_p", (0.0, 0.4))
@pytest.mark.parametrize("is_causal", (False, True))
def test_torchs_flash_attention_operators(is_causal: bool, dropout_p: float, dtype: torch.dtype):
    """The kernels, their random state and the derivatives of aten around them, with CPU tensors in the place of CUDA's."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, n, 16, dtype=dtype, requires_grad=True) for n in (9, 14, 14))
    mask = ta.Causal() if is_causal else None
    options: dict[str, Any] = {"scale": 0.3}
    handle = torch_impl.install_kernels("CPU")
    try:
        torch.manual_seed(1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, **options)
        grads = torch.autograd.grad(out.float().sin().sum(), (query, key, value))
        torch.manual_seed(1)
        flat = [x.transpose(1, 2) for x in (query, key, value)]
        other, other_lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            *flat, None, None, 9, 14, dropout_p, is_causal, False, **options
        )
        other_grads = torch.autograd.grad(other.transpose(1, 2).float().sin().sum(), (query, key, value))
    finally:
        handle.remove()
    torch.manual_seed(1)
    wanted, wanted_lse = ta.attention(query, key, value, mask=mask, dropout_p=dropout_p, return_lse=True, **options)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse) and (state.dtype, state.shape) == (torch.uint64, (2,))
    assert torch.equal(other.transpose(1, 2), wanted) and torch.equal(other_lse, lse) and unused.dtype == torch.uint64
    wanted_grads = torch.autograd.grad(wanted.float().sin().sum(), (query, key, value))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2  # without the rounding residual of out
    assert all(close(a, b, tolerance) and torch.equal(a, c) for a, b, c in zip(grads, wanted_grads, other_grads))


@has_registry
def test_torchs_varlen_attention():
    from torch.nn.attention.varlen import varlen_attn

    torch.manual_seed(0)
    rows = [torch.randn(12, 4, 16, requires_grad=True) for _ in range(3)]
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    handle = torch_impl.install_kernels("CPU")
    try:
        results = [varlen_attn(*rows, offsets, offsets, 7, 7, window_size=window) for window in ((-1, -1), (-1, 0), (2, 1))]
        grads = torch.autograd.grad(results[2].sin().sum(), rows)
        with pytest.raises(RuntimeError, match="seqused_k must be None"):
            varlen_attn(*rows, offsets, offsets, 7, 7, seqused_k=torch.tensor([3, 4], dtype=torch.int32))
    finally:
        handle.remove()
    for out, mask in zip(results, (None, ta.Causal(), ta.SlidingWindow(2, 1))):
        assert torch.equal(out, ta.attention_varlen(*rows, offsets, offsets, 7, 7, mask=mask))
    wanted = torch.autograd.grad(ta.attention_varlen(*rows, offsets, offsets, 7, 7, mask=mask).sin().sum(), rows)
    assert all(close(a, b, 1e-6) for a, b in zip(grads, wanted))


@pytest.mark.parametrize(
    ("name", "implementation"),
    (
        ("mistral", "sdpa"),
        *((name, implementation) for name in ("mistral", "gemma2") for implementation in ("tiled_attention", FLASH)),
        ("gpt_oss", "tiled_attention"),
    ),
)
def test_beam_search(name: str, implementation: str, flash: fa.Registration):
    """The cache is reordered between steps; generation goes far beyond the window."""
    model, ids = build(DECODERS, name), tokens()
    mask, texts = padding_of("left")[1].long(), []
    for each in ("eager", implementation):
        model.set_attn_implementation(each)
        with ta.override_sdpa() as override:
            texts.append(model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, num_beams=3))
    assert torch.equal(*texts) and (override.calls > 0) == (implementation == "sdpa")


def vision_model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 16, 16)
    if importlib.util.find_spec("timm"):
        timm = importlib.import_module("timm.models.vision_transformer")
        return timm.VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=5), image
    if importlib.util.find_spec("torchvision"):
        vit = importlib.import_module("torchvision.models.vision_transformer")
        return vit.VisionTransformer(16, 4, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=5), image
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        attn_implementation="sdpa",
    )
    return transformers.ViTForImageClassification(config), image


@pytest.mark.parametrize("train", (False, True))
def test_a_vision_transformer(train: bool):
    model, image = vision_model()
    model.train(train)

    def run() -> tuple[Tensor, ...]:
        model.zero_grad()
        out = model(image)
        out = out if isinstance(out, Tensor) else out.logits
        out.sin().sum().backward()
        return out, *(p.grad for p in model.parameters() if p.grad is not None)

    with sdpa_kernel(SDPBackend.MATH):
        wanted = run()
    with ta.override_sdpa() as override:
        found = run()
    assert override.calls == 2 and len(found) == len(wanted) and all(close(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize("module", (False, True))
def test_contexts_of_backends_are_respected(module: bool):
    query = torch.randn(2, 4, 6, 8)
    layer, x = nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 6, 32)

    def call() -> Tensor:
        return layer(x, x, x, need_weights=False)[0] if module else F.scaled_dot_product_attention(query, query, query)

    with ta.override_sdpa() as override:
        steps = [
            ((SDPBackend.FLASH_ATTENTION,), 1),
            ((SDPBackend.MATH,), 0),
            ((SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION), 1),
            ((SDPBackend.CUDNN_ATTENTION,), 1),
        ]
        for backends, served in steps:
            before = override.calls
            with sdpa_kernel(list(backends)):
                call()
            assert override.calls - before == served, backends
        with sdpa_kernel(SDPBackend.MATH), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            before = override.calls
            call()
        assert override.calls == before + 1
        with sdpa_kernel(SDPBackend.MATH):  # our own functions are called by name, whatever the backends are
            ta.scaled_dot_product_attention(query, query, query)
        call()
        assert override.calls == before + 2


def test_the_profiler_sees_operators_by_name():
    q, k, v = (torch.randn(2, 40, 4, 16, requires_grad=True) for _ in range(3))
    offsets, cache = torch.tensor([0, 40], dtype=torch.int32), torch.randn(2, 64, 4, 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        fa.flash_attn_func(q, k, v, causal=True).sum().backward()
        fa.flash_attn_varlen_func(q[0], k[0], v[0], offsets, offsets, 40, 40).sum().backward()
        with torch.no_grad():
            fa.flash_attn_with_kvcache(q[:, :1], cache, cache, cache_seqlens=30)
            with ta.override_sdpa():
                F.scaled_dot_product_attention(*[x.transpose(1, 2) for x in (q, k, v)])
    found = {event.key: event for event in profile.key_averages()}
    names = ("attention_fwd", "attention_bwd", "attention_varlen_fwd", "attention_varlen_bwd", "attention_decode")
    assert all(found[f"tiled_attention::{name}"].count == (2 if name == "attention_fwd" else 1) for name in names)
    shapes = [event.input_shapes[0] for event in profile.events() if event.name == "tiled_attention::attention_fwd"]
    assert shapes[0] == [2, 4, 40, 16]


@pytest.mark.parametrize("grad", (False, True))
def test_torch_counts_the_operations(grad: bool):
    q, k, v = (torch.randn(2, 12, 4, 16, requires_grad=grad) for _ in range(3))
    product = 2 * (2 * 4 * 12 * 12 * 16)  # of two matrices, for all heads
    with FlopCounterMode(display=False) as counter:
        out = fa.flash_attn_func(q, k, v)
        if grad:
            out.sum().backward()
    assert counter.get_total_flops() == (7 if grad else 2) * product
    assert {str(operator) for operator in counter.get_flop_counts()["Global"]} >= {"tiled_attention.attention_fwd"}
