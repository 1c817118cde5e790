"""Most of the prompt in the prefix cache first."""

from paged_jax.engine.policies.aged_queue import AgedQueue
from paged_jax.engine.request import Request, RequestStatus


class LongestPrefixMatch(AgedQueue):
    """Most cached tokens first, equal ones in order of arrival: SGLang's cache-aware order (Zheng et al., 2024).

    Requests that share a prefix follow each other while it is cached. What is cached changes from step to step, so
    each look asks anew for all that wait: n questions, which the cache answers without work while it is unchanged.
    A swapped-out request counts all that it has computed, which need not be computed again either.
    A request that shares nothing starves under a steady stream of those that do, unless `aging_s` is set.
    """

    def first(self) -> Request:
        """Of whom most is cached."""
        requests = list(self)
        counts = list(map(self._num_kept_tokens, requests))
        return requests[counts.index(max(counts))]

    def _num_kept_tokens(self, request: Request) -> int:
        if request.status is RequestStatus.SWAPPED:
            return request.num_computed_tokens
        return self.context.num_cached_tokens(request)
