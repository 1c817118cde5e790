"""Trials on this machine's device: built and warmed up, then timed one after the other.

Engines of all settings stay alive, since trials of different settings alternate; they share the model's weights, but
each has its own KV pages.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paged_jax.checkpoints.resolve import prepare, resolve
from paged_jax.config import EngineConfig
from paged_jax.engine.engine import Arrival
from paged_jax.experiments.config import ExperimentConfig
from paged_jax.experiments.device_wait import timed_waits
from paged_jax.experiments.environment import available_memory, describe
from paged_jax.experiments.measurements import run_workload
from paged_jax.experiments.memory import check_memory
from paged_jax.experiments.metrics import trial_metrics
from paged_jax.experiments.progress import RunProgress
from paged_jax.experiments.run_log import RunLog
from paged_jax.experiments.trials import Trial, TrialLog, trial_record
from paged_jax.experiments.workloads import check_fits, make_workload

if TYPE_CHECKING:
    from paged_jax.engine.engine import Engine

_WARM_UP_REQUESTS = 8
_WARM_UP_TOKENS = 4

type MakeEngine = Callable[[EngineConfig], "Engine"]


@dataclass(frozen=True)
class _WarmEngine:
    engine: "Engine"
    compilations: int
    compile_s: float


def run_timed(
    config: ExperimentConfig,
    missing: Sequence[Trial],
    log: TrialLog,
    runs: RunLog,
    make_engine: MakeEngine | None,
    *,
    progress: bool,
) -> None:
    """Run the trials. Everything that can refuse a setting comes first; only then are files written, or discarded.

    `make_engine` builds the engine of a setting; the default loads the model once.
    """
    if make_engine is None:
        for load_format in sorted({trial.setting.engine.load_format for trial in missing}):
            prepare(config.model, load_format)  # a model that does not exist is told before JAX starts
    environment = describe()
    engine_configs = list(dict.fromkeys(trial.setting.engine for trial in missing))
    sized = [c for c in engine_configs if c.num_blocks is not None or c.num_swap_blocks is not None]
    shape = resolve(config.model, sized[0].load_format).config if make_engine is None and sized else None
    check_memory(engine_configs, environment["device"]["platform"], available_memory(), shape)
    if make_engine is None:
        from paged_jax.llm import EngineFactory  # loads JAX and the model: only when trials really run

        make_engine = EngineFactory(config.model)
    warm: dict[EngineConfig, _WarmEngine] = {}
    finished = 0
    try:
        with RunProgress(len(engine_configs), len(missing), show=progress) as bar:
            built = {c: _build(make_engine, [t for t in missing if t.setting.engine == c], bar) for c in engine_configs}
            run = runs.begin(config, {**environment, "warm_up": []})
            for trial in missing:
                setting = trial.setting
                if setting.engine not in warm:
                    served = [t for t in missing if t.setting.engine == setting.engine]
                    warm[setting.engine] = _warm_up(*built[setting.engine], served, run["warm_up"], bar)
                    runs.save()
                bar.begin(f"{setting.label}, seed {trial.seed}, repeat {trial.repeat}")
                log.append({**_run_trial(warm[setting.engine], trial), "run": runs.number})
                bar.end("trial")
                finished += 1
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped after {finished} of {len(missing)} trials, which are kept in {runs.directory}: "
            "run the same command again to do the rest"
        ) from None
    finally:
        gc.unfreeze()


def _build(make_engine: MakeEngine, trials: Sequence[Trial], bar: RunProgress) -> "tuple[Engine, float]":
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
    has_samples = any(trial.setting.workload.width > 1 for trial in trials)
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
    with timed_waits(warm.engine) as wait:
        requests, steps, start = run_workload(warm.engine, arrivals)
    metrics = trial_metrics(
        requests,
        steps,
        start,
        num_blocks=executor.num_blocks,
        block_size=trial.setting.engine.block_size,
        kv_bytes_per_token=executor.kv_bytes_per_token,
        host_s=float(steps.durations.sum()) - wait.seconds,
        compilations=executor.num_compilations - compiled,
        warmup_compilations=warm.compilations,
        compile_s=warm.compile_s,
    )
    return trial_record(trial, requests, metrics)


def _workload(engine: "Engine", trial: Trial) -> tuple[Arrival, ...]:
    return make_workload(trial.setting.workload, trial.seed, engine.tokenizer, engine.vocab_size)
