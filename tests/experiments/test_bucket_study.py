"""Padding that the study foretells, against what the engine then pads."""

import json
from pathlib import Path

import pytest

from paged_jax import cli
from paged_jax.execution.bucket_search import StepSize
from paged_jax.experiments.bucket_study import candidates, read_study, step_sizes, study_table
from paged_jax.experiments.config import load_experiment, settings
from paged_jax.experiments.simulated_trials import simulate
from paged_jax.experiments.trials import Trial

ROOT = Path(__file__).resolve().parents[2]

EXPERIMENT = """
name: small
model: tiny-llama
executor: simulated
hardware: a100-80gb
engine: {max_num_seqs: 8, max_num_batched_tokens: 48, max_model_len: 128, max_logprobs: 0, num_blocks: 64}
workload:
  kind: uniform
  num_requests: 12
  n: %d
  prompt: {min: 2, max: 60}
  output: {min: 1, max: 20}
seeds: [3, 4]
report: {y: [padding_fraction]}
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(EXPERIMENT % 1)
    return path


def padded(path: Path, *overrides: str) -> tuple[float, float, set[int]]:
    """Tokens computed and padded by the engine over all seeds, and the number of programs of each."""
    config = load_experiment(path, overrides)
    setting = settings(config)[0]
    found = [simulate(Trial(setting, seed, 0, "simulated"))["metrics"] for seed in config.seeds]
    computed, extra = (sum(m[name] for m in found) for name in ("computed_tokens", "padded_tokens"))
    return computed, extra, {m["compilations"] for m in found}


@pytest.mark.parametrize("samples", [1, 3])
def test_the_engine_pads_what_the_study_says(tmp_path, samples):
    """All requests are there at once, so that no plan depends on how long a step takes."""
    path = tmp_path / "small.yaml"
    path.write_text(EXPERIMENT % samples)
    study = read_study([str(path)])
    assert study.in_use == study.default
    for one in candidates(study)[::3]:
        buckets = list(one.buckets)
        computed, extra, programs = padded(path, f"engine.token_buckets={buckets}")
        assert study.histogram.computed_tokens == computed
        assert study.histogram.padded_tokens(one.buckets) == extra, one
        assert max(programs) <= study.histogram.num_programs(one.buckets) <= sum(programs) * 2


def test_time_of_a_step_grows_with_its_bucket_and_less_time_may_be_more_padding(experiment):
    study = read_study([str(experiment)])
    assert study.step_seconds(48) >= study.step_seconds(1) > 0
    by_tokens, by_time = (candidates(study, by_time=by_time) for by_time in (False, True))

    def spent(one):
        return study.histogram.total(one.buckets, study.step_seconds)

    for size in range(1, 5):
        tokens, time = (
            next(one for one in reversed(sets) if one.name.startswith("best") and len(one.buckets) <= size)
            for sets in (by_tokens, by_time)
        )
        assert spent(time) <= spent(tokens) * (1 + 1e-12)
        assert study.histogram.padded_tokens(tokens.buckets) <= study.histogram.padded_tokens(time.buckets)


def test_recorded_steps_by_hand():
    events = [
        {"event": "schedule", "num_tokens": 9, "decodes": ["a", "b"], "chunks": [["c", 0, 7]], "admitted": [["c", 2]]},
        {"event": "schedule", "preempted": ["a"]},  # is not run
        {"event": "schedule", "num_tokens": 1, "chunks": [["d", 0, 1]], "forks": [["d", 1], ["d", 2]]},
        {"event": "schedule", "num_tokens": 3, "decodes": ["a"], "idle": ["b", "c"]},
        {"event": "schedule", "num_tokens": 1, "decodes": ["a"], "admitted": [["b", 0], ["c", 1], ["d", 2]]},
        {"event": "result", "num_tokens": 50},
    ]
    assert list(step_sizes(events)) == [StepSize(9, 3), StepSize(1, 3), StepSize(3, 3), StepSize(1, 3)]


def trace(path: Path, sizes: list[int], **config: object) -> str:
    header = {"event": "header", "format": 1, "config": {"max_num_seqs": 4, "max_num_batched_tokens": 16, **config}}
    steps = [{"event": "schedule", "t": 0.0, "num_tokens": n, "chunks": [["a", 0, n]]} for n in sizes]
    path.write_text("".join(json.dumps(event) + "\n" for event in (header, *steps)))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["buckets", *arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_traces_are_pooled_and_the_set_is_printed_as_a_config_takes_it(tmp_path, capsys):
    files = [trace(tmp_path / "a.jsonl", [2, 2, 2, 9]), trace(tmp_path / "b.jsonl", [2, 3])]
    status, out, err = run(capsys, *files, "--budget", "3")
    assert (status, err) == (0, "")
    # 3, 9, 16 pads four steps of 2 by a token each: 4 / 24; 2, 9, 16 pads the 3 by six
    assert out == "engine:\n  token_buckets: [3, 9, 16]  # 16.67% padding\n"


def test_the_table_shows_what_is_in_use_too(tmp_path, capsys):
    status, out, err = run(capsys, trace(tmp_path / "a.jsonl", [2, 2, 9], token_buckets=[2, 16]))
    assert (status, err) == (0, "")
    rows = {line[:13].strip(): line.split() for line in out.splitlines()[4:] if line}
    assert rows["default"][-4:] == ["[1,", "4,", "8,", "16]"]
    assert rows["in use"][2:] == ["2", "2", "35.00", "[2,", "16]"]
    assert rows["powers of two"][3:] == ["5", "2", "35.00", "[1,", "2,", "4,", "8,", "16]"]
    assert rows["best 3"][2:] == ["3", "2", "0.00", "[2,", "9,", "16]"]
    assert "best 4" not in rows


def test_the_figure_is_drawn(tmp_path, capsys):
    status, out, _ = run(capsys, trace(tmp_path / "a.jsonl", [2, 2, 9]), "--figure", str(tmp_path / "f" / "pad.pdf"))
    assert status == 0
    assert sorted(path.name for path in (tmp_path / "f").iterdir()) == ["pad.pdf", "pad.png"]
    assert out.splitlines()[-2:] == [str(tmp_path / "f" / "pad.png"), str(tmp_path / "f" / "pad.pdf")]


def test_what_cannot_be_studied_is_refused_in_a_sentence(tmp_path, capsys, experiment):
    a, empty = trace(tmp_path / "a.jsonl", [2, 3]), trace(tmp_path / "empty.jsonl", [])
    other = trace(tmp_path / "other.jsonl", [2], max_num_batched_tokens=32)
    for arguments, status, words in [
        ([a, "--budget", "0"], 2, "--budget counts compiled programs, 1 or more, got 0"),
        ([a, "--minimise", "seconds"], 1, "the time of a padded step is known of a simulated experiment only"),
        ([empty], 1, f"{empty} holds no step"),
        ([a, other], 1, f"{a} and {other} have other shapes, max_num_seqs and max_num_batched_tokens of (4, 16) and"),
        ([str(ROOT / "configs" / "smoke.yaml")], 1, "is an experiment on this machine, and only simulated ones"),
        ([str(tmp_path / "nowhere.jsonl")], 1, "no trace at"),
    ]:
        ended, out, err = run(capsys, *arguments)
        assert (ended, out, err.count("\n")) == (status, "", 1)
        assert words in err


def test_the_shipped_study_begins_with_the_default_and_runs():
    config = load_experiment(ROOT / "configs" / "bucket_study.yaml")
    assert config.sweep["engine.token_buckets"][0] is None  # whose steps `paged-jax buckets` takes
    small = load_experiment(ROOT / "configs" / "bucket_study.yaml", ["workload.num_requests=3"])
    for setting in settings(small)[:3]:
        metrics = simulate(Trial(setting, 0, 0, "simulated"))["metrics"]
        assert 0 < metrics["padding_fraction"] < 1


def test_a_table_of_an_experiment_has_the_time_of_padding(experiment):
    study = read_study([str(experiment)])
    table = study_table(study, candidates(study))
    assert table.headings[3:5] == ("padding", "its time")
    assert float(table.rows[-1][4]) == 0  # as many programs as sizes, or so many that nothing is padded
