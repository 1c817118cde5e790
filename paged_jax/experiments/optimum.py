"""Where an experiment's metric is best along x, and how flat it is there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paged_jax.experiments.config import ExperimentConfig
from paged_jax.experiments.metrics import METRICS
from paged_jax.experiments.report_spec import larger_is_better
from paged_jax.experiments.summary import SettingSummary
from paged_jax.experiments.sweep import shown, unit_of
from paged_jax.experiments.tables import Table, number

PERCENTS = (1, 5)
"""Losses for which the table tells how far x may be from the best."""


@dataclass(frozen=True)
class Optimum:
    """The best point of a series."""

    x: float
    value: float
    ranges: tuple[tuple[float, float], ...]
    """For each percentage the least and the greatest x around the best one up to which no point is worse by more."""


def find_optimum(
    points: Sequence[tuple[float, float]], *, larger: bool, percents: Sequence[float] = PERCENTS
) -> Optimum | None:
    """The best of (x, value) points, the one of least x among equals; None if no value is a number.

    `larger`: whether larger values are better. Values below 0 have no meaningful percentage.
    """
    ordered = sorted(points)
    known = [i for i, (_, value) in enumerate(ordered) if math.isfinite(value)]
    if not known:
        return None
    best = min(known, key=lambda i: -ordered[i][1] if larger else ordered[i][1])
    value = ordered[best][1]
    ranges = []
    for percent in percents:
        low = high = best
        while low > 0 and _is_near(ordered[low - 1][1], value, percent, larger):
            low -= 1
        while high < len(ordered) - 1 and _is_near(ordered[high + 1][1], value, percent, larger):
            high += 1
        ranges.append((ordered[low][0], ordered[high][0]))
    return Optimum(ordered[best][0], value, tuple(ranges))


def optimum_table(config: ExperimentConfig, summaries: Sequence[SettingSummary]) -> Table:
    """For each series the best x by `report.optimum`, and the ranges of x that lose little; means over seeds."""
    metric, x = config.report.optimum, config.x
    assert metric is not None
    assert x is not None
    series: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for summary in summaries:
        values = summary.setting.values
        key = tuple(shown(values[k]) for k in config.series_keys)
        series.setdefault(key, []).append((values[x], summary.metrics[metric].estimate.mean))
    found = {key: find_optimum(points, larger=bool(larger_is_better(metric))) for key, points in series.items()}
    factor, unit = METRICS[metric].display([best.value for best in found.values() if best is not None])
    name = x.rpartition(".")[2]
    return Table(
        f"{config.name}: best {name} by {METRICS[metric].label}, and how far from it the loss stays small",
        (
            *(key.rpartition(".")[2] for key in config.series_keys),
            f"best {name}",
            METRICS[metric].label,
            *(f"within {percent} %" for percent in PERCENTS),
        ),
        (*("" for _ in config.series_keys), unit_of(x), unit, *(unit_of(x) for _ in PERCENTS)),
        tuple((*key, *_cells(best, factor)) for key, best in found.items()),
    )


def _is_near(value: float, best: float, percent: float, larger: bool) -> bool:
    loss = best - value if larger else value - best
    return loss <= abs(best) * percent / 100  # False for NaN


def _cells(best: Optimum | None, factor: float) -> tuple[str, ...]:
    if best is None:
        return ("n/a",) * (2 + len(PERCENTS))
    ranges = (shown(low) if low == high else f"{shown(low)} to {shown(high)}" for low, high in best.ranges)
    return (shown(best.x), number(best.value * factor), *ranges)
