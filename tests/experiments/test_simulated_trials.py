"""Experiments in virtual time: the same to the last digit, whoever runs them and in how many processes."""

import copy
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paged_jax.engine.policies.fcfs import FCFSQueue
from paged_jax.experiments.config import experiment_from_dict, load_experiment, settings
from paged_jax.experiments.lock import locked
from paged_jax.experiments.metrics import METRICS
from paged_jax.experiments.run_log import RunLog
from paged_jax.experiments.runner import run_experiment
from paged_jax.experiments.simulated_trials import run_simulated
from paged_jax.experiments.trials import TrialLog, plan

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = {"mean": 40, "sigma": 0.7, "max": 120}
RAW: dict[str, Any] = {
    "name": "simulated",
    "model": "opt-13b",
    "executor": "simulated",
    "hardware": "a100-40gb",
    "engine": {"max_num_seqs": 8, "num_blocks": 40, "max_model_len": 256, "max_logprobs": 0},
    "workload": {"kind": "lognormal", "num_requests": 12, "request_rate": 4.0, "prompt": LENGTHS, "output": LENGTHS},
    "sweep": {"engine.block_size": [8, 16], "engine.preemption_mode": ["recompute", "swap"]},
    "seeds": [0, 1],
    "report": {"x": "engine.block_size", "y": ["output_tokens_per_s", "preemptions", "swap_s"], "figures": {}},
}


ABSENT = object()


def changed(**values: Any) -> dict[str, Any]:
    raw = {**copy.deepcopy(RAW), **values}
    return {key: value for key, value in raw.items() if value is not ABSENT}


def lines(directory: Path) -> bytes:
    return (directory / "trials.jsonl").read_bytes()


def test_two_runs_give_the_same_bytes_in_one_process_or_in_two(tmp_path: Path) -> None:
    config = experiment_from_dict(RAW)
    run_experiment(config, tmp_path / "whole", progress=False)
    directory = tmp_path / "alone"
    with locked(directory):
        run_simulated(config, plan(config), TrialLog(directory), RunLog(directory, fresh=False), progress=False, jobs=1)
    assert lines(directory) == lines(tmp_path / "whole")
    records = [json.loads(line) for line in lines(directory).splitlines()]
    assert len(records) == 8
    assert all(set(record["metrics"]) == set(METRICS) for record in records)
    assert any(record["metrics"]["preemptions"] for record in records)
    assert any(record["metrics"]["swap_s"] for record in records)


def test_trials_do_not_depend_on_those_before_them(tmp_path: Path) -> None:
    config = experiment_from_dict(RAW)
    run_experiment(config, tmp_path / "whole", progress=False)
    first = lines(tmp_path / "whole").splitlines(keepends=True)
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    (resumed / "trials.jsonl").write_bytes(b"".join(first[:3]))
    again = run_experiment(config, resumed, progress=False)
    assert again.new_trials == 5
    assert lines(resumed) == b"".join(first)


def test_the_report_says_that_it_is_simulated(tmp_path: Path) -> None:
    result = run_experiment(experiment_from_dict(RAW), tmp_path / "out", progress=False)
    assert "a step takes what the cost model of a100-40gb says" in result.text
    assert "compiled" not in result.text
    assert "noise" not in result.text
    environment = json.loads((result.directory / "environment.json").read_text())["runs"][0]
    assert environment["device"] == {"platform": "simulated", "kind": "a100-40gb"}
    assert "`opt-13b`: 4 settings x 2 seeds (workloads), simulated." in (result.directory / "summary.md").read_text()
    reread = load_experiment(result.directory / "config.yaml")
    assert [t.key for t in plan(reread)] == [t.key for t in plan(experiment_from_dict(RAW))]


def test_models_and_devices_can_be_swept(tmp_path: Path) -> None:
    raw = changed(sweep={"model": ["opt-13b", "llama-2-7b"], "hardware": ["a100-80gb", "h200"]})
    del raw["model"], raw["hardware"]
    raw["report"] = {**raw["report"], "x": "hardware"}
    config = experiment_from_dict(raw)
    points = settings(config)
    assert [(p.model, p.hardware) for p in points] == [
        ("opt-13b", "a100-80gb"),
        ("opt-13b", "h200"),
        ("llama-2-7b", "a100-80gb"),
        ("llama-2-7b", "h200"),
    ]
    run_experiment(config, tmp_path / "out", progress=False)
    records = [json.loads(line) for line in lines(tmp_path / "out").splitlines()]
    by_point = {tuple(r["setting"].values()): r["metrics"] for r in records if r["seed"] == 0}
    assert {m["kv_bytes_per_token"] for (model, _), m in by_point.items() if model == "opt-13b"} == {819_200}
    assert {m["kv_bytes_per_token"] for (model, _), m in by_point.items() if model == "llama-2-7b"} == {524_288}
    assert by_point["opt-13b", "h200"]["gemm_s"] < by_point["opt-13b", "a100-80gb"]["gemm_s"]


def test_a_policy_that_was_changed_is_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "mended_policy.py"
    monkeypatch.syspath_prepend(tmp_path)
    raw = changed(sweep={"engine.block_size": [8, 16]})
    raw["engine"] = {**raw["engine"], "victim_policy": "mended_policy:Mine"}

    def preempts(chooses: str) -> list[int]:
        module.write_text(
            "from paged_jax.engine.policies import VictimPolicy\n\nclass Mine(VictimPolicy):\n"
            f"    def choose(self, running):\n        return {chooses}(running, key=lambda r: len(r.token_ids))\n"
        )
        importlib.reload(importlib.import_module("mended_policy"))
        run_experiment(experiment_from_dict(raw), tmp_path / "out", progress=False, fresh=True)
        return [json.loads(line)["metrics"]["computed_tokens"] for line in lines(tmp_path / "out").splitlines()]

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert preempts("max") != preempts("min")
    module.write_text(module.read_text() + "# changed\n")
    with pytest.raises(ValueError, match="the file of a trace, a policy or a hardware has changed"):
        run_experiment(experiment_from_dict(raw), tmp_path / "out", progress=False)


def test_workers_read_the_files_of_the_directory_that_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for folder, rows in (("one", 5), ("two", 9)):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        Path("t.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "20,10\n" * rows)
        workload = {"kind": "trace", "format": "lengths", "file": "t.csv", "request_rate": 2.0}
        run_experiment(experiment_from_dict(changed(workload=workload)), "out", progress=False)
        counts.append({json.loads(line)["metrics"]["finished_requests"] for line in lines(Path("out")).splitlines()})
    assert counts == [{5}, {9}]


class LastIn(FCFSQueue):
    """A policy that other processes find by its module only."""


def test_policies_of_ones_own_run_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_policy.py").write_text(
        "from paged_jax.engine.policies.fcfs import FCFSQueue\n\nclass Mine(FCFSQueue):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    raw = changed(sweep={"engine.scheduling_policy": ["fcfs", "my_policy:Mine"]})
    raw["report"] = {**raw["report"], "x": "engine.scheduling_policy"}
    run_experiment(experiment_from_dict(raw), tmp_path / "out", progress=False)
    records = [json.loads(line) for line in lines(tmp_path / "out").splitlines()]
    assert len({json.dumps(r["metrics"]) for r in records if r["seed"] == 0}) == 1


def test_a_policy_of_the_running_program_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "LastIn", LastIn, raising=False)
    raw = changed(sweep={"engine.scheduling_policy": ["fcfs", "__main__:LastIn"]})
    raw["report"] = {**raw["report"], "x": "engine.scheduling_policy"}
    result = run_experiment(experiment_from_dict(raw), tmp_path / "out", progress=False)
    assert result.new_trials == 4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hardware": None}, "executor 'simulated' needs hardware"),
        ({"hardware": "a1000"}, "no hardware 'a1000' in the catalogue"),
        ({"repeats": 2}, r"repeats \(2\) of a simulated trial are all the same"),
        ({"model": "opt-13"}, "no model 'opt-13'"),
        ({"executor": "jax"}, r"hardware \(a100-40gb\) has no effect with executor 'jax'"),
        ({"engine": {"load_format": "dummy"}}, "load_format has no effect on a simulated device"),
        ({"engine": {"num_blocks": 4, "max_logprobs": 0}}, r"more than the whole KV pool holds.*\(setting block_size="),
        (
            {"executor": "jax", "hardware": None, "engine": {"enforce_eager": True}},
            "enforce_eager is for the simulated",
        ),
        (
            {"executor": "jax", "hardware": None, "sweep": {"model": ["a", "b"]}},
            "both set and swept|only keys of engine",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        run_experiment(experiment_from_dict(changed(**changes)), tmp_path / "out", progress=False)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_azure_conversation_trace_or_its_stand_in_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where ../shared is not
    config = load_experiment(ROOT / "configs" / "azure_conversation.yaml", ["workload.stand_in.num_requests=30"])
    result = run_experiment(config, tmp_path / "out", progress=False)
    (record,) = [json.loads(line) for line in lines(result.directory).splitlines()]
    assert record["metrics"]["finished_requests"] == 30
    assert "stand" in result.text
