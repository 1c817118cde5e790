"""The blocks of one request in one cache group, in the order of its tokens."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """Block ids: token t's keys and values lie in block `block_ids[t // block_size]` at slot `t % block_size`.

    Id 0 stands for a block that was given up because it fell out of the group's sliding window.
    """

    block_ids: list[int] = field(default_factory=list)
    num_published: int = 0
    """Leading full blocks that came from the prefix cache or have been offered to it."""
    num_dropped: int = 0
    """Leading blocks that fell out of the window."""
    cursor: object | None = None
    """The prefix cache's own note of where the last published block lies."""

    def __len__(self) -> int:
        return len(self.block_ids)
