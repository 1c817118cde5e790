"""Published numbers and ours as pairs of markers: an open square, or a bar for a range, and a filled circle."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paged_jax.experiments.metrics import METRICS, Metric
from paged_jax.experiments.plots import COLOURS, LEGEND_ROW_IN, STYLE, WIDTH_IN, axis_name, save
from paged_jax.experiments.published import ComparedRow, Comparison
from paged_jax.experiments.published_spec import ends

_ROW_IN = 0.24
_NAME_LINE_IN = 0.12
_LETTERS_IN_A_NAME = 24
"""So many letters of a row's name stand on one line beside the axis."""
_AXIS_IN = 0.55
_LOG_FROM = 20
"""A panel whose numbers span such a factor has a logarithmic axis."""
_OFFSET = 0.16
"""Of the two markers of a row, in rows."""


def write_published_figure(comparison: Comparison, x: str | None, directory: Path) -> list[Path]:
    """Write figures/published.png and .pdf; returns the files, none if no row has numbers on both sides."""
    panels = _panels(comparison, x)
    if not panels:
        return []
    with matplotlib.rc_context(STYLE):
        return save(draw_published(comparison, x), directory, "published")


def can_be_drawn(row: ComparedRow) -> bool:
    """Whether a row has numbers on both sides, and not the order of settings."""
    known = math.isfinite(row.ours.low) or math.isfinite(row.ours.high)
    return row.row.order is None and row.target is not None and known


def draw_published(comparison: Comparison, x: str | None) -> Figure:
    """A panel for each kind of number, a line for each row, in the order of the table."""
    panels = _panels(comparison, x)
    heights = [_row_height(rows) * len(rows) + _AXIS_IN for rows in panels.values()]
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + LEGEND_ROW_IN), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for ax, ((label, unit), rows) in zip(axes, panels.items(), strict=True):
        _draw_rows(rows, label, unit, ax)
    entries = {word: handle for ax in axes for handle, word in zip(*ax.get_legend_handles_labels(), strict=True)}
    axes[0].legend(entries.values(), entries, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    return figure


def _draw_rows(rows: Sequence[ComparedRow], label: str, unit: str, ax: Axes) -> None:
    numbers = [v for row in rows for v in (*ends(row.target or 0.0), row.ours.low, row.ours.high) if math.isfinite(v)]
    factor, shown_unit = Metric("", unit, "").display(numbers)
    for y, row in enumerate(rows):
        low, high = (end * factor for end in ends(row.target or 0.0))
        finite = [end for end in dict.fromkeys((low, high)) if math.isfinite(end)]
        word = "paper" if row.paper is not None else "expected"
        ax.plot(
            finite, [y - _OFFSET] * len(finite), color="black", marker="s", markerfacecolor="white", markersize=4,
            linewidth=2.5, label=word,
        )  # fmt: skip
        if math.isinf(low) or math.isinf(high):  # the other side is open: an arrow into it
            _arrow(finite[0], y - _OFFSET, math.isinf(high), ax)
        value = (row.ours.low if math.isinf(row.ours.high) else row.ours.high) * factor
        ax.plot([value], [y + _OFFSET], color=COLOURS[0], marker="o", markersize=4, linestyle="", label="ours")
        if not row.ours.is_exact:
            _arrow(value, y + _OFFSET, math.isinf(row.ours.high), ax)
    positive = [v for v in numbers if v > 0]
    if len(positive) == len(numbers) and max(positive) / min(positive) >= _LOG_FROM:
        ax.set_xscale("log")
        ax.margins(x=0.12)
    elif len(positive) == len(numbers):
        ax.set_xlim(0, 1.15 * max(numbers) * factor)
    ax.set_yticks(range(len(rows)), [_wrapped(row) for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.grid(False, axis="y")
    ax.set_xlabel(label if shown_unit in ("", "x") or shown_unit in label else f"{label} ({shown_unit})")


def _arrow(value: float, y: float, upwards: bool, ax: Axes) -> None:
    ax.annotate(
        "",
        xy=(value, y),
        xytext=(16 if upwards else -16, 0),
        textcoords="offset points",
        arrowprops={"arrowstyle": "<-", "linewidth": 0.8},
    )


def _panels(comparison: Comparison, x: str | None) -> dict[tuple[str, str], list[ComparedRow]]:
    """Rows that have numbers on both sides, by what is on their axis and its unit."""
    panels: dict[tuple[str, str], list[ComparedRow]] = {}
    for row in comparison.rows:
        if can_be_drawn(row):
            panels.setdefault(_axis(row, x), []).append(row)
    return panels


def _wrapped(row: ComparedRow) -> str:
    return textwrap.fill(row.row.name, _LETTERS_IN_A_NAME)


def _row_height(rows: Sequence[ComparedRow]) -> float:
    return max(_ROW_IN, _NAME_LINE_IN * max(1 + _wrapped(row).count("\n") for row in rows))


def _axis(row: ComparedRow, x: str | None) -> tuple[str, str]:
    if row.row.over is not None:
        return "ratio", row.unit
    if row.row.saving is not None:
        return "saved", row.unit
    if row.row.kind == "sustained":
        return axis_name(x or ""), row.unit
    label = METRICS[row.row.metric_name].label
    return (f"{label}, largest / smallest" if row.row.kind == "spread" else label), row.unit
