"""Attention through block tables."""

from pallas_kernels.paged_attention.api import ragged_paged_attention
from pallas_kernels.paged_attention.pick import KERNELS, Choice, page_backend, pick_implementation
from pallas_kernels.paged_attention.shapes import AttentionShapes, attention_shapes

__all__ = [
    "KERNELS",
    "AttentionShapes",
    "Choice",
    "attention_shapes",
    "page_backend",
    "pick_implementation",
    "ragged_paged_attention",
]
