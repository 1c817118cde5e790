"""Trials on a simulated device: each has an engine of its own, in virtual time, and many run side by side.

Nothing here depends on the clock of this machine, on the order of trials or on their number: the same experiment gives
the same lines, to the last digit.
"""

import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from joblib import Parallel, cpu_count, delayed
from joblib.externals.loky import get_reusable_executor

from paged_jax.config import POLICIES
from paged_jax.experiments.config import ExperimentConfig, Setting
from paged_jax.experiments.environment import describe_host
from paged_jax.experiments.measurements import run_workload
from paged_jax.experiments.metrics import block_table_bytes, trial_metrics
from paged_jax.experiments.model_sizes import model_sizes
from paged_jax.experiments.progress import RunProgress
from paged_jax.experiments.run_log import RunLog
from paged_jax.experiments.trials import Trial, TrialLog, trial_record
from paged_jax.experiments.workloads import check_fits, make_workload
from paged_jax.simulation.cost_model import StepCost
from paged_jax.simulation.engines import dtypes, simulated_engine
from paged_jax.simulation.hardware import load_hardware
from paged_jax.simulation.shapes import find_shape


def run_simulated(
    config: ExperimentConfig,
    missing: Sequence[Trial],
    log: TrialLog,
    runs: RunLog,
    *,
    progress: bool,
    jobs: int | None = None,
) -> None:
    """Run the trials, `jobs` side by side (unset, as many as this process may use cores). Settings are refused before
    anything is written, or discarded."""
    check_settings(missing)
    hardware = sorted({str(trial.setting.hardware) for trial in missing})
    runs.begin(config, {**describe_host(), "device": {"platform": "simulated", "kind": ", ".join(hardware)}})
    finished = 0
    try:
        with RunProgress(0, len(missing), show=progress) as bar:
            bar.begin("simulating")
            for record in _records(missing, jobs or cpu_count()):
                log.append({**record, "run": runs.number})
                bar.end("trial")
                finished += 1
                bar.begin("simulating")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped after {finished} of {len(missing)} trials, which are kept in {runs.directory}: "
            "run the same command again to do the rest"
        ) from None


def check_settings(trials: Sequence[Trial]) -> None:
    """Raise ValueError, naming the setting, for one that cannot work or whose pool cannot hold a request."""
    workloads: dict[tuple[Any, ...], Any] = {}
    checked: set[tuple[Any, ...]] = set()
    # a workload is kept for the trials that share it, and only so long
    for trial in sorted(trials, key=lambda t: (t.setting.model, repr(t.setting.workload), t.seed)):
        setting = trial.setting
        point = (setting.model, setting.hardware, setting.engine, setting.workload, trial.seed)
        if point in checked:
            continue
        checked.add(point)
        try:
            engine = _engine(setting)
            key = (setting.workload, trial.seed, engine.vocab_size)
            if key not in workloads:
                workloads = {key: make_workload(setting.workload, trial.seed, None, engine.vocab_size)}
            check_fits(workloads[key], engine.max_model_len, engine.max_request_len)
        except ValueError as error:
            raise ValueError(f"{error} (setting {setting.label})" if setting.values else str(error)) from None


def simulate(trial: Trial) -> dict[str, Any]:
    """One trial's record."""
    setting = trial.setting
    engine = _engine(setting)
    arrivals = make_workload(setting.workload, trial.seed, None, engine.vocab_size)
    requests, steps, start = run_workload(engine, arrivals)
    executor = engine.executor
    metrics = trial_metrics(
        requests,
        steps,
        start,
        num_blocks=executor.num_blocks,
        block_size=setting.engine.block_size,
        kv_bytes_per_token=executor.kv_bytes_per_token,
        sizes=_sizes(setting, engine),
        modelled=dict(zip(StepCost._fields, executor.modelled_seconds, strict=True)),
        compilations=executor.num_compilations,
    )
    return trial_record(trial, requests, metrics)


def _sizes(setting: Setting, engine: Any) -> dict[str, float]:
    shape, device, config = find_shape(setting.model), load_hardware(str(setting.hardware)), setting.engine
    dtype, kv_dtype = dtypes(config, device, shape)
    table = block_table_bytes(config.max_num_seqs, engine.max_model_len, config.block_size)
    return {
        **model_sizes(shape, dtype=dtype, kv_dtype=kv_dtype, block_size=config.block_size),
        "page_efficiency": engine.executor.cost.page_efficiency,
        "scalar_memory_use": table / device.scalar_memory_bytes if device.scalar_memory_bytes else math.nan,
    }


def _engine(setting: Setting) -> Any:
    return simulated_engine(setting.model, str(setting.hardware), setting.engine)


def _records(trials: Sequence[Trial], jobs: int) -> Iterator[dict[str, Any]]:
    """The records of all trials, in their order."""
    if min(jobs, len(trials)) == 1 or any(_is_of_this_program(trial) for trial in trials):
        yield from map(simulate, trials)
        return
    run = Parallel(n_jobs=min(jobs, len(trials)), return_as="generator", batch_size=1)
    try:
        yield from run(delayed(_simulate_in_worker)(trial, sys.path, os.getcwd()) for trial in trials)
    finally:
        if any(":" in name for trial in trials for name in _policies(trial)):
            get_reusable_executor().shutdown(wait=True)  # which keeps the policy's module as it is now


def _simulate_in_worker(trial: Trial, path: list[str], directory: str) -> dict[str, Any]:
    """The same in a process that may have been started elsewhere, and does not know where one's own policies are."""
    sys.path += [folder for folder in path if folder not in sys.path]
    os.chdir(directory)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits, which ends this one
    return simulate(trial)


def _is_of_this_program(trial: Trial) -> bool:
    """Whether a policy is defined in the running program or notebook, which other processes do not have."""
    return any(name.startswith("__main__:") for name in _policies(trial))


def _policies(trial: Trial) -> list[str]:
    return [getattr(trial.setting.engine, field) or "" for field in POLICIES]
