"""Preempt whoever has least to recompute."""

from collections.abc import Sequence

from paged_jax.engine.policies import VictimPolicy
from paged_jax.engine.request import Request


class FewestTokensLostVictim(VictimPolicy):
    """Least work is thrown away, as far as the prefix cache does not give it back."""

    def choose(self, running: Sequence[Request]) -> Request:
        """The one with the fewest computed tokens; of equals the last to arrive."""
        return min(running, key=lambda request: (request.num_computed_tokens, -request.number))
