"""Runs an experiment: builds and warms up engines, runs the missing trials, and writes the results.

Timed trials never overlap. Engines of all settings stay alive, since trials of different settings alternate;
they share the model's weights, but each has its own KV pages.
"""

import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_jax.checkpoints.resolve import prepare, resolve
from paged_jax.config import POLICIES, EngineConfig
from paged_jax.engine.engine import Arrival, drive
from paged_jax.engine.policies import load_policy
from paged_jax.experiments.config import ExperimentConfig
from paged_jax.experiments.environment import available_memory, describe, git_state, read_runs
from paged_jax.experiments.lock import locked
from paged_jax.experiments.memory import check_memory
from paged_jax.experiments.metrics import tokens_sha256, trial_metrics
from paged_jax.experiments.progress import RunProgress
from paged_jax.experiments.report import write_reports
from paged_jax.experiments.trials import Trial, TrialLog, check_same_experiment, plan, replace_file, write_config
from paged_jax.experiments.workloads import check_fits, make_workload

if TYPE_CHECKING:
    from paged_jax.engine.engine import Engine
    from paged_jax.engine.request import Request
    from paged_jax.engine.stats import StepStats

_WARM_UP_REQUESTS = 8
_WARM_UP_TOKENS = 4
_GENERATED = ("config.yaml", "environment.json", "trials.jsonl", "summary.csv", "summary.md", "summary.tex")


@dataclass(frozen=True)
class ExperimentResult:
    """What a run left behind."""

    directory: Path
    new_trials: int
    """Trials that ran now; the others were there already."""
    total_trials: int
    text: str
    """The tables, for a terminal."""


@dataclass(frozen=True)
class _WarmEngine:
    engine: "Engine"
    compilations: int
    compile_s: float


def run_experiment(
    config: ExperimentConfig,
    out_dir: str | Path | None = None,
    *,
    fresh: bool = False,
    progress: bool = True,
    make_engine: "Callable[[EngineConfig], Engine] | None" = None,
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
    make_engine: "Callable[[EngineConfig], Engine] | None",
) -> ExperimentResult:
    trials = plan(config)
    log = TrialLog(directory)
    done = {} if fresh else log.read()
    check_same_experiment(config, trials, done, directory)
    missing = [trial for trial in trials if trial.key not in done]
    _check_policies([trial.setting.engine for trial in missing])
    if make_engine is None:
        for load_format in sorted({trial.setting.engine.load_format for trial in missing}):
            prepare(config.model, load_format)  # a model that does not exist is told before JAX starts
    if missing:
        _run_trials(config, missing, log, make_engine, progress, fresh)
    else:
        write_config(config, directory / "config.yaml")
    text = write_reports(config, list(log.read().values()), directory)
    if missing:
        state = f"{len(missing)} trial{'s' * (len(missing) > 1)} run"
    else:
        state = f"complete already, nothing to run{_made_by_other_code(directory, done.values())}"
    return ExperimentResult(
        directory, len(missing), len(trials), f"{text}\n{config.name}: {state}; results in {directory}\n"
    )


def _run_trials(
    config: ExperimentConfig,
    missing: Sequence[Trial],
    log: TrialLog,
    make_engine: "Callable[[EngineConfig], Engine] | None",
    progress: bool,
    fresh: bool,
) -> None:
    """Everything that can refuse a setting comes first; only then are files written, or discarded if `fresh`."""
    environment = describe()
    engine_configs = list(dict.fromkeys(trial.setting.engine for trial in missing))
    sized = [c for c in engine_configs if c.num_blocks is not None or c.num_swap_blocks is not None]
    shape = resolve(config.model, sized[0].load_format).config if make_engine is None and sized else None
    check_memory(engine_configs, environment["device"]["platform"], available_memory(), shape)
    directory = log.path.parent
    runs = [] if fresh else read_runs(directory)
    if make_engine is None:
        from paged_jax.llm import EngineFactory  # loads JAX and the model: only when trials really run

        make_engine = EngineFactory(config.model)
    warm: dict[EngineConfig, _WarmEngine] = {}
    finished = 0
    try:
        with RunProgress(len(engine_configs), len(missing), show=progress) as bar:
            built = {c: _build(make_engine, [t for t in missing if t.setting.engine == c], bar) for c in engine_configs}
            if fresh:
                _discard(directory)
            write_config(config, directory / "config.yaml")
            run = {**environment, "warm_up": []}
            runs.append(run)
            _write_runs(directory, runs)
            for trial in missing:
                setting = trial.setting
                if setting.engine not in warm:
                    served = [t for t in missing if t.setting.engine == setting.engine]
                    warm[setting.engine] = _warm_up(*built[setting.engine], served, run["warm_up"], bar)
                    _write_runs(directory, runs)
                bar.begin(f"{setting.label}, seed {trial.seed}, repeat {trial.repeat}")
                log.append({**_run_trial(warm[setting.engine], trial), "run": len(runs) - 1})
                bar.end("trial")
                finished += 1
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped after {finished} of {len(missing)} trials, which are kept in {directory}: "
            "run the same command again to do the rest"
        ) from None
    finally:
        gc.unfreeze()


def run_workload(engine: "Engine", arrivals: Sequence[Arrival]) -> "tuple[list[Request], list[StepStats], float]":
    """Serve all arrivals; returns finished samples, every step's statistics, and the clock at the start."""
    engine.reset_prefix_cache()
    gc.collect()  # so that the garbage of the last trial is not collected inside this one
    requests: list[Request] = []
    steps: list[StepStats] = []
    start = engine.clock.now()
    for advanced, stats in drive(engine, arrivals, engine.clock):
        if stats is not None:
            steps.append(stats)
        # in a static batch requests end before they leave: they are finished once
        requests.extend(request for request in advanced if request.is_finished)
    return requests, steps, start


def _check_policies(configs: Sequence[EngineConfig]) -> None:
    """Raise ValueError for a policy class that cannot be imported."""
    for config in configs:
        for field in POLICIES:
            if getattr(config, field) is not None:
                load_policy(field, getattr(config, field))


def _build(
    make_engine: "Callable[[EngineConfig], Engine]", trials: Sequence[Trial], bar: RunProgress
) -> "tuple[Engine, float]":
    """The engine of these trials, not compiled yet, and the seconds that it took; checks that all workloads fit."""
    setting = trials[0].setting
    bar.say(f"{setting.label}: loading")
    began = time.perf_counter()
    try:
        engine = make_engine(setting.engine)
        build_s = time.perf_counter() - began
        for trial in trials:
            check_fits(_workload(engine, trial), engine.max_model_len, engine.max_request_len)
    except ValueError as error:
        raise ValueError(f"{error} (setting {setting.label})" if setting.values else str(error)) from None
    return engine, build_s


def _warm_up(
    engine: "Engine", build_s: float, trials: Sequence[Trial], reports: list[dict[str, Any]], bar: RunProgress
) -> _WarmEngine:
    """Compile every program that one of the engine's trials needs, and serve a short workload that is not timed."""
    setting = trials[0].setting
    has_samples = any(trial.setting.workload.n > 1 for trial in trials)
    bar.begin(f"{setting.label}: compiling")
    began = time.perf_counter()
    executor = engine.executor
    executor.warm_up(
        lambda done, total: bar.say(f"{setting.label}: compiling {done}/{total}"),
        # pages move when requests are swapped, when samples share blocks, and to be poisoned
        moves=setting.engine.preemption_mode != "recompute" or has_samples or setting.engine.debug,
    )
    short = [
        dataclasses.replace(a, time=0.0, params=dataclasses.replace(a.params, max_tokens=_WARM_UP_TOKENS))
        for a in _workload(engine, trials[0])[:_WARM_UP_REQUESTS]
    ]
    bar.say(f"{setting.label}: warming up")
    run_workload(engine, short)
    gc.freeze()  # models and programs stay: no collection inside a trial walks through them
    warm = _WarmEngine(engine, executor.num_compilations, executor.compile_seconds)
    reports.append(
        {
            "setting": setting.values,
            "build_s": build_s,
            "compilations": warm.compilations,
            "compile_s": warm.compile_s,
            "num_blocks": engine.num_blocks,
            "total_s": build_s + time.perf_counter() - began,
        }
    )
    bar.end("warm-up")
    return warm


def _run_trial(warm: _WarmEngine, trial: Trial) -> dict[str, Any]:
    executor = warm.engine.executor
    arrivals = _workload(warm.engine, trial)
    compiled = executor.num_compilations
    requests, steps, start = run_workload(warm.engine, arrivals)
    metrics = trial_metrics(
        requests,
        steps,
        start,
        compilations=executor.num_compilations - compiled,
        warmup_compilations=warm.compilations,
        compile_s=warm.compile_s,
    )
    return {
        "key": trial.key,
        "setting": trial.setting.values,
        "seed": trial.seed,
        "repeat": trial.repeat,
        "tokens_sha256": tokens_sha256(requests),
        "metrics": metrics,
    }


def _workload(engine: "Engine", trial: Trial) -> tuple[Arrival, ...]:
    return make_workload(trial.setting.workload, trial.seed, engine.tokenizer, engine.vocab_size)


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


def _write_runs(directory: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    replace_file(directory / "environment.json", json.dumps({"runs": runs}, indent=2) + "\n")


def _discard(directory: Path) -> None:
    """Remove what an earlier run wrote, and nothing else that somebody may have put there."""
    for name in _GENERATED:
        (directory / name).unlink(missing_ok=True)
    for pattern in ("*.png", "*.pdf"):
        for figure in (directory / "figures").glob(pattern):
            figure.unlink()
