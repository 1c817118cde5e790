"""Contiguous KV memory under any order of events: with a device that runs the plans, nobody's tokens are lost."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reserving_users import WINDOWED, User, make, states

from paged_jax.kv_cache.group import CacheGroup
from paged_jax.kv_cache.reservation import Reservation, ReserveMax, ReserveOracle, ReservePow2
from paged_jax.kv_cache.swap import SwappedBlocks


class Device:
    """Pages and host memory of one cache group as lists of tokens; None is what a poisoned block holds."""

    def __init__(self, num_blocks: int, num_swap_blocks: int, block_size: int) -> None:
        self.pages = {block: [None] * block_size for block in range(1, num_blocks + 1)}
        self.host = {block: [None] * block_size for block in range(num_swap_blocks)}


class ReservationMachine(RuleBasedStateMachine):
    """Updates and schedules in any order, with a device that runs the plan: every computed token can be read back."""

    @initialize(
        kind=st.sampled_from([ReserveMax, ReservePow2, ReserveOracle]),
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(4, 40),
        num_swap_blocks=st.integers(0, 12),
        groups=st.sampled_from([WINDOWED[:1], WINDOWED]),
    )
    def start(
        self,
        kind: type[Reservation],
        block_size: int,
        num_blocks: int,
        num_swap_blocks: int,
        groups: tuple[CacheGroup, ...],
    ) -> None:
        self.manager = make(
            kind, num_blocks, block_size, max_request_len=20, groups=groups, num_swap_blocks=num_swap_blocks
        )
        self.devices = [Device(num_blocks, num_swap_blocks, block_size) for _ in groups]
        self.holders: list[User] = []
        self.swapped: list[User] = []
        self.waiting: list[User] = []
        self.new_tokens = 100
        self.updating = True
        self.begin_plan()

    def begin_plan(self) -> None:
        self.swap_outs: list[SwappedBlocks] = []
        self.swap_ins: list[SwappedBlocks] = []
        self.scheduled: dict[User, int] = {}

    def schedule(self) -> None:
        """From here to the step, requests are planned, and no forks are made."""
        self.updating = False

    def next_token(self) -> int:
        self.new_tokens += 1
        return self.new_tokens

    def pick(self, users: list[User], which: int) -> User:
        return users[which % len(users)]

    @rule(prompt=st.integers(1, 8), output=st.integers(1, 8))
    def arrive(self, prompt: int, output: int) -> None:
        if prompt >= self.manager.max_request_len:
            return
        user = User([self.next_token() for _ in range(prompt)], output, request_id=str(self.new_tokens))
        user.max_total_tokens = self.manager.reserved_len(user)
        self.waiting.append(user)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99), chunk=st.integers(1, 8))
    def admit(self, which: int, chunk: int) -> None:
        self.schedule()
        user = self.pick(self.waiting, which)
        count = min(chunk, len(user.token_ids))
        if self.manager.admit(user, count):
            self.waiting.remove(user)
            self.holders.append(user)
            self.scheduled[user] = count
        else:
            self.refused(user)

    def refused(self, user: User) -> None:
        wanted = -(-self.manager.reserved_len(user) // self.manager.block_size)
        assert not all(pool.has_run(wanted) for pool in self.manager.pools)
        assert self.holders, "an empty pool refused a request"
        assert states(self.manager)[3] == 0

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), chunk=st.integers(1, 4))
    def extend(self, which: int, chunk: int) -> None:
        self.schedule()
        user = self.pick(self.holders, which)
        count = min(chunk, len(user.token_ids) - user.num_computed_tokens)
        if count and user not in self.scheduled:
            assert self.manager.extend(user, count)
            self.scheduled[user] = count

    @precondition(lambda self: self.swapped)
    @rule(which=st.integers(0, 99))
    def swap_in(self, which: int) -> None:
        self.schedule()
        user = self.pick(self.swapped, which)
        moved = self.manager.swap_in(user, 1)
        if moved is None:
            self.refused(user)
        else:
            self.swapped.remove(user)
            self.holders.append(user)
            self.swap_ins.append(moved)
            self.scheduled[user] = min(1, len(user.token_ids) - user.num_computed_tokens)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99))
    def swap_out(self, which: int) -> None:
        self.schedule()
        user = self.pick(self.holders, which)
        if user in self.scheduled or not user.num_computed_tokens:
            return
        moved = self.manager.swap_out(user)
        if moved is not None:
            self.holders.remove(user)
            self.swapped.append(user)
            self.swap_outs.append(moved)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99))
    def free(self, which: int) -> None:
        user = self.pick(self.holders, which)
        if user not in self.scheduled:
            self.holders.remove(user)
            self.manager.free(user)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99))
    def preempt(self, which: int) -> None:
        user = self.pick(self.holders, which)
        if user not in self.scheduled:
            self.holders.remove(user)
            self.manager.free(user)
            self.waiting.append(user)

    @precondition(lambda self: self.swapped)
    @rule(which=st.integers(0, 99))
    def discard(self, which: int) -> None:
        user = self.pick(self.swapped, which)
        self.manager.discard_swapped(user)
        self.swapped.remove(user)

    @precondition(lambda self: self.updating and self.holders)
    @rule(which=st.integers(0, 99), count=st.integers(1, 3), ends=st.booleans())
    def fork(self, which: int, count: int, ends: bool) -> None:
        parent = self.pick(self.holders, which)
        for _ in range(count):
            child = User(
                [*parent.token_ids],
                parent.expected_output_len,
                parent.max_total_tokens,
                num_prompt_tokens=parent.num_prompt_tokens,
            )
            if not self.manager.fork(parent, child):
                self.waiting.append(child)
                continue
            assert child.num_computed_tokens == parent.num_computed_tokens
            self.holders.append(child)
        if ends:
            self.holders.remove(parent)
            self.manager.free(parent)

    @rule()
    def step(self) -> None:
        copies, emptied = self.manager.take_copies(), self.manager.take_emptied()
        for group, device in enumerate(self.devices):
            pages, host = device.pages, device.host
            for moved in self.swap_outs:
                for block, target in zip(moved.device_blocks[group], moved.host_blocks[group], strict=True):
                    host[target] = list(pages[block])
            assert len({target for _, target in copies[group]}) == len(copies[group])
            contents = [list(pages[source]) for source, _ in copies[group]]
            for (_, target), content in zip(copies[group], contents, strict=True):
                pages[target] = content
            for block in set(emptied[group]) - {target for _, target in copies[group]}:
                pages[block] = [None] * len(pages[block])
            for moved in self.swap_ins:
                for block, source in zip(moved.device_blocks[group], moved.host_blocks[group], strict=True):
                    pages[block] = list(host[source])
            size = self.manager.block_size
            for user, count in self.scheduled.items():
                for position in range(user.num_computed_tokens, user.num_computed_tokens + count):
                    block = user.block_tables[group].block_ids[position // size]
                    pages[block][position % size] = user.token_ids[position]
        for user, count in self.scheduled.items():
            user.num_computed_tokens += count
            self.manager.advance(count)
            if user.num_computed_tokens >= user.next_publish:
                self.manager.publish(user)
            if user.num_computed_tokens == len(user.token_ids) < user.max_total_tokens:
                user.token_ids.append(self.next_token())
        self.begin_plan()
        self.updating = True
        for user in self.holders:
            self.read_back(user)

    def read_back(self, user: User) -> None:
        size = self.manager.block_size
        for group, device in enumerate(self.devices):
            blocks = user.block_tables[group].block_ids
            stored = [device.pages[blocks[p // size]][p % size] for p in range(user.num_computed_tokens)]
            assert stored == user.token_ids[: user.num_computed_tokens]

    @invariant()
    def accounting_holds(self) -> None:
        self.manager.check_integrity(self.holders, [*self.waiting, *self.swapped])
        states(self.manager)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.step()
        for user in self.holders:
            self.manager.free(user)
        for user in self.swapped:
            self.manager.discard_swapped(user)
        self.manager.check_integrity([], [])
        assert states(self.manager)[:3] == (0, 0, 0)


ReservationMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestReservationMachine = ReservationMachine.TestCase
