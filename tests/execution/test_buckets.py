from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.config import EngineConfig
from paged_jax.execution.buckets import Bucket, make_buckets, pick_bucket

limits = st.integers(1, 64).flatmap(lambda seqs: st.tuples(st.just(seqs), st.integers(seqs, 4096)))


@given(limits)
def test_default_buckets_end_at_the_budget(limit):
    """G18: nothing is padded beyond what the engine was told to compute at most."""
    seqs, budget = limit
    buckets = make_buckets(EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=budget))
    sizes = [bucket.num_tokens for bucket in buckets]
    assert sizes == sorted(set(sizes))
    assert buckets[-1] == Bucket(budget, seqs)
    assert seqs in sizes
    assert all(bucket.num_seqs == min(bucket.num_tokens, seqs) for bucket in buckets)
    assert all(later <= 4 * earlier for earlier, later in pairwise(sizes))


@given(st.sets(st.integers(1, 300), min_size=1), st.data())
def test_the_smallest_bucket_that_holds_a_step_is_picked(sizes, data):
    buckets = tuple(Bucket(size, min(size, 3)) for size in sorted(sizes))
    num_tokens = data.draw(st.integers(1, max(sizes)))
    picked = pick_bucket(buckets, num_tokens)
    assert picked.num_tokens == min(size for size in sizes if size >= num_tokens)


@given(st.sets(st.integers(1, 300), min_size=1), st.integers(1, 8), st.data())
def test_rows_that_sample_count_as_well(sizes, seqs, data):
    """Forks may be more than the tokens that are computed."""
    buckets = tuple(Bucket(size, min(size, seqs)) for size in sorted({*sizes, seqs}))
    num_tokens, num_rows = data.draw(st.integers(1, buckets[-1].num_tokens)), data.draw(st.integers(0, seqs))
    picked = pick_bucket(buckets, num_tokens, num_rows)
    held = [b for b in buckets if b.num_tokens >= num_tokens and b.num_seqs >= num_rows]
    assert picked == min(held, key=lambda bucket: bucket.num_tokens)


@pytest.mark.parametrize("seqs", [3, 8])
@pytest.mark.parametrize("budget", [8, 317, 2000, 2048])
def test_every_step_within_the_limits_has_a_bucket(budget, seqs):
    """G18, with its numbers: any count of tokens, and as many sequences as it can have, fit the bucket."""
    buckets = make_buckets(EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=budget))
    for num_tokens in range(1, budget + 1):
        picked = pick_bucket(buckets, num_tokens)
        assert num_tokens <= picked.num_tokens <= budget
        assert picked.num_seqs >= min(num_tokens, seqs)


def test_own_buckets_are_taken_as_given():
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=20, token_buckets=(2, 20))
    assert make_buckets(config) == (Bucket(2, 2), Bucket(20, 4))
