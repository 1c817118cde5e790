"""What an experiment can ask of a trace: cuts, limits, scales, samples, arrival processes and stand-ins."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from paged_jax.config import parse
from paged_jax.experiments.request_traces.spec import TraceWorkload
from paged_jax.experiments.request_traces.workload import (
    TraceRequest,
    trace_requests,
    workload_fingerprint,
    workload_notes,
)
from paged_jax.experiments.workloads import WORKLOADS, make_workload

ROWS = [(0, 10, 2), (1, 20, 0), (2, 30, 4), (2, 0, 9), (4, 50, 6), (8, 60, 7)]
"""(time, prompt, output)"""


@pytest.fixture
def azure(tmp_path: Path) -> str:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{t},{p},{o}\n" for t, p, o in ROWS))
    return str(path)


@pytest.fixture
def long(tmp_path: Path) -> str:
    """A request a second, the prompt of request i with i tokens."""
    path = tmp_path / "long.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{i},{i},1\n" for i in range(1, 201)))
    return str(path)


def spec(file: str, **fields: object) -> TraceWorkload:
    return parse(TraceWorkload, {"kind": "trace", "format": "azure", "file": file, **fields}, "workload")


def drawn(requests: list[TraceRequest]) -> list[tuple[float | None, int, int]]:
    return [(r.time, len(r.prompt_token_ids), r.output_len) for r in requests]


@pytest.mark.parametrize(
    ("fields", "expected", "note"),
    [
        (
            {},
            [(0, 10, 2), (2, 30, 4), (4, 50, 6), (8, 60, 7)],
            "2 of 6 rows with an empty prompt or no output are left",
        ),
        ({"max_requests": 2}, [(0, 10, 2), (2, 30, 4)], "2 of 4 requests are taken (max_requests)"),
        (
            {"max_total_tokens": 56},
            [(0, 10, 2), (2, 30, 4), (4, 50, 6)],
            "1 of 6 rows of more than max_total_tokens (56)",
        ),
        (
            {"max_total_tokens": 55},
            [(0, 10, 2), (2, 30, 4)],
            "2 of 6 rows of more than max_total_tokens (55) tokens are",
        ),
        (
            {"max_prompt_len": 30},
            [(0, 10, 2), (2, 30, 4)],
            "2 of 6 rows with a prompt of more than max_prompt_len (30)",
        ),
        ({"min_len": 4}, [(0, 30, 4), (2, 50, 6), (6, 60, 7)], "1 of 6 rows with fewer than min_len (4) tokens of"),
        ({"start_s": 2.0}, [(0, 30, 4), (2, 50, 6), (6, 60, 7)], "4 of 6 rows lie within start_s and end_s"),
        ({"end_s": 8.0}, [(0, 10, 2), (2, 30, 4), (4, 50, 6)], "5 of 6 rows lie within start_s and end_s"),
        ({"start_s": 0.5, "end_s": 4.5, "time_scale": 2.0}, [(0, 30, 4), (4, 50, 6)], "4 of 6 rows lie within"),
        ({"time_scale": 0.5}, [(0, 10, 2), (1, 30, 4), (2, 50, 6), (4, 60, 7)], "2 of 6 rows with an empty prompt"),
        (
            {"request_rate": 2.0, "start_s": 1.0},
            [(None, 30, 4), (None, 50, 6), (None, 60, 7)],
            "5 of 6 rows lie within",
        ),
        ({"num_clients": 2}, [(None, 10, 2), (None, 30, 4), (None, 50, 6), (None, 60, 7)], "2 of 6 rows with an empty"),
    ],
)
def test_cuts_limits_and_scales(azure, fields, expected, note):
    asked = spec(azure, **fields)
    assert drawn(trace_requests(asked, 0, 97, None)) == expected
    notes = workload_notes(asked)
    assert any(note in sentence for sentence in notes), notes
    assert all(sentence.startswith(azure) for sentence in notes)
    dropped = sum(int(n.removeprefix(f"{azure}: ").split()[0]) for n in notes if "left out" in n)
    taken = [int(n.removeprefix(f"{azure}: ").split()[0]) for n in notes if "lie within" in n]
    available = (taken or [6])[0] - dropped
    assert len(expected) == min(available, fields.get("max_requests", available)), "every row is accounted for"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"start_s": 8.5}, r"no request from start_s \(8.5\) to end_s \(inf\); its last is at 8 s: choose other ones"),
        ({"max_total_tokens": 3}, "has no request with tokens of prompt and output within min_len, max_prompt_len and"),
    ],
)
def test_a_trace_of_which_nothing_is_left_is_refused(azure, fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        trace_requests(spec(azure, **fields), 0, 97, None)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"format": "lengths", "time_scale": 2.0},
            "time_scale has no effect with format 'lengths', which has no times",
        ),
        ({"format": "sharegpt", "time_unit": "ms"}, "time_unit has no effect with format 'sharegpt'"),
        ({"format": "prompts", "start_s": 1.0}, "start_s has no effect with format 'prompts'"),
        ({"format": "lengths", "end_s": 1.0}, "end_s has no effect with format 'lengths'"),
        ({"time_scale": 2.0, "request_rate": 1.0}, "time_scale has no effect with request_rate or num_clients"),
        (
            {"output": {"mean": 3, "sigma": 0, "max": 9}},
            "output has no effect with format 'azure', which has output len",
        ),
        (
            {"shuffle": True},
            "shuffle has no effect on all the requests of a trace at their own times: set max_requests",
        ),
        ({"start_s": 3.0, "end_s": 3.0}, r"start_s \(3\) must be before end_s \(3\)"),
        ({"max_total_tokens": 7, "min_len": 4}, r"max_total_tokens \(7\) leaves no room for two times min_len"),
        ({"max_prompt_len": 3, "min_len": 4}, r"max_prompt_len \(3\) is less than min_len \(4\): raise it"),
        ({"burstiness": 2.0}, "burstiness has no effect without request_rate"),
        ({"format": "csv"}, "workload.format: input should be 'azure'"),
        ({"time_unit": "ns"}, "workload.time_unit: input should be 's', 'ms' or 'us'"),
        ({"max_request": 3}, r"unknown key 'workload.max_request'; did you mean 'max_requests'\?"),
        ({"num_requests": 3}, r"unknown key 'workload.num_requests'"),
    ],
)
def test_fields_that_have_no_effect_or_no_meaning_are_refused(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        spec("any.csv", **fields)


def test_seeds_draw_contents_only_unless_rows_are_shuffled(long):
    first, again, other = (trace_requests(spec(long), seed, 97, None) for seed in (0, 0, 1))
    assert first == again
    assert drawn(first) == drawn(other)
    assert all(a.prompt_token_ids != b.prompt_token_ids for a, b in zip(first[5:], other[5:], strict=True))


def test_a_sample_of_rows_keeps_its_own_times_in_order(long):
    sampled = spec(long, shuffle=True, max_requests=50)
    first, again, other = (drawn(trace_requests(sampled, seed, 97, None)) for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == 50
    rows = [prompt for _, prompt, _ in first]
    assert rows == sorted(set(rows))
    assert [time for time, _, _ in first] == [prompt - rows[0] for prompt in rows], "the first is at 0"
    assert 60 < np.mean(rows) < 140
    assert max(rows) > 150


def test_with_an_arrival_process_rows_are_taken_in_an_order_of_the_seed(long):
    shuffled = spec(long, shuffle=True, request_rate=1.0)
    orders = [[prompt for _, prompt, _ in drawn(trace_requests(shuffled, seed, 97, None))] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(1, 201))
    assert orders[0] != sorted(orders[0])
    few = spec(long, shuffle=True, request_rate=1.0, max_requests=5)
    assert [p for _, p, _ in drawn(trace_requests(few, 1, 97, None))] == orders[2][:5]


def test_prompts_have_nothing_in_common_and_their_ints_are_shared(long):
    requests = trace_requests(spec(long), 0, 50_000, None)
    assert all(0 <= t < 50_000 for r in requests for t in r.prompt_token_ids)
    beginnings = [r.prompt_token_ids[:8] for r in requests if len(r.prompt_token_ids) >= 8]
    assert len(set(beginnings)) == len(beginnings)
    tokens = [t for r in requests for t in r.prompt_token_ids]
    assert len({id(t) for t in tokens}) == len(set(tokens)) > 3000
    assert np.mean(tokens) == pytest.approx(25_000, rel=0.05)


STAND_IN = {
    "num_requests": 400,
    "prompt": {"mean": 100, "sigma": 0.5, "max": 1000},
    "output": {"law": "uniform", "min": 3, "max": 5},
    "request_rate": 4.0,
}


@pytest.mark.parametrize("fmt", ["azure", "mooncake", "lengths", "sharegpt", "prompts"])
def test_a_stand_in_takes_the_place_of_a_file_that_is_missing(fmt):
    timed = fmt in ("azure", "mooncake")
    stand_in = STAND_IN if timed else {k: v for k, v in STAND_IN.items() if k != "request_rate"}
    asked = spec("nowhere.csv", format=fmt, stand_in=stand_in, max_total_tokens=300)
    requests = trace_requests(asked, 0, 97, None)
    assert requests == trace_requests(asked, 0, 97, None) != trace_requests(asked, 1, 97, None)
    assert 380 < len(requests) < 400
    assert {r.output_len for r in requests} == {3, 4, 5}
    assert np.mean([len(r.prompt_token_ids) for r in requests]) == pytest.approx(100, rel=0.15)
    if timed:
        times = [r.time for r in requests]
        assert times[0] == 0
        assert np.mean(np.diff(times)) == pytest.approx(0.25, rel=0.2)
        slow = trace_requests(spec("nowhere.csv", format=fmt, stand_in=stand_in, time_scale=3.0), 0, 97, None)
        assert slow[-1].time == pytest.approx(3 * times[-1], rel=0.05)
    else:
        assert {r.time for r in requests} == {None}
    assert workload_fingerprint(asked) == "stand-in"
    notes = workload_notes(asked)
    assert "nowhere.csv is not there: 400 made-up requests stand in for it (workload.stand_in)" in notes[0]
    assert any("of more than max_total_tokens (300)" in note for note in notes)


def test_a_stand_in_is_not_used_where_the_file_is(azure):
    assert drawn(trace_requests(spec(azure, stand_in=STAND_IN), 0, 97, None))[0] == (0, 10, 2)
    assert workload_fingerprint(spec(azure, stand_in=STAND_IN)) == hashlib.sha256(Path(azure).read_bytes()).hexdigest()
    assert "stand in" not in " ".join(workload_notes(spec(azure, stand_in=STAND_IN)))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"request_rate": 1.0, "stand_in": STAND_IN},
            "stand_in.request_rate has no effect.*set request_rate of the work",
        ),
        ({"format": "lengths", "stand_in": STAND_IN}, "stand_in.request_rate has no effect"),
        ({"stand_in": {**STAND_IN, "request_rate": None, "num_clients": 2}}, "set num_clients of the workload"),
        ({"stand_in": {**STAND_IN, "n": 2}}, r"unknown key 'workload.stand_in.n'"),
        ({"stand_in": {**STAND_IN, "prompt": {"mean": 5, "max": 9}}}, "law 'lognormal' needs sigma"),
    ],
)
def test_a_stand_in_is_checked_although_the_file_may_be_there(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        spec("any.csv", **fields)


class WordTokenizer:
    """Counts the texts that it is given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.texts.append(text)
        return [len(word) for word in text.split()]


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a " * i, "answer": "b c"}) + "\n" for i in range(40)))
    return str(path)


def test_texts_are_measured_until_there_are_enough_requests(texts):
    tokenizer = WordTokenizer()
    asked = spec(texts, format="prompts", max_requests=3, max_total_tokens=6)
    assert drawn(trace_requests(asked, 0, 97, tokenizer)) == [(None, 1, 2), (None, 2, 2), (None, 3, 2)]
    assert len(tokenizer.texts) == 7, "an empty prompt is none"
    notes = workload_notes(asked, 0, tokenizer)
    assert f"{texts}: 1 of 4 rows with an empty prompt or no output is left out" in notes
    assert f"{texts}: 3 requests are taken, of 4 looked at and 40 in the file" in notes
    assert any("has no times, so all requests arrive at once: set request_rate or num_clients" in n for n in notes)
    assert len(workload_notes(asked)) == 1
    shuffled = spec(texts, format="prompts", max_requests=3, shuffle=True)
    orders = [drawn(trace_requests(shuffled, seed, 97, tokenizer)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    with pytest.raises(ValueError, match="has no request with tokens"):
        trace_requests(spec(texts, format="prompts", min_len=3), 0, 97, tokenizer)


def test_a_file_that_has_changed_is_read_again(azure):
    before = trace_requests(spec(azure), 0, 97, None)
    assert trace_requests(spec(azure), 0, 97, None) == before
    Path(azure).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,7,1\n")
    assert drawn(trace_requests(spec(azure), 0, 97, None)) == [(0, 7, 1)]
    assert workload_notes(spec(azure)) == []
    os.unlink(azure)
    with pytest.raises(ValueError, match="there is no trace file"):
        trace_requests(spec(azure), 0, 97, None)


def test_texts_need_a_tokenizer(texts):
    with pytest.raises(
        ValueError, match=r"format 'prompts' holds texts, and this model has no tokenizer.*or format 'len"
    ):
        trace_requests(spec(texts, format="prompts"), 0, 97, None)


def test_output_lengths_of_prompts_are_drawn_by_the_seed(texts):
    asked = spec(texts, format="prompts", output={"mean": 50, "sigma": 1.0, "max": 500})
    outputs = [[r.output_len for r in trace_requests(asked, seed, 97, WordTokenizer())] for seed in (0, 0, 1)]
    assert outputs[0] == outputs[1] != outputs[2]
    assert len(set(outputs[0])) > 20


def test_other_kinds_have_no_notes_and_no_fingerprint():
    other = WORKLOADS["lognormal"](kind="lognormal", num_requests=1, prompt=_five(), output=_five())
    assert workload_notes(other) == []
    assert workload_fingerprint(other) is None


def _five() -> dict:
    return {"law": "constant", "value": 5}


def test_requests_become_arrivals_at_the_times_of_the_file(azure):
    arrivals = make_workload(spec(azure, users=2, n=2), 3, None, 97)
    assert [(a.time, len(a.prompt_token_ids), a.params.max_tokens) for a in arrivals] == [
        (0, 10, 2),
        (2, 30, 4),
        (4, 50, 6),
        (8, 60, 7),
    ]
    assert [a.expected_output_len for a in arrivals] == [2, 4, 6, 7]
    assert all(a.params.n == 2 and a.params.ignore_eos and a.user in "01" for a in arrivals)


def test_an_arrival_process_takes_the_place_of_the_times_of_the_file(long):
    times = [a.time for a in make_workload(spec(long, request_rate=50.0), 0, None, 97)]
    assert times[0] == 0
    assert times == sorted(times)
    assert np.mean(np.diff(times)) == pytest.approx(0.02, rel=0.25)
    closed = make_workload(spec(long, num_clients=3), 0, None, 97)
    assert [a.after for a in closed[:5]] == [None, None, None, closed[0].request_id, closed[1].request_id]
