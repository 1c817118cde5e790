"""Gives requests blocks and takes them back: pools, block tables, prefix caches and host memory as one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paged_jax.kv_cache.block_pool import BlockPool
from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.kv_cache.prefix_cache import PrefixCache, PrefixUser
from paged_jax.kv_cache.prefix_match import first_seen_block, longest_match
from paged_jax.kv_cache.swap import HostPool, SwappedBlocks
from paged_jax.kv_cache.usage import KVUsage

type Record = Callable[..., None]
"""Is told of an event: its name, and its fields as keywords."""


@dataclass(frozen=True)
class CacheSpec:
    """What a KV cache is made of."""

    block_size: int
    num_blocks: int
    """Usable blocks of each cache group."""
    groups: tuple[CacheGroup, ...]
    num_swap_blocks: int
    """Blocks of host memory of each cache group."""
    max_request_len: int
    """Most tokens of a request."""
    max_step_tokens: int
    """Most tokens of one step."""
    watermark: float
    """Share of the blocks that admission leaves free."""
    make_prefix_cache: Callable[[], PrefixCache]


class Match(NamedTuple):
    """The cached beginning of a request's tokens."""

    versions: list[int]
    """Of the prefix caches that were asked."""
    num_blocks: int
    """Whole blocks that need not be computed."""
    block_ids: list[list[int]]
    """Per cache group, the last of those `num_blocks`: all of them, or those that the window still sees."""


class CacheUser(PrefixUser, Protocol):
    """What the manager reads and writes of a request."""

    request_id: str
    num_computed_tokens: int
    """Tokens whose keys and values are in the cache or, swapped out, in host memory."""
    num_writable_tokens: int
    """Tokens that its blocks can take without asking the manager."""
    next_publish: int
    """Computed tokens at which `publish` has something to do."""
    block_tables: tuple[BlockTable, ...]
    """One per cache group; empty while the request holds no blocks."""
    host_blocks: tuple[list[int], ...]
    """One per cache group while it is swapped out, else empty."""
    match: Match | None
    """What was found for it last."""


class KVCacheManager:
    """The paged allocator (Kwon et al., SOSP 2023): blocks are given when tokens need them, and shared if possible.

    A request's block tables cover at least its computed tokens and those scheduled. Full blocks are offered to the
    prefix cache once their tokens are computed; they stay cached after their last user has left, until evicted. Forked
    requests share all blocks; whoever writes to a shared one gets a copy first. Blocks that fell out of a group's
    sliding window are given up.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.record: Record | None = None
        self.caches = [spec.make_prefix_cache() for _ in spec.groups]
        self.pools = [self._make_pool(group, cache) for group, cache in enumerate(self.caches)]
        self.host_pools = [HostPool(spec.num_swap_blocks) for _ in spec.groups]
        self.num_table_entries = 0
        """Of one cache group: lengths of all block tables."""
        self.num_evicted = 0
        """Cached blocks given up so far."""
        self._windows = [group.sliding_window for group in spec.groups]
        self._windowed = [g for g, window in enumerate(self._windows) if window is not None]
        rooms = [(spec.num_blocks - 1) * self.block_size - (self._windows[g] - 1) for g in self._windowed]
        self._rooms = [room for room in rooms if room > 0]
        """Tokens beside the window of each group whose pool is larger; where none is, a request must fit the pool."""
        divisor = math.gcd(*(group.num_layers for group in spec.groups))
        self._weights = [group.num_layers // divisor for group in spec.groups]
        self._num_computed = 0
        """Sum of `num_computed_tokens` of the requests that have block tables."""
        self._num_unfilled_twice = 0
        """Empty slots of shared tails, counted for each sharer but the first."""
        self._emptied: list[list[int]] = [[] for _ in spec.groups]
        self._copies: list[dict[int, int]] = [{} for _ in spec.groups]  # target -> source
        self._host_freed: list[list[int]] = [[] for _ in spec.groups]
        self._num_watermark_blocks = math.ceil(spec.watermark * spec.num_blocks)

    @property
    def max_request_len(self) -> int:
        """Tokens of the longest request that the pools can hold."""
        if len(self._rooms) == len(self._windows):
            return self.spec.max_request_len
        return min(self.spec.max_request_len, self.spec.num_blocks * self.block_size)

    @property
    def max_chunk(self) -> int:
        """Most tokens of one request in one step, since their blocks must be there beside the window's."""
        return min([self.spec.max_step_tokens, *self._rooms])

    def reserved_len(self, request: CacheUser) -> int:
        """Tokens that a request may come to have in all; ValueError where the allocator must know and cannot."""
        return self.max_request_len

    def num_cached_tokens(self, request: CacheUser) -> int:
        """Tokens at the beginning of a request without blocks that need not be computed; takes nothing.

        The last token is always left to compute, since it is its output that the next token is sampled from.
        """
        return self._match(request).num_blocks * self.block_size

    def admit(self, request: CacheUser, num_new_tokens: int) -> bool:
        """Give a request without blocks the cached ones and new ones for `num_new_tokens` after them, or nothing.

        There must be blocks for all its tokens, not only for the first chunk: a prompt that does not fit would be
        preempted half-way and begun again, over and over. Cached blocks that are matched stop being available to
        `allocate`: that is counted before anything is taken.
        """
        match = self._match(request)
        start = match.num_blocks * self.block_size
        for group, pool in enumerate(self.pools):
            shared = match.block_ids[group]
            unused = pool.num_unused(shared) if shared else 0
            if not self._has_room(pool, self._peak(group, start, len(request.token_ids)) - len(shared), unused):
                return False
        count = self._blocks_for(start + num_new_tokens) - match.num_blocks
        tables = []
        for group, (pool, cache) in enumerate(zip(self.pools, self.caches, strict=True)):
            shared = match.block_ids[group]
            pool.share(shared)
            cache.hit(shared)
            dropped = match.num_blocks - len(shared)
            blocks = [0] * dropped + shared + pool.allocate(count)
            tables.append(BlockTable(blocks, match.num_blocks, dropped))
        self._own(request, tuple(tables), start)
        request.next_publish = start + self.block_size
        self._record_allocation(request, cached=start)
        return True

    def extend(self, request: CacheUser, num_new_tokens: int) -> bool:
        """Make room for the next tokens of a running request; False, and nothing taken, when blocks run out.

        Blocks that left the window go first. The block that is written next is copied if others use it, too.
        """
        size, computed, tables = self.block_size, request.num_computed_tokens, request.block_tables
        if self._windowed:
            self._drop_unseen(request)
        block_ids = tables[0].block_ids
        tail, length = computed // size, len(block_ids)
        grow = max(0, -(-(computed + num_new_tokens) // size) - length)
        copies = tail < length and self.pools[0].ref_count(block_ids[tail]) > 1
        for pool in self.pools:
            if grow + copies > pool.num_available:
                return False
        if copies:
            self._num_unfilled_twice -= length * size - computed
            for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
                (target,) = pool.allocate(1)
                source = table.block_ids[tail]
                self._copies[group][target] = source
                table.block_ids[tail] = target
                pool.free([source])
        if grow:
            for pool, table in zip(self.pools, tables, strict=True):
                table.block_ids += pool.allocate(grow)
            self.num_table_entries += grow
        request.num_writable_tokens = (length + grow) * size
        if self.record is not None and grow + copies:
            self._record_allocation(request, tail if copies else length)
        return True

    def advance(self, num_tokens: int) -> None:
        """So many tokens of requests with block tables were computed, and booked in the requests."""
        self._num_computed += num_tokens

    def publish(self, request: CacheUser) -> None:
        """Offer the request's full blocks to the prefix cache: their tokens are computed now."""
        size = self.block_size
        full = request.num_computed_tokens // size
        for cache, table in zip(self.caches, request.block_tables, strict=True):
            for index in range(table.num_published, full):
                cache.insert(request, table, index)
            table.num_published = full
        request.next_publish = full * size + size

    def fork(self, parent: CacheUser, child: CacheUser) -> bool:
        """Let a request without blocks share all of its parent's; False, and nothing taken, if that is impossible."""
        tables = []
        for pool, table in zip(self.pools, parent.block_tables, strict=True):
            pool.share([block for block in table.block_ids if block])
            tables.append(BlockTable(list(table.block_ids), table.num_published, table.num_dropped, table.cursor))
        self._own(child, tuple(tables), parent.num_computed_tokens)
        self._num_unfilled_twice += len(tables[0]) * self.block_size - parent.num_computed_tokens
        child.block_contents = parent.block_contents[: parent.num_computed_tokens // self.block_size]
        child.next_publish = parent.next_publish
        # the next write of either must ask whether the tail is still shared
        parent.num_writable_tokens = child.num_writable_tokens = parent.num_computed_tokens
        return True

    def free(self, request: CacheUser) -> None:
        """Take all blocks back; what the prefix cache knows stays available for hits."""
        self._give_up_blocks(request)
        request.num_computed_tokens = 0

    def swap_out(self, request: CacheUser) -> SwappedBlocks | None:
        """Take all blocks back and keep their content in host memory, or do nothing and return None if it is full."""
        self._drop_unseen(request)  # or it would need more room to come back than admission asks for
        count = self._blocks_for(request.num_computed_tokens)
        held = [[block for block in table.block_ids[:count] if block] for table in request.block_tables]
        if any(len(blocks) > pool.num_free for blocks, pool in zip(held, self.host_pools, strict=True)):
            return None
        # a copy that was planned for this request is not made: its source still has the content
        sources = [[c.get(b, b) for b in blocks] for blocks, c in zip(held, self._copies, strict=True)]
        request.host_blocks = tuple(
            pool.allocate(len(blocks)) for blocks, pool in zip(held, self.host_pools, strict=True)
        )
        self._give_up_blocks(request)
        return SwappedBlocks(tuple(map(tuple, sources)), tuple(map(tuple, request.host_blocks)))

    def swap_in(self, request: CacheUser, num_new_tokens: int) -> SwappedBlocks | None:
        """Give a swapped-out request blocks for its content and `num_new_tokens` more, or nothing and return None."""
        computed = request.num_computed_tokens
        count, total = self._blocks_for(computed), self._blocks_for(computed + num_new_tokens)
        dropped = [count - len(blocks) for blocks in request.host_blocks]
        for group, pool in enumerate(self.pools):
            if not self._has_room(pool, self._peak(group, computed, len(request.token_ids)), 0):
                return None
        tables = tuple(
            BlockTable([0] * gone + pool.allocate(total - gone), gone, gone)
            for gone, pool in zip(dropped, self.pools, strict=True)
        )
        swap = SwappedBlocks(
            tuple(tuple(t.block_ids[gone:count]) for t, gone in zip(tables, dropped, strict=True)),
            tuple(map(tuple, request.host_blocks)),
        )
        for freed, blocks in zip(self._host_freed, request.host_blocks, strict=True):
            freed += blocks
        request.host_blocks = ()
        self._own(request, tables, computed)
        request.next_publish = 0  # the new blocks may be offered again
        self._record_allocation(request)
        return swap

    def discard_swapped(self, request: CacheUser) -> None:
        """Forget the content of a swapped-out request."""
        for pool, blocks in zip(self.host_pools, request.host_blocks, strict=True):
            pool.free(blocks)
        request.host_blocks = ()
        request.num_computed_tokens = 0

    def reset_prefix_cache(self) -> None:
        """Forget all cached content; blocks in use stay in use."""
        for emptied, pool in zip(self._emptied, self.pools, strict=True):
            emptied += pool.forget_cached()

    def take_copies(self) -> tuple[list[tuple[int, int]], ...]:
        """Per cache group (source, target) of the copies that must be made before the next step."""
        copies = tuple([(source, target) for target, source in group.items()] for group in self._copies)
        for group in self._copies:
            group.clear()
        # host blocks that were given up while this step was planned are still read by it
        for pool, blocks in zip(self.host_pools, self._host_freed, strict=True):
            pool.free(blocks)
            blocks.clear()
        return copies

    def take_emptied(self) -> tuple[list[int], ...]:
        """Per cache group the blocks whose content was given up since the last call; some may be in use again."""
        emptied, self._emptied = tuple(self._emptied), [[] for _ in self._emptied]
        return emptied

    def usage(self) -> KVUsage:
        """Token slots by what they hold; only the tail of a block table can be unfilled."""
        size = self.block_size
        unfilled = self.num_table_entries * size - self._num_computed - self._num_unfilled_twice
        in_use = cached = free = 0
        for weight, pool in zip(self._weights, self.pools, strict=True):
            in_use += weight * pool.num_in_use
            cached += weight * pool.num_cached
            free += weight * pool.num_free
        unfilled *= sum(self._weights)
        return KVUsage(in_use * size - unfilled, unfilled, cached * size, free * size)

    def check_integrity(self, holders: Sequence[CacheUser], waiting: Sequence[CacheUser]) -> None:
        """Raise AssertionError unless every block, of the device and of the host, is in one class and counted right."""
        for group, pool in enumerate(self.pools):
            pool.check(request.block_tables[group].block_ids for request in holders)
        for request in holders:
            length = len(request.block_tables[0])
            assert all(len(table) == length for table in request.block_tables), "block tables differ in length"
            assert length * self.block_size >= request.num_computed_tokens, "computed tokens without a block"
            for group, table in enumerate(request.block_tables):
                assert not any(table.block_ids[: table.num_dropped]), "a block that left the window is held"
                assert all(table.block_ids[table.num_dropped :]), "a block is missing"
                assert table.num_dropped <= self._num_unseen(group, request.num_computed_tokens), "a seen block is gone"
        swapped = [request for request in waiting if request.host_blocks]
        for group, pool in enumerate(self.host_pools):
            held = [block for request in swapped for block in request.host_blocks[group]]
            pool.check(held + self._host_freed[group])
        assert self.num_table_entries == sum(len(r.block_tables[0]) for r in holders), "table entries are miscounted"
        assert self._num_computed == sum(r.num_computed_tokens for r in holders), "computed tokens are miscounted"

    def _make_pool(self, group: int, cache: PrefixCache) -> BlockPool:
        def on_evict(block_ids: list[int]) -> None:
            self.num_evicted += len(block_ids)
            self._emptied[group] += block_ids
            for block in block_ids if self.record is not None else ():
                self.record("evict", group=group, block=block)

        return BlockPool(self.spec.num_blocks, cache, on_evict)

    def _match(self, request: CacheUser) -> Match:
        versions = [cache.version for cache in self.caches]
        match = request.match
        if match is None or match.versions != versions:
            limit = (len(request.token_ids) - 1) // self.block_size
            found = longest_match(self.caches, self._windows, self.block_size, request, limit)
            match = request.match = Match(versions, *found)
        return match

    def _num_unseen(self, group: int, computed: int) -> int:
        """Leading blocks that no query from position `computed` on sees."""
        window = self._windows[group]
        return 0 if window is None else first_seen_block(window, computed, self.block_size)

    def _peak(self, group: int, start: int, total: int) -> int:
        """Most blocks that a request holds at a time on the way from `start` computed tokens to `total`."""
        blocks = self._blocks_for(total) - self._num_unseen(group, start)
        if self._windows[group] is None:
            return blocks
        return min(blocks, self._blocks_for(self._windows[group] - 1 + self.max_chunk) + 1)

    def _has_room(self, pool: BlockPool, count: int, unused: int) -> bool:
        """Whether `count` blocks can be had beside `unused` cached ones, with the watermark kept if others run."""
        watermark = self._num_watermark_blocks if pool.num_in_use else 0
        return count + watermark <= pool.num_available - unused

    def has_room_after(self, leaving: Sequence[CacheUser], request: CacheUser) -> bool:
        """Whether a request without blocks could be admitted if these, which have blocks, gave theirs up."""
        for group, pool in enumerate(self.pools):
            blocks = {b for user in leaving for b in user.block_tables[group].block_ids if b}
            freed = sum(pool.ref_count(b) == 1 for b in blocks)
            if self._peak(group, 0, len(request.token_ids)) > pool.num_available + freed:
                return False
        return True

    def _drop_unseen(self, request: CacheUser) -> None:
        """Give up the blocks that the request's next query does not see any more."""
        for group in self._windowed:
            table = request.block_tables[group]
            unseen = self._num_unseen(group, request.num_computed_tokens)
            if unseen > table.num_dropped:
                gone = table.block_ids[table.num_dropped : unseen]
                self._emptied[group] += self.pools[group].free(gone)
                table.block_ids[table.num_dropped : unseen] = [0] * len(gone)
                table.num_dropped = unseen

    def _own(self, request: CacheUser, tables: tuple[BlockTable, ...], computed: int) -> None:
        request.block_tables = tables
        request.num_computed_tokens = computed
        request.num_writable_tokens = len(tables[0]) * self.block_size
        request.match = None
        self.num_table_entries += len(tables[0])
        self._num_computed += computed

    def _give_up_blocks(self, request: CacheUser) -> None:
        size, computed = self.block_size, request.num_computed_tokens
        tables = request.block_tables
        length, tail = len(tables[0]), computed // size
        if tail < length and self.pools[0].ref_count(tables[0].block_ids[tail]) > 1:
            self._num_unfilled_twice -= length * size - computed
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            for block in table.block_ids if self._copies[group] else ():
                self._copies[group].pop(block, None)
            self._emptied[group] += pool.free(table.block_ids[table.num_dropped :])
        self.num_table_entries -= length
        self._num_computed -= computed
        request.block_tables = ()
        request.num_writable_tokens = 0

    def _record_allocation(self, request: CacheUser, first: int = 0, cached: int = 0) -> None:
        """From number `first` on the request's blocks are new to it; the first `cached` tokens are in them."""
        if self.record is not None:
            blocks = [table.block_ids[first:] for table in request.block_tables]
            self.record("allocate", request=request, first=first, cached=cached, blocks=blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
