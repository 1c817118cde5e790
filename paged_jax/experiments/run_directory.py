"""Runs every experiment file of a directory, and puts their published numbers and claims side by side."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paged_jax.experiments.config import ExperimentConfig, load_experiment
from paged_jax.experiments.published import Comparison, compare
from paged_jax.experiments.published_table import comparison_table
from paged_jax.experiments.runner import run_experiment
from paged_jax.experiments.summary import summarise
from paged_jax.experiments.timed_trials import MakeEngine
from paged_jax.experiments.trials import TrialLog

_WIDTH = 100


@dataclass(frozen=True)
class Outcome:
    """What came of one file."""

    path: Path
    text: str
    """The experiment's tables; empty if it failed."""
    comparison: Comparison | None
    error: Exception | None


def load_directory(directory: str | Path, overrides: Sequence[str] = ()) -> dict[Path, ExperimentConfig]:
    """Read and check every `*.yaml` file of the directory, in the order of their names, with the same overrides.

    Raises ValueError, one sentence that names the files, if any cannot run, two have the same name, or there is none.
    """
    paths = sorted(Path(directory).glob("*.yaml"))
    if not paths:
        raise ValueError(f"there is no *.yaml file in {directory}: name an experiment file or a directory of them")
    experiments: dict[Path, ExperimentConfig] = {}
    problems = []
    for path in paths:
        try:
            experiments[path] = load_experiment(path, overrides)
        except ValueError as error:
            problems.append(str(error) if str(path) in str(error) else f"{path}: {error}")
    if problems:
        raise ValueError("; ".join(problems))
    first: dict[str, Path] = {}
    for path, config in experiments.items():
        other = first.setdefault(config.name, path)
        if other is not path:
            raise ValueError(
                f"{other} and {path} both have the name {config.name!r}, and so the same results: rename one of them"
            )
    return experiments


def run_directory(
    experiments: dict[Path, ExperimentConfig],
    out_dir: str | Path | None = None,
    *,
    fresh: bool = False,
    progress: bool = True,
    make_engine: MakeEngine | None = None,
) -> Iterator[Outcome]:
    """Run the experiments one after the other, each into `out_dir/<name>` (default `results/<name>`).

    One that fails is an outcome with its error, and the next one runs; KeyboardInterrupt ends all of it. The other
    arguments are those of `run_experiment`.
    """
    for path, config in experiments.items():
        try:
            result = run_experiment(
                config,
                Path("results" if out_dir is None else out_dir) / config.name,
                fresh=fresh,
                progress=progress,
                make_engine=make_engine,
            )
            records = list(TrialLog(result.directory).read().values())
            comparison = None if config.published is None else compare(config, summarise(config, records))
        except Exception as error:  # whatever it is: the others are worth running
            yield Outcome(path, "", None, error)
        else:
            yield Outcome(path, result.text, comparison, None)


def combined_text(comparisons: Iterable[Comparison]) -> str:
    """One table of all published rows, and below it each claim's verdict; empty without any."""
    comparisons = list(comparisons)
    if not comparisons:
        return ""
    lines = [comparison_table("all experiments: ours against what was published or claimed", comparisons).terminal()]
    for comparison in comparisons:
        if comparison.verdict is not None:
            judged = [row.holds for row in comparison.rows if row.expected is not None]
            text = (
                f"{comparison.name}: {comparison.verdict} ({judged.count(True)} of {len(judged)} rows). "
                f"{comparison.published.statement}"
            )
            lines.append(textwrap.fill(text, _WIDTH, initial_indent="* ", subsequent_indent="  "))
    return "\n".join(lines).rstrip("\n") + "\n"
