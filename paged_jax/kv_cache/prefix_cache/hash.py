"""Prefix cache over whole blocks, found by a hash chained over all tokens up to the block's end."""

import hashlib
from array import array
from collections.abc import Sequence


class HashPrefixCache:
    """Maps the content of a full block, together with everything before it, to the block that holds it.

    A block's hash covers its tokens and its predecessor's hash, so that equal hashes mean equal prefixes. The tokens
    are kept and compared on a hit all the same: a collision must not hand one request another's keys and values.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[bytes, int] = {}
        self._contents: dict[int, tuple[bytes, bytes]] = {}  # block -> (hash, parent's hash and tokens)

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, token_ids: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """Return the longest cached chain of whole blocks at the start of `token_ids`: blocks and their hashes."""
        blocks: list[int] = []
        hashes: list[bytes] = []
        parent = b""
        for start in range(0, len(token_ids) - self._block_size + 1, self._block_size):
            content = self._content(parent, token_ids, start)
            key = self._hash(content)
            block = self._blocks.get(key)
            if block is None or self._contents[block][1] != content:
                break
            blocks.append(block)
            hashes.append(key)
            parent = key
        return blocks, hashes

    def insert(self, block_id: int, index: int, token_ids: Sequence[int], hashes: list[bytes]) -> bool:
        """Offer full block number `index` of a request with these tokens; append its hash to `hashes`.

        `hashes` holds those of the request's earlier blocks. False when the same content is already cached in
        another block, which then stays the one that is found.
        """
        parent = hashes[index - 1] if index else b""
        content = self._content(parent, token_ids, index * self._block_size)
        key = self._hash(content)
        hashes.append(key)
        if key in self._blocks:
            return False
        self._blocks[key] = block_id
        self._contents[block_id] = (key, content)
        return True

    def remove(self, block_id: int) -> None:
        """Forget a block that is about to hold something else."""
        key, _ = self._contents.pop(block_id)
        del self._blocks[key]

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._contents.clear()

    def _content(self, parent: bytes, token_ids: Sequence[int], start: int) -> bytes:
        return parent + array("q", token_ids[start : start + self._block_size]).tobytes()

    @staticmethod
    def _hash(content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=16).digest()
