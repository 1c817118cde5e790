"""The step loop: schedule, run, update. The same for a real device and for a modelled one."""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from paged_jax.config import EngineConfig
from paged_jax.engine.beam_search import BeamSearch
from paged_jax.engine.clock import Clock
from paged_jax.engine.door import Door
from paged_jax.engine.policies import PolicyContext, load_policy
from paged_jax.engine.recorder import Recorder, Sink, header
from paged_jax.engine.request import Request, RequestMetrics
from paged_jax.engine.scheduler import Policies, Scheduler
from paged_jax.engine.stats import StepStats
from paged_jax.engine.trace_file import TraceFile, check_trace_file
from paged_jax.execution.plan import SchedulerOutput, StepResult, Swap
from paged_jax.interrupts import HeldInterrupts
from paged_jax.kv_cache.eviction import Eviction
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.kv_cache.manager import CacheSpec, KVCacheManager
from paged_jax.kv_cache.prefix_cache import PrefixCache
from paged_jax.kv_cache.usage import KVUsage
from paged_jax.sampling.params import BeamSearchParams, SamplingParams, num_samples
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
        """Usable KV blocks of each cache group."""
        ...

    @property
    def num_swap_blocks(self) -> int:
        """Blocks of host memory of each cache group; 0 without swapping."""
        ...

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The kinds of layers."""
        ...

    def submit(self, plan: SchedulerOutput) -> StepHandle:
        """Start a step; never waits for it."""
        ...

    def update_weights(self, model: Any) -> None:
        """Go on with another model's weights; ValueError when its shapes differ."""
        ...


@dataclass(frozen=True)
class Arrival:
    """One request of a workload."""

    time: float
    """Seconds after the start or, with `after`, after the end of that request."""
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    priority: int = 0
    user: str = ""
    cache_salt: str = ""
    expected_output_len: int | None = None
    """The true output length, for policies that are told it."""
    after: str | None = None
    """The request, with all its samples, that must have ended before: the same user's last one, or turn of a chat."""


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
        if config.trace_file is not None:
            check_trace_file(config.trace_file)
        self.config = config
        self.executor = executor
        self.clock = clock
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.num_blocks = executor.num_blocks
        if config.num_blocks not in (None, executor.num_blocks):
            raise ValueError(
                f"num_blocks is {config.num_blocks}, but the executor's arrays hold {executor.num_blocks} blocks: make "
                "it with as many"
            )
        self.eos_token_ids = frozenset(eos_token_ids)
        kv_cache = self._make_kv_cache()
        self.max_request_len = kv_cache.max_request_len
        if self.max_request_len < 2:
            raise ValueError("the KV cache holds one token: give it more memory, or more or larger blocks")
        room = min(config.max_num_batched_tokens, kv_cache.max_chunk)
        if not config.enable_chunked_prefill and room < self.max_request_len:
            if room < config.max_num_batched_tokens:
                raise ValueError(
                    "without chunked prefill a prompt must fit the window's pages: raise num_blocks "
                    f"({self.num_blocks}), or lower max_model_len"
                )
            raise ValueError(
                f"without chunked prefill a prompt must fit one step: raise max_num_batched_tokens "
                f"({config.max_num_batched_tokens}) to the longest request ({self.max_request_len}), or lower "
                "max_model_len"
            )
        self._door = Door(config, tokenizer, vocab_size, max_model_len, self.max_request_len, self.num_blocks)
        self._predictor = load_policy("length_predictor", config.length_predictor or "given")(config)
        context = PolicyContext(config, lambda: self._now, self._predictor.predict, kv_cache.num_cached_tokens)

        def policy(field: str) -> Any:
            return load_policy(field, getattr(config, field))(context)

        policies = Policies(
            policy("scheduling_policy"), policy("victim_policy"), policy("preemption_mode"), policy("batching")
        )
        self.scheduler = Scheduler(config, kv_cache, policies)
        self.last_step: StepStats | None = None
        self._requests: dict[str, Request] = {}  # those that have not ended: the first sample of each prompt
        self._num_requests = 0
        self._num_preempted = self._num_evicted = 0  # by the last statistics, and since for preemptions
        self._now = 0.0
        self._recorder: Recorder | None = None
        if config.trace_file is not None:
            self.record(TraceFile(config.trace_file))

    def record(self, sink: Sink) -> None:
        """From now on tell `sink` of everything that happens; to be called before anything does."""
        sink.write(header(self))
        self._recorder = Recorder(sink, lambda: self._now)
        self.scheduler.record = self.scheduler.kv_cache.record = self._recorder.record

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams,
        arrival_time: float | None = None,
        *,
        priority: int = 0,
        user: str = "",
        cache_salt: str = "",
        expected_output_len: int | None = None,
    ) -> Request:
        """Check a request and queue it; of n samples or beams this is the first, see `Request.samples`.

        `priority` (lower is more urgent) and `user` matter to policies that look at them; prefixes are shared only
        between requests of the same `cache_salt`; `expected_output_len` is the true number of output tokens, which only
        a workload can know, for policies that are told it; with an allocator that reserves by it, output that goes on
        beyond it ends with "length".

        Raises ValueError, one sentence, for a prompt or parameters that cannot be served; nothing else is touched.
        """
        now = self._read_clock()
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use by a request that has not ended: choose another")
        text, token_ids, ends = self.check_request(prompt, params)
        self._door.check_labels(priority, user, cache_salt, expected_output_len)
        is_beams = isinstance(params, BeamSearchParams)
        sampling = SamplingParams(temperature=0, max_tokens=params.max_tokens) if is_beams else params
        width = num_samples(params)
        number = self._num_requests
        longest = self.max_request_len
        if params.max_tokens is not None:
            longest = min(longest, len(token_ids) + params.max_tokens)
        leader = Request(
            request_id=request_id,
            number=number,
            prompt=text,
            prompt_token_ids=token_ids,
            sampling_params=sampling,
            seed=derive_seed(self.config.seed, number) if sampling.seed is None else sampling.seed,
            max_total_tokens=longest,
            metrics=RequestMetrics(now if arrival_time is None else arrival_time),
            end_token_ids=ends,
            text=None if is_beams else self._text_stream(token_ids, params),
            priority=priority,
            user=user,
            cache_salt=cache_salt,
            expected_output_len=expected_output_len,
            logprobs=None if sampling.logprobs is None else [],
        )
        leader.max_total_tokens = min(longest, self.scheduler.kv_cache.reserved_len(leader))
        if self.config.length_predictor is not None:
            self._predictor.predict(leader)  # it may miss something
        if is_beams:
            leader.beam_search = BeamSearch(params, ends, leader.max_total_tokens - len(token_ids))
            leader.beam_search.beams = [leader]
        if width > 1:
            samples = (leader, *(self._sample(leader, index) for index in range(1, width)))
            for sample in samples:
                sample.siblings = samples
            leader.pending_samples = samples[1:]
        with HeldInterrupts():
            self.scheduler.add(leader, now)
            self._num_requests += width
            self._requests[request_id] = leader
            if self._recorder is not None:
                self._recorder.arrival(leader, params)
        return leader

    def check_request(
        self, prompt: str | Sequence[int], params: SamplingParams | BeamSearchParams
    ) -> tuple[str | None, tuple[int, ...], frozenset[int]]:
        """The prompt's text, if it is one, its tokens, and the tokens that would end the request.

        Raises ValueError, one sentence, for a prompt or parameters that cannot be served.
        """
        text, token_ids = self._door.read_prompt(prompt)
        ends = frozenset() if params.ignore_eos else self.eos_token_ids
        if isinstance(params, BeamSearchParams):
            self._door.check_beams(params, ends)
        else:
            ends = ends.union(params.stop_token_ids)
            self._door.check_params(params, ends)
        return text, token_ids, ends

    def step(self) -> list[Request]:
        """Run one iteration; returns the requests that gained a token or left, each sample of a prompt by itself."""
        start = self._read_clock()
        recorder = self._recorder if self._requests else None
        scheduler = self.scheduler
        plan, outcome = None, None
        try:
            with HeldInterrupts() as interrupts:  # what is planned or booked is so as a whole
                if recorder is not None:
                    recorder.begin_step()
                plan = scheduler.schedule(start)
                self._num_preempted += len(plan.preempted)
                if recorder is not None:
                    recorder.schedule(plan)
                if not plan.num_tokens:
                    return self._end_empty_step(plan)
                before = self._before(plan)
                interrupts.release()
                result = self.executor.submit(plan).result()
                interrupts.hold()
                self.clock.advance(result.modelled_seconds)
                now = self._read_clock()
                if recorder is not None:
                    recorder.result(plan, result)
                outcome = scheduler.update(plan, result, now)
                self._forget_ended(outcome.left)
                self.last_step = self._statistics(start, now, plan, result, before, outcome.usage)
        except BaseException:  # an interrupt, say: the device may be a token ahead of what is booked
            if plan is not None and plan.num_tokens and outcome is None:
                if recorder is not None:
                    recorder.record("retract")
                scheduler.retract(plan)
            raise
        if self.config.debug:
            scheduler.check_integrity()
        if recorder is not None:
            recorder.flush(idle=not self._requests)
        return list(dict.fromkeys(outcome.advanced + outcome.left)) if outcome.left else outcome.advanced

    def has_unfinished_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    def abort(self, request_id: str) -> None:
        """End a request at once, all its samples, with reason "abort"; an id that is not in use is left alone."""
        leader = self._requests.pop(request_id, None)
        if leader is None:
            return
        now = self._read_clock()
        if self._recorder is not None:
            self._recorder.record("abort", leader)
        for request in leader.samples:
            if not request.is_finished:
                self.scheduler.finish(request, "abort", now)
        if self._recorder is not None:
            self._recorder.flush(idle=not self._requests)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        if self._recorder is not None:
            self._read_clock()
            self._recorder.record("reset")
        self.scheduler.kv_cache.reset_prefix_cache()

    def check_idle(self) -> None:
        """Raise ValueError if requests are unfinished, which the present weights have begun."""
        if self._requests:
            raise ValueError(
                f"{len(self._requests)} requests are unfinished, and the old weights began them: let them end, or "
                "abort them, before the weights change"
            )

    def update_weights(self, model: Any) -> None:
        """Go on with the weights of another model of the same shape; cached prefixes, which the old ones computed, go.

        Raises ValueError when the shapes differ, or while requests are unfinished; nothing is changed then.
        """
        self.check_idle()
        self.executor.update_weights(model)
        if self._recorder is not None:
            self._read_clock()
            self._recorder.record("weights")
        self.reset_prefix_cache()

    def _make_kv_cache(self) -> KVCacheManager:
        config, executor = self.config, self.executor
        make_cache = load_policy("prefix_cache", config.prefix_cache_name)

        def make_prefix_cache() -> PrefixCache:
            return make_cache(config.block_size, self._make_eviction())

        if any(group.sliding_window for group in executor.cache_groups) and not make_cache.supports_windows:
            raise ValueError(
                f"prefix_cache {config.prefix_cache_name!r} gives up the ends of cached prefixes first, and this "
                "model's sliding windows need just the ends: choose 'hash' or 'none'"
            )
        return load_policy("allocator", config.allocator)(
            CacheSpec(
                block_size=config.block_size,
                num_blocks=executor.num_blocks,
                groups=executor.cache_groups,
                num_swap_blocks=executor.num_swap_blocks,
                max_request_len=self.max_model_len,
                max_step_tokens=config.max_num_batched_tokens,
                watermark=config.watermark,
                make_prefix_cache=make_prefix_cache,
            )
        )

    def _make_eviction(self) -> Eviction:
        """A policy for one cache group."""
        if self.config.eviction == "belady":
            raise ValueError(
                "eviction 'belady' must know the future: record a run (trace_file) under another policy, then "
                "`paged-jax replay FILE eviction=belady`"
            )
        return load_policy("eviction", self.config.eviction or "lru")()

    def _read_clock(self) -> float:
        """The time for everything that is decided and recorded until it is read again."""
        self._now = self.clock.now()
        return self._now

    def _sample(self, leader: Request, index: int) -> Request:
        """Another sample of the leader's prompt."""
        return replace(
            leader,
            number=leader.number + index,
            sample_index=index,
            metrics=RequestMetrics(leader.metrics.arrival_time),
            token_ids=[],
            block_contents=[],
            text=None if leader.text is None else self._text_stream(leader.prompt_token_ids, leader.sampling_params),
            logprobs=None if leader.logprobs is None else [],
        )

    def _end_empty_step(self, plan: SchedulerOutput) -> list[Request]:
        """A plan that computes nothing is not run; returns the requests that have left."""
        left = self.scheduler.take_left()
        if self._requests and not plan.preempted and not left:
            raise RuntimeError(
                f"nothing could be planned for {len(self._requests)} unfinished requests: "
                f"check scheduling_policy {self.config.scheduling_policy!r} and "
                f"victim_policy {self.config.victim_policy!r}"
            )
        self._forget_ended(left)
        return left

    def _before(self, plan: SchedulerOutput) -> tuple[int, int, int, int]:
        """Of requests and blocks, what the step's result will change: see `StepStats`."""
        scheduler, kv_cache = self.scheduler, self.scheduler.kv_cache
        return (
            len(scheduler.running),
            len(scheduler.waiting),
            sum([pool.num_in_use for pool in kv_cache.pools]),
            kv_cache.num_table_entries * len(plan.copies),
        )

    def _statistics(
        self,
        start: float,
        now: float,
        plan: SchedulerOutput,
        result: StepResult,
        before: tuple[int, int, int, int],
        usage: KVUsage,
    ) -> StepStats:
        num_running, num_waiting, blocks_in_use, block_table_entries = before
        num_preempted, self._num_preempted = self._num_preempted, 0
        num_evicted, self._num_evicted = self._num_evicted, self.scheduler.kv_cache.num_evicted
        return StepStats(
            start_time=start,
            end_time=now,
            num_tokens=plan.num_tokens,
            num_padded_tokens=result.num_padded_tokens,
            num_decode_tokens=len(plan.decodes),
            num_running=num_running,
            num_waiting=num_waiting,
            num_preempted=num_preempted,
            num_swapped_out=_num_moved(plan.swap_outs),
            num_swapped_in=_num_moved(plan.swap_ins),
            num_copied=sum(map(len, plan.copies)),
            num_evicted=self._num_evicted - num_evicted,
            blocks_in_use=blocks_in_use,
            block_table_entries=block_table_entries,
            kv=usage,
        )

    def _text_stream(self, token_ids: tuple[int, ...], params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None:
            return None
        return TextStream(
            self.tokenizer.backend,
            token_ids,
            params.stop_strings,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            params.min_tokens,
        )

    def _forget_ended(self, requests: Sequence[Request]) -> None:
        for request in requests:
            # its id may be another's by now, if it was aborted before its end could be reported
            is_known = self._requests.get(request.request_id) is request.samples[0]
            if is_known and all(sample.is_finished for sample in request.samples):
                del self._requests[request.request_id]


def _num_moved(swaps: Sequence[Swap]) -> int:
    return sum(len(blocks) for swap in swaps for blocks in swap.device_blocks)


def drive(
    engine: Engine, arrivals: Sequence[Arrival], clock: Clock
) -> Iterator[tuple[list[Request], StepStats | None]]:
    """Feed a workload to the engine by its arrival times and step until all is done.

    Requests join when the clock, counted from the call's start, reaches their time (equal times in the order given, and
    those that follow the end of another request last). After each step yields the requests that gained a token in it or
    left, and its statistics, None if it computed nothing. Raises ValueError if a request is to follow one that is not
    in the workload.
    """
    origin = clock.now()
    followers = _followers(arrivals)
    pending = [(a.time, order, a) for order, a in enumerate(arrivals) if a.after is None]
    pending.sort(reverse=True)
    order = len(arrivals)
    while pending or engine.has_unfinished_requests():
        now = clock.now()
        while pending and origin + pending[-1][0] <= now:
            time, _, arrival = pending.pop()
            engine.add_request(
                arrival.request_id,
                arrival.prompt_token_ids,
                arrival.params,
                origin + time,
                priority=arrival.priority,
                user=arrival.user,
                cache_salt=arrival.cache_salt,
                expected_output_len=arrival.expected_output_len,
            )
        if engine.has_unfinished_requests():
            before = engine.last_step
            advanced = engine.step()
            for request in advanced if followers else ():
                if request.request_id not in followers or not all(r.is_finished for r in request.samples):
                    continue
                ended = max(r.metrics.finished_time or 0.0 for r in request.samples) - origin
                for arrival in followers.pop(request.request_id):
                    insort(pending, (ended + arrival.time, order, arrival), key=lambda entry: (-entry[0], -entry[1]))
                    order += 1
            yield advanced, engine.last_step if engine.last_step is not before else None
        else:
            clock.wait_until(origin + pending[-1][0])
    if followers:
        raise RuntimeError(f"request {min(followers)!r} was aborted, and others were to follow it: they never came")


def _followers(arrivals: Sequence[Arrival]) -> dict[str, list[Arrival]]:
    """The requests that wait for the end of another one, by its id."""
    followers: dict[str, list[Arrival]] = {}
    for arrival in arrivals:
        if arrival.after is not None:
            followers.setdefault(arrival.after, []).append(arrival)
    reached = {arrival.request_id for arrival in arrivals if arrival.after is None}
    frontier = list(reached)
    while frontier:
        frontier = [a.request_id for leader in frontier for a in followers.get(leader, ())]
        reached.update(frontier)
    if unknown := followers.keys() - {arrival.request_id for arrival in arrivals}:
        raise ValueError(f"a request is to follow {min(unknown)!r}, which is not in the workload: correct its `after`")
    if circle := {arrival.request_id for arrival in arrivals} - reached:
        raise ValueError(f"request {min(circle)!r} is to follow requests that follow it: correct its `after`")
    return followers
