"""The commands of `paged-jax`, one file each: a dataclass whose fields are flags, and which does it when called."""

from typing import ClassVar, Protocol

PROGRAM = "paged-jax"
BAR_FORMAT = "{desc} |{bar:20}| {n_fmt}/{total_fmt} [{elapsed}]"
"""Of progress bars whose steps take different times, so that an estimate would mislead."""
STATUS_ERROR = 1
"""Of a command that could not do what it was asked."""


class UsageError(ValueError):
    """What was typed cannot be a command: exit status 2."""


class Command(Protocol):
    """A dataclass whose fields are flags and whose docstring is the help, its first line being a summary."""

    needs: ClassVar[str]
    """The flag or positional argument that may not be missing; empty when there is none."""

    def __call__(self) -> None:
        """Do it."""
        ...


def sentence_of(error: Exception) -> str:
    """An error in one line, with what to do where that is not part of it."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError | OSError) and text:
        return text
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:  # the latter is XLA's
        detail = f" ({text.partition('RESOURCE_EXHAUSTED: ')[2] or text})" if text else ""
        return (
            f"out of memory{detail}: make the KV cache smaller (num_blocks, kv_cache_memory or "
            "memory_utilization) or take a smaller max_num_batched_tokens"
        )
    return f"internal error, {type(error).__name__}: {text}; --debug shows where, please report it"
