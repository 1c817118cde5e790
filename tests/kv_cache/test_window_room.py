"""Room for windows: how long requests and their chunks may be, and what admission asks for."""

import pytest
from cache_users import FULL, User, book, compute, grow, lacking, make, step, windowed

from paged_jax.kv_cache.group import CacheGroup


@pytest.mark.parametrize("size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 16, 33])
@pytest.mark.parametrize("num_blocks", [2, 3, 5, 12, 40])
def test_a_windowed_request_of_any_length_runs_in_a_pool_of_its_own(window: int, size: int, num_blocks: int) -> None:
    """Wherever in a block a chunk begins, its blocks and the window's fit; prompts run through to their end."""
    manager = make(num_blocks, size, groups=[windowed(window)])
    chunk = manager.max_chunk
    if (num_blocks - 1) * size < window:
        return  # test_a_window_wider_than_the_pool
    assert manager.max_request_len == 10_000
    for first in range(1, min(chunk, size) + 1):
        user = User(list(range(first + 5 * chunk + 3)))
        assert manager.admit(user, first)
        book(manager, user, first)
        while lacking(user):
            assert step(manager, user, min(chunk, lacking(user)))
        for token in range(2 * size):
            assert grow(manager, user, token)
        manager.check_integrity([user], [])
        manager.free(user)


@pytest.mark.parametrize(
    ("num_blocks", "window", "steps", "chunk"),
    [(4, 5, 99, 8), (3, 5, 99, 4), (3, 1, 99, 8), (4, 5, 6, 6), (5, 13, 99, 4), (5, 12, 99, 5)],
)
def test_max_chunk_by_hand(num_blocks: int, window: int, steps: int, chunk: int) -> None:
    """One block may be wasted by where the window begins; of the others the window's older keys take theirs."""
    assert make(num_blocks, groups=[windowed(window)], max_step_tokens=steps).max_chunk == chunk


def test_the_narrowest_room_counts() -> None:
    assert make(5, groups=[windowed(13), windowed(5)]).max_chunk == 4
    assert make(5, groups=[FULL, windowed(5)]).max_chunk == 12
    assert make(5, groups=[FULL]).max_chunk == 10_000


def test_layers_that_see_all_bound_the_length_of_a_request() -> None:
    assert make(8, groups=[windowed(5)]).max_request_len == 10_000
    assert make(8, groups=[windowed(5), windowed(7)], max_request_len=64).max_request_len == 64
    assert make(8, groups=[windowed(5), FULL]).max_request_len == 32
    assert make(8, groups=[FULL]).max_request_len == 32
    assert make(8, groups=[FULL], max_request_len=31).max_request_len == 31


@pytest.mark.parametrize("groups", [[windowed(20)], [windowed(16), FULL], [FULL, windowed(4096)], [windowed(100)] * 2])
def test_a_window_wider_than_the_pool_is_as_good_as_none(groups: list[CacheGroup]) -> None:
    """No block is ever given up, so that requests are as long as the pool and chunks as long as they like."""
    manager = make(4, groups=groups)
    assert manager.max_request_len == 16
    assert manager.max_chunk >= 16
    user = User(list(range(16)))
    assert compute(manager, user)
    assert [len(table) for table in user.tables] == [4] * len(groups)
    manager.check_integrity([user], [])


def test_admission_asks_for_the_most_blocks_that_the_request_will_hold() -> None:
    manager = make(8, groups=[windowed(5)], max_step_tokens=8)
    other = User(list(range(50, 66)))
    compute(manager, other)
    long = User(list(range(1000)))
    # window and chunk are 12 tokens that lie in 4 blocks
    assert manager.admit(long, 8)
    manager.free(long)
    assert grow(manager, other, *range(66, 70))
    assert manager.pools[0].num_available == 6  # the other has given up three and taken one
    for token in range(8):
        assert grow(manager, other, token)
    held = [User([100 + i]) for i in range(3)]
    for user in held:
        assert compute(manager, user)
    assert manager.pools[0].num_available == 3
    assert not manager.admit(long, 1)
    manager.free(held[0])
    assert manager.admit(long, 1)
