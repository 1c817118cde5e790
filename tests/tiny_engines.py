"""Engines to run the same test on: the host executor, and a tiny random model against its dense reference.

Compiling takes most of the time, so executors are shared by the whole session: each test makes an engine of
its own (queue, block pool, prefix cache) over one of them, and stale pages must do no harm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import jax.numpy as jnp
import pytest
from dense_reference import DenseReference
from host_executor import VOCAB_SIZE, drain, host_engine, tokens_alone

from paged_jax.config import EngineConfig
from paged_jax.engine.clock import VirtualClock
from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Request
from paged_jax.execution.buckets import Bucket
from paged_jax.execution.jax_executor import JaxExecutor, JaxStepHandle
from paged_jax.execution.plan import SchedulerOutput
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder
from paged_jax.models.weights import dummy_decoder
from paged_jax.sampling.params import SamplingParams

MAX_LEN = 64
NUM_SLOTS = 6
POOL_TOKENS = 128
"""Token slots of a shared executor's pages; an engine may use fewer blocks."""

type MakeEngine = Callable[..., Engine]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def run(engine: Engine, *requests: tuple[Sequence[int], SamplingParams]) -> list[Request]:
    """Add all requests at once and step until they end."""
    count = engine._num_requests
    added = [engine.add_request(f"run-{count + i}", *request) for i, request in enumerate(requests)]
    drain(engine)
    return added


@dataclass
class PoolView:
    """The first blocks of a shared executor, and a record of the plans that went through."""

    executor: JaxExecutor
    num_blocks: int
    num_swap_blocks: int = 0
    plans: list[SchedulerOutput] = field(default_factory=list)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return self.executor.cache_groups

    def submit(self, plan: SchedulerOutput) -> JaxStepHandle:
        self.plans.append(plan)
        return self.executor.submit(plan)


@dataclass(frozen=True)
class Bench:
    """One kind of engine, and what its requests must answer."""

    engine: MakeEngine
    expected: Callable[[Sequence[int], int], list[int]]
    """(prompt, count) -> the greedy tokens after it."""
    prompts: Callable[[Sequence[int]], list[tuple[int, ...]]]
    """Lengths -> prompts that decide something."""


@pytest.fixture(scope="session")
def tiny_decoder() -> Decoder:
    config = ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_LEN,
    )
    return dummy_decoder(config, 0, jnp.dtype("float32"))


@pytest.fixture(scope="session")
def reference(tiny_decoder: Decoder) -> DenseReference:
    return DenseReference(tiny_decoder)


@pytest.fixture(scope="session")
def tiny_executor(tiny_decoder: Decoder) -> Callable[[int, bool], JaxExecutor]:
    """(block size, debug) -> the session's executor. Several buckets for block size 4, one for the others."""

    @cache
    def make(block_size: int, debug: bool) -> JaxExecutor:
        sizes = (4, 16, MAX_LEN) if block_size == 4 and not debug else (MAX_LEN,)
        return JaxExecutor(
            tiny_decoder,
            num_blocks=POOL_TOKENS // block_size,
            block_size=block_size,
            max_request_len=MAX_LEN,
            max_num_seqs=NUM_SLOTS,
            buckets=tuple(Bucket(size, min(size, NUM_SLOTS)) for size in sizes),
            kv_dtype=jnp.dtype("float32"),
            debug=debug,
        )

    return make


@pytest.fixture(scope="session")
def tiny_engine(tiny_executor: Callable[[int, bool], JaxExecutor]) -> MakeEngine:
    """Makes engines over the tiny model; the arguments are those of `host_engine`."""

    def make(*, num_blocks: int | None = None, max_model_len: int = MAX_LEN, **fields: object) -> Engine:
        config = EngineConfig(**{"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": MAX_LEN, **fields})
        executor = tiny_executor(config.block_size, config.debug)
        return Engine(
            config,
            PoolView(executor, num_blocks or executor.num_blocks),
            clock=VirtualClock(),
            tokenizer=None,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
        )

    return make


@pytest.fixture(params=["host", "tiny"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """The same test on the host executor and on the tiny model."""
    if request.param == "host":
        return Bench(
            host_engine,
            lambda prompt, count: tokens_alone(prompt, greedy(count), 10**9)[0],
            lambda lengths: [tuple(range(10 * i, 10 * i + n)) for i, n in enumerate(lengths)],
        )
    reference = request.getfixturevalue("reference")
    return Bench(
        request.getfixturevalue("tiny_engine"),
        reference.greedy,
        lambda lengths: reference.prompts(lengths, seed=len(lengths), count=24),
    )
