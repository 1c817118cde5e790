"""Host memory for the blocks of requests that were swapped out: which of it is whose."""

from typing import NamedTuple


class SwappedBlocks(NamedTuple):
    """A request's blocks on their way between the device and the host, per cache group, in the order of its tokens."""

    device_blocks: tuple[tuple[int, ...], ...]
    host_blocks: tuple[tuple[int, ...], ...]


class HostPool:
    """Blocks 0..num_blocks - 1 of host memory of one cache group, each free or holding one block of one request."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks; the caller has checked `num_free`."""
        if count > len(self._free):
            raise RuntimeError(f"{count} host blocks wanted, {len(self._free)} free: the caller must check first")
        return [self._free.pop() for _ in range(count)]

    def free(self, block_ids: list[int]) -> None:
        """Take blocks back."""
        self._free.extend(reversed(block_ids))

    def check(self, used: list[int]) -> None:
        """Raise AssertionError unless every block is free or one of `used`, which hold something."""
        assert sorted(self._free + used) == list(range(self.num_blocks)), "a host block is lost or has two owners"
