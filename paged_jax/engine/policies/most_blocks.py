"""Preempt whoever holds most blocks."""

from collections.abc import Sequence

from paged_jax.engine.policies import VictimPolicy
from paged_jax.engine.policies.held_blocks import num_held_blocks
from paged_jax.engine.request import Request


class MostBlocksVictim(VictimPolicy):
    """Fewest victims for the blocks that are needed; blocks shared with others count, though they stay in use."""

    def choose(self, running: Sequence[Request]) -> Request:
        """The one that holds most; of equals the last to arrive."""
        return max(running, key=lambda request: (num_held_blocks(request), request.number))
