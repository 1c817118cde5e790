"""Most urgent first."""

from paged_jax.engine.policies.keyed_queue import KeyedQueue
from paged_jax.engine.request import Request


class PriorityQueue(KeyedQueue):
    """Lowest `priority` first, equal ones in order of arrival; a preempted request keeps its place.

    Running requests are left alone: priority says who is admitted, the victim policy who is preempted. The wait of an
    unimportant request is bounded: `aging_s` seconds (60 unless the config says otherwise) after its arrival only those
    that arrived earlier go before it.
    """

    default_aging_s = 60.0

    def key(self, request: Request) -> int:
        """Its priority."""
        return request.priority
