"""The blocks of one request in one cache group, in the order of its tokens."""

from dataclasses import dataclass, field


@dataclass
class BlockTable:
    """Block ids: token t's keys and values lie in block `block_ids[t // block_size]` at slot `t % block_size`.

    `hashes` are the chained content hashes of the leading full blocks that are known to the prefix cache or have
    been offered to it, so that no block is hashed twice.
    """

    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.block_ids)
