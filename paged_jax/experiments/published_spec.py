"""What an experiment file says about numbers that were published, and claims that were made, about its settings.

    published:
      source: "Kwon et al., SOSP 2023, figure 12"
      rows:
        - {name: "Orca (Max)", metric: kv_token_states, at: {engine.allocator: reserve_max}, value: 0.204}
        - name: "vLLM : Orca (Oracle)"                  # a ratio of two sustained rates, within a published range
          sustained: normalized_latency_s_per_token_mean
          limit: 1.0
          at: {engine.allocator: paged}
          over: {at: {engine.allocator: reserve_oracle}}
          value: [1.7, 2.7]
      notes: ["why ours differs"]

A row is one quantity, in the metric's own unit: a `metric` at one setting, what is `sustained` along one series, or the
`spread` over several settings; divided by another (`over`), as a `saving` against another, or as an `order` of several.
With a `statement` the section is a claim: rows have an `expect`, and a verdict is computed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from paged_jax.config import StrictModel, nearest, parse
from paged_jax.experiments.metrics import METRICS
from paged_jax.experiments.sweep import axes_of, label_of, points_of, same, shown, swept_keys

Text = Annotated[str, Field(min_length=1)]
Range = float | tuple[float | None, float | None]
"""A number, or its lowest and highest value; null leaves a side open: [2.7, null] is at least 2.7."""

_KINDS = ("metric", "spread", "sustained")


class Quantity(StrictModel):
    """A number that is computed from the means over seeds of some settings."""

    metric: str | None = None
    """The value of this metric at one setting."""
    spread: str | None = None
    """Largest / smallest value of this metric among settings, 1 when it is flat."""
    sustained: str | None = None
    """The largest x for which this metric stays at or below `limit`, linear between the values of x that were run."""
    limit: float | None = None
    """Of `sustained`, in the metric's unit."""
    at: dict[str, Any] = Field(default_factory=dict)
    """Swept keys and their values, which leave one setting, or one series over x for `sustained`. For `spread` a value
    may be a list, and x may be left out for all of its values."""

    @property
    def kind(self) -> str | None:
        """Which of `metric`, `spread` and `sustained` is set."""
        return next((kind for kind in _KINDS if getattr(self, kind) is not None), None)

    @property
    def metric_name(self) -> str:
        """The metric that is looked at, whatever for."""
        return getattr(self, self.kind or "metric")


class Row(Quantity):
    """One line of the comparison."""

    name: Text
    over: Quantity | None = None
    """What the quantity is divided by; what it does not say is as in the row."""
    saving: Quantity | None = None
    """What the quantity is smaller than: 1 - quantity / this. What it does not say is as in the row."""
    order: Annotated[tuple[dict[str, Any], ...], Field(min_length=2)] | None = None
    """Settings, each like `at` and added to it, from the smallest quantity to the largest as it was published."""
    value: Range | None = None
    """What was published."""
    expect: Range | None = None
    """Of claims: where the quantity lies if the claim holds. An `order` holds if it is found again."""
    informative: bool = False
    """Of claims: shown, not judged. Elsewhere: shown, although no value was published."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for part in filter(None, (self, self.over, self.saving)):
            kinds = [kind for kind in _KINDS if getattr(part, kind) is not None]
            if len(kinds) > 1:
                raise ValueError(f"{' and '.join(kinds)} are two quantities: give one of {', '.join(_KINDS)}")
            if kinds and part.metric_name not in METRICS:
                raise ValueError(
                    f"{kinds[0]} names an unknown metric {part.metric_name!r}{nearest(part.metric_name, list(METRICS))}"
                )
            if part is not self and part.kind not in (None, self.kind):
                raise ValueError(
                    f"{part.kind} cannot be compared with {self.kind}: give both the same kind of quantity"
                )
        if self.kind is None:
            raise ValueError(f"a quantity is missing: give one of {', '.join(_KINDS)}")
        for part in self.parts(()):
            if (part.limit is None) == (part.kind == "sustained"):
                needs = "sustained needs a limit" if part.limit is None else "limit has no effect without sustained"
                raise ValueError(f"{needs}: {'give it one' if part.limit is None else 'leave it out'}")
        forms = [form for form in ("over", "saving", "order") if getattr(self, form) is not None]
        if len(forms) > 1:
            raise ValueError(f"{' and '.join(forms)} cannot be combined: give one of them")
        for field in ("value", "expect"):
            given = getattr(self, field)
            if given is None:
                continue
            if self.order is not None:
                raise ValueError(f"{field} has no effect with order, which is itself what was published: leave it out")
            low, high = ends(given)
            if not low <= high or low == -high == -math.inf:
                raise ValueError(f"{field} must be a number or a range [low, high] with low <= high, got {given!r}")
        return self

    def parts(self, axes: Sequence[Mapping[str, Any]]) -> tuple[Quantity, ...]:
        """The quantities that the row is made of: one, two for a ratio or a saving, or those of its order.

        `axes` are those of the sweep: a key of another quantity takes the place of all keys that move with it.
        """
        own = {name: getattr(self, name) for name in Quantity.model_fields}
        if self.order is not None:
            return tuple(Quantity(**{**own, "at": _merged(self.at, at, axes)}) for at in self.order)
        other = self.over or self.saving
        if other is None:
            return (Quantity(**own),)
        given = {name: v for name in Quantity.model_fields if (v := getattr(other, name)) is not None}
        return Quantity(**own), Quantity(**{**own, **given, "at": _merged(self.at, other.at, axes)})


class Published(StrictModel):
    """Published numbers, or a claim, to hold against this experiment's."""

    source: Text | None = None
    """Where the numbers come from: authors, venue, figure. A claim may do without."""
    statement: Text | None = None
    """The claim in a sentence; then the rows are judged and a verdict is given."""
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]
    notes: tuple[Text, ...] = ()
    """Why ours differs: sentences below the table."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.statement is None and self.source is None:
            raise ValueError("published.source is missing: say where the values come from, or give a statement to test")
        for where, row in self.named_rows():
            judged = row.expect is not None or (row.order is not None and not row.informative)
            if self.statement is None:
                if row.expect is not None:
                    raise ValueError(f"{where}: expect has no effect without published.statement: use value")
                if (row.value is not None or row.order is not None) == row.informative:
                    raise ValueError(
                        f"{where} {'has a value and is informative too' if row.informative else 'has no value'}: "
                        "give the published value, or informative: true for a row without one"
                    )
            elif judged == row.informative:
                raise ValueError(
                    f"{where} {'has an expect and is informative too' if row.informative else 'has no expect'}: "
                    "give the expect that the claim is judged by, or informative: true for a row that is only shown"
                )
        if self.statement is not None and all(row.informative for row in self.rows):
            raise ValueError("published.rows are all informative: a statement needs at least one row with an expect")
        names = [row.name for row in self.rows]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"published.rows has two rows named {name!r}: give each a name of its own")
        return self

    def named_rows(self) -> Iterator[tuple[str, Row]]:
        """Each row with the words that errors call it by."""
        for i, row in enumerate(self.rows):
            yield f"published.rows.{i} ({row.name!r})", row

    def check_settings(self, sweep: Any, x: str | None) -> None:
        """Raise ValueError for a row whose `at` does not pick what it needs from the sweep."""
        axes = axes_of(sweep)
        for where, row in self.named_rows():
            try:
                for part in row.parts(axes):
                    select(part, sweep, x)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None


def published_from_dict(raw: Any) -> Published | None:
    """Check the section `published` of a file, rows first, so that every sentence names its row; null is None."""
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise ValueError(f"published must hold keys and values, got {raw!r}")
    rows = raw.get("rows")
    if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
        if "rows" not in raw:
            raise ValueError("published.rows is missing: list what to compare, each with a name, a metric and a value")
        raise ValueError(f"published.rows must be a list of keys and values, got {rows!r}")
    parsed = []
    for i, row in enumerate(rows):
        where = f"published.rows.{i}"
        try:
            others = {
                part: parse(Quantity, dict(row[part]), f"{where}.{part}")
                for part in ("over", "saving")
                if isinstance(row.get(part), Mapping)
            }
            parsed.append(parse(Row, {**row, **others}, where))
        except ValueError as error:
            name = f"{where} ({row['name']!r})" if isinstance(row.get("name"), str) else where
            raise ValueError(str(error) if where in str(error) else f"{name}: {error}") from None
    return parse(Published, {**raw, "rows": tuple(parsed)}, "published")


def ends(given: Range) -> tuple[float, float]:
    """Lowest and highest value of a range; a number is both, and open sides are infinite."""
    low, high = given if isinstance(given, tuple) else (given, given)
    return -math.inf if low is None else low, math.inf if high is None else high


def select(quantity: Quantity, sweep: Any, x: str | None) -> tuple[int, ...]:
    """Indices of the settings, in the sweep's order, that a quantity is computed from; a series in ascending x.

    Raises ValueError for an unknown key, a value that is not swept, and settings that `at` does not tell apart.
    """
    swept = swept_keys(sweep)
    several = quantity.kind == "spread"
    for key, value in quantity.at.items():
        if key not in swept:
            raise ValueError(f"at names {key!r}, which is not swept{nearest(key, list(swept)) if swept else ''}")
        for one in _listed(value, swept[key]) if several else (value,):
            if not any(same(one, v) for v in swept[key]):
                known = nearest(shown(one), [shown(v) for v in swept[key]])
                raise ValueError(
                    f"at.{key} is {shown(one)!r}, which is not one of the sweep's values{known} "
                    "(published=null runs without the comparison)"
                )
    points = list(points_of(sweep))
    found = [i for i, point in enumerate(points) if _matches(point, quantity.at, several)]
    if not found:
        raise ValueError(
            f"at ({label_of(quantity.at)}) leaves no setting: no row of the sweep has these values together"
        )
    axes = axes_of(sweep)
    if quantity.kind == "sustained":
        _check_series([points[i] for i in found], quantity, x)
        found.sort(key=lambda i: points[i][x or ""])
    varies = {
        "metric": [],
        "sustained": [axis for axis in axes if x in axis],
        "spread": [axis for axis in axes if x in axis or set(axis) & set(quantity.at)],
    }
    left = [axis for axis in axes if axis not in varies[quantity.kind or "metric"]]
    apart = [
        key for axis in left for key in axis if any(not same(points[i][key], points[found[0]][key]) for i in found)
    ]
    if apart:
        one = "series" if quantity.kind == "sustained" else "setting"
        raise ValueError(
            f"at leaves more than one {one}, which differ in {', '.join(apart)}: add what tells them apart"
        )
    if several and len(found) < 2:
        raise ValueError("spread needs at least two settings: give a list of values in at, or leave x out of it")
    return tuple(found)


def _check_series(points: Sequence[Mapping[str, Any]], quantity: Quantity, x: str | None) -> None:
    if x is None:
        raise ValueError("sustained looks along report.x, and nothing is swept: sweep a key such as request_rate")
    if any(isinstance(point[x], bool) or not isinstance(point[x], int | float) for point in points):
        raise ValueError(f"sustained looks along report.x, and {x} has values that are not numbers: use metric")
    if x in quantity.at:
        raise ValueError(f"at names {x}, which sustained looks along: leave it out")
    if len({point[x] for point in points}) < 2:
        raise ValueError(f"sustained needs at least two values of {x}: sweep more of them")


def _merged(at: Mapping[str, Any], other: Mapping[str, Any], axes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`at` with the keys of `other`; keys of a zip group are replaced together."""
    replaced = {key for axis in axes if set(axis) & set(other) for key in axis}
    return {**{key: value for key, value in at.items() if key not in replaced}, **other}


def _matches(point: Mapping[str, Any], at: Mapping[str, Any], several: bool) -> bool:
    return all(
        any(same(point[key], one) for one in (_listed(value, (point[key],)) if several else (value,)))
        for key, value in at.items()
    )


def _listed(value: Any, swept: Sequence[Any]) -> tuple[Any, ...]:
    """A list of values; a value that is a list itself, as some keys have, is one value."""
    return value if isinstance(value, tuple) and not any(same(value, v) for v in swept) else (value,)
