"""Where an experiment's metric is best along x, and how flat it is there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from paged_jax.experiments.config import ExperimentConfig
from paged_jax.experiments.metrics import METRICS, Metric
from paged_jax.experiments.plots import (
    PANEL_HEIGHT_IN,
    STYLE,
    WIDTH_IN,
    Line,
    axis_name,
    draw_lines,
    legend,
    place_x,
    save,
)
from paged_jax.experiments.report_spec import larger_is_better
from paged_jax.experiments.statistics import Estimate
from paged_jax.experiments.summary import SettingSummary
from paged_jax.experiments.sweep import label_of, name_of, shown, unit_of
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
    metric, name, unit_of_x = config.report.optimum or "", name_of(_x(config)), unit_of(_x(config))
    found = {
        tuple(map(shown, key)): find_optimum(points, larger=bool(larger_is_better(metric)))
        for key, points in _series(config, summaries).items()
    }
    factor, unit = METRICS[metric].display([best.value for best in found.values() if best is not None])
    return Table(
        f"{config.name}: best {name} by {METRICS[metric].label}, and how far from it the loss stays small",
        (
            *map(name_of, config.series_keys),
            f"best {name}",
            METRICS[metric].label,
            *(f"within {percent} %" for percent in PERCENTS),
        ),
        (*("" for _ in config.series_keys), unit_of_x, unit, *(unit_of_x for _ in PERCENTS)),
        tuple((*key, *_cells(best, factor)) for key, best in found.items()),
    )


def write_optimum_figure(config: ExperimentConfig, summaries: Sequence[SettingSummary], directory: Path) -> list[Path]:
    """Write optimum.png and optimum.pdf: how much each series loses away from its best x; returns the files."""
    with matplotlib.rc_context(STYLE):
        return save(draw_optimum(config, summaries), directory, "optimum")


def draw_optimum(config: ExperimentConfig, summaries: Sequence[SettingSummary]) -> Figure:
    """Each series as a share of its own best value, so that series of all magnitudes show how flat they are."""
    metric = METRICS[config.report.optimum or ""]
    larger = bool(larger_is_better(config.report.optimum or ""))
    figure = Figure(figsize=(WIDTH_IN, PANEL_HEIGHT_IN), layout="constrained")
    ax = figure.subplots()
    place = place_x(list(dict.fromkeys(s.setting.values[_x(config)] for s in summaries)), ax)
    lines = []
    for key, points in _series(config, summaries).items():
        best = find_optimum(points, larger=larger)
        values = dict(zip(config.series_keys, key, strict=True))
        label = label_of({k: values[k] for k in config.legend_keys}) if values else metric.label
        shares = [value / best.value if best else math.nan for _, value in points]
        lines.append(Line(label, [place[x] for x, _ in points], [Estimate(share, math.nan) for share in shares]))
    draw_lines(lines, "", Metric("", "ratio", ""), ax)
    ax.set_ylabel(f"{metric.label}\n(% of the best)")
    if len(lines) > 1:
        legend(ax)
    ax.set_xlabel(axis_name(_x(config)))
    return figure


def _x(config: ExperimentConfig) -> str:
    assert config.x is not None  # `ExperimentConfig` refuses an optimum without it
    return config.x


def _series(
    config: ExperimentConfig, summaries: Sequence[SettingSummary]
) -> dict[tuple[object, ...], list[tuple[float, float]]]:
    """(x, mean over seeds) of each series, by the values of its keys."""
    series: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for summary in summaries:
        values = summary.setting.values
        key = tuple(values[k] for k in config.series_keys)
        mean = summary.metrics[config.report.optimum or ""].estimate.mean
        series.setdefault(key, []).append((values[_x(config)], mean))
    return series


def _is_near(value: float, best: float, percent: float, larger: bool) -> bool:
    loss = best - value if larger else value - best
    return loss <= abs(best) * percent / 100  # False for NaN


def _cells(best: Optimum | None, factor: float) -> tuple[str, ...]:
    if best is None:
        return ("n/a",) * (2 + len(PERCENTS))
    ranges = (shown(low) if low == high else f"{shown(low)} to {shown(high)}" for low, high in best.ranges)
    return (shown(best.x), number(best.value * factor), *ranges)
