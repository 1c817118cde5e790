"""Settings of engines that have no model and no device: replays, and the benchmark of the scheduler."""

from collections.abc import Iterable, Mapping
from typing import Any

from paged_jax.config import READERS

WITHOUT_EFFECT = (
    "attention_implementation",
    "attention_interpret",
    "dtype",
    "enforce_eager",
    "kv_cache_dtype",
    "kv_cache_memory",
    "layer_loop",
    "load_format",
    "memory_utilization",
    "seed",
    "swap_space",
    "tensor_parallel_size",
    "token_buckets",
    "trace_file",
)
"""Settings of the device, the model or the recording."""


def check_has_effect(keys: Iterable[str], where: str) -> None:
    """Raise ValueError for a setting that changes nothing in `where`, such as "a replay"."""
    for key in keys:
        if key in WITHOUT_EFFECT:
            raise ValueError(f"{key} has no effect in {where}, which has no model and no device: leave it out")


def with_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with changes; those of `values` that no policy reads any more are unset."""
    changed = {**values, **overrides}
    for field, readers in READERS.items():
        if not any(":" in str(changed.get(o)) or changed.get(o) in names for o, names in readers.items()):
            changed[field] = overrides.get(field)
    return changed
