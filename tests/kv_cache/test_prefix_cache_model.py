"""The prefix caches against a brute-force model under every eviction policy, and against each other."""

from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from prefix_users import BLOCK_SIZE, User, publish

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.eviction import Eviction
from paged_jax.kv_cache.eviction.belady import BeladyEviction
from paged_jax.kv_cache.eviction.cost import EQUAL_CONTEXT, CostEviction
from paged_jax.kv_cache.eviction.fifo import FIFOEviction
from paged_jax.kv_cache.eviction.lfu import LFUEviction
from paged_jax.kv_cache.eviction.lru import LRUEviction
from paged_jax.kv_cache.prefix_cache import PrefixCache
from paged_jax.kv_cache.prefix_cache.hash import HashPrefixCache, content_keys
from paged_jax.kv_cache.prefix_cache.radix import RadixPrefixCache

CACHES = [HashPrefixCache, RadixPrefixCache]
EVICTIONS = [LRUEviction, LFUEviction, FIFOEviction, CostEviction, BeladyEviction]
MAX_BLOCKS = 6
BASE = [0, 1, 1, 0, 1, 0, 0, 1]


class CacheMachine(RuleBasedStateMachine):
    """Users come, compute, slide and leave; a dict from whole prefixes to blocks knows what the cache should hold."""

    make_cache: type[PrefixCache]
    make_eviction: type[Eviction]
    num_blocks = 12

    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed: int) -> None:
        self.random = Random(seed)
        self.future = [(self.some_tokens(), self.random.choice(["", "", "", "s"])) for _ in range(40)]
        self.eviction = self.make_eviction()
        self.cache = self.make_cache(BLOCK_SIZE, self.eviction)
        if isinstance(self.eviction, BeladyEviction):
            self.eviction.set_future([content_keys(tokens, BLOCK_SIZE, salt) for tokens, salt in self.future])
        self.users: list[User] = []
        self.free = set(range(1, self.num_blocks + 1))
        self.ref_counts = dict.fromkeys(self.free, 0)
        self.contents: dict[tuple[Any, ...], int] = {}  # (salt, all tokens up to the block's end) -> block
        self.time = 0
        self.clock = 0.0
        self.num_cleared = 0
        self.inserted: dict[int, int] = {}
        self.released: dict[int, int] = {}
        self.num_hits: dict[int, int] = {}
        self.priority: dict[int, float] = {}

    def some_tokens(self) -> list[int]:
        """Prompts have their beginnings in common."""
        return BASE[: self.random.randint(0, 8)] + self.random.choices([0, 1], k=self.random.randint(0, 4))

    def some_user(self, which: int) -> User:
        return self.users[which % len(self.users)]

    # what the model says

    @property
    def is_tree(self) -> bool:
        return self.make_cache is RadixPrefixCache

    def prefix(self, holder: User, index: int) -> tuple[Any, ...]:
        return (holder.cache_salt, *holder.token_ids[: (index + 1) * BLOCK_SIZE])

    def longest_run(self, holder: User) -> list[int]:
        run: list[int] = []
        while len(run) < holder.num_whole and self.prefix(holder, len(run)) in self.contents:
            run.append(self.contents[self.prefix(holder, len(run))])
        return run

    def unlocked(self) -> dict[int, tuple[Any, ...]]:
        return {block: prefix for prefix, block in self.contents.items() if not self.ref_counts[block]}

    def extensions(self, prefix: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return [other for other in self.contents if len(other) > len(prefix) and other[: len(prefix)] == prefix]

    def rank(self, block: int, prefix: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.make_eviction is LRUEviction:
            return (self.released[block],)
        if self.make_eviction is LFUEviction:
            return (self.num_hits[block], self.released[block])
        if self.make_eviction is FIFOEviction:
            return (self.inserted[block],)
        if self.make_eviction is CostEviction:
            return (self.priority[block], self.released[block])
        asks = [n for n, (tokens, salt) in enumerate(self.future) if (salt, *tokens)[: len(prefix)] == prefix]
        return (-asks[0] if asks else -inf, -len(prefix), block)

    def evict(self) -> int:
        unlocked = self.unlocked()
        ends = {block: prefix for block, prefix in unlocked.items() if not self.is_tree or not self.extensions(prefix)}
        block = self.cache.evict()
        if ends:
            assert block == min(ends, key=lambda end: self.rank(end, ends[end]))
        else:  # all that is below it is in use, and forgotten
            assert not any(self.ref_counts[self.contents[p]] == 0 for p in self.extensions(unlocked[block]))
            for prefix in self.extensions(unlocked[block]):
                del self.contents[prefix]
        del self.contents[unlocked[block]]
        self.clock = max(self.clock, self.priority[block])
        return block

    def insert(self, holder: User, index: int) -> None:
        block = holder.table.block_ids[index]
        if self.prefix(holder, index) in self.contents:
            return
        self.contents[self.prefix(holder, index)] = block
        self.time += 1
        self.inserted[block] = self.time
        self.num_hits[block] = 0

    # what happens

    @precondition(lambda self: self.future and len(self.users) < 4)
    @rule(limit=st.integers(0, 4), looks_up=st.booleans())
    def start(self, limit: int, looks_up: bool) -> None:
        """Without a look-up the user computes duplicates, as one does that came while another computed the same."""
        tokens, salt = self.future.pop(0)
        new = User(list(tokens), salt)
        found = self.cache.match(new, limit if looks_up else 0)
        assert found == self.longest_run(new)[: limit if looks_up else 0]
        if isinstance(self.eviction, BeladyEviction):
            self.eviction.advance()
        self.cache.hit(found)
        for block in found:
            self.num_hits[block] += 1
            if not self.ref_counts[block]:
                self.cache.lock(block)
            self.ref_counts[block] += 1
        new.table = BlockTable(found, len(found))
        self.users.append(new)

    @precondition(lambda self: self.users)
    @rule(which=st.integers(0, 3), count=st.integers(1, 5))
    def compute(self, which: int, count: int) -> None:
        """Tokens come as they are needed: first those of the prompt, then generated ones."""
        holder = self.some_user(which)
        for _ in range(count):
            if len(holder.table) == MAX_BLOCKS or not (self.free or self.unlocked()):
                return
            while len(holder.table) == holder.num_whole:
                holder.token_ids.append(self.random.randint(0, 1))
            block = min(self.free) if self.free else self.evict()
            self.free.discard(block)
            self.ref_counts[block] = 1
            holder.table.block_ids.append(block)
            first = 0 if self.is_tree else len(holder.table) - 1
            for index in range(first, len(holder.table)):
                self.insert(holder, index)
            index = len(holder.table) - 1
            version, before = self.cache.version, len(self.cache)
            is_found = self.cache.insert(holder, holder.table, index)
            assert is_found == (self.contents[self.prefix(holder, index)] == block)
            assert (self.cache.version != version) == (len(self.cache) != before)
            holder.table.num_published = len(holder.table)

    def give_back(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block]:
            return
        assert (block in self.cache) == (block in self.contents.values())
        if block in self.cache:
            self.time += 1
            self.released[block] = self.time
            prefix = next(prefix for prefix, other in self.contents.items() if other == block)
            self.priority[block] = self.clock + 1 + ((len(prefix) - 1) // BLOCK_SIZE - 1) / EQUAL_CONTEXT
            self.cache.unlock(block)
        else:
            self.free.add(block)

    @precondition(lambda self: self.users and not self.is_tree)
    @rule(which=st.integers(0, 3))
    def slide(self, which: int) -> None:
        """A user's first blocks fall out of its window."""
        holder = self.some_user(which)
        for index, block in enumerate(holder.table.block_ids[:-1]):
            if block:
                holder.table.block_ids[index] = 0
                self.give_back(block)
                return

    @precondition(lambda self: self.users)
    @rule(which=st.integers(0, 3))
    def finish(self, which: int) -> None:
        holder = self.some_user(which)
        self.users.remove(holder)
        for block in reversed(holder.table.block_ids):
            if block:
                self.give_back(block)

    @precondition(lambda self: self.unlocked())
    @rule()
    def give_up(self) -> None:
        self.free.add(self.evict())

    @precondition(lambda self: self.num_cleared == 0 and len(self.future) < 20)
    @rule()
    def clear(self) -> None:
        unlocked = self.cache.clear()
        assert sorted(unlocked) == sorted(self.unlocked())
        self.free.update(unlocked)
        self.contents.clear()
        self.num_cleared += 1

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        assert len(self.cache) == len(self.contents)
        assert {block for block in self.ref_counts if block in self.cache} == set(self.contents.values())
        assert self.cache.num_unlocked == len(self.unlocked())
        in_use = sum(count > 0 for count in self.ref_counts.values())
        assert len(self.free) + len(self.unlocked()) + in_use == self.num_blocks
        stranger = User(self.some_tokens(), self.random.choice(["", "s", "t"]))
        version = self.cache.version
        assert self.cache.match(stranger, 99) == self.longest_run(stranger)
        if not self.is_tree:
            for index in range(stranger.num_whole):
                assert self.cache.find(stranger, index) == self.contents.get(self.prefix(stranger, index))
        assert self.cache.version == version

    def teardown(self) -> None:
        """Whatever is unlocked can be given up in one go."""
        while hasattr(self, "cache") and self.unlocked():
            self.free.add(self.evict())
            self.agrees()


@pytest.mark.parametrize("make_eviction", EVICTIONS)
@pytest.mark.parametrize("make_cache", CACHES)
def test_against_a_model(make_cache: type[PrefixCache], make_eviction: type[Eviction]) -> None:
    machine = type("Machine", (CacheMachine,), {"make_cache": make_cache, "make_eviction": make_eviction})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40))


class RecordingEviction(LRUEviction):
    """Keeps the keys that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Any] = []

    def insert(self, block_id: int, index: int, key: Callable[[], Any]) -> None:
        self.keys.append((index, key()))


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=13), st.sampled_from(["", "s"]), st.booleans()), max_size=10
    )
)
def test_both_caches_find_the_same_and_name_it_the_same(history: Sequence[tuple[list[int], str, bool]]) -> None:
    lengths, keys = [], []
    for make_cache in CACHES:
        eviction = RecordingEviction()
        cache = make_cache(BLOCK_SIZE, eviction)
        fresh = iter(range(1, 1000))
        found = []
        for tokens, salt, looks_up in history:
            holder = User(list(tokens), salt)
            holder.table.block_ids = cache.match(holder, holder.num_whole)
            found.append(len(holder.table))
            if not looks_up:
                holder.table.block_ids = []
            publish(cache, holder, *(next(fresh) for _ in range(holder.num_whole - len(holder.table))))
        lengths.append(found)
        keys.append(eviction.keys)
    assert lengths[0] == lengths[1]
    assert keys[0] == keys[1]
    expected = {(n, key) for tokens, salt, _ in history for n, key in enumerate(content_keys(tokens, BLOCK_SIZE, salt))}
    assert set(keys[0]) == expected
    assert len(keys[0]) == len(expected)
