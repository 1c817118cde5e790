"""Policies by name: small classes that a config chooses, each in a file of its own."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from paged_jax.config import nearest
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


BUILT_IN = {
    "scheduling_policy": {"fcfs": "paged_jax.engine.policies.fcfs:FCFSQueue"},
    "victim_policy": {"last_arrived": "paged_jax.engine.policies.last_arrived:LastArrivedVictim"},
    "prefix_cache": {
        "hash": "paged_jax.kv_cache.prefix_cache.hash:HashPrefixCache",
        "none": "paged_jax.kv_cache.prefix_cache.none:NoPrefixCache",
    },
    "eviction": {"lru": "paged_jax.kv_cache.eviction.lru:LRUEviction"},
}
"""Short names by config field."""


def load_policy(field: str, name: str) -> type[Any]:
    """The class that `name`, a short name or `package.module:Class`, means in config field `field`.

    Raises ValueError, naming the field, when there is none.
    """
    known = BUILT_IN[field]
    path = known.get(name, name)
    module_name, colon, class_name = path.partition(":")
    if not colon:
        raise ValueError(f"unknown {field} {name!r}{nearest(name, list(known))} (or give package.module:Class)")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{field} {name!r} cannot be loaded: {error}") from None
