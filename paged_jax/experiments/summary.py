"""From trials to each setting's means, intervals, paired differences, noise and variation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from paged_jax.experiments.config import ExperimentConfig, Setting, settings
from paged_jax.experiments.metrics import METRICS
from paged_jax.experiments.statistics import Estimate, estimate, noise, paired_difference, variation
from paged_jax.experiments.trials import Trial


@dataclass(frozen=True)
class MetricSummary:
    """One metric of one setting."""

    estimate: Estimate
    """Over seeds, of the means of their repeats."""
    noise: float
    """Standard deviation between repeats of one workload; NaN with one repeat."""
    variation: float
    """Standard deviation between seeds, less what noise adds to it; NaN with one seed."""
    difference: Estimate | None
    """To the baseline setting, paired by seed; None for the baseline itself and without one."""
    baseline_mean: float
    """NaN without a baseline."""


@dataclass(frozen=True)
class SettingSummary:
    """One setting and all its metrics."""

    setting: Setting
    metrics: dict[str, MetricSummary]


def summarise(config: ExperimentConfig, records: Sequence[Mapping[str, Any]]) -> list[SettingSummary]:
    """Every setting's summary, in the order of the sweep; `records` are all trials of the experiment."""
    by_key = {record["key"]: record["metrics"] for record in records}
    points = settings(config)
    # a key is a fingerprint of files, too: worked out once for each trial, not for each of its metrics
    measured_of = [
        [[by_key[Trial(point, seed, r, config.executor).key] for r in range(config.repeats)] for seed in config.seeds]
        for point in points
    ]
    # metric -> seeds -> repeats, for each setting
    values = [
        {metric: [[_number(repeat[metric]) for repeat in repeats] for repeats in by_seed] for metric in METRICS}
        for by_seed in measured_of
    ]
    summaries = []
    for point, measured in zip(points, values, strict=True):
        base = baseline_of(config, points, point)
        compared = values[base] if base is not None else None
        metrics = {}
        for metric, by_seed in measured.items():
            means = _means(by_seed)
            base_means = _means(compared[metric]) if compared else []
            differs = base_means and points[base or 0] is not point
            metrics[metric] = MetricSummary(
                estimate(means),
                noise(by_seed),
                variation(by_seed),
                paired_difference(means, base_means) if differs else None,
                estimate(base_means).mean if base_means else math.nan,
            )
        summaries.append(SettingSummary(point, metrics))
    return summaries


def baseline_of(config: ExperimentConfig, points: Sequence[Setting], point: Setting) -> int | None:
    """Index of the setting that `point` is compared with: the baseline's x in the same series; or None."""
    if config.report.baseline is None or config.x is None:
        return None
    for i, other in enumerate(points):
        same_series = all(other.values[key] == point.values[key] for key in config.series_keys)
        if same_series and other.values[config.x] == config.report.baseline:
            return i
    return None


def to_frame(summaries: Sequence[SettingSummary]) -> pd.DataFrame:
    """A tidy table: one row for each setting and metric, in the metrics' own units."""
    rows = []
    for summary in summaries:
        for name, m in summary.metrics.items():
            d = m.difference or Estimate(math.nan, math.nan)
            rows.append(
                {
                    **summary.setting.values,
                    "metric": name,
                    "unit": METRICS[name].unit,
                    "mean": m.estimate.mean,
                    "ci95_low": m.estimate.low,
                    "ci95_high": m.estimate.high,
                    "sd_repeats": m.noise,
                    "sd_seeds": m.variation,
                    "difference": d.mean,
                    "difference_ci95_low": d.low,
                    "difference_ci95_high": d.high,
                    "difference_relative": d.mean / m.baseline_mean if m.baseline_mean else math.nan,
                }
            )
    return pd.DataFrame(rows)


def _means(by_seed: Sequence[Sequence[float]]) -> list[float]:
    return [sum(repeats) / len(repeats) for repeats in by_seed]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
