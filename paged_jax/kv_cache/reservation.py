"""Orca's contiguous KV memory: room for all of a request's tokens is reserved when it is admitted (Kwon et al., SOSP
2023, section 6.1, who describe and measure three such systems)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.buddy import BuddyPool
from paged_jax.kv_cache.manager import CacheSpec, CacheUser, KVCacheManager
from paged_jax.kv_cache.prefix_cache import PrefixCache
from paged_jax.kv_cache.swap import SwappedBlocks
from paged_jax.kv_cache.usage import KVUsage


class ReservingUser(CacheUser, Protocol):
    """What a reservation depends on."""

    max_total_tokens: int
    """Prompt and output together may not grow beyond this."""
    expected_output_len: int | None
    """The true output length, where a workload knows it."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        ...


class Reservation(KVCacheManager, ABC):
    """Gives a request one run of blocks for its whole life, and nothing to share.

    A block table is the whole run that the buddy allocator gave, in ascending order: a power of two of blocks, of which
    the request needs those of its `reserved_len`. Orca keeps slots of single tokens: that is a block size of 1. Every
    cache group has its own run, and keeps what has left its sliding window. (The last output token's keys and values
    are never stored, so a request of L tokens fills at most L - 1 of the L slots that it counts.)
    """

    pools: list[BuddyPool]

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self._ends: dict[ReservingUser, int] = {}
        """Of each request with block tables: tokens that it may come to, as far as is known, within its run."""
        self._refused = False
        """Whether the last to ask for admission found no run, and none has come back since."""

    @abstractmethod
    def reserved_len(self, request: ReservingUser) -> int:
        """Tokens that the request may come to have in all: it must end there, since a run never grows.

        Raises ValueError where that depends on the output's length and the request does not say it.
        """

    @property
    def max_request_len(self) -> int:
        """Tokens of the longest request that a run of the empty pools can hold."""
        return min(self.spec.max_request_len, self.pools[0].longest_run * self.block_size)

    @property
    def max_chunk(self) -> int:
        """Most tokens of one request in one step: all its blocks are there."""
        return self.spec.max_step_tokens

    def num_cached_tokens(self, request: CacheUser) -> int:
        """Return 0: everything is computed."""
        return 0

    def admit(self, request: ReservingUser, num_new_tokens: int) -> bool:
        """Give a request without blocks its run, however few tokens come first; False if none is long enough."""
        admitted = self._has_run(request) and super().admit(request, self._run_tokens(request))
        self._refused = not admitted
        return admitted

    def extend(self, request: CacheUser, num_new_tokens: int) -> bool:
        """Return True: the run is there. RuntimeError beyond its end, since no preemption could make room."""
        if request.num_computed_tokens + num_new_tokens > request.num_writable_tokens:
            raise RuntimeError(
                f"request {request.request_id!r} has outgrown the {request.num_writable_tokens} slots reserved for it: "
                "it must end at its reserved_len"
            )
        return True

    def publish(self, request: CacheUser) -> None:
        """Offer nothing, and ask not to be called again for this admission."""
        request.next_publish = request.num_writable_tokens + 1

    def fork(self, parent: ReservingUser, child: ReservingUser) -> bool:
        """Give a request without blocks a run of its own and copies of the blocks that hold its parent's tokens.

        False, and nothing taken, if no run is long enough. The copies are made before the next step writes anything,
        all sources read first: the parent may be freed and its blocks given away before that, even to another copy. A
        parent that is itself a copy not yet made is copied from its source; one that was swapped in must have run.
        """
        if not self._has_run(child):
            return False
        count = self._blocks_for(parent.num_computed_tokens)
        tables = tuple(BlockTable(pool.allocate(self._num_wanted(child))) for pool in self.pools)
        for copies, source, target in zip(self._copies, parent.block_tables, tables, strict=True):
            filled = source.block_ids[:count]
            copies.update(zip(target.block_ids, [copies.get(block, block) for block in filled], strict=False))
        self._own(child, tables, parent.num_computed_tokens)
        self.publish(child)
        self._record_allocation(child)
        return True

    def swap_in(self, request: ReservingUser, num_new_tokens: int) -> SwappedBlocks | None:
        """Give a swapped-out request its whole run, or nothing and return None."""
        swap = None
        if self._has_run(request):
            swap = super().swap_in(request, self._run_tokens(request) - request.num_computed_tokens)
        self._refused = swap is None
        return swap

    def usage(self) -> KVUsage:
        """Token slots by what they hold. Free ones count as external fragmentation while the last request that asked
        for admission was refused, as Kwon et al. count those of a saturated system."""
        size, weight = self.block_size, sum(self._weights)
        in_use = sum(w * pool.num_in_use for w, pool in zip(self._weights, self.pools, strict=True)) * size
        free = weight * self.spec.num_blocks * size - in_use
        tokens = weight * self._num_computed
        reserved = weight * sum(max(0, end - request.num_computed_tokens) for request, end in self._ends.items())
        return KVUsage(
            token_states=tokens,
            internal_fragmentation=in_use - tokens - reserved,
            cached=0,
            free=0 if self._refused else free,
            reserved=reserved,
            external_fragmentation=free if self._refused else 0,
        )

    def check_integrity(self, holders: Sequence[CacheUser], waiting: Sequence[CacheUser]) -> None:
        """Raise AssertionError unless runs tile the pools, each has one owner, and everything is counted right."""
        super().check_integrity(holders, waiting)
        assert set(self._ends) == set(holders), "an end is kept for a request without blocks, or missing"
        for group, copies in enumerate(self._copies):
            held = {block for request in holders for block in request.block_tables[group].block_ids}
            assert copies.keys() <= held, "a copy is planned into a block that nobody holds"

    def _make_pool(self, group: int, cache: PrefixCache) -> BuddyPool:
        return BuddyPool(self.spec.num_blocks)

    def _num_wanted(self, request: ReservingUser) -> int:
        return self._blocks_for(self.reserved_len(request))

    def _has_run(self, request: ReservingUser) -> bool:
        count = self._num_wanted(request)
        return all(pool.has_run(count) for pool in self.pools)

    def _run_tokens(self, request: ReservingUser) -> int:
        """Slots of the run that the request gets."""
        return BuddyPool.run_length(self._num_wanted(request)) * self.block_size

    def _drop_unseen(self, request: CacheUser) -> None:
        """Nothing: a run stays whole until its request leaves."""

    def _own(self, request: ReservingUser, tables: tuple[BlockTable, ...], computed: int) -> None:
        super()._own(request, tables, computed)
        end = request.max_total_tokens
        if request.expected_output_len is not None:
            end = min(end, request.num_prompt_tokens + request.expected_output_len)
        self._ends[request] = min(end, request.num_writable_tokens)

    def _give_up_blocks(self, request: CacheUser) -> None:
        super()._give_up_blocks(request)
        del self._ends[request]
        self._refused = False


class ReserveMax(Reservation):
    """Reserves the longest request that is served, whatever comes: Orca (Max)."""

    def reserved_len(self, request: ReservingUser) -> int:
        """`max_request_len`."""
        return self.max_request_len


class ReservePow2(Reservation):
    """Reserves the prompt and the next power of two of the true output, so less than twice as much: Orca (Pow2)."""

    def reserved_len(self, request: ReservingUser) -> int:
        """Prompt and the next power of two of the expected output, at most `max_request_len`."""
        output = BuddyPool.run_length(_expected_output_len(request))
        return min(request.num_prompt_tokens + output, self.max_request_len)


class ReserveOracle(Reservation):
    """Reserves the prompt and the true output: Orca (Oracle)."""

    def reserved_len(self, request: ReservingUser) -> int:
        """Prompt and expected output, at most `max_request_len`."""
        return min(request.num_prompt_tokens + _expected_output_len(request), self.max_request_len)


def _expected_output_len(request: ReservingUser) -> int:
    if request.expected_output_len is None:
        raise ValueError(
            "this allocator reserves by the output's true length: give the request an expected_output_len, or set "
            "allocator to 'reserve_max' or 'paged'"
        )
    return request.expected_output_len
