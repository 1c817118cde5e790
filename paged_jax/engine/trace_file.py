"""The file that a run is recorded into: one JSON line per event, never over something else."""

import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_encoder = json.JSONEncoder(separators=(",", ":"))
_MAX_BUFFERED = 4096
"""Lines kept in memory while the engine is busy."""


def check_trace_file(path: str) -> None:
    """Raise ValueError unless a new file can be made there."""
    folder = Path(path).parent
    if Path(path).exists():
        raise ValueError(f"trace_file {path!r} exists, and is not overwritten: choose another name, or remove it")
    if not folder.is_dir():
        raise ValueError(f"trace_file {path!r} cannot be written: there is no directory {str(folder)!r}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"trace_file {path!r} cannot be written: directory {str(folder)!r} does not let you")


def encode(event: Any) -> str:
    """An event, or a part of one, as it stands in the file, without the newline."""
    return _encoder.encode(event)


class TraceFile:
    """Events go to the file in large pieces, at the latest when `flush` is called or the process ends.

    Raises ValueError when the file exists or cannot be made.
    """

    def __init__(self, path: str) -> None:
        check_trace_file(path)
        try:
            self._file = open(path, "x", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"trace_file {path!r} cannot be written: {error.strerror}") from None
        self._lines: list[str] = []
        self.close = weakref.finalize(self, _close, self._file, self._lines)
        """Write what is left; also done when nobody uses this any more, and at the end of the process."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Take an event; nothing is written to the disk."""
        self._lines.append(encode(event))

    def flush(self, *, idle: bool) -> None:
        """Write what has come together: all of it when the engine is idle, else if it is much."""
        if idle or len(self._lines) > _MAX_BUFFERED:
            _write(self._file, self._lines)


def _write(file: Any, lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    lines.clear()  # what a full disk does not take stays in the file's own buffer
    file.write(text)
    file.flush()


def _close(file: Any, lines: list[str]) -> None:
    with file:
        _write(file, lines)
