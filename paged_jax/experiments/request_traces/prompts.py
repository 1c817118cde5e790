"""Plain prompts: a text file with one a line, or JSON lines with one in each object (MT-bench, GSM8K, and alike).

Of an object the prompt is `prompt`, `question`, `text` or the first of `turns`, and the answer, whose length in tokens
is the output's, `answer`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paged_jax.experiments.request_traces.row import TraceRow
from paged_jax.experiments.request_traces.source import json_lines, read_text

PROMPT_KEYS = ("prompt", "question", "text")


def read_prompts(path: Path) -> list[TraceRow]:
    """Every prompt in the order of the file; ValueError, one sentence, for a file without any.

    JSON lines are told by the file's first character, a brace.
    """
    text = read_text(path)
    rows = list(_objects(text, path) if text.lstrip().startswith("{") else _lines(text))
    if not rows:
        raise ValueError(f"{path} is empty: correct workload.file")
    return rows


def _lines(text: str) -> Iterator[TraceRow]:
    for number, line in enumerate(text.split("\n"), start=1):
        if prompt := line.strip():
            yield TraceRow(number, prompt=prompt)


def _objects(text: str, path: Path) -> Iterator[TraceRow]:
    for number, value in json_lines(text, path):
        where = f"{path}, line {number}"
        answer = value.get("answer")
        if answer is not None and not isinstance(answer, str):
            raise ValueError(f"{where}: answer is not a text: mend or delete the row")
        yield TraceRow(number, prompt=_prompt(value, where), answer=answer)


def _prompt(value: dict[str, Any], where: str) -> str:
    turns = value.get("turns")
    found = [value[key] for key in PROMPT_KEYS if key in value] or (turns[:1] if isinstance(turns, list) else [])
    if not found or not isinstance(found[0], str):
        raise ValueError(
            f"{where}: none of {', '.join(PROMPT_KEYS)} and turns is a text (found: {', '.join(value)}): "
            "name the prompt so, or choose the workload.format that has these keys"
        )
    return found[0]
