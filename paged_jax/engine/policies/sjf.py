"""Shortest job first."""

from paged_jax.engine.policies.keyed_queue import KeyedQueue
from paged_jax.engine.request import Request


class ShortestJobFirst(KeyedQueue):
    """Shortest predicted output first, equal ones in order of arrival; running requests are left alone.

    Long requests starve under a steady stream of short ones, unless `aging_s` is set.
    """

    def key(self, request: Request) -> int:
        """Its predicted output in tokens."""
        return self.context.predict_output_len(request)
