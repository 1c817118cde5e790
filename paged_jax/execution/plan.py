"""What passes between the scheduler and an executor: the plan of a step, and its result."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.sampling.params import SamplingParams


@runtime_checkable
class PlannedRequest(Protocol):
    """What an executor may read of a request."""

    token_ids: list[int]
    """All tokens known so far."""
    num_computed_tokens: int
    """Tokens whose keys and values are in the pages before the step."""
    slot: int | None
    """Row of the device's sampling state."""
    seed: int
    sample_index: int
    """Which of its prompt's n samples it is."""
    sampling_params: SamplingParams
    block_tables: tuple[BlockTable, ...]
    """One per cache group; id 0 stands for a block that the window has left behind."""
    end_token_ids: frozenset[int]
    """Tokens that end it, which are not sampled before `min_tokens`."""
    sampled_on_device: bool
    """Whether its newest token is the one that the device sampled last in its slot; a beam's is chosen by the host."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        ...

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens are reported with each sampled one; None: no log-probabilities."""
        ...


class ScheduledRequest(NamedTuple):
    """One request's part of a step: tokens `start` to `start + num_tokens` of its `token_ids`."""

    request: PlannedRequest
    start: int
    num_tokens: int
    samples: bool
    """Whether this reaches the request's last token, so that the next one is sampled."""


class Fork(NamedTuple):
    """A sample of a prompt that begins in this step: from the logits that its parent's chunk ends with."""

    parent: PlannedRequest
    """Is in the plan's chunks or decodes, and samples."""
    child: PlannedRequest
    """Has a slot, and no blocks yet."""


class Swap(NamedTuple):
    """A whole request's blocks on their way between the device and the host, per cache group."""

    request: PlannedRequest
    device_blocks: tuple[tuple[int, ...], ...]
    host_blocks: tuple[tuple[int, ...], ...]


class SchedulerOutput(NamedTuple):
    """The plan of one step. Block tables, one per cache group, are those of the requests, already extended.

    On the device: blocks swapped out are read first; then copies are made, all sources read before any target is
    written; then, in debug mode, emptied blocks that are no target of a copy are poisoned; then blocks swapped in are
    written; then the step runs. All block ids are per cache group.
    """

    decodes: Sequence[PlannedRequest] = ()
    """Each computes its newest token, at position num_computed_tokens, and samples the next."""
    chunks: Sequence[ScheduledRequest] = ()
    """Everything that is computed besides."""
    forks: Sequence[Fork] = ()
    idle: Sequence[PlannedRequest] = ()
    """Rows of a static batch that have ended: each computes its last computed token again, and keeps nothing of it."""
    admitted: Sequence[PlannedRequest] = ()
    """Requests that were given a slot by this plan, forked ones included."""
    preempted: Sequence[PlannedRequest] = ()
    swap_outs: Sequence[Swap] = ()
    copies: tuple[Sequence[tuple[int, int]], ...] = ()
    """Per cache group (source, target) of blocks that were shared and are about to be written."""
    swap_ins: Sequence[Swap] = ()
    emptied_blocks: tuple[Sequence[int], ...] = ()
    """Per cache group, blocks that gave up their content before this step; it may write some of them anew."""
    num_tokens: int = 0
    """Tokens to compute, those of idle rows included."""

    @property
    def scheduled(self) -> list[ScheduledRequest]:
        """Decodes and chunks alike, in the order of the result's tokens."""
        decodes = [ScheduledRequest(r, r.num_computed_tokens, 1, True) for r in self.decodes]
        return [*decodes, *self.chunks]


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one sampled token, before temperature and filters."""

    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, in that order, as many as the request wants."""


class StepResult(NamedTuple):
    """What the device answers, in the order decodes, chunks, forks."""

    token_ids: Sequence[tuple[int, ...]]
    """New tokens of each, none for a chunk that is not its prompt's last."""
    num_padded_tokens: int
    modelled_seconds: float = 0.0
    """How far a simulated step moves the clock; 0 for a real one."""
    logprobs: Sequence[TokenLogprobs | None] | None = None
    """Of each new token; None when nobody in the step wants them."""
