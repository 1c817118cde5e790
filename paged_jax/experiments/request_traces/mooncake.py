"""Mooncake's traces (Qin et al., FAST 2025): JSON lines with the identities of a prompt's 512-token blocks.

Equal ids stand for equal tokens, so that prompts begin alike exactly as far as their ids agree. The last block of a
prompt may be partial.
"""

from pathlib import Path
from typing import Any

from paged_jax.experiments.request_traces.row import TraceRow
from paged_jax.experiments.request_traces.source import json_lines, read_text, token_count
from paged_jax.experiments.request_traces.timestamps import TimeUnit, check_span, other_clock, time_ns

HASH_BLOCK_SIZE = 512
"""Tokens that one of a file's hash ids stands for."""
KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_mooncake(path: Path, time_unit: TimeUnit | None) -> list[TraceRow]:
    """Every request in the file's order. Raises ValueError, one sentence, for a file that is not of this format."""
    unit = time_unit or "ms"
    rows = [_row(line, value, f"{path}, line {line}", unit) for line, value in json_lines(read_text(path), path)]
    if not rows:
        raise ValueError(f"{path} is empty: correct workload.file")
    check_span([row.time_ns or 0 for row in rows], [row.line for row in rows], path, unit)
    return rows


def _row(line: int, value: dict[str, Any], where: str, unit: TimeUnit) -> TraceRow:
    if missing := [key for key in KEYS if key not in value]:
        raise ValueError(
            f"{where}: there is no {missing[0]} (found: {', '.join(value)}): "
            "mend the row, or choose the workload.format that has these keys"
        )
    if (other := other_clock(value, KEYS)) is not None:
        raise ValueError(
            f"{where}: timestamp and {other} are two clocks, and nothing says by which requests arrive: "
            "delete one, and call the other timestamp"
        )
    prompt_len = token_count(value["input_length"], where, "input_length")
    output_len = token_count(value["output_length"], where, "output_length")
    ids = value["hash_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
        raise ValueError(f"{where}: hash_ids is not a list of whole numbers from 0: mend or delete the row")
    if len(ids) != -(-prompt_len // HASH_BLOCK_SIZE):
        raise ValueError(
            f"{where}: {len(ids)} hash_ids for {prompt_len} tokens, where each stands for {HASH_BLOCK_SIZE} (the last "
            "for what is left): mend or delete the row"
        )
    return TraceRow(line, prompt_len, output_len, time_ns(value["timestamp"], unit, where, "timestamp"), tuple(ids))
