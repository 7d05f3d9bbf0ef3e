"""Hugging Face models with attn_implementation="tiled_attention", and on "sdpa" under the override, against their own "eager" attention."""

import copy

import pytest
import torch
import transformers
from torch import Tensor, nn

import tiled_attention as ta
from tiled_attention.integrations import transformers as integration

NAME = integration.register()
DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DECODERS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**DECODER)),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig(**DECODER, sliding_window=5)),
    "gemma2": (
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config(**DECODER, head_dim=8, sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
    ),
    "gpt_oss": (
        transformers.GptOssForCausalLM,
        transformers.GptOssConfig(**DECODER, head_dim=8, sliding_window=5, num_local_experts=2, num_experts_per_tok=1),
    ),
}
ENCODERS = {
    "bert": (
        transformers.BertModel,
        transformers.BertConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            attention_probs_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
        ),
    ),
    "modernbert": (
        transformers.ModernBertModel,
        transformers.ModernBertConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            local_attention=6,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
    ),
}
LENGTH = 12
PADDING = {"none": None, "left": [[1] * LENGTH, [0] * 4 + [1] * 8], "right": [[1] * LENGTH, [1] * 8 + [0] * 4]}


def build(models: dict, name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, config = models[name]
    model = kind(copy.deepcopy(config)).eval()
    for part, parameter in model.named_parameters():
        if parameter.dim() > 1 or part.endswith("sinks"):
            nn.init.normal_(parameter, std=0.3)
    return model


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(3, 64, (batch, LENGTH))


def padding_of(padding: str) -> tuple[Tensor | None, Tensor]:
    """The attention mask, and where there are tokens."""
    given = PADDING[padding]
    return (None, torch.ones(2, LENGTH, dtype=torch.bool)) if given is None else (torch.tensor(given), torch.tensor(given).bool())


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Filled with the (q_length, kv_length) of every dense mask of several rows that gets made."""
    made, stock, patterns = [], transformers.masking_utils.sdpa_mask, integration.PatternMask.dense

    def sdpa_mask(batch_size, q_length, kv_length, *args, **kwargs):
        made.extend([(q_length, kv_length)] if q_length > 1 else [])
        return stock(batch_size, q_length, kv_length, *args, **kwargs)

    monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", sdpa_mask)
    monkeypatch.setattr(integration.PatternMask, "dense", lambda mask: made.append(tuple(mask.shape[-2:])) or patterns(mask))
    return made


def close(a: Tensor, b: Tensor, tolerance: float = 5e-5) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_logits_loss_and_gradients(name: str, padding: str, dense: list):
    model, ids = build(DECODERS, name), tokens()
    mask, present = padding_of(padding)
    labels = ids.masked_fill(~present, -100)
    if padding == "left":
        labels[1, 4] = -100  # its prediction comes from padding
    results = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        made = len(dense)
        out = model(ids, attention_mask=mask, labels=labels)
        out.loss.backward()
        results.append((out.logits[present], out.loss, *(p.grad for p in model.parameters() if p.grad is not None)))
    assert len(dense) == made and len(results[0]) == len(results[1])
    assert all(close(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("cache", (None, "static"))
@pytest.mark.parametrize("padding", ("none", "left"))
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_generate_the_same_tokens(name: str, padding: str, cache: str | None, dense: list):
    model, ids = build(DECODERS, name), tokens()
    mask, texts = padding_of(padding)[1].long(), []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        made = len(dense)
        texts.append(
            model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, cache_implementation=cache, disable_compile=True)
        )
    assert torch.equal(*texts) and texts[0].shape[1] == LENGTH + 10 and len(dense) == made


@pytest.mark.parametrize("padding", ("none", "left"))
@pytest.mark.parametrize("name", DECODERS)
def test_a_prefill_in_pieces(name: str, padding: str, dense: list):
    model, ids = build(DECODERS, name), tokens()
    present = padding_of(padding)[1]
    mask, positions, pieces = present.long(), (present.cumsum(1) - 1).clamp(min=0), []
    model.set_attn_implementation(NAME)
    cache = transformers.DynamicCache(config=model.config)
    for start, end in ((0, 5), (5, 7), (7, 8), (8, LENGTH)):
        rows = slice(start, end)
        pieces.append(
            model(ids[:, rows], attention_mask=mask[:, :end], cache=cache, position_ids=positions[:, rows], use_cache=True).logits
        )
    assert not dense
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=mask, position_ids=positions).logits
    assert close(torch.cat(pieces, 1)[present], expected[present])


@pytest.mark.parametrize("name", ("llama", "mistral", "gemma2"))
def test_packed_sequences_do_not_see_each_other(name: str, dense: list):
    model, ids = build(DECODERS, name), tokens(1)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0]])
    model.set_attn_implementation(NAME)
    packed = model(ids, position_ids=positions, use_cache=False).logits
    assert not dense
    model.set_attn_implementation("eager")
    alone = [model(part).logits for part in ids.split([4, 7, 1], 1)]
    assert close(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str, padding: str, dense: list):
    model, ids = build(ENCODERS, name), tokens()
    mask, present = padding_of(padding)
    results = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        made = len(dense)
        out = model(ids, attention_mask=mask).last_hidden_state[present]
        out.sin().sum().backward()
        results.append((out, *(p.grad for p in model.parameters() if p.grad is not None)))
    assert all(close(a, b, 2e-4) for a, b in zip(*results)) and len(dense) == made


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", ("llama", "mistral", "bert"))
def test_sdpa_models_under_the_override(name: str, padding: str):
    model, ids = build(DECODERS | ENCODERS, name), tokens()
    mask, present = padding_of(padding)
    results = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        with ta.override_sdpa() as override:
            out = model(ids, attention_mask=mask)[0][present]
            out.sin().sum().backward()
        results.append((out, *(p.grad for p in model.parameters() if p.grad is not None)))
    assert override.calls == 2 and all(close(a, b, 2e-4) for a, b in zip(*results))


def test_cross_attention_with_position_biases():
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model, ids = transformers.T5ForConditionalGeneration(config).eval(), tokens()
    mask, present = padding_of("right")
    results = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(~present, -100))
        out.loss.backward()
        results.append((out.logits[present], *(p.grad for p in model.parameters() if p.grad is not None)))
    assert all(close(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("padding", PADDING)
def test_compiled_models(padding: str):
    torch._dynamo.reset()
    model, ids = build(DECODERS, "mistral"), tokens()
    mask, present = padding_of(padding)
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    model.set_attn_implementation(NAME)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert close(compiled(ids, attention_mask=mask, use_cache=False).logits[present], expected[present])


def test_dropout_in_training_follows_the_seed():
    torch.manual_seed(0)
    model, ids = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, attention_dropout=0.5)).train(), tokens()
    model.set_attn_implementation(NAME)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(model(ids).logits)
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_attentions_are_returned_when_asked_for():
    module = nn.Module()
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    out, weights = integration.attention_forward(module, query, key, key, None, output_attentions=True)
    expected = ta.attention(query, key, key, mask=ta.Causal())
    assert close(out, expected.transpose(1, 2)) and close(weights @ key.repeat_interleave(2, 1), expected)


def test_a_pattern_is_a_mask_for_everyone_else():
    config = DECODERS["mistral"][1]
    config._attn_implementation = NAME
    mask, embeddings = torch.tensor(PADDING["left"]), torch.empty(2, LENGTH, 0)
    make = transformers.masking_utils.create_sliding_window_causal_mask
    pattern = make(config, embeddings, mask, None)
    config._attn_implementation = "sdpa"
    expected = make(config, embeddings, mask, None)
    assert isinstance(pattern, integration.PatternMask) and pattern.shape == expected.shape and pattern.dtype == torch.bool
    assert torch.equal(torch.where(pattern, 1.0, 0.0), torch.where(expected, 1.0, 0.0))
    assert torch.equal(pattern[:, :, 3:7], expected[:, :, 3:7]) and torch.equal(pattern & True, expected)


@pytest.mark.parametrize("overlay", ("or_mask_function", "and_mask_function"))
def test_unknown_patterns_become_dense(overlay: str):
    config, embeddings = DECODERS["llama"][1], torch.empty(2, LENGTH, 0)
    masks = []
    for implementation in (NAME, "sdpa"):
        config._attn_implementation = implementation
        masks.append(
            transformers.masking_utils.create_causal_mask(config, embeddings, None, None, **{overlay: lambda b, h, q, k: (q + k) % 3 == 0})
        )
    assert type(masks[0]) is Tensor and torch.equal(*masks)


def test_chunked_masks():
    config, embeddings = transformers.LlamaConfig(**DECODER, attention_chunk_size=5), torch.empty(2, LENGTH, 0)
    for padding in PADDING:
        mask, _ = padding_of(padding)
        masks = []
        for implementation in (NAME, "sdpa"):
            config._attn_implementation = implementation
            masks.append(transformers.masking_utils.create_chunked_causal_mask(config, embeddings, mask, None))
        assert isinstance(masks[0], integration.PatternMask) == (padding != "left") and torch.equal(masks[0] & True, masks[1])
