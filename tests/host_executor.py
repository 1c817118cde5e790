"""An executor without a device: it checks every plan, and remembers what each slot of the KV pool would hold.

Its tokens are a function of all of a request's tokens, so that nothing can be lost, repeated or reordered
unseen. Before it answers, every request's tokens are read back through its block table, so that a page that
was freed too early, shared wrongly or never written is found in the step that would have read it.
"""

import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paged_jax.config import EngineConfig
from paged_jax.engine.clock import Clock, VirtualClock
from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Request, RequestStatus
from paged_jax.execution.plan import ScheduledRequest, SchedulerOutput, StepResult
from paged_jax.sampling.params import SamplingParams

VOCAB_SIZE = 97

type Step = list[tuple[str, int, int]]
"""A plan in short: (request id, first token, number of tokens) of each scheduled request, in order."""


def next_token(token_ids: Sequence[int]) -> int:
    """The token that follows these: any change to any of them changes it (but for one chance in 97)."""
    return zlib.crc32(array("q", token_ids).tobytes()) % VOCAB_SIZE


def tokens_alone(
    prompt: Sequence[int], params: SamplingParams, max_total_tokens: int, eos_token_ids: Iterable[int] = ()
) -> tuple[list[int], str]:
    """Output and finish reason of a request that nobody disturbs, written down from the definitions."""
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            return tokens[len(prompt) :], "stop"
        if len(tokens) - len(prompt) == params.max_tokens or len(tokens) == max_total_tokens:
            return tokens[len(prompt) :], "length"


@dataclass
class Handle:
    """The answer is there at once."""

    answer: StepResult

    def result(self) -> StepResult:
        return self.answer


@dataclass
class HostExecutor:
    """Keeps the engine's contract with executors in plain Python."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_request_len: int
    seconds_per_step: float = 0.0
    token: Callable[[Sequence[int]], int] = next_token
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    """(block, offset) -> digest of a token and all before it."""
    owners: dict[int, Request] = field(default_factory=dict)
    """Slot -> who was admitted to it last."""
    last_tokens: dict[int, int] = field(default_factory=dict)
    """Slot -> the newest token, as the device has it."""
    plans: list[SchedulerOutput] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def submit(self, plan: SchedulerOutput) -> Handle:
        self._check_plan(plan)
        for block, offset in [key for key in self.memory if key[0] in plan.emptied_blocks]:
            del self.memory[block, offset]
        for request in plan.admitted:
            self.owners[request.slot] = request
            self.last_tokens[request.slot] = request.token_ids[-1]
        for part in plan.scheduled:
            self._write(part)
        for part in plan.scheduled:
            self._read_back(part)
        self.plans.append(plan)
        self.steps.append([(p.request.request_id, p.start, p.num_tokens) for p in plan.scheduled])
        return Handle(StepResult(tuple(map(self._sample, plan.scheduled)), 0, self.seconds_per_step))

    def _check_plan(self, plan: SchedulerOutput) -> None:
        requests = [part.request for part in plan.scheduled]
        assert requests, "an empty plan was submitted"
        assert plan.num_tokens <= self.max_num_batched_tokens, "the step exceeds its budget"
        assert len(set(requests)) == len(requests), "a request is scheduled twice"
        slots = [request.slot for request in requests]
        assert len(set(slots)) == len(slots), "two requests share a slot"
        assert set(slots) <= set(range(self.max_num_seqs)), "a slot does not exist"
        assert set(plan.admitted) <= set(requests), "an admitted request is not scheduled"
        for request in plan.preempted:
            assert request.status is RequestStatus.PREEMPTED
            assert request.slot is None, "a preempted request keeps its slot"
            assert not request.block_tables, "a preempted request keeps its blocks"
            assert request not in requests, "a preempted request is scheduled"
        written: set[int] = set()
        for part in plan.scheduled:
            request, end = part.request, part.start + part.num_tokens
            assert request.status is RequestStatus.RUNNING
            assert part.num_tokens >= 1
            assert part.start == request.num_computed_tokens, "tokens are skipped or computed again"
            assert end <= len(request.token_ids), "a token is computed before it is known"
            assert end <= self.max_request_len, "a position past the limit is computed"
            assert part.samples == (end == len(request.token_ids))
            (table,) = request.block_tables
            assert len(table) == -(-end // self.block_size), "the block table is too short or too long"
            assert set(table.block_ids) <= set(range(1, self.num_blocks + 1)), "a block id does not exist"
            own = set(table.block_ids[part.start // self.block_size : -(-end // self.block_size)])
            assert not own & written, "two requests write to one block"
            written |= own
            if request not in plan.admitted:
                assert self.owners.get(request.slot) is request, "the slot is somebody else's"

    def _write(self, part: ScheduledRequest) -> None:
        for position, digest in self._digests(part):
            if position >= part.start:
                place = self._place(part, position)
                assert place not in self.memory, f"slot {place[1]} of block {place[0]} was not given up yet"
                self.memory[place] = digest

    def _read_back(self, part: ScheduledRequest) -> None:
        for position, digest in self._digests(part):
            place = self._place(part, position)
            assert self.memory.get(place) == digest, (
                f"position {position} of {part.request.request_id} is not in slot {place[1]} of block {place[0]}"
            )

    def _digests(self, part: ScheduledRequest) -> list[tuple[int, int]]:
        digests, digest = [], 0
        for position in range(part.start + part.num_tokens):
            digest = hash((digest, position, part.request.token_ids[position]))
            digests.append((position, digest))
        return digests

    def _place(self, part: ScheduledRequest, position: int) -> tuple[int, int]:
        table = part.request.block_tables[0].block_ids
        return table[position // self.block_size], position % self.block_size

    def _sample(self, part: ScheduledRequest) -> tuple[int, ...]:
        if not part.samples:
            return ()
        request = part.request
        assert self.last_tokens[request.slot] == request.token_ids[-1], "the device has another newest token"
        token = self.token(request.token_ids)
        self.last_tokens[request.slot] = token
        return (token,)


def host_engine(
    *,
    num_blocks: int = 64,
    max_model_len: int = 256,
    eos_token_ids: Sequence[int] = (),
    seconds_per_step: float = 0.0,
    token: Callable[[Sequence[int]], int] = next_token,
    clock: Clock | None = None,
    **fields: object,
) -> Engine:
    """An engine over a `HostExecutor`; `fields` are those of `EngineConfig`."""
    config = EngineConfig(**{"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, **fields})
    executor = HostExecutor(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_request_len=min(max_model_len, num_blocks * config.block_size),
        seconds_per_step=seconds_per_step,
        token=token,
    )
    return Engine(
        config,
        executor,
        clock=clock or VirtualClock(),
        tokenizer=None,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=eos_token_ids,
    )


def check_accounting(engine: Engine) -> None:
    """The accounting identity, and everything else that must hold between two steps."""
    scheduler, kv_cache = engine.scheduler, engine.scheduler.kv_cache
    scheduler.check_integrity()
    pool, block_size = kv_cache.pool, kv_cache.block_size
    assert min(pool.num_free, pool.num_cached, pool.num_in_use) >= 0
    assert pool.num_free + pool.num_cached + pool.num_in_use == engine.num_blocks
    usage = kv_cache.usage(scheduler.running)
    stored = {
        (table.block_ids[position // block_size], position % block_size)
        for request in scheduler.running
        for table in request.block_tables
        for position in range(request.num_computed_tokens)
    }
    assert usage.token_states == len(stored)
    assert usage.internal_fragmentation == pool.num_in_use * block_size - len(stored)
    assert usage.cached == pool.num_cached * block_size
    assert usage.free == pool.num_free * block_size
    assert all(request.num_computed_tokens == 0 for request in scheduler.waiting)
    if engine.last_step is not None:
        parts = engine.last_step.kv
        sizes = (parts.token_states, parts.internal_fragmentation, parts.cached, parts.free)
        assert min(sizes) >= 0
        assert sum(sizes) == engine.num_blocks * block_size
    live = {*scheduler.running, *scheduler.waiting}
    assert engine.has_unfinished_requests() == bool(live)
    assert not any(request.is_finished for request in live), "an ended request is still listed"


def drain(engine: Engine, max_steps: int = 400) -> None:
    """Step until nothing is left, checking after each step; AssertionError if that takes too many."""
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            break
        before = engine.last_step
        engine.step()
        assert engine.last_step is not before, "a step scheduled nothing while requests wait"
        check_accounting(engine)
    assert not engine.has_unfinished_requests(), f"requests are unfinished after {max_steps} steps"
    assert engine.scheduler.kv_cache.pool.num_in_use == 0
