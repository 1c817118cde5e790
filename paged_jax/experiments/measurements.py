"""What is kept of a trial's requests and steps: a hundred bytes of each, so that a trace of a day fits into memory."""

import gc
import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from paged_jax.engine.engine import Arrival, Engine, drive
from paged_jax.engine.request import Request, RequestMetrics
from paged_jax.engine.stats import StepStats
from paged_jax.kv_cache.usage import KVUsage
from paged_jax.sampling.params import num_samples


class Served(NamedTuple):
    """A sample that has ended: everything about it but its tokens."""

    request_id: str
    sample_index: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    """Output tokens that the workload asked for."""
    metrics: RequestMetrics
    output_sha256: str
    """Fingerprint of the output tokens."""

    @classmethod
    def of(cls, request: Request) -> "Served":
        """The record of a request."""
        token_ids, metrics = request.output_token_ids, request.metrics
        if request.beam_search is not None:
            # the last token of a beam is chosen as the search ends: its row never gets it
            token_ids = list(request.beam_search.best()[request.sample_index].token_ids)
            if metrics.finished_time is not None:
                metrics = replace(metrics, token_times=[*metrics.token_times, metrics.finished_time])
        tokens = array("q", token_ids)
        return cls(
            request.request_id,
            request.sample_index,
            request.num_prompt_tokens,
            len(tokens),
            request.sampling_params.max_tokens or 0,
            metrics,
            hashlib.sha256(tokens.tobytes()).hexdigest()[:16],
        )


class StepTable:
    """Statistics of many steps by column: the fields of `StepStats`, and those of its `KVUsage` beside them."""

    _CHUNK = 4096

    def __init__(self, steps: Iterable[StepStats] = ()) -> None:
        self._chunks: list[np.ndarray] = []
        self._rows: list[tuple[float, ...]] = []
        for step in steps:
            self.append(step)

    def append(self, step: StepStats) -> None:
        """Add a step."""
        *own, usage = step
        self._rows.append((*own, *usage))
        if len(self._rows) == self._CHUNK:
            self._pack()

    def __len__(self) -> int:
        return len(self._rows) + sum(map(len, self._chunks))

    def __getitem__(self, column: str) -> np.ndarray:
        """One column, float64 [steps]."""
        self._pack()
        index = _COLUMNS[column]
        return np.concatenate([chunk[:, index] for chunk in self._chunks]) if self._chunks else np.array([])

    def total(self, column: str) -> int:
        """The sum of a column of counts."""
        return int(self[column].sum())

    @property
    def durations(self) -> np.ndarray:
        """Seconds of each step."""
        return self["end_time"] - self["start_time"]

    def _pack(self) -> None:
        if self._rows:
            self._chunks.append(np.array(self._rows, dtype=np.float64))
            self._rows = []


_COLUMNS = {name: i for i, name in enumerate((*StepStats._fields[:-1], *KVUsage._fields))}
assert StepStats._fields[-1] == "kv"


def run_workload(engine: Engine, arrivals: Sequence[Arrival]) -> tuple[list[Served], StepTable, float]:
    """Serve all arrivals; returns finished samples, every step's statistics, and the clock at the start."""
    engine.reset_prefix_cache()
    gc.collect()  # so that the garbage of the last trial is not collected inside this one
    requests: list[Served] = []
    steps = StepTable()
    start = engine.clock.now()
    for advanced, stats in drive(engine, arrivals, engine.clock):
        if stats is not None:
            steps.append(stats)
        # in a static batch requests end before they leave: they are finished once
        requests += [Served.of(request) for request in advanced if request.is_finished]
    wanted = sum(num_samples(arrival.params) for arrival in arrivals)
    if len(requests) != wanted:
        raise RuntimeError(f"{wanted} samples were asked for and {len(requests)} were reported")
    return requests, steps, start
