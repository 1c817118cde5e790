"""Preemption by recomputation."""

from paged_jax.engine.policies import PreemptionPolicy
from paged_jax.engine.request import Request


class Recompute(PreemptionPolicy):
    """A victim's keys and values are given up; its tokens are prefilled again when it comes back."""

    def swaps(self, request: Request) -> bool:
        """Never."""
        return False
