"""Arrival times of a trace: from any clock and unit to nanoseconds after its first request.

Integers throughout: a trace written relative to its start, and the same trace with an offset of 1.7e9 s since the
epoch, give exactly the same times, which binary fractions of seconds would not.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal

type TimeUnit = Literal["s", "ms", "us"]

_DECIMALS = {"s": 9, "ms": 6, "us": 3}
"""Powers of ten from a unit to nanoseconds."""
_UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
_YEAR_NS = 365 * 24 * 3600 * 10**9
_LATEST = 10**18
"""More than any clock counts in any unit: microseconds since the epoch are at 2e15."""
_LEAST_GAP_NS = 1000
"""Mean nanoseconds between requests: less than a millisecond per thousand of them is no traffic of any service."""

_LIKE_TIME = re.compile(r"time|stamp|arriv|sent|_at$", re.IGNORECASE)
_DATE_TIME = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[ T](?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:\.(?P<fraction>\d+))?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?"
)


def other_clock(names: Iterable[str], known: Sequence[str]) -> str | None:
    """The first of a file's columns or keys that sounds like a time and is none of the `known` ones."""
    known = [name.casefold() for name in known]
    return next((name for name in names if name.casefold() not in known and _LIKE_TIME.search(name)), None)


def time_ns(value: Any, unit: TimeUnit, where: str, name: str) -> int:
    """Nanoseconds on the file's clock of a cell or a JSON number; ValueError when it is none or negative."""
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | Decimal) or "_" in str(value):
            raise InvalidOperation
        number = Decimal(value)
    except InvalidOperation:
        raise ValueError(f"{where}: {name} is {value!r}, not a time: mend or delete the row") from None
    if not number.is_finite() or not 0 <= number <= _LATEST:
        raise ValueError(f"{where}: {name} is {value}, not a time from 0 on: mend or delete the row")
    return round(number.scaleb(_DECIMALS[unit]))


def column_ns(cells: Sequence[str], lines: Sequence[int], path: Path, name: str, unit: TimeUnit | None) -> list[int]:
    """Nanoseconds of a column of numbers (in `unit`; unset, seconds) or of dates with a time of day (without one)."""
    if _DATE_TIME.fullmatch(cells[0].strip()) is None:
        unit = unit or "s"
        times = [time_ns(cell, unit, f"{path}, line {line}", name) for cell, line in zip(cells, lines, strict=True)]
        check_span(times, lines, path, unit)
        return times
    if unit is not None:
        raise ValueError(f"workload.time_unit has no effect on the dates in the column {name} of {path}: leave it out")
    days: dict[str, int] = {}
    times, zoned = [], _DATE_TIME.fullmatch(cells[0].strip())["zone"] is not None
    for cell, line in zip(cells, lines, strict=True):
        found = _DATE_TIME.fullmatch(cell.strip())
        if found is None or (found["zone"] is not None) != zoned:
            raise ValueError(
                f"{path}, line {line}: {name} is {cell!r}, while line {lines[0]} has {cells[0]!r}: "
                "write all times in the same way"
            )
        day = found["date"]
        if day not in days:
            days[day] = _day_number(day, f"{path}, line {line}")
        hours, minutes, seconds = int(found["h"]), int(found["m"]), int(found["s"])
        if hours > 23 or minutes > 59 or seconds > 60:
            raise ValueError(f"{path}, line {line}: {cell!r} is no time of day: mend or delete the row")
        minutes += hours * 60 - _zone_minutes(found["zone"])
        fraction = (found["fraction"] or "").ljust(9, "0")[:9]
        times.append(((days[day] * 1440 + minutes) * 60 + seconds) * 10**9 + int(fraction))
    check_span(times, lines, path, None)
    return times


def check_span(times: Sequence[int], lines: Sequence[int], path: Path, unit: TimeUnit | None) -> None:
    """Raise ValueError for times that cannot be one trace in this unit: over a year, or a million requests a second.

    Equal times throughout are a batch, and pass.
    """
    first, last = min(times), max(times)
    span = last - first
    remedy = "is the column right?" if unit is None else f"they are read as {_UNIT_NAMES[unit]}: set workload.time_unit"
    if span > _YEAR_NS:
        raise ValueError(
            f"{path}: {span / _YEAR_NS:.3g} years pass from line {lines[times.index(first)]} to line "
            f"{lines[times.index(last)]}; {remedy}, unless some rows count from another origin than the others"
        )
    if 0 < span < _LEAST_GAP_NS * len(times):
        raise ValueError(f"{path}: {len(times)} requests within {span / 1e9:.3g} s are no trace of a service; {remedy}")


def clock_notes(times: Sequence[int], lines: Sequence[int], path: Path) -> list[str]:
    """What has to be done to these times to count from the first request and be in order, one sentence each."""
    notes = []
    first = min(times)
    if first:
        line = lines[times.index(first)]
        notes.append(f"{path}: times count from the first request, that of line {line}, not from the file's own origin")
    late = sum(later < earlier for earlier, later in itertools.pairwise(times))
    if late:
        notes.append(
            f"{path}: {late} {'row is' if late == 1 else 'rows are'} earlier than the one before; requests were put in "
            "the order of their times"
        )
    if len(times) > 1 and first == max(times):
        notes.append(f"{path}: all rows have the same time, so all requests arrive at once")
    return notes


def _day_number(day: str, where: str) -> int:
    try:
        return date.fromisoformat(day).toordinal()
    except ValueError:
        raise ValueError(f"{where}: there is no day {day}: mend or delete the row") from None


def _zone_minutes(zone: str | None) -> int:
    if zone is None or zone == "Z":
        return 0
    minutes = int(zone[1:3]) * 60 + int(zone[-2:])
    return -minutes if zone[0] == "-" else minutes
