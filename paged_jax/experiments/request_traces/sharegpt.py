"""ShareGPT: a JSON list of conversations, of which the first question and its answer are taken.

vLLM's benchmark takes the first two turns, whoever speaks; here the first human turn and the first turn of the model
after it, which is the same but for conversations that begin in the middle. Its limits are `min_len: 4`,
`max_prompt_len: 1024` and `max_total_tokens: 2048`.
"""

from pathlib import Path
from typing import Any

from paged_jax.experiments.request_traces.row import TraceRow
from paged_jax.experiments.request_traces.source import parse_json, read_text

_HUMAN = ("human", "user")
_MODEL = ("gpt", "assistant", "chatgpt", "model")


def read_sharegpt(path: Path) -> list[TraceRow]:
    """One row for each conversation, in the file's order; its texts are empty where no question is answered.

    Raises ValueError, one sentence, for a file that is not of this format.
    """
    conversations = parse_json(read_text(path), str(path))
    if not isinstance(conversations, list) or not conversations:
        raise ValueError(f"{path} holds no list of conversations: choose the workload.format that fits")
    return [_row(i, conversation, path) for i, conversation in enumerate(conversations, start=1)]


def _row(number: int, conversation: Any, path: Path) -> TraceRow:
    where = f"{path}, conversation {number}"
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list):
        raise ValueError(f'{where} has no list "conversations": mend or delete it')
    question = None
    for turn in turns:
        speaker, text = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if not isinstance(speaker, str) or not isinstance(text, str):
            raise ValueError(f'{where} has a turn without the texts "from" and "value": mend or delete it')
        if question is None and speaker in _HUMAN:
            question = text
        elif question is not None and speaker in _MODEL:
            return TraceRow(number, prompt=question, answer=text)
    return TraceRow(number, prompt="", answer="")
