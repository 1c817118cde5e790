"""The array of policies covers every pair that the config takes, and leaves out only those that it refuses."""

from itertools import combinations

import pytest
from host_executor import host_engine
from policy_grid import DIMENSIONS, cache_groups, covering_array, engine_fields, refusal

from paged_jax.config import POLICIES, EngineConfig

ROWS = covering_array()
NAMES = list(DIMENSIONS)


def _pairs() -> set[tuple[str, object, str, object]]:
    return {(first, row[first], second, row[second]) for row in ROWS for first, second in combinations(NAMES, 2)}


def test_every_pair_is_in_a_row_or_refused() -> None:
    covered = _pairs()
    missing = [
        (first, a, second, b)
        for first, second in combinations(NAMES, 2)
        for a in DIMENSIONS[first]
        for b in DIMENSIONS[second]
        if (first, a, second, b) not in covered
    ]
    for first, a, second, b in missing:
        assert refusal({first: a, second: b}) is not None, f"{first} {a!r} with {second} {b!r} is in no row"
        assert a is not None and b is not None, "a field that is unset is no reason to refuse"  # noqa: PT018
    assert len(missing) < 50


@pytest.mark.parametrize(
    "pair",
    [
        {"allocator": "reserve_max", "prefix_cache": "hash"},
        {"prefix_cache": "radix", "windows": "windowed"},
        {"batching": "static", "scheduling_policy": "srpt"},
        {"preemption_mode": "recompute", "num_swap_blocks": 3},
    ],
)
def test_pairs_that_cannot_work_are_left_out(pair: dict[str, object]) -> None:
    assert refusal(pair) is not None
    assert not any(pair.items() <= row.items() for row in ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_the_config_and_the_engine_take_every_row(row: dict[str, object]) -> None:
    assert list(row) == NAMES
    engine = host_engine(num_blocks=64, max_model_len=32, groups=cache_groups(row), **engine_fields(row))
    for name, value in row.items():
        if name != "windows" and value is not None:
            assert getattr(engine.config, name) == value


def test_no_policy_is_forgotten() -> None:
    for field, known in POLICIES.items():
        assert {value for value in DIMENSIONS[field] if value is not None} == known.keys() - {"belady"}
    assert set(NAMES) - {"windows"} <= EngineConfig.model_fields.keys()


def test_the_array_is_small_and_always_the_same() -> None:
    assert len(ROWS) <= 85
    assert covering_array.__wrapped__() == ROWS
