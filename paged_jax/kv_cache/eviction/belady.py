"""Belady's clairvoyant policy: what is needed farthest in the future goes first."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from math import inf

from paged_jax.kv_cache.eviction.ranked import RankedEviction


class BeladyEviction(RankedEviction):
    """Gives up the block whose content is next asked for farthest in the future, or never again (Belady 1966).

    No policy that caches every block hits more. It must be told the future: a yardstick, not a policy to serve with.
    Of blocks that are next used by the same prompt, or never again, the one farther from its prefix's beginning goes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._future: deque[Sequence[Hashable]] | None = None
        self._next_uses: dict[Hashable, deque[int]] = {}  # key -> numbers of the coming prompts that have it
        self._blocks: dict[Hashable, int] = {}
        self._contents: dict[int, tuple[Hashable, int]] = {}  # block -> (key, index)

    def set_future(self, prompts: Sequence[Sequence[Hashable]]) -> None:
        """Tell the coming prompts in order of arrival, each by the keys of its whole blocks (see `content_keys`)."""
        self._future = deque(prompts)
        self._next_uses = {}
        for number, keys in enumerate(prompts):
            for key in keys:
                self._next_uses.setdefault(key, deque()).append(number)
        for block in list(self._entries):
            self._rerank(block)

    def advance(self) -> None:
        """The next of the coming prompts has been looked up: it is of the past."""
        if not self._future:
            raise RuntimeError("a prompt has arrived that the future given to Belady's policy does not have")
        for key in self._future.popleft():
            uses = self._next_uses[key]
            uses.popleft()
            if not uses:
                del self._next_uses[key]
            if key in self._blocks:
                self._rerank(self._blocks[key])

    def insert(self, block_id: int, index: int, key: Callable[[], Hashable]) -> None:
        """Note which content the block holds."""
        content = key()
        self._blocks[content] = block_id
        self._contents[block_id] = (content, index)

    def pop(self) -> int:
        """Take out the block that is needed last; RuntimeError without a future."""
        if self._future is None:
            raise RuntimeError("Belady's policy chooses by the future, which nobody has told it: call set_future first")
        return super().pop()

    def forget(self, block_id: int) -> None:
        """Drop the content, too."""
        super().forget(block_id)
        del self._blocks[self._contents.pop(block_id)[0]]

    def _rank(self, block_id: int) -> tuple[float, int]:
        content, index = self._contents[block_id]
        uses = self._next_uses.get(content)
        return (-uses[0] if uses else -inf), -index
