"""A host-only engine with the surface of the real one: a virtual clock, a block of KV accounting, made-up
tokens."""

from collections.abc import Callable, Sequence

import pytest

from paged_jax.config import EngineConfig
from paged_jax.engine.clock import VirtualClock
from paged_jax.engine.request import Request, RequestMetrics, RequestStatus
from paged_jax.engine.stats import StepStats
from paged_jax.kv_cache.usage import KVUsage
from paged_jax.sampling.params import SamplingParams


class FakeExecutor:
    def __init__(self) -> None:
        self.num_compilations = 0
        self.compile_seconds = 0.0
        self.can_move = False
        self.num_blocks = FakeEngine.num_blocks
        self.kv_bytes_per_token = 1.0

    def submit(self, plan: object) -> None:
        raise AssertionError("FakeEngine makes up its steps")

    def warm_up(self, progress: Callable[[int, int], None] | None = None, *, moves: bool = True) -> None:
        self.can_move = moves
        for done in range(1, 3):
            self.num_compilations += 1
            self.compile_seconds += 0.25
            if progress:
                progress(done, 2)


class FakeEngine:
    """Every running request gains a token in each step, which takes 1 + block_size / 100 seconds."""

    vocab_size = 97
    max_model_len = max_request_len = 256
    num_blocks = 4096

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.clock = VirtualClock()
        self.executor = FakeExecutor()
        self.tokenizer = None
        self.last_step: StepStats | None = None
        self.resets = 0
        self.requests: list[Request] = []

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        arrival_time: float | None = None,
        *,
        priority: int = 0,
        user: str = "",
        cache_salt: str = "",
        expected_output_len: int | None = None,
    ) -> Request:
        samples = tuple(
            Request(
                request_id=request_id,
                number=len(self.requests),
                prompt_token_ids=tuple(prompt),
                sampling_params=params,
                seed=0,
                max_total_tokens=self.max_model_len,
                metrics=RequestMetrics(self.clock.now() if arrival_time is None else arrival_time),
                sample_index=index,
                priority=priority,
                user=user,
                cache_salt=cache_salt,
                expected_output_len=expected_output_len,
            )
            for index in range(params.n)
        )
        for sample in samples:
            sample.siblings = samples
        self.requests += samples
        return samples[0]

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Request]:
        running = self.requests[: self.config.max_num_seqs]
        if not self.executor.can_move and any(request.sampling_params.n > 1 for request in running):
            self.executor.can_move = True  # compiled when it is needed first
            self.executor.num_compilations += 1
        start = self.clock.now()
        size = self.config.block_size
        noise = 0.001 * (self.resets % 3)
        self.clock.advance(1 + size / 100 + noise)
        end = self.clock.now()
        for request in running:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = start
            request.token_ids.append((sum(request.token_ids) * 31 + len(request.token_ids)) % self.vocab_size)
            request.metrics.token_times.append(end)
        tokens = sum(len(r.token_ids) for r in running)
        blocks = sum(-(-len(r.token_ids) // size) for r in running)
        self.last_step = StepStats(
            start_time=start,
            end_time=end,
            num_tokens=len(running),
            num_padded_tokens=1,
            num_decode_tokens=len(running),
            num_running=len(running),
            num_waiting=len(self.requests) - len(running),
            num_preempted=0,
            num_swapped_out=0,
            num_swapped_in=0,
            num_copied=0,
            num_evicted=0,
            blocks_in_use=blocks,
            block_table_entries=blocks,
            kv=KVUsage(tokens, blocks * size - tokens, 0, (self.num_blocks - blocks) * size),
        )
        for request in running:
            if request.num_output_tokens == request.sampling_params.max_tokens:
                request.status = RequestStatus.FINISHED
                request.finish_reason = "length"
                request.metrics.finished_time = end
                self.requests.remove(request)
        return running


@pytest.fixture
def make_fake_engine() -> Callable[[EngineConfig], FakeEngine]:
    return FakeEngine


@pytest.fixture
def raw_experiment() -> dict:
    """A small experiment as it would stand in a file."""
    lengths = {"mean": 6, "sigma": 0.5, "max": 12}
    return {
        "name": "tiny",
        "model": "tiny-llama",
        "engine": {"max_num_seqs": 4, "num_blocks": 64},
        "workload": {"kind": "lognormal", "num_requests": 6, "prompt": lengths, "output": lengths},
        "sweep": {"engine.block_size": [4, 16, 64]},
        "seeds": [0, 1],
        "repeats": 2,
        "report": {
            "x": "engine.block_size",
            "y": ["output_tokens_per_s", "internal_fragmentation", "ttft_s_p50"],
            "baseline": 16,
            "figures": {
                "throughput": ["output_tokens_per_s"],
                "memory": [
                    ["internal_fragmentation"],
                    ["kv_token_states", "kv_internal_fragmentation", "kv_free"],
                ],
            },
        },
    }
