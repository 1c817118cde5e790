"""Orders by a key that does not change while a request waits."""

from abc import abstractmethod
from bisect import bisect_left, insort

from paged_jax.engine.policies import PolicyContext
from paged_jax.engine.policies.aged_queue import AgedQueue
from paged_jax.engine.request import Request


class KeyedQueue(AgedQueue):
    """Least key first, equal ones in order of arrival, and aging as its base has it."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._keys: dict[Request, int] = {}
        self._by_key: list[tuple[int, int, Request]] = []

    @abstractmethod
    def key(self, request: Request) -> int:
        """Its rank when it enters the queue; less goes first."""

    def first(self) -> Request:
        """Whose key is least."""
        return self._by_key[0][2]

    def add(self, request: Request) -> None:
        """A request takes its place by key and by arrival."""
        key = self.key(request)
        super().add(request)
        self._keys[request] = key
        insort(self._by_key, (key, request.number, request))

    def remove(self, request: Request) -> None:
        """The request is admitted or aborted."""
        super().remove(request)
        del self._by_key[bisect_left(self._by_key, (self._keys.pop(request), request.number))]
