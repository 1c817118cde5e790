"""Policies by name: small classes that a config chooses, each in a file of its own."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from paged_jax.config import policy_path
from paged_jax.engine.request import Request


class WaitingQueue(Protocol):
    """In which order requests are admitted."""

    def add(self, request: Request) -> None:
        """A new request arrives."""
        ...

    def requeue(self, request: Request) -> None:
        """A running request was preempted."""
        ...

    def peek(self) -> Request:
        """Who is to be admitted next; called when the queue is not empty."""
        ...

    def remove(self, request: Request) -> None:
        """The request is admitted or aborted."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class VictimPolicy(Protocol):
    """Who gives up blocks when none are left."""

    def choose(self, running: Sequence[Request]) -> Request:
        """The request to preempt, among those that run."""
        ...


def load_policy(field: str, name: str) -> type[Any]:
    """The class that `name`, a short name or `package.module:Class`, means in config field `field`.

    Raises ValueError, naming the field, when there is none.
    """
    path = policy_path(field, name)
    module_name, _, class_name = path.partition(":")
    try:
        policy = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{field} {name!r} cannot be loaded: {error}") from None
    if not isinstance(policy, type):
        raise ValueError(f"{field} {name!r} is not a class")
    return policy
