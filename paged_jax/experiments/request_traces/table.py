"""A CSV file whose columns are known by their names."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paged_jax.experiments.request_traces.source import MAX_TOKENS, read_text, token_count
from paged_jax.experiments.request_traces.timestamps import other_clock


@dataclass(frozen=True)
class Table:
    """Rows of a CSV file, each with as many cells as the header."""

    path: Path
    header: tuple[str, ...]
    rows: list[list[str]]
    lines: list[int]
    """Line of the file that each row ends on, from 1."""

    def has(self, name: str) -> bool:
        """Whether there is a column of this name, in small or capital letters."""
        return name.casefold() in (column.casefold() for column in self.header)

    def column(self, name: str) -> list[str]:
        """The cells under a name; ValueError when the file has no such column."""
        names = [column.casefold() for column in self.header]
        if name.casefold() not in names:
            raise ValueError(
                f"{self.path}, line 1: there is no column {name} (found: {', '.join(self.header)}): "
                "correct the header, or choose the workload.format that has these columns"
            )
        if names.count(name.casefold()) > 1:
            raise ValueError(f"{self.path}, line 1: there are two columns {name}: delete or rename one of them")
        index = names.index(name.casefold())
        return [row[index] for row in self.rows]

    def tokens(self, name: str) -> list[int]:
        """The cells under a name as counts of tokens."""
        cells = self.column(name)
        # most files are in order: the careful reading, which is 20 times slower, is for the others
        if all(cell.isdecimal() and cell.isascii() and len(cell) < 20 for cell in cells):
            counts = list(map(int, cells))
            if max(counts) <= MAX_TOKENS:
                return counts
        return [token_count(cell, self.at(i), name) for i, cell in enumerate(cells)]

    def at(self, row: int) -> str:
        """Where a row stands, for a message."""
        return f"{self.path}, line {self.lines[row]}"

    def refuse_two_clocks(self, time: str, known: Sequence[str]) -> None:
        """Raise ValueError when there is a time besides the format's own: they may not count from one origin."""
        if (other := other_clock(self.header, known)) is not None:
            raise ValueError(
                f"{self.path}, line 1: the columns {time} and {other} are two clocks, and nothing says by which "
                f"requests arrive: delete one, and call the other {time}"
            )


def read_table(path: Path) -> Table:
    """Read a CSV file with a header; ValueError for one that has no rows or a row with missing cells."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        header = tuple(cell.strip() for cell in next(reader, []))
        for row in reader:
            if len(row) != len(header):
                if not row or (len(row) == 1 and not row[0].strip()):
                    continue
                raise ValueError(
                    f"{path}, line {reader.line_num}: {len(row)} cells under {len(header)} columns: "
                    "fetch the file again if it was cut short, or mend the row"
                )
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: no CSV ({error}): mend the row") from None
    if not rows:
        raise ValueError(f"{path} has no rows under its header: correct workload.file")
    return Table(path, header, rows, lines)
