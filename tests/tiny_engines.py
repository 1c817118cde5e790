"""Engines to run the same test on: the host executor, and a tiny random model against its dense reference.

Compiling takes most of the time, so executors are shared by the whole session: each test makes an engine of
its own (queue, block pool, prefix cache) over one of them, and stale pages must do no harm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_reference import MIN_GAP, DenseReference
from host_executor import VOCAB_SIZE, drain, host_engine, tokens_alone

from paged_jax.checkpoints.tokenizer import Tokenizer
from paged_jax.config import EngineConfig
from paged_jax.engine.clock import VirtualClock
from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Request
from paged_jax.execution.batch import NO_TOKEN
from paged_jax.execution.buckets import MAX_BANNED_TOKENS, Bucket
from paged_jax.execution.jax_executor import JaxExecutor, JaxStepHandle
from paged_jax.execution.plan import SchedulerOutput
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder
from paged_jax.models.weights import dummy_decoder
from paged_jax.sampling.params import BeamSearchParams, SamplingParams
from paged_jax.sampling.sampler import ban, sample
from paged_jax.sampling.seeds import seed_words
from paged_jax.sampling.state import SamplingState

MAX_LEN = 80
NUM_SLOTS = 6
POOL_TOKENS = 128
"""Token slots of a shared executor's pages, or four blocks; an engine may use fewer blocks."""
NUM_SWAP_BLOCKS = 200
"""Blocks of its host memory; an engine may use fewer."""
WINDOW = 8

type MakeEngine = Callable[..., Engine]
type Windows = Literal["full", "full+windowed", "windowed"]
"""The kinds of the model's layers: one cache group for each."""

_LAYER_TYPES: dict[Windows, tuple[str, ...]] = {
    "full": ("full_attention",) * 2,
    "full+windowed": ("sliding_attention", "full_attention"),
    "windowed": ("sliding_attention",) * 2,
}


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


_sample = jax.jit(lambda logits, rows, index, position, banned: sample(ban(logits, banned), rows, index, position))


def sampled(
    reference: DenseReference,
    prompt: Sequence[int],
    params: SamplingParams,
    sample_index: int = 0,
    end_token_ids: Sequence[int] = (),
) -> list[int]:
    """What one of a request's samples must be: the sampler on the dense reference's logits, without an engine."""
    rows = SamplingState(
        key_data=jnp.asarray([seed_words(params.seed or 0)], jnp.uint32),
        temperature=jnp.float32([params.temperature]),
        top_k=jnp.int32([params.top_k]),
        top_p=jnp.float32([params.top_p]),
        min_p=jnp.float32([params.min_p]),
        last_token=jnp.int32([0]),
    )
    tokens = list(prompt)
    for count in range(params.max_tokens):
        banned = np.full((1, MAX_BANNED_TOKENS), NO_TOKEN, np.int32)
        if count < params.min_tokens:
            banned[0, : len(end_token_ids)] = end_token_ids
        logits = jnp.asarray(reference.logits(tokens)[-1:], jnp.float32)
        token = _sample(logits, rows, jnp.int32([sample_index]), jnp.int32([len(tokens)]), banned)
        tokens.append(int(token[0]))
        if tokens[-1] in end_token_ids:
            break
    return tokens[len(prompt) :]


def run(engine: Engine, *requests: tuple[Sequence[int], SamplingParams]) -> list[Request]:
    """Add all requests at once and step until they end."""
    count = engine._num_requests
    added = [engine.add_request(f"run-{count + i}", *request) for i, request in enumerate(requests)]
    drain(engine)
    return added


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities from float64 scores, row by row."""
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def check_logprobs(request: Request, expected: np.ndarray) -> None:
    """Of a request: each token's own, its rank and the most likely ones, from those of the whole vocabulary."""
    assert len(request.logprobs) == request.num_output_tokens
    for token, entry, wanted in zip(request.output_token_ids, request.logprobs, expected, strict=True):
        assert abs(entry.logprob - wanted[token]) < 1e-4
        assert entry.rank == 1 + int((wanted > wanted[token]).sum())
        assert len(entry.top) == request.sampling_params.logprobs
        best = np.sort(wanted)[::-1][: len(entry.top)]
        np.testing.assert_allclose([logprob for _, logprob in entry.top], best, rtol=0, atol=1e-4)
        np.testing.assert_allclose([wanted[t] for t, _ in entry.top], best, rtol=0, atol=1e-4)


def best_beams(
    reference: DenseReference, prompt: Sequence[int], params: BeamSearchParams, end_token_ids: Sequence[int] = ()
) -> list[tuple[tuple[int, ...], str, float]]:
    """(tokens, finish reason, cumulative log-probability) of a beam search by its definition, the best first.

    All tokens of the vocabulary are looked at; those that end a beam count if they are among its candidates.
    AssertionError for a prompt with a near tie: choose another.
    """
    width = params.beam_width
    living: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[tuple[int, ...], str, float]] = []
    for _ in range(params.max_tokens):
        longer = []
        for tokens, total in living:
            logprobs = log_softmax(reference.logits([*prompt, *tokens])[-1])
            candidates = np.argsort(-logprobs)[: max(2 * width, width + len(end_token_ids))]
            for token in range(len(logprobs)):
                if token not in end_token_ids:
                    longer.append(((*tokens, token), total + logprobs[token]))
                elif token in candidates:
                    ended.append((tokens, "stop", total + logprobs[token]))
        longer.sort(key=lambda beam: -beam[1])
        assert longer[width - 1][1] - longer[width][1] > MIN_GAP, "a near tie: a case that decides nothing"
        living = longer[:width]
    ended += [(tokens, "length", total) for tokens, total in living]
    scores = [total / max(1, len(tokens)) ** params.length_penalty for tokens, _, total in ended]
    order = sorted(range(len(ended)), key=lambda i: -scores[i])[: width + 1]
    assert all(np.diff([-scores[i] for i in order]) > MIN_GAP / 10), "a near tie: a case that decides nothing"
    return [ended[i] for i in order[:width]]


@dataclass
class PoolView:
    """The first blocks of a shared executor, and a record of the plans that went through."""

    executor: JaxExecutor
    num_blocks: int
    num_swap_blocks: int = 0
    on_submit: Callable[[SchedulerOutput], None] | None = None
    """Called between a plan and its result."""
    plans: list[SchedulerOutput] = field(default_factory=list)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return self.executor.cache_groups

    def submit(self, plan: SchedulerOutput) -> JaxStepHandle:
        self.plans.append(plan)
        handle = self.executor.submit(plan)
        if self.on_submit is not None:
            self.on_submit(plan)
        return handle

    def update_weights(self, model: Decoder) -> None:
        self.executor.update_weights(model)


@dataclass(frozen=True)
class Bench:
    """One kind of engine, and what its requests must answer."""

    engine: MakeEngine
    expected: Callable[[Sequence[int], int], list[int]]
    """(prompt, count) -> the greedy tokens after it; AssertionError for a near tie."""
    samples: Callable[[Sequence[int], SamplingParams], list[list[int]]]
    """What each of the n samples of a seeded request is."""
    prompts: Callable[[Sequence[int]], list[tuple[int, ...]]]
    """Lengths -> prompts that decide something."""


CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=MAX_LEN,
)


@cache
def make_decoder(windows: Windows = "full", seed: int = 0) -> Decoder:
    """A tiny model with random weights."""
    config = replace(CONFIG, sliding_window=None if windows == "full" else WINDOW, layer_types=_LAYER_TYPES[windows])
    return dummy_decoder(config, seed, jnp.dtype("float32"))


@cache
def make_reference(windows: Windows = "full", seed: int = 0) -> DenseReference:
    return DenseReference(make_decoder(windows, seed))


@pytest.fixture(scope="session")
def reference() -> DenseReference:
    return make_reference()


@pytest.fixture(scope="session")
def tiny_executor() -> Callable[..., JaxExecutor]:
    """(block size, debug, windows) -> the session's executor.

    It has several buckets for block size 4 and full layers without debugging, else one.
    """

    @cache
    def make(block_size: int, debug: bool = False, windows: Windows = "full") -> JaxExecutor:
        sizes = (4, 16, MAX_LEN) if (block_size, debug, windows) == (4, False, "full") else (MAX_LEN,)
        return JaxExecutor(
            make_decoder(windows),
            num_blocks=max(4, POOL_TOKENS // block_size),
            block_size=block_size,
            max_request_len=MAX_LEN,
            max_num_seqs=NUM_SLOTS,
            buckets=tuple(Bucket(size, min(size, NUM_SLOTS)) for size in sizes),
            kv_dtype=jnp.dtype("float32"),
            num_swap_blocks=NUM_SWAP_BLOCKS,
            debug=debug,
        )

    return make


@pytest.fixture(scope="session")
def tiny_engine(tiny_executor: Callable[..., JaxExecutor]) -> MakeEngine:
    """Makes engines over the tiny model; the arguments are those of `host_engine`."""

    def make(
        *,
        num_blocks: int | None = None,
        max_model_len: int = MAX_LEN,
        eos_token_ids: Sequence[int] = (),
        on_submit: Callable[[SchedulerOutput], None] | None = None,
        windows: Windows = "full",
        tokenizer: Tokenizer | None = None,
        **fields: object,
    ) -> Engine:
        config = EngineConfig(**{"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": MAX_LEN, **fields})
        executor = tiny_executor(config.block_size, config.debug, windows)
        return Engine(
            config,
            PoolView(executor, num_blocks or executor.num_blocks, config.num_swap_blocks or 0, on_submit),
            clock=VirtualClock(),
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=eos_token_ids,
        )

    return make


@pytest.fixture(params=["host", "tiny"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """The same test on the host executor and on the tiny model."""
    if request.param == "host":
        return Bench(
            host_engine,
            lambda prompt, count: tokens_alone(prompt, greedy(count), 10**9)[0],
            lambda prompt, params: [
                tokens_alone(prompt, params, 10**9, seed=params.seed, sample_index=i)[0] for i in range(params.n)
            ],
            lambda lengths: [tuple(range(10 * i, 10 * i + n)) for i, n in enumerate(lengths)],
        )
    reference = request.getfixturevalue("reference")
    return Bench(
        request.getfixturevalue("tiny_engine"),
        reference.greedy,
        lambda prompt, params: [sampled(reference, prompt, params, i) for i in range(params.n)],
        lambda lengths: reference.prompts(lengths, seed=len(lengths), count=24),
    )
