"""Figures of several results on the same axes: what `paged-jax plot` draws."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from paged_jax.config import nearest
from paged_jax.experiments.config import ExperimentConfig, load_experiment
from paged_jax.experiments.environment import CODE, COMPARABLE, read_runs
from paged_jax.experiments.metrics import METRICS
from paged_jax.experiments.plots import (
    LEGEND_ROW_IN,
    MAX_LINES,
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
from paged_jax.experiments.summary import SettingSummary, summarise
from paged_jax.experiments.sweep import label_of, same, swept_keys
from paged_jax.experiments.trials import TrialLog, flat, plain_config, plan

_LETTERS_IN_A_NAME = 42
"""So many fit beside a line's sample in the legend."""
_ROWS_IN_A_PANEL = 2
"""So many rows of a legend have room in the height of a panel."""


@dataclass(frozen=True)
class Result:
    """What a results directory holds."""

    directory: Path
    config: ExperimentConfig
    summaries: tuple[SettingSummary, ...]
    runs: tuple[dict[str, Any], ...]
    """Descriptions of the runs that made its trials."""


@dataclass(frozen=True)
class Overlay:
    """The figures that were drawn."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]
    """What a reader must know before comparing the lines, one sentence each."""


def read_result(directory: str | Path) -> Result:
    """Read what `paged-jax run` left; ValueError, one sentence, if it is no directory of complete results."""
    directory = Path(directory)
    for name in ("config.yaml", "trials.jsonl"):
        if not (directory / name).is_file():
            raise ValueError(f"{directory} holds no results, there is no {name}: name what `paged-jax run` has written")
    try:
        config = load_experiment(directory / "config.yaml")
    except ValueError as error:
        raise ValueError(f"{directory}/config.yaml cannot be read by this version: {error}") from None
    records = TrialLog(directory).read()
    trials = plan(config)
    missing = sum(trial.key not in records for trial in trials)
    if missing and set(records) - {trial.key for trial in trials}:
        raise ValueError(
            f"{directory} holds trials that are not of its config.yaml as this version reads it: run {config.name} "
            "again with --fresh"
        )
    if missing:
        raise ValueError(
            f"{directory} holds {len(trials) - missing} of {len(trials)} trials: run {config.name} again to finish it"
        )
    own = [records[trial.key] for trial in trials]
    for record in own:
        unknown = [metric for metric in METRICS if metric not in record["metrics"]]
        if unknown:
            raise ValueError(
                f"{directory} holds no {unknown[0]}, so another version made it: run {config.name} again with --fresh"
            )
    named = {record.get("run") for record in own}
    runs = tuple(run for i, run in enumerate(read_runs(directory)) if i in named)
    return Result(directory, config, tuple(summarise(config, own)), runs)


def overlay(
    directories: Sequence[str | Path], out_dir: str | Path, *, metrics: Sequence[str] = (), x: str | None = None
) -> Overlay:
    """Draw each metric over x with the lines of all results into `out_dir`, as PDF and PNG.

    `metrics` are by default those that the reports of all results show, `x` the horizontal axis that they share.
    Raises ValueError, one sentence, before anything is drawn.
    """
    for i, directory in enumerate(directories):
        if directory in directories[:i]:
            raise ValueError(f"{directory} is named twice: name each of the results once")
    results = [read_result(directory) for directory in directories]
    x = _shared_x(results, x)
    metrics = _shared_metrics(results, metrics)
    names = name_results(results)
    files = []
    for metric in metrics:
        with matplotlib.rc_context(STYLE):
            files += save(draw_overlay(results, names, metric, x), Path(out_dir), metric)
    return Overlay(tuple(files), tuple(comparability_notes(results)))


def name_results(results: Sequence[Result]) -> list[str]:
    """What tells the results apart: the experiments' names, else what differs in their configurations, else the
    directories."""
    names = [result.config.name for result in results]
    if len(set(names)) == len(names):
        return names
    plain = [flat(plain_config(result.config)) for result in results]
    keys = [
        key
        for key in dict.fromkeys(key for values in plain for key in values)
        if not key.startswith(("name", "report.", "published.", "seeds", "repeats", "sweep."))
        and any(values.get(key) != plain[0].get(key) for values in plain)
    ]
    differing = [label_of({key: _as_swept(values.get(key)) for key in keys}) for values in plain]
    return differing if len(set(differing)) == len(results) else [str(result.directory) for result in results]


def draw_overlay(results: Sequence[Result], names: Sequence[str], metric: str, x: str) -> Figure:
    """One panel: the metric over x, a line for each series of each result."""
    figure = Figure(figsize=(WIDTH_IN, PANEL_HEIGHT_IN), layout="constrained")
    ax = figure.subplots()
    place = place_x(_all_values(results, x), ax)
    lines = []
    for result, name in zip(results, names, strict=True):
        for key, points in _series(result, x).items():
            words = [name] * (len(results) > 1) + [label_of(dict(key))] * bool(key)
            points = sorted(points, key=lambda point: place[point.setting.values[x]])
            xs = [place[point.setting.values[x]] for point in points]
            label = textwrap.fill(", ".join(words), _LETTERS_IN_A_NAME)
            lines.append(Line(label, xs, [point.metrics[metric].estimate for point in points]))
    if len(lines) > MAX_LINES:
        raise ValueError(f"{len(lines)} lines cannot be told apart in one figure: name results that have {MAX_LINES}")
    draw_lines(lines, METRICS[metric].label, METRICS[metric], ax)
    ax.set_xlabel(axis_name(x))
    if len(lines) > 1:
        rows = legend(ax) + sum(line.label.count("\n") for line in lines)
        figure.set_figheight(PANEL_HEIGHT_IN + LEGEND_ROW_IN * max(0, rows - _ROWS_IN_A_PANEL))
    return figure


def comparability_notes(results: Sequence[Result]) -> list[str]:
    """Why differences between the lines may come from something else than their settings, one sentence each."""
    notes = []
    executors = {result.config.executor for result in results}
    keys = CODE if executors == {"simulated"} else COMPARABLE
    runs = [run for result in results for run in result.runs]
    differing = [key for key in keys if len({json.dumps(run.get(key), sort_keys=True) for run in runs}) > 1]
    if len(executors) > 1:
        notes.append("WARNING: some of the results are measured and others simulated.")
    elif differing:
        notes.append(
            f"WARNING: the results come from runs that differ in {', '.join(differing)} (environment.json): their "
            "timings are not comparable."
        )
    if len({result.config.seeds for result in results}) > 1:
        seeds = " against ".join(dict.fromkeys(str(list(result.config.seeds)) for result in results))
        notes.append(f"WARNING: the results have different seeds, {seeds}, and so different workloads.")
    return notes


def _shared_x(results: Sequence[Result], x: str | None) -> str:
    for result in results:
        swept = list(swept_keys(result.config.sweep))
        if not swept:
            raise ValueError(f"{result.directory} sweeps nothing, so it has no axis to draw over: leave it out")
        if x is not None and x not in swept:
            raise ValueError(f"{result.directory} does not sweep {x!r}{nearest(x, swept)}")
    if x is not None:
        return x
    first = results[0]
    for result in results:
        if result.config.x != first.config.x:
            raise ValueError(
                f"{first.directory} is drawn over {first.config.x} and {result.directory} over {result.config.x}: "
                "choose a key that both sweep with --x, or leave one out"
            )
    return first.config.x or ""


def _shared_metrics(results: Sequence[Result], metrics: Sequence[str]) -> Sequence[str]:
    for metric in metrics:
        if metric not in METRICS:
            raise ValueError(f"there is no metric {metric!r}{nearest(metric, list(METRICS))}")
    shared = [m for m in results[0].config.report.y if all(m in result.config.report.y for result in results)]
    if not metrics and not shared:
        raise ValueError("the reports of these results share no metric: choose one with --metric")
    return list(dict.fromkeys(metrics)) or shared


def _series(result: Result, x: str) -> dict[tuple[tuple[str, Any], ...], list[SettingSummary]]:
    """Settings by the values that tell them apart besides x."""
    config = result.config.model_copy(update={"report": result.config.report.model_copy(update={"x": x})})
    series: dict[tuple[tuple[str, Any], ...], list[SettingSummary]] = {}
    for summary in result.summaries:
        key = tuple((k, summary.setting.values[k]) for k in config.legend_keys)
        series.setdefault(key, []).append(summary)
    return series


def _all_values(results: Sequence[Result], x: str) -> list[Any]:
    """The values of x of all results, numbers in ascending order."""
    values: list[Any] = []
    for result in results:
        values += [v for v in swept_keys(result.config.sweep)[x] if not any(same(v, w) for w in values)]
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return sorted(values) if numeric else values


def _as_swept(value: Any) -> Any:
    return tuple(map(_as_swept, value)) if isinstance(value, list) else value
