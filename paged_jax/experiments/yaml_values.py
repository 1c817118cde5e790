"""YAML values: of files, and of `key=value` words on a command line."""

from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from paged_jax.experiments.sweep import swept_keys


def read_yaml(text: str, where: str) -> Any:
    """The values of a text; ValueError, one sentence that begins with `where`, if it is no YAML."""
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


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set what `key=value` says, the key's path made where it is not there; ValueError, one sentence, if it cannot."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError(f"{override!r} is not an override: write key=value, such as engine.block_size=32")
    value = read_yaml(text, f"override {override!r}")
    # keys of the sweep have dots of their own
    path = ["sweep", key.removeprefix("sweep.")] if key.startswith("sweep.") else key.split(".")
    swept = swept_keys(raw["sweep"]) if isinstance(raw.get("sweep"), dict) else {}
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


def with_tuples(value: Any) -> Any:
    """The same values with tuples for lists, which compare and hash, and strings for keys."""
    if isinstance(value, Mapping):
        return {str(k): with_tuples(v) for k, v in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, (list, tuple)) else value
