"""What an engine writes down: events worked out by hand, files that are never overwritten, lines that are not lost."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from host_executor import VOCAB_SIZE, drain, host_engine, next_token

from paged_jax import __version__
from paged_jax.engine.trace_file import _MAX_BUFFERED
from paged_jax.execution.plan import SchedulerOutput
from paged_jax.sampling.params import BeamSearchParams, SamplingParams

type Event = dict[str, Any]


def events(path: Path) -> list[Event]:
    """All lines, decoded, without checksums."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "check"} for line in lines]


def kinds(path: Path) -> list[str]:
    return [event["event"] for event in events(path)]


def test_a_run_worked_out_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = host_engine(
        trace_file=str(path), num_blocks=3, max_num_batched_tokens=5, seconds_per_step=2.0, token=lambda t: 50
    )
    engine.clock.advance(1.0)
    engine.add_request("a", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=3), 0.5, priority=-1, user="me")
    drain(engine)
    engine.reset_prefix_cache()
    engine.add_request("b", [1, 2], SamplingParams(max_tokens=2, temperature=1, n=2))
    engine.step()
    engine.abort("b")
    header, *rest = events(path)
    assert header["config"] == json.loads(engine.config.model_dump_json())
    del header["config"]
    assert header == {
        "event": "header",
        "format": 1,
        "paged_jax": __version__,
        "num_blocks": 3,
        "num_swap_blocks": 0,
        "cache_groups": [[1, 1, 1, None]],
        "max_model_len": 256,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": [],
    }
    (first, second) = (event.pop("params") for event in rest if event["event"] == "arrival")
    assert SamplingParams(**first) == SamplingParams(max_tokens=3)
    assert SamplingParams(**second) == SamplingParams(max_tokens=2, temperature=1, n=2)
    assert rest == [
        {"event": "arrival", "t": 1.0, "id": "a", "arrival_time": 0.5, "prompt": [1, 2, 3, 4, 5, 6], "priority": -1,
         "user": "me"},
        {"event": "step", "t": 1.0, "step": 1},
        {"event": "allocate", "t": 1.0, "id": "a", "blocks": [[1, 2]]},
        {"event": "schedule", "t": 1.0, "num_tokens": 5, "chunks": [["a", 0, 5]], "admitted": [["a", 0]]},
        {"event": "result", "t": 3.0},
        {"event": "step", "t": 3.0, "step": 2},
        {"event": "schedule", "t": 3.0, "num_tokens": 1, "decodes": ["a"]},
        {"event": "result", "t": 5.0},
        {"event": "token", "t": 5.0, "id": "a", "tokens": [50]},
        {"event": "step", "t": 5.0, "step": 3},
        {"event": "schedule", "t": 5.0, "num_tokens": 1, "decodes": ["a"]},
        {"event": "result", "t": 7.0},
        {"event": "token", "t": 7.0, "id": "a", "n": 1, "tokens": [50]},
        {"event": "step", "t": 7.0, "step": 4},
        {"event": "schedule", "t": 7.0, "num_tokens": 1, "decodes": ["a"]},
        {"event": "result", "t": 9.0},
        {"event": "token", "t": 9.0, "id": "a", "n": 2, "tokens": [50]},
        {"event": "finish", "t": 9.0, "id": "a", "reason": "length", "n": 3},
        {"event": "reset", "t": 9.0},
        {"event": "arrival", "t": 9.0, "id": "b", "arrival_time": 9.0, "prompt": [1, 2]},
        {"event": "step", "t": 9.0, "step": 5},
        {"event": "allocate", "t": 9.0, "id": "b", "blocks": [[1]]},
        {"event": "schedule", "t": 9.0, "num_tokens": 2, "chunks": [["b", 0, 2]], "forks": [["b", 1]],
         "admitted": [["b", 0], [["b", 1], 1]]},
        {"event": "result", "t": 11.0},
        {"event": "token", "t": 11.0, "id": "b", "tokens": [50]},
        {"event": "token", "t": 11.0, "id": ["b", 1], "tokens": [50]},
        {"event": "abort", "t": 11.0, "id": "b"},
        {"event": "finish", "t": 11.0, "id": "b", "reason": "abort", "n": 1},
        {"event": "finish", "t": 11.0, "id": ["b", 1], "reason": "abort", "n": 1},
    ]  # fmt: skip


def test_preemption_swapping_copies_and_evictions(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = host_engine(trace_file=str(path), num_blocks=4, preemption_mode="swap", num_swap_blocks=4)
    engine.add_request("a", range(4), SamplingParams(max_tokens=9))
    engine.add_request("b", range(10, 14), SamplingParams(max_tokens=9))
    drain(engine)
    engine.add_request("c", range(20, 25), SamplingParams(max_tokens=3, temperature=1, n=2))
    drain(engine)
    found = events(path)
    out, back = (event for event in found if event["event"] == "swap")
    assert (out["id"], out["to"], len(out["device_blocks"][0])) == ("b", "host", 2)
    assert (back["id"], back["to"], back["host_blocks"]) == ("b", "device", out["host_blocks"])
    assert [e["how"] for e in found if e["event"] == "preempt"] == ["swap"]
    assert kinds(path).count("copy") == 1
    assert kinds(path).count("evict") == engine.scheduler.kv_cache.num_evicted > 0


def test_beams_are_recorded_with_candidates_choices_and_hypotheses(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = host_engine(trace_file=str(path))
    leader = engine.add_request("a", [1, 2, 3], BeamSearchParams(beam_width=2, max_tokens=3))
    drain(engine)
    found = events(path)
    assert BeamSearchParams(**found[1]["beams"]) == leader.beam_search.params
    answers = [event for event in found if event["event"] == "token"]
    assert [len(answer["top"]) for answer in answers] == [4] * 5
    assert [event["parent"] for event in found if event["event"] == "beam"][:2] == ["a", "a"]
    (best,) = (event["hypotheses"] for event in found if event.get("hypotheses"))
    assert best == [[list(h.token_ids), h.cumulative_logprob, "length"] for h in leader.beam_search.best()]


def test_an_interrupted_step_and_other_weights(tmp_path: Path) -> None:
    def interrupt(plan: SchedulerOutput) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "run.jsonl"
    engine = host_engine(trace_file=str(path), on_submit=interrupt)
    engine.executor.update_weights = lambda model: None
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=1))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.executor.on_submit = None
    drain(engine)
    engine.update_weights(None)
    engine.add_request("b", [1, 2, 3], SamplingParams(max_tokens=1))
    drain(engine)
    step = ["step", "allocate", "schedule"]
    assert kinds(path)[2:] == [
        *step, "retract", *step, "result", "token", "finish", "weights", "reset", "arrival",
        *step, "result", "token", "finish",
    ]  # fmt: skip


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("precious")
    with pytest.raises(ValueError, match=r"trace_file '.*run\.jsonl' exists, and is not overwritten: choose another"):
        host_engine(trace_file=str(path))
    assert path.read_text() == "precious"


def test_a_directory_that_is_missing_or_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"cannot be written: there is no directory '.*nowhere'"):
        host_engine(trace_file=str(tmp_path / "nowhere" / "run.jsonl"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # nothing is closed to root, who may run this
    with pytest.raises(ValueError, match="does not let you"):
        host_engine(trace_file=str(tmp_path / "run.jsonl"))
    assert list(tmp_path.iterdir()) == []


def test_settings_that_are_refused_leave_no_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(ValueError, match="without chunked prefill"):
        host_engine(trace_file=str(path), enable_chunked_prefill=False)
    assert not path.exists()


def test_a_refused_request_is_no_event(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = host_engine(trace_file=str(path))
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.add_request("a", [], SamplingParams())
    engine.step()
    del engine
    gc.collect()
    assert kinds(path) == ["header"]


def test_lines_are_written_when_nothing_is_left_to_do_or_much_has_come_together(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = host_engine(trace_file=str(path), max_model_len=4000, num_blocks=2000)
    engine.add_request("a", [1], SamplingParams(max_tokens=3000))
    for _ in range(_MAX_BUFFERED // 5):
        engine.step()
    assert path.read_text() == ""
    for _ in range(_MAX_BUFFERED // 5):
        engine.step()
    assert len(kinds(path)) > _MAX_BUFFERED
    drain(engine, 3000)
    assert kinds(path)[-1] == "finish"


def test_a_process_that_ends_in_the_middle_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    script = """
import sys
sys.path[:0] = sys.argv[2:]
from host_executor import host_engine
from paged_jax.sampling.params import SamplingParams
engine = host_engine(trace_file=sys.argv[1])
engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=9))
engine.step()
raise RuntimeError("the end")
"""
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script, path, tests, tests.parent], capture_output=True, check=False)
    assert b"the end" in done.stderr
    assert kinds(path) == ["header", "arrival", "step", "allocate", "schedule", "result", "token"]
    assert events(path)[-1]["tokens"] == [next_token([1, 2, 3])]


def test_nobody_is_told_anything_without_a_trace_file() -> None:
    engine = host_engine()
    assert engine.scheduler.record is None
    assert engine.scheduler.kv_cache.record is None


def test_belady_needs_the_future() -> None:
    with pytest.raises(ValueError, match=r"must know the future: .* `paged-jax replay FILE eviction=belady`"):
        host_engine(eviction="belady")
