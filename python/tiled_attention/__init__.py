"""Attention operators for PyTorch with exact gradients: `import tiled_attention as ta`."""

from . import distributed, numpy_reference, plot, reference
from .additive_attention import additive_attention, additive_attention_weights
from .additive_module import AdditiveAttention
from .attention import attention, dropout_mask, merge_attention
from .attention_decode import attention_decode
from .attention_varlen import attention_varlen
from .convert import convert
from .counts import flops, memory, parameter_count
from .favor import FavorFeatures
from .gaussian_attention import gaussian_attention
from .kv_cache import KVCache
from .linear_attention import LinearState, linear_attention, linear_attention_step
from .linear_module import LinearAttention
from .lsh_attention import lsh_attention
from .luong_attention import LuongAttention, luong_attention
from .masks import Causal, Chunked, Documents, KeyLengths, Mask, PrefixLM, Sinks, SlidingWindow
from .multihead_attention import MultiheadAttention
from .override import override_sdpa
from .positions import LearnedEmbedding, SinusoidalEmbedding, alibi_slopes
from .record import record_attention
from .recorded import RecordedAttention, Recording
from .relative_bias import RelativeBias
from .rotary import RotaryEmbedding, RotaryScaling
from .sdpa import scaled_dot_product_attention
from .sparse_masks import BlockSparse, Dilated, Global, RandomBlocks, Strided
from .weights import attention_weights
from .when_imported import when_imported


def _register_dtensor_rules() -> None:
    from .distributed.dtensor import register

    register()


when_imported("torch.distributed.tensor", _register_dtensor_rules)

__all__ = [
    "AdditiveAttention",
    "BlockSparse",
    "Causal",
    "Chunked",
    "Dilated",
    "Documents",
    "FavorFeatures",
    "Global",
    "KVCache",
    "KeyLengths",
    "LearnedEmbedding",
    "LinearAttention",
    "LinearState",
    "LuongAttention",
    "Mask",
    "MultiheadAttention",
    "PrefixLM",
    "RandomBlocks",
    "RecordedAttention",
    "Recording",
    "RelativeBias",
    "RotaryEmbedding",
    "RotaryScaling",
    "Sinks",
    "SinusoidalEmbedding",
    "SlidingWindow",
    "Strided",
    "additive_attention",
    "additive_attention_weights",
    "alibi_slopes",
    "attention",
    "attention_decode",
    "attention_varlen",
    "attention_weights",
    "convert",
    "distributed",
    "dropout_mask",
    "flops",
    "gaussian_attention",
    "linear_attention",
    "linear_attention_step",
    "lsh_attention",
    "luong_attention",
    "memory",
    "merge_attention",
    "numpy_reference",
    "override_sdpa",
    "parameter_count",
    "plot",
    "record_attention",
    "reference",
    "scaled_dot_product_attention",
]
