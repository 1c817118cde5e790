"""What one step did and what the KV cache held after its plan was made: the raw material of every figure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KVUsage:
    """Token slots of the KV cache by what they hold; the four parts sum to num_blocks * block_size."""

    token_states: int
    """Slots of blocks in use that hold a token's keys and values, shared blocks counted once."""
    internal_fragmentation: int
    """Slots of blocks in use that hold nothing yet: the tails of block tables."""
    cached: int
    """Slots of blocks that no request uses and that the prefix cache keeps."""
    free: int
    """Slots of blocks that hold nothing."""


@dataclass(frozen=True)
class StepStats:
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
    """Tokens of requests that computed exactly one; the rest belong to prefill chunks."""
    num_running: int
    num_waiting: int
    num_preempted: int
    """Requests preempted by this step's plan."""
    blocks_in_use: int
    block_table_entries: int
    """Entries of all running requests' block tables; 4 bytes each on the device."""
    kv: KVUsage
    """After the step's tokens are stored, before finished requests give their blocks back."""
