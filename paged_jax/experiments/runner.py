"""Runs an experiment: the trials that are missing, then tables and figures of all."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_jax.config import POLICIES, EngineConfig
from paged_jax.engine.policies import load_policy
from paged_jax.experiments.config import ExperimentConfig
from paged_jax.experiments.environment import git_state, read_runs
from paged_jax.experiments.lock import locked
from paged_jax.experiments.report import write_reports
from paged_jax.experiments.run_log import RunLog
from paged_jax.experiments.summary import SettingSummary, summarise
from paged_jax.experiments.timed_trials import MakeEngine, run_timed
from paged_jax.experiments.trials import TrialLog, check_metrics, check_same_experiment, plan, write_config


@dataclass(frozen=True)
class ExperimentResult:
    """What a run left behind."""

    directory: Path
    new_trials: int
    """Trials that ran now; the others were there already."""
    total_trials: int
    text: str
    """The tables, for a terminal."""
    summaries: tuple[SettingSummary, ...]
    """What came out of each setting of the sweep, in order: `plots.draw` draws them."""


def run_experiment(
    config: ExperimentConfig,
    out_dir: str | Path | None = None,
    *,
    fresh: bool = False,
    progress: bool = True,
    make_engine: MakeEngine | None = None,
) -> ExperimentResult:
    """Run the trials that `out_dir` (default `results/<name>`) does not have yet, then write tables and figures.

    `fresh` discards earlier results in `out_dir`, once it is known that the new run can begin. `make_engine` builds
    the engine of a setting; the default loads `config.model` once and shares its weights. Raises ValueError, one
    sentence, when the directory holds trials of another configuration, when another run writes to it, or when a
    setting cannot work, before anything is written or discarded; KeyboardInterrupt with a sentence on Ctrl-C.
    """
    directory = Path("results") / config.name if out_dir is None else Path(out_dir)
    with locked(directory):
        return _run_locked(config, directory, fresh, progress, make_engine)


def _run_locked(
    config: ExperimentConfig,
    directory: Path,
    fresh: bool,
    progress: bool,
    make_engine: MakeEngine | None,
) -> ExperimentResult:
    trials = plan(config)
    log = TrialLog(directory)
    done = {} if fresh else log.read()
    check_same_experiment(config, trials, done, directory)
    check_metrics(done, directory)
    missing = [trial for trial in trials if trial.key not in done]
    _check_policies([trial.setting.engine for trial in missing])
    if missing:
        runs = RunLog(directory, fresh=fresh)
        if config.executor == "simulated":
            from paged_jax.experiments.simulated_trials import run_simulated  # joblib: not for timed trials

            run_simulated(config, missing, log, runs, progress=progress)
        else:
            run_timed(config, missing, log, runs, make_engine, progress=progress)
    else:
        write_config(config, directory / "config.yaml")
    records = list(log.read().values())
    text = write_reports(config, records, directory)
    if missing:
        state = f"{len(missing)} trial{'s' * (len(missing) > 1)} run"
    else:
        state = f"complete already, nothing to run{_made_by_other_code(directory, done.values())}"
    return ExperimentResult(
        directory,
        len(missing),
        len(trials),
        f"{text}\n{config.name}: {state}; results in {directory}\n",
        tuple(summarise(config, records)),
    )


def _check_policies(configs: Sequence[EngineConfig]) -> None:
    """Raise ValueError for a policy class that cannot be imported."""
    for config in configs:
        for field in POLICIES:
            if getattr(config, field) is not None:
                load_policy(field, getattr(config, field))


def _made_by_other_code(directory: Path, records: Iterable[Mapping[str, Any]]) -> str:
    """Words that say so when results were made by other code than this."""
    named = {record.get("run") for record in records}
    made_by = [(run.get("git_commit"), run.get("git_diff")) for i, run in enumerate(read_runs(directory)) if i in named]
    here = git_state()
    now = here["git_commit"], here["git_diff"]
    others = list(dict.fromkeys(code for code in made_by if code != now))
    if not others:
        return ""
    return (
        f" (NOTE: made by other code, {' and '.join(_code_name(*c) for c in others)}, where this is "
        f"{_code_name(*now)}: --fresh measures this code)"
    )


def _code_name(commit: str | None, diff: str | None) -> str:
    return f"commit {commit[:12] if commit else 'unknown'}{f' with changes {diff}' if diff else ''}"
