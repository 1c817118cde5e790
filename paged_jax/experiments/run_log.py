"""`environment.json`: where and with what each run in a results directory was made."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_jax.experiments.config import ExperimentConfig
from paged_jax.experiments.environment import read_runs
from paged_jax.experiments.trials import replace_file, write_config

_GENERATED = (
    "config.yaml",
    "environment.json",
    "trials.jsonl",
    "summary.csv",
    "summary.md",
    "summary.tex",
    "published.csv",
)


class RunLog:
    """One run's entry, which begins once everything that can refuse the run has been asked."""

    def __init__(self, directory: Path, *, fresh: bool) -> None:
        """With `fresh`, earlier results are discarded when the run begins."""
        self.directory = directory
        self._fresh = fresh
        self._runs: list[dict[str, Any]] = [] if fresh else read_runs(directory)
        self.number = len(self._runs)
        """What a trial's `run` says."""

    def begin(self, config: ExperimentConfig, environment: Mapping[str, Any]) -> dict[str, Any]:
        """Write the experiment and the run's entry, which is returned: after changes to it call `save`."""
        if self._fresh:
            _discard(self.directory)
        write_config(config, self.directory / "config.yaml")
        entry = dict(environment)
        self._runs.append(entry)
        self.save()
        return entry

    def save(self) -> None:
        """Write what the entries hold now."""
        replace_file(self.directory / "environment.json", json.dumps({"runs": self._runs}, indent=2) + "\n")


def _discard(directory: Path) -> None:
    """Remove what an earlier run wrote, and nothing else that somebody may have put there."""
    for name in _GENERATED:
        (directory / name).unlink(missing_ok=True)
    for pattern in ("*.png", "*.pdf"):
        for figure in (directory / "figures").glob(pattern):
            figure.unlink()
