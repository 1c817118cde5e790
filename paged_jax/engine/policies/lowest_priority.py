"""Preempt whoever is least urgent."""

from collections.abc import Sequence

from paged_jax.engine.policies import VictimPolicy
from paged_jax.engine.request import Request


class LowestPriorityVictim(VictimPolicy):
    """The counterpart of the queue's `priority`, for requests that run."""

    def choose(self, running: Sequence[Request]) -> Request:
        """The one with the largest `priority`; of equals the last to arrive."""
        return max(running, key=lambda request: (request.priority, request.number))
