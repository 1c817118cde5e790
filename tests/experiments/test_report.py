import csv
import json
import math

import pytest

from paged_jax.experiments.config import experiment_from_dict
from paged_jax.experiments.report import make_notes, make_tables, write_reports
from paged_jax.experiments.statistics import Estimate
from paged_jax.experiments.summary import summarise
from paged_jax.experiments.tables import Table, number, with_interval
from paged_jax.experiments.trials import plan


def records_of(config, value):
    """Made-up trials: `value(block_size, seed, repeat)` is every metric, and tokens depend on the seed."""
    from paged_jax.experiments.metrics import METRICS

    return [
        {
            "key": t.key,
            "run": 1,
            "tokens_sha256": f"tokens of {t.seed}",
            "metrics": dict.fromkeys(METRICS, value(t.setting.engine.block_size, t.seed, t.repeat))
            | {"compilations": 0, "truncated_requests": 0},
        }
        for t in plan(config)
    ]


@pytest.fixture
def config(raw_experiment):
    return experiment_from_dict({**raw_experiment, "seeds": [0, 1, 2]})


@pytest.fixture
def records(config):
    return records_of(config, lambda size, seed, repeat: 100 * (seed + 1) + size + (seed if size == 64 else 0) + repeat)


def test_summary_by_hand(config, records):
    small, base, large = summarise(config, records)
    m = small.metrics["wall_s"]
    # means of repeats: 104.5, 204.5, 304.5
    assert m.estimate.mean == pytest.approx(204.5)
    assert m.estimate.half_width == pytest.approx(4.3027 * 100 / math.sqrt(3), rel=1e-4)
    assert m.noise == pytest.approx(math.sqrt(0.5))
    assert m.variation == pytest.approx(math.sqrt(100**2 - 0.5 / 2))
    assert (m.difference.mean, m.difference.half_width) == (pytest.approx(-12), pytest.approx(0, abs=1e-9))
    assert base.metrics["wall_s"].difference is None
    # differences 48, 49, 50
    d = large.metrics["wall_s"].difference
    assert (d.mean, d.half_width) == (pytest.approx(49), pytest.approx(4.3027 / math.sqrt(3), rel=1e-4))


def test_a_baseline_is_taken_within_each_series(raw_experiment):
    raw_experiment["sweep"]["workload.request_rate"] = [1.0, 2.0]
    config = experiment_from_dict(raw_experiment)
    summaries = summarise(config, records_of(config, lambda size, seed, repeat: float(size)))
    differences = [s.metrics["wall_s"].difference for s in summaries]
    assert [d and d.mean for d in differences] == [-12, -12, None, None, 48, 48]


def test_tables_line_up_in_every_form(config, records, tmp_path):
    text = write_reports(config, records, tmp_path)
    means, differences, noise = make_tables(config, summarise(config, records))
    assert [row[0] for row in means.rows] == ["4", "16", "64"]
    assert [row[0] for row in differences.rows] == ["4", "64"]
    assert all("/" in cell for row in noise.rows for cell in row[1:])
    for table in (means, differences, noise):
        assert len({len(line) for line in table.terminal().splitlines()[2:]}) == 1
        assert table.terminal() in text
    blocks = (tmp_path / "summary.md").read_text().split("\n\n")
    pipes = [b.splitlines() for b in blocks if b.startswith("|")]
    assert len(pipes) == 3
    assert all(len({len(line) for line in block}) == 1 for block in pipes)
    assert all(len({line.count("|") for line in block}) == 1 for block in pipes)
    latex = (tmp_path / "summary.tex").read_text()
    assert latex.count(r"\toprule") == latex.count(r"\bottomrule") == 3
    assert r"block\_size" in latex
    assert "±" not in latex
    rows = list(csv.DictReader((tmp_path / "summary.csv").read_text().splitlines()))
    assert {r["metric"] for r in rows} >= {"wall_s", "queue_time_s_p99", "padding_fraction"}
    row = next(r for r in rows if r["engine.block_size"] == "64" and r["metric"] == "wall_s")
    assert float(row["difference"]) == pytest.approx(49)
    assert float(row["difference_relative"]) == pytest.approx(49 / 216.5)


def test_one_seed_and_one_repeat_show_no_intervals(raw_experiment, tmp_path):
    config = experiment_from_dict({**raw_experiment, "seeds": [0], "repeats": 1})
    text = write_reports(config, records_of(config, lambda size, seed, repeat: float(size)), tmp_path)
    assert "one seed: no intervals" in text
    assert "±" not in text
    assert "n/a / n/a" in text


def test_nothing_swept_is_a_table_without_figures(raw_experiment, tmp_path):
    report = {"y": ["wall_s"]}
    config = experiment_from_dict({**raw_experiment, "sweep": {}, "report": report})
    write_reports(config, records_of(config, lambda size, seed, repeat: 1.0), tmp_path)
    assert not (tmp_path / "figures").exists()


def test_a_figure_that_fails_leaves_the_numbers(config, records, tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("no fonts")

    monkeypatch.setattr("paged_jax.experiments.report.write_figures", fail)
    with pytest.raises(RuntimeError, match="no fonts"):
        write_reports(config, records, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"summary.csv", "summary.md", "summary.tex"}
    assert "![memory](figures/memory.png)" in (tmp_path / "summary.md").read_text()


def test_notes_say_when_tokens_differ_or_requests_end_early(config, records):
    notes = make_notes(config, records, [])
    assert notes[0].startswith("Every setting generated identical tokens")
    records[0]["tokens_sha256"] = "others"
    records[1]["metrics"]["truncated_requests"] = 3
    notes = make_notes(config, records, [])
    assert notes[0].startswith("WARNING: generated tokens differ between trials of one workload for 1 of 3 seeds")
    assert any("3 requests ended before their length" in note for note in notes)


ALL = "Every setting generated identical tokens on each workload"


@pytest.mark.parametrize(
    ("sweep", "repeats", "note"),
    [
        ({"engine.block_size": [4, 16]}, 2, f"{ALL}, in every repeat."),
        ({"engine.block_size": [4, 16]}, 1, f"{ALL}."),
        ({"workload.request_rate": [1.0, 2.0], "engine.block_size": [4, 16]}, 1, f"{ALL}."),
        ({"zip": [{"engine.block_size": [4, 8, 16], "workload.request_rate": [1.0, 2.0, 2.0]}]}, 2,
         "Settings that share a workload generated identical tokens on it, in every repeat."),
        ({"workload.request_rate": [1.0, 2.0]}, 2, "Every repeat of a trial generated identical tokens."),
        ({"workload.request_rate": [1.0, 2.0]}, 1, None),
        ({}, 2, "Every repeat of a trial generated identical tokens."),
        ({}, 1, None),
    ],
)  # fmt: skip
def test_tokens_are_said_to_be_the_same_where_they_were_compared(raw_experiment, sweep, repeats, note):
    report = {"y": ["wall_s"]}
    config = experiment_from_dict({**raw_experiment, "sweep": sweep, "repeats": repeats, "report": report})
    notes = make_notes(config, records_of(config, lambda size, seed, repeat: 1.0), [])
    assert [n for n in notes if "tokens" in n] == ([] if note is None else [note])


def test_notes_say_when_runs_are_not_comparable(config, records):
    run = {"git_commit": "a", "versions": {}, "platform": "", "device": {}, "cpu": {}, "warm_up": []}
    assert len(make_notes(config, records, [run, run])) == 2
    assert "differ in git_commit" in make_notes(config, records, [run, {**run, "git_commit": "b"}])[-1]
    assert "differ in git_diff" in make_notes(config, records, [run, {**run, "git_diff": "b"}])[-1]


def test_runs_that_made_no_trial_are_not_spoken_of(config, records, tmp_path):
    def described(commit, seconds):
        return {
            "git_commit": commit,
            "git_changes": False,
            "versions": {"jax": "1"},
            "device": {"kind": "cpu"},
            "cpu": {"model": "m", "count": 2},
            "warm_up": [{"compilations": 3, "compile_s": seconds}],
        }

    runs = [described("first", 100.0), described("second", 1.5), described("third", 100.0)]
    (tmp_path / "environment.json").write_text(json.dumps({"runs": runs}))
    text = write_reports(config, records, tmp_path)
    assert "differ in" not in text
    assert "3 programs were compiled in 1.5 s" in text
    assert "commit second" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [(147.2641, 2.13, "147.3 ± 2.1"), (1234.5, 96.0, "1234 ± 96"), (0.012345, 0.00067, "0.01235 ± 0.00067"),
     (12.0, 0.0, "12 ± 0"), (3.14159, math.nan, "3.142"), (math.nan, math.nan, "n/a"), (5.0, 1e-15, "5 ± 0"),
     (0.0, 0.0, "0 ± 0")],
)  # fmt: skip
def test_numbers_have_the_digits_that_their_interval_allows(value, half, text):
    assert with_interval(Estimate(value, half), 1.0) == text


def test_signs_and_special_characters():
    assert with_interval(Estimate(0.5, 0.1), 100.0, signed=True) == "+50 ± 10"
    assert number(0.0) == "0"
    latex = Table("50 % of a_b", ("x",), ("",), (("-1.5 ± 0.2",), ("a & b",))).latex()
    assert r"50 \% of a\_b" in latex
    assert r"$-$1.5 $\pm$ 0.2" in latex
    assert r"a \& b" in latex
