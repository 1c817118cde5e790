"""The manager under random plans, against a device whose every slot is watched."""

from collections.abc import Sequence
from itertools import cycle

import hypothesis.strategies as st
from cache_users import FULL, User, lacking, make, parts, windowed
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
NOTHING = None


class Device:
    """Pages of one cache group: what each slot holds, and whose tokens it stands for."""

    def __init__(self, num_blocks: int, num_swap_blocks: int, block_size: int) -> None:
        self.pages: list[list[object]] = [[NOTHING] * block_size for _ in range(num_blocks + 1)]
        self.host: list[list[object]] = [[NOTHING] * block_size for _ in range(num_swap_blocks)]


class ManagerMachine(RuleBasedStateMachine):
    """Plans are made rule by rule and run by `step`, as the scheduler makes them and the executor runs them.

    A slot's content is the whole list of tokens up to its own, since keys and values depend on all of them.
    """

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        caching=st.sampled_from(["hash", "hash", "radix", "none"]),
        size=st.sampled_from([1, 2, 3, 3, 4]),
        num_blocks=st.integers(5, 16),
        num_swap_blocks=st.sampled_from([4, 12]),
        watermark=st.sampled_from([0.0, 0.2]),
        max_step_tokens=st.sampled_from([3, 100]),
        arrivals=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 20), st.integers(1, 9)), min_size=3, max_size=8),
    )
    def build(
        self,
        groups: str,
        caching: str,
        size: int,
        num_blocks: int,
        num_swap_blocks: int,
        watermark: float,
        max_step_tokens: int,
        arrivals: list[tuple[int, int, int]],
    ) -> None:
        sees_all = all(group.sliding_window is None for group in GROUPS[groups])
        kinds = {"hash": HashPrefixCache, "radix": RadixPrefixCache if sees_all else HashPrefixCache}
        self.manager = make(
            num_blocks,
            size,
            GROUPS[groups],
            prefix_cache=kinds.get(caching, NoPrefixCache),
            num_swap_blocks=num_swap_blocks,
            watermark=watermark,
            max_step_tokens=max_step_tokens,
            max_request_len=60,
        )
        self.windows = [group.sliding_window or 10**9 for group in GROUPS[groups]]
        self.weights = [group.num_layers for group in GROUPS[groups]]  # nothing divides them all
        self.devices = [Device(num_blocks, num_swap_blocks, size) for _ in self.windows]
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
        self.arrived: set[User] = set()  # in this plan: nobody preempts them in it
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
    @rule(which=st.integers(0, 99))
    def preempt(self, which: int) -> None:
        """Maybe after it had its turn in this plan."""
        user = self.holders[which % len(self.holders)]
        if user in self.arrived:
            return
        self.scheduled.pop(user, None)
        self.holders.remove(user)
        self.manager.free(user)
        self.waiting.append(user)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        user = self.holders[which % len(self.holders)]
        if user not in self.arrived:
            self.scheduled.pop(user, None)
            self.holders.remove(user)
            self.manager.free(user)

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
    @rule(which=st.integers(0, 99), count=st.integers(1, 2))
    def fork(self, which: int, count: int) -> None:
        """After a step, as samples and beams are: they share all that their parent has computed."""
        parent = self.holders[which % len(self.holders)]
        for _ in range(count):
            tokens = parent.token_ids[: parent.num_computed_tokens]
            child = User([*tokens, self.new_token()])
            before = [pool.num_available for pool in self.manager.pools]
            assert self.manager.fork(parent, child)
            assert [pool.num_available for pool in self.manager.pools] == before
            self.holders.append(child)

    @precondition(lambda self: self.scheduled)
    @rule()
    def step(self) -> None:
        """Run the plan in the device's order, book it, and append a token to those who lack none."""
        size = self.manager.block_size
        copies, emptied = self.manager.take_copies(), self.manager.take_emptied()
        for group, device in enumerate(self.devices):
            pages, host = device.pages, device.host
            for moved in self.swap_outs:
                for block, target in zip(moved.device_blocks[group], moved.host_blocks[group], strict=True):
                    host[target] = list(pages[block])
            targets = {target for _, target in copies[group]}
            assert len(targets) == len(copies[group])
            contents = [list(pages[source]) for source, _ in copies[group]]
            for (_, target), content in zip(copies[group], contents, strict=True):
                pages[target] = content
            for block in set(emptied[group]) - targets:
                pages[block] = [NOTHING] * size
            for moved in self.swap_ins:
                for target, block in zip(moved.device_blocks[group], moved.host_blocks[group], strict=True):
                    pages[target] = list(host[block])
            written = set()
            for user, count in self.scheduled.items():
                table = user.block_tables[group].block_ids
                self.read(user, group)
                for position in range(user.num_computed_tokens, user.num_computed_tokens + count):
                    slot = (table[position // size], position % size)
                    assert slot[0] != 0
                    assert slot not in written, "two requests write to one slot"
                    written.add(slot)
                    pages[slot[0]][slot[1]] = tuple(user.token_ids[: position + 1])
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
        for user in self.holders:
            for group in range(len(self.devices)):
                self.read(user, group)

    def read(self, user: User, group: int) -> None:
        """All that the user's next query sees is there."""
        size, pages = self.manager.block_size, self.devices[group].pages
        table = user.block_tables[group].block_ids
        computed = user.num_computed_tokens
        for position in range(max(0, computed - self.windows[group] + 1), computed):
            block = table[position // size]
            assert block != 0
            assert pages[block][position % size] == tuple(user.token_ids[: position + 1])

    @invariant()
    def accounting_holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, size = self.manager, self.manager.block_size
        manager.check_integrity(self.holders, [*self.waiting, *self.swapped])
        tokens = in_use = cached = 0
        for group, weight in enumerate(self.weights):
            filled = self.filled(self.holders, group)
            used = {b for user in self.holders for b in user.block_tables[group].block_ids if b}
            tokens += weight * len(filled)
            in_use += weight * len(used) * size
            known = {b for b in range(1, manager.spec.num_blocks + 1) if b in manager.caches[group]}
            cached += weight * len(known - used) * size
        total = sum(self.weights) * manager.spec.num_blocks * size
        assert parts(manager) == (tokens, in_use - tokens, cached, total - in_use - cached)

    def filled(self, users: Sequence[User], group: int) -> set[tuple[int, int]]:
        """Slots that hold a token of somebody."""
        size = self.manager.block_size
        return {
            (user.block_tables[group].block_ids[p // size], p % size)
            for user in users
            for p in range(user.num_computed_tokens)
            if user.block_tables[group].block_ids[p // size]
        }

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


ManagerMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
TestManagerMachine = ManagerMachine.TestCase
