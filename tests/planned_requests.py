"""Requests made by hand, for plans that no scheduler has made."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paged_jax.execution.plan import ScheduledRequest, SchedulerOutput
from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.sampling.params import SamplingParams


@dataclass(eq=False)
class HandMade:
    """What an executor reads of a request."""

    token_ids: list[int]
    slot: int
    block_tables: tuple[BlockTable, ...] = ()
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    seed: int = 0
    sample_index: int = 0
    sampling_params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    end_token_ids: frozenset[int] = frozenset()
    sampled_on_device: bool = True

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.sampling_params.logprobs


def request(token_ids: Sequence[int], slot: int, *blocks: Sequence[int], **fields: object) -> HandMade:
    """A request with one block table per cache group; unless told otherwise, its tokens are all prompt."""
    tables = tuple(BlockTable(list(ids)) for ids in blocks)
    return HandMade(list(token_ids), slot, tables, **{"num_prompt_tokens": len(token_ids), **fields})


def chunk(request: HandMade, start: int, count: int) -> ScheduledRequest:
    return ScheduledRequest(request, start, count, start + count == len(request.token_ids))


def plan(**fields: object) -> SchedulerOutput:
    """A plan that counts its own tokens."""
    made = SchedulerOutput(**fields)
    tokens = len(made.decodes) + len(made.idle) + sum(part.num_tokens for part in made.chunks)
    return SchedulerOutput(**fields, num_tokens=tokens)
