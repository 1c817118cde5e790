"""One request: its tokens, its place in the cache, and the times at which things happened to it."""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.stop import TextStream

if TYPE_CHECKING:
    from paged_jax.engine.beam_search import BeamSearch
    from paged_jax.execution.plan import TokenLogprobs
    from paged_jax.kv_cache.manager import Match


class RequestStatus(Enum):
    """Where a request is. A preempted request waits again, and keeps its tokens."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Its keys and values are gone, to be recomputed."""
    SWAPPED = "swapped"
    """Its keys and values are in host memory."""
    FINISHED = "finished"


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the engine's clock, and counts. Names are vLLM's."""

    arrival_time: float
    first_scheduled_time: float | None = None
    finished_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    """When each output token became known."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache at first admission."""
    max_wait: float = 0.0
    """Longest time in the queue at a stretch, in seconds."""

    @property
    def first_token_time(self) -> float | None:
        """When the first output token became known."""
        return self.token_times[0] if self.token_times else None


@dataclass(eq=False, slots=True)
class Request:
    """Mutable state of one request, or of one of its n samples; only the scheduler and the engine write to it."""

    request_id: str
    number: int
    """Counts the engine's requests in order of arrival."""
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    seed: int
    """Of its samples: its own, or the one that the engine derived."""
    max_total_tokens: int
    """Prompt and output together may not grow beyond this."""
    metrics: RequestMetrics
    end_token_ids: frozenset[int] = frozenset()
    """Every token that ends it: its stop tokens and, unless ignored, the model's."""
    text: TextStream | None = None
    """The output's text; None without a tokenizer."""
    prompt: str | None = None
    sample_index: int = 0
    """Which of its prompt's n samples, or beams, it is."""
    priority: int = 0
    """Lower is more urgent."""
    user: str = ""
    """Whom it is served for: `fair` divides service between users."""
    cache_salt: str = ""
    """Cached prefixes are shared only between requests of the same salt."""
    expected_output_len: int | None = None
    """The true output length, where a workload knows it."""
    beam_search: "BeamSearch | None" = None
    """The search that it is a beam of."""
    status: RequestStatus = RequestStatus.WAITING
    slot: int | None = None
    """Row of the device's sampling state, owned while running."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    num_writable_tokens: int = 0
    """Tokens that its blocks can take; to compute more, or to write where others read, needs new blocks."""
    next_publish: int = 0
    """Computed tokens at which one more block is full and can be offered to the prefix cache."""
    block_tables: tuple[BlockTable, ...] = ()
    """One per cache group."""
    host_blocks: tuple[list[int], ...] = ()
    """Per cache group the blocks of host memory that hold its pages while it is swapped out."""
    block_contents: list[bytes] = field(default_factory=list)
    """What the prefix cache has worked out of its tokens, block by block."""
    match: "Match | None" = None
    """What the prefix cache found for it last, while it waits."""
    pending_samples: tuple["Request", ...] = ()
    """Samples of the same prompt that begin when its prompt is computed."""
    siblings: tuple["Request", ...] = ()
    """All samples of its prompt, itself included, by index; empty when it is the only one."""
    queued_time: float = 0.0
    """When it entered the queue, seconds."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt and output."""
    logprobs: "list[TokenLogprobs] | None" = None
    """Of each output token, if they were asked for."""
    finish_reason: str | None = None
    """"stop", "length" or "abort"."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for end-of-sequence and length."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def samples(self) -> tuple["Request", ...]:
        """All samples of its prompt by index."""
        return self.siblings or (self,)

    @property
    def sampled_on_device(self) -> bool:
        """Whether its newest token is the one that the device sampled last in its slot."""
        return self.beam_search is None

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens are reported with each output token; None: no log-probabilities."""
        return self.sampling_params.logprobs if self.beam_search is None else self.beam_search.num_logprobs

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED
