"""Figures that survive a two-column page and a black-and-white printer: markers, line styles and hatches, not
only colour.

Error bars are 95 % intervals over seeds. Figures are 3.3 inches wide, a column of most conference styles.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from paged_jax.experiments.config import ExperimentConfig
from paged_jax.experiments.metrics import KV_SHARES, METRICS, Metric
from paged_jax.experiments.statistics import Estimate
from paged_jax.experiments.summary import SettingSummary
from paged_jax.experiments.sweep import label_of, name_of, shown, unit_of

WIDTH_IN = 3.3
PANEL_HEIGHT_IN = 2.1
_LETTERS_IN_A_ROW = 45
"""So many letters fit below an axis."""
_LETTERS_IN_A_LEGEND = 20
"""So many fit into one of two columns."""
LEGEND_ROW_IN = 0.15
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#000000",
)  # Okabe and Ito: colour-blind safe
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
MAX_LINES = 2 * len(MARKERS)
"""So many lines of a panel differ: colours, markers and dashes alike repeat, then with the other filling."""
_PARTS = {
    "kv_token_states": ("0.55", ""),
    "kv_reserved": ("#F0E442", "\\\\\\\\"),
    "kv_internal_fragmentation": ("#E69F00", "////"),
    "kv_external_fragmentation": ("#D55E00", "xxxx"),
    "kv_cached": ("#56B4E9", "...."),
    "kv_free": ("white", ""),
}
"""Colour and hatch of each part of the KV pool."""
STYLE = {
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.color": "0.85",
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
    "pdf.fonttype": 42,  # fonts that publishers accept
    "svg.fonttype": "none",
}
"""Matplotlib settings of all figures: `write_figures` applies them, callers of `draw` do so themselves."""


@dataclass(frozen=True)
class Line:
    """One line of a panel, with 95 % intervals."""

    label: str
    xs: Sequence[float]
    """Places on the horizontal axis, as `place_x` gives them."""
    estimates: Sequence[Estimate]


def write_figures(config: ExperimentConfig, summaries: Sequence[SettingSummary], directory: Path) -> list[Path]:
    """Write each figure as PNG (200 dpi) and PDF; returns the files. Nothing swept, no figures."""
    if config.x is None:
        return []
    written = []
    for name, panels in config.report.panels.items():
        with matplotlib.rc_context(STYLE):
            written += save(draw(config, summaries, panels), directory, name)
    return written


def save(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Write a figure as PNG and PDF; returns the files. To be called under `STYLE`."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / f"{name}{suffix}" for suffix in (".png", ".pdf")]
    for file in files:
        figure.savefig(file, dpi=200)
    return files


def draw(config: ExperimentConfig, summaries: Sequence[SettingSummary], panels: Sequence[Sequence[str]]) -> Figure:
    """One figure with a panel for each group of metrics, one below the other."""
    figure = Figure(figsize=(WIDTH_IN, PANEL_HEIGHT_IN * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    series: dict[tuple[Any, ...], list[SettingSummary]] = {}
    for summary in summaries:
        key = tuple(summary.setting.values[k] for k in config.series_keys)
        series.setdefault(key, []).append(summary)
    rows = 0
    for panel, ax in zip(panels, axes, strict=True):
        if set(panel) <= set(KV_SHARES) and len(panel) > 1 and len(series) == 1:
            _stacked_bars(config, summaries, panel, ax)
        else:
            _lines(config, series, panel, ax)
        if len(ax.get_legend_handles_labels()[1]) > 1:
            rows += legend(ax)
    axes[-1].set_xlabel(axis_name(config.x or ""))
    figure.set_figheight(PANEL_HEIGHT_IN * len(panels) + LEGEND_ROW_IN * max(0, rows - 2 * len(panels)))
    return figure


def _lines(
    config: ExperimentConfig,
    series: dict[tuple[Any, ...], list[SettingSummary]],
    panel: Sequence[str],
    ax: Axes,
) -> None:
    xs = list(dict.fromkeys(s.setting.values[config.x or ""] for points in series.values() for s in points))
    place = place_x(xs, ax)
    labels = [METRICS[name].label for name in panel]
    shared = labels[0] if len(panel) == 1 else _common_words(labels)
    lines = []
    for name in panel:
        for key, points in series.items():
            words = [METRICS[name].label.removeprefix(shared).strip()] if len(panel) > 1 else []
            values = dict(zip(config.series_keys, key, strict=True))
            words += [label_of({k: values[k] for k in config.legend_keys})] if values else []
            xs = [place[s.setting.values[config.x or ""]] for s in points]
            lines.append(Line(", ".join(words), xs, [s.metrics[name].estimate for s in points]))
    draw_lines(lines, shared or "value", METRICS[panel[0]], ax)


def draw_lines(lines: Sequence[Line], label: str, metric: Metric, ax: Axes) -> None:
    """Draw lines that differ without colour, and name the vertical axis `label` with the metric's unit."""
    factor, unit = metric.display([e.mean for line in lines for e in line.estimates])
    for i, line in enumerate(lines):
        if not any(math.isfinite(e.mean) for e in line.estimates):
            continue  # its place in the order of colours stays free, so that a series looks the same in every panel
        ax.errorbar(
            line.xs,
            [e.mean * factor for e in line.estimates],
            yerr=[0 if e.half_width != e.half_width else e.half_width * factor for e in line.estimates],
            label=line.label,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle=_LINES[i % len(_LINES)],
            markerfacecolor=COLOURS[i % len(COLOURS)] if i % 2 == 0 else "white",
            markersize=3.5,
            linewidth=1.1,
            elinewidth=0.8,
            capsize=2,
        )
    ax.set_ylabel(f"{label} ({unit})" if unit else label)
    if not any(e.mean < 0 for line in lines for e in line.estimates):
        ax.set_ylim(bottom=0)


def _stacked_bars(
    config: ExperimentConfig, summaries: Sequence[SettingSummary], panel: Sequence[str], ax: Axes
) -> None:
    positions = range(len(summaries))
    bottom = [0.0] * len(summaries)
    for name in panel:
        colour, hatch = _PARTS[name]
        heights = [100 * s.metrics[name].estimate.mean for s in summaries]
        ax.bar(
            positions,
            heights,
            0.72,
            bottom=bottom,
            label=METRICS[name].label,
            color=colour,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.6,
        )
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    ax.set_xticks(positions)
    _name_ticks([s.setting.values[config.x or ""] for s in summaries], ax)
    ax.grid(False, axis="x")
    ax.set_ylim(0, 100)
    ax.set_ylabel("KV pool (%)")


def legend(ax: Axes) -> int:
    """Above the axes, where it hides no data, in one column where the words are long; returns its rows."""
    words = ax.get_legend_handles_labels()[1]
    columns = 2 if max(map(len, words)) <= _LETTERS_IN_A_LEGEND else 1
    ax.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=columns,
        frameon=False,
        handlelength=2.6,
        columnspacing=1.2,
    )
    return -(-len(words) // columns)


def place_x(xs: Sequence[Any], ax: Axes) -> dict[Any, float]:
    """Where each value lies: numbers on a scale (log2 if they span a factor of 8), others side by side."""
    numeric = all(isinstance(x, int | float) and not isinstance(x, bool) for x in xs)
    place = {x: float(x) if numeric else float(i) for i, x in enumerate(xs)}
    if numeric and min(xs) > 0 and max(xs) / min(xs) >= 8:
        ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(list(place.values())))
    _name_ticks(xs, ax)
    ax.xaxis.set_minor_locator(NullLocator())
    if not numeric:
        ax.set_xlim(-0.5, len(xs) - 0.5)
    return place


def _name_ticks(xs: Sequence[Any], ax: Axes) -> None:
    """Names of policies are long: they are turned, where they would run into each other."""
    names = [shown(x) for x in xs]
    ax.xaxis.set_major_formatter(FixedFormatter(names))
    if len(names) * max(map(len, names)) > _LETTERS_IN_A_ROW:
        ax.tick_params(axis="x", labelrotation=30)
        for label in ax.get_xticklabels():
            label.set(horizontalalignment="right", rotation_mode="anchor")


def axis_name(key: str) -> str:
    """`engine.block_size` as words with its unit, where the unit is known."""
    words, unit = name_of(key).replace(".", " ").replace("_", " "), unit_of(key)
    return f"{words} ({unit})" if unit else words


def _common_words(labels: Sequence[str]) -> str:
    """What the labels of one axis share: `TTFT p50` and `TTFT p95` give `TTFT`."""
    shared = []
    for words in zip(*(label.split() for label in labels), strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return " ".join(shared)
