"""First come, first served."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import chain

from paged_jax.engine.policies import PolicyContext, QueuePolicy
from paged_jax.engine.request import Request


class FCFSQueue(QueuePolicy):
    """Requests wait in order of arrival; preempted ones go back to the front, among themselves in order of arrival.

    Nobody starves: whoever waits is overtaken only by those that were admitted before it and lost their place.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._returned: list[Request] = []
        self._queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """A new request joins at the end."""
        self._queue.append(request)

    def requeue(self, request: Request) -> None:
        """A preempted request goes before all new ones; several come back in order of arrival."""
        insort(self._returned, request, key=lambda r: r.number)

    def peek(self) -> Request:
        """Who is next."""
        return self._returned[0] if self._returned else self._queue[0]

    def remove(self, request: Request) -> None:
        """The request is admitted or aborted."""
        if request in self._returned:
            self._returned.remove(request)
        else:
            self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._returned) + len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._returned, self._queue)
