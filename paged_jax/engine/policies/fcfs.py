"""First come, first served."""

from collections import deque
from collections.abc import Iterator

from paged_jax.engine.request import Request


class FCFSQueue:
    """Requests wait in order of arrival; a preempted one goes back to the front."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """A new request joins at the end."""
        self._queue.append(request)

    def requeue(self, request: Request) -> None:
        """A preempted request is next."""
        self._queue.appendleft(request)

    def peek(self) -> Request:
        """Who is next."""
        return self._queue[0]

    def remove(self, request: Request) -> None:
        """The request is admitted or aborted."""
        self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)
