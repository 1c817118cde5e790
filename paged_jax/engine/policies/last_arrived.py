"""Preempt whoever arrived last."""

from collections.abc import Sequence

from paged_jax.engine.policies import VictimPolicy
from paged_jax.engine.request import Request


class LastArrivedVictim(VictimPolicy):
    """Together with first come, first served this always lets the oldest request finish."""

    def choose(self, running: Sequence[Request]) -> Request:
        """The one with the largest number."""
        return max(running, key=lambda request: request.number)
