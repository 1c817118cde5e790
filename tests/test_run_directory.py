"""`paged-jax run DIR`, end to end on a simulated device: order, refusals, failures, and what is shown at the end."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import paged_jax.experiments.run_directory as run_directory_module
from paged_jax.cli import main

type Run = Callable[..., tuple[int, str, str]]
type Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Adds an experiment of one trial to the directory."""
    directory = tmp_path / "experiments"
    directory.mkdir()

    def write(file: str, **changes: object) -> Path:
        lengths = {"value": 12}
        raw = {
            "name": Path(file).stem,
            "model": "opt-13b",
            "executor": "simulated",
            "hardware": "a100-40gb",
            "engine": {"max_num_seqs": 4, "num_blocks": 64},
            "workload": {
                "kind": "uniform",
                "num_requests": 3,
                "prompt": {"law": "constant", **lengths},
                "output": {"law": "constant", **lengths},
            },
            "seeds": [0],
            "report": {"y": ["steps"]},
            **changes,
        }
        YAML().dump(raw, directory / file)
        return directory

    return write


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["run", "experiments", *arguments])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def published(value: float, **more: object) -> dict[str, object]:
    rows = [{"name": "finished", "metric": "finished_requests", "value": value}]
    return {"source": "Somebody", "rows": rows, **more}


def claim(*expected: float) -> dict[str, object]:
    rows = [{"name": f"r{i}", "metric": "finished_requests", "expect": e} for i, e in enumerate(expected)]
    return {"statement": "Three finish.", "rows": rows}


def test_every_file_runs_in_the_order_of_names_and_all_comparisons_come_last(run: Run, write: Write) -> None:
    write("b.yaml", published=claim(3, 4))
    write("c.yaml")
    directory = write("a.yaml", published=published(4))
    (directory / "notes.txt").write_text("not an experiment")
    status, out, err = run("--output-dir", "out")
    assert status == 0, err
    assert {p.name for p in Path("out").iterdir() if p.is_dir()} == {"a", "b", "c"}
    places = [err.index(f"[{k}/3] experiments/{name}.yaml") for k, name in enumerate("abc", start=1)]
    assert places == sorted(places)
    assert out.index("a: 1 trial run") < out.index("b: 1 trial run") < out.index("c: 1 trial run")
    end = out.partition("all experiments: ours against what was published or claimed")[2]
    assert out.index("c: 1 trial run") < out.index(end)
    lines = [line.split() for line in end.splitlines()]
    assert ["a", "finished", "4", "3", "-25.0", "%"] in lines
    assert ["b", "r0", "3", "3", "0", "yes"] in lines
    assert ["b", "r1", "4", "3", "-25.0", "%", "no"] in lines
    assert "* b: holds in part (1 of 2 rows). Three finish." in end
    assert "complete already" in run("--output-dir", "out")[1]


def test_results_are_under_the_names_of_the_experiments(run: Run, write: Write) -> None:
    write("a.yaml", name="other")
    status, out, _ = run()
    assert status == 0
    assert (Path("results") / "other" / "trials.jsonl").exists()
    assert "all experiments" not in out  # nothing was published


def test_a_file_that_fails_is_told_and_the_others_run(run: Run, write: Write) -> None:
    write("a.yaml", published=published(3))
    write("b.yaml", engine={"max_num_seqs": 4, "num_blocks": 1})  # 24 tokens in one block of 16
    write("c.yaml", published=published(3))
    status, out, err = run()
    assert status == 1
    assert "paged-jax: error: experiments/b.yaml: " in err
    assert err.splitlines()[-1] == "paged-jax: error: 1 of 3 experiments failed: experiments/b.yaml"
    assert "Traceback" not in err
    assert [p.name for p in sorted(Path("results").iterdir()) if (p / "trials.jsonl").exists()] == ["a", "c"]
    assert out.rstrip().splitlines()[-1].split() == ["c", "finished", "3", "3", "0"]


def test_debug_raises_the_error_of_a_file(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("b.yaml", engine={"max_num_seqs": 4, "num_blocks": 1})
    with pytest.raises(ValueError, match="block"):
        main(["run", "experiments", "--debug"])


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"a.yaml": {}, "b.yaml": {"report": {"y": ["stepz"]}}},
         "experiments/b.yaml: report.y names an unknown metric 'stepz'; did you mean 'steps'?"),
        ({"a.yaml": {"seed": 1}, "b.yaml": {"report": {"y": ["stepz"]}}}, "experiments/a.yaml: unknown key 'seed'"),
        ({"a.yaml": {"name": "x"}, "b.yaml": {"name": "x"}},
         "experiments/a.yaml and experiments/b.yaml both have the name 'x', and so the same results: rename one"),
        ({}, "there is no *.yaml file in experiments: name an experiment file or a directory of them"),
    ],
)  # fmt: skip
def test_all_files_are_checked_before_anything_runs(
    run: Run, write: Write, tmp_path: Path, files: dict[str, dict[str, object]], sentence: str
) -> None:
    for file, changes in files.items():
        write(file, **changes)
    status, out, err = run()
    assert (status, out) == (1, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_overrides_are_for_all_files_and_must_exist_in_each(run: Run, write: Write) -> None:
    write("a.yaml")
    write("b.yaml")
    assert run("seeds=[0,1]", "workload.num_requests=2")[0] == 0
    for name in "ab":
        lines = (Path("results") / name / "trials.jsonl").read_text().splitlines()
        assert [json.loads(line)["metrics"]["finished_requests"] for line in lines] == [2, 2]
    status, _, err = run("engine.max_num_seq=2")
    assert status == 1
    for name in "ab":
        assert f"experiments/{name}.yaml: unknown key 'engine.max_num_seq'; did you mean" in err


def test_an_interrupt_ends_all_of_it(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.yaml")
    write("b.yaml")
    begun = []

    def interrupted(config: object, *rest: object, **more: object) -> None:
        begun.append(config)
        raise KeyboardInterrupt("stopped after 0 of 1 trials")

    monkeypatch.setattr(run_directory_module, "run_experiment", interrupted)
    status, _, err = run()
    assert status == 130
    assert len(begun) == 1
    assert err.splitlines()[-1] == "paged-jax: stopped after 0 of 1 trials"
