"""A request's tokens are its own, whatever its bucket, chunks, blocks, batch-mates, preemptions and hits."""

from collections.abc import Callable
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from dense_reference import DenseReference
from host_executor import check_accounting, drain
from tiny_engines import MAX_LEN, MakeEngine, greedy, run

from paged_jax.execution.jax_executor import JaxExecutor, JaxStepHandle
from paged_jax.sampling.params import SamplingParams

type Case = tuple[tuple[int, ...], SamplingParams]

LENGTHS = (1, 3, 4, 9, 17, 22)
NEW_TOKENS = 10


@pytest.fixture(scope="session")
def cases(reference: DenseReference) -> list[Case]:
    """Greedy and seeded requests over the same prompts, two of which share their first nine tokens."""
    prompts = reference.prompts(LENGTHS, seed=5, count=NEW_TOKENS)
    prompts.append(prompts[3] + prompts[1])
    sampled = [
        SamplingParams(temperature=0.8, seed=11, max_tokens=NEW_TOKENS),
        SamplingParams(temperature=1.3, seed=11, top_k=20, max_tokens=NEW_TOKENS),
        SamplingParams(temperature=1.0, seed=2**63 + 5, top_p=0.9, min_p=0.01, max_tokens=NEW_TOKENS),
    ]
    cases = [(prompt, greedy(NEW_TOKENS)) for prompt in prompts[:-1]]
    return cases + [(prompt, sampled[i % 3]) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="session")
def expected(cases: list[Case], tiny_engine: MakeEngine, reference: DenseReference) -> Callable[[int], list[int]]:
    """Case -> its tokens: the dense reference's if greedy, else what the engine gives the request alone."""
    engine = tiny_engine(prefix_cache="none")

    @cache
    def tokens(case: int) -> list[int]:
        prompt, params = cases[case]
        if params.is_greedy:
            return reference.greedy(prompt, NEW_TOKENS)
        return run(engine, (prompt, params))[0].output_token_ids

    return tokens


def _check(engine: object, cases: list[Case], expected: Callable[[int], list[int]]) -> list[object]:
    requests = run(engine, *cases)
    for i, request in enumerate(requests):
        assert request.output_token_ids == expected(i), f"case {i}: {cases[i]}"
    return requests


@pytest.mark.parametrize("budget", [5, 7, 64])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("prefix_cache", ["hash", "none"])
def test_block_size_chunks_and_prefix_cache(
    tiny_engine: MakeEngine,
    cases: list[Case],
    expected: Callable[[int], list[int]],
    block_size: int,
    budget: int,
    prefix_cache: str,
) -> None:
    engine = tiny_engine(block_size=block_size, max_num_batched_tokens=budget, prefix_cache=prefix_cache)
    _check(engine, cases, expected)
    again = _check(engine, cases, expected)
    hits = sum(request.metrics.num_cached_tokens for request in again)
    assert (hits > 0) == (prefix_cache == "hash")


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("prefix_cache", ["hash", "none"])
def test_preemption(
    tiny_engine: MakeEngine,
    cases: list[Case],
    expected: Callable[[int], list[int]],
    block_size: int,
    prefix_cache: str,
) -> None:
    engine = tiny_engine(
        block_size=block_size,
        num_blocks=48 // block_size,
        max_num_batched_tokens=16,
        prefix_cache=prefix_cache,
    )
    requests = _check(engine, cases, expected)
    for is_greedy in (True, False):
        preempted = [
            r
            for r in requests
            if r.metrics.num_preemptions and r.num_output_tokens and r.sampling_params.is_greedy == is_greedy
        ]
        assert preempted, "nobody was preempted: this tests nothing"


def test_bucket(
    tiny_engine: MakeEngine,
    tiny_executor: Callable[..., JaxExecutor],
    cases: list[Case],
    expected: Callable[[int], list[int]],
) -> None:
    alone = [expected(i) for i in range(len(cases))]  # by the same executor, so before its buckets change
    executor = tiny_executor(4, False)
    buckets = executor._buckets
    try:
        for bucket in buckets[1:]:  # the smallest holds fewer sequences than the engine runs
            executor._buckets = (bucket,)
            _check(tiny_engine(max_num_batched_tokens=bucket.num_tokens), cases, alone.__getitem__)
    finally:
        executor._buckets = buckets


def test_batch_mates_and_slots(
    tiny_engine: MakeEngine, cases: list[Case], expected: Callable[[int], list[int]]
) -> None:
    _check(tiny_engine(max_num_seqs=1), cases, expected)
    engine = tiny_engine(max_num_seqs=6)
    requests = [engine.add_request(str(i), *case) for i, case in enumerate(reversed(cases))]
    drain(engine)
    for i, request in enumerate(reversed(requests)):
        assert request.output_token_ids == expected(i)


def test_joining_a_running_batch_and_leaving_it(
    tiny_engine: MakeEngine, cases: list[Case], expected: Callable[[int], list[int]]
) -> None:
    engine = tiny_engine(num_blocks=14, max_num_batched_tokens=9)
    requests = []
    for i, case in enumerate(cases):
        requests.append(engine.add_request(str(i), *case))
        doomed = engine.add_request(f"doomed-{i}", (7,) * (i + 1), greedy(50))
        for _ in range(3):
            engine.step()
        engine.abort(doomed.request_id)
        check_accounting(engine)
    drain(engine)
    for i, request in enumerate(requests):
        assert request.output_token_ids == expected(i)


@pytest.mark.parametrize("interrupted_step", [0, 1, 4])
def test_interrupt_while_a_step_runs_loses_nothing(
    tiny_engine: MakeEngine,
    cases: list[Case],
    expected: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    interrupted_step: int,
) -> None:
    """Ctrl-C between a step's launch and its result: the device is a token ahead of the host."""
    engine = tiny_engine(block_size=4)
    requests = [engine.add_request(str(i), *case) for i, case in enumerate(cases)]
    for _ in range(interrupted_step):
        engine.step()

    def interrupt(handle: JaxStepHandle) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(JaxStepHandle, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    check_accounting(engine)
    drain(engine)
    assert [r.output_token_ids for r in requests] == [expected(i) for i in range(len(cases))]


@pytest.mark.parametrize("num_blocks", [12, 32])
def test_debug_mode_poisons_freed_blocks(
    tiny_engine: MakeEngine, cases: list[Case], expected: Callable[[int], list[int]], num_blocks: int
) -> None:
    engine = tiny_engine(debug=True, num_blocks=num_blocks, max_num_batched_tokens=7)
    _check(engine, cases, expected)
    engine.reset_prefix_cache()
    _check(engine, cases, expected)
    assert any(plan.emptied_blocks for plan in engine.executor.plans)
    (pages,) = engine.executor.executor._pages
    assert np.isnan(np.asarray(pages)).any(), "nothing was poisoned"


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_g14_unused_slots_hold_nan_or_inf(
    tiny_engine: MakeEngine, reference: DenseReference, value: float, debug: bool
) -> None:
    lengths = (1, 3, 4, 5, 8, 9)
    prompts = reference.prompts(lengths, seed=14, count=6)
    engine = tiny_engine(debug=debug, max_num_seqs=6)
    executor = engine.executor.executor

    def fill() -> None:
        executor._pages = [jnp.full_like(pages, value) for pages in executor._pages]

    for prompt in prompts:  # alone: batches padded beyond their real rows
        fill()
        engine.reset_prefix_cache()
        (request,) = run(engine, (prompt, greedy(6)))
        assert request.output_token_ids == reference.greedy(prompt, 6)
    for budget in (6, 7, 64):  # chunks, decodes and prefills mixed
        fill()
        engine = tiny_engine(debug=debug, max_num_seqs=6, max_num_batched_tokens=budget)
        requests = run(engine, *((prompt, greedy(6)) for prompt in prompts))
        assert [r.output_token_ids for r in requests] == [reference.greedy(prompt, 6) for prompt in prompts]


def test_derived_seeds_depend_on_the_engine_seed_and_the_number_only(tiny_engine: MakeEngine) -> None:
    unseeded = SamplingParams(max_tokens=8)

    def outputs(seed: int, **fields: object) -> list[list[int]]:
        engine = tiny_engine(seed=seed, **fields)
        return [r.output_token_ids for r in run(engine, *[((1, 2, 3), unseeded)] * 4)]

    first = outputs(0)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert outputs(0, max_num_batched_tokens=5, num_blocks=6, max_num_seqs=3) == first
    assert outputs(1) != first


def test_longest_request_fills_the_block_table(tiny_engine: MakeEngine, reference: DenseReference) -> None:
    (prompt,) = reference.prompts([40], seed=3, count=MAX_LEN - 40)
    for block_size in (1, 3, 4, 16, 64):
        (request,) = run(tiny_engine(block_size=block_size), (prompt, greedy(99)))
        assert request.output_token_ids == reference.greedy(prompt, MAX_LEN - 40)
        assert request.finish_reason == "length"
