"""An executor without a device: it checks every plan, and remembers what each slot of the KV pool would hold.

Its tokens are a function of all of a request's tokens, so that nothing can be lost, repeated or reordered
unseen. Before it answers, every request's tokens are read back through its block table, so that a page that
was freed too early, shared wrongly or never written is found in the step that would have read it.
"""

import functools
import math
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paged_jax.config import EngineConfig
from paged_jax.engine.clock import Clock, VirtualClock
from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Request, RequestStatus
from paged_jax.execution.plan import ScheduledRequest, SchedulerOutput, StepResult, TokenLogprobs
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.sampling.params import SamplingParams

VOCAB_SIZE = 97

type Step = list[tuple[str, int, int]]
"""A plan in short: (request id, first token, number of tokens) of each scheduled request, in order."""


type Token = Callable[[Sequence[int]], int]
"""What follows these tokens."""


def next_token(token_ids: Sequence[int]) -> int:
    """The token that follows these: any change to any of them changes it (but for one chance in 97)."""
    return zlib.crc32(array("q", token_ids).tobytes()) % VOCAB_SIZE


def sampled_token(token_ids: Sequence[int], seed: int, sample_index: int, greedy: Token = next_token) -> int:
    """The token that follows these in one of a prompt's samples; the first sample is the greedy one."""
    return greedy(token_ids if sample_index == 0 else [*token_ids, seed % 2**32, sample_index])


def tokens_alone(
    prompt: Sequence[int],
    params: SamplingParams,
    max_total_tokens: int,
    eos_token_ids: Iterable[int] = (),
    *,
    seed: int = 0,
    sample_index: int = 0,
) -> tuple[list[int], str]:
    """Output and finish reason of a request that nobody disturbs, written down from the definitions."""
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}
    tokens = list(prompt)
    while True:
        token = sampled_token(tokens, seed, sample_index)
        while token in stops and len(tokens) - len(prompt) < params.min_tokens:
            token = (token + 1) % VOCAB_SIZE
        tokens.append(token)
        num_output = len(tokens) - len(prompt)
        if token in stops and num_output >= params.min_tokens:
            return tokens[len(prompt) :], "stop"
        if num_output == params.max_tokens or len(tokens) == max_total_tokens:
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
    num_swap_blocks: int = 0
    cache_groups: tuple[CacheGroup, ...] = (CacheGroup(1, 1, 1),)
    seconds_per_step: float = 0.0
    token: Token = next_token
    """The greedy token after these."""
    contiguous: bool = False
    """Whether block tables are longer than their tokens need, as reservations are."""
    on_submit: Callable[[SchedulerOutput], None] | None = None
    """Called between a plan and its result."""
    loses_plan: bool = False
    """Whether the next plan is interrupted before any of it is done."""
    memory: list[dict[tuple[int, int], int]] = field(init=False)
    """Per cache group (block, offset) -> digest of a token and all before it."""
    host_memory: list[dict[int, dict[int, int]]] = field(init=False)
    """Per cache group host block -> offset -> digest."""
    owners: dict[int, Request] = field(default_factory=dict)
    """Slot -> who was admitted to it last."""
    last_tokens: dict[int, int] = field(default_factory=dict)
    """Slot -> the newest token, as the device has it."""
    plans: list[SchedulerOutput] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = [{} for _ in self.cache_groups]
        self.host_memory = [{} for _ in self.cache_groups]

    def submit(self, plan: SchedulerOutput) -> Handle:
        self._check_plan(plan)
        if self.loses_plan:
            self.loses_plan = False
            for group, emptied in enumerate(plan.emptied_blocks):
                for block in emptied:
                    self._replace(group, block, {})
            raise KeyboardInterrupt
        self._move_blocks(plan)
        for request in plan.admitted:
            self.owners[request.slot] = request
            self.last_tokens[request.slot] = request.token_ids[-1]
        scheduled = plan.scheduled
        for part in scheduled:
            self._write(part)
        for part in scheduled:
            self._read_back(part)
        for request in plan.idle:
            self._read_back(ScheduledRequest(request, request.num_computed_tokens - 1, 1, False))
        answers = [self._sample(part.request, part.samples) for part in scheduled]
        answers += [self._sample(fork.child, True) for fork in plan.forks]
        self.plans.append(plan)
        self.steps.append([(p.request.request_id, p.start, p.num_tokens) for p in scheduled])
        if self.on_submit is not None:
            self.on_submit(plan)
        logprobs = [answer[1] for answer in answers]
        return Handle(
            StepResult(
                [answer[0] for answer in answers],
                0,
                self.seconds_per_step,
                logprobs if any(entry is not None for entry in logprobs) else None,
            )
        )

    def _check_plan(self, plan: SchedulerOutput) -> None:
        scheduled = plan.scheduled
        requests = [part.request for part in scheduled]
        assert requests, "an empty plan was submitted"
        assert plan.num_tokens == sum(part.num_tokens for part in scheduled) + len(plan.idle)
        assert plan.num_tokens <= self.max_num_batched_tokens, "the step exceeds its budget"
        everybody = [*requests, *plan.idle, *(fork.child for fork in plan.forks)]
        assert len(set(everybody)) == len(everybody), "a request is scheduled twice"
        slots = [request.slot for request in everybody]
        assert len(set(slots)) == len(slots), "two requests share a slot"
        assert set(slots) <= set(range(self.max_num_seqs)), "a slot does not exist"
        pending = {child for request in {*requests, *plan.admitted} for child in request.pending_samples}
        for request in set(plan.admitted) - set(everybody) - pending:
            # prefills come first, and the budget is spent
            assert request.status is RequestStatus.RUNNING, "an admitted request does not run"
            assert len(request.token_ids) - request.num_computed_tokens == 1, "an admitted request is not scheduled"
        for request in plan.preempted:
            assert request.status in (RequestStatus.PREEMPTED, RequestStatus.SWAPPED)
            assert request.slot is None, "a preempted request keeps its slot"
            assert not request.block_tables, "a preempted request keeps its blocks"
            assert request not in requests, "a preempted request is scheduled"
        for fork in plan.forks:
            assert fork.parent in requests
            assert not fork.child.block_tables
            assert fork.child.token_ids == fork.parent.token_ids
        written: list[set[int]] = [set() for _ in self.cache_groups]
        for part in scheduled:
            request, end = part.request, part.start + part.num_tokens
            assert request.status is RequestStatus.RUNNING
            assert part.num_tokens >= 1
            assert part.start == request.num_computed_tokens, "tokens are skipped or computed again"
            assert end <= len(request.token_ids), "a token is computed before it is known"
            assert end <= self.max_request_len, "a position past the limit is computed"
            assert part.samples == (end == len(request.token_ids))
            if request not in plan.admitted:
                assert self.owners.get(request.slot) is request, "the slot is somebody else's"
            for group, table in enumerate(request.block_tables):
                needed = -(-end // self.block_size)
                assert len(table) == needed or (self.contiguous and len(table) > needed), (
                    "the block table is too short or too long"
                )
                held = {block for block in table.block_ids if block}
                assert held <= set(range(1, self.num_blocks + 1)), "a block id does not exist"
                own = set(table.block_ids[part.start // self.block_size : needed])
                assert not own & written[group], "two requests write to one block"
                written[group] |= own
        for part in scheduled:
            for group, table in enumerate(part.request.block_tables):
                others = set(table.block_ids[: part.start // self.block_size]) & written[group]
                assert not others, "a block that somebody reads is written"

    def _move_blocks(self, plan: SchedulerOutput) -> None:
        """In the order that the contract gives."""
        moved = [host for swap in plan.swap_outs for host in swap.host_blocks[0]]
        assert len(set(moved)) == len(moved), "two blocks are swapped out to one"
        for swap in plan.swap_outs:
            for group, (blocks, hosts) in enumerate(zip(swap.device_blocks, swap.host_blocks, strict=True)):
                for block, host in zip(blocks, hosts, strict=True):
                    assert 0 <= host < self.num_swap_blocks, "a host block does not exist"
                    self.host_memory[group][host] = self._content(group, block)
        for group, pairs in enumerate(plan.copies):
            assert len({target for _, target in pairs}) == len(pairs), "a block is the target of two copies"
            contents = [(target, self._content(group, source)) for source, target in pairs]
            for target, content in contents:
                self._replace(group, target, content)
        for group, emptied in enumerate(plan.emptied_blocks):
            for block in set(emptied) - {target for _, target in plan.copies[group]}:
                self._replace(group, block, {})
        for swap in plan.swap_ins:
            for group, (blocks, hosts) in enumerate(zip(swap.device_blocks, swap.host_blocks, strict=True)):
                for block, host in zip(blocks, hosts, strict=True):
                    self._replace(group, block, self.host_memory[group][host])

    def _content(self, group: int, block: int) -> dict[int, int]:
        memory = self.memory[group]
        return {offset: memory[block, offset] for offset in range(self.block_size) if (block, offset) in memory}

    def _replace(self, group: int, block: int, content: dict[int, int]) -> None:
        for offset in range(self.block_size):
            self.memory[group].pop((block, offset), None)
        for offset, digest in content.items():
            self.memory[group][block, offset] = digest

    def _write(self, part: ScheduledRequest) -> None:
        for position, digest in self._digests(part):
            if position >= part.start:
                for group, memory in enumerate(self.memory):
                    place = self._place(part, group, position)
                    assert place[0] != 0, "a token has no block"
                    assert place not in memory, f"slot {place[1]} of block {place[0]} was not given up yet"
                    memory[place] = digest

    def _read_back(self, part: ScheduledRequest) -> None:
        for group, layers in enumerate(self.cache_groups):
            window = layers.sliding_window or len(part.request.token_ids)
            for position, digest in self._digests(part):
                if position <= part.start - window:
                    continue
                place = self._place(part, group, position)
                assert self.memory[group].get(place) == digest, (
                    f"position {position} of {part.request.request_id} is not in slot {place[1]} of block {place[0]}"
                )

    def _digests(self, part: ScheduledRequest) -> list[tuple[int, int]]:
        digests, digest = [], 0
        for position in range(part.start + part.num_tokens):
            digest = hash((digest, position, part.request.token_ids[position]))
            digests.append((position, digest))
        return digests

    def _place(self, part: ScheduledRequest, group: int, position: int) -> tuple[int, int]:
        table = part.request.block_tables[group].block_ids
        return table[position // self.block_size], position % self.block_size

    def _sample(self, request: Request, samples: bool) -> tuple[tuple[int, ...], TokenLogprobs | None]:
        if not samples:
            return (), None
        if request.sampled_on_device:
            assert self.last_tokens[request.slot] == request.token_ids[-1], "the device has another newest token"
        params = request.sampling_params
        token = sampled_token(request.token_ids, request.seed, request.sample_index, self.token)
        while request.num_output_tokens < params.min_tokens and token in request.end_token_ids:
            token = (token + 1) % VOCAB_SIZE
        self.last_tokens[request.slot] = token
        if request.num_logprobs is None:
            return (token,), None
        ranked = beam_logprobs(tuple(request.token_ids))
        rank, logprob = next((rank, lp) for rank, (t, lp) in enumerate(ranked, start=1) if t == token)
        return (token,), TokenLogprobs(logprob, rank, ranked[: request.num_logprobs])


@functools.lru_cache(maxsize=2**14)
def beam_logprobs(token_ids: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """(token, log-probability) of every token after these, the most likely first: a made-up distribution."""
    before = zlib.crc32(array("q", token_ids).tobytes())
    weights = [1.0 + zlib.crc32(array("q", [token]).tobytes(), before) % 10007 for token in range(VOCAB_SIZE)]
    total = sum(weights)
    ranked = sorted(range(VOCAB_SIZE), key=lambda token: (-weights[token], token))
    return tuple((token, math.log(weights[token] / total)) for token in ranked)


def host_engine(
    *,
    num_blocks: int = 64,
    max_model_len: int = 256,
    eos_token_ids: Sequence[int] = (),
    seconds_per_step: float = 0.0,
    token: Token = next_token,
    clock: Clock | None = None,
    groups: tuple[CacheGroup, ...] = (CacheGroup(1, 1, 1),),
    on_submit: Callable[[SchedulerOutput], None] | None = None,
    **fields: object,
) -> Engine:
    """An engine over a `HostExecutor`; `fields` are those of `EngineConfig`."""
    config = EngineConfig(**{"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, **fields})
    executor = HostExecutor(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_request_len=max_model_len,
        num_swap_blocks=config.num_swap_blocks or 0,
        cache_groups=groups,
        seconds_per_step=seconds_per_step,
        token=token,
        contiguous=config.allocator != "paged",
        on_submit=on_submit,
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
    block_size, groups = kv_cache.block_size, engine.executor.cache_groups
    holders = [*scheduler.running, *scheduler.ended_rows]
    divisor = math.gcd(*(group.num_layers for group in groups))
    stored = in_use = cached = free = slots = 0
    for index, (pool, group) in enumerate(zip(kv_cache.pools, groups, strict=True)):
        weight = group.num_layers // divisor
        assert min(pool.num_free, pool.num_cached, pool.num_in_use) >= 0
        assert pool.num_free + pool.num_cached + pool.num_in_use == engine.num_blocks
        stored += weight * len(
            {
                (table.block_ids[position // block_size], position % block_size)
                for request in holders
                for table in [request.block_tables[index]]
                for position in range(request.num_computed_tokens)
                if table.block_ids[position // block_size]
            }
        )
        in_use += weight * pool.num_in_use
        cached += weight * pool.num_cached
        free += weight * pool.num_free
        slots += weight * engine.num_blocks * block_size
    usage = kv_cache.usage()
    assert usage.token_states == stored
    assert usage.internal_fragmentation + usage.reserved == in_use * block_size - stored
    assert usage.cached == cached * block_size
    assert usage.free + usage.external_fragmentation == free * block_size
    for parts in [usage] + ([engine.last_step.kv] if engine.last_step is not None else []):
        sizes = tuple(parts)
        assert min(sizes) >= 0
        assert sum(sizes) == slots
    live = {*holders, *scheduler.waiting, *scheduler.parked}
    live |= {child for request in live for child in request.pending_samples}
    assert not any(request.is_finished for request in live), "an ended request is still listed"
    # those that have left a static batch are reported by the next step that is not interrupted
    unfinished = {request.request_id for request in live}
    known = unfinished | {request.request_id for request in scheduler._left}
    assert unfinished <= set(engine._requests) <= known, "the engine remembers other requests than the scheduler"
    assert engine.has_unfinished_requests() == bool(engine._requests)


def drain(engine: Engine, max_steps: int = 400) -> None:
    """Step until nothing is left, checking after each step; AssertionError if that takes too many."""
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            break
        before = engine.last_step
        left = engine.step()
        assert left or engine.last_step is not before, "a step scheduled nothing while requests wait"
        check_accounting(engine)
    assert not engine.has_unfinished_requests(), f"requests are unfinished after {max_steps} steps"
    kv_cache = engine.scheduler.kv_cache
    assert all(pool.num_in_use == 0 for pool in kv_cache.pools)
    assert all(pool.num_free == pool.num_blocks for pool in kv_cache.host_pools), "host memory leaks"
