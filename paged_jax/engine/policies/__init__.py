"""Policies by name: small classes that a config chooses, each in a file of its own."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paged_jax.config import EngineConfig, policy_path
from paged_jax.engine.request import Request


@dataclass(frozen=True)
class PolicyContext:
    """What a policy may look at."""

    config: EngineConfig
    now: Callable[[], float]
    """Seconds on the engine's clock."""
    predict_output_len: Callable[[Request], int]
    """Output tokens of a request, all in all, as `length_predictor` has it."""
    num_cached_tokens: Callable[[Request], int]
    """Tokens at a waiting request's beginning that the prefix cache holds now; takes nothing."""


class QueuePolicy(ABC):
    """In which order requests are admitted."""

    may_displace: ClassVar[bool] = False
    """Whether `displaces` may ever say yes."""

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new request arrives."""

    @abstractmethod
    def requeue(self, request: Request) -> None:
        """A running request was preempted."""

    @abstractmethod
    def peek(self) -> Request:
        """Who is to be admitted next; called when the queue is not empty."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """The request waits no more: it is aborted or, unless `admitted` says otherwise, admitted."""

    def admitted(self, request: Request) -> None:
        """The request, which `peek` has named, is admitted."""
        self.remove(request)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether `waiting`, which cannot be admitted otherwise, may take the place of `running`."""
        return False


class VictimPolicy(ABC):
    """Who gives up blocks when none are left."""

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    @abstractmethod
    def choose(self, running: Sequence[Request]) -> Request:
        """The request to preempt, among these, which run; the one that wants blocks may be among them."""


class PreemptionPolicy(ABC):
    """What becomes of a victim's keys and values."""

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    @abstractmethod
    def swaps(self, request: Request) -> bool:
        """Whether they move to host memory, as far as there is room, to come back; else they are recomputed."""


class BatchingPolicy(ABC):
    """Who may join a running batch, and when those that have ended leave it."""

    keeps_rows: ClassVar[bool] = False
    """Whether rows that have ended keep computing, and hold their memory, until the whole batch is done."""

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    @abstractmethod
    def begin(self, waiting: QueuePolicy, running: Sequence[Request]) -> None:
        """A step is about to be planned."""

    @abstractmethod
    def admits(self, request: Request) -> bool:
        """Whether it may join in this step; slots and blocks are the scheduler's business."""

    @abstractmethod
    def joined(self, request: Request) -> None:
        """It has been admitted."""


class LengthPredictor(ABC):
    """How many tokens a request will generate."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def predict(self, request: Request) -> int:
        """Output tokens, all in all; at least 1."""


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
    base = _base(field)
    if not issubclass(policy, base):
        raise ValueError(f"{field} {name!r} must be derived from {base.__module__}.{base.__name__}")
    lacking = sorted(getattr(policy, "__abstractmethods__", ()))
    if lacking:
        raise ValueError(f"{field} {name!r} lacks the methods {', '.join(lacking)} of {base.__name__}")
    return policy


def _base(field: str) -> type[Any]:
    """What the classes of a config field are derived from."""
    from paged_jax.kv_cache.eviction import Eviction
    from paged_jax.kv_cache.manager import KVCacheManager
    from paged_jax.kv_cache.prefix_cache import PrefixCache

    bases: dict[str, type[Any]] = {
        "batching": BatchingPolicy,
        "scheduling_policy": QueuePolicy,
        "length_predictor": LengthPredictor,
        "preemption_mode": PreemptionPolicy,
        "victim_policy": VictimPolicy,
        "allocator": KVCacheManager,
        "prefix_cache": PrefixCache,
        "eviction": Eviction,
    }
    return bases[field]
