"""What the token slots of the KV cache hold."""

from typing import NamedTuple


class KVUsage(NamedTuple):
    """Token slots of the KV cache by what they hold; the parts sum to num_blocks * block_size.

    Where layers form several cache groups, the slots of each count once for each of its layers, divided by the greatest
    common divisor of the groups' numbers of layers: shares are then shares of memory.
    """

    token_states: int
    """Slots of blocks in use that hold a token's keys and values, shared blocks counted once."""
    internal_fragmentation: int
    """Slots of blocks in use that hold nothing and, as far as is known, never will: tails of block tables, and what
    a reservation has beyond its request's end."""
    cached: int
    """Slots of blocks that no request uses and that the prefix cache keeps."""
    free: int
    """Slots of blocks that hold nothing."""
    reserved: int = 0
    """Slots of a reservation that hold nothing yet and will."""
    external_fragmentation: int = 0
    """Free slots that are of no use, since no run of them is as long as the next request wants it."""
