import hashlib
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from paged_jax.config import parse
from paged_jax.experiments.lengths import Lengths
from paged_jax.experiments.shared_prefixes import SharedPrefixWorkload
from paged_jax.experiments.workloads import (
    PromptsWorkload,
    SyntheticWorkload,
    check_fits,
    longest_request,
    make_workload,
    shipped_prompts,
)

LENGTHS = Lengths(mean=20, sigma=0.7, min=3, max=50)
LOGNORMAL = SyntheticWorkload(kind="lognormal", num_requests=40, prompt=LENGTHS, output=LENGTHS)
SHARED = SharedPrefixWorkload(
    kind="shared_prefix", num_requests=40, num_prefixes=3, prefix_len=16, suffix=LENGTHS, output=LENGTHS
)


class WordTokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]


@pytest.mark.parametrize("spec", [LOGNORMAL, SHARED], ids=lambda s: s.kind)
def test_a_seed_always_gives_the_same_requests_within_the_limits(spec):
    first, again, other = (make_workload(spec, seed, None, 100) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len(first) == 40
    assert len({a.request_id for a in first}) == 40
    assert all(0 <= t < 100 for a in first for t in a.prompt_token_ids)
    assert all(3 <= a.params.max_tokens <= 50 and a.params.ignore_eos and a.params.is_greedy for a in first)
    assert len({a.params.max_tokens for a in first}) > 5
    assert {a.time for a in first} == {0.0}
    check_fits(first, longest_request(spec), longest_request(spec))


def test_shared_prefixes_are_shared():
    prefixes = {a.prompt_token_ids[:16] for a in make_workload(SHARED, 0, None, 1000)}
    assert len(prefixes) == 3


def test_lognormal_mean_and_spread():
    lengths = Lengths(mean=100, sigma=0.5, max=100_000).draw(20_000, np.random.default_rng(0))
    assert np.mean(lengths) == pytest.approx(100, rel=0.02)
    assert np.std(np.log(lengths)) == pytest.approx(0.5, rel=0.02)
    assert set(Lengths(mean=7, sigma=0, max=9).draw(5, np.random.default_rng(0))) == {7}


def test_poisson_arrivals_move_the_same_requests_in_time():
    together = make_workload(LOGNORMAL, 0, None, 100)
    spec = LOGNORMAL.model_copy(update={"num_requests": 2000, "request_rate": 4.0})
    spread = make_workload(LOGNORMAL.model_copy(update={"request_rate": 4.0}), 0, None, 100)
    assert [a.prompt_token_ids for a in spread] == [a.prompt_token_ids for a in together]
    times = [a.time for a in make_workload(spec, 0, None, 100)]
    assert times[0] == 0
    assert np.mean(np.diff(times)) == pytest.approx(0.25, rel=0.1)
    assert np.std(np.diff(times)) == pytest.approx(0.25, rel=0.1)


def test_prompts_come_from_the_package_in_an_order_of_the_seed():
    spec = PromptsWorkload(kind="prompts", num_requests=10, output=LENGTHS)
    first, again, other = (make_workload(spec, seed, WordTokenizer(), 100) for seed in (0, 0, 1))
    assert first == again
    assert {a.prompt_token_ids for a in first} != {a.prompt_token_ids for a in other}
    everything = make_workload(PromptsWorkload(kind="prompts", output=LENGTHS), 0, WordTokenizer(), 100)
    assert len(everything) == len(shipped_prompts())
    with pytest.raises(ValueError, match="'prompts' needs a model with a tokenizer"):
        make_workload(spec, 0, None, 100)


def test_shipped_prompts_vary_in_length_and_some_share_a_long_beginning():
    prompts = shipped_prompts()
    assert len(prompts) >= 36
    assert len(set(prompts)) == len(prompts)
    words = [len(p.split()) for p in prompts]
    assert min(words) <= 5
    assert 130 <= max(words) <= 200
    assert sum(p.startswith("You are the help desk") for p in prompts) == 7


def test_a_request_that_is_too_long_for_the_model_or_the_pool_is_named():
    arrivals = make_workload(LOGNORMAL, 0, None, 100)
    with pytest.raises(ValueError, match=r"more than max_model_len \(30\): lower workload.output.max"):
        check_fits(arrivals, 30, 100)
    with pytest.raises(ValueError, match=r"more than the whole KV pool holds \(30\).*engine.kv_cache_memory"):
        check_fits(arrivals, 100, 30)


@pytest.mark.parametrize(
    ("spec", "fingerprint"),
    [(LOGNORMAL.model_copy(update={"request_rate": 2.0}), "c90155ad9d46cf89"), (SHARED, "57796e073f547c24")],
    ids=["lognormal", "shared_prefix"],
)
def test_workloads_are_the_same_for_ever(spec, fingerprint):
    """Results of years ago can be had again: the fingerprints were taken before the first change of this file."""
    arrivals = make_workload(spec, 5, None, 1000)
    drawn = [(a.time, a.request_id, a.prompt_token_ids, a.params.max_tokens) for a in arrivals]
    assert hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:16] == fingerprint
    assert all((a.params.n, a.params.seed, a.params.is_greedy) == (1, None, True) for a in arrivals)
    assert all((a.user, a.priority, a.cache_salt) == ("", 0, "") for a in arrivals)


FIELDS = {
    "n": (3, lambda a: (a.params.n, a.params.temperature, a.params.seed)),
    "users": (5, lambda a: a.user),
    "priorities": (4, lambda a: a.priority),
    "cache_salts": (True, lambda a: a.cache_salt),
    "request_rate": (2.0, lambda a: a.time),
}
"""A value of each field that has a stream of its own, and what it decides."""


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("spec", [LOGNORMAL, SHARED], ids=lambda s: s.kind)
def test_a_field_changes_only_what_it_decides(spec, field):
    others = {name: value for name, (value, _) in FIELDS.items() if name != field}
    others["cache_salts"] = field not in ("users", "cache_salts")  # salts are users
    without = make_workload(spec.model_copy(update=others), 3, None, 100)
    with_it = make_workload(spec.model_copy(update={**others, field: FIELDS[field][0]}), 3, None, 100)
    changed = {
        n for n, (_, decided) in FIELDS.items() if [decided(a) for a in with_it] != [decided(a) for a in without]
    }
    assert changed == {field}
    for a, b in zip(with_it, without, strict=True):
        assert (a.request_id, a.prompt_token_ids, a.params.max_tokens, a.expected_output_len) == (
            b.request_id, b.prompt_token_ids, b.params.max_tokens, b.expected_output_len
        )  # fmt: skip


@pytest.mark.parametrize("spec", [LOGNORMAL, SHARED], ids=lambda s: s.kind)
def test_the_true_output_length_is_told(spec):
    assert all(a.expected_output_len == a.params.max_tokens for a in make_workload(spec, 0, None, 100))


def test_samples_are_drawn_with_a_seed_for_each_request():
    first, more = (make_workload(LOGNORMAL.model_copy(update={"n": n}), 0, None, 100) for n in (2, 8))
    assert all((a.params.n, a.params.temperature) == (2, 1.0) for a in first)
    assert len({a.params.seed for a in first}) == 40
    assert [a.params.seed for a in more] == [a.params.seed for a in first]


def test_shares_of_users_follow_zipf_and_levels_of_priority_are_equally_likely():
    spec = LOGNORMAL.model_copy(update={"num_requests": 12_000, "users": 3, "priorities": 3, "cache_salts": True})
    arrivals = make_workload(spec, 0, None, 100)
    users = Counter(a.user for a in arrivals)
    # 1 : 1/2 : 1/3
    shares = {"0": 6 / 11, "1": 3 / 11, "2": 2 / 11}
    assert {user: count / 12_000 for user, count in users.items()} == pytest.approx(shares, abs=0.02)
    levels = Counter(a.priority for a in arrivals)
    assert {level: count / 12_000 for level, count in levels.items()} == pytest.approx(
        dict.fromkeys(range(3), 1 / 3), abs=0.02
    )
    assert all(a.cache_salt == a.user for a in arrivals)
    assert {a.cache_salt for a in make_workload(spec.model_copy(update={"cache_salts": False}), 0, None, 9)} == {""}


def test_salts_want_users():
    with pytest.raises(ValueError, match=r"^cache_salts keeps the prefixes of users apart.*: set users, too$"):
        parse(SyntheticWorkload, {**LOGNORMAL.model_dump(), "cache_salts": True})


def test_no_jax_is_imported():
    code = "import sys, paged_jax.experiments.config, paged_jax.experiments.runner\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
