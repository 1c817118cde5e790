"""One request: its tokens, its place in the cache, and the times at which things happened to it."""

from dataclasses import dataclass, field
from enum import Enum

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.stop import TextStream


class RequestStatus(Enum):
    """Where a request is. A preempted request waits again, and keeps its tokens."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass
class RequestMetrics:
    """Times in seconds on the engine's clock, and counts. Names are vLLM's."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    """When each output token became known."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache at first admission."""


@dataclass(eq=False)
class Request:
    """Mutable state of one request; only the scheduler and the engine write to it."""

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
    text: TextStream | None = None
    """The output's text; None without a tokenizer."""
    prompt: str | None = None
    status: RequestStatus = RequestStatus.WAITING
    slot: int | None = None
    """Row of the device's sampling state, owned while running."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    block_tables: tuple[BlockTable, ...] = ()
    """One per cache group."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt and output."""
    finish_reason: str | None = None
    """"stop", "length" or "abort"."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for end-of-sequence and length."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

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
