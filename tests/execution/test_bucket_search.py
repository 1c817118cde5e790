"""The best bucket sets, against trying them all."""

import math
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.config import EngineConfig
from paged_jax.execution.bucket_search import StepHistogram, StepSize, best_buckets, powers_of_two
from paged_jax.execution.buckets import make_buckets, pick_bucket

LIMIT = 12
steps = st.lists(st.builds(StepSize, st.integers(1, LIMIT), st.integers(0, LIMIT)), min_size=1, max_size=12)


def padded_by_the_engine(sizes: list[StepSize], buckets: tuple[int, ...], max_num_seqs: int) -> int:
    """What the engine itself would pad, step for step."""
    made = make_buckets(
        EngineConfig(token_buckets=buckets, max_num_batched_tokens=buckets[-1], max_num_seqs=max_num_seqs)
    )
    return sum(pick_bucket(made, s.num_tokens, s.num_rows).num_tokens - s.num_tokens for s in sizes)


def every_set(max_programs: int) -> list[tuple[int, ...]]:
    return [(*smaller, LIMIT) for k in range(max_programs) for smaller in combinations(range(1, LIMIT), k)]


@given(steps, st.integers(1, 4))
def test_no_other_set_pads_less(sizes, max_programs):
    histogram = StepHistogram.of(sizes, LIMIT)
    found = best_buckets(histogram, max_programs)[-1]
    assert found[-1] == LIMIT
    assert len(found) <= max_programs
    least = min(padded_by_the_engine(sizes, buckets, LIMIT) for buckets in every_set(max_programs))
    assert padded_by_the_engine(sizes, found, LIMIT) == histogram.padded_tokens(found) == least


@given(steps, st.lists(st.integers(0, 9), min_size=LIMIT, max_size=LIMIT), st.integers(1, 3))
def test_no_other_set_costs_less(sizes, rises, max_programs):
    cost = [0, *(sum(rises[: i + 1]) for i in range(LIMIT))].__getitem__
    found = best_buckets(StepHistogram.of(sizes, LIMIT), max_programs, cost)[-1]
    assert spent(sizes, found, cost) == min(spent(sizes, buckets, cost) for buckets in every_set(max_programs))


@given(steps, st.lists(st.integers(0, 9), min_size=LIMIT + 1, max_size=LIMIT + 1), st.integers(1, 3))
def test_no_other_set_of_needed_sizes_costs_less_where_larger_buckets_may_be_cheaper(sizes, costs, max_programs):
    needed = {LIMIT, *map(max, sizes)}
    found = best_buckets(StepHistogram.of(sizes, LIMIT), max_programs, costs.__getitem__)[-1]
    others = [buckets for buckets in every_set(max_programs) if needed.issuperset(buckets)]
    assert found in others
    assert spent(sizes, found, costs.__getitem__) == min(spent(sizes, b, costs.__getitem__) for b in others)


def spent(sizes: list[StepSize], buckets: tuple[int, ...], cost: Callable[[int], float]) -> float:
    return sum(cost(next(b for b in buckets if b >= max(size))) for size in sizes)


@given(steps, st.integers(1, LIMIT))
def test_a_histogram_pads_as_the_engine_does(sizes, max_num_seqs):
    """Also where rows are capped, which they are in the engine: it never runs more than max_num_seqs."""
    sizes = [StepSize(s.num_tokens, min(s.num_rows, max_num_seqs)) for s in sizes]
    histogram = StepHistogram.of(sizes, LIMIT)
    for buckets in [(LIMIT,), (3, LIMIT), powers_of_two(LIMIT), tuple(range(1, LIMIT + 1))]:
        padded = padded_by_the_engine(sizes, buckets, max_num_seqs)
        assert histogram.padded_tokens(buckets) == padded
        computed = sum(s.num_tokens for s in sizes)
        assert histogram.padding_fraction(buckets) == pytest.approx(padded / (padded + computed))
        made = make_buckets(
            EngineConfig(token_buckets=buckets, max_num_batched_tokens=LIMIT, max_num_seqs=max_num_seqs)
        )
        used = {pick_bucket(made, s.num_tokens, s.num_rows) for s in sizes}
        assert histogram.num_programs(buckets) == len(used)


@given(steps)
def test_more_programs_never_pad_more(sizes):
    histogram = StepHistogram.of(sizes, LIMIT)
    sets = best_buckets(histogram, 15)
    assert len(sets) == 15
    padded = [histogram.padded_tokens(buckets) for buckets in sets]
    assert padded == sorted(padded, reverse=True)
    assert [len(buckets) for buckets in sets] == sorted(len(buckets) for buckets in sets)
    rows_alone = sum(max(0, s.num_rows - s.num_tokens) for s in sizes)  # tokens that no bucket can spare
    assert padded[-1] == rows_alone
    assert len(sets[-1]) == len({LIMIT, *map(max, sizes)})


def test_by_hand():
    """Ten steps of 1 token, one of 7, one of 8: the 8 holds the 7 for one token of padding."""
    histogram = StepHistogram.of([StepSize(1, 1)] * 10 + [StepSize(7, 2), StepSize(8, 3)], 16)
    assert best_buckets(histogram, 5) == [(16,), (1, 16), (1, 8, 16), (1, 7, 8, 16), (1, 7, 8, 16)]
    assert [histogram.padded_tokens(b) for b in best_buckets(histogram, 4)] == [167, 17, 1, 0]
    assert histogram.computed_tokens == 25
    assert histogram.num_steps == 12
    assert histogram.padding_fraction((1, 8, 16)) == pytest.approx(1 / 26)
    assert histogram.num_programs((1, 8, 16)) == 2  # nothing needs the 16


def test_a_program_that_gains_nothing_is_not_compiled():
    histogram = StepHistogram.of([StepSize(1, 1), StepSize(7, 2), StepSize(8, 3)], 16)
    assert best_buckets(histogram, 3, lambda size: 1.0) == [(16,)] * 3
    assert best_buckets(histogram, 3, lambda size: max(size, 8)) == [(16,), (8, 16), (8, 16)]


def test_rows_need_a_larger_bucket():
    """Five samples of one prompt begin in a step of one token."""
    histogram = StepHistogram.of([StepSize(1, 1)] * 4 + [StepSize(1, 5)], 8)
    assert best_buckets(histogram, 3)[-1] == (1, 5, 8)
    assert histogram.padded_tokens((1, 5, 8)) == 4


def test_what_cannot_be_answered_is_refused():
    with pytest.raises(ValueError, match="there is no step"):
        StepHistogram.of([], 8)
    with pytest.raises(ValueError, match="a step needs 9 tokens or rows, more than max_num_batched_tokens"):
        StepHistogram.of([StepSize(2, 9)], 8)
    histogram = StepHistogram.of([StepSize(2, 1)], 8)
    with pytest.raises(ValueError, match="a budget of 0 programs"):
        best_buckets(histogram, 0)


@pytest.mark.parametrize(("limit", "sizes"), [(1, (1,)), (8, (1, 2, 4, 8)), (10, (1, 2, 4, 8, 10))])
def test_powers_of_two(limit, sizes):
    assert powers_of_two(limit) == sizes


def test_many_sizes_are_searched_quickly():
    """2,000 distinct sizes, 32 programs: a second would be too long."""
    histogram = StepHistogram.of([StepSize(i, 1) for i in range(1, 2001)], 2048)
    found = best_buckets(histogram, 32)[-1]
    assert len(found) == 32
    # equal counts of equally spaced sizes: groups of about 2000 / 32 sizes, each padded by half of that on average
    assert histogram.padded_tokens(found) / 2000 == pytest.approx(2000 / 31 / 2, rel=0.05)
    assert math.isclose(histogram.total(found), histogram.computed_tokens + histogram.padded_tokens(found))
