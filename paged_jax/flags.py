"""Command-line flags made from settings classes, so that no field, default or help text is written twice.

A flag's value is handed over as plain Python, unchecked: the settings class itself says what is wrong with
it, in the same words as for an experiment file.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro
from tyro.constructors import PrimitiveConstructorSpec

_METAVARS = {int: "INT", float: "FLOAT", str: "STR"}


def flags_of(
    settings: type,
    defaults: Mapping[str, object],
    *,
    names: Mapping[str, str] | None = None,
    notes: Mapping[str, str] | None = None,
) -> type:
    """A dataclass for `tyro.cli` with one flag for each key of `defaults`, all of them fields of `settings`.

    Help texts are the docstrings below the fields of `settings`. `names` gives flags another name than their
    field, `notes` adds sentences to help texts. Use `values_of` for the values of an instance.
    """
    types_of = inspect.get_annotations(settings)  # not get_type_hints, which finds none on a no_type_check class
    docs = field_docstrings(settings)
    flags = []
    for field, default in defaults.items():
        text = as_flags(f"{docs[field]} {(notes or {}).get(field, '')}".strip(), defaults)
        # what "unset" means is in the text, "default: None" would not help
        hint = "" if default in (None, ()) else None
        flag = Annotated[_flag_type(types_of[field]), tyro.conf.arg(help=text, help_behavior_hint=hint)]
        flags.append(((names or {}).get(field, field), flag, dataclasses.field(default=default)))
    doc = inspect.cleandoc(settings.__doc__ or "").partition("\n")[0]
    return dataclasses.make_dataclass(f"{settings.__name__}Flags", flags, frozen=True, namespace={"__doc__": doc})


def values_of(flags: object, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Settings by field name, from an instance of what `flags_of` made with the same `names`."""
    field_of = {flag: field for field, flag in (names or {}).items()}
    return {field_of.get(name, name): value for name, value in vars(flags).items()}


def as_flags(sentence: str, fields: Collection[str], names: Mapping[str, str] | None = None) -> str:
    """The sentence with fields written as flags: `max_num_seqs` becomes `--max-num-seqs`.

    A field whose name is an ordinary word, such as `seed`, counts only where the sentences have a key.
    """

    def replace(found: re.Match[str]) -> str:
        before, word = found.groups()
        is_field = word in fields and ("_" in word or before is not None)
        return (before or "") + (flag_name((names or {}).get(word, word)) if is_field else word)

    return re.sub(r"((?:^|; )unknown |; |^)?(\w+)", replace, sentence)


def flag_name(field: str) -> str:
    """`block_size` as people type it: `--block-size`."""
    return f"--{field.replace('_', '-')}"


def field_docstrings(settings: type) -> dict[str, str]:
    """The strings written below the fields of a class, by field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(settings)))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    }


def known_flags(command: type) -> dict[str, bool]:
    """Every flag of a dataclass for `tyro.cli`, as typed, and whether a value follows it."""
    flags: dict[str, bool] = {}
    for field in dataclasses.fields(command):
        kind = _without_extras(field.type)
        markers = getattr(field.type, "__metadata__", ())
        if dataclasses.is_dataclass(kind):
            flags |= known_flags(kind)
        elif tyro.conf.Positional not in markers:
            flags[flag_name(field.name)] = kind is not bool
            if kind is bool and tyro.conf.FlagCreatePairsOff not in markers:
                flags[flag_name(f"no_{field.name}")] = False
    return flags


def _flag_type(annotation: Any) -> Any:
    """What tyro should make of a field: a switch, one value, or several."""
    is_union = get_origin(annotation) in (types.UnionType, typing.Union)
    members = [_without_extras(m) for m in (get_args(annotation) if is_union else (annotation,))]
    if bool in members:
        return bool
    several = [_without_extras(get_args(m)[0]) for m in members if get_origin(m) is tuple]
    element = several[0] if several else members[0]
    choices = get_args(element) if get_origin(element) is Literal else ()
    metavar = f"{{{','.join(choices)}}}" if choices else _METAVARS[element]
    convert = _number if element in (int, float) else str
    return Annotated[object, _several(metavar, convert) if several else _one(metavar, convert)]


def _one(metavar: str, convert: Callable[[str], object]) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: convert(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def _several(metavar: str, convert: Callable[[str], object]) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{metavar} [{metavar} ...]",
        instance_from_str=lambda words: tuple(map(convert, words)),
        is_instance=lambda value: True,
        str_from_instance=lambda value: list(map(str, value or ())),
    )


def _number(text: str) -> int | float | str | None:
    """The number that `text` writes, None for "none", or else the text, for the settings class to refuse."""
    if text.lower() == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _without_extras(annotation: Any) -> Any:
    return _without_extras(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation
