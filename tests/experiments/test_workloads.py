import hashlib
import json
import subprocess
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from host_executor import VOCAB_SIZE, host_engine

from paged_jax.config import parse
from paged_jax.engine.engine import drive
from paged_jax.experiments.chat import ChatWorkload
from paged_jax.experiments.config import as_plain, experiment_from_dict, settings
from paged_jax.experiments.lengths import Lengths
from paged_jax.experiments.measurements import run_workload
from paged_jax.experiments.prefix_tree import TreeWorkload
from paged_jax.experiments.request_traces.spec import StandIn, TraceWorkload
from paged_jax.experiments.shared_prefixes import FewShotWorkload, SharedPrefixWorkload
from paged_jax.experiments.workloads import (
    WORKLOADS,
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


FEW = Lengths(mean=6, sigma=0.5, max=12)
PROMPTS = PromptsWorkload(kind="prompts", num_requests=20, output=LENGTHS)
SPECS = {
    "lognormal": LOGNORMAL,
    "uniform": SyntheticWorkload(
        kind="uniform", num_requests=40, prompt=Lengths(max=30), output=Lengths(min=3, max=50)
    ),
    "zipf": SyntheticWorkload(
        kind="zipf", num_requests=40, prompt=Lengths(exponent=1, max=30), output=Lengths(exponent=0.5, min=3, max=50)
    ),
    "bimodal": SyntheticWorkload(
        kind="bimodal",
        num_requests=40,
        prompt=Lengths(modes=({"mean": 4.0, "sigma": 0.1}, {"mean": 40.0, "sigma": 0.1}), share=0.5, max=60),
        output=LENGTHS.under("lognormal"),
    ),
    "shared_prefix": SHARED,
    "few_shot": FewShotWorkload(
        kind="few_shot", num_requests=40, num_tasks=2, max_shots=4, example=FEW, question=FEW, output=LENGTHS
    ),
    "tree": TreeWorkload(kind="tree", num_trees=5, depth=3, branching=2, root=FEW, node=FEW, output=LENGTHS),
    "chat": ChatWorkload(
        kind="chat",
        num_conversations=10,
        turns=Lengths(value=4, law="constant"),
        system_prompt_len=9,
        message=FEW,
        output=LENGTHS,
        think_time_s=0.5,
    ),
    "trace": TraceWorkload(
        kind="trace",
        format="lengths",
        file="of-no-machine.csv",
        max_total_tokens=100,
        stand_in=StandIn(num_requests=40, prompt=LENGTHS, output=LENGTHS),
    ),
}
"""Forty requests of each kind but `prompts`, which needs a tokenizer."""
KINDS = pytest.mark.parametrize("kind", SPECS)


class WordTokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]


def test_there_is_a_case_for_every_kind():
    assert {*SPECS, "prompts"} == set(WORKLOADS)
    assert all(isinstance(spec, WORKLOADS[kind]) for kind, spec in SPECS.items())


@KINDS
def test_a_seed_always_gives_the_same_requests_within_the_limits(kind):
    spec = SPECS[kind]
    first, again, other = (make_workload(spec, seed, None, 100) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len(first) == 40
    assert len({a.request_id for a in first}) == 40
    assert all(0 <= t < 100 for a in first for t in a.prompt_token_ids)
    assert all(3 <= a.params.max_tokens <= 50 and a.params.ignore_eos and a.params.is_greedy for a in first)
    assert len({a.params.max_tokens for a in first}) > 5
    assert {a.time for a in first if a.after is None} == {0.0}
    check_fits(first, longest_request(spec), longest_request(spec))


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
    spec = PROMPTS.model_copy(update={"num_requests": 10})
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
    "n": (3, lambda a: (a.params.n, a.params.temperature)),
    "users": (5, lambda a: a.user),
    "priorities": (4, lambda a: a.priority),
    "cache_salts": (True, lambda a: a.cache_salt),
    "request_rate": (2.0, lambda a: a.time if a.after is None else None),
}
"""A value of each field that has a stream of its own, and what it decides."""


@pytest.mark.parametrize("field", FIELDS)
@KINDS
def test_a_field_changes_only_what_it_decides(kind, field):
    spec = SPECS[kind]
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


@KINDS
def test_the_true_output_length_is_told(kind):
    assert all(a.expected_output_len == a.params.max_tokens for a in make_workload(SPECS[kind], 0, None, 100))


@KINDS
def test_all_kinds_have_users_priorities_samples_and_beams(kind):
    spec = SPECS[kind].model_copy(update={"users": 4, "priorities": 3, "cache_salts": True, "n": 2})
    plain = make_workload(SPECS[kind], 0, None, 100)
    arrivals = make_workload(spec, 0, None, 100)
    assert {a.user for a in arrivals} == {"0", "1", "2", "3"}
    assert {a.priority for a in arrivals} == {0, 1, 2}
    assert all(a.cache_salt == a.user for a in arrivals)
    assert {(a.params.n, a.params.temperature, a.params.ignore_eos) for a in arrivals} == {(2, 1.0, True)}
    assert len({a.params.seed for a in arrivals}) == 40
    assert [a.prompt_token_ids for a in arrivals] == [a.prompt_token_ids for a in plain]
    if kind != "chat":
        beams = make_workload(SPECS[kind].model_copy(update={"beam_width": 3}), 0, None, 100)
        assert {(a.params.beam_width, a.params.ignore_eos) for a in beams} == {(3, True)}
        assert [a.params.max_tokens for a in beams] == [a.params.max_tokens for a in plain]
        assert [a.prompt_token_ids for a in beams] == [a.prompt_token_ids for a in plain]


@KINDS
@pytest.mark.parametrize("arrival", [{"request_rate": 3.0}, {"num_clients": 3, "think_time_s": 2.0}])
def test_whoever_waits_comes_after_whom_it_waits_for(kind, arrival):
    arrivals = make_workload(SPECS[kind].model_copy(update=arrival), 0, None, 100)
    place = {a.request_id: i for i, a in enumerate(arrivals)}
    for i, a in enumerate(arrivals):
        assert a.after is None or place[a.after] < i
    first = [a.time for a in arrivals if a.after is None]
    assert first == sorted(first)
    if "num_clients" in arrival:
        assert len(first) == 3
        assert Counter(Counter(a.after for a in arrivals if a.after).values()) == {1: 37}
    elif kind != "chat":
        assert len(set(first)) == 40


@KINDS
def test_all_kinds_are_served(kind):
    spec = SPECS[kind].model_copy(update={"num_clients": 6})
    arrivals = make_workload(spec, 0, None, VOCAB_SIZE)
    engine = host_engine(num_blocks=200, seconds_per_step=0.1, max_num_seqs=8)
    done = [r for advanced, _ in drive(engine, arrivals, engine.clock) for r in advanced if r.is_finished]
    assert sorted((r.request_id, len(r.output_token_ids)) for r in done) == sorted(
        (a.request_id, a.params.max_tokens) for a in arrivals
    )


def test_beams_are_served_and_reported_with_all_their_tokens():
    lengths = Lengths(law="uniform", min=1, max=4)
    spec = LOGNORMAL.model_copy(update={"num_requests": 12, "beam_width": 3, "request_rate": 1.0, "output": lengths})
    arrivals = make_workload(spec, 0, None, VOCAB_SIZE)
    engine = host_engine(num_blocks=200, seconds_per_step=0.1, max_num_seqs=8)
    served, _, _ = run_workload(engine, arrivals)
    asked = {a.request_id: a.params.max_tokens for a in arrivals}
    assert set(asked.values()) == {1, 2, 3, 4}
    assert Counter((r.request_id, r.num_output_tokens) for r in served) == dict.fromkeys(asked.items(), 3)
    for beam in served:
        assert beam.max_tokens == beam.num_output_tokens
        assert beam.metrics.token_times[-1] == beam.metrics.finished_time
    first = [r.metrics.token_times for r in served if r.sample_index == 0]
    assert sorted(map(len, first)) == sorted(asked.values())


@KINDS
def test_a_file_with_all_defaults_spelled_out_is_the_same_workload(kind):
    raw = {
        "name": "kinds",
        "model": "tiny-llama",
        "workload": SPECS[kind].model_dump(exclude_none=True, exclude_defaults=True),
        "report": {"y": ["output_tokens_per_s"]},
    }
    config = experiment_from_dict(raw)
    written = json.loads(json.dumps(as_plain(config)))
    again = experiment_from_dict(written)
    assert again.workload == config.workload
    assert make_workload(again.workload, 0, None, 100) == make_workload(SPECS[kind], 0, None, 100)


def test_tokens_of_prompts_are_shared_objects():
    """A trace has millions: 8 bytes each for the place in its tuple, and nothing for the number."""
    lengths = Lengths(mean=1000, sigma=0.5, max=10_000)
    spec = LOGNORMAL.model_copy(update={"num_requests": 400, "prompt": lengths, "users": 10})
    make_workload(spec, 0, None, 50_000)  # so that what is made once is there
    tracemalloc.start()
    arrivals = make_workload(spec, 0, None, 50_000)
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tokens = sum(len(a.prompt_token_ids) for a in arrivals)
    assert used / tokens < 9.5  # the rest is Arrival, SamplingParams and ids: about a kilobyte a request
    assert peak / tokens < 10.5


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


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"n": 2, "beam_width": 2}, r"n \(2\) samples and beam_width \(2\) exclude each other: set one"),
        ({"beam_width": 0}, "beam_width: input should be greater than or equal to 1"),
    ],
)
def test_beams_and_samples_exclude_each_other(values, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        parse(SyntheticWorkload, {**LOGNORMAL.model_dump(), **values})


CONFIG = {
    "name": "a",
    "model": "tiny-llama",
    "engine": {"max_num_seqs": 8, "max_model_len": 400},
    "workload": LOGNORMAL.model_dump(exclude_none=True),
    "report": {"y": ["output_tokens_per_s"]},
}


@pytest.mark.parametrize(
    ("engine", "workload", "sentence"),
    [
        ({}, {"beam_width": 9}, r"workload.beam_width \(9\) beams .* more than engine.max_num_seqs \(8\)"),
        ({"max_logprobs": 7}, {"beam_width": 4}, r"workload.beam_width \(4\) needs .* engine.max_logprobs \(7\)"),
        ({}, {"n": 9}, r"workload.n \(9\) samples of a prompt run at once, more than engine.max_num_seqs \(8\)"),
        (
            {},
            {"prompt": {"law": "uniform", "max": 400}},
            r"requests of 450 tokens, more than engine.max_model_len \(400\)",
        ),
        ({}, {"prompt": {"max": 40, "exponent": 1}}, "^workload.prompt: law 'lognormal' needs mean and sigma"),
        ({}, {"prompt": {"law": "zipf", "max": 40}}, "^workload.prompt: law 'zipf' needs exponent"),
        ({}, {"prompt": {"law": "uniform", "max": 40, "men": 3}}, "^unknown key 'workload.prompt.men'; did you mean"),
        ({}, {"think_time_s": 4.0}, "^workload: think_time_s has no effect without num_clients"),
        ({}, {"turns": {"max": 4}}, "^workload.turns belongs to kind chat, not to lognormal"),
    ],
)
def test_what_an_experiment_cannot_have_is_named_by_its_path(engine, workload, sentence):
    raw = {
        **CONFIG,
        "engine": {**CONFIG["engine"], **engine},
        "workload": {**CONFIG["workload"], **workload},
    }
    with pytest.raises(ValueError, match=sentence):
        experiment_from_dict(raw)


def test_the_beams_that_fit_are_taken():
    workload = {**CONFIG["workload"], "beam_width": 4}
    config = experiment_from_dict({**CONFIG, "engine": {"max_num_seqs": 4, "max_logprobs": 8}, "workload": workload})
    assert config.workload.width == 4


def test_keys_inside_of_optional_parts_can_be_swept():
    workload = SPECS["trace"].model_dump(exclude_none=True)
    del workload["stand_in"]["num_requests"]
    raw = {**CONFIG, "workload": workload, "sweep": {"workload.stand_in.num_requests": [3, 5]}}
    points = settings(experiment_from_dict(raw))
    assert [len(make_workload(point.workload, 0, None, 100)) for point in points] == [3, 5]


def test_a_trace_has_its_own_times_unless_others_take_their_place():
    spec = parse(TraceWorkload, {**SPECS["trace"].model_dump(), "format": "azure"})
    spec = spec.model_copy(update={"stand_in": spec.stand_in.model_copy(update={"request_rate": 2.0})})
    own = [a.time for a in make_workload(spec, 0, None, 100)]
    assert own[0] == 0
    assert own == sorted(set(own))
    assert 10 < own[-1] < 40  # 40 requests at 2 a second
    other = make_workload(spec.model_copy(update={"num_clients": 4, "think_time_s": 1.0}), 0, None, 100)
    assert [a.time for a in other] == [0.0] * 4 + [1.0] * (len(other) - 4)
    assert [a.after for a in other[4:]] == [a.request_id for a in other[:-4]]


def test_lengths_that_may_be_unset_are_lognormal_too():
    values = {"kind": "trace", "format": "prompts", "file": "prompts.jsonl", "output": {"mean": 20.0, "max": 50}}
    with pytest.raises(ValueError, match=r"^output: .*law 'lognormal' needs sigma"):
        parse(TraceWorkload, values)
    assert parse(TraceWorkload, {**values, "output": {"value": 9, "law": "constant"}}).output.longest == 9


def test_salts_want_users():
    with pytest.raises(ValueError, match=r"^cache_salts keeps the prefixes of users apart.*: set users, too$"):
        parse(SyntheticWorkload, {**LOGNORMAL.model_dump(), "cache_salts": True})


def test_no_jax_is_imported():
    code = "import sys, paged_jax.experiments.config, paged_jax.experiments.runner\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
