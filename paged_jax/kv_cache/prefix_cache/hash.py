"""Prefix cache over whole blocks, found by a hash chained over all tokens up to the block's end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from struct import Struct, calcsize, unpack
from typing import ClassVar

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.eviction import Eviction
from paged_jax.kv_cache.prefix_cache import CachedRun, PrefixCache, PrefixUser

_DIGEST_SIZE = 16

TOKEN_SIZE = calcsize("q")
"""Bytes of one token id."""


@lru_cache(maxsize=64)
def _packer(count: int) -> Callable[..., bytes]:
    return Struct(f"{count}q").pack


@dataclass(slots=True)
class _Prompt:
    """Tokens that no request holds."""

    token_ids: list[int]
    cache_salt: str
    block_contents: list[bytes] = field(default_factory=list)


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """The tokens as a string of 64-bit integers, which hashes and compares fast."""
    return _packer(len(token_ids))(*token_ids)


def tokens_of(packed: bytes | bytearray) -> tuple[int, ...]:
    """The tokens that `token_bytes` has packed."""
    return unpack(f"{len(packed) // TOKEN_SIZE}q", packed)


def content_keys(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """What identifies each whole block of the tokens with all before it: the keys that evictions are given."""
    return block_contents(_Prompt(list(token_ids), salt), len(token_ids) // block_size, block_size)


def block_contents(user: PrefixUser, count: int, block_size: int) -> list[bytes]:
    """The user's own list of block contents, grown to at least `count`, for which it has tokens enough.

    A content is the digest of the content before it (of the salt, before the first) followed by the block's tokens.
    """
    contents = user.block_contents
    known = len(contents)
    if known >= count:
        return contents
    tokens = token_bytes(user.token_ids[known * block_size : count * block_size])
    width = TOKEN_SIZE * block_size
    if known:
        digest = blake2b(contents[-1], digest_size=_DIGEST_SIZE).digest()
    else:  # hashed apart from contents: no salt may be taken for the beginning of another prompt
        digest = blake2b(user.cache_salt.encode(), digest_size=_DIGEST_SIZE, person=b"salt").digest()
    content = digest + tokens[:width]
    contents.append(content)
    for start in range(width, (count - known) * width, width):
        content = blake2b(content, digest_size=_DIGEST_SIZE).digest() + tokens[start : start + width]
        contents.append(content)
    return contents


class HashPrefixCache(PrefixCache):
    """Maps the content of a full block, together with everything before it, to the block that holds it.

    The key is the content itself: the digest of all that comes before and the block's own tokens, so that a lookup
    compares tokens. Any unlocked block is a candidate for eviction; what followed it is found again once it is back.
    """

    supports_windows: ClassVar[bool] = True

    def __init__(self, block_size: int, eviction: Eviction) -> None:
        super().__init__(block_size, eviction)
        self._blocks: dict[bytes, int] = {}
        self._contents: dict[int, bytes] = {}

    def match(self, user: PrefixUser, max_blocks: int) -> list[int]:
        """Look the leading blocks up one by one, until one is not cached."""
        count = min(max_blocks, len(user.token_ids) // self.block_size)
        blocks: list[int] = []
        for block in map(self._blocks.get, islice(block_contents(user, count, self.block_size), count)):
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, user: PrefixUser, index: int) -> int | None:
        """Look one block up, whatever became of those before it."""
        return self._blocks.get(block_contents(user, index + 1, self.block_size)[index])

    def insert(self, user: PrefixUser, table: BlockTable, index: int) -> bool:
        """Keep the block unless another one holds the same."""
        contents = user.block_contents
        if index >= len(contents):
            contents = block_contents(user, index + 1, self.block_size)
        content, block = contents[index], table.block_ids[index]
        if self._blocks.setdefault(content, block) != block:
            return False
        if block not in self._contents:
            self._contents[block] = content
            self.eviction.insert(block, index, lambda: content)
            self.version += 1
        return True

    def hit(self, block_ids: Sequence[int]) -> None:
        """Tell the eviction policy."""
        self.eviction.hit(block_ids)

    def lock(self, block_id: int) -> None:
        """The block is no candidate any more."""
        self.num_unlocked -= 1
        self.eviction.remove(block_id)

    def unlock(self, block_id: int) -> None:
        """The block becomes a candidate."""
        self.num_unlocked += 1
        self.eviction.use(block_id)
        self.eviction.add(block_id)

    def evict(self) -> int:
        """Give up the policy's choice."""
        block = self.eviction.pop()
        del self._blocks[self._contents.pop(block)]
        self.num_unlocked -= 1
        self.version += 1
        return block

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that were unlocked."""
        unlocked = list(self.eviction)
        for block in self._contents:
            self.eviction.forget(block)
        self._blocks.clear()
        self._contents.clear()
        self.num_unlocked = 0
        self.version += 1
        return unlocked

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._contents

    def __len__(self) -> int:
        return len(self._blocks)

    def check(self) -> None:
        """Raise AssertionError unless each block has one content and the candidates are the unlocked blocks."""
        assert self._blocks == {content: block for block, content in self._contents.items()}, (
            "blocks and contents are not each other's inverse"
        )
        candidates = list(self.eviction)
        assert len(set(candidates)) == len(candidates) == len(self.eviction), "a block is twice a candidate"
        assert all(block in self._contents for block in candidates), "a candidate for eviction is not cached"
        assert self.num_unlocked == len(candidates), "the number of unlocked blocks is not that of the candidates"

    def runs(self) -> list[CachedRun]:
        """A run for each block: the digest that its content begins with names the block that it follows."""
        by_digest = {blake2b(content, digest_size=_DIGEST_SIZE).digest(): content for content in self._blocks}
        followers: dict[bytes | None, list[bytes]] = {}
        for content in self._blocks:
            followers.setdefault(by_digest.get(content[:_DIGEST_SIZE]), []).append(content)
        runs: list[CachedRun] = []
        stack: list[tuple[int | None, bytes]] = [(None, content) for content in reversed(followers.get(None, []))]
        while stack:
            parent, content = stack.pop()
            stack += [(len(runs), follower) for follower in reversed(followers.get(content, []))]
            tokens = tokens_of(content[_DIGEST_SIZE:])
            runs.append(CachedRun(parent, (self._blocks[content],), tokens))
        return runs
