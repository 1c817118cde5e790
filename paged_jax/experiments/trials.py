"""Trials: their plan, and the file that remembers those that are done."""

import hashlib
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq
from ruamel.yaml.error import YAMLError

from paged_jax.experiments.config import ExperimentConfig, Setting, as_plain, settings
from paged_jax.experiments.measurements import Served
from paged_jax.experiments.metrics import METRICS, tokens_sha256
from paged_jax.experiments.request_traces.workload import workload_fingerprint

_FILES_DIFFER = "the settings agree: the file of a trace, a policy or a hardware has changed, or a stand-in ran"

_ORDER_SEED = 20230917
"""Of the order of trials; fixed, so that a resumed run goes on in the order that was begun."""


@dataclass(frozen=True)
class Trial:
    """One setting on one workload, once."""

    setting: Setting
    seed: int
    repeat: int
    executor: str

    @cached_property
    def key(self) -> str:
        """Fingerprint of everything that the trial's numbers depend on, but for the machine and the code."""
        setting = self.setting
        parts = [
            setting.model,
            self.executor,
            setting.hardware_fingerprint,
            setting.engine.model_dump(),
            setting.workload.model_dump(),
            workload_fingerprint(setting.workload),
            setting.policy_fingerprint,
        ]
        text = json.dumps(parts, sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}-seed{self.seed}-repeat{self.repeat}"


def plan(config: ExperimentConfig) -> list[Trial]:
    """All trials in the order in which they run.

    Randomised complete blocks: every setting runs once, in random order, before any runs again, so that a
    drift of the machine falls on all settings alike.
    """
    rng = np.random.default_rng(_ORDER_SEED)
    points = settings(config)
    blocks = [(seed, repeat) for repeat in range(config.repeats) for seed in config.seeds]
    return [
        Trial(points[i], seed, repeat, config.executor)
        for seed, repeat in (blocks[b] for b in rng.permutation(len(blocks)))
        for i in rng.permutation(len(points))
    ]


def trial_record(trial: Trial, requests: Sequence[Served], metrics: Mapping[str, float]) -> dict[str, Any]:
    """What `trials.jsonl` says of a trial, but for the run that it belongs to."""
    return {
        "key": trial.key,
        "setting": trial.setting.values,
        "seed": trial.seed,
        "repeat": trial.repeat,
        "tokens_sha256": tokens_sha256(requests),
        "metrics": dict(metrics),
    }


class TrialLog:
    """`trials.jsonl`: one line per finished trial. A line is on the disk before `append` returns."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "trials.jsonl"

    def read(self) -> dict[str, dict[str, Any]]:
        """Records by trial key. A last line that a kill cut off is removed from the file."""
        if not self.path.exists():
            return {}
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        records = {}
        for number, line in enumerate(whole.decode("utf-8").splitlines(), start=1):
            try:
                record = json.loads(line)
                records[record["key"]] = record
            except (json.JSONDecodeError, KeyError, TypeError):
                raise ValueError(
                    f"line {number} of {self.path} is not a trial: remove the line, and its trial runs again"
                ) from None
        return records

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one trial; NaN is written as null, which every JSON reader knows."""
        metrics = {k: None if math.isnan(v) else v for k, v in record["metrics"].items()}
        line = json.dumps({**record, "metrics": metrics}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def check_same_experiment(
    config: ExperimentConfig, trials: Iterable[Trial], done: Iterable[str], directory: Path
) -> None:
    """Raise ValueError, naming the keys that differ, if the directory has trials of another experiment."""
    strangers = set(done) - {trial.key for trial in trials}
    if not strangers:
        return
    difference = _difference(directory / "config.yaml", config)
    raise ValueError(
        f"{directory} holds {len(strangers)} trial{'s' * (len(strangers) > 1)} of a different configuration"
        f" ({difference or _FILES_DIFFER}): "
        "discard them with --fresh, or keep them and give this experiment another name or output directory"
    )


def check_metrics(done: Mapping[str, Mapping[str, Any]], directory: Path) -> None:
    """Raise ValueError if earlier trials lack a metric, which a version of this package did not have yet."""
    lacking = [name for name in METRICS if any(name not in record["metrics"] for record in done.values())]
    if lacking:
        raise ValueError(
            f"{directory} holds trials of an older version, which did not measure {lacking[0]}: run them again with "
            "--fresh"
        )


def plain_config(config: ExperimentConfig) -> dict[str, Any]:
    """The experiment in the types that YAML and JSON have."""
    return json.loads(json.dumps(as_plain(config)))


def write_config(config: ExperimentConfig, path: Path) -> None:
    """Write the experiment as a file that `load_experiment` reads, with every default spelled out."""
    yaml = YAML()
    yaml.width = 110
    text = io.StringIO()
    yaml.dump(_lists_inline(plain_config(config)), text)
    replace_file(path, text.getvalue())


def replace_file(path: Path, text: str) -> None:
    """Write the file in one go, so that a kill leaves the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _lists_inline(value: Any) -> Any:
    """The same values, with lists marked to be written on one line."""
    if isinstance(value, dict):
        return {k: _lists_inline(v) for k, v in value.items()}
    if not isinstance(value, list):
        return value
    sequence = CommentedSeq(map(_lists_inline, value))
    sequence.fa.set_flow_style()
    return sequence


def _difference(path: Path, config: ExperimentConfig) -> str:
    """Such as `engine.max_num_seqs is 8 there and 16 here`; at most three of them."""
    if not path.exists():
        return ""
    try:
        stored = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError):
        stored = None
    if not isinstance(stored, Mapping):
        return f"its {path.name} is empty or damaged, so they cannot be compared"
    there = flat(stored)
    here = flat(plain_config(config))
    keys = [
        key
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key) and key != "name" and not key.startswith(("report.", "published."))
    ]
    words = [f"{key} is {there.get(key, 'unset')} there and {here.get(key, 'unset')} here" for key in keys[:3]]
    return "; ".join(words + [f"and {len(keys) - 3} more"] * (len(keys) > 3))


def flat(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Nested values by their dotted paths."""
    paths: dict[str, Any] = {}
    for key, value in values.items():
        paths |= flat(value, f"{where}{key}.") if isinstance(value, Mapping) else {where + key: value}
    return paths
