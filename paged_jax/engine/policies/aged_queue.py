"""What orders with aging have in common."""

from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import ClassVar

from paged_jax.engine.policies import PolicyContext, QueuePolicy
from paged_jax.engine.request import Request


class AgedQueue(QueuePolicy):
    """Some order of admission, and before it, in order of arrival, those that arrived `aging_s` or more ago.

    With aging nobody starves: from `aging_s` seconds after its arrival on, a waiting request is overtaken by nobody
    that arrived later. A preempted request keeps its arrival, and with it its place. Without aging (None) the order
    alone decides, and a stream of requests that it prefers can keep one waiting for ever.

    The queue is a sorted list: a place is found in O(log n) and made by moving the pointers behind it, which for ten
    thousand requests takes microseconds.
    """

    default_aging_s: ClassVar[float | None] = None
    """Seconds, where the config says nothing."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        aging_s = context.config.aging_s
        self._aging_s = self.default_aging_s if aging_s is None else aging_s
        self._by_arrival: list[tuple[float, int, Request]] = []

    @abstractmethod
    def first(self) -> Request:
        """Who is next in the policy's own order, aging left aside."""

    def add(self, request: Request) -> None:
        """A request takes its place."""
        insort(self._by_arrival, (request.metrics.arrival_time, request.number, request))

    def requeue(self, request: Request) -> None:
        """A preempted request takes the place that its arrival and its state give it."""
        self.add(request)

    def peek(self) -> Request:
        """The first to arrive if it has aged, else the first in the policy's own order."""
        oldest = self._by_arrival[0][2]
        return oldest if self.has_aged(oldest) else self.first()

    def remove(self, request: Request) -> None:
        """The request is admitted or aborted."""
        del self._by_arrival[bisect_left(self._by_arrival, (request.metrics.arrival_time, request.number))]

    def has_aged(self, request: Request) -> bool:
        """Whether it arrived `aging_s` or more ago."""
        return self._aging_s is not None and self.context.now() - request.metrics.arrival_time >= self._aging_s

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._by_arrival)
