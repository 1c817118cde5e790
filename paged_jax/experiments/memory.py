"""Whether the engines of an experiment, which are alive together, fit into memory."""

from collections.abc import Sequence

from paged_jax.config import DEFAULT_CPU_KV_CACHE_MEMORY, DEFAULT_SWAP_SPACE, EngineConfig
from paged_jax.models.config import ModelConfig


def check_memory(
    configs: Sequence[EngineConfig], platform: str, available: int | None, model: ModelConfig | None = None
) -> None:
    """Raise ValueError if the memory of all engines, which are alive together, cannot fit.

    Counted are the KV pages, which on a CPU are in main memory, and the host memory for swapping. `platform` is JAX's
    name for the device's kind; `available` is the free main memory in bytes, if known. Without a `model`, whose shape
    gives the size of a block, numbers of blocks are taken for free; padding of pages, which a CPU's have not, is not
    counted.
    """
    if platform != "cpu" and len(configs) > 1 and any(c.num_blocks is None for c in configs):
        raise ValueError(
            f"the engines of {len(configs)} settings share the {platform}'s memory, so none of them may "
            "take a share of what is free: set engine.num_blocks (in a sweep.zip group with "
            "engine.block_size for equal memory)"
        )
    pages = sum(_kv_bytes(c, model) for c in configs) if platform == "cpu" else 0
    swap = sum(_swap_bytes(c, model, platform) for c in configs)
    if available is not None and pages + swap > available:
        settings = f"{len(configs)} settings need" if len(configs) > 1 else "the setting needs"
        held = " and ".join(["the KV pages"] * bool(pages) + ["the swapped blocks"] * bool(swap))
        keys = ["engine.kv_cache_memory", "engine.num_blocks"] * bool(pages)
        keys += ["engine.swap_space", "engine.num_swap_blocks"] * bool(swap)
        raise ValueError(
            f"{held} of {settings} {(pages + swap) / 2**30:.1f} GiB together, and {available / 2**30:.1f} GiB of "
            f"memory are free: lower {' or '.join(keys)}"
        )


def _kv_bytes(config: EngineConfig, model: ModelConfig | None) -> int:
    """Bytes of the KV pages of an engine on a CPU: keys and values of all blocks and the null block."""
    if config.num_blocks is None:
        return config.kv_cache_memory or DEFAULT_CPU_KV_CACHE_MEMORY
    return (config.num_blocks + 1) * _block_bytes(config, model, "cpu")


def _swap_bytes(config: EngineConfig, model: ModelConfig | None, platform: str) -> int:
    """Bytes of host memory that an engine keeps for swapped blocks."""
    if config.preemption_mode == "recompute":
        return 0
    if config.num_swap_blocks is None:
        return DEFAULT_SWAP_SPACE if config.swap_space is None else config.swap_space
    return config.num_swap_blocks * _block_bytes(config, model, platform)


def _block_bytes(config: EngineConfig, model: ModelConfig | None, platform: str) -> int:
    """Bytes of a block over all layers; 0 if the model is not known."""
    if model is None:
        return 0
    dtype = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else model.dtype
    itemsize = 4 if dtype == "float32" else 2
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize * config.block_size
