"""Recorded requests under other settings: their tokens stay, decisions and waits are those worked out by hand."""

import gc
import random
from pathlib import Path

import pytest
from host_executor import host_engine
from recorded_runs import MAX_MODEL_LEN, add, recorded, served, three

from paged_jax.engine.engine import Arrival
from paged_jax.experiments.replay import replay
from paged_jax.experiments.totals import Totals
from paged_jax.experiments.trace import Trace, shown
from paged_jax.experiments.trace_diff import diff
from paged_jax.experiments.what_if import what_if
from paged_jax.sampling.params import SamplingParams


def values(trace: Trace) -> dict[str, float]:
    totals = Totals()
    for event in trace.events():
        totals.write(event)
    return totals.values()


def test_shortest_job_first_instead_of_first_come_first_served(tmp_path: Path) -> None:
    trace, path = three(tmp_path / "fcfs.jsonl"), tmp_path / "sjf.jsonl"
    text = what_if(trace, ["scheduling_policy=sjf", "length_predictor=oracle"], str(path))
    steps = [event for event in Trace(str(path)).events() if event["event"] == "schedule"]
    assert [(event["t"], event["admitted"]) for event in steps if "admitted" in event] == [
        (1.0, [["short", 0]]),
        (3.0, [["middling", 0]]),
        (7.0, [["long", 0]]),
    ]
    # waits: 0, 6 and 10 seconds; 0, 2 and 6
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["3", "requests,", "replayed", "with", "scheduling_policy=sjf,", "length_predictor=oracle"]
    assert ["mean", "wait", "(s)", "5.333", "2.667", "-2.667"] in lines
    assert ["longest", "wait", "(s)", "10", "6", "-4"] in lines
    assert ["steps", "12", "12", "0"] in lines
    assert "note: every step of the replay takes 1 s, the median of those recorded" in text
    assert replay(Trace(str(path))).reproduced


def test_the_same_settings_decide_the_same(tmp_path: Path) -> None:
    """On a clock on which every step takes the same time anyway."""
    rng = random.Random(1)
    arrivals = [
        Arrival(
            rng.uniform(3, 20), str(n), tuple(rng.choices(range(3), k=rng.randint(1, 20))), SamplingParams(max_tokens=6)
        )
        for n in range(20)
    ]
    trace = served(tmp_path / "a.jsonl", arrivals, num_blocks=16, preemption_mode="swap", num_swap_blocks=5)
    what_if(trace, ["num_blocks=16"], str(tmp_path / "b.jsonl"))
    again = Trace(str(tmp_path / "b.jsonl"))
    assert list(again.events()) == list(trace.events())
    assert "steps are the same\n" in diff(trace, again)


def test_a_step_in_which_a_program_was_compiled_does_not_slow_down_the_others(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = host_engine(trace_file=str(path), seconds_per_step=1.0, max_num_seqs=1)
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=9))
    engine.executor.seconds_per_step = 100.0
    engine.step()
    engine.executor.seconds_per_step = 1.0
    while engine.has_unfinished_requests():
        engine.step()
    assert "every step of the replay takes 1 s, the median of those" in what_if(Trace(str(path)), ["eviction=lfu"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["scheduling_policy=sjf", "length_predictor=oracle"],
        ["scheduling_policy=priority", "aging_s=3"],
        ["prefix_cache=radix", "eviction=lfu", "victim_policy=most_blocks"],
        ["preemption_mode=swap", "num_swap_blocks=30", "num_blocks=12"],
        ["block_size=3", "num_blocks=20", "max_num_batched_tokens=8"],
        ["eviction=belady"],
        ["prefix_cache=radix", "eviction=belady", "scheduling_policy=fair"],
        ["prefix_cache=none", "budget_order=prefill_first", "max_num_seqs=3"],
    ],
    ids=" ".join,
)
def test_a_request_ends_as_recorded_whatever_the_policy(overrides: list[str], tmp_path: Path) -> None:
    """Samples, beams and stop tokens; aborted requests may end otherwise."""
    for seed in range(3):
        trace = recorded(tmp_path / f"{seed}.jsonl", {}, seed)
        path = tmp_path / f"{seed}-other.jsonl"
        what_if(trace, overrides, str(path), show_progress=False)
        other = Trace(str(path))
        ends = [
            {shown(ending["id"]): {**ending, "t": 0} for prompt in t.prompts for ending in prompt.endings}
            for t in (trace, other)
        ]
        aborted = {prompt.arrival["id"] for prompt in trace.prompts if prompt.was_aborted}
        kept = [{name: end for name, end in side.items() if name.split("/")[0] not in aborted} for side in ends]
        assert kept[0] == kept[1]
        assert len(kept[0]) >= 10
        assert replay(other, show_progress=False).reproduced


def test_belady_is_the_best_on_a_loop_that_does_not_fit(tmp_path: Path) -> None:
    """Three prompts of two blocks and one token in turn, over five blocks: lru finds nothing, and Belady a lot."""
    prompts = [tuple(range(start, start + 9)) for start in (0, 10, 20)]
    arrivals = [Arrival(5.0 * n, str(n), prompts[n % 3], SamplingParams(max_tokens=1)) for n in range(15)]
    trace = served(tmp_path / "lru.jsonl", arrivals, num_blocks=5)
    assert values(trace)["prompt tokens found cached"] == 0
    text = what_if(trace, ["eviction=belady"], str(tmp_path / "belady.jsonl"))
    belady = values(Trace(str(tmp_path / "belady.jsonl")))
    # of the four blocks of the two other prompts two are given up at each turn but the first two, the farthest ones
    assert belady["prompt tokens found cached"] == best_loop(15)
    assert "eviction=belady" in text


def best_loop(count: int) -> int:
    """Tokens found by Belady's policy, worked out over lists of blocks."""
    cached: list[tuple[int, int]] = []
    found = 0
    for turn in range(count):
        mine = [(turn % 3, 0), (turn % 3, 1)]
        hits = [block for block in mine if block in cached]
        hits = hits if hits[:1] == mine[:1] else []
        found += 4 * len(hits)
        others = [block for block in cached if block not in mine or block not in hits]

        def next_use(block: tuple[int, int], turn: int = turn) -> tuple[int, int]:
            return next(later for later in range(turn, turn + 4) if later > turn and later % 3 == block[0]), block[1]

        while len(others) + 3 > 5:  # two blocks of the prompt and one for the rest of it
            others.remove(max(others, key=next_use))
        cached = [*others, *mine]
    return found


def test_aborted_and_unfinished_requests_end_with_what_is_known_of_them(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = host_engine(trace_file=str(path), seconds_per_step=1.0, max_num_seqs=1)
    for name in ("a", "b", "c"):
        engine.add_request(name, [1, 2], SamplingParams(max_tokens=9), priority=-ord(name))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    engine.step()
    engine.abort("b")
    engine.step()
    del engine
    gc.collect()
    trace = Trace(str(path))
    text = what_if(trace, ["scheduling_policy=priority"], str(tmp_path / "other.jsonl"))
    ends = [(e["id"], e["reason"], e.get("n", 0)) for e in Trace(str(tmp_path / "other.jsonl")).events()
            if e["event"] == "finish"]  # fmt: skip
    assert ends == [("c", "abort", 1), ("b", "abort", 1), ("a", "abort", 0)]
    assert "note: 2 requests were cut off where what was recorded ends" in text


def test_ids_that_were_used_again(tmp_path: Path) -> None:
    """Under the recorded settings one after the other, under others at once; an abort is of the one it was of."""
    path = tmp_path / "run.jsonl"
    engine = host_engine(trace_file=str(path), seconds_per_step=1.0, max_num_seqs=2)
    for _ in range(3):
        engine.add_request("a", [1, 2], SamplingParams(max_tokens=3))
        while engine.has_unfinished_requests():
            engine.step()
    engine.add_request("a#2", [1, 2], SamplingParams(max_tokens=3))
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=9))
    engine.step()
    engine.step()
    engine.abort("a")
    while engine.has_unfinished_requests():
        engine.step()
    del engine
    gc.collect()
    text = what_if(Trace(str(path)), ["max_num_batched_tokens=1", "max_num_seqs=1"], str(tmp_path / "slow.jsonl"))
    ends = [(e["id"], e["reason"], e.get("n", 0)) for e in Trace(str(tmp_path / "slow.jsonl")).events()
            if e["event"] == "finish"]  # fmt: skip
    assert sorted(ends) == [
        ("a", "length", 3), ("a#2", "length", 3), ("a#3", "length", 3), ("a#4", "length", 3), ("a#5", "abort", 0),
    ]  # fmt: skip
    assert "where a request id was used again, the replay calls the request id#2, id#3 and so on" in text


def test_one_is_not_plural(tmp_path: Path) -> None:
    trace = served(tmp_path / "run.jsonl", [Arrival(0.0, "a", (1, 2), SamplingParams(max_tokens=1))])
    assert what_if(trace, ["eviction=lfu"], str(tmp_path / "lfu.jsonl")).startswith("1 request, replayed with ")
    assert ", 1 step: every decision" in replay(trace).text
    text = diff(trace, Trace(str(tmp_path / "lfu.jsonl")))
    assert "the same 1 request arrives\n" in text
    assert "the one step is the same\n" in text


def test_a_request_that_goes_beyond_what_was_recorded_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    trace = served(path, [Arrival(0.0, "a", (1, 2), SamplingParams(max_tokens=None))], max_model_len=MAX_MODEL_LEN)
    with pytest.raises(ValueError, match="request 'a' goes on after its 38 recorded tokens under these settings"):
        what_if(trace, ["max_model_len=50"], str(tmp_path / "other.jsonl"))
    assert list(tmp_path.iterdir()) == [path], "half a recording is left behind"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sjf", "'sjf' is not an override: write key=value"),
        ("scheduling_policy=sfj", "unknown scheduling_policy 'sfj'; did you mean 'sjf'?"),
        ("scheduling_polic=sjf", "unknown key 'scheduling_polic'; did you mean 'scheduling_policy'?"),
        ("dtype=float32", "dtype has no effect in a replay, which has no model and no device: leave it out"),
        ("trace_file=x", "trace_file has no effect in a replay"),
        ("block_size=8", "block_size changes what num_blocks means (64 blocks of 4 tokens were recorded): give num_b"),
        ("preemption_mode=swap", "preemption_mode 'swap' needs host memory, and the recorded run had none: add num_sw"),
        ("aging_s=3", "aging_s has no effect without scheduling_policy"),
    ],
)
def test_what_cannot_be_asked(override: str, sentence: str, tmp_path: Path) -> None:
    trace = three(tmp_path / "run.jsonl")
    with pytest.raises(ValueError, match=r"\w") as error:
        what_if(trace, [override])
    assert sentence in str(error.value)


def test_settings_that_nobody_reads_any_more_are_dropped(tmp_path: Path) -> None:
    trace = three(tmp_path / "run.jsonl", scheduling_policy="sjf", length_predictor="oracle", aging_s=100.0)
    assert "replayed with scheduling_policy=fcfs" in what_if(trace, ["scheduling_policy=fcfs"])


def test_output_does_not_overwrite(tmp_path: Path) -> None:
    trace = three(tmp_path / "run.jsonl")
    with pytest.raises(ValueError, match="exists, and is not overwritten"):
        what_if(trace, ["scheduling_policy=sjf"], str(tmp_path / "run.jsonl"))
    assert replay(Trace(str(tmp_path / "run.jsonl"))).reproduced


def test_totals_are_those_that_the_engine_counts(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = host_engine(
        trace_file=str(path), num_blocks=16, preemption_mode="swap", num_swap_blocks=9, eos_token_ids=(5,)
    )
    rng = random.Random(3)
    requests, steps = [], []
    for name in range(25):
        add(engine, str(name), rng)
        requests.append(engine._requests[str(name)])
        while rng.random() < 0.7 and engine.has_unfinished_requests():
            engine.step()
            steps.append(engine.last_step)
    while engine.has_unfinished_requests():
        engine.step()
        steps.append(engine.last_step)
    steps = list({id(step): step for step in steps}.values())
    found = values(Trace(str(path)))
    samples = [sample for request in requests for sample in request.samples]
    assert found["steps"] == len(steps)
    assert found["tokens computed"] == sum(step.num_tokens for step in steps)
    assert found["preemptions"] == sum(sample.metrics.num_preemptions for sample in samples) > 0
    assert found["blocks evicted"] == engine.scheduler.kv_cache.num_evicted > 0
    assert found["blocks copied"] == sum(step.num_copied for step in steps) > 0
    assert found["blocks swapped out"] == sum(step.num_swapped_out for step in steps) > 0
    assert found["blocks swapped in"] == sum(step.num_swapped_in for step in steps) > 0
    assert found["requests finished"] == len(samples)
