"""Results on the same axes: their lines, names and notes, and what is refused."""

import json
from pathlib import Path

import matplotlib
import pytest

from paged_jax.cli import main
from paged_jax.experiments.config import experiment_from_dict
from paged_jax.experiments.metrics import METRICS
from paged_jax.experiments.overlay import comparability_notes, draw_overlay, name_results, overlay, read_result
from paged_jax.experiments.plots import MAX_LINES, STYLE
from paged_jax.experiments.trials import TrialLog, plan, write_config

RUN = {"git_commit": "abc", "git_diff": None, "versions": {}, "platform": "p", "device": {"kind": "cpu"}, "cpu": {}}


@pytest.fixture
def result(raw_experiment, tmp_path):
    """Writes the results of the experiment, changed by keyword: every metric is the block size plus `add`."""

    def result(directory, *, add=0.0, run=RUN, keep=None, **changes):
        config = experiment_from_dict({**raw_experiment, **changes})
        path = tmp_path / directory
        path.mkdir(parents=True)
        write_config(config, path / "config.yaml")
        for trial in plan(config)[:keep]:
            metrics = dict.fromkeys(METRICS, trial.setting.engine.block_size + add)
            TrialLog(path).append({"key": trial.key, "run": 0, "metrics": metrics})
        (path / "environment.json").write_text(json.dumps({"runs": [run]}))
        return path

    return result


def lines(figure):
    """Label to points of every line."""
    return {c.get_label(): list(map(tuple, c.lines[0].get_xydata())) for c in figure.axes[0].containers}


def draw(paths, metric="wall_s", x="engine.block_size"):
    results = [read_result(path) for path in paths]
    with matplotlib.rc_context(STYLE):
        return draw_overlay(results, name_results(results), metric, x)


def test_each_result_is_a_line_over_the_shared_axis(result):
    figure = draw([result("one", name="one"), result("two", name="two", add=1.0)])
    assert lines(figure) == {
        "one": [(4, 4), (16, 16), (64, 64)],
        "two": [(4, 5), (16, 17), (64, 65)],
    }
    ax = figure.axes[0]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("block size (tokens)", "wall time (s)")
    first, second = (container.lines[0] for container in ax.containers)
    assert first.get_linestyle() != second.get_linestyle()
    assert first.get_marker() != second.get_marker()
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["one", "two"]


def test_values_of_x_may_differ_and_are_drawn_in_ascending_order(result):
    report = {"x": "engine.block_size", "y": ["wall_s"]}
    one = result("one", name="one", sweep={"engine.block_size": [64, 8]}, report=report)
    two = result("two", name="two", sweep={"engine.block_size": [16, 4]}, report=report)
    figure = draw([one, two])
    assert lines(figure) == {"one": [(8, 8), (64, 64)], "two": [(4, 4), (16, 16)]}
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["4", "8", "16", "64"]


def test_series_of_a_result_are_named_too(result):
    sweep = {"engine.block_size": [4, 16], "engine.watermark": [0.0, 0.1]}
    report = {"x": "engine.block_size", "y": ["wall_s"]}
    paths = [result("one", name="one"), result("two", name="two", sweep=sweep, report=report)]
    assert list(lines(draw(paths))) == ["one", "two, watermark=0.0", "two, watermark=0.1"]
    assert list(lines(draw(paths[1:]))) == ["watermark=0.0", "watermark=0.1"]
    assert list(lines(draw(paths[1:], x="engine.watermark"))) == ["block_size=4", "block_size=16"]


def test_results_of_one_name_are_told_apart_by_what_differs(result):
    engine = {"max_num_seqs": 4, "num_blocks": 64}
    paths = [result("a"), result("b", engine={**engine, "max_num_seqs": 8})]
    assert name_results([read_result(p) for p in paths]) == ["max_num_seqs=4", "max_num_seqs=8"]
    unset = [*paths, result("c", engine={**engine, "swap_space": 10**6, "preemption_mode": "swap"})]
    names = name_results([read_result(p) for p in unset])
    assert names[0] == "max_num_seqs=4, preemption_mode=recompute, swap_space=unset"
    twice = [paths[0], result("d", repeats=1)]
    assert name_results([read_result(p) for p in twice]) == [str(p) for p in twice]


def test_long_names_are_wrapped_inside_of_the_figure(result, recwarn):
    paths = [result(f"{c * 30}/{c * 30}", name=f"{c * 30}-{c * 30} and more".replace(" ", "_")) for c in "ab"]
    figure = draw([*paths, result("short", name="short")])
    texts = figure.axes[0].get_legend().get_texts()
    assert max(len(line) for text in texts for line in text.get_text().splitlines()) <= 42
    with matplotlib.rc_context(STYLE):
        figure.draw_without_rendering()
    box = figure.axes[0].get_legend().get_window_extent()
    assert (box.x0 >= 0, box.x1 <= figure.bbox.width, box.y1 <= figure.bbox.height) == (True, True, True)
    assert not recwarn.list


def test_metrics_are_by_default_those_that_all_reports_show(result, tmp_path):
    one = result("one", name="one", report={"y": ["wall_s", "steps", "ttft_s_p50"]})
    two = result("two", name="two", report={"y": ["ttft_s_p50", "wall_s"]})
    drawn = overlay([one, two], tmp_path / "out")
    assert [f.name for f in drawn.files] == ["wall_s.png", "wall_s.pdf", "ttft_s_p50.png", "ttft_s_p50.pdf"]
    for file in drawn.files:
        assert file.read_bytes().startswith(b"\x89PNG" if file.suffix == ".png" else b"%PDF")
    assert drawn.notes == ()
    chosen = overlay([one, two], tmp_path / "chosen", metrics=["steps", "steps"])
    assert [f.name for f in chosen.files] == ["steps.png", "steps.pdf"]


def test_runs_that_are_not_comparable_are_noted(result):
    one = read_result(result("one"))
    other_code = read_result(result("two", run={**RUN, "git_commit": "def", "device": {"kind": "gpu"}}))
    (note,) = comparability_notes([one, other_code])
    assert "differ in git_commit, device (environment.json)" in note
    assert comparability_notes([one, one]) == []
    (note,) = comparability_notes([one, read_result(result("three", seeds=[0]))])
    assert "different seeds, [0, 1] against [0]" in note


def test_simulated_results_depend_on_the_code_alone(result):
    simulated = {"executor": "simulated", "hardware": "a100-40gb", "model": "opt-13b", "repeats": 1}
    one = read_result(result("one", **simulated))
    elsewhere = {**RUN, "cpu": {"model": "another"}}
    assert comparability_notes([one, read_result(result("two", run=elsewhere, **simulated))]) == []
    (note,) = comparability_notes([one, read_result(result("three", run={**RUN, "git_diff": "x"}, **simulated))])
    assert "differ in git_diff" in note
    (note,) = comparability_notes([one, read_result(result("four"))])
    assert "some of the results are measured and others simulated" in note


def test_directories_that_hold_no_results_are_one_sentence(result, tmp_path):
    one = result("one")

    def refused(sentence, *paths, **more):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 the sentence is compared
            overlay(paths, tmp_path / "out", **more)
        assert sentence in str(caught.value)
        assert not (tmp_path / "out").exists()

    refused(f"{one} is named twice", one, one)
    refused("nowhere holds no results, there is no config.yaml: name what", one, tmp_path / "nowhere")
    part = result("part", keep=5)
    refused(f"{part} holds 5 of 12 trials: run tiny again to finish it", one, part)
    refused("does not sweep 'engine.block_siz'; did you mean 'engine.block_size'?", one, x="engine.block_siz")
    refused("there is no metric 'wal_s'; did you mean 'wall_s'?", one, metrics=["wal_s"])
    still = result("still", sweep={}, report={"y": ["wall_s"]})
    refused(f"{still} sweeps nothing, so it has no axis to draw over", one, still)
    rates = {"x": "workload.request_rate", "y": ["wall_s"]}
    other = result("other", sweep={"workload.request_rate": [1.0, 2.0]}, report=rates)
    refused(f"{one} is drawn over engine.block_size and {other} over workload.request_rate: choose", one, other)
    refused(f"{other} does not sweep 'engine.block_size'", one, other, x="engine.block_size")
    steps = result("steps", report={"y": ["steps"]})
    refused("the reports of these results share no metric: choose one with --metric", one, steps)
    changed = result("changed")
    text = (changed / "config.yaml").read_text()
    (changed / "config.yaml").write_text(text.replace("max_num_seqs: 4", "max_num_seqs: 3"))
    refused(f"{changed} holds trials that are not of its config.yaml", changed)
    (changed / "config.yaml").write_text(text.replace("max_num_seqs", "max_seqs"))
    refused("config.yaml cannot be read by this version: unknown key 'engine.max_seqs'", changed)
    old = result("old")
    (old / "trials.jsonl").write_text((old / "trials.jsonl").read_text().replace('"steps"', '"stepz"'))
    refused(f"{old} holds no steps, so another version made it", old)


def test_more_lines_than_can_be_told_apart_are_refused(result):
    sweep = {"engine.block_size": [4, 16], "engine.watermark": [i / 100 for i in range(MAX_LINES + 1)]}
    path = result("many", sweep=sweep, report={"x": "engine.block_size", "y": ["wall_s"]}, seeds=[0], repeats=1)
    with pytest.raises(ValueError, match=f"{MAX_LINES + 1} lines cannot be told apart"):
        draw([path])
    sweep["engine.watermark"] = sweep["engine.watermark"][1:]
    path = result("fewer", sweep=sweep, report={"x": "engine.block_size", "y": ["wall_s"]}, seeds=[0], repeats=1)
    looks = {
        (c.lines[0].get_marker(), c.lines[0].get_linestyle(), c.lines[0].get_markerfacecolor() == "white")
        for c in draw([path]).axes[0].containers
    }
    assert len(looks) == MAX_LINES


def test_the_command_draws_and_names_the_files(result, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result("one", name="one")
    result("two", name="two", seeds=[1])
    with pytest.raises(SystemExit) as ended:
        main(["plot", "one", "two", "--metric", "wall_s", "--metric", "steps", "--x", "engine.block_size"])
    assert ended.value.code == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("* WARNING: the results have different seeds")
    assert out[1:] == [f"results/overlay/{m}.{s}" for m in ("wall_s", "steps") for s in ("png", "pdf")]
    assert all(Path(name).is_file() for name in out[1:])
