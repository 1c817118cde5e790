"""Requests, and a context for policies that are tested by themselves: a clock and a cache that do as they are told."""

from typing import Any

from paged_jax.config import EngineConfig
from paged_jax.engine.policies import PolicyContext
from paged_jax.engine.request import Request, RequestMetrics
from paged_jax.sampling.params import SamplingParams


class FakeEngine:
    """What policies may look at. Predicted lengths are the requests' `expected_output_len`."""

    def __init__(self, **config: Any) -> None:
        self.time = 0.0
        """Seconds."""
        self.cached: dict[Request, int] = {}
        """Cached tokens by request."""
        self.num_questions = 0
        """How often the cache has been asked."""
        self.num_requests = 0
        self.context = PolicyContext(
            EngineConfig(**config), lambda: self.time, _expected_output_len, self._num_cached_tokens
        )

    def request(self, output_len: int = 8, prompt_len: int = 4, **fields: Any) -> Request:
        """The next request to arrive, now."""
        number = self.num_requests
        self.num_requests += 1
        return Request(
            request_id=f"r{number}",
            number=number,
            prompt_token_ids=(0,) * prompt_len,
            sampling_params=SamplingParams(),
            seed=0,
            max_total_tokens=1_000_000,
            metrics=RequestMetrics(arrival_time=self.time),
            expected_output_len=output_len,
            **fields,
        )

    def _num_cached_tokens(self, request: Request) -> int:
        self.num_questions += 1
        return self.cached.get(request, 0)


def _expected_output_len(request: Request) -> int:
    assert request.expected_output_len is not None
    return request.expected_output_len
