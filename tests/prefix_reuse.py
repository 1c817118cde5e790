"""How much of each prompt a prefix cache that forgets nothing takes from earlier requests, counted by brute force."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from paged_jax.engine.engine import Arrival, Engine, drive
from paged_jax.engine.request import Request


@dataclass(frozen=True)
class Reuse:
    """Prompt tokens taken from the cache, by request."""

    measured: dict[str, int]
    expected: dict[str, int]


def reuse_one_by_one(engine: Engine, arrivals: Sequence[Arrival]) -> Reuse:
    """Serve requests that never overlap, and count what the engine took, and what it could have taken."""
    ended: list[Request] = []
    for advanced, _ in drive(engine, arrivals, engine.clock):
        ended += [request for request in advanced if request.is_finished]
    spans = [(r.metrics.arrival_time, r.metrics.finished_time) for r in ended]
    assert all(r.metrics.num_preemptions == 0 for r in ended)
    assert len(ended) == len(arrivals)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans)), "requests overlap"
    salts = {a.request_id: a.cache_salt for a in arrivals}
    expected = {}
    for i, request in enumerate(ended):
        prompt = request.prompt_token_ids
        alike = [0]
        for other in ended[:i]:
            if salts[other.request_id] == salts[request.request_id]:
                # the last token was sampled, and never fed back: it has no keys and values
                stored = [*other.prompt_token_ids, *other.output_token_ids[:-1]]
                pairs = zip(prompt, stored, strict=False)
                alike.append(next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(stored))))
        # at least one token must be computed, so that there is something to sample from
        usable = min(max(alike), len(prompt) - 1)
        expected[request.request_id] = usable // engine.config.block_size * engine.config.block_size
    return Reuse({r.request_id: r.metrics.num_cached_tokens for r in ended}, expected)
