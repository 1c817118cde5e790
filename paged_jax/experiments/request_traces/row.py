"""One request of a trace file, as the file has it."""

from typing import NamedTuple


class TraceRow(NamedTuple):
    """Lengths or text of one request; which of the two depends on the format."""

    line: int
    """Where it stands in its file, from 1; in a JSON list, its place in the list."""
    prompt_len: int = 0
    """Tokens of the prompt; 0 as long as only its text is known."""
    output_len: int = 0
    """Tokens of the answer; 0 as long as only its text is known, or nothing."""
    time_ns: int | None = None
    """Arrival in nanoseconds on the file's own clock; integers, so that subtracting an origin loses nothing."""
    hash_ids: tuple[int, ...] = ()
    """Identities of the prompt's blocks: equal ids stand for equal tokens."""
    prompt: str | None = None
    """Text of the prompt, for a format of texts."""
    answer: str | None = None
    """Text of the answer, whose length in tokens is the output's."""
