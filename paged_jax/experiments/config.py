"""What an experiment is: one YAML file, checked to its last key before anything runs.

The sweep has two forms, which combine. A key with a list is an axis of a grid; each entry of `zip` is an axis
along which several keys move together:

    sweep:
      engine.block_size: [8, 16]                       # 2 values
      zip:
        - engine.max_num_seqs: [4, 8]                  # x 2 pairs = 4 settings
          engine.max_num_batched_tokens: [64, 128]

Swept keys are dotted paths into `engine` or `workload`, and may not be set there as well.
"""

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from paged_jax.config import EngineConfig, StrictModel, nearest, parse
from paged_jax.experiments.metrics import METRICS
from paged_jax.experiments.workloads import (
    WORKLOADS,
    LognormalWorkload,
    PromptsWorkload,
    SharedPrefixWorkload,
    longest_request,
)

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Panels = tuple[tuple[str, ...], ...]


class Report(StrictModel):
    """What the tables and the figures show."""

    x: str | None = None
    """The swept key on the horizontal axis; unset, the first one. Other swept keys become series."""
    y: Annotated[tuple[str, ...], Field(min_length=1)]
    """Metrics: the columns of the tables."""
    baseline: int | float | str | bool | tuple[Any, ...] | None = None
    """The value of x that the others are compared with, in paired differences; unset, no comparison."""
    figures: dict[Name, Panels] | None = None
    """File name to panels, each a list of metrics that share an axis; unset, one figure for each of `y`."""

    @model_validator(mode="before")
    @classmethod
    def _panels(cls, values: Any) -> Any:
        """A figure written as one flat list is one panel."""
        figures = values.get("figures") if isinstance(values, Mapping) else None
        if not isinstance(figures, Mapping):
            return values
        flat = {k: (v,) if isinstance(v, tuple) and v and all(isinstance(m, str) for m in v) else v
                for k, v in figures.items()}  # fmt: skip
        return {**values, "figures": flat}

    @model_validator(mode="after")
    def _metrics_exist(self) -> Self:
        for where, names in [
            ("y", self.y),
            *((f"figures.{k}", sum(v, ())) for k, v in (self.figures or {}).items()),
        ]:
            for name in names:
                if name not in METRICS:
                    raise ValueError(f"report.{where} names an unknown metric {name!r}{nearest(name, list(METRICS))}")
        for key, panels in (self.figures or {}).items():
            if not panels:
                raise ValueError(f"report.figures.{key} is empty: list the metrics that it shows, or leave it out")
            for panel in panels:
                units = sorted({METRICS[m].unit or "counts" for m in panel})
                if len(units) != 1:
                    raise ValueError(
                        f"report.figures.{key} puts {' and '.join(units) or 'nothing'} on one axis: "
                        "give each unit a panel of its own, [[...], [...]]"
                    )
        return self

    @property
    def panels(self) -> dict[str, Panels]:
        """Every figure's panels, by file name."""
        return {m: ((m,),) for m in self.y} if self.figures is None else self.figures


class ExperimentConfig(StrictModel):
    """One experiment. Where a key is swept, `engine` and `workload` hold its first value; see `settings`."""

    name: Name
    model: str
    """A catalogue name, a directory or a file."""
    executor: Literal["jax"] = "jax"
    """Real steps on this machine."""
    engine: EngineConfig = EngineConfig()
    workload: PromptsWorkload | LognormalWorkload | SharedPrefixWorkload
    sweep: dict[str, Any] = Field(default_factory=dict)
    """Dotted path to values (a grid), and `zip`: a list of such mappings whose keys move together."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0, 1, 2)
    """Each is another workload: variation between inputs."""
    repeats: Annotated[int, Field(ge=1)] = 2
    """The same workload again: noise of the clock."""
    report: Report

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds {list(self.seeds)} repeat a seed: use repeats to run a workload again")
        swept = _swept(self.sweep)
        x, baseline = self.report.x, self.report.baseline
        if x is not None and x not in swept:
            hint = nearest(x, list(swept)) if swept else "; nothing is swept"
            raise ValueError(f"report.x is {x!r}, which is not a swept key{hint}")
        if self.report.figures and not swept:
            raise ValueError("report.figures are drawn over a swept key, but nothing is swept: leave them out")
        if baseline is not None:
            if not swept:
                raise ValueError("report.baseline compares settings, but nothing is swept: leave it out")
            values = swept[x or next(iter(swept))]
            if not any(_same(baseline, v) for v in values):
                raise ValueError(f"report.baseline is {baseline!r}, which is not one of the values {list(values)!r}")
        return self

    @property
    def x(self) -> str | None:
        """The swept key on the horizontal axis; None when nothing is swept."""
        return self.report.x or next(iter(_swept(self.sweep)), None)

    @property
    def series_keys(self) -> tuple[str, ...]:
        """Swept keys that do not move together with x: each combination of their values is a series."""
        return tuple(key for axis in _axes(self.sweep) if self.x not in axis for key in axis)


@dataclass(frozen=True)
class Setting:
    """One point of the sweep."""

    values: dict[str, Any]
    """Swept key to value, in the order of the file."""
    engine: EngineConfig
    workload: PromptsWorkload | LognormalWorkload | SharedPrefixWorkload

    @property
    def label(self) -> str:
        """Such as `block_size=16`; "all" when nothing is swept."""
        return ", ".join(f"{k.rpartition('.')[2]}={v}" for k, v in self.values.items()) or "all"


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read an experiment file, apply `key=value` overrides, and check every setting of the sweep.

    Overrides have dotted keys and YAML values: `engine.max_num_seqs=8`, `seeds=[0,1]`,
    `sweep.engine.block_size=[16,32]`. Raises FileNotFoundError or ValueError, one sentence each.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"no experiment file at {path}; examples are under configs/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} as an experiment file: {error}") from None
    raw = _yaml(text, str(path))
    if raw is None:
        raise ValueError(f"{path} is empty: an experiment needs at least name, model, workload and report")
    if not isinstance(raw, dict):
        raise ValueError(f"{path} does not hold keys and values: an experiment file begins like `name: block_size`")
    for override in overrides:
        _override(raw, override)
    return experiment_from_dict(raw)


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Plain values of `key=value` words whose values are YAML, as for `load_experiment`."""
    values: dict[str, Any] = {}
    for override in overrides:
        _override(values, override)
    return _tuples(values)


def experiment_from_dict(raw: Mapping[str, Any]) -> ExperimentConfig:
    """Check plain values, as they stand in a file, and every setting of their sweep."""
    raw = _tuples(raw)
    sweep = {} if raw.get("sweep") is None else raw["sweep"]
    known = _known_paths(_workload_model(raw))
    for key, values in _swept(sweep).items():
        _check_swept_key(key, known)
        if _get(raw, key) is not _ABSENT:
            raise ValueError(f"{key} is both set and swept: leave it out of {key.partition('.')[0]}")
        if len(values) != sum(not any(_same(v, w) for w in values[:i]) for i, v in enumerate(values)):
            raise ValueError(f"sweep.{key} {list(values)!r} repeats a value: use repeats to run a setting again")
    for key in raw:
        if key not in ExperimentConfig.model_fields:
            raise ValueError(f"unknown key {key!r}{_suggestion(key, known)}")
    points = [_sections(_filled(raw, point), known) for point in _points(sweep)]
    for sections in points:
        longest, limit = longest_request(sections["workload"]), sections["engine"].max_model_len
        if longest is not None and limit is not None and longest > limit:
            raise ValueError(
                f"the workload can ask for requests of {longest} tokens, more than engine.max_model_len "
                f"({limit}): lower the max of its lengths or raise engine.max_model_len"
            )
    return parse(ExperimentConfig, {**raw, "sweep": sweep, **points[0]})


def settings(config: ExperimentConfig) -> tuple[Setting, ...]:
    """Every point of the sweep, in the order of the file, the last key fastest."""
    base = as_plain(config)
    expanded = []
    for point in _points(config.sweep):
        values = _filled(base, point)
        engine = _section(EngineConfig, values["engine"], "engine")
        expanded.append(Setting(point, engine, _section(_workload_model(values), values["workload"], "workload")))
    return tuple(expanded)


def as_plain(config: ExperimentConfig) -> dict[str, Any]:
    """The experiment as it could stand in a file: every default spelled out (None is unset), swept keys only
    under `sweep`."""
    plain = config.model_dump(exclude_none=True)
    for key in _swept(config.sweep):
        *parents, last = key.split(".")
        place = plain
        for parent in parents:
            place = place[parent]
        place.pop(last, None)
    return plain


_ABSENT = object()


def _yaml(text: str, where: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(text)  # YAML 1.2: 1e-4 is a number, off is a string
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        problem = str(error.problem).split(" with value")[0].replace("found duplicate", "there is a second")
        raise ValueError(f"{where}, line {line}: {problem}; remove one of them") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{where}{line}: not valid YAML: {error.problem or error.context}") from None
    except YAMLError as error:
        raise ValueError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError(f"{override!r} is not an override: write key=value, such as engine.block_size=32")
    value = _yaml(text, f"override {override!r}")
    # keys of the sweep have dots of their own
    path = ["sweep", key.removeprefix("sweep.")] if key.startswith("sweep.") else key.split(".")
    swept = _swept(raw["sweep"]) if isinstance(raw.get("sweep"), dict) else {}
    if key in swept:
        raise ValueError(f"{key} is swept: override sweep.{key} with a list of values instead")
    place = raw
    for parent in path[:-1]:
        if place.get(parent) is None:
            place[parent] = {}
        place = place[parent]
        if not isinstance(place, dict):
            raise ValueError(f"override {override!r}: {parent} is a single value and has no keys below it")
    place[path[-1]] = value


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def _axes(sweep: Any) -> list[dict[str, tuple[Any, ...]]]:
    """The sweep's axes: each maps the keys that move together to equally many values."""
    if not isinstance(sweep, Mapping):
        raise ValueError(f"sweep must map keys to lists, such as `engine.block_size: [8, 16]`, got {sweep!r}")
    groups = [{key: values} for key, values in sweep.items() if key != "zip"]
    zipped = sweep.get("zip", ())
    if not isinstance(zipped, (list, tuple)) or not all(isinstance(g, Mapping) and g for g in zipped):
        raise ValueError("sweep.zip must be a list of groups, each a mapping of keys to lists of equal length")
    axes = groups + [dict(g) for g in zipped]
    for axis in axes:
        for key, values in axis.items():
            if not isinstance(values, (list, tuple)) or not values:
                raise ValueError(f"sweep.{key} must be a list with at least one value, got {values!r}")
        if len({len(values) for values in axis.values()}) != 1:
            lengths = ", ".join(f"{key} has {len(values)}" for key, values in axis.items())
            raise ValueError(f"keys of one sweep.zip group need equally many values, but {lengths}")
    return axes


def _swept(sweep: Any) -> dict[str, tuple[Any, ...]]:
    """Each swept key's values."""
    swept: dict[str, tuple[Any, ...]] = {}
    for axis in _axes(sweep):
        for key, values in axis.items():
            if key in swept:
                raise ValueError(f"sweep names {key} twice: sweep it once")
            swept[key] = tuple(values)
    return swept


def _points(sweep: Any) -> Iterator[dict[str, Any]]:
    axes = [[dict(zip(axis, row, strict=True)) for row in zip(*axis.values(), strict=True)] for axis in _axes(sweep)]
    for combination in itertools.product(*axes):
        yield {key: value for part in combination for key, value in part.items()}


def _check_swept_key(key: str, known: Sequence[str]) -> None:
    if inside := [path for path in known if path.startswith(f"{key}.")]:
        raise ValueError(f"sweep.{key}: sweep the keys inside of it, such as {inside[0]}, not all of it at once")
    if key in known and key.startswith(("engine.", "workload.")) and key != "workload.kind":
        return
    if key in known:
        raise ValueError(f"sweep.{key}: only keys of engine and workload (not workload.kind) can be swept")
    sweepable = [k for k in known if k.startswith(("engine.", "workload."))]
    raise ValueError(f"sweep names an unknown key {key!r}{_suggestion(key, sweepable)}")


def _known_paths(workload: type[StrictModel]) -> list[str]:
    """Dotted paths of every key that a file with this kind of workload may have."""

    def walk(model: type[StrictModel], where: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            yield where + name
            nested = workload if where + name == "workload" else field.annotation
            if isinstance(nested, type) and issubclass(nested, StrictModel):
                yield from walk(nested, f"{where}{name}.")

    return list(walk(ExperimentConfig, ""))


def _suggestion(key: str, known: Sequence[str]) -> str:
    """`; did you mean 'engine.block_size'?`: by last name, a key of the same section first."""
    section, _, name = key.rpartition(".")
    names = {}
    for path in sorted(known, key=lambda path: path.rpartition(".")[0] != section):
        names.setdefault(path.rpartition(".")[2], path)
    close = difflib.get_close_matches(name, list(names), n=1)
    if close:
        return f"; did you mean {names[close[0]]!r}?"
    inside = [path for path in known if path.rpartition(".")[0] == section]
    return f"; known: {', '.join(inside or known)}"


def _workload_model(raw: Mapping[str, Any]) -> type[StrictModel]:
    workload = raw.get("workload", _ABSENT)
    if workload is _ABSENT:
        raise ValueError("workload is missing: give it a kind, such as `workload: {kind: prompts, ...}`")
    if not isinstance(workload, Mapping) or "kind" not in workload:
        raise ValueError(f"workload.kind is missing: it is one of {', '.join(WORKLOADS)}")
    kind = workload["kind"]
    if kind not in WORKLOADS:
        raise ValueError(f"workload.kind: there is no kind {kind!r}{nearest(str(kind), list(WORKLOADS))}")
    return WORKLOADS[kind]


def _sections(raw: Mapping[str, Any], known: Sequence[str]) -> dict[str, StrictModel]:
    """The parts of the file that are models of their own, checked."""
    models = {"engine": EngineConfig, "workload": _workload_model(raw), "report": Report}
    return {
        name: _section(model, {} if raw.get(name) is None else raw[name], name, known)
        for name, model in models.items()
        if name != "report" or name in raw
    }


def _section[T: StrictModel](model: type[T], raw: Any, where: str, known: Sequence[str] = ()) -> T:
    """Check one part of the file, inner parts first, so that every sentence has the full dotted path."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where} must hold keys and values, got {raw!r}")
    for key in raw:
        if key in model.model_fields:
            continue
        owners = [k for k, m in WORKLOADS.items() if where == "workload" and key in m.model_fields]
        if owners:
            raise ValueError(f"{where}.{key} belongs to kind {' or '.join(owners)}, not to {raw['kind']}")
        raise ValueError(f"unknown key {f'{where}.{key}'!r}{_suggestion(f'{where}.{key}', known)}")
    values = dict(raw)
    for name, field in model.model_fields.items():
        nested = field.annotation
        if name in raw and isinstance(nested, type) and issubclass(nested, StrictModel):
            values[name] = _section(nested, raw[name], f"{where}.{name}", known)
    try:
        return parse(model, values, where)
    except ValueError as error:
        # a rule about several keys names none of them first: say which part of the file it is about
        sentence = str(error)
        raise ValueError(sentence if where in sentence else f"{where}: {sentence}") from None


def _get(raw: Mapping[str, Any], key: str) -> Any:
    place: Any = raw
    for part in key.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return _ABSENT
        place = place[part]
    return place


def _filled(raw: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `raw` with the swept values in place."""
    filled = dict(raw)
    for key, value in point.items():
        place = filled
        *parents, last = key.split(".")
        for parent in parents:
            inner = place.get(parent)
            if inner is not None and not isinstance(inner, Mapping):
                raise ValueError(f"{parent} must hold keys and values, got {inner!r}")
            place[parent] = dict(inner or {})
            place = place[parent]
        place[last] = value
    return filled


def _same(a: Any, b: Any) -> bool:
    """Equality that tells True from 1 but not 16 from 16.0."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b
