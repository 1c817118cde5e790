import json
import math

import pytest

from paged_jax.config import EngineConfig
from paged_jax.experiments.config import experiment_from_dict
from paged_jax.experiments.progress import RunProgress
from paged_jax.experiments.runner import check_memory, run_experiment
from paged_jax.experiments.trials import plan


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


def test_more_seeds_repeats_or_values_extend_an_experiment(run):
    run()
    assert run(seeds=[0, 1, 2]).new_trials == 6
    assert run(seeds=[0, 1, 2], repeats=3).new_trials == 9
    assert run(seeds=[0, 1, 2], repeats=3, sweep={"engine.block_size": [4, 16, 32, 64]}).new_trials == 9
    with pytest.raises(ValueError, match="repeats is 3 there and 1 here"):
        run(seeds=[0, 1, 2], repeats=1)


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


def test_memory_of_all_engines_together_is_checked():
    sized = [EngineConfig(block_size=b, kv_cache_memory=2**30) for b in (8, 16)]
    check_memory(sized, "cpu", 4 * 2**30)
    check_memory(sized, "cpu", None)
    with pytest.raises(ValueError, match=r"need 2.0 GiB together, and 1.0 GiB of memory are free"):
        check_memory(sized, "cpu", 2**30)
    with pytest.raises(ValueError, match=r"set engine.num_blocks"):
        check_memory([EngineConfig(block_size=b) for b in (8, 16)], "gpu", None)
    check_memory([EngineConfig(block_size=b, num_blocks=9) for b in (8, 16)], "gpu", None)
    check_memory([EngineConfig()], "gpu", None)


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
