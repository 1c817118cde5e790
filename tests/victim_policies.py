"""Victim policies as a researcher would bring them: named in a config as `victim_policies:Class`."""

from collections.abc import Sequence

from paged_jax.engine.policies import VictimPolicy
from paged_jax.engine.request import Request


class FirstArrivedVictim(VictimPolicy):
    """The opposite of the built-in policy: the oldest gives way."""

    def choose(self, running: Sequence[Request]) -> Request:
        return min(running, key=lambda request: request.number)


class LongestVictim(VictimPolicy):
    """Whoever holds most tokens gives way, wherever it stands in the list."""

    def choose(self, running: Sequence[Request]) -> Request:
        return max(running, key=lambda request: len(request.token_ids))
