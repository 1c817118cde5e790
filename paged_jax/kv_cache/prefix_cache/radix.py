"""Prefix cache as a tree of token runs, after SGLang's RadixAttention."""

from collections.abc import Iterator, Sequence

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.eviction import Eviction
from paged_jax.kv_cache.prefix_cache import CachedRun, PrefixCache, PrefixUser
from paged_jax.kv_cache.prefix_cache.hash import TOKEN_SIZE, block_contents, token_bytes, tokens_of


class _Node:
    """A run of whole blocks that follows its parent's run. The root's run is empty."""

    __slots__ = ("blocks", "children", "generation", "key", "parent", "start", "tokens")

    def __init__(self, parent: "_Node | None", key: bytes, start: int, blocks: list[int], tokens: bytearray) -> None:
        self.parent = parent
        self.key = key  # the first block's tokens, after the salt where the run begins a prompt
        self.start = start  # number of blocks before the run
        self.blocks = blocks
        self.tokens = tokens
        self.children: dict[bytes, _Node] = {}
        self.generation = 0  # changes when the run gets shorter: what was known of its end is void


class RadixPrefixCache(PrefixCache):
    """A tree in which each path from the root spells cached tokens; an edge is a run of whole blocks.

    Runs are compared at once, so that a match takes time by the tokens compared and the branches passed. A run is
    split where prompts part. Only the last block of a leaf, while nobody uses it, is a candidate for eviction; once
    it is gone, the one before it may be.

    A request that computed blocks which another one had cached meanwhile may extend a path whose blocks it does not
    use, so that an unlocked block can have locked ones below it. It counts as unlocked; when nothing else is left to
    give up, what is below it is forgotten first.

    A table's cursor is (node, its generation, index): the block last offered, number `index`, lies in the node or,
    after splits, above it.
    """

    def __init__(self, block_size: int, eviction: Eviction) -> None:
        super().__init__(block_size, eviction)
        self._width = TOKEN_SIZE * block_size
        self._root = _Node(None, b"", 0, [], bytearray())
        self._nodes: dict[int, _Node] = {}
        self._unlocked: set[int] = set()

    def match(self, user: PrefixUser, max_blocks: int) -> list[int]:
        """Follow the tokens down from the root."""
        return self._walk(user, min(max_blocks, len(user.token_ids) // self.block_size))[0]

    def insert(self, user: PrefixUser, table: BlockTable, index: int) -> bool:
        """Put the block where the cursor is, or else, with those before it that are missing, where a walk ends."""
        node = self._resume(table.cursor, index)
        if node is None:
            found, node = self._walk(user, index)
            for earlier in range(len(found), index):
                node = self._put(user, node, earlier, table.block_ids[earlier])
        block = table.block_ids[index]
        node = self._put(user, node, index, block)
        table.cursor = (node, node.generation, index)
        return node.blocks[index - node.start] == block

    def hit(self, block_ids: Sequence[int]) -> None:
        """Tell the eviction policy."""
        self.eviction.hit(block_ids)

    def lock(self, block_id: int) -> None:
        """If it was a candidate, it is none any more."""
        self.num_unlocked -= 1
        self._unlocked.remove(block_id)
        node = self._nodes[block_id]
        if not node.children and node.blocks[-1] == block_id:
            self.eviction.remove(block_id)

    def unlock(self, block_id: int) -> None:
        """If nothing comes after it, it is a candidate."""
        self.num_unlocked += 1
        self._unlocked.add(block_id)
        self.eviction.use(block_id)
        node = self._nodes[block_id]
        if not node.children and node.blocks[-1] == block_id:
            self.eviction.add(block_id)

    def evict(self) -> int:
        """Give up the policy's choice among the ends of prefixes."""
        if not len(self.eviction):
            self._uncover()
        block = self.eviction.pop()
        self.num_unlocked -= 1
        self._unlocked.remove(block)
        node = self._nodes.pop(block)
        node.generation += 1
        node.blocks.pop()
        del node.tokens[-self._width :]
        if not node.blocks and node.parent is not None:
            del node.parent.children[node.key]
            node = node.parent
        self._offer_end(node)
        self.version += 1
        return block

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that were unlocked."""
        unlocked = list(self._unlocked)
        self._forget_after(self._root, 0)
        self._unlocked.clear()
        self.num_unlocked = 0
        self.version += 1
        return unlocked

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def check(self) -> None:
        """Raise AssertionError unless the tree is well formed and the candidates are its unlocked ends."""
        blocks, ends = [], []
        for node in self._subtree(self._root):
            blocks += node.blocks
            assert all(self._nodes.get(block) is node for block in node.blocks), "a block's node is another one"
            assert len(node.tokens) == self._width * len(node.blocks), "a run has not as many tokens as its blocks"
            if node.parent is not None:
                assert node.blocks, "a run is empty"
                assert node.start == node.parent.start + len(node.parent.blocks), "a run begins elsewhere"
                assert node.parent.children.get(node.key) is node, "a node is not its parent's child"
                assert node.key.endswith(node.tokens[: self._width]), "a node's key is not its first block"
                ends += [block for block in node.blocks[-1:] if not node.children and block in self._unlocked]
        assert len(set(blocks)) == len(blocks) == len(self._nodes), "a block is twice in the tree, or not at all"
        assert self._unlocked <= self._nodes.keys(), "an unlocked block is not cached"
        assert self.num_unlocked == len(self._unlocked), "the number of unlocked blocks is wrong"
        assert sorted(self.eviction) == sorted(ends), "the candidates for eviction are not the unlocked ends"

    def runs(self) -> list[CachedRun]:
        """The nodes of the tree, but for the empty root."""
        numbers: dict[_Node | None, int | None] = {self._root: None}
        runs: list[CachedRun] = []
        for node in self._subtree(self._root):
            if node is not self._root:
                numbers[node] = len(runs)
                runs.append(CachedRun(numbers[node.parent], tuple(node.blocks), tokens_of(node.tokens)))
        return runs

    def _resume(self, cursor: object, index: int) -> _Node | None:
        """The node with the block before number `index`, if the cursor leads there."""
        if index == 0:
            return self._root
        if not isinstance(cursor, tuple):
            return None
        node, generation, last = cursor
        if node.generation != generation or last != index - 1:
            return None
        while node.start > last:
            node = node.parent
        return node

    def _walk(self, user: PrefixUser, count: int) -> tuple[list[int], _Node]:
        """The cached ones of the user's first `count` blocks, and the node with the last of them."""
        found: list[int] = []
        node = self._root
        while len(found) < count:
            child = node.children.get(self._key(user, len(found)))
            if child is None:
                break
            node = child
            common = self._num_common(user, node, min(count - len(found), len(node.blocks)))
            found += node.blocks[:common]
            if common < len(node.blocks):
                break
        return found, node

    def _key(self, user: PrefixUser, index: int) -> bytes:
        """The key of a node that begins with the user's block number `index`."""
        tokens = token_bytes(user.token_ids[index * self.block_size : (index + 1) * self.block_size])
        return tokens if index else user.cache_salt.encode() + tokens

    def _num_common(self, user: PrefixUser, node: _Node, limit: int) -> int:
        """How many of the node's first `limit` blocks the user has in the same place, by bisection."""
        begin = node.start * self.block_size
        tokens, width = token_bytes(user.token_ids[begin : begin + limit * self.block_size]), self._width
        low, high = 0, limit
        middle = limit
        while low < high:
            if tokens[low * width : middle * width] == node.tokens[low * width : middle * width]:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def _put(self, user: PrefixUser, node: _Node, index: int, block: int) -> _Node:
        """Cache block number `index`, which the node's block before it leads to; returns where that content lies."""
        key = self._key(user, index)
        offset = index - node.start
        if offset < len(node.blocks):
            if node.tokens[offset * self._width : (offset + 1) * self._width] == key:
                return node
            node = self._split(node, offset)
        elif key in node.children:
            return node.children[key]
        self._withdraw_end(node)
        if node.parent is None or node.children:
            child = _Node(node, key, index, [block], bytearray(key[-self._width :]))
            node.children[key] = child
            node = child
        else:
            node.blocks.append(block)
            node.tokens += key
        self._nodes[block] = node
        self.eviction.insert(block, index, lambda: block_contents(user, index + 1, self.block_size)[index])
        self.version += 1
        return node

    def _split(self, node: _Node, offset: int) -> _Node:
        """Move the run's first `offset` blocks to a new parent, and return it. Cursors to the node stay valid."""
        size = offset * self._width
        upper = _Node(node.parent, node.key, node.start, node.blocks[:offset], node.tokens[:size])
        assert node.parent is not None, "the root has no run to split"
        node.parent.children[node.key] = upper
        for block in upper.blocks:
            self._nodes[block] = upper
        node.parent = upper
        node.key = bytes(node.tokens[size : size + self._width])
        node.start += offset
        node.blocks = node.blocks[offset:]
        node.tokens = node.tokens[size:]
        upper.children[node.key] = node
        return upper

    def _has_free_end(self, node: _Node) -> bool:
        """Whether nobody uses the run's last block and nothing comes after it."""
        return not node.children and bool(node.blocks) and node.blocks[-1] in self._unlocked

    def _offer_end(self, node: _Node) -> None:
        """The run's last block may have become a candidate."""
        if self._has_free_end(node):
            self.eviction.add(node.blocks[-1])

    def _withdraw_end(self, node: _Node) -> None:
        """Something is about to follow the run."""
        if self._has_free_end(node):
            self.eviction.remove(node.blocks[-1])

    def _uncover(self) -> None:
        """Make a candidate of the deepest unlocked block: forget what is below it, all of which is in use."""
        deepest = max(self._unlocked, key=lambda block: self._nodes[block].start)
        node = self._nodes[deepest]
        length = len(node.blocks)
        while node.blocks[length - 1] not in self._unlocked:
            length -= 1
        self._forget_after(node, length)
        self._offer_end(node)

    def _forget_after(self, node: _Node, length: int) -> None:
        """Forget the node's run from number `length` on, and all that follows."""
        for below in self._subtree(node):
            below.generation += 1
            for block in below.blocks[length if below is node else 0 :]:
                self.eviction.forget(block)
                del self._nodes[block]
        node.children.clear()
        del node.blocks[length:]
        del node.tokens[length * self._width :]

    @staticmethod
    def _subtree(node: _Node) -> Iterator[_Node]:
        """The node and all below it, parents first, children by age."""
        stack = [node]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))
