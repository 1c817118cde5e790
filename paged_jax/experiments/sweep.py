"""The sweep of an experiment: keys whose values differ between settings.

It has two forms, which combine. A key with a list is an axis of a grid; each entry of `zip` is an axis along which
several keys move together:

    sweep:
      engine.block_size: [8, 16]                       # 2 values
      zip:
        - engine.max_num_seqs: [4, 8]                  # x 2 pairs = 4 settings
          engine.max_num_batched_tokens: [64, 128]

A value of null leaves its key unset. Swept keys are dotted paths into `engine` or `workload`, and may not be set there
as well.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def axes_of(sweep: Any) -> list[dict[str, tuple[Any, ...]]]:
    """The sweep's axes: each maps the keys that move together to equally many values.

    Raises ValueError, here and below, for a sweep of another shape.
    """
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
        if repeats(list(zip(*axis.values(), strict=True))):
            rows = " and ".join(f"sweep.{key} {list(values)!r}" for key, values in axis.items())
            value = "a value" if len(axis) == 1 else "a row of values"
            raise ValueError(f"{rows} repeats {value}: use repeats to run a setting again")
    return axes


def swept_keys(sweep: Any) -> dict[str, tuple[Any, ...]]:
    """Each swept key's values."""
    swept: dict[str, tuple[Any, ...]] = {}
    for axis in axes_of(sweep):
        for key, values in axis.items():
            if key in swept:
                raise ValueError(f"sweep names {key} twice: sweep it once")
            swept[key] = tuple(values)
    return swept


def points_of(sweep: Any) -> Iterator[dict[str, Any]]:
    """Each setting's values by key, the last key fastest."""
    axes = [[dict(zip(axis, row, strict=True)) for row in zip(*axis.values(), strict=True)] for axis in axes_of(sweep)]
    for combination in itertools.product(*axes):
        yield {key: value for part in combination for key, value in part.items()}


def fill_in(raw: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
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


def shown(value: Any) -> str:
    """A swept value as tables and figures write it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(shown, value))}]"
    return "unset" if value is None else str(value)


def name_of(key: str) -> str:
    """A swept key without its section, as tables and figures write it: `block_size`, `prompt.mean`."""
    section, _, name = key.partition(".")
    return name or section


def label_of(point: Mapping[str, Any]) -> str:
    """Such as `block_size=16`; "all" when nothing is swept."""
    return ", ".join(f"{name_of(key)}={shown(value)}" for key, value in point.items()) or "all"


def unit_of(key: str) -> str:
    """The unit of a swept key's values; empty where they have none."""
    name = key.rpartition(".")[2]
    units = {"block_size": "tokens", "max_num_batched_tokens": "tokens", "request_rate": "requests/s"}
    endings = {"_s": "s", "_len": "tokens", "_memory": "bytes"}
    return units.get(name) or next((unit for ending, unit in endings.items() if name.endswith(ending)), "")


def repeats(values: Sequence[Any]) -> bool:
    """Whether any value is there twice."""
    return any(same(v, w) for i, v in enumerate(values) for w in values[:i])


def same(a: Any, b: Any) -> bool:
    """Equality that tells True from 1 but not 16 from 16.0, also inside of tuples."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and a == b
