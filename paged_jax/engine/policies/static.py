"""Request-level batching."""

from collections.abc import Sequence

from paged_jax.engine.policies import BatchingPolicy, PolicyContext, QueuePolicy
from paged_jax.engine.request import Request, RequestStatus


class StaticBatching(BatchingPolicy):
    """Nobody joins or leaves a batch until all of it is done: what engines did before Orca (Yu et al., OSDI 2022).

    A batch opens when nobody runs, for the requests that wait at that moment. Prompts may take several steps, so it
    stays open for those until it has all it can take: a step that only decodes is planned and nobody joins, or the
    next in the queue arrived too late. A preempted member may come back at any time.
    """

    keeps_rows = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._last_number = -1
        """The last request to have arrived when the batch opened."""
        self._is_open = False
        self._only_decodes = False
        """Whether the step that is planned, or was planned last, has neither prompts nor newcomers."""

    def begin(self, waiting: QueuePolicy, running: Sequence[Request]) -> None:
        """Open a batch if nobody runs; close one that the last step added nothing to."""
        if not running:
            self._last_number = max((request.samples[-1].number for request in waiting), default=-1)
            self._is_open = True
        elif self._only_decodes:
            self._is_open = False
        self._only_decodes = all(r.num_computed_tokens + 1 >= len(r.token_ids) for r in running)

    def admits(self, request: Request) -> bool:
        """Whether it waited when the batch opened, and that is still open, or was preempted from it."""
        if request.status in (RequestStatus.PREEMPTED, RequestStatus.SWAPPED):
            return True
        self._is_open = self._is_open and request.number <= self._last_number
        return self._is_open

    def joined(self, request: Request) -> None:
        """The step has a newcomer."""
        self._only_decodes = False
