"""BurstGPT (Wang et al., 2024): CSV of requests to ChatGPT and GPT-4, times in seconds after the trace's start.

Answers that failed have 0 response tokens. Later releases add a session and how long the answer took.
"""

from pathlib import Path

from paged_jax.experiments.request_traces.row import TraceRow
from paged_jax.experiments.request_traces.table import read_table
from paged_jax.experiments.request_traces.timestamps import TimeUnit, column_ns

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
_DURATION = "Elapsed time"


def read_burstgpt(path: Path, time_unit: TimeUnit | None) -> list[TraceRow]:
    """Every row in the file's order. Raises ValueError, one sentence, for a file that is not of this format."""
    table = read_table(path)
    for name in COLUMNS:
        table.column(name)
    table.refuse_two_clocks(COLUMNS[0], (*COLUMNS, _DURATION))
    prompts, outputs = table.tokens(COLUMNS[2]), table.tokens(COLUMNS[3])
    times = column_ns(table.column(COLUMNS[0]), table.lines, path, COLUMNS[0], time_unit)
    return [TraceRow(*row) for row in zip(table.lines, prompts, outputs, times, strict=True)]
