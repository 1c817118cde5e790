"""What one step did and what the KV cache held after its plan was made: the raw material of every figure."""

from typing import NamedTuple

from paged_jax.kv_cache.usage import KVUsage


class StepStats(NamedTuple):
    """One engine step."""

    start_time: float
    """Seconds on the engine's clock when scheduling began."""
    end_time: float
    """Seconds on the engine's clock when its tokens were known."""
    num_tokens: int
    """Tokens computed, padding excluded."""
    num_padded_tokens: int
    """Tokens of padding computed besides."""
    num_decode_tokens: int
    """Tokens of requests that computed just their newest one; the rest belong to prefill chunks and ended rows."""
    num_running: int
    num_waiting: int
    num_preempted: int
    """Requests preempted by this step's plan, and by plans before it that scheduled nothing."""
    num_swapped_out: int
    """Blocks that moved to host memory before this step, of all cache groups."""
    num_swapped_in: int
    """Blocks that came back, of all cache groups."""
    num_copied: int
    """Shared blocks that were copied before they were written, of all cache groups."""
    num_evicted: int
    """Cached blocks that were given up for this step, of all cache groups."""
    blocks_in_use: int
    block_table_entries: int
    """Entries of all running requests' block tables; 4 bytes each on the device."""
    kv: KVUsage
    """After the step's tokens are stored, before finished requests give their blocks back."""
