"""First come, first served, whatever comes between: the order, and nobody is forgotten."""

import hypothesis.strategies as st
from host_executor import check_accounting, host_engine, tokens_alone
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_jax.engine.request import Request
from paged_jax.sampling.params import SamplingParams

MAX_MODEL_LEN = 40
EOS = (5, 6, 7, 8)
"""Four of 97 tokens, so that about one request in four ends by itself."""

OTHER_VICTIMS = ["victim_policies:FirstArrivedVictim", "victim_policies:LongestVictim"]

# Beginnings that requests share; two of them part only at token 6
STEMS = [
    tuple(range(10, 30)),
    tuple(range(10, 16)) + tuple(range(40, 52)),
    (9,) * 20,
]


class EngineMachine(RuleBasedStateMachine):
    """Requests that share prefixes over a small pool; each must answer what it answers when alone."""

    @initialize(
        block_size=st.sampled_from([1, 3, 4, 16]),
        pool_tokens=st.integers(12, 90),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 30),
        prefix_cache=st.sampled_from(["hash", "hash", "none"]),
        chunked=st.sampled_from([True, True, True, False]),
        victims=st.sampled_from(["last_arrived", "last_arrived", *OTHER_VICTIMS]),
    )
    def start(
        self,
        block_size: int,
        pool_tokens: int,
        max_num_seqs: int,
        spare_budget: int,
        prefix_cache: str,
        chunked: bool,
        victims: str,
    ) -> None:
        budget = max_num_seqs + spare_budget
        self.engine = host_engine(
            num_blocks=max(1, pool_tokens // block_size),
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=EOS,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if chunked else max(budget, MAX_MODEL_LEN),
            prefix_cache=prefix_cache,
            enable_chunked_prefill=chunked,
            victim_policy=victims,
        )
        self.in_order = victims == "last_arrived"
        self.live: list[Request] = []
        self.count = 0

    @rule(
        stem=st.sampled_from(STEMS),
        stem_length=st.integers(0, 20),
        tail=st.lists(st.integers(0, 2), max_size=6),
        max_tokens=st.one_of(st.integers(1, 12), st.none()),
        stop_token_ids=st.lists(st.integers(0, 96), max_size=3),
        ignore_eos=st.booleans(),
    )
    def add(
        self,
        stem: tuple[int, ...],
        stem_length: int,
        tail: list[int],
        max_tokens: int | None,
        stop_token_ids: list[int],
        ignore_eos: bool,
    ) -> None:
        prompt = (*stem[:stem_length], *tail)[: self.engine.max_request_len - 1] or (1,)
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos)
        self.live.append(self.engine.add_request(str(self.count), prompt, params))
        self.count += 1

    @rule()
    def step(self) -> None:
        before = self.engine.last_step
        advanced = self.engine.step()
        assert (self.engine.last_step is not before) == bool(self.live), "nothing was scheduled"
        for request in advanced:
            if request.is_finished:
                self.check_output(request)
                self.live.remove(request)

    @rule(count=st.integers(2, 8))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            check_accounting(self.engine)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = self.live.pop(data.draw(st.integers(0, len(self.live) - 1), label="which"))
        self.engine.abort(request.request_id)
        assert request.is_finished
        assert request.finish_reason == "abort"
        assert request.slot is None
        assert not request.block_tables

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()
        assert self.engine.scheduler.kv_cache.pools[0].num_cached == 0

    @invariant()
    def accounting(self) -> None:
        if not hasattr(self, "engine"):
            return
        check_accounting(self.engine)
        scheduler = self.engine.scheduler
        assert {*scheduler.running, *scheduler.waiting} == set(self.live)
        # first come, first served, and the last to come gives way: those who run came before those who wait
        running = [request.number for request in scheduler.running]
        waiting = [request.number for request in scheduler.waiting]
        assert running + waiting == sorted(running + waiting) or not self.in_order

    def check_output(self, request: Request) -> None:
        expected = tokens_alone(request.prompt_token_ids, request.sampling_params, self.engine.max_request_len, EOS)
        assert (request.output_token_ids, request.finish_reason) == expected
        metrics, block_size = request.metrics, self.engine.config.block_size
        assert metrics.num_cached_tokens <= request.num_prompt_tokens - 1
        assert metrics.num_cached_tokens % block_size == 0
        assert len(metrics.token_times) == request.num_output_tokens

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        # the oldest request runs first in every step and is never preempted
        budget = self.engine.config.max_num_batched_tokens
        bound = sum(-(-self.engine.max_request_len // budget) + MAX_MODEL_LEN for _ in self.live)
        bound = bound if self.in_order else 20 * bound
        for _ in range(bound):
            if self.live:
                self.step()
                check_accounting(self.engine)
        assert not self.live, f"requests are unfinished after {bound} steps"
        pool = self.engine.scheduler.kv_cache.pools[0]
        assert pool.num_in_use == 0
        assert len(self.engine.scheduler._free_slots) == self.engine.config.max_num_seqs
        self.engine.reset_prefix_cache()
        assert pool.num_free == self.engine.num_blocks


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
