"""The step loop: schedule, run, update. The same for a real device and for a modelled one."""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paged_jax.config import EngineConfig
from paged_jax.engine.clock import Clock
from paged_jax.engine.policies import load_policy
from paged_jax.engine.request import Request, RequestMetrics
from paged_jax.engine.scheduler import Scheduler
from paged_jax.engine.stats import StepStats
from paged_jax.execution.plan import SchedulerOutput, StepResult
from paged_jax.kv_cache.manager import KVCacheManager
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.seeds import derive_seed
from paged_jax.sampling.stop import TextStream

if TYPE_CHECKING:
    from paged_jax.checkpoints.tokenizer import Tokenizer


class StepHandle(Protocol):
    """A step that has been submitted."""

    def result(self) -> StepResult:
        """Wait for its tokens."""
        ...


class Executor(Protocol):
    """Runs plans, on a device or on a model of one."""

    @property
    def num_blocks(self) -> int:
        """Usable KV blocks."""
        ...

    def submit(self, plan: SchedulerOutput) -> StepHandle:
        """Start a step; never waits for it."""
        ...


@dataclass(frozen=True)
class Arrival:
    """One request of a workload."""

    time: float
    """Seconds after the start."""
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


class Engine:
    """Serves requests by continuous batching over paged KV memory.

    A request's prompt must leave room for one output token within `max_request_len`, the smaller of `max_model_len` and
    what the whole KV pool holds; its output ends with reason "length" when prompt and output reach that many tokens.

    Raises ValueError when the config cannot work with this model and pool.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        clock: Clock,
        tokenizer: "Tokenizer | None",
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.config = config
        self.executor = executor
        self.clock = clock
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.num_blocks = executor.num_blocks
        self.max_request_len = min(max_model_len, self.num_blocks * config.block_size)
        if self.max_request_len < 2:
            raise ValueError("the KV cache holds one token: give it more memory, or more or larger blocks")
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < self.max_request_len:
            raise ValueError(
                f"without chunked prefill a prompt must fit one step: raise max_num_batched_tokens "
                f"({config.max_num_batched_tokens}) to the longest request ({self.max_request_len}), or lower "
                "max_model_len"
            )
        prefix_cache = load_policy("prefix_cache", config.prefix_cache)(config.block_size)
        eviction = load_policy("eviction", config.eviction or "lru")()
        self.scheduler = Scheduler(
            config,
            KVCacheManager(self.num_blocks, config.block_size, prefix_cache, eviction),
            load_policy("scheduling_policy", config.scheduling_policy)(),
            load_policy("victim_policy", config.victim_policy)(),
            eos_token_ids,
        )
        self.last_step: StepStats | None = None
        self._requests: dict[str, Request] = {}  # those that have not ended
        self._num_requests = 0

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        arrival_time: float | None = None,
    ) -> Request:
        """Check a request and queue it.

        Raises ValueError, one sentence, for a prompt or parameters that cannot be served; nothing else is touched.
        """
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use by a request that has not ended: choose another")
        text, token_ids = self._tokenize(prompt)
        self._validate(token_ids, params)
        number = self._num_requests
        stream = None
        if self.tokenizer is not None:
            stream = TextStream(
                self.tokenizer.backend,
                token_ids,
                params.stop_strings,
                params.include_stop_str_in_output,
                params.skip_special_tokens,
            )
        request = Request(
            request_id=request_id,
            number=number,
            prompt=text,
            prompt_token_ids=token_ids,
            sampling_params=params,
            seed=derive_seed(self.config.seed, number) if params.seed is None else params.seed,
            max_total_tokens=self.max_request_len,
            metrics=RequestMetrics(self.clock.now() if arrival_time is None else arrival_time),
            text=stream,
        )
        self._num_requests += 1
        self._requests[request_id] = request
        self.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """Run one iteration; returns the requests that gained a token, ended ones included."""
        start = self.clock.now()
        plan = self.scheduler.schedule()
        if not plan.scheduled:
            if self._requests and not plan.preempted:
                raise RuntimeError(
                    f"nothing could be planned for {len(self._requests)} unfinished requests: "
                    f"check scheduling_policy {self.config.scheduling_policy!r} and "
                    f"victim_policy {self.config.victim_policy!r}"
                )
            return []
        for request in plan.admitted:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = start
        num_waiting = len(self.scheduler.waiting)
        num_running = len(self.scheduler.running)
        in_use = self.scheduler.kv_cache.pool.num_in_use
        entries = sum(len(t) for r in self.scheduler.running for t in r.block_tables)
        try:
            result = self.executor.submit(plan).result()
            self.clock.advance(result.modelled_seconds)
            now = self.clock.now()
            advanced, usage = self.scheduler.update(plan, result, now)
        except BaseException:  # an interrupt, say: the device may be a token ahead of what is booked
            self.scheduler.retract(plan)
            raise
        for request in advanced:
            if request.is_finished:
                del self._requests[request.request_id]
        if self.config.debug:
            self.scheduler.check_integrity()
        self.last_step = StepStats(
            start_time=start,
            end_time=now,
            num_tokens=plan.num_tokens,
            num_padded_tokens=result.num_padded_tokens,
            num_decode_tokens=sum(s.num_tokens == 1 for s in plan.scheduled),
            num_running=num_running,
            num_waiting=num_waiting,
            num_preempted=len(plan.preempted),
            blocks_in_use=in_use,
            block_table_entries=entries,
            kv=usage,
        )
        return advanced

    def has_unfinished_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    def abort(self, request_id: str) -> None:
        """End a request at once with reason "abort"; an id that is not in use is left alone."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.finish(request, "abort", self.clock.now())

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.scheduler.kv_cache.reset_prefix_cache()

    def _tokenize(self, prompt: str | Sequence[int]) -> tuple[str | None, tuple[int, ...]]:
        if not isinstance(prompt, str):
            try:
                return None, tuple(operator.index(token) for token in prompt)
            except TypeError:
                raise ValueError("a prompt must be a string or a list of whole token ids") from None
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give the prompt as token ids")
        return prompt, tuple(self.tokenizer.encode(prompt))

    def _validate(self, token_ids: tuple[int, ...], params: SamplingParams) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty: give at least one token")
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"prompt token id {token} is not in the vocabulary (0 to {self.vocab_size - 1})")
        if len(token_ids) >= self.max_request_len:
            limit = (
                f"max_model_len is {self.max_model_len}"
                if self.max_request_len == self.max_model_len
                else f"the KV cache holds {self.max_request_len} tokens ({self.num_blocks} blocks)"
            )
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and {limit}: it must leave room for at least one output token"
            )
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which this model does not have: use stop_token_ids")
        params.validate_for(self.vocab_size)


def drive(
    engine: Engine, arrivals: Sequence[Arrival], clock: Clock
) -> Iterator[tuple[list[Request], StepStats | None]]:
    """Feed a workload to the engine by its arrival times and step until all is done.

    Requests join when the clock, counted from the call's start, reaches their time (equal times in the order given).
    After each step yields the requests that gained a token in it, and the step's statistics.
    """
    origin = clock.now()
    pending = sorted(arrivals, key=lambda arrival: arrival.time)
    position = 0
    while position < len(pending) or engine.has_unfinished_requests():
        now = clock.now()
        while position < len(pending) and origin + pending[position].time <= now:
            arrival = pending[position]
            engine.add_request(arrival.request_id, arrival.prompt_token_ids, arrival.params, origin + arrival.time)
            position += 1
        if engine.has_unfinished_requests():
            yield engine.step(), engine.last_step
        else:
            clock.wait_until(origin + pending[position].time)
