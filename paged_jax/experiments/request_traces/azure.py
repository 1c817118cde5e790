"""The Azure LLM inference traces (Patel et al., ISCA 2024): CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

Published files have dates with a time of day; numbers are taken, too, in seconds unless another unit is declared.
"""

from pathlib import Path

from paged_jax.experiments.request_traces.row import TraceRow
from paged_jax.experiments.request_traces.table import read_table
from paged_jax.experiments.request_traces.timestamps import TimeUnit, column_ns

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: Path, time_unit: TimeUnit | None) -> list[TraceRow]:
    """Every row in the file's order. Raises ValueError, one sentence, for a file that is not of this format."""
    table = read_table(path)
    cells, prompts, outputs = table.column(COLUMNS[0]), table.tokens(COLUMNS[1]), table.tokens(COLUMNS[2])
    table.refuse_two_clocks(COLUMNS[0], COLUMNS)
    if all(cell.strip() in ("", "XXX") for cell in cells):
        raise ValueError(f"{path}: TIMESTAMP holds no times: use workload.format 'lengths' with an arrival process")
    times = column_ns(cells, table.lines, path, COLUMNS[0], time_unit)
    return [TraceRow(*row) for row in zip(table.lines, prompts, outputs, times, strict=True)]
