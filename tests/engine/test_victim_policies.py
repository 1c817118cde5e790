"""Who gives up blocks, and whether they move or are computed again: by hand and against plain sorting."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from policy_context import FakeEngine

from paged_jax.engine.policies import load_policy
from paged_jax.engine.request import Request
from paged_jax.kv_cache.block_table import BlockTable

VICTIMS = ["last_arrived", "longest_remaining", "most_blocks", "fewest_tokens_lost", "lowest_priority"]


def choose(policy: str, running: Sequence[Request]) -> Request:
    victim: Request = load_policy("victim_policy", policy)(FakeEngine().context).choose(running)
    return victim


def swaps(mode: str, request: Request, **config: Any) -> bool:
    answer: bool = load_policy("preemption_mode", mode)(FakeEngine(preemption_mode=mode, **config).context).swaps(
        request
    )
    return answer


def holding(request: Request, *tables: list[int]) -> Request:
    request.block_tables = tuple(BlockTable(ids) for ids in tables)
    return request


def test_each_victim_policy_finds_its_own() -> None:
    """Five requests, each the victim of one policy and of no other."""
    engine = FakeEngine()
    long, wide, new, unimportant, last = (
        engine.request(90),
        engine.request(10),
        engine.request(10),
        engine.request(10, priority=3),
        engine.request(10),
    )
    for request in (long, wide, unimportant, last):
        request.num_computed_tokens = 20
        holding(request, [1, 2])
    new.num_computed_tokens = 5
    holding(wide, [1, 2, 3])
    running = [new, last, wide, long, unimportant]
    assert {policy: choose(policy, running) for policy in VICTIMS} == {
        "last_arrived": last,
        "longest_remaining": long,
        "most_blocks": wide,
        "fewest_tokens_lost": new,
        "lowest_priority": unimportant,
    }


@pytest.mark.parametrize("policy", VICTIMS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_of_equals_the_last_to_arrive_gives_way(policy: str, order: tuple[int, ...]) -> None:
    engine = FakeEngine()
    requests = [holding(engine.request(), [4]) for _ in range(3)]
    assert choose(policy, [requests[i] for i in order]) is requests[2]


def test_longest_remaining_counts_what_is_generated() -> None:
    engine = FakeEngine()
    nearly_done, halfway = engine.request(100), engine.request(50)
    nearly_done.token_ids += [0] * 60
    assert choose("longest_remaining", [nearly_done, halfway]) is halfway  # 40 < 50
    halfway.token_ids += [0] * 11
    assert choose("longest_remaining", [nearly_done, halfway]) is nearly_done  # 40 > 39
    nearly_done.token_ids += [0] * 60
    outlived = engine.request(1)
    outlived.token_ids += [0] * 30
    assert choose("longest_remaining", [outlived, nearly_done]) is outlived, "one token each: the later one"


def test_most_blocks_counts_all_groups_and_only_blocks_that_are_held() -> None:
    engine = FakeEngine()
    windowed = holding(engine.request(), [1, 2, 3], [0, 0, 0, 4])
    full = holding(engine.request(), [5, 6, 7], [8, 9])
    assert choose("most_blocks", [windowed, full]) is full  # 4 < 5, though it has longer tables
    holding(windowed, [1, 2, 3], [0, 4, 10, 11])
    assert choose("most_blocks", [windowed, full]) is windowed  # 6 > 5


@given(
    running=st.lists(
        st.tuples(
            st.integers(1, 4),  # output
            st.integers(0, 4),  # generated
            st.integers(0, 3),  # computed
            st.integers(-1, 1),  # priority
            st.lists(st.integers(0, 2), max_size=4),  # blocks
        ),
        min_size=1,
        max_size=8,
    ),
    data=st.data(),
)
def test_victims_agree_with_sorting(running: list[tuple[int, int, int, int, list[int]]], data: st.DataObject) -> None:
    engine = FakeEngine()
    requests = []
    for output_len, generated, computed, priority, blocks in running:
        request = holding(engine.request(output_len, priority=priority), blocks)
        request.token_ids += [0] * generated
        request.num_computed_tokens = computed
        requests.append(request)
    shuffled = data.draw(st.permutations(requests))
    keys: dict[str, list[int]] = {
        "last_arrived": [0] * len(running),
        "longest_remaining": [max(1, output - generated) for output, generated, *_ in running],
        "most_blocks": [sum(1 for block in blocks if block != 0) for *_, blocks in running],
        "fewest_tokens_lost": [-computed for _, _, computed, _, _ in running],
        "lowest_priority": [priority for _, _, _, priority, _ in running],
    }
    for policy, key in keys.items():
        last = max(i for i in range(len(running)) if key[i] == max(key))
        assert choose(policy, shuffled) is requests[last], policy


@pytest.mark.parametrize(("mode", "expected"), [("recompute", False), ("swap", True)])
def test_the_plain_modes_do_not_look(mode: str, expected: bool) -> None:
    engine = FakeEngine()
    empty, large = engine.request(), holding(engine.request(), [1, 2, 3])
    large.num_computed_tokens = 48
    assert [swaps(mode, empty), swaps(mode, large)] == [expected, expected]


@pytest.mark.parametrize(
    ("config", "num_blocks", "computed", "expected"),
    [
        ({}, 3, 13, True),  # 12 < 13
        ({}, 3, 12, False),  # equal costs recompute
        ({}, 0, 0, False),  # nothing to keep
        ({"swap_block_cost": 16.0}, 3, 48, False),
        ({"swap_block_cost": 15.9}, 3, 48, True),
        ({"swap_block_cost": 0.0}, 3, 1, True),  # moving is free: not the default in disguise
    ],
)
def test_auto_compares_moving_with_computing(
    config: dict[str, float], num_blocks: int, computed: int, expected: bool
) -> None:
    request = holding(FakeEngine().request(), [0, 0, *range(1, num_blocks + 1)])
    request.num_computed_tokens = computed
    assert swaps("auto", request, **config) is expected


def test_auto_adds_up_the_groups() -> None:
    request = holding(FakeEngine().request(), [1, 2], [3, 4])
    request.num_computed_tokens = 16
    assert not swaps("auto", request)  # 4 blocks * 4 = 16
    request.num_computed_tokens = 17
    assert swaps("auto", request)
