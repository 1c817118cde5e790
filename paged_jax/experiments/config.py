"""What an experiment is: one YAML file, checked to its last key before anything runs."""

import difflib
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import Field, model_validator

from paged_jax.config import POLICIES, EngineConfig, StrictModel, nearest, parse
from paged_jax.experiments.compatibility import (
    DEVICE_KEYS,
    check_engine,
    check_executor,
    check_has_effect,
    check_seeds,
    check_together,
)
from paged_jax.experiments.published_spec import Published, published_from_dict
from paged_jax.experiments.report_spec import Name, Report
from paged_jax.experiments.sweep import axes_of, fill_in, label_of, points_of, repeats, same, swept_keys
from paged_jax.experiments.workload_spec import WorkloadSpec
from paged_jax.experiments.workloads import WORKLOADS, Workload
from paged_jax.experiments.yaml_values import apply_override, read_yaml, with_tuples


class ExperimentConfig(StrictModel):
    """One experiment. Where a key is swept, the experiment holds its first value; see `settings`."""

    name: Name
    model: str
    """A catalogue name, a directory or a file."""
    executor: Literal["jax", "simulated"] = "jax"
    """Real steps on this machine, or the time that `hardware` would need, on a virtual clock."""
    hardware: str | None = None
    """What is simulated: a name of the hardware catalogue, or a file that `paged-jax calibrate` has written."""
    engine: EngineConfig = EngineConfig()
    workload: Workload
    sweep: dict[str, Any] = Field(default_factory=dict)
    """Dotted path to values (a grid), and `zip`: a list of such mappings whose keys move together; see `sweep.py`."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0, 1, 2)
    """Each is another workload: variation between inputs."""
    repeats: Annotated[int, Field(ge=1)] = 2
    """The same workload again: noise of the clock. A simulated one has none: 1."""
    report: Report
    published: Published | None = None
    """Numbers of a paper, or a claim, to compare the results with."""

    @model_validator(mode="before")
    @classmethod
    def _one_repeat(cls, values: Any) -> Any:
        """A simulated experiment that does not say how often runs once."""
        simulated = isinstance(values, Mapping) and values.get("executor") == "simulated"
        return {"repeats": 1, **values} if simulated else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_executor(self.executor, self.hardware, self.repeats)
        check_seeds(self.executor, self.seeds, self.workload)
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds {list(self.seeds)} repeat a seed: use repeats to run a workload again")
        swept = swept_keys(self.sweep)
        x, baseline = self.report.x, self.report.baseline
        if x is not None and x not in swept:
            hint = nearest(x, list(swept)) if swept else "; nothing is swept"
            raise ValueError(f"report.x is {x!r}, which is not a swept key{hint}")
        if self.report.figures and not swept:
            raise ValueError("report.figures are drawn over a swept key, but nothing is swept: leave them out")
        if self.x is not None and repeats(swept[self.x]):
            raise ValueError(
                f"report.x is {self.x!r}, whose values {list(swept[self.x])!r} repeat: choose a key whose values tell "
                "the settings of its sweep.zip group apart"
            )
        if baseline is not None:
            if not swept:
                raise ValueError("report.baseline compares settings, but nothing is swept: leave it out")
            values = swept[x or next(iter(swept))]
            if not any(same(baseline, v) for v in values):
                raise ValueError(f"report.baseline is {baseline!r}, which is not one of the values {list(values)!r}")
        if self.report.optimum is not None:
            values = swept[self.x] if self.x is not None else ()
            if not values or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
                raise ValueError(
                    f"report.optimum needs numbers on the horizontal axis, got {list(values)!r}: leave it out"
                )
        if self.published is not None:
            self.published.check_settings(self.sweep, self.x)
        return self

    @property
    def x(self) -> str | None:
        """The swept key on the horizontal axis; None when nothing is swept."""
        return self.report.x or next(iter(swept_keys(self.sweep)), None)

    @property
    def series_keys(self) -> tuple[str, ...]:
        """Swept keys that do not move together with x: each combination of their values is a series."""
        return tuple(key for axis in axes_of(self.sweep) if self.x not in axis for key in axis)

    @property
    def legend_keys(self) -> tuple[str, ...]:
        """Enough of `series_keys` to tell the series apart: of each axis one key, if its values differ."""
        keys: list[str] = []
        for axis in axes_of(self.sweep):
            if self.x not in axis:
                alone = [key for key, values in axis.items() if not repeats(values)]
                keys += alone[:1] or list(axis)
        return tuple(keys)


@dataclass(frozen=True)
class Setting:
    """One point of the sweep."""

    values: dict[str, Any]
    """Swept key to value, in the order of the file."""
    model: str
    hardware: str | None
    engine: EngineConfig
    workload: Workload

    @property
    def label(self) -> str:
        """Such as `block_size=16`; "all" when nothing is swept."""
        return label_of(self.values)

    @property
    def policy_fingerprint(self) -> str | None:
        """SHA-256 of the files of policies of one's own, which may change; None without any, or in a notebook."""
        names = [getattr(self.engine, field) or "" for field in POLICIES]
        modules = sorted({name.partition(":")[0] for name in names if ":" in name} - {"__main__"})
        found = [importlib.util.find_spec(module) for module in modules]
        files = [Path(spec.origin) for spec in found if spec is not None and spec.origin is not None]
        text = b"".join(path.read_bytes() for path in files if path.is_file())
        return hashlib.sha256(text).hexdigest() if text else None

    @property
    def hardware_fingerprint(self) -> str | None:
        """The hardware's name and, of a file, which may change, its content."""
        path = Path(self.hardware or "")
        return path.read_text(encoding="utf-8") if path.suffix == ".yaml" and path.is_file() else self.hardware


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
    raw = read_yaml(text, str(path))
    if raw is None:
        raise ValueError(f"{path} is empty: an experiment needs at least name, model, workload and report")
    if not isinstance(raw, dict):
        raise ValueError(f"{path} does not hold keys and values: an experiment file begins like `name: block_size`")
    for override in overrides:
        apply_override(raw, override)
    return experiment_from_dict(raw)


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Plain values of `key=value` words whose values are YAML, as for `load_experiment`."""
    values: dict[str, Any] = {}
    for override in overrides:
        apply_override(values, override)
    return with_tuples(values)


def experiment_from_dict(raw: Mapping[str, Any]) -> ExperimentConfig:
    """Check plain values, as they stand in a file, and every setting of their sweep."""
    raw = with_tuples(raw)
    sweep = {} if raw.get("sweep") is None else raw["sweep"]
    known = _known_paths(_workload_model(raw))
    for key, values in swept_keys(sweep).items():
        _check_swept_key(key, values, known, raw.get("executor"))
        if _get(raw, key) is not _ABSENT:
            section, dot, _ = key.partition(".")
            raise ValueError(
                f"{key} is both set and swept: {f'leave it out of {section}' if dot else 'remove the key'}"
            )
    for key in raw:
        if key not in ExperimentConfig.model_fields:
            raise ValueError(f"unknown key {key!r}{_suggestion(key, known)}")
    published = published_from_dict(raw.get("published"))
    devices = {key: values[0] for key, values in swept_keys(sweep).items() if key in DEVICE_KEYS}
    return parse(
        ExperimentConfig,
        {**raw, **devices, "sweep": sweep, **_checked_points(raw, sweep, known), "published": published},
    )


def settings(config: ExperimentConfig) -> tuple[Setting, ...]:
    """Every point of the sweep, in the order of the file, the last key fastest."""
    base = as_plain(config)
    expanded = []
    for point in points_of(config.sweep):
        values = fill_in(base, point)
        engine = _section(EngineConfig, values["engine"], "engine")
        workload = _section(_workload_model(values), values["workload"], "workload")
        expanded.append(Setting(point, values["model"], values.get("hardware"), engine, workload))
    return tuple(expanded)


def as_plain(config: ExperimentConfig) -> dict[str, Any]:
    """The experiment as it could stand in a file: every default spelled out (None is unset), swept keys only
    under `sweep`."""
    plain = config.model_dump(exclude_none=True)
    for key in swept_keys(config.sweep):
        *parents, last = key.split(".")
        place = plain
        for parent in parents:
            place = place[parent]
        place.pop(last, None)
    return plain


_ABSENT = object()


def _check_swept_key(key: str, values: Sequence[Any], known: Sequence[str], executor: Any) -> None:
    if inside := [path for path in known if path.startswith(f"{key}.")]:
        raise ValueError(f"sweep.{key}: sweep the keys inside of it, such as {inside[0]}, not all of it at once")
    if key in known and key.startswith(("engine.", "workload.")) and key != "workload.kind":
        return
    if key in DEVICE_KEYS and executor == "simulated":
        for value in values:
            if not isinstance(value, str):
                raise ValueError(f"sweep.{key}: {value!r} is not a name")
        return
    if key in known:
        also = ", and model and hardware of simulated experiments," if key in DEVICE_KEYS else ""
        raise ValueError(f"sweep.{key}: only keys of engine and workload (not workload.kind){also} can be swept")
    sweepable = [k for k in known if k.startswith(("engine.", "workload."))]
    raise ValueError(f"sweep names an unknown key {key!r}{_suggestion(key, sweepable)}")


def _known_paths(workload: type[StrictModel]) -> list[str]:
    """Dotted paths of every key that a file with this kind of workload may have."""

    def walk(model: type[StrictModel], where: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            yield where + name
            nested = workload if where + name == "workload" else _model_in(field.annotation)
            if nested is not None:
                yield from walk(nested, f"{where}{name}.")

    return list(walk(ExperimentConfig, ""))


def _model_in(annotation: Any) -> type[StrictModel] | None:
    """The model that a field holds, also one that may be unset; None if it holds plain values."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    models = [option for option in options if isinstance(option, type) and issubclass(option, StrictModel)]
    return models[0] if len(models) == 1 else None


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


def _checked_points(raw: Mapping[str, Any], sweep: Any, known: Sequence[str]) -> dict[str, StrictModel]:
    """The checked parts of the sweep's first setting; all settings are checked, and one that cannot work is named."""
    checked: list[dict[str, StrictModel]] = []
    problems: dict[str, str] = {}
    for point in points_of(sweep):
        try:
            sections = _sections(fill_in(raw, point), known)
            check_together(sections["engine"], sections["workload"])
            check_engine(raw.get("executor"), sections["engine"], sections["workload"])
            checked.append(sections)
        except ValueError as error:
            problems.setdefault(str(error), label_of(point))
    for sentence, label in problems.items():
        everywhere = len(problems) == 1 and not checked  # then the sweep has nothing to do with it
        raise ValueError(sentence if everywhere else f"{sentence} (setting {label})")
    check_has_effect((sections["engine"], sections["workload"]) for sections in checked)
    return checked[0]


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
    values = model.with_laws(raw) if issubclass(model, WorkloadSpec) else dict(raw)
    for name, field in model.model_fields.items():
        nested = _model_in(field.annotation)
        if nested is not None and raw.get(name) is not None:
            values[name] = _section(nested, values[name], f"{where}.{name}", known)
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
