"""Pairs of prompt and output lengths without times, as benchmarks publish them of ShareGPT and arXiv summarisation."""

from pathlib import Path

from paged_jax.experiments.request_traces.row import TraceRow
from paged_jax.experiments.request_traces.table import read_table
from paged_jax.experiments.request_traces.timestamps import other_clock

COLUMNS = (("ContextTokens", "GeneratedTokens"), ("num_prefill_tokens", "num_decode_tokens"))
_NO_TIME = ("", "XXX")


def read_lengths(path: Path) -> list[TraceRow]:
    """Every pair in the order of the file.

    A column TIMESTAMP may be there if it is blank or XXX throughout. Raises ValueError, one sentence, for a file that
    has other columns, or times.
    """
    table = read_table(path)
    names = next((pair for pair in COLUMNS if all(map(table.has, pair))), None)
    if names is None:
        raise ValueError(
            f"{path}, line 1: format 'lengths' has the columns {' or '.join(map(' and '.join, COLUMNS))}, and this "
            f"file {', '.join(table.header)}: correct the header, or choose the workload.format that has these columns"
        )
    if (clock := other_clock(table.header, names)) is not None:
        for row, cell in enumerate(table.column(clock)):
            if cell.strip() not in _NO_TIME:
                raise ValueError(
                    f"{table.at(row)}: {clock} is {cell!r}, a time that format 'lengths' would not look at: use format "
                    "'azure' (request_rate replaces its times), or delete the column"
                )
    prompts, outputs = table.tokens(names[0]), table.tokens(names[1])
    return [TraceRow(*row) for row in zip(table.lines, prompts, outputs, strict=True)]
