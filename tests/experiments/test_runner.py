import json
import math

import pytest

from paged_jax.config import EngineConfig
from paged_jax.engine.engine import Arrival
from paged_jax.experiments.config import experiment_from_dict
from paged_jax.experiments.lock import locked
from paged_jax.experiments.measurements import run_workload
from paged_jax.experiments.progress import RunProgress
from paged_jax.experiments.runner import run_experiment
from paged_jax.experiments.summary import to_frame
from paged_jax.experiments.trials import plan, replace_file
from paged_jax.sampling.params import SamplingParams


@pytest.fixture
def run(raw_experiment, make_fake_engine, tmp_path):
    """Runs the experiment, changed by keyword; without figures, which take most of the time."""
    report = {**raw_experiment["report"], "figures": {}}

    def run(make_engine=make_fake_engine, fresh=False, **changes):
        config = experiment_from_dict({**raw_experiment, "report": report, **changes})
        return run_experiment(config, tmp_path / "out", fresh=fresh, progress=False, make_engine=make_engine)

    return run


def lines(result_or_path):
    path = getattr(result_or_path, "directory", result_or_path)
    return [json.loads(line) for line in (path / "trials.jsonl").read_text().splitlines()]


def test_every_setting_runs_once_in_each_block_of_a_seed_and_a_repeat(raw_experiment):
    trials = plan(experiment_from_dict(raw_experiment))
    assert len({t.key for t in trials}) == len(trials) == 12
    blocks = [trials[i : i + 3] for i in range(0, 12, 3)]
    assert all(len({(t.seed, t.repeat) for t in block}) == 1 for block in blocks)
    assert all({t.setting.engine.block_size for t in block} == {4, 16, 64} for block in blocks)
    assert len({tuple(t.setting.engine.block_size for t in block) for block in blocks}) > 1
    assert [t.key for t in trials] == [t.key for t in plan(experiment_from_dict(raw_experiment))]


def test_a_run_writes_everything(run, raw_experiment):
    result = run(report=raw_experiment["report"])
    assert (result.new_trials, result.total_trials) == (12, 12)
    names = {str(p.relative_to(result.directory)) for p in result.directory.rglob("*") if p.is_file()}
    assert names == {
        "config.yaml", "environment.json", "trials.jsonl", "summary.csv", "summary.md", "summary.tex",
        "figures/throughput.png", "figures/throughput.pdf", "figures/memory.png", "figures/memory.pdf",
    }  # fmt: skip
    environment = json.loads((result.directory / "environment.json").read_text())["runs"][0]
    assert environment["versions"]["python"]
    assert environment["cpu"]["count"] >= 1
    assert [w["compilations"] for w in environment["warm_up"]] == [2, 2, 2]
    record = lines(result)[0]
    assert record["metrics"]["compilations"] == 0
    assert record["metrics"]["warmup_compilations"] == 2
    assert len({r["tokens_sha256"] for r in lines(result)}) == 2  # one for each seed
    # what is handed back is what the table holds
    csv = (result.directory / "summary.csv").read_text()
    assert to_frame(result.summaries).to_csv(index=False) == csv
    assert [s.setting.values["engine.block_size"] for s in result.summaries] == raw_experiment["sweep"][
        "engine.block_size"
    ]


def test_a_finished_run_only_rewrites_its_reports(run):
    first = run()
    before = lines(first)
    (first.directory / "summary.md").unlink()

    def never(config: EngineConfig):
        raise AssertionError("a complete experiment builds no engine")

    again = run(make_engine=never)
    assert again.new_trials == 0
    assert "complete already" in again.text
    assert lines(again) == before
    assert (first.directory / "summary.md").exists()


def test_a_killed_run_goes_on_with_the_missing_trials_only(run, tmp_path):
    everything = lines(run())
    path = tmp_path / "out" / "trials.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:7]) + whole[7][:40])  # the kill cut the eighth line off
    result = run()
    assert result.new_trials == 5
    assert [r["key"] for r in lines(result)] == [r["key"] for r in everything]
    assert lines(result)[:7] == everything[:7]
    runs = json.loads((tmp_path / "out" / "environment.json").read_text())["runs"]
    assert len(runs) == 2
    assert [r["run"] for r in lines(result)] == [0] * 7 + [1] * 5


@pytest.mark.parametrize("error", [RuntimeError("the machine caught fire"), KeyboardInterrupt()])
def test_an_exception_in_mid_run_keeps_the_finished_trials(run, make_fake_engine, tmp_path, error):
    steps = 0

    def failing(config):
        engine = make_fake_engine(config)
        step = engine.step

        def step_or_fail():
            nonlocal steps
            steps += 1
            if steps == 90:
                raise error
            return step()

        engine.step = step_or_fail
        return engine

    with pytest.raises(type(error)) as caught:
        run(make_engine=failing)
    kept = len(lines(tmp_path / "out"))
    assert 0 < kept < 12
    if isinstance(error, KeyboardInterrupt):
        assert f"stopped after {kept} of 12 trials" in str(caught.value)
        assert "run the same command again" in str(caught.value)
    result = run()
    assert result.new_trials == 12 - kept
    assert len(lines(result)) == 12


def test_results_of_another_configuration_are_never_mixed(run, tmp_path):
    run()
    with pytest.raises(ValueError, match=r"engine.max_num_seqs is 4 there and 2 here.*--fresh"):
        run(engine={"max_num_seqs": 2, "num_blocks": 64})
    assert len(lines(tmp_path / "out")) == 12
    (tmp_path / "out" / "mine.txt").write_text("notes")
    result = run(engine={"max_num_seqs": 2, "num_blocks": 64}, fresh=True)
    assert result.new_trials == 12
    assert (tmp_path / "out" / "mine.txt").exists()


def files_of(directory):
    return {p.relative_to(directory): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def small_for_large_blocks(make_fake_engine):
    def make(config):
        engine = make_fake_engine(config)
        engine.max_request_len = 0 if config.block_size == 64 else 256
        return engine

    return make


REFUSED = [
    ({"sweep": {"engine.victim_policy": ["last_arrived", "not_there:Policy"]},
      "report": {"y": ["wall_s"], "figures": {}}}, r"victim_policy 'not_there:Policy' cannot be loaded"),
    ({}, r"more than the whole KV pool holds \(0\).*\(setting block_size=64\)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_setting_that_cannot_work_is_refused_before_anything_is_written(
    run, make_fake_engine, tmp_path, changes, sentence, fresh
):
    out = tmp_path / "out"
    before = {}
    if fresh:
        run()
        before = files_of(out)
    with pytest.raises(ValueError, match=sentence):
        run(make_engine=small_for_large_blocks(make_fake_engine), fresh=fresh, **changes)
    assert files_of(out) == before
    assert out.exists() == fresh


def test_fresh_keeps_earlier_results_when_the_model_does_not_exist_or_memory_is_short(run, tmp_path, monkeypatch):
    run()
    before = files_of(tmp_path / "out")
    with pytest.raises(ValueError, match="no model 'tiny-lama'"):
        run(make_engine=None, fresh=True, model="tiny-lama")
    monkeypatch.setattr("paged_jax.experiments.timed_trials.available_memory", lambda: 1)
    engine = {"num_blocks": 64, "load_format": "dummy"}
    with pytest.raises(ValueError, match=r"the KV pages of 3 settings need 0\.\d GiB together.*engine.num_blocks"):
        run(make_engine=None, fresh=True, engine=engine)
    assert files_of(tmp_path / "out") == before


def test_a_second_run_in_the_same_directory_touches_nothing(run, tmp_path):
    out = tmp_path / "out"
    run()
    with (out / "trials.jsonl").open("a") as file:
        file.write('{"key": "half a line of the first run')
    before = files_of(out)
    with locked(out):
        during = files_of(out)
        for fresh in (False, True):
            with pytest.raises(ValueError, match=r"another run is writing to .*out: wait for it"):
                run(fresh=fresh)
        assert files_of(out) == during
    assert files_of(out) == before
    assert run().new_trials == 0


@pytest.mark.parametrize("damaged", ["", "- a\n", "seeds: [0\n", "\x00"])
def test_a_damaged_config_of_earlier_results_is_one_sentence(run, tmp_path, damaged):
    run()
    (tmp_path / "out" / "config.yaml").write_text(damaged)
    with pytest.raises(ValueError, match=r"holds 12 trials of .* \(its config.yaml is empty or damaged.*--fresh"):
        run(engine={"max_num_seqs": 2, "num_blocks": 64})


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    replace_file(path, "old")

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("paged_jax.experiments.trials.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, "new")
    assert path.read_text() == "old"


def test_results_of_other_code_are_said_to_be(run, monkeypatch):
    code = {"git_commit": "a" * 40, "git_changes": False, "git_diff": None}
    for module in ("environment", "runner"):
        monkeypatch.setattr(f"paged_jax.experiments.{module}.git_state", lambda: dict(code))
    assert "12 trials run;" in run().text
    assert "complete already, nothing to run;" in run().text
    code["git_diff"] = "0123"
    assert (
        "(NOTE: made by other code, commit aaaaaaaaaaaa, where this is commit aaaaaaaaaaaa with changes 0123: "
        "--fresh measures this code)"
    ) in run().text


def test_one_trial_is_not_1_trials(run):
    one = {"sweep": {}, "seeds": [0], "repeats": 1, "report": {"y": ["wall_s"]}}
    assert "tiny: 1 trial run;" in run(**one).text
    with pytest.raises(ValueError, match="holds 1 trial of a different configuration"):
        run(**{**one, "seeds": [1]})


def test_more_seeds_repeats_or_values_extend_an_experiment(run):
    run()
    assert run(seeds=[0, 1, 2]).new_trials == 6
    assert run(seeds=[0, 1, 2], repeats=3).new_trials == 9
    assert run(seeds=[0, 1, 2], repeats=3, sweep={"engine.block_size": [4, 16, 32, 64]}).new_trials == 9
    with pytest.raises(ValueError, match="repeats is 3 there and 1 here"):
        run(seeds=[0, 1, 2], repeats=1)


def test_results_without_a_metric_of_today_are_one_sentence(run):
    result = run()
    records = lines(result)
    del records[0]["metrics"]["sharing_saving"]
    (result.directory / "trials.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ValueError, match="an older version, which did not measure sharing_saving: run them again"):
        run()
    assert run(fresh=True).new_trials == 12


def test_a_broken_line_in_the_middle_is_named(run, tmp_path):
    run()
    path = tmp_path / "out" / "trials.jsonl"
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(ValueError, match=r"line 1 of .*trials.jsonl is not a trial"):
        run()


def test_a_workload_that_does_not_fit_the_model_is_refused_before_compiling(run, make_fake_engine, tmp_path):
    built = []

    def small(config):
        engine = make_fake_engine(config)
        engine.max_model_len = 10
        built.append(engine)
        return engine

    with pytest.raises(ValueError, match=r"more than max_model_len \(10\)"):
        run(make_engine=small)
    assert [e.executor.num_compilations for e in built] == [0]


def test_settings_that_differ_in_the_workload_share_an_engine(run, make_fake_engine):
    built = []

    def counting(config):
        built.append(config)
        return make_fake_engine(config)

    result = run(
        make_engine=counting,
        sweep={"workload.request_rate": [1.0, 2.0]},
        report={"y": ["wall_s"], "figures": {}},
    )
    assert len(built) == 1
    assert result.new_trials == 8


def test_whichever_trial_comes_first_nothing_is_compiled_inside_a_trial(run, raw_experiment):
    """Samples share blocks that are copied; settings of one engine differ in whether there are any."""
    firsts = []
    for counts in ([3, 1], [1, 3]):
        changes = {"sweep": {"workload.n": counts}, "report": {"y": ["wall_s"], "figures": {}}}
        firsts.append(plan(experiment_from_dict({**raw_experiment, **changes}))[0].setting.workload.n)
        result = run(fresh=True, **changes)
        assert [record["metrics"]["compilations"] for record in lines(result)] == [0] * 8
    assert sorted(firsts) == [1, 3]


def test_a_compilation_inside_a_trial_is_reported(run, make_fake_engine):
    def recompiling(config):
        engine = make_fake_engine(config)
        step = engine.step

        def step_and_compile():
            engine.executor.num_compilations += 1
            return step()

        engine.step = step_and_compile
        return engine

    assert "compiled inside timed trials" in run(make_engine=recompiling).text


def test_steps_that_compute_nothing_are_not_counted(make_fake_engine):
    engine = make_fake_engine(EngineConfig(max_num_seqs=4))
    step, calls = engine.step, []

    def every_other_one():
        calls.append(None)
        return step() if len(calls) % 2 else []

    engine.step = every_other_one
    _, steps, _ = run_workload(engine, [Arrival(0.0, "a", (1, 2), SamplingParams(max_tokens=5))])
    assert len(calls) == 9
    assert len(steps) == len(set(steps["start_time"])) == 5


def test_the_estimate_weighs_warm_ups_and_trials(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("paged_jax.experiments.progress.time.perf_counter", lambda: now[0])
    with RunProgress(2, 4, show=False) as bar:
        assert bar.seconds_left() is None
        for kind, seconds in (("warm-up", 30), ("trial", 4), ("trial", 6)):
            bar.begin(kind)
            now[0] += seconds
            bar.end(kind)
        assert math.isclose(bar.seconds_left(), 1 * 30 + 2 * 5)
