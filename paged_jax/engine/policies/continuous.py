"""Continuous batching."""

from collections.abc import Sequence

from paged_jax.engine.policies import BatchingPolicy, QueuePolicy
from paged_jax.engine.request import Request


class ContinuousBatching(BatchingPolicy):
    """Anybody joins at any step and leaves when it ends: iteration-level scheduling (Yu et al., Orca, OSDI 2022)."""

    def begin(self, waiting: QueuePolicy, running: Sequence[Request]) -> None:
        """Nothing is decided for a whole batch."""

    def admits(self, request: Request) -> bool:
        """Always."""
        return True

    def joined(self, request: Request) -> None:
        """Nothing to remember."""
