"""The table `what | paper | ours | difference`, for a terminal, for Markdown, for LaTeX, and as CSV."""

import csv
import io
import math
import textwrap
from collections.abc import Sequence

from paged_jax.experiments.metrics import Metric
from paged_jax.experiments.published import ComparedRow, Comparison, Measured, element_names
from paged_jax.experiments.published_spec import Range, ends
from paged_jax.experiments.tables import Table, escape, number

_NOTE_WIDTH = 100
_ORDER_WIDTH = 40


def comparison_table(title: str, comparisons: Sequence[Comparison]) -> Table:
    """One table of the rows of all comparisons, with their experiments' names if there are several.

    Shares are in %, and their difference in points; other differences are relative to the nearest end of what was
    published, or else expected.
    """
    rows = [(comparison, row) for comparison in comparisons for row in comparison.rows]
    columns = {
        "experiment": [comparison.name for comparison, _ in rows if len(comparisons) > 1],
        "what": [row.row.name for _, row in rows],
        "paper": [_paper(row, comparison) for comparison, row in rows],
        "expected": [_expected(row, comparison) for comparison, row in rows],
        "ours": [_ours(row) for _, row in rows],
        "difference": [_difference(row) for _, row in rows],
        "holds": [_holds(row) if comparison.verdict else "" for comparison, row in rows],
    }
    optional = ("experiment", "paper", "expected", "holds")
    columns = {name: cells for name, cells in columns.items() if any(cells) or name not in optional}
    left = 2 if "experiment" in columns else 1
    return Table(title, tuple(columns), ("",) * len(columns), tuple(zip(*columns.values(), strict=True)), left)


def as_terminal(comparison: Comparison) -> str:
    """The table, and wrapped below it the verdict and the notes."""
    notes = [textwrap.fill(s, _NOTE_WIDTH, initial_indent="* ", subsequent_indent="  ") for s in sentences(comparison)]
    return "\n".join([_table(comparison).terminal(), *notes, *([""] if notes else [])])


def as_markdown(comparison: Comparison) -> str:
    """The table, and below it the verdict and the notes."""
    return "\n".join([_table(comparison).markdown(), *(f"- {s}" for s in sentences(comparison)), ""])


def as_latex(comparison: Comparison) -> str:
    """The table, and below it the verdict and the notes, a paragraph each."""
    return "\n".join([_table(comparison).latex(), *(f"{escape(s)}\n" for s in sentences(comparison))])


def as_csv(comparison: Comparison) -> str:
    """One line for each row, numbers in the metrics' own units.

    Cells are empty for an open side, for what is not given, and for `ours` and `difference` where only a bound is
    known: then `ours_low` or `ours_high` has it. An order counts the pairs of settings that are the other way round.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["what", "unit", "paper_low", "paper_high", "expect_low", "expect_high", "ours", "ours_low", "ours_high",
         "difference", "holds"]
    )  # fmt: skip
    for row in comparison.rows:
        ours, holds = row.ours, _holds(row) if comparison.verdict else ""
        writer.writerow(
            [
                row.row.name,
                row.unit,
                *_cells(row.paper),
                *_cells(row.row.expect),
                _exact(ours),
                *_cells((ours.low, ours.high)),
                "" if row.difference is None else _exact(row.difference),
                holds,
            ]
        )
    return text.getvalue()


def sentences(comparison: Comparison) -> list[str]:
    """The claim with its verdict, and the notes."""
    statement = comparison.published.statement
    claim = [] if statement is None else [f"Claim: {statement.rstrip('.')}. Verdict: {comparison.verdict}."]
    legends = [_legend(row) for row in comparison.rows if row.row.order is not None and _is_long(row)]
    return claim + legends + list(comparison.published.notes)


def shown_range(low: float, high: float, factor: float) -> str:
    """Such as `20.4`, `1.7 to 2.7`, `≥ 2.7` or `≤ 22`, with all digits that were given."""
    first, last = (f"{end * factor:.10g}" for end in (low, high))
    if math.isinf(high):
        return f"≥ {first}"
    return f"≤ {last}" if math.isinf(low) else first if low == high else f"{first} to {last}"


def display(compared: ComparedRow) -> tuple[float, str]:
    """Factor and unit for people, the same for all numbers of a row."""
    given = [compared.row.value, compared.row.expect, (compared.ours.low, compared.ours.high)]
    numbers = [end for part in given if part is not None for end in ends(part)]
    return Metric("", compared.unit, "").display(numbers)


def _table(comparison: Comparison) -> Table:
    source = comparison.published.source
    if comparison.verdict is None:
        return comparison_table(f"{comparison.name}: ours against {source}", [comparison])
    return comparison_table(f"{comparison.name}: a claim{f' of {source}' if source else ''}, tested", [comparison])


def _paper(compared: ComparedRow, comparison: Comparison) -> str:
    if compared.row.order is not None:
        judged = comparison.verdict is not None and compared.expected is not None
        return "" if judged else _order(compared)
    return _range(compared, compared.row.value)


def _expected(compared: ComparedRow, comparison: Comparison) -> str:
    if compared.row.order is not None:
        return "" if _paper(compared, comparison) else _order(compared)
    return _range(compared, compared.row.expect)


def _order(compared: ComparedRow) -> str:
    return " < ".join(_numbered(compared, element_names(compared.row.order or ())))


def _is_long(compared: ComparedRow) -> bool:
    """Whether the settings of an order get numbers in the table, and their names below it."""
    return len(" < ".join(element_names(compared.row.order or ()))) > _ORDER_WIDTH


def _numbered(compared: ComparedRow, words: Sequence[str]) -> list[str]:
    """Names of settings in an order, and signs between them: long names as their places in what was published."""
    places = {name: str(i) for i, name in enumerate(element_names(compared.row.order or ()), start=1)}
    return [places.get(word, word) for word in words] if _is_long(compared) else list(words)


def _legend(compared: ComparedRow) -> str:
    names = enumerate(element_names(compared.row.order or ()), start=1)
    return f"{compared.row.name}: {'; '.join(f'{place} is {name}' for place, name in names)}."


def _range(compared: ComparedRow, given: Range | None) -> str:
    if given is None:
        return ""
    factor, unit = display(compared)
    return f"{shown_range(*ends(given), factor)} {unit}".rstrip()


def _ours(compared: ComparedRow) -> str:
    if compared.row.order is not None:
        return " ".join(_numbered(compared, compared.ours_order))
    factor, unit = display(compared)
    low, high = number(compared.ours.low * factor), number(compared.ours.high * factor)
    if math.isnan(compared.ours.low) or (compared.ours.low <= 0 and math.isinf(compared.ours.high)):
        return "n/a"
    if math.isinf(compared.ours.high):
        text = f"≥ {low}"
    elif compared.ours.is_exact:
        text = low
    else:
        text = f"{low} to {high}" if compared.ours.low > 0 else f"≤ {high}"
    return f"{text} {unit}".rstrip()


def _difference(compared: ComparedRow) -> str:
    beyond, target = compared.difference, compared.target
    if beyond is None or target is None:
        return ""
    if math.isnan(beyond.low):
        return "n/a"
    if compared.row.order is not None:
        if beyond.high == 0:
            return "same order"
        words = number(beyond.low) if beyond.is_exact else f"{number(beyond.low)} to {number(beyond.high)}"
        return f"{words} of {math.comb(len(compared.row.order), 2)} pairs differ"
    low, high = ends(target)
    if beyond == Measured(0.0, 0.0):
        return "0" if low == high else "inside"
    if beyond.low <= 0 <= beyond.high:
        return "open"
    above = beyond.low > 0
    value, end = (beyond.low, high) if above else (beyond.high, low)
    sign = "" if beyond.is_exact else "≥ " if above else "≤ "
    if compared.unit == "ratio":
        return f"{sign}{100 * value:+.1f} points"
    if end == 0:
        factor, unit = display(compared)
        return f"{sign}{value * factor:+.4g} {unit}".rstrip()
    relative = 100 * value / abs(end)
    return f"{sign}{relative:+.{1 if abs(relative) < 100 else 0}f} %"


def _holds(compared: ComparedRow) -> str:
    if compared.expected is None:
        return "-"
    return {True: "yes", False: "no", None: "open"}[compared.holds]


def _cells(given: Range | None) -> list[str]:
    return ["", ""] if given is None else [f"{end:.12g}" if math.isfinite(end) else "" for end in ends(given)]


def _exact(value: Measured) -> str:
    return f"{value.low:.12g}" if value.is_exact else ""
