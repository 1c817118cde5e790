"""What the token slots of the KV cache hold."""

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
