"""Tables, notes and figures of a finished experiment, to read in a terminal and to print in a paper."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paged_jax.experiments.config import ExperimentConfig, Setting, settings
from paged_jax.experiments.environment import CODE, COMPARABLE, read_runs
from paged_jax.experiments.metrics import METRICS
from paged_jax.experiments.optimum import optimum_table, write_optimum_figure
from paged_jax.experiments.plots import write_figures
from paged_jax.experiments.published import compare
from paged_jax.experiments.published_plot import can_be_drawn, write_published_figure
from paged_jax.experiments.published_table import as_csv, as_latex, as_markdown, as_terminal
from paged_jax.experiments.request_traces.workload import workload_notes
from paged_jax.experiments.summary import MetricSummary, SettingSummary, summarise, to_frame
from paged_jax.experiments.sweep import name_of, shown
from paged_jax.experiments.tables import Table, deviation, with_interval
from paged_jax.experiments.trials import Trial


def write_reports(config: ExperimentConfig, records: Sequence[Mapping[str, Any]], directory: Path) -> str:
    """Write summary.csv, .md, .tex and figures/ from all trials; returns the text for a terminal.

    With a `published` section also published.csv.
    """
    summaries = summarise(config, records)
    comparison = compare(config, summaries)
    tables = make_tables(config, summaries)
    named = {record.get("run") for record in records}  # a run that was stopped in its warm-up made no trial
    runs = [run for i, run in enumerate(read_runs(directory)) if i in named]
    notes = make_notes(config, records, runs)
    to_frame(summaries).to_csv(directory / "summary.csv", index=False)
    (directory / "published.csv").unlink(missing_ok=True)
    if comparison is not None:
        (directory / "published.csv").write_text(as_csv(comparison), encoding="utf-8")
    figures = [] if config.x is None else list(config.report.panels)
    figures += ["optimum"] if config.report.optimum is not None else []
    figures += ["published"] if comparison and any(map(can_be_drawn, comparison.rows)) else []
    markdown = [
        f"# {config.name}",
        "",
        _design(config, runs),
        "",
        *([as_markdown(comparison)] if comparison else []),
        *(table.markdown() for table in tables),
        *(f"- {note}" for note in notes),
        "",
        *(f"![{name}](figures/{name}.png)\n" for name in figures),
        "### Metrics",
        "",
        *(f"- `{name}`: {METRICS[name].definition}." for name in config.report.y),
        "",
    ]
    (directory / "summary.md").write_text("\n".join(markdown), encoding="utf-8")
    latex = ["% needs \\usepackage{booktabs}", *(table.latex() for table in tables)]
    latex += [as_latex(comparison)] if comparison else []
    (directory / "summary.tex").write_text("\n".join(latex), encoding="utf-8")
    write_figures(config, summaries, directory / "figures")  # last: the numbers are safe if drawing fails
    if config.report.optimum is not None:
        write_optimum_figure(config, summaries, directory / "figures")
    if comparison is not None:
        write_published_figure(comparison, config.x, directory / "figures")
    text = "\n".join([*(table.terminal() for table in tables), *(f"* {note}" for note in notes)])
    return f"{text}\n\n{as_terminal(comparison)}" if comparison else text


def make_tables(config: ExperimentConfig, summaries: Sequence[SettingSummary]) -> list[Table]:
    """Means with intervals; paired differences, if there is a baseline; noise beside variation."""
    enough = "mean ± 95 % interval over seeds" if len(config.seeds) > 1 else "means (one seed: no intervals)"
    tables = [
        _table(config, f"{config.name}: {enough}", summaries, lambda m, f: with_interval(m.estimate, f)),
    ]
    if config.report.baseline is not None and config.x is not None:
        name = f"{name_of(config.x)}={shown(config.report.baseline)}"
        compared = [s for s in summaries if next(iter(s.metrics.values())).difference is not None]
        title = f"{config.name}: difference to {name}, paired by workload, with 95 % intervals (*: excludes 0)"
        tables += [_table(config, title, compared, _difference_cell)] if compared else []
    if config.report.optimum is not None:
        tables.append(optimum_table(config, summaries))
    if config.executor != "simulated":  # which has no noise, and whose variation the intervals show
        title = f"{config.name}: noise (sd between repeats) / variation (sd between seeds)"
        tables.append(_table(config, title, summaries, _deviations_cell))
    return tables


def make_notes(
    config: ExperimentConfig, records: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What a reader must know besides the numbers, one sentence each; `runs` are those that made the records."""
    simulated = config.executor == "simulated"
    made_by = (
        [_simulation_note(config)] if simulated else [*_tokens_notes(config, records), _compilation_note(records, runs)]
    )
    return [
        *made_by,
        *_workload_notes(config),
        *_truncation_notes(records),
        *_mixed_runs_notes(runs),
    ]


def _table(
    config: ExperimentConfig,
    title: str,
    summaries: Sequence[SettingSummary],
    cell: Callable[[MetricSummary, float], str],
) -> Table:
    swept = list(summaries[0].setting.values) if summaries else []
    columns = {
        name: METRICS[name].display([s.metrics[name].estimate.mean for s in summaries]) for name in config.report.y
    }
    return Table(
        title,
        (*map(name_of, swept), *(METRICS[name].label for name in columns)),
        (*("" for _ in swept), *(unit for _, unit in columns.values())),
        tuple(
            (
                *(shown(v) for v in s.setting.values.values()),
                *(cell(s.metrics[name], factor) for name, (factor, _) in columns.items()),
            )
            for s in summaries
        ),
    )


def _difference_cell(m: MetricSummary, factor: float) -> str:
    if m.difference is None:
        return ""
    clear = math.isfinite(m.difference.half_width) and not m.difference.low <= 0 <= m.difference.high
    return with_interval(m.difference, factor, signed=True) + (" *" if clear else "  ")


def _deviations_cell(m: MetricSummary, factor: float) -> str:
    mean = m.estimate.mean * factor
    return f"{deviation(m.noise * factor, mean)} / {deviation(m.variation * factor, mean)}"


def _design(config: ExperimentConfig, runs: Sequence[Mapping[str, Any]]) -> str:
    points = len(settings(config))
    times = (
        "simulated." if config.executor == "simulated" else f"{config.repeats} repeats, interleaved in random order."
    )
    text = (
        f"`{config.model}`: {points} setting{'s' * (points > 1)} x {len(config.seeds)} seeds (workloads)"
        f"{', ' if config.executor == 'simulated' else ' x '}{times}"
    )
    if config.executor == "simulated":
        last = runs[-1] if runs else {}
        changes = " with uncommitted changes" * bool(last.get("git_changes"))
        return f"{text} Commit {last.get('git_commit') or 'unknown'}{changes}."
    if not runs:
        return text
    last = runs[-1]
    return (
        f"{text} Ran on {last['device']['kind']} ({last['cpu']['model']}, {last['cpu']['count']} CPUs), "
        f"JAX {last['versions']['jax']}, commit {last['git_commit'] or 'unknown'}"
        f"{' with uncommitted changes' if last['git_changes'] else ''}."
    )


def _tokens_notes(config: ExperimentConfig, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether trials that served the same workload generated the same tokens, if there are such trials."""
    by_key = {record["key"]: record["tokens_sha256"] for record in records}
    groups: dict[Any, dict[str, list[Setting]]] = defaultdict(lambda: defaultdict(list))
    for point in settings(config):
        for seed in config.seeds:
            for repeat in range(config.repeats):
                tokens = by_key[Trial(point, seed, repeat, config.executor).key]
                groups[(point.workload, seed)][tokens].append(point)
    different = {seed for (_, seed), hashes in groups.items() if len(hashes) > 1}
    if not different:
        in_repeats = ", in every repeat" if config.repeats > 1 else ""
        sizes = {len({p.label for points in hashes.values() for p in points}) for hashes in groups.values()}
        if min(sizes) > 1:
            return [f"Every setting generated identical tokens on each workload{in_repeats}."]
        if max(sizes) > 1:
            return [f"Settings that share a workload generated identical tokens on it{in_repeats}."]
        return ["Every repeat of a trial generated identical tokens."] * (config.repeats > 1)
    (_, seed), hashes = next(item for item in groups.items() if len(item[1]) > 1)
    sides = [" / ".join(dict.fromkeys(p.label for p in points)) for points in hashes.values()]
    return [
        f"WARNING: generated tokens differ between trials of one workload for {len(different)} of "
        f"{len(config.seeds)} seeds; for seed {seed}: {' against '.join(sides)}."
    ]


def _simulation_note(config: ExperimentConfig) -> str:
    devices = sorted({str(point.hardware) for point in settings(config)})
    return (
        f"Simulated: the real scheduler and KV cache manager in virtual time; a step takes what the cost model of "
        f"{' or '.join(devices)} says, and tokens are made up."
    )


def _workload_notes(config: ExperimentConfig) -> list[str]:
    """What had to be made of the recorded requests, or stood in for them."""
    workloads = dict.fromkeys(point.workload for point in settings(config))
    return list(dict.fromkeys(note for workload in workloads for note in workload_notes(workload)))


def _compilation_note(records: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> str:
    warm_ups = [w for run in runs for w in run["warm_up"]]
    programs = sum(w["compilations"] for w in warm_ups)
    seconds = sum(w["compile_s"] for w in warm_ups)
    during = sum(record["metrics"]["compilations"] for record in records)
    note = f"{programs} programs were compiled in {seconds:.1f} s of warm-up, outside the timings"
    if during:
        return f"WARNING: {during:.0f} more were compiled inside timed trials, which are slower for it; {note}."
    return f"{note}, and none during a trial."


def _truncation_notes(records: Sequence[Mapping[str, Any]]) -> list[str]:
    truncated = sum(record["metrics"]["truncated_requests"] for record in records)
    if not truncated:
        return []
    return [
        f"WARNING: {truncated:.0f} requests ended before their length: the KV cache or max_model_len may be "
        "too small for them."
    ]


def _mixed_runs_notes(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = CODE if all(run.get("device", {}).get("platform") == "simulated" for run in runs) else COMPARABLE
    differing = [key for key in keys if len({json.dumps(run.get(key), sort_keys=True) for run in runs}) > 1]
    if not differing:
        return []
    return [
        f"WARNING: the trials come from {len(runs)} runs that differ in {', '.join(differing)} "
        "(environment.json): run again with --fresh before comparing their timings."
    ]
