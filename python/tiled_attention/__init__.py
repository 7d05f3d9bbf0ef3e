"""Attention operators for PyTorch with exact gradients: `import tiled_attention as ta`."""

from . import numpy_reference, plot, reference
from .attention import attention, dropout_mask, merge_attention
from .convert import convert
from .favor import FavorFeatures
from .linear_attention import LinearState, linear_attention, linear_attention_step
from .linear_module import LinearAttention
from .masks import Causal, Chunked, Documents, KeyLengths, Mask, PrefixLM, Sinks, SlidingWindow
from .multihead_attention import MultiheadAttention
from .override import override_sdpa
from .sdpa import scaled_dot_product_attention
from .sparse_masks import BlockSparse, Dilated, Global, RandomBlocks, Strided
from .weights import attention_weights

__all__ = [
    "BlockSparse",
    "Causal",
    "Chunked",
    "Dilated",
    "Documents",
    "FavorFeatures",
    "Global",
    "KeyLengths",
    "LinearAttention",
    "LinearState",
    "Mask",
    "MultiheadAttention",
    "PrefixLM",
    "RandomBlocks",
    "Sinks",
    "SlidingWindow",
    "Strided",
    "attention",
    "attention_weights",
    "convert",
    "dropout_mask",
    "linear_attention",
    "linear_attention_step",
    "merge_attention",
    "numpy_reference",
    "override_sdpa",
    "plot",
    "reference",
    "scaled_dot_product_attention",
]
