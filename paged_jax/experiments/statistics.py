"""Means with 95 % intervals, paired differences, and noise told apart from variation.

The unit of replication is the seed: each seed is another workload. Repeats of one seed measure the clock's
noise only, so they are averaged before anything is said about settings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its 95 % confidence interval, mean - half_width to mean + half_width."""

    mean: float
    half_width: float
    """NaN with fewer than two seeds."""

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half_width


def t_probability(t: float, df: int) -> float:
    """P(|T| <= t) of Student's t with `df` degrees of freedom, exactly (Abramowitz & Stegun 26.7.3 and
    26.7.4)."""
    theta = math.atan(t / math.sqrt(df))
    sin, cos = math.sin(theta), math.cos(theta)
    if df == 1:
        return 2 * theta / math.pi
    term = cos if df % 2 else 1.0
    total = term
    for k in range(3 if df % 2 else 2, df - 1, 2):
        term *= cos * cos * (k - 1) / k
        total += term
    return 2 / math.pi * (theta + sin * total) if df % 2 else sin * total


def t_quantile(df: int, confidence: float = 0.95) -> float:
    """The t for which P(|T| <= t) = `confidence`: 12.706 at 1 degree of freedom, 1.960 at infinitely many."""
    if df < 1:
        raise ValueError(f"df must be at least 1, got {df}")
    low, high = 0.0, 1.0
    while t_probability(high, df) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, df) < confidence else (low, middle)
    return (low + high) / 2


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of one value per seed, with mean +- t(n - 1) * sd / sqrt(n)."""
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return Estimate(mean, math.nan)
    return Estimate(mean, t_quantile(n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n))


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Mean of values[s] - baseline[s] over seeds s: what the workloads have in common cancels."""
    return estimate([v - b for v, b in zip(values, baseline, strict=True)])


def noise(by_seed: Sequence[Sequence[float]]) -> float:
    """Standard deviation between repeats of the same workload, pooled: sqrt(mean over seeds of the variance).

    NaN with fewer than two repeats.
    """
    if min(len(repeats) for repeats in by_seed) < 2:
        return math.nan
    return math.sqrt(float(np.mean([np.var(repeats, ddof=1) for repeats in by_seed])))


def variation(by_seed: Sequence[Sequence[float]]) -> float:
    """Standard deviation between seeds without the noise: sqrt(max(0, var of the seeds' means - noise^2 / R)).

    The mean of R repeats still carries noise^2 / R of the clock's variance. With one repeat the noise is unknown, so
    none is subtracted. NaN with fewer than two seeds.
    """
    if len(by_seed) < 2:
        return math.nan
    between = float(np.var([np.mean(repeats) for repeats in by_seed], ddof=1))
    left = 0.0
    if min(len(repeats) for repeats in by_seed) > 1:
        left = float(np.mean([np.var(repeats, ddof=1) / len(repeats) for repeats in by_seed]))
    return math.sqrt(max(0.0, between - left))
