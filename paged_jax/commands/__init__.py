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
