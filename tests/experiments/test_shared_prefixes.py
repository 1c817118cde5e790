"""Workloads that begin alike: the structure of their prompts, and what a prefix cache finds in them."""

import itertools
from collections import Counter

import pytest
from host_executor import VOCAB_SIZE, host_engine
from prefix_reuse import reuse_one_by_one

from paged_jax.config import parse
from paged_jax.experiments.lengths import Lengths
from paged_jax.experiments.prefix_tree import TreeWorkload
from paged_jax.experiments.shared_prefixes import FewShotWorkload, SharedPrefixWorkload
from paged_jax.experiments.workloads import longest_request, make_workload

OUTPUT = Lengths(mean=6, sigma=0.5, max=12)
SEVEN = Lengths(value=7, law="constant")
SHARED = SharedPrefixWorkload(
    kind="shared_prefix",
    num_requests=40,
    num_prefixes=3,
    prefix_len=16,
    suffix=Lengths(law="uniform", min=2, max=9),
    output=OUTPUT,
)
FEW_SHOT = FewShotWorkload(
    kind="few_shot",
    num_requests=60,
    num_tasks=2,
    max_shots=4,
    min_shots=1,
    example=SEVEN,
    question=SEVEN,
    output=OUTPUT,
)
TREE = TreeWorkload(kind="tree", num_trees=2, depth=3, branching=3, root=SEVEN, node=SEVEN, output=OUTPUT)


def prompts(spec, seed=0, vocab_size=50_000):
    return [a.prompt_token_ids for a in make_workload(spec, seed, None, vocab_size)]


def test_each_request_has_a_shared_prefix_and_a_suffix_of_its_own():
    drawn = prompts(SHARED)
    assert len({p[:16] for p in drawn}) == 3
    assert len({p[16:18] for p in drawn}) == 40
    assert {len(p) - 16 for p in drawn} == set(range(2, 10))


def test_few_shot_prompts_are_the_first_examples_of_a_task():
    drawn = prompts(FEW_SHOT)
    shots = Counter((len(p) - 7) // 7 for p in drawn)
    assert set(shots) == {1, 2, 3, 4}
    for k in range(1, 5):
        # of the requests with at least k examples: one beginning for each task, and no more
        assert len({p[: 7 * k] for p in drawn if len(p) >= 7 * (k + 1)}) == 2
    assert len({p[-7:] for p in drawn}) == 60
    examples = {p[7 * i : 7 * i + 7] for p in drawn for i in range((len(p) - 7) // 7)}
    assert len(examples) == 2 * 4


def test_tasks_and_numbers_of_examples_are_equally_likely():
    spec = FEW_SHOT.model_copy(update={"num_requests": 6000, "min_shots": 0, "max_shots": 2})
    drawn = prompts(spec)
    shots = Counter((len(p) - 7) // 7 for p in drawn)
    assert {k: n / 6000 for k, n in shots.items()} == pytest.approx(dict.fromkeys((0, 1, 2), 1 / 3), abs=0.03)
    tasks = Counter(p[:7] for p in drawn if len(p) > 7)
    assert [n / tasks.total() for n in tasks.values()] == pytest.approx([0.5, 0.5], abs=0.03)


def test_examples_of_a_task_have_lengths_of_their_own():
    spec = FEW_SHOT.model_copy(
        update={"num_tasks": 1, "min_shots": 4, "example": Lengths(law="uniform", min=1, max=50), "num_requests": 5}
    )
    drawn = prompts(spec)
    assert len({len(p) for p in drawn}) == 1  # all have the same four examples, and a question of seven
    assert len({p[:-7] for p in drawn}) == 1
    assert len({len(prompts(spec, seed)[0]) for seed in range(8)}) > 4
    lengths = sorted({len(p) for p in prompts(spec.model_copy(update={"min_shots": 0, "num_requests": 99}))})
    assert len({long - short for short, long in itertools.pairwise(lengths)}) > 1


@pytest.mark.parametrize(("depth", "branching", "trees"), [(3, 3, 2), (1, 5, 1), (4, 1, 3), (5, 2, 1)])
def test_a_tree_has_branching_to_the_power_of_depth_prefixes(depth, branching, trees):
    drawn = prompts(TREE.model_copy(update={"depth": depth, "branching": branching, "num_trees": trees}))
    assert len(drawn) == trees * branching**depth
    assert {len(p) for p in drawn} == {7 * (depth + 1)}
    for level in range(depth + 1):
        times = Counter(p[: 7 * (level + 1)] for p in drawn)
        assert len(times) == trees * branching**level
        assert set(times.values()) == {branching ** (depth - level)}


def test_nodes_have_lengths_of_their_own_and_leaves_an_order_drawn_by_the_seed():
    spec = TREE.model_copy(
        update={"num_trees": 1, "depth": 2, "branching": 4, "node": Lengths(law="uniform", min=1, max=60)}
    )
    drawn = prompts(spec)
    assert len({p[:7] for p in drawn}) == 1
    assert len({len(p) for p in drawn}) > 8
    # neighbours in the tree are not neighbours in time: in depth-first order 12 of the 15 pairs share their first node
    shared = sum(p[7] == q[7] for p, q in itertools.pairwise(drawn))
    assert shared < 8


@pytest.mark.parametrize("spec", [SHARED, FEW_SHOT, TREE], ids=lambda s: s.kind)
def test_the_longest_request_is_as_long_as_it_says(spec):
    requests = make_workload(spec.model_copy(update={"output": Lengths(value=9, law="constant")}), 0, None, 100)
    longest = max(len(a.prompt_token_ids) + a.params.max_tokens for a in requests)
    assert longest == longest_request(spec.model_copy(update={"output": Lengths(value=9, law="constant")}))


@pytest.mark.parametrize("salts", [False, True], ids=["shared", "salted"])
@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
@pytest.mark.parametrize("block_size", [1, 4, 5])
@pytest.mark.parametrize("spec", [SHARED, FEW_SHOT, TREE], ids=lambda s: s.kind)
def test_the_prefix_cache_finds_all_that_is_shared(spec, block_size, prefix_cache, salts):
    one_client = {"num_clients": 1, "think_time_s": 1.0, "users": 2, "cache_salts": salts}
    arrivals = make_workload(spec.model_copy(update=one_client), 1, None, VOCAB_SIZE)
    engine = host_engine(num_blocks=3000, seconds_per_step=0.1, block_size=block_size, prefix_cache=prefix_cache)
    reuse = reuse_one_by_one(engine, arrivals)
    assert reuse.measured == reuse.expected
    tokens = sum(len(a.prompt_token_ids) for a in arrivals)
    assert sum(reuse.measured.values()) > 0.3 * tokens


def test_without_a_cache_nothing_is_found():
    arrivals = make_workload(TREE.model_copy(update={"num_clients": 1}), 1, None, VOCAB_SIZE)
    reuse = reuse_one_by_one(host_engine(num_blocks=3000, seconds_per_step=0.1, prefix_cache="none"), arrivals)
    assert set(reuse.measured.values()) == {0}
    assert sum(reuse.expected.values()) > 0


@pytest.mark.parametrize(
    ("spec", "changes", "sentence"),
    [
        (FEW_SHOT, {"min_shots": 5}, r"min_shots \(5\) is more than max_shots \(4\): lower it"),
        (FEW_SHOT, {"min_shots": -1}, "min_shots: input should be greater than or equal to 0"),
        (TREE, {"depth": 13}, r"num_trees \(2\) of depth 13 and branching 3 have more than 1000000 leaves"),
        (TREE, {"depth": 10**6}, "num_trees .* have more than 1000000 leaves"),
        (TREE, {"depth": 0}, "depth: input should be greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused(spec, changes, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        parse(type(spec), {**spec.model_dump(), **changes})
