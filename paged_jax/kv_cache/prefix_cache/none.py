"""No reuse between requests."""

from collections.abc import Sequence


class NoPrefixCache:
    """Finds nothing and keeps nothing."""

    def __init__(self, block_size: int) -> None:
        pass

    def __len__(self) -> int:
        return 0

    def match(self, token_ids: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """Return an empty chain."""
        return [], []

    def insert(self, block_id: int, index: int, token_ids: Sequence[int], hashes: list[bytes]) -> bool:
        """Keep nothing; the hash list still grows, since its length tells which blocks were offered."""
        hashes.append(b"")
        return False

    def remove(self, block_id: int) -> None:
        """Never called: no block is ever cached."""
        raise RuntimeError(f"block {block_id} was never cached")

    def clear(self) -> None:
        """Nothing to forget."""
