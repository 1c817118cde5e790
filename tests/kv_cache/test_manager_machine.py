"""The manager under random plans, against a device whose every slot is watched."""

from itertools import cycle
from typing import Any

import hypothesis.strategies as st
from cache_users import FULL, User, lacking, make, parts, windowed
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from watched_pages import WatchedPages

from paged_jax.kv_cache.prefix_cache import PrefixCache
from paged_jax.kv_cache.prefix_cache.hash import HashPrefixCache
from paged_jax.kv_cache.prefix_cache.none import NoPrefixCache
from paged_jax.kv_cache.prefix_cache.radix import RadixPrefixCache
from paged_jax.kv_cache.swap import SwappedBlocks

GROUPS = {
    "full": [FULL],
    "windowed": [windowed(3)],
    "hybrid": [windowed(5, 10), windowed(1, 4), FULL],
    "twice": [FULL, FULL],
}


class ManagerMachine(RuleBasedStateMachine):
    """Plans are made rule by rule and run by `step`, as the scheduler makes them and the executor runs them."""

    @initialize(
        name=st.sampled_from(sorted(GROUPS)),
        caching=st.sampled_from([HashPrefixCache, HashPrefixCache, RadixPrefixCache, NoPrefixCache]),
        spec=st.fixed_dictionaries(
            {
                "block_size": st.sampled_from([1, 2, 3, 3, 4]),
                "num_blocks": st.integers(5, 16),
                "num_swap_blocks": st.sampled_from([4, 12]),
                "watermark": st.sampled_from([0.0, 0.2]),
                "max_step_tokens": st.sampled_from([3, 100]),
            }
        ),
        arrivals=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 20), st.integers(1, 9)), min_size=3, max_size=8),
    )
    def build(
        self,
        name: str,
        caching: type[PrefixCache],
        spec: dict[str, Any],
        arrivals: list[tuple[int, int, int]],
    ) -> None:
        groups = GROUPS[name]
        if not caching.supports_windows and any(group.sliding_window for group in groups):
            caching = HashPrefixCache
        self.manager = make(groups=groups, prefix_cache=caching, max_request_len=60, **spec)
        self.windows = [group.sliding_window or 10**9 for group in groups]
        self.weights = [group.num_layers for group in groups]  # nothing divides them all
        self.devices = [WatchedPages(self.manager, group) for group in range(len(self.windows))]
        self.holders: list[User] = []
        self.waiting: list[User] = []
        self.swapped: list[User] = []
        self.num_tokens = 0
        self.arrivals = cycle(arrivals)
        self.begin_plan()
        self.updating = False
        self.arrive()

    def begin_plan(self) -> None:
        self.scheduled: dict[User, int] = {}
        self.arrived: set[User] = set()  # in this plan
        self.swap_outs: list[SwappedBlocks] = []
        self.swap_ins: list[SwappedBlocks] = []

    def snapshot(self) -> object:
        """Everything that a refusal must not change."""
        manager = self.manager
        return (
            parts(manager),
            manager.num_evicted,
            [[pool.ref_count(b) for b in range(pool.num_blocks + 1)] for pool in manager.pools],
            [pool.num_free for pool in manager.host_pools],
            [dict(copies) for copies in manager._copies],
        )

    def new_token(self) -> int:
        self.num_tokens += 1
        return 1000 + self.num_tokens

    def arrive(self) -> None:
        """Two wait at least. Prompts begin in one of two ways, or as a request that runs."""
        while len(self.waiting) < 2:
            stem, shared, own = next(self.arrivals)
            begin = list(range(100 * stem, 100 * stem + 20))
            if shared % 3 == 0 and self.holders:
                begin = self.holders[0].token_ids
            prompt = [*begin[:shared], *(self.new_token() for _ in range(own))]
            self.waiting.append(User(prompt[: self.manager.max_request_len]))

    @rule(which=st.integers(0, 99), chunk=st.integers(1, 30))
    def admit(self, which: int, chunk: int) -> None:
        self.updating = False
        self.arrive()
        user = self.waiting[which % len(self.waiting)]
        before = self.snapshot()
        cached = self.manager.num_cached_tokens(user)
        assert cached < len(user.token_ids)
        assert self.snapshot() == before
        count = min(chunk, self.manager.max_chunk, len(user.token_ids) - cached)
        if not self.manager.admit(user, count):
            assert self.snapshot() == before
            assert (user.block_tables, user.num_computed_tokens) == ((), 0)
            assert self.holders, "an empty pool refused a request"
            return
        assert user.num_computed_tokens == cached
        self.waiting.remove(user)
        self.holders.append(user)
        self.plan(user, count)
        self.arrived.add(user)
        if self.holders != [user]:
            assert min(p.num_available for p in self.manager.pools) >= int(
                self.manager.spec.watermark * self.manager.spec.num_blocks
            )

    def plan(self, user: User, count: int) -> None:
        self.scheduled[user] = count
        assert user.num_writable_tokens >= user.num_computed_tokens + count

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), chunk=st.integers(1, 30), pauses=st.booleans())
    def extend(self, which: int, chunk: int, pauses: bool) -> None:
        """A request gets room for its next tokens; one that decodes may pause nevertheless."""
        self.updating = False
        user = self.holders[which % len(self.holders)]
        if self.make_room(user, chunk) and not (pauses and lacking(user) == 1):
            self.plan(user, min(chunk, self.manager.max_chunk, lacking(user)))

    @rule(chunk=st.integers(1, 30), admitted=st.integers(0, 2))
    def whole_step(self, chunk: int, admitted: int) -> None:
        """Everybody computes something; some are admitted."""
        self.updating = False
        for user in self.holders:
            if self.make_room(user, chunk):
                self.plan(user, min(chunk, self.manager.max_chunk, lacking(user)))
        for number in range(admitted):
            self.admit(number, chunk)
        self.step()

    def make_room(self, user: User, chunk: int) -> bool:
        count = min(chunk, self.manager.max_chunk, lacking(user))
        if not count or user in self.scheduled:
            return False
        if count == 1 and user.num_computed_tokens < user.num_writable_tokens:
            return True  # the scheduler does not ask
        before, tables = parts(self.manager), [len(table) for table in user.tables]
        copies = [dict(copies) for copies in self.manager._copies]
        if self.manager.extend(user, count):
            return True
        assert parts(self.manager)[1] == before[1]  # blocks out of the window may go
        assert [len(table) for table in user.tables] == tables
        assert copies == [dict(copies) for copies in self.manager._copies]
        assert len(self.holders) > 1, "a request alone has no room"
        return False

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), comes_back=st.booleans())
    def free(self, which: int, comes_back: bool) -> None:
        """Maybe after it had its turn in this plan."""
        user = self.holders[which % len(self.holders)]
        if user not in self.arrived:
            self.scheduled.pop(user, None)
            self.holders.remove(user)
            self.manager.free(user)
            self.waiting += [user] * comes_back

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99))
    def swap_out(self, which: int) -> None:
        self.updating = False
        user = self.holders[which % len(self.holders)]
        if user in self.arrived or not lacking(user) or not user.num_computed_tokens:
            return
        copies = [dict(copies) for copies in self.manager._copies]
        computed = user.num_computed_tokens
        moved = self.manager.swap_out(user)
        if moved is None:
            assert user.block_tables
            assert not user.host_blocks
            assert [dict(copies) for copies in self.manager._copies] == copies
            return
        for window, blocks in zip(self.windows, moved.device_blocks, strict=True):
            size = self.manager.block_size
            assert len(blocks) == len(
                {p // size for p in range(max(0, computed - window + 1), computed)}
                | ({computed // size} if computed % size else set())
            )
        assert user.num_computed_tokens == computed
        self.scheduled.pop(user, None)
        self.holders.remove(user)
        self.swapped.append(user)
        self.swap_outs.append(moved)

    @precondition(lambda self: self.swapped)
    @rule(which=st.integers(0, 99), chunk=st.integers(1, 30))
    def swap_in(self, which: int, chunk: int) -> None:
        self.updating = False
        user = self.swapped[which % len(self.swapped)]
        count = min(chunk, self.manager.max_chunk, lacking(user))
        before, host_blocks = self.snapshot(), user.host_blocks
        moved = self.manager.swap_in(user, count)
        if moved is None:
            assert self.snapshot() == before
            assert (user.host_blocks, user.block_tables) == (host_blocks, ())
            assert self.holders, "an empty pool refused a request"
            return
        self.swapped.remove(user)
        self.holders.append(user)
        self.swap_ins.append(moved)
        self.plan(user, count)
        self.arrived.add(user)

    @precondition(lambda self: self.swapped)
    @rule(which=st.integers(0, 99))
    def discard(self, which: int) -> None:
        user = self.swapped[which % len(self.swapped)]
        self.manager.discard_swapped(user)
        self.swapped.remove(user)
        self.waiting.append(user)

    @precondition(lambda self: sum(pool.num_cached for pool in self.manager.pools) > 2)
    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        for pool, cache in zip(self.manager.pools, self.manager.caches, strict=True):
            assert (pool.num_cached, len(cache)) == (0, 0)

    @precondition(lambda self: self.updating and self.holders)
    @rule(which=st.integers(0, 99), count=st.integers(1, 2), fate=st.sampled_from(["", "extended", "freed", "swapped"]))
    def fork(self, which: int, count: int, fate: str) -> None:
        """After a step, as samples and beams are. The last child may have to give way when its copy is planned."""
        parent = self.holders[which % len(self.holders)]
        for _ in range(count):
            child = User([*parent.token_ids[: parent.num_computed_tokens], self.new_token()])
            before = [pool.num_available for pool in self.manager.pools]
            assert self.manager.fork(parent, child)
            assert [pool.num_available for pool in self.manager.pools] == before
            self.holders.append(child)
        last = len(self.holders) - 1
        if fate:
            self.extend(last, 1, pauses=False)
        if fate == "freed":
            self.free(last, comes_back=True)
        elif fate == "swapped":
            self.swap_out(last)

    @precondition(lambda self: self.scheduled)
    @rule()
    def step(self) -> None:
        """Run the plan in the device's order, book it, and append a token to those who lack none."""
        moves = zip(self.devices, self.manager.take_copies(), self.manager.take_emptied(), strict=True)
        for device, copies, emptied in moves:
            device.move(self.swap_outs, copies, emptied, self.swap_ins)
            device.compute(self.scheduled)
        for user, count in self.scheduled.items():
            user.num_computed_tokens += count
            if user.num_computed_tokens >= user.next_publish:
                self.manager.publish(user)
        self.manager.advance(sum(self.scheduled.values()))
        for user in self.scheduled:
            if not lacking(user):
                if len(user.token_ids) < self.manager.max_request_len:
                    user.token_ids.append(self.new_token())
                else:
                    self.holders.remove(user)
                    self.manager.free(user)
        self.begin_plan()
        self.updating = True
        for device in self.devices:
            for user in self.holders:
                device.check(user)

    @invariant()
    def accounting_holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, size = self.manager, self.manager.block_size
        manager.check_integrity(self.holders, [*self.waiting, *self.swapped])
        tokens = in_use = cached = 0
        for group, weight in enumerate(self.weights):
            filled = self.devices[group].filled(self.holders)
            used = {b for user in self.holders for b in user.block_tables[group].block_ids if b}
            assert manager._copies[group].keys() <= used, "a copy is planned into a block that nobody holds"
            tokens += weight * len(filled)
            in_use += weight * len(used) * size
            known = {b for b in range(1, manager.spec.num_blocks + 1) if b in manager.caches[group]}
            cached += weight * len(known - used) * size
        total = sum(self.weights) * manager.spec.num_blocks * size
        assert parts(manager) == (tokens, in_use - tokens, cached, total - in_use - cached)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.step()
        for user in self.holders:
            self.manager.free(user)
        for user in self.swapped:
            self.manager.discard_swapped(user)
        self.manager.check_integrity([], [])
        assert parts(self.manager)[:2] == (0, 0)
        assert not any(self.manager.take_copies())


ManagerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestManagerMachine = ManagerMachine.TestCase
