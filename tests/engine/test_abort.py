"""Requests that end from outside, or lose their memory to others, at every moment of their lives.

Names such as G09 are entries of the project's list of other engines' outages.
"""

from collections.abc import Callable

import pytest
from host_executor import host_engine
from requests_alone import Expectation, Params
from watcher import Watcher

from paged_jax.engine.request import Request, RequestStatus
from paged_jax.execution.plan import SchedulerOutput
from paged_jax.sampling.params import BeamSearchParams, SamplingParams

PROMPT = tuple(range(30, 50))
"""Twenty tokens: three chunks of at most eight."""

KINDS: dict[str, Params] = {
    "one": SamplingParams(max_tokens=12),
    "three samples": SamplingParams(n=3, seed=5, max_tokens=12),
    "two beams": BeamSearchParams(beam_width=2, max_tokens=8),
}


def crowd(preemption_mode: str = "recompute", **fields: object) -> Watcher:
    """An engine whose two urgent requests run, and leave eight tokens of each step to others."""
    swap = {"num_swap_blocks": 64} if preemption_mode == "swap" else {}
    engine = host_engine(
        **{"max_num_seqs": 5, "max_num_batched_tokens": 10, "victim_policy": "lowest_priority", **fields},
        preemption_mode=preemption_mode,
        **swap,
    )
    watcher = Watcher(engine)
    for first in (0, 60):
        watcher.add(range(first, first + 4), SamplingParams(max_tokens=24))
    watcher.step()
    return watcher


def step_until(watcher: Watcher, condition: Callable[[], bool]) -> None:
    for _ in range(60):
        if condition():
            return
        watcher.step()
    raise AssertionError("it never came to that")


def waiting(watcher: Watcher, x: Expectation) -> None:
    assert x.leader.status is RequestStatus.WAITING


def first_chunk_done(watcher: Watcher, x: Expectation) -> None:
    step_until(watcher, lambda: x.leader.num_computed_tokens == 8)


def decoding(watcher: Watcher, x: Expectation) -> None:
    step_until(watcher, lambda: x.leader.num_output_tokens >= 2)
    assert all(sample.slot is not None for sample in x.leader.samples)


STAGES = {stage.__name__: stage for stage in (waiting, first_chunk_done, decoding)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_g09_s05_abort_between_two_steps(stage: str, kind: str) -> None:
    watcher = crowd()
    x = watcher.add(PROMPT, KINDS[kind], priority=1)
    STAGES[stage](watcher, x)
    _abort_and_go_on(watcher, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "status"), [("recompute", RequestStatus.PREEMPTED), ("swap", RequestStatus.SWAPPED)])
def test_g09_abort_of_a_preempted_request(mode: str, status: RequestStatus, kind: str) -> None:
    watcher = crowd(mode, num_blocks=13)
    x = watcher.add(PROMPT, KINDS[kind], priority=1)
    step_until(watcher, lambda: any(sample.status is status for sample in x.leader.samples))
    host_pool = watcher.engine.scheduler.kv_cache.host_pools[0]
    assert (host_pool.num_free < host_pool.num_blocks) == (mode == "swap")
    _abort_and_go_on(watcher, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["first chunk", "last chunk", "decode"])
def test_g09_abort_between_launch_and_result(moment: str, kind: str) -> None:
    watcher = crowd()
    x = watcher.add(PROMPT, KINDS[kind], priority=1)
    counts: list[list[int]] = []

    def abort(plan: SchedulerOutput) -> None:
        parts = [part for part in plan.scheduled if part.request in x.leader.samples]
        reached = {
            "first chunk": bool(parts) and parts[0].start == 0,
            "last chunk": any(part.samples and part.num_tokens > 1 for part in parts),
            "decode": any(part.samples and part.num_tokens == 1 for part in parts),
        }
        if reached[moment] and not counts:
            watcher.abort(x)
            counts.append([request.num_output_tokens for request in x.leader.samples])

    for _ in range(20):
        watcher.step(abort)
    (at_abort,) = counts
    assert [request.num_output_tokens for request in x.leader.samples] == at_abort
    assert (max(at_abort) > 0) == (moment == "decode")
    _go_on(watcher, x)


def _abort_and_go_on(watcher: Watcher, x: Expectation) -> None:
    before = [request.num_output_tokens for request in x.leader.samples]
    watcher.abort(x)
    assert [request.num_output_tokens for request in x.leader.samples] == before
    for request in x.leader.samples:
        _holds_nothing(request)
    _go_on(watcher, x)


def _go_on(watcher: Watcher, x: Expectation) -> None:
    """The mates, and a newcomer with the same prompt, are right; the watcher compares them."""
    count = len(watcher.engine.executor.plans)
    again = watcher.add(PROMPT, SamplingParams(max_tokens=5))
    watcher.drain()
    later = watcher.engine.executor.plans[count:]
    assert not any(part.request in x.leader.samples for plan in later for part in plan.scheduled)
    assert [e.leader.finish_reason for e in watcher.ended if e is not x] == ["length"] * 3
    assert again.leader.num_output_tokens == 5


def _holds_nothing(request: Request) -> None:
    assert request.status is RequestStatus.FINISHED
    assert request.finish_reason == "abort"
    assert request.slot is None
    assert not request.block_tables
    assert not request.host_blocks
    assert not request.pending_samples


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("kind", KINDS)
def test_s17_an_id_is_free_at_once(kind: str, mode: str) -> None:
    for steps in range(16):
        watcher = crowd(mode, num_blocks=13)
        old = watcher.add(PROMPT, KINDS[kind], "x", priority=1)
        for _ in range(steps):
            watcher.step()
        if old.is_finished:
            break
        watcher.abort(old)
        new = watcher.add(PROMPT[::-1], KINDS[kind], "x", priority=1)
        watcher.drain()
        assert new in watcher.ended
        assert new.leader.finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_s17_an_id_is_free_while_the_step_of_its_first_use_runs(kind: str) -> None:
    for steps in range(12):
        watcher = crowd()
        old = watcher.add(PROMPT, KINDS[kind], "x", priority=1)
        for _ in range(steps):
            watcher.step()
        new: list[Expectation] = []

        def replace(plan: SchedulerOutput, watcher: Watcher = watcher, old: Expectation = old) -> None:
            watcher.abort(old)
            new.append(watcher.add(PROMPT[::-1], KINDS[kind], "x"))  # noqa: B023

        if old.is_finished:
            break
        watcher.step(replace)
        watcher.drain()
        assert new[0] in watcher.ended
        assert new[0].leader.finish_reason == "length"


def test_s17_the_end_of_the_first_use_is_reported_late() -> None:
    # x has ended and leaves its static batch in a step that is interrupted: its end is reported by the next one
    watcher = crowd(batching="static", num_blocks=16)
    watcher.drain()
    old = watcher.add(PROMPT[:4], SamplingParams(max_tokens=2), "x")
    mate = watcher.add(PROMPT[4:8], SamplingParams(max_tokens=9))
    step_until(watcher, lambda: old.leader.finish_reason is not None)
    watcher.abort(mate)
    watcher.add(PROMPT[8:12], SamplingParams(max_tokens=3))

    def interrupt(plan: SchedulerOutput) -> None:
        raise KeyboardInterrupt

    watcher.step(interrupt)
    assert old.leader.is_finished
    assert old.leader not in old.delivered
    watcher.engine.abort("x")
    new = watcher.add(PROMPT[::-1], SamplingParams(max_tokens=6), "x")
    watcher.drain()
    assert old.leader in old.delivered
    assert new in watcher.ended


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("num_swap_blocks", [1, 0])
def test_g10_host_memory_that_is_full_or_absent_is_no_error(num_swap_blocks: int, batching: str) -> None:
    engine = host_engine(
        num_blocks=8, max_num_seqs=6, preemption_mode="swap", num_swap_blocks=num_swap_blocks, batching=batching
    )
    watcher = Watcher(engine)
    for index, n in enumerate((1, 2, 1, 2)):
        params = SamplingParams(n=n, seed=index, max_tokens=14)
        watcher.add(range(20 * index, 20 * index + 3 + index), params)
    watcher.drain()
    assert [e.leader.finish_reason for e in watcher.ended] == ["length"] * 4
    plans = engine.executor.plans
    swapped, preempted = sum(len(plan.swap_outs) for plan in plans), sum(len(plan.preempted) for plan in plans)
    assert preempted > swapped  # most had to be recomputed
    assert swapped == 0 or num_swap_blocks


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("num_victims", [1, 2])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_g07_an_urgent_request_takes_the_blocks_of_one_that_had_its_turn(
    mode: str, num_victims: int, chunked: bool
) -> None:
    # each of X has two blocks and room in them, Y needs a second one and there is none
    engine = host_engine(
        num_blocks=2 * num_victims + 1,
        max_model_len=20,
        scheduling_policy="priority",
        victim_policy="lowest_priority",
        enable_chunked_prefill=chunked,
        preemption_mode=mode,
        **({"num_swap_blocks": 8} if mode == "swap" else {}),
    )
    watcher = Watcher(engine)
    low = [watcher.add(range(10 * i, 10 * i + 5), SamplingParams(max_tokens=9), priority=5) for i in range(num_victims)]
    watcher.step()
    urgent = watcher.add(range(50, 54), SamplingParams(max_tokens=6), priority=0)
    watcher.step()
    before = [x.leader.num_output_tokens for x in low]
    watcher.step()
    plan = engine.executor.plans[-1]
    victim = low[-1].leader  # of equal priorities the last to arrive
    assert list(plan.preempted) == [victim]
    assert victim not in [part.request for part in plan.scheduled]
    assert victim.num_output_tokens == before[-1]
    assert urgent.leader.num_output_tokens == 2
    # everyone else that can run does
    assert [x.leader.num_output_tokens for x in low[:-1]] == [count + 1 for count in before[:-1]]
    watcher.drain()
    assert [e.leader.finish_reason for e in watcher.ended] == ["length"] * (num_victims + 1)


def test_s21_urgent_requests_without_end_do_not_starve_the_others() -> None:
    engine = host_engine(
        num_blocks=9,
        max_num_seqs=3,
        seconds_per_step=1.0,
        scheduling_policy="priority",
        victim_policy="lowest_priority",
        aging_s=20.0,
        max_preemptions=3,
    )
    watcher = Watcher(engine)
    low = [watcher.add(range(10 * i, 10 * i + 6), SamplingParams(max_tokens=9), priority=9) for i in range(3)]
    ran: list[int] = []
    for step in range(100):
        if step % 3 == 0:
            first = step % 60
            watcher.add(range(first, first + 7), SamplingParams(max_tokens=7), priority=0)
        watcher.step()
        ran.append(len(engine.executor.steps[-1]))
    assert all(x in watcher.ended for x in low), "an unimportant request starves"
    assert min(ran) > 0
    watcher.drain()
