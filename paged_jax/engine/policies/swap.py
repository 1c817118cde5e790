"""Preemption by swapping."""

from paged_jax.engine.policies import PreemptionPolicy
from paged_jax.engine.request import Request


class SwapOut(PreemptionPolicy):
    """A victim's keys and values move to host memory, as far as there is room, and come back with it."""

    def swaps(self, request: Request) -> bool:
        """Always."""
        return True
