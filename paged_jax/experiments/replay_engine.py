"""An engine without a model: tokens, candidates of beams and stop strings are those that were recorded."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from paged_jax.config import EngineConfig, parse
from paged_jax.engine.clock import Clock
from paged_jax.engine.engine import Engine
from paged_jax.engine.recorder import Event
from paged_jax.engine.request import Request
from paged_jax.execution.plan import SchedulerOutput, StepResult, TokenLogprobs
from paged_jax.experiments.no_device import with_overrides
from paged_jax.experiments.trace import RecordedPrompt, Trace
from paged_jax.kv_cache.eviction import Eviction
from paged_jax.kv_cache.eviction.belady import BeladyEviction
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.kv_cache.prefix_cache.hash import content_keys
from paged_jax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from paged_jax.checkpoints.tokenizer import Tokenizer
    from paged_jax.sampling.stop import TextStream


class RecordedText:
    """Stands for a request's text: it knows with which token a stop string was complete, and not the words."""

    text = ""

    def __init__(self, ending: Event | None) -> None:
        stop = ending.get("stop") if ending is not None else None
        self._stop = stop if isinstance(stop, str) else None
        self._held = bool(ending and ending.get("held"))
        self._num_left = ending.get("n", 0) if ending is not None else 0

    def append(self, token_id: int) -> str | None:
        """One more token; returns the stop string that was complete with it."""
        self._num_left -= 1
        return self._stop if self._num_left == 0 and not self._held else None

    def finish(self) -> str | None:
        """No more tokens; returns the stop string that was completed by what was held back."""
        return self._stop if self._held else None


class _NoTokenizer:
    """Recorded prompts are tokens already, and recorded texts bring their ends with them."""


@dataclass(frozen=True)
class Handle:
    """A step whose result is known."""

    answer: StepResult

    def result(self) -> StepResult:
        """Return it."""
        return self.answer


class RecordedExecutor(ABC):
    """Answers plans with recorded tokens, by request and number of its output tokens."""

    engine: "ReplayEngine"
    """Whose plans they are; set when there is one."""

    def __init__(self, trace: Trace, config: EngineConfig) -> None:
        header = trace.header
        self.num_blocks: int = config.num_blocks or header["num_blocks"]
        self.num_swap_blocks: int = (
            header["num_swap_blocks"] if config.num_swap_blocks is None else config.num_swap_blocks
        )
        self.cache_groups = tuple(CacheGroup(*group) for group in header["cache_groups"])
        self.recorded: dict[Request, tuple[RecordedPrompt, int]] = {}
        """Whose recorded answers a request gets: of which prompt, and which sample."""

    @abstractmethod
    def submit(self, plan: SchedulerOutput) -> Handle:
        """Answer a plan."""

    @abstractmethod
    def lacking(self, request: Request) -> None:
        """A request goes beyond what was recorded: end it, or raise."""

    def update_weights(self, model: Any) -> None:  # noqa: B027
        """Do nothing: the answers are of the weights that there were."""

    def answers(self, plan: SchedulerOutput, *, padded: int = 0, seconds: float = 0.0) -> StepResult:
        """The recorded answers to a plan, in its order; those of requests that have ended are empty."""
        for admitted in plan.admitted:
            self.engine.forget_future(self.recorded[cast(Request, admitted)][0])
        rows = [(part.request, part.samples) for part in plan.scheduled]
        rows += [(fork.child, True) for fork in plan.forks]
        tokens: list[tuple[int, ...]] = []
        logprobs: list[TokenLogprobs | None] = []
        for request, samples in rows:
            answer = self._answer(cast(Request, request)) if samples else {}
            top = tuple((token, logprob) for token, logprob in answer.get("top", ()))
            logprobs.append(TokenLogprobs(top[0][1], 1, top) if top else None)
            tokens.append((top[0][0],) if top else tuple(answer.get("tokens", ())))
        return StepResult(tokens, padded, seconds, logprobs if any(logprobs) else None)

    def _answer(self, request: Request) -> Event:
        prompt, sample = self.recorded[request]
        answer = prompt.answers[sample].get(request.num_output_tokens)
        if answer is None and not request.is_finished:
            self.lacking(request)
        return answer or {}


class ReplayEngine(Engine):
    """Serves recorded prompts, and knows which are to come, for Belady's policy."""

    def __init__(self, trace: Trace, config: EngineConfig, executor: RecordedExecutor, clock: Clock) -> None:
        self.recorded_executor = executor
        self._texts: Iterator[RecordedText] = iter(())
        self._beladys: list[BeladyEviction] = []
        super().__init__(
            config,
            executor,
            clock=clock,
            tokenizer=cast("Tokenizer", _NoTokenizer()),
            max_model_len=config.max_model_len or trace.header["max_model_len"],
            vocab_size=trace.header["vocab_size"],
            eos_token_ids=trace.header["eos_token_ids"],
        )
        executor.engine = self
        self._future: deque[tuple[RecordedPrompt, list[bytes]]] = deque()
        if self._beladys:
            for prompt in sorted(trace.prompts, key=lambda prompt: prompt.time):
                arguments = prompt.arguments
                keys = content_keys(arguments["prompt"], config.block_size, arguments["cache_salt"])
                self._future.append((prompt, keys))
            self._tell_future()

    def add(self, request_id: str, prompt: RecordedPrompt, arrival_time: float) -> None:
        """Queue a recorded prompt, all its samples or beams."""
        self._texts = map(RecordedText, prompt.endings)
        leader = self.add_request(request_id, arrival_time=arrival_time, **prompt.arguments)
        for index, request in enumerate(leader.samples):
            self.recorded_executor.recorded[request] = (prompt, index)

    def abort(self, request_id: str) -> None:
        """End a request, which will not be admitted any more."""
        if request_id in self._requests:
            self.forget_future(self.recorded_executor.recorded[self._requests[request_id]][0])
        super().abort(request_id)

    def forget_future(self, prompt: RecordedPrompt) -> None:
        """The prompt has been admitted, or will never be: it is of the past."""
        if self._future and self._future[0][0] is prompt:
            self._future.popleft()
            for belady in self._beladys:
                belady.advance()
        elif any(coming is prompt for coming, _ in self._future):  # out of the order that the policy was told
            self._future = deque(entry for entry in self._future if entry[0] is not prompt)
            self._tell_future()

    def _tell_future(self) -> None:
        for belady in self._beladys:
            belady.set_future([keys for _, keys in self._future])

    def _make_eviction(self) -> Eviction:
        if self.config.eviction != "belady":
            return super()._make_eviction()
        self._beladys.append(BeladyEviction())
        return self._beladys[-1]

    def _text_stream(self, token_ids: Sequence[int], params: SamplingParams) -> "TextStream | None":
        return cast("TextStream", next(self._texts))


def replay_config(trace: Trace, overrides: dict[str, Any]) -> EngineConfig:
    """The recorded settings with changes, made fit for an engine without a device; ValueError when they cannot work."""
    recorded = trace.header["config"]
    # of no use without a device; some of them contradict settings that may be changed here
    values = {**recorded, **dict.fromkeys(("trace_file", "token_buckets", "kv_cache_memory", "memory_utilization"))}
    values |= {"swap_space": None} if "num_swap_blocks" in overrides else {}
    return parse(EngineConfig, with_overrides(values, overrides))
