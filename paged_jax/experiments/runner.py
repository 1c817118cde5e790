"""Runs an experiment: builds and warms up engines, runs the missing trials, and writes the results.

Timed trials never overlap. Engines of all settings stay alive, since trials of different settings alternate;
they share the model's weights, but each has its own KV pages.
"""

import dataclasses
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_jax.checkpoints.resolve import prepare
from paged_jax.config import EngineConfig
from paged_jax.engine.engine import Arrival, drive
from paged_jax.experiments.config import ExperimentConfig
from paged_jax.experiments.environment import available_memory, describe
from paged_jax.experiments.metrics import tokens_sha256, trial_metrics
from paged_jax.experiments.progress import RunProgress
from paged_jax.experiments.report import write_reports
from paged_jax.experiments.trials import Trial, TrialLog, check_same_experiment, plan, write_config
from paged_jax.experiments.workloads import check_fits, make_workload

if TYPE_CHECKING:
    from paged_jax.engine.engine import Engine
    from paged_jax.engine.request import Request
    from paged_jax.engine.stats import StepStats

_DEFAULT_CPU_KV_CACHE_MEMORY = 2**30
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
    """Run the trials that `out_dir` (default `results/<name>`) does not have yet, then write tables and
    figures.

    `fresh` discards earlier results in `out_dir` first. `make_engine` builds the engine of a setting; the
    default loads `config.model` once and shares its weights. Raises ValueError, one sentence, when the
    directory holds trials of another configuration, or when the workload does not fit the model;
    KeyboardInterrupt with a sentence on Ctrl-C.
    """
    directory = Path("results") / config.name if out_dir is None else Path(out_dir)
    trials = plan(config)
    log = TrialLog(directory)
    if fresh:
        _discard(directory)
    done = log.read()
    check_same_experiment(config, trials, done, directory)
    missing = [trial for trial in trials if trial.key not in done]
    if make_engine is None:
        for load_format in sorted({trial.setting.engine.load_format for trial in missing}):
            prepare(config.model, load_format)  # a model that does not exist is told before JAX starts
    directory.mkdir(parents=True, exist_ok=True)
    write_config(config, directory / "config.yaml")
    if missing:
        _run_trials(config, missing, log, make_engine, progress)
    text = write_reports(config, list(log.read().values()), directory)
    state = f"{len(missing)} trials run" if missing else "complete already, nothing to run"
    return ExperimentResult(
        directory, len(missing), len(trials), f"{text}\n{config.name}: {state}; results in {directory}\n"
    )


def _run_trials(
    config: ExperimentConfig,
    missing: Sequence[Trial],
    log: TrialLog,
    make_engine: "Callable[[EngineConfig], Engine] | None",
    progress: bool,
) -> None:
    environment = describe()
    engine_configs = list(dict.fromkeys(trial.setting.engine for trial in missing))
    check_memory(engine_configs, environment["device"]["platform"], available_memory())
    if make_engine is None:
        from paged_jax.llm import EngineFactory  # loads JAX and the model: only when trials really run

        make_engine = EngineFactory(config.model)
    runs = _read_runs(log.path.parent)
    run = {**environment, "warm_up": []}
    runs.append(run)
    _write_json(log.path.parent / "environment.json", {"runs": runs})
    engines: dict[EngineConfig, _WarmEngine] = {}
    finished = 0
    try:
        with RunProgress(len(engine_configs), len(missing), show=progress) as bar:
            for trial in missing:
                setting = trial.setting
                if setting.engine not in engines:
                    served = [t for t in missing if t.setting.engine == setting.engine]
                    engines[setting.engine] = _warm_up(make_engine, served, run["warm_up"], bar)
                    _write_json(log.path.parent / "environment.json", {"runs": runs})
                bar.begin(f"{setting.label}, seed {trial.seed}, repeat {trial.repeat}")
                log.append({**_run_trial(engines[setting.engine], trial), "run": len(runs) - 1})
                bar.end("trial")
                finished += 1
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped after {finished} of {len(missing)} trials, which are kept in {log.path.parent}: "
            "run the same command again to do the rest"
        ) from None
    finally:
        gc.unfreeze()


def check_memory(configs: Sequence[EngineConfig], platform: str, available: int | None) -> None:
    """Raise ValueError if the KV pages of all engines, which are alive together, cannot fit.

    `platform` is JAX's name for the device's kind; `available` is the free main memory in bytes, if known.
    """
    if platform != "cpu":
        if len(configs) > 1 and any(c.num_blocks is None for c in configs):
            raise ValueError(
                f"the engines of {len(configs)} settings share the {platform}'s memory, so none of them may "
                "take a share of what is free: set engine.num_blocks (in a sweep.zip group with "
                "engine.block_size for equal memory)"
            )
        return
    sized = [c for c in configs if c.num_blocks is None]
    need = sum(c.kv_cache_memory or _DEFAULT_CPU_KV_CACHE_MEMORY for c in sized)
    if available is not None and need > available:
        raise ValueError(
            f"the KV pages of {len(sized)} settings need {need / 2**30:.1f} GiB together, and "
            f"{available / 2**30:.1f} GiB of memory are free: lower engine.kv_cache_memory"
        )


def run_workload(engine: "Engine", arrivals: Sequence[Arrival]) -> "tuple[list[Request], list[StepStats], float]":
    """Serve all arrivals; returns finished requests, every step's statistics, and the clock at the start."""
    engine.reset_prefix_cache()
    gc.collect()  # so that the garbage of the last trial is not collected inside this one
    requests: list[Request] = []
    steps: list[StepStats] = []
    start = engine.clock.now()
    for advanced, stats in drive(engine, arrivals, engine.clock):
        if stats is not None and (not steps or stats is not steps[-1]):  # a step without a plan has none
            steps.append(stats)
        requests.extend(request for request in advanced if request.is_finished)
    return requests, steps, start


def _warm_up(
    make_engine: "Callable[[EngineConfig], Engine]",
    trials: Sequence[Trial],
    reports: list[dict[str, Any]],
    bar: RunProgress,
) -> _WarmEngine:
    """Build the engine of these trials, compile every program, and serve a short workload that is not timed.

    That all workloads fit is checked before the compilation, which takes longest.
    """
    setting = trials[0].setting
    bar.begin(f"{setting.label}: loading")
    began = time.perf_counter()
    engine = make_engine(setting.engine)
    build_s = time.perf_counter() - began
    for trial in trials:
        pool_tokens = engine.num_blocks * setting.engine.block_size
        check_fits(_workload(engine, trial), engine.max_model_len, pool_tokens)
    executor = engine.executor
    executor.warm_up(lambda done, total: bar.say(f"{setting.label}: compiling {done}/{total}"))
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
            "total_s": time.perf_counter() - began,
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


def _read_runs(directory: Path) -> list[dict[str, Any]]:
    path = directory / "environment.json"
    return json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []


def _write_json(path: Path, value: Any) -> None:
    """Replace the file in one go, so that a kill leaves the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _discard(directory: Path) -> None:
    """Remove what an earlier run wrote, and nothing else that somebody may have put there."""
    for name in _GENERATED:
        (directory / name).unlink(missing_ok=True)
    for pattern in ("*.png", "*.pdf"):
        for figure in (directory / "figures").glob(pattern):
            figure.unlink()
