"""Attention through block tables."""

from pallas_kernels.paged_attention.api import ragged_paged_attention

__all__ = ["ragged_paged_attention"]
