"""A recorded run comes out the same when it is run again, under any policies; whatever was changed in it is found."""

import json
from pathlib import Path

import pytest
from host_executor import VOCAB_SIZE, HostExecutor, host_engine
from policy_grid import Row, covering_array, row_name
from recorded_runs import recorded
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from paged_jax.config import EngineConfig
from paged_jax.engine.clock import VirtualClock
from paged_jax.engine.engine import Engine
from paged_jax.experiments.replay import replay
from paged_jax.experiments.trace import Trace
from paged_jax.sampling.params import SamplingParams


@pytest.mark.parametrize("row", covering_array(), ids=row_name)
def test_every_decision_is_reproduced_under_all_policies(row: Row, tmp_path: Path) -> None:
    for seed in range(2):
        trace = recorded(tmp_path / f"{seed}.jsonl", row, seed)
        outcome = replay(trace, show_progress=False)
        assert outcome.reproduced, outcome.text
        steps = sum(event["event"] == "step" for event in trace.events())
        assert outcome.text == f"{len(trace) - 1} events, {steps} steps: every decision reproduced\n"


def test_the_runs_hold_what_can_happen(tmp_path: Path) -> None:
    row: Row = {"preemption_mode": "swap", "num_swap_blocks": 40, "scheduling_policy": "priority", "aging_s": 6.0}
    seen: dict[str, int] = {}
    for seed in range(3):
        for event in recorded(tmp_path / f"{seed}.jsonl", row, seed, 30, 44).events():
            seen[event["event"]] = seen.get(event["event"], 0) + 1
    kinds = "arrival abort reset step result token retract schedule preempt allocate evict copy swap beam finish"
    assert set(seen) == set(kinds.split())
    assert min(seen.values()) >= 3, seen


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines of a short run in which a lot happens."""
    path = tmp_path_factory.mktemp("small") / "run.jsonl"
    recorded(path, {"preemption_mode": "swap", "num_swap_blocks": 40}, seed=4, num_requests=8, pool_tokens=40)
    return path.read_text().splitlines()


def outcome_of(lines: list[str], path: Path) -> tuple[bool, str]:
    """Whether a replay of these lines is as recorded, and what is said about it."""
    path.write_text("".join(f"{line}\n" for line in lines))
    try:
        outcome = replay(Trace(str(path)), show_progress=False)
    except ValueError as error:
        return False, str(error)
    return outcome.reproduced, outcome.text


def test_an_event_that_was_removed_is_missed(small: list[str], tmp_path: Path) -> None:
    for index in range(1, len(small) - 1):
        if '"reset"' in small[index]:
            continue  # of no consequence where nothing was found in the cache afterwards
        reproduced, text = outcome_of(small[:index] + small[index + 1 :], tmp_path / "run.jsonl")
        assert not reproduced, small[index]
        line = int(text.split(" of ")[0].removeprefix("line "))
        assert line > index, "a line before the damage is blamed"
        gone = json.loads(small[index])
        if gone["event"] == "token":
            missing = {"event": "token", "id": gone["id"], "n": gone.get("n", 0)}
            assert json.loads(text.split("  got       ")[1]) == missing
        elif gone["event"] not in ("abort", "arrival", "retract"):
            assert line <= index + 2, f"{small[index]} is missing, and line {line} is blamed: {text}"


def test_an_event_that_was_doubled_is_found(small: list[str], tmp_path: Path) -> None:
    for index in range(1, len(small)):
        if '"reset"' in small[index]:
            continue
        reproduced, text = outcome_of([*small[: index + 1], *small[index:]], tmp_path / "run.jsonl")
        assert not reproduced, small[index]
        assert text.startswith(("line ", "request id ")), text


def changed(event: dict[str, object]) -> dict[str, object] | None:
    """The event with one number of a decision or an answer changed."""
    match event["event"]:
        case "token":
            key = "tokens" if "tokens" in event else "top"
            first, *rest = event[key]
            return event | {key: [(first + 1) % VOCAB_SIZE if key == "tokens" else [first[0], first[1] - 1e-9], *rest]}
        case "allocate":
            return event | {"blocks": [[block + 1 for block in blocks] for blocks in event["blocks"]]}
        case "schedule" if "chunks" in event:
            (name, start, count), *rest = event["chunks"]
            return event | {"chunks": [[name, start, count + 1], *rest]}
        case "schedule" if "decodes" in event:
            return event | {"decodes": [*event["decodes"][::-1], "nobody"]}
        case "evict":
            return event | {"block": event["block"] + 1}
        case "copy":
            return event | {"source": event["source"] + 1}
        case "swap":
            return event | {"host_blocks": [[block + 1 for block in blocks] for blocks in event["host_blocks"]]}
        case "preempt":
            return event | {"how": "recompute" if event["how"] == "swap" else "swap"}
        case "beam":
            return event | {"token": event.get("token", 0) + 1}
        case "finish":
            return event | {"n": event.get("n", 0) + 1}
    return None


def test_whatever_was_changed_is_found_and_named(small: list[str], tmp_path: Path) -> None:
    tried = set()
    for index, line in enumerate(small[1:], start=1):
        other = changed(json.loads(line))
        if other is None:
            continue
        tried.add(other["event"])
        text = json.dumps(other, separators=(",", ":"))
        reproduced, said = outcome_of([*small[:index], text, *small[index + 1 :]], tmp_path / "run.jsonl")
        assert not reproduced, line
        assert said.startswith(f"line {index + 1} of {tmp_path}/run.jsonl, step "), said
        assert f"  expected  {text}\n" in said
    assert tried == {"token", "allocate", "schedule", "evict", "copy", "swap", "preempt", "beam", "finish"}


def test_the_step_and_both_sides_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = host_engine(trace_file=str(path), token=lambda tokens: 50)
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    path.write_text(path.read_text().replace('"n":1,"tokens":[50]', '"n":1,"tokens":[51]'))
    outcome = replay(Trace(str(path)))
    assert not outcome.reproduced
    first, expected, got = outcome.text.splitlines()
    assert first == f"line 11 of {path}, step 2: the replay differs from the recording"
    assert expected.startswith('  expected  {"event":"token","t":0.0,"id":"a","n":1,"tokens":[51],"check":')
    assert got.startswith('  got       {"event":"token","t":0.0,"id":"a","n":1,"tokens":[51],"check":'), (
        "the checksum tells the change"
    )
    assert expected.split("check")[1] != got.split("check")[1]


def test_a_file_that_was_cut_off_anywhere_is_replayed_as_far_as_it_goes(small: list[str], tmp_path: Path) -> None:
    whole = "".join(f"{line}\n" for line in small).encode()
    path = tmp_path / "run.jsonl"
    starts = [len("".join(f"{line}\n" for line in small[:index]).encode()) for index in range(1, len(small))]
    for start in starts:
        for cut in (start, start + 1):
            path.write_bytes(whole[:cut])
            trace = Trace(str(path))
            assert trace.note == (f"the last line of {path} is torn, and left out" if cut > start else "")
            outcome = replay(trace, show_progress=False)
            assert outcome.reproduced, outcome.text
            assert trace.note in outcome.text
    path.write_bytes(whole[: starts[0] - 1])
    with pytest.raises(ValueError, match="is not a trace of paged-jax: its first line is no header"):
        Trace(str(path))


def test_a_cut_within_a_step_is_told(small: list[str], tmp_path: Path) -> None:
    index = next(i for i, line in enumerate(small) if '"schedule"' in line)
    reproduced, text = outcome_of(small[: index + 1], tmp_path / "run.jsonl")
    assert reproduced
    assert text == f"{index} events, 1 step: every decision reproduced (the recording ends in the middle of step 1)\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "its first line is no header"),
        ("hello\n", "its first line is no header"),
        ('{"a": 1}\n', "its first line is no header"),
        ('{"event": "step", "t": 0}\n', "its first line is no header"),
        ('{"event": "header", "format": 99, "paged_jax": "9.9"}\n', "has trace format 99 (of paged-jax 9.9), and this"),
    ],
)
def test_what_is_no_trace(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"run\.jsonl") as error:
        Trace(str(path))
    assert sentence in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"no trace at .*nowhere"):
        Trace(str(tmp_path / "nowhere"))


def test_a_line_that_is_no_event_is_named(small: list[str], tmp_path: Path) -> None:
    assert outcome_of([*small[:5], "{}", *small[5:]], tmp_path / "x")[1].startswith("line 6 of ")
    assert outcome_of([*small[:5], "nonsense", *small[5:]], tmp_path / "x")[1].endswith("is not an event: 'nonsense'")


def test_an_interrupt_among_the_bookings_ends_the_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise InterruptedError

    path = tmp_path / "run.jsonl"
    engine = host_engine(trace_file=str(path))
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=3))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "update", interrupted)
        with pytest.raises(InterruptedError):
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    outcome = replay(Trace(str(path)))
    assert outcome.reproduced
    assert "(step 2 was interrupted while its tokens were booked: 11 events are not replayed)" in outcome.text


class Bytes:
    """A tokenizer whose tokens are bytes, as far as the engine asks: a to z, then the first byte of a dash."""

    def __init__(self) -> None:
        letters = [chr(ord("a") + index) for index in range(26)]
        self.backend = Tokenizer(BPE({piece: index for index, piece in enumerate([*letters, "â"])}, []))
        self.backend.decoder = ByteLevel()


@pytest.mark.parametrize(
    ("tokens", "stop", "expected", "held"),
    [
        ([0, 1, 2, 3], "bc", ("stop", "bc", 3), None),
        ([0, 1, 26, 26], "\ufffd\ufffd", ("stop", "\ufffd\ufffd", 4), True),
        ([0, 1, 2, 3], "cb", ("length", None, 4), None),
    ],
)
def test_stop_strings_need_no_tokenizer(
    tokens: list[int], stop: str, expected: tuple[str, str | None, int], held: bool | None, tmp_path: Path
) -> None:
    """Complete with a token, or only by what was held back until the end."""
    path = tmp_path / "run.jsonl"
    config = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=64, trace_file=str(path))
    executor = HostExecutor(64, 4, 4, 64, 100, token=lambda before: tokens[len(before) - 2] if len(before) < 6 else 9)
    engine = Engine(
        config,
        executor,
        clock=VirtualClock(),
        tokenizer=Bytes(),
        max_model_len=100,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
    )
    engine.add_request("a", [25, 25], SamplingParams(max_tokens=4, stop=stop))
    engine.add_request("b", [25, 25, 25, 25, 25, 25], SamplingParams(max_tokens=9))
    while engine.has_unfinished_requests():
        engine.step()
    trace = Trace(str(path))
    (ending,) = (event for event in trace.events() if event["event"] == "finish" and event["id"] == "a")
    assert (ending["reason"], ending.get("stop"), ending["n"], ending.get("held")) == (*expected, held)
    outcome = replay(trace)
    assert outcome.reproduced, outcome.text


def test_new_weights_are_part_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = host_engine(trace_file=str(path))
    engine.executor.update_weights = lambda model: None
    for name in "ab":
        engine.add_request(name, range(9), SamplingParams(max_tokens=2))
        while engine.has_unfinished_requests():
            engine.step()
        engine.update_weights(None)
    outcome = replay(Trace(str(path)))
    assert outcome.reproduced, outcome.text


def test_progress_is_shown_only_when_it_takes_long(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(f"{line}\n" for line in small))
    replay(Trace(str(path)))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("paged_jax.experiments.replay.SILENT_SECONDS", 0.0)
    replay(Trace(str(path)))
    assert "replay" in capsys.readouterr().err
