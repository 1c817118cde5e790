"""What passes between the scheduler and an executor: the plan of a step, and its result."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.sampling.params import SamplingParams


@runtime_checkable
class PlannedRequest(Protocol):
    """What an executor may read of a request."""

    token_ids: list[int]
    """All tokens known so far."""
    slot: int | None
    """Row of the device's sampling state."""
    seed: int
    sampling_params: SamplingParams
    block_tables: tuple[BlockTable, ...]
    """One per cache group."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step: tokens `start` to `start + num_tokens` of its `token_ids`."""

    request: PlannedRequest
    start: int
    num_tokens: int
    samples: bool
    """Whether this reaches the request's last token, so that the next one is sampled."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. Block tables, one per cache group, are those of the requests, already extended."""

    scheduled: tuple[ScheduledRequest, ...]
    admitted: tuple[PlannedRequest, ...]
    """Requests that were given a slot by this plan, all of which are also in `scheduled`."""
    preempted: tuple[PlannedRequest, ...]
    emptied_blocks: tuple[int, ...]
    """Blocks that gave up their content before this step; it may write some of them anew."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device answers: for each scheduled request its new tokens, none for a chunk that is not its last."""

    token_ids: tuple[tuple[int, ...], ...]
    num_padded_tokens: int
    modelled_seconds: float = 0.0
    """How far a simulated step moves the clock; 0 for a real one."""
