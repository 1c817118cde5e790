"""Published numbers held against ours, and the verdict on a claim.

Quantities are computed from each setting's mean over seeds. What is sustained may lie beyond the values of x that were
run; then only a bound is known, and ratios, savings and verdicts are of bounds too.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paged_jax.experiments.config import ExperimentConfig
from paged_jax.experiments.metrics import METRICS
from paged_jax.experiments.published_spec import Published, Quantity, Range, Row, ends, select
from paged_jax.experiments.summary import SettingSummary
from paged_jax.experiments.sweep import axes_of, shown, unit_of

Verdict = Literal["holds", "holds in part", "does not hold", "undecided"]

_ROUNDING = 1e-9
"""Relative; the ends of a range belong to it."""


@dataclass(frozen=True)
class Measured:
    """A number, or what is known of it: it lies from `low` to `high`. NaN where a metric has no data."""

    low: float
    high: float

    @property
    def is_exact(self) -> bool:
        """Whether it is a number and not only a bound."""
        return self.low == self.high

    def over(self, other: "Measured") -> "Measured":
        """The ratio of two numbers; those that are only bounds are at least 0."""
        if self.is_exact and other.is_exact:
            ratio = self.low / other.low if other.low else math.nan
            return Measured(ratio, ratio)
        if math.isnan(self.low + other.low):
            return Measured(math.nan, math.nan)
        return Measured(
            0.0 if math.isinf(other.high) else self.low / other.high,
            math.inf if other.low <= 0 else self.high / other.low,
        )

    def saved(self, other: "Measured") -> "Measured":
        """1 - self / other."""
        ratio = self.over(other)
        return Measured(1 - ratio.high, 1 - ratio.low)

    def beyond(self, target: Range) -> "Measured":
        """Self less the nearest end of the target, 0 inside of it."""

        def distance(value: float) -> float:
            low, high = ends(target)
            if math.isnan(value):
                return math.nan
            near = min(max(value, low), high)
            inside = value == near or (math.isfinite(value) and math.isclose(value, near, rel_tol=_ROUNDING))
            return 0.0 if inside else value - near

        return Measured(distance(self.low), distance(self.high))


@dataclass(frozen=True)
class ComparedRow:
    """One row: ours against what was published or expected."""

    row: Row
    unit: str
    """Of all its numbers; "ratio" for parts of 1, "x" for how many times."""
    ours: Measured
    """Of an order: how many pairs of its settings are the other way round, or equal."""
    ours_order: tuple[str, ...] = ()
    """Of an order: the settings' names as they are found, with <, = or, where bounds leave it open, ? between."""

    @property
    def paper(self) -> Range | None:
        """What was published."""
        return 0.0 if self.row.order is not None else self.row.value

    @property
    def expected(self) -> Range | None:
        """Where ours lies if the claim holds; None for a row that is not judged."""
        return 0.0 if self.row.order is not None and not self.row.informative else self.row.expect

    @property
    def target(self) -> Range | None:
        """What ours is shown against: what was published, or else what is expected; None where neither is given."""
        return self.paper if self.paper is not None else self.expected

    @property
    def difference(self) -> Measured | None:
        """Ours less the nearest end of the target."""
        return None if self.target is None else self.ours.beyond(self.target)

    @property
    def holds(self) -> bool | None:
        """Whether ours lies where it is expected; None if that is not judged, or left open by a bound."""
        if self.expected is None:
            return None
        beyond = self.ours.beyond(self.expected)
        if beyond.is_exact:
            return beyond.low == 0
        return False if beyond.low > 0 or beyond.high < 0 else None


@dataclass(frozen=True)
class Comparison:
    """All rows of an experiment's `published` section."""

    name: str
    published: Published
    rows: tuple[ComparedRow, ...]

    @property
    def verdict(self) -> Verdict | None:
        """On the statement, from the rows that are judged: all, some or none of them hold; None without a statement.

        "undecided" if none holds, but a bound leaves one open.
        """
        if self.published.statement is None:
            return None
        judged = [row.holds for row in self.rows if row.expected is not None]
        if all(judged):
            return "holds"
        if any(judged):
            return "holds in part"
        return "undecided" if None in judged else "does not hold"


def compare(config: ExperimentConfig, summaries: Sequence[SettingSummary]) -> Comparison | None:
    """The rows of `config.published`; `summaries` are those of all settings, in the sweep's order. None without."""
    if config.published is None:
        return None
    rows = tuple(_compared(row, config, summaries) for row in config.published.rows)
    return Comparison(config.name, config.published, rows)


def sustained(xs: Sequence[float], values: Sequence[float], limit: float) -> Measured:
    """The x at which values, linear between ascending positive xs, first exceed `limit`.

    At least the last x if none does; at most the first x if that one does already. A value of NaN counts as above.
    """
    for i, value in enumerate(values):
        if value <= limit:
            continue
        if i == 0:
            return Measured(0.0, float(xs[0]))
        share = (limit - values[i - 1]) / (value - values[i - 1]) if math.isfinite(value) else 0.0
        crossing = xs[i - 1] + share * (xs[i] - xs[i - 1])
        return Measured(crossing, crossing)
    return Measured(float(xs[-1]), math.inf)


def element_names(order: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the settings of an order are called: by the value alone, if all differ in one and the same key."""
    short = len({tuple(at) for at in order}) == 1 and len(order[0]) == 1
    return [
        ", ".join(shown(v) if short else f"{k.rpartition('.')[2]}={shown(v)}" for k, v in at.items()) for at in order
    ]


def _compared(row: Row, config: ExperimentConfig, summaries: Sequence[SettingSummary]) -> ComparedRow:
    parts = row.parts(axes_of(config.sweep))
    values = [_measure(part, config, summaries) for part in parts]
    if row.order is not None:
        return ComparedRow(row, "pairs", _disorder(values), _found_order(element_names(row.order), values))
    if row.saving is not None:
        return ComparedRow(row, "ratio", values[0].saved(values[1]))
    units = [_unit(part, config.x) for part in parts]
    if row.over is not None:
        unit = "x" if units[0] == units[1] else f"{units[0] or '1'} / ({units[1] or '1'})"
        return ComparedRow(row, unit, values[0].over(values[1]))
    return ComparedRow(row, units[0], values[0])


def _measure(quantity: Quantity, config: ExperimentConfig, summaries: Sequence[SettingSummary]) -> Measured:
    chosen = [summaries[i] for i in select(quantity, config.sweep, config.x)]
    means = [summary.metrics[quantity.metric_name].estimate.mean for summary in chosen]
    if quantity.kind == "sustained":
        xs = [summary.setting.values[config.x or ""] for summary in chosen]
        return sustained(xs, means, quantity.limit or 0.0)
    if quantity.kind == "spread":
        spread = max(means) / min(means) if min(means) and not math.isnan(sum(means)) else math.nan
        return Measured(spread, spread)
    return Measured(means[0], means[0])


def _disorder(values: Sequence[Measured]) -> Measured:
    """How many pairs are not ascending: a range, where bounds leave pairs open."""
    wrong = unknown = 0
    for small, large in itertools.combinations(values, 2):
        if small.low >= large.high:
            wrong += 1
        elif not small.high < large.low:
            unknown += 1
    return Measured(wrong, wrong + unknown)


def _found_order(names: Sequence[str], values: Sequence[Measured]) -> tuple[str, ...]:
    """Names from the smallest value to the largest, with <, = or ? between."""
    ascending = sorted(zip(names, values, strict=True), key=lambda pair: (pair[1].low, pair[1].high))
    words = [ascending[0][0]]
    for (_, before), (name, value) in itertools.pairwise(ascending):
        equal = before == value and value.is_exact
        words += ["=" if equal else "<" if before.high < value.low else "?", name]
    return tuple(words)


def _unit(quantity: Quantity, x: str | None) -> str:
    if quantity.kind == "sustained":
        return unit_of(x or "")
    return "x" if quantity.kind == "spread" else METRICS[quantity.metric_name].unit
