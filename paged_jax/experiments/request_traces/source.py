"""The bytes of a trace file, and the JSON values and token counts in it; every problem is one sentence."""

import hashlib
import json
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

MAX_TOKENS = 10_000_000
"""More tokens than any model's context: a larger count is a wrong column or unit."""


def read_text(path: Path) -> str:
    """The whole file; ValueError when it cannot be read or holds no UTF-8."""
    try:
        return _read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): unpack it, or save it as UTF-8") from None


def fingerprint(path: Path) -> str:
    """SHA-256 of the file's bytes, in hexadecimal; ValueError when it cannot be read."""
    return hashlib.sha256(_read_bytes(path)).hexdigest()


def parse_json(text: str, where: str) -> Any:
    """A JSON value, fractions as Decimal; `where` names the file and line in the ValueError for anything else."""
    try:
        return json.loads(text, parse_float=Decimal, parse_constant=_not_json)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is no whole JSON value ({error.msg}, character {error.pos + 1}): "
            "fetch the file again if it was cut short, mend it, or choose the workload.format that fits"
        ) from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply for a trace: is the format right?") from None


def json_lines(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line or line.isspace():
            continue
        where = f"{path}, line {number}"
        value = parse_json(line, where)
        if not isinstance(value, dict):
            raise ValueError(f"{where} holds no JSON object: this format has one object a line")
        yield number, value


def token_count(value: Any, where: str, name: str) -> int:
    """A count of tokens, from a cell or a JSON number; ValueError when it is none."""
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | Decimal) or "_" in str(value):
            raise InvalidOperation
        number = Decimal(value)
    except InvalidOperation:
        raise ValueError(f"{where}: {name} is {value!r}, not a number: mend or delete the row") from None
    if not number.is_finite():
        raise ValueError(f"{where}: {name} is {value}, not a whole number of tokens: mend or delete the row")
    if number < 0:
        raise ValueError(f"{where}: {name} is {value}, and a count of tokens is not negative: mend or delete the row")
    if number > MAX_TOKENS:
        raise ValueError(
            f"{where}: {name} is {number:.4g}, more tokens than any model takes ({MAX_TOKENS}): name the column of "
            "tokens so, or mend the row"
        )
    if number != int(number):
        raise ValueError(f"{where}: {name} is {value}, not a whole number of tokens: mend or delete the row")
    return int(number)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"there is no trace file {path}: correct workload.file, or give workload.stand_in for when it is missing"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read the trace file {path} ({error.strerror}): correct workload.file") from None


def _not_json(word: str) -> Any:
    raise ValueError(f"{word} is not a number: mend or delete the row")
