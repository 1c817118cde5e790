"""What the compiled steps promise: nothing compiled after warm-up, nothing of the pages' size copied."""

from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.config import EngineConfig
from paged_jax.engine.clock import VirtualClock
from paged_jax.engine.engine import Engine
from paged_jax.execution.buckets import make_buckets
from paged_jax.execution.jax_executor import JaxExecutor, bytes_per_block
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import stack_layers
from paged_jax.models.weights import dummy_decoder
from paged_jax.sampling.params import SamplingParams

MODEL = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@contextmanager
def compilations():
    """Counts what the backend compiles, whoever asks for it: a list that grows by one for each."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == COMPILE_EVENT:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def make_executor(config: EngineConfig, model: ModelConfig = MODEL, *, scanned: bool = False, **options):
    decoder = dummy_decoder(model, 0, jnp.dtype("float32"))
    settings = {
        "num_blocks": config.num_blocks,
        "block_size": config.block_size,
        "max_request_len": min(model.max_position_embeddings, config.num_blocks * config.block_size),
        "max_num_seqs": config.max_num_seqs,
        "buckets": make_buckets(config),
        "kv_dtype": jnp.dtype("float32"),
    }
    return JaxExecutor(stack_layers(decoder) if scanned else decoder, **{**settings, **options})


def make_engine(config: EngineConfig, **options) -> Engine:
    return Engine(
        config,
        make_executor(config, debug=config.debug, **options),
        clock=VirtualClock(),
        tokenizer=None,
        max_model_len=MODEL.max_position_embeddings,
        vocab_size=MODEL.vocab_size,
        eos_token_ids=(),
    )


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    requests = [
        engine.add_request(f"{engine.clock.now()}-{i}", prompt, own)
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]
    while engine.has_unfinished_requests():
        engine.step()
    return [request.output_token_ids for request in requests]


def mixed_requests(seed: int, count: int, longest: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and sampled requests with every filter, of all lengths."""
    rng = np.random.default_rng(seed)
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_k": 5, "seed": 4},
        {"temperature": 1.2, "top_p": 0.8, "seed": 5},
        {"temperature": 1.0, "min_p": 0.1, "top_k": 9, "top_p": 0.9, "seed": 6},
    ]
    prompts = [rng.integers(0, MODEL.vocab_size, rng.integers(1, longest)).tolist() for _ in range(count)]
    params = [SamplingParams(max_tokens=int(rng.integers(1, 9)), **kinds[i % len(kinds)]) for i in range(count)]
    return prompts, params


@pytest.mark.parametrize(("budget", "slots", "buckets"), [(8, 3, (3, 8)), (317, 8, (60, 317))])
def test_nothing_is_compiled_after_warm_up(budget, slots, buckets):
    """G18: through prefills of all sizes, decodes, preemption, poisoning and every kind of sampling."""
    config = EngineConfig(
        num_blocks=50,
        block_size=4,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        token_buckets=buckets,
        debug=True,
    )
    engine = make_engine(config)
    with compilations() as seen:
        engine.executor.warm_up()
    count = engine.executor.num_compilations
    num_sizes = {3: 4, 8: 6}[slots]  # 1, 2, 3, 4, and 6, 8
    assert len(seen) >= count == len(make_buckets(config)) + 1 + 2 * num_sizes  # steps, poison, moves of pages
    sizes = set()
    with compilations() as seen:
        for seed in range(3):
            prompts, params = mixed_requests(seed, 12, 120)
            for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                engine.add_request(f"{seed}-{i}", prompt, own)
            while engine.has_unfinished_requests():
                engine.step()
                sizes.add(engine.last_step.num_tokens)
    assert seen == []
    assert engine.executor.num_compilations == count
    assert len(sizes) >= min(budget - 2, 8)


def test_budget_and_slots_do_not_change_the_tokens():
    """G18: sampled and greedy outputs under one small bucket equal those under a large budget."""
    prompts, params = mixed_requests(9, 8, 40)
    base = EngineConfig(num_blocks=60, block_size=4, max_num_seqs=8, max_num_batched_tokens=317, token_buckets=(8, 317))
    expected = run(make_engine(base), prompts, params)
    small = base.model_copy(
        update={"max_num_seqs": 3, "max_num_batched_tokens": 7, "token_buckets": (7,), "block_size": 3}
    )
    assert run(make_engine(small), prompts, params) == expected


def test_a_bucket_is_compiled_on_demand_and_only_once():
    config = EngineConfig(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=8, token_buckets=(2, 8))
    engine = make_engine(config)
    greedy = [SamplingParams(temperature=0, max_tokens=3)]
    run(engine, [[1, 2]], greedy)
    assert engine.executor.num_compilations == 1
    run(engine, [[1, 2, 3]], greedy)
    run(engine, [[1, 2, 3]], greedy)
    assert engine.executor.num_compilations == 2
    assert engine.executor.compile_seconds > 0


IN_CI = [(3, 64, 1, False), (3, 128, 16, True), (4, 128, 16, False), (8, 64, 1, True)]
MEMORY_CASES = [
    pytest.param(*case, marks=[] if case in IN_CI else pytest.mark.slow)
    for case in [
        (*shape, block_size, scanned)
        for shape in [(3, 64), (3, 128), (4, 128), (8, 64)]
        for block_size in (1, 16)
        for scanned in (False, True)
    ]
]


@pytest.mark.parametrize(("heads", "head_dim", "block_size", "scanned"), MEMORY_CASES)
def test_pages_are_never_copied(heads, head_dim, block_size, scanned):
    """Pages of 64 MB beside activations of kilobytes: a temporary of their size cannot hide, in any bucket.

    Pages and sampling state come back in their own buffers.
    """
    config = EngineConfig(block_size=block_size, max_num_seqs=4, max_num_batched_tokens=32, token_buckets=(1, 32))
    model = replace(MODEL, num_heads=heads, num_kv_heads=heads, head_dim=head_dim)
    group = CacheGroup(model.num_layers, heads, head_dim)
    per_block = bytes_per_block([group], block_size, jnp.dtype("float32"), "cpu")
    num_blocks = (64 << 20) // per_block
    config = config.model_copy(update={"num_blocks": num_blocks})
    executor = make_executor(config, model, scanned=scanned, max_request_len=64)
    assert executor.page_bytes == (num_blocks + 1) * per_block
    sampling_bytes = 4 * config.max_num_seqs * 7  # key data of two words, and five single words
    for bucket in executor.buckets:
        memory = executor.compiled_step(bucket).memory_analysis()
        assert memory.alias_size_in_bytes >= executor.page_bytes + sampling_bytes, bucket
        assert memory.temp_size_in_bytes < executor.page_bytes / 16, bucket
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 4096, bucket


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_pages_are_never_copied_in_any_default_bucket(scanned):
    config = EngineConfig(num_blocks=40_000, block_size=16, max_num_seqs=16, max_num_batched_tokens=512)
    executor = make_executor(config, scanned=scanned, max_request_len=256)
    assert executor.page_bytes > 64 << 20
    executor.warm_up()
    for bucket in executor.buckets:
        memory = executor.compiled_step(bucket).memory_analysis()
        assert memory.alias_size_in_bytes >= executor.page_bytes, bucket
        assert memory.temp_size_in_bytes < executor.page_bytes / 8, bucket


def test_pages_stay_where_they_are_while_it_runs():
    config = EngineConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, token_buckets=(16,))
    engine = make_engine(config)
    before = engine.executor._pages[0].unsafe_buffer_pointer()
    run(engine, *mixed_requests(1, 4, 30))
    assert engine.executor._pages[0].unsafe_buffer_pointer() == before


def test_bfloat16_pages_under_a_float32_model():
    """kv_cache_dtype on its own: half the bytes, never copied, and it generates."""
    config = EngineConfig(num_blocks=20_000, max_num_seqs=2, max_num_batched_tokens=8, token_buckets=(8,))
    engine = make_engine(config, kv_dtype=jnp.dtype("bfloat16"))
    executor = engine.executor
    group = CacheGroup(2, 1, 8)
    assert executor.page_bytes == 20_001 * bytes_per_block([group], 16, jnp.dtype("bfloat16"), "cpu")
    memory = executor.compiled_step(executor.buckets[0]).memory_analysis()
    assert memory.alias_size_in_bytes >= executor.page_bytes
    assert memory.temp_size_in_bytes < executor.page_bytes / 16
    assert len(run(engine, [[1, 2, 3]], [SamplingParams(temperature=0, max_tokens=4)])[0]) == 4
