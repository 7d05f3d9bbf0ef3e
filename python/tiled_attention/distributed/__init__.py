"""Attention over sequences that are divided between the ranks of a torch.distributed process group."""

from .layout import gather_sequence, shard_sequence
from .ring_attention import ring_attention

__all__ = ["gather_sequence", "ring_attention", "shard_sequence"]
