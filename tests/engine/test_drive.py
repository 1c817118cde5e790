"""Arrivals and times on a virtual clock, against runs worked out by hand."""

import pytest
from host_executor import host_engine

from paged_jax.engine.clock import VirtualClock, WallClock
from paged_jax.engine.engine import Arrival, Engine, drive
from paged_jax.engine.request import Request
from paged_jax.sampling.params import SamplingParams


def arrival(time: float, name: str, length: int = 4, max_tokens: int = 2, first: int = 0) -> Arrival:
    prompt = tuple(range(first, first + length))
    return Arrival(time, name, prompt, SamplingParams(max_tokens=max_tokens))


def make(**fields: object) -> Engine:
    return host_engine(token=lambda tokens: 50, seconds_per_step=1.0, prefix_cache="none", **fields)


def run(engine: Engine, arrivals: list[Arrival]) -> dict[str, Request]:
    """All requests by name; each advances at least once."""
    return {r.request_id: r for advanced, _ in drive(engine, arrivals, engine.clock) for r in advanced}


def test_times_of_a_run_worked_out_by_hand() -> None:
    engine = make(max_num_seqs=2, max_num_batched_tokens=4)
    requests = run(
        engine,
        [
            arrival(0.0, "A", length=6, max_tokens=2),
            arrival(0.5, "B", length=3, max_tokens=3),
            arrival(0.75, "C", length=1, max_tokens=1),
            arrival(9.25, "D", length=1, max_tokens=1),
        ],
    )
    assert engine.executor.steps == [
        [("A", 0, 4)],  # from 0 s
        [("A", 4, 2), ("B", 0, 2)],  # 1 s
        [("A", 6, 1), ("B", 2, 1)],  # 2 s
        [("B", 3, 1), ("C", 0, 1)],  # 3 s: A's slot is free
        [("B", 4, 1)],  # 4 s
        [("D", 0, 1)],  # 9.25 s: nothing to do before
    ]
    a, b, c, d = (requests[name].metrics for name in "ABCD")
    assert [m.arrival_time for m in (a, b, c, d)] == [0.0, 0.5, 0.75, 9.25]
    assert [m.first_scheduled_time for m in (a, b, c, d)] == [0.0, 1.0, 3.0, 9.25]
    assert [m.first_token_time for m in (a, b, c, d)] == [2.0, 3.0, 4.0, 10.25]
    assert [m.token_times for m in (a, b, c, d)] == [[2.0, 3.0], [3.0, 4.0, 5.0], [4.0], [10.25]]
    assert [m.finished_time for m in (a, b, c, d)] == [3.0, 5.0, 4.0, 10.25]
    assert engine.clock.now() == 10.25


def test_order_is_that_of_the_times_and_of_the_file_for_equal_ones() -> None:
    engine = make(max_num_seqs=1)
    run(
        engine,
        [
            arrival(3.0, "late"),
            arrival(1.0, "z"),
            arrival(1.0, "a"),
            arrival(0.0, "first"),
            arrival(1.0, "m"),
        ],
    )
    order = list(dict.fromkeys(name for step in engine.executor.steps for name, _, _ in step))
    assert order == ["first", "z", "a", "m", "late"]


def test_times_count_from_the_start_of_the_call() -> None:
    engine = make()
    engine.clock.advance(100.0)
    requests = run(engine, [arrival(0.0, "A", max_tokens=1), arrival(5.0, "B", max_tokens=1)])
    assert [r.metrics.arrival_time for r in requests.values()] == [100.0, 105.0]
    assert [r.metrics.finished_time for r in requests.values()] == [101.0, 106.0]


def test_each_step_yields_its_requests_and_its_statistics() -> None:
    engine = make(max_num_batched_tokens=4)
    arrivals = [arrival(0.0, "A", length=6), arrival(0.0, "B", length=2, max_tokens=1)]
    yielded = [([r.request_id for r in advanced], stats) for advanced, stats in drive(engine, arrivals, engine.clock)]
    assert [names for names, _ in yielded] == [[], ["A", "B"], ["A"]]
    assert [(s.start_time, s.end_time, s.num_tokens) for _, s in yielded] == [(0, 1, 4), (1, 2, 4), (2, 3, 1)]


def test_a_request_that_arrives_during_a_step_waits_for_its_end() -> None:
    requests = run(make(), [arrival(0.0, "A", max_tokens=1), arrival(0.25, "B", max_tokens=1)])
    metrics = requests["B"].metrics
    assert (metrics.arrival_time, metrics.first_scheduled_time) == (0.25, 1.0)


def test_first_scheduled_time_is_that_of_the_first_admission_after_a_preemption_too() -> None:
    engine = make(num_blocks=4)
    requests = run(engine, [arrival(0.0, "A", max_tokens=6), arrival(1.0, "B", max_tokens=9)])
    b = requests["B"].metrics
    assert b.num_preemptions == 1
    assert b.first_scheduled_time == 1.0
    assert b.first_token_time == 2.0
    assert len(b.token_times) == 9
    assert b.token_times == sorted(set(b.token_times))


def test_abort_between_steps_ends_a_request_with_its_time() -> None:
    engine = make()
    seen = []
    for advanced, _ in drive(engine, [arrival(0.0, "A", max_tokens=50), arrival(0.0, "B")], engine.clock):
        seen += advanced
        if engine.clock.now() == 3.0:
            engine.abort("A")
    a = seen[0]
    assert (a.finish_reason, a.metrics.finished_time, a.num_output_tokens) == ("abort", 3.0, 3)
    assert engine.clock.now() == 3.0


def test_no_arrivals_no_steps() -> None:
    engine = make()
    assert list(drive(engine, [], engine.clock)) == []


def test_a_request_that_cannot_be_served_is_an_error() -> None:
    engine = make(max_model_len=8)
    with pytest.raises(ValueError, match="the prompt has 9 tokens and max_model_len is 8"):
        run(engine, [arrival(0.0, "A", length=9)])


def test_virtual_clock_never_goes_back() -> None:
    clock = VirtualClock()
    clock.wait_until(2.5)
    clock.wait_until(1.0)
    clock.advance(0.5)
    assert clock.now() == 3.0


def test_wall_clock_waits_and_ignores_modelled_time() -> None:
    clock = WallClock()
    clock.advance(1e6)
    clock.wait_until(0.02)
    assert 0.02 <= clock.now() < 1e5
    clock.wait_until(0.0)
