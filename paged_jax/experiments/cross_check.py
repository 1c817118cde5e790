"""The same workload on the real device and on a modelled one, side by side."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

from paged_jax.config import EngineConfig, parse
from paged_jax.engine.engine import Engine
from paged_jax.experiments.measurements import run_workload
from paged_jax.experiments.metrics import METRICS, latencies
from paged_jax.experiments.tables import Table
from paged_jax.experiments.workloads import SyntheticWorkload, make_workload
from paged_jax.simulation.engines import simulated_engine

WORKLOAD = {
    "kind": "lognormal",
    "num_requests": 48,
    "prompt": {"mean": 120, "sigma": 0.8, "max": 600},
    "output": {"mean": 60, "sigma": 0.8, "max": 300},
}
"""All at once, so that the engine is never idle, however fast the machine."""
ENGINE = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "token_buckets": (4, 16, 64, 256, 512),  # few programs to compile
    "max_model_len": 1024,
    "num_blocks": 1024,
}
COMPARED = (
    "output_tokens_per_s",
    "ttft_s_mean",
    "ttft_s_p95",
    "inter_token_latency_s_mean",
    "inter_token_latency_s_p95",
    "e2e_latency_s_mean",
    "e2e_latency_s_p95",
)


class Compared(NamedTuple):
    """One metric of both runs."""

    metric: str
    real: float
    simulated: float

    @property
    def difference(self) -> float:
        """Of the simulated run from the real one, as a share of the real one."""
        return self.simulated / self.real - 1.0


def cross_check(
    model: str, hardware: str, *, repeats: int, seed: int = 0, on_run: Callable[[], None] = lambda: None
) -> list[Compared]:
    """Serve a workload `repeats` times for real (the median counts) and once in virtual time on `hardware`.

    The real model has random weights: times do not depend on them.
    """
    from paged_jax.llm import build_engine  # loads JAX

    config = parse(EngineConfig, {**ENGINE, "load_format": "dummy"})
    real = build_engine(model, config)
    real.executor.warm_up()  # type: ignore[attr-defined]
    runs = []
    for _ in range(repeats):
        runs.append(_measured(real, seed))
        on_run()
    simulated = _measured(simulated_engine(model, hardware, parse(EngineConfig, ENGINE)), seed)
    return [Compared(metric, statistics.median(run[metric] for run in runs), simulated[metric]) for metric in COMPARED]


def cross_check_table(rows: list[Compared]) -> str:
    """Both runs side by side."""
    cells = []
    for row in rows:
        factor, unit = METRICS[row.metric].display([row.real, row.simulated])
        shown = (f"{factor * row.real:.4g}", f"{factor * row.simulated:.4g}")
        cells.append((METRICS[row.metric].label, unit, *shown, f"{100 * row.difference:+.1f}"))
    return Table(
        title="The same workload on both executors",
        headings=("metric", "unit", "real", "simulated", "difference"),
        units=("", "", "", "", "%"),
        rows=tuple(cells),
        left=2,
    ).terminal()


def _measured(engine: Engine, seed: int) -> dict[str, float]:
    spec = parse(SyntheticWorkload, WORKLOAD)
    arrivals = make_workload(spec, seed, None, engine.vocab_size)
    requests, steps, start = run_workload(engine, arrivals)
    output = sum(request.num_output_tokens for request in requests)
    return {"output_tokens_per_s": output / (float(steps["end_time"][-1]) - start), **latencies(requests)}
