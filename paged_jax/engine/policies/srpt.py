"""Shortest remaining processing time first."""

from typing import ClassVar

from paged_jax.engine.policies.keyed_queue import KeyedQueue
from paged_jax.engine.policies.remaining_output import remaining_output
from paged_jax.engine.request import Request


class ShortestRemainingTime(KeyedQueue):
    """Least predicted output that is yet to come first (Schrage, 1968), equal ones in order of arrival.

    A waiting request takes the place of a running one that has strictly more to come, so two can never take it from
    each other in turn. Long requests starve under a steady stream of short ones, unless `aging_s` is set: then one that
    arrived that long ago is next, and is left to run.
    """

    may_displace: ClassVar[bool] = True

    def key(self, request: Request) -> int:
        """Its predicted remaining output in tokens: nothing is generated while it waits."""
        return remaining_output(self.context, request)

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether `running` has more to come, and has not aged."""
        return self.key(waiting) < self.key(running) and not self.has_aged(running)
