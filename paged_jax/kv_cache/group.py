"""A cache group: layers whose attention keeps the same tokens, and so share one block table."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share block tables and one pages array."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    """Keys that a query sees, itself included; None: all. Pages that fell out of the window are given up."""


def group_windows(layer_windows: Sequence[int | None]) -> list[int | None]:
    """The sliding window of each cache group of a model with these layers; the group without one comes first."""
    return sorted(set(layer_windows), key=lambda window: window or 0)


def cache_groups(layer_windows: Sequence[int | None], num_kv_heads: int, head_dim: int) -> tuple[CacheGroup, ...]:
    """One for the layers that see all tokens and one for each sliding window, as far as there are any."""
    return tuple(
        CacheGroup(list(layer_windows).count(window), num_kv_heads, head_dim, window)
        for window in group_windows(layer_windows)
    )
