"""Preempt whoever has most to generate yet."""

from collections.abc import Sequence

from paged_jax.engine.policies import VictimPolicy
from paged_jax.engine.policies.remaining_output import remaining_output
from paged_jax.engine.request import Request


class LongestRemainingVictim(VictimPolicy):
    """Those that are nearly done finish and free their blocks."""

    def choose(self, running: Sequence[Request]) -> Request:
        """The one with the largest predicted remaining output; of equals the last to arrive."""
        return max(running, key=lambda request: (remaining_output(self.context, request), request.number))
