"""Steps that are interrupted, each in turn: before the device has done anything, and before its answer is read."""

import signal

import pytest
from host_executor import check_accounting, drain, host_engine, tokens_alone
from policy_grid import Row, cache_groups, engine_fields
from watcher import Watcher

from paged_jax.engine.policies.fcfs import FCFSQueue
from paged_jax.engine.request import Request
from paged_jax.execution.plan import SchedulerOutput
from paged_jax.sampling.params import BeamSearchParams, SamplingParams

ENGINES: dict[str, Row] = {
    "recompute": {"prefix_cache": "radix"},
    "swap": {"preemption_mode": "swap", "num_swap_blocks": 20},
    "prefill_first": {"budget_order": "prefill_first", "prefix_cache": "none"},
    "prefill_first, swap": {"budget_order": "prefill_first", "preemption_mode": "swap", "num_swap_blocks": 9},
    "static": {"batching": "static", "preemption_mode": "swap", "num_swap_blocks": 20},
    "windows": {"windows": "full+windowed", "preemption_mode": "swap", "num_swap_blocks": 20},
    "reservations": {"allocator": "reserve_oracle"},
    "reservations, prefill_first": {"allocator": "reserve_pow2", "budget_order": "prefill_first"},
    "srpt": {"scheduling_policy": "srpt", "length_predictor": "oracle", "preemption_mode": "swap"},
}


def interrupted_run(row: Row, interrupted: int, launched: bool) -> Watcher:
    """Samples, beams and others over a small pool; step number `interrupted` is."""
    engine = host_engine(
        **engine_fields(row),
        groups=cache_groups(row),
        num_blocks=32 if "allocator" in row else 12,
        max_model_len=24,
        max_num_seqs=6,
        max_num_batched_tokens=9,
    )
    watcher = Watcher(engine)

    def interrupt(plan: SchedulerOutput) -> None:
        raise KeyboardInterrupt

    for step in range(24):
        if step == 0:
            watcher.add(range(6), SamplingParams(n=3, seed=1, max_tokens=6))
        if step == 2:
            watcher.add(range(7), BeamSearchParams(beam_width=2, max_tokens=5))
            watcher.add(range(20, 29), SamplingParams(max_tokens=3))
        if step == 4:
            watcher.add((*range(5), 50), SamplingParams(n=2, seed=2, max_tokens=9))
            watcher.add((40,), SamplingParams(max_tokens=7))
        engine.executor.loses_plan = step == interrupted and not launched
        watcher.step(interrupt if step == interrupted else None)
    watcher.drain()
    return watcher


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("name", ENGINES)
def test_a_step_may_be_interrupted_at_any_time(name: str, launched: bool) -> None:
    undisturbed = interrupted_run(ENGINES[name], -1, launched).engine
    plans = undisturbed.executor.plans
    assert any(plan.copies[0] for plan in plans)
    assert any(plan.swap_outs for plan in plans) == (undisturbed.executor.num_swap_blocks > 0)
    for step in range(20):
        watcher = interrupted_run(ENGINES[name], step, launched)
        # the watcher has compared all tokens; nobody was lost
        assert len(watcher.ended) == 5


def test_a_lost_plan_loses_the_copies_of_those_that_it_made_wait() -> None:
    engine = host_engine(budget_order="prefill_first", max_num_batched_tokens=8)
    watcher = Watcher(engine)
    x = watcher.add(range(6), SamplingParams(n=2, seed=1, max_tokens=4))
    watcher.step()
    watcher.add(range(20, 28), SamplingParams(max_tokens=2))  # takes the whole step

    def interrupt(plan: SchedulerOutput) -> None:
        raise AssertionError("the plan was to be lost")

    engine.executor.loses_plan = True
    watcher.step(interrupt)
    assert [r.slot for r in x.leader.samples] == [None, None]
    watcher.drain()


class InterruptedQueue(FCFSQueue):
    """Ctrl-C comes, once, when a request has its blocks and has left the queue, and does not run yet."""

    interruptions = 1

    def admitted(self, request: Request) -> None:
        super().admitted(request)
        if self.interruptions:
            self.interruptions -= 1
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_a_step_is_planned_waits_for_the_whole_plan() -> None:
    engine = host_engine(scheduling_policy=f"{__name__}:InterruptedQueue")
    request = engine.add_request("a", range(5), SamplingParams(temperature=0, max_tokens=4))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    check_accounting(engine)
    drain(engine)
    assert request.output_token_ids == tokens_alone(range(5), request.sampling_params, 256)[0]


def test_ctrl_c_while_tokens_are_booked_waits_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = host_engine()
    params = SamplingParams(temperature=0, max_tokens=3)
    requests = [engine.add_request(str(i), range(i, i + 5), params) for i in range(3)]
    kv_cache = engine.scheduler.kv_cache
    usage = kv_cache.usage

    def interrupted() -> object:
        signal.raise_signal(signal.SIGINT)
        return usage()

    for _ in range(2):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "usage", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()  # the last tokens of all three
    assert [request.finish_reason for request in requests] == ["length"] * 3
    assert not engine.has_unfinished_requests()
    check_accounting(engine)
    assert [r.output_token_ids for r in requests] == [tokens_alone(range(i, i + 5), params, 256)[0] for i in range(3)]
