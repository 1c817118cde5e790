"""A cache group: layers whose attention keeps the same tokens, and so share one block table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share block tables and one pages array."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    """Keys that a query sees, itself included; None: all. Pages that fell out of the window are given up."""
