"""Preempt whoever arrived last."""

from collections.abc import Sequence

from paged_jax.engine.request import Request


class LastArrivedVictim:
    """Together with first come, first served this always lets the oldest request finish."""

    def choose(self, running: Sequence[Request]) -> Request:
        """The request to preempt, among those that run (the one that wants blocks included)."""
        return max(running, key=lambda request: request.number)
