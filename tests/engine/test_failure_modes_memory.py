"""More outages of other engines, retold: shared and full memory, and aborts while a step runs."""

from collections.abc import Callable, Sequence

import jax
import pytest
from host_executor import check_accounting, drain, host_engine
from tiny_engines import Bench, MakeEngine, Windows, greedy, make_reference, run

from paged_jax.engine.request import Request, RequestStatus
from paged_jax.execution.jax_executor import JaxExecutor
from paged_jax.execution.plan import SchedulerOutput
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.sampling.params import SamplingParams


def _prompt(bench: Bench, start: Sequence[int], length: int, count: int) -> tuple[int, ...]:
    """A prompt that begins with `start` and whose `count` greedy tokens are no near ties."""
    for first in range(97):
        prompt = (*start, *((first + 5 * i) % 97 for i in range(length - len(start))))
        try:
            bench.expected(prompt, count)
        except AssertionError:
            continue
        return prompt
    raise AssertionError("no prompt decides anything")


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_g03_pages_that_two_entries_share_are_counted_once(bench: Bench, prefix_cache: str) -> None:
    engine = bench.engine(num_blocks=12, prefix_cache=prefix_cache, max_num_batched_tokens=64)
    first = _prompt(bench, (), 10, 5)
    split_inside = _prompt(bench, first[:6], 13, 5)
    split_on_edge = _prompt(bench, first[:8], 12, 5)
    cached = []
    for prompt in (first, split_inside, split_on_edge, first):
        (request,) = run(engine, (prompt, greedy(5)))  # checks after every step
        assert request.output_token_ids == bench.expected(prompt, 5)
        cached.append(request.metrics.num_cached_tokens)
    assert cached == [0, 4, 8, 8]
    pool = engine.scheduler.kv_cache.pools[0]
    assert pool.num_cached + pool.num_free == 12
    whole = _prompt(bench, (90, 3), 44, 4)
    (request,) = run(engine, (whole, greedy(4)))
    assert request.output_token_ids == bench.expected(whole, 4)
    assert pool.num_cached == 11, "the whole pool was needed, and all that was cached had to go"


def test_g08_id_is_in_use_until_the_last_sample_has_ended(bench: Bench) -> None:
    engine = bench.engine()
    prompt, other = bench.prompts([5, 6])
    params = SamplingParams(n=3, seed=1, max_tokens=6)
    leader = engine.add_request("x", prompt, params)
    for _ in range(2):
        engine.step()
        with pytest.raises(ValueError, match="request id 'x' is in use"):
            engine.add_request("x", other, greedy(3))
    drain(engine)
    assert [sample.output_token_ids for sample in leader.samples] == bench.samples(prompt, params)
    (again,) = run(engine, (other, greedy(3)))
    assert again.output_token_ids == bench.expected(other, 3)


MOMENTS: dict[str, Callable[[Request], bool]] = {
    "waiting": lambda request: True,
    "after its first chunk": lambda request: 0 < request.num_computed_tokens < 20,
    "between two decodes": lambda request: request.num_output_tokens == 2,
    "preempted": lambda request: request.status is RequestStatus.PREEMPTED,
    "swapped": lambda request: request.status is RequestStatus.SWAPPED,
}
LAUNCHED: dict[str, Callable[[Request, SchedulerOutput], bool]] = {
    "first chunk launched": lambda request, plan: any(part.request is request for part in plan.chunks),
    "last chunk launched": lambda request, plan: any(
        part.request is request and part.samples for part in plan.scheduled
    ),
    "decode launched": lambda request, plan: request in plan.decodes and request.num_output_tokens == 2,
    "swapped out": lambda request, plan: any(swap.request is request for swap in plan.swap_outs),
    "swapped in": lambda request, plan: any(swap.request is request for swap in plan.swap_ins),
}
"""Between a step's launch and its result."""


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("moment", [*MOMENTS, *LAUNCHED])
def test_g09_s05_no_token_follows_an_abort(bench: Bench, moment: str, n: int) -> None:
    def on_submit(plan: SchedulerOutput) -> None:
        if leader is not None and moment in LAUNCHED and LAUNCHED[moment](leader, plan):
            abort()

    def abort() -> None:
        if not at_abort:
            at_abort.extend(list(sample.token_ids) for sample in leader.samples)
            engine.abort("x")

    leader: Request | None = None
    at_abort: list[list[int]] = []
    swap = {"preemption_mode": "swap", "num_swap_blocks": 40} if "swapped" in moment else {}
    engine = bench.engine(
        num_blocks=14 if n == 1 else 16, max_num_batched_tokens=8, max_num_seqs=5, on_submit=on_submit, **swap
    )
    prompts = bench.prompts([5, 8, 20])
    mates = [engine.add_request(f"mate-{i}", prompts[i], greedy(20)) for i in range(2)]
    engine.step()
    engine.step()
    params = SamplingParams(n=n, seed=1, max_tokens=20)
    leader = engine.add_request("x", prompts[2], params)
    delivered = []
    while engine.has_unfinished_requests():
        if moment in MOMENTS and MOMENTS[moment](leader):
            abort()
        delivered += [(request, bool(at_abort)) for request in engine.step()]
        check_accounting(engine)
    assert at_abort, "the moment never came"
    samples = leader.samples
    assert [sample.token_ids for sample in samples] == at_abort
    assert not any(late and request in samples for request, late in delivered)
    for sample, expected in zip(samples, bench.samples(prompts[2], params), strict=True):
        assert sample.finish_reason == "abort"
        assert sample.status is RequestStatus.FINISHED
        assert sample.output_token_ids == expected[: sample.num_output_tokens]
        assert (sample.num_output_tokens == 0) or moment not in (
            "waiting",
            "after its first chunk",
            "first chunk launched",
            "last chunk launched",
        )
    assert [mate.output_token_ids for mate in mates] == [bench.expected(prompt, 20) for prompt in prompts[:2]]
    again = engine.add_request("x", prompts[0], greedy(5))
    drain(engine)
    assert again.output_token_ids == bench.expected(prompts[0], 5)


@pytest.mark.parametrize("mode", ["swap", "auto"])
@pytest.mark.parametrize("num_swap_blocks", [1, 0])
def test_g10_host_memory_that_is_full_is_no_failure(bench: Bench, num_swap_blocks: int, mode: str) -> None:
    engine = bench.engine(num_blocks=8, preemption_mode=mode, num_swap_blocks=num_swap_blocks, max_num_seqs=6)
    prompts = bench.prompts([9, 10, 3, 6])
    params = [greedy(12), SamplingParams(n=2, seed=7, max_tokens=12), greedy(12)]
    params.append(SamplingParams(n=2, seed=8, temperature=0.7, max_tokens=12))
    requests = run(engine, *zip(prompts, params, strict=True))  # checks host memory, too
    for prompt, own, request in zip(prompts, params, requests, strict=True):
        expected = [bench.expected(prompt, 12)] if own.n == 1 else bench.samples(prompt, own)
        assert [sample.output_token_ids for sample in request.samples] == expected
    assert sum(sample.metrics.num_preemptions for request in requests for sample in request.samples) > 1
    for plan in engine.executor.plans:
        assert all(len(swap.host_blocks[0]) <= num_swap_blocks for swap in plan.swap_outs)


@pytest.mark.parametrize("windows", ["full", "full+windowed"])
@pytest.mark.parametrize("prefix_cache", ["hash", "none"])
def test_g13_requests_that_hold_every_block_at_once(
    tiny_engine: MakeEngine, windows: Windows, prefix_cache: str
) -> None:
    def on_submit(plan: SchedulerOutput) -> None:
        tables = [part.request.block_tables[0].block_ids for part in plan.scheduled]
        held.append({block for table in tables for block in table})

    held: list[set[int]] = []
    reference = make_reference(windows)
    engine = tiny_engine(windows=windows, prefix_cache=prefix_cache, on_submit=on_submit)
    num_blocks = engine.executor.executor.num_blocks
    prompts = reference.prompts([24] * (num_blocks // 8), seed=13, count=8)
    requests = run(engine, *((prompt, greedy(8)) for prompt in prompts))
    assert [r.output_token_ids for r in requests] == [reference.greedy(prompt, 8) for prompt in prompts]
    assert not any(r.metrics.num_preemptions for r in requests)
    assert set(range(1, 1 + num_blocks)) in held


VICTIMS = ["last_arrived", "longest_remaining", "most_blocks", "fewest_tokens_lost", "lowest_priority"]


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("victims", VICTIMS)
def test_s10_long_preempted_request_does_not_stop_the_others(bench: Bench, victims: str, mode: str) -> None:
    host = {} if mode == "recompute" else {"num_swap_blocks": 20}
    engine = bench.engine(num_blocks=10, max_num_batched_tokens=6, victim_policy=victims, preemption_mode=mode, **host)
    prompts = bench.prompts([6, 6, 20])
    requests = [engine.add_request(str(i), prompt, greedy(14), priority=i) for i, prompt in enumerate(prompts)]
    silent = 0
    for _ in range(200):
        if not engine.has_unfinished_requests():
            break
        silent = 0 if engine.step() else silent + 1
        assert silent < 10, "ten steps without a token"
        check_accounting(engine)
    assert [r.output_token_ids for r in requests] == [bench.expected(prompt, 14) for prompt in prompts]
    preemptions = [r.metrics.num_preemptions for r in requests]
    assert sum(preemptions) >= 1
    assert max(preemptions) <= 8
    swaps = sum(len(plan.swap_ins) for plan in engine.executor.plans)
    assert swaps >= (mode == "swap")


def test_s11_prompt_beyond_the_window_s_pages_without_chunks_is_refused_when_the_engine_starts() -> None:
    with pytest.raises(ValueError, match=r"a prompt must fit the window's pages: raise num_blocks \(4\)"):
        host_engine(
            groups=(CacheGroup(1, 1, 1, sliding_window=5),),
            num_blocks=4,
            enable_chunked_prefill=False,
            max_model_len=32,
        )


def test_g13_debug_mode_refuses_blocks_that_the_arrays_do_not_have(
    tiny_engine: MakeEngine, tiny_executor: Callable[..., JaxExecutor]
) -> None:
    num_blocks = tiny_engine(debug=True).num_blocks
    engine = tiny_engine(debug=True, num_blocks=num_blocks + 3, prefix_cache="none")
    engine.executor.executor = tiny_executor.__wrapped__(4, True)  # of its own: a step that fails costs it its pages
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"block ids are 0 to {num_blocks}"):
        run(engine, *(((i,) * 24, greedy(12)) for i in range(4)))
