"""Contiguous KV memory: what is reserved, what is wasted, what is copied and swapped."""

import csv
from pathlib import Path

import pytest
from reserving_users import WINDOWED, User, admit, compute, make, states

from paged_jax.kv_cache.reservation import Reservation, ReserveMax, ReserveOracle, ReservePow2
from paged_jax.kv_cache.swap import SwappedBlocks


# a prompt of 5 and an output of 6; blocks of 4; 16 blocks are 64 slots
@pytest.mark.parametrize(
    ("kind", "reserved_len", "num_blocks", "expected"),
    [
        (ReserveMax, 24, 8, (5, 6, 21, 32, 0)),  # 24 tokens: 6 blocks, so a run of 8
        (ReservePow2, 5 + 8, 4, (5, 6, 5, 48, 0)),  # 13 tokens: 4 blocks
        (ReserveOracle, 5 + 6, 4, (5, 6, 5, 48, 0)),  # 11 tokens: 3 blocks, so a run of 4
    ],
)
def test_what_is_reserved(
    kind: type[Reservation], reserved_len: int, num_blocks: int, expected: tuple[int, ...]
) -> None:
    manager = make(kind, 16, max_request_len=24)
    user = User(list(range(5)), expected_output_len=6)
    assert manager.reserved_len(user) == reserved_len
    assert admit(manager, user)
    assert user.blocks == list(range(1, num_blocks + 1))
    assert (user.num_writable_tokens, manager.num_table_entries) == (4 * num_blocks, num_blocks)
    assert states(manager) == expected
    for token in range(5):  # the sixth is never stored
        user.token_ids.append(token)
        compute(manager, user)
    assert states(manager) == (10, 1, *expected[2:])
    manager.check_integrity([user], [])
    manager.free(user)
    assert states(manager) == (0, 0, 0, 64, 0)
    manager.check_integrity([], [])


def test_an_unknown_output_may_fill_the_run() -> None:
    manager = make(ReserveMax, 16, max_request_len=24)
    user, short = User(list(range(5))), User(list(range(3)), max_total_tokens=10)
    assert admit(manager, user)
    assert states(manager) == (5, 32 - 5, 0, 32, 0)
    assert admit(manager, short)
    assert states(manager) == (8, 32 - 5 + 10 - 3, 22, 0, 0)


def test_a_known_output_ends_where_the_request_must() -> None:
    manager = make(ReserveMax, 16, max_request_len=24)
    user = User(list(range(5)), expected_output_len=9, max_total_tokens=11)
    assert admit(manager, user)
    assert states(manager) == (5, 6, 21, 32, 0)


def test_an_output_longer_than_was_expected_has_nothing_reserved_and_ends_with_its_run() -> None:
    manager = make(ReserveOracle, 16)
    user = User(list(range(5)), expected_output_len=2)
    assert admit(manager, user)
    assert states(manager) == (5, 2, 1, 56, 0)
    user.token_ids += [0, 0, 0]
    compute(manager, user)
    assert states(manager) == (8, 0, 0, 56, 0)
    user.token_ids.append(0)
    with pytest.raises(RuntimeError, match="request 'it' has outgrown the 8 slots reserved for it"):
        manager.extend(user, 1)
    manager.check_integrity([user], [])


@pytest.mark.parametrize(
    ("prompt", "output", "pow2", "oracle"),
    [(3, 1, 4, 4), (3, 8, 11, 11), (3, 9, 19, 12), (20, 9, 32, 29), (30, 1, 31, 31)],
)
def test_reservations_end_with_the_longest_request(prompt: int, output: int, pow2: int, oracle: int) -> None:
    user = User([0] * prompt, expected_output_len=output)
    assert make(ReservePow2, 16).reserved_len(user) == pow2
    assert make(ReserveOracle, 16).reserved_len(user) == oracle
    assert make(ReserveMax, 16).reserved_len(user) == 32


def test_the_longest_request_fits_the_longest_run() -> None:
    assert make(ReserveMax, 7, max_request_len=100).max_request_len == 16  # 7 blocks: runs of 4, 2 and 1
    assert make(ReserveMax, 7, max_request_len=9).max_request_len == 9
    manager = make(ReserveMax, 7, groups=WINDOWED[1:])
    assert (manager.max_request_len, manager.max_chunk) == (16, 64)  # a window gives nothing up
    assert manager.admit(User([0] * 16), 1)


@pytest.mark.parametrize("kind", [ReservePow2, ReserveOracle])
def test_who_reserves_by_the_output_must_be_told_it(kind: type[Reservation]) -> None:
    with pytest.raises(ValueError, match="give the request an expected_output_len"):
        make(kind, 16).reserved_len(User([0] * 5))


def test_a_preempted_request_gets_the_same_reservation_again() -> None:
    manager = make(ReservePow2, 16)
    user = User([0] * 5, expected_output_len=6)
    assert admit(manager, user)
    user.token_ids += [0] * 4
    compute(manager, user)
    manager.free(user)
    assert user.num_computed_tokens == 0
    assert admit(manager, user)
    assert len(user.blocks) == 4
    assert states(manager) == (9, 2, 5, 48, 0)


def test_free_slots_are_fragmentation_while_somebody_was_refused() -> None:
    manager = make(ReserveOracle, 8)
    users = [User([0] * 2, expected_output_len=6) for _ in range(4)]
    assert all(admit(manager, user) for user in users)
    manager.free(users[1])
    manager.free(users[2])
    assert states(manager) == (4, 12, 0, 16, 0)
    longer = User([0] * 2, expected_output_len=7)  # three blocks: a run of four, and there are two of two
    assert not admit(manager, longer)
    assert (longer.block_tables, longer.num_computed_tokens) == ((), 0)
    assert states(manager) == (4, 12, 0, 0, 16)
    assert admit(manager, users[1])  # one who is content with less
    assert states(manager) == (6, 18, 0, 8, 0)
    assert not admit(manager, longer)
    assert states(manager) == (6, 18, 0, 0, 8)
    manager.free(users[1])
    assert states(manager) == (4, 12, 0, 16, 0)
    manager.free(users[0])
    assert admit(manager, longer)
    manager.check_integrity([users[3], longer], [])


def test_every_cache_group_reserves_and_counts_by_its_layers() -> None:
    manager = make(ReserveOracle, 8, groups=WINDOWED)  # weights 1 and 2
    user = User([0] * 9, expected_output_len=2)
    assert admit(manager, user)
    assert [table.block_ids for table in user.block_tables] == [[1, 2, 3, 4]] * 2
    assert states(manager) == (27, 6, 15, 48, 0)
    user.token_ids.append(0)
    compute(manager, user)  # the window has left two blocks behind: they stay
    assert [table.num_dropped for table in user.block_tables] == [0, 0]
    assert states(manager) == (30, 3, 15, 48, 0)
    manager.check_integrity([user], [])


def test_a_fork_copies_the_blocks_that_hold_tokens() -> None:
    manager = make(ReserveOracle, 8)
    parent, child = User([0] * 5, expected_output_len=8), User([0] * 5, expected_output_len=8)
    assert admit(manager, parent)
    assert manager.fork(parent, child)
    assert child.blocks == [5, 6, 7, 8]
    assert child.num_computed_tokens == 5
    assert states(manager) == (10, 16, 6, 0, 0)
    other = User([0] * 5, expected_output_len=8)
    assert not manager.fork(parent, other)
    assert other.block_tables == ()
    manager.check_integrity([parent, child], [other])
    assert manager.take_copies() == ([(1, 5), (2, 6)],)
    assert manager.take_copies() == ([],)


def test_a_parent_may_go_before_its_copy_is_made() -> None:
    manager = make(ReserveOracle, 8)
    parent, child, grandchild = (User([0] * 5, expected_output_len=8) for _ in range(3))
    assert admit(manager, parent)
    assert manager.fork(parent, child)
    manager.free(parent)
    assert manager.fork(child, grandchild)  # into the parent's blocks, whose content it wants
    assert manager.take_copies() == ([(1, 5), (2, 6), (1, 1), (2, 2)],)
    assert manager.take_emptied() == ([1, 2, 3, 4],)


def test_swapping_out_a_copy_that_was_not_made_reads_its_source() -> None:
    manager = make(ReserveOracle, 8, num_swap_blocks=2)
    parent, child = User([0] * 5, expected_output_len=8), User([0] * 5, expected_output_len=8)
    assert admit(manager, parent)
    assert manager.fork(parent, child)
    assert manager.swap_out(child) == SwappedBlocks(((1, 2),), ((0, 1),))
    assert manager.take_copies() == ([],)
    manager.check_integrity([parent], [child])


def test_nothing_is_ever_due_to_be_published() -> None:
    manager = make(ReserveOracle, 12, num_swap_blocks=2)
    parent, child = User([0] * 5, expected_output_len=8), User([0] * 5, expected_output_len=8)
    assert admit(manager, parent)
    assert manager.fork(parent, child)
    assert parent.next_publish == child.next_publish == 17  # its run has 16 slots
    assert manager.swap_out(parent)
    assert manager.swap_in(parent, 1)
    compute(manager, parent)
    assert parent.next_publish == 17
    assert all(len(cache) == 0 for cache in manager.caches)


def test_a_copy_into_blocks_that_were_given_back_is_not_made() -> None:
    manager = make(ReserveOracle, 8)
    parent, child = User([0] * 5, expected_output_len=8), User([0] * 5, expected_output_len=8)
    assert admit(manager, parent)
    assert manager.fork(parent, child)
    manager.free(child)
    manager.check_integrity([parent], [])
    assert manager.take_copies() == ([],)


def test_swapping_moves_what_holds_tokens_and_takes_the_whole_run_back() -> None:
    manager = make(ReserveOracle, 12, num_swap_blocks=3)
    first, second = User([0] * 5, expected_output_len=8), User([0] * 5, expected_output_len=8)
    for user in (first, second):
        assert admit(manager, user)
    assert (first.blocks, second.blocks) == ([9, 10, 11, 12], [1, 2, 3, 4])
    assert manager.swap_out(first) == SwappedBlocks(((9, 10),), ((0, 1),))
    assert manager.swap_out(second) is None  # the host has one block left
    assert states(manager) == (5, 8, 3, 32, 0)
    manager.check_integrity([second], [first])
    shorts = [User([0] * 5, expected_output_len=1) for _ in range(3)]  # runs of two
    assert all(admit(manager, user) for user in shorts)
    assert [user.blocks for user in shorts] == [[5, 6], [7, 8], [9, 10]]
    assert manager.swap_in(first, 1) is None
    assert states(manager)[3:] == (0, 8)
    manager.free(shorts[1])
    manager.free(shorts[2])
    assert manager.swap_in(first, 1) == SwappedBlocks(((9, 10),), ((0, 1),))
    assert first.blocks == [9, 10, 11, 12]
    assert (first.num_computed_tokens, first.num_writable_tokens, first.host_blocks) == (5, 16, ())
    manager.check_integrity([first, second, shorts[0]], [])
    manager.take_copies()  # the step that reads the host's blocks is planned: they are free
    assert manager.swap_out(second) == SwappedBlocks(((1, 2),), ((0, 1),))
    manager.discard_swapped(second)
    assert second.num_computed_tokens == 0
    manager.check_integrity([first, shorts[0]], [second])


def test_events_name_whole_runs() -> None:
    manager = make(ReserveOracle, 8)
    events: list[tuple[str, dict[str, object]]] = []
    manager.record = lambda name, **fields: events.append((name, fields))
    user, child = User([0] * 5, expected_output_len=5), User([0] * 5, expected_output_len=5, request_id="child")
    assert admit(manager, user)
    assert manager.fork(user, child)
    assert events == [
        ("allocate", {"request": user, "first": 0, "cached": 0, "blocks": [[1, 2, 3, 4]]}),
        ("allocate", {"request": child, "first": 0, "cached": 0, "blocks": [[5, 6, 7, 8]]}),
    ]


@pytest.mark.parametrize(
    ("kind", "share", "batched"), [(ReserveMax, 20.4, 7.0), (ReservePow2, 26.8, 9.81), (ReserveOracle, 38.2, 13.62)]
)
def test_a_saturated_queue_wastes_what_the_paper_says(
    kind: type[Reservation], share: float, batched: float, shared: Path
) -> None:
    """Kwon et al., figures 2 and 13, OPT-13B and ShareGPT: percent of the slots that hold tokens, mean requests."""
    with (shared / "traces/sharegpt/sharegpt_lengths.csv").open() as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    sample = [(p, o) for p, o in rows if p >= 1 and o >= 1 and p + o <= 2048][::56]  # about 1000
    queue = iter([User([0] * p, o, p + o) for p, o in sample])
    num_slots = 15_700
    manager = make(kind, num_slots, 1, max_request_len=2048)
    running: list[User] = []
    waiting = next(queue)
    tokens = requests = steps = ended = 0
    while ended < len(sample) - 50:  # the queue never runs dry
        while manager.admit(waiting, waiting.num_prompt_tokens):
            waiting.num_computed_tokens = waiting.num_prompt_tokens
            manager.advance(waiting.num_prompt_tokens)
            running.append(waiting)
            waiting = next(queue)
        for user in running:
            user.num_computed_tokens += 1
        manager.advance(len(running))
        usage = manager.usage()
        assert usage.free == 0  # somebody waits
        if kind is ReserveMax:
            assert usage.external_fragmentation == num_slots - 7 * 2048
        tokens += usage.token_states
        requests += len(running)
        steps += 1
        for user in [user for user in running if user.num_computed_tokens == user.max_total_tokens]:
            running.remove(user)
            manager.free(user)
            ended += 1
    manager.check_integrity(running, [waiting])
    assert 100 * tokens / steps / num_slots == pytest.approx(share, abs=3)
    assert requests / steps == pytest.approx(batched, abs=1.5)
