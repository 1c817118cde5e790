"""Arrival processes: their gaps against closed forms, and closed loops against a schedule made by hand."""

import numpy as np
import pytest
from host_executor import host_engine
from scipy import stats

from paged_jax.config import parse
from paged_jax.engine.engine import drive
from paged_jax.experiments.arrival_times import ArrivalProcess, Start, starts
from paged_jax.experiments.lengths import Lengths
from paged_jax.experiments.workloads import SyntheticWorkload, make_workload

COUNT = 40_000


def gaps(seed: int = 0, **fields: float) -> np.ndarray:
    begin = starts(ArrivalProcess(**fields), COUNT, np.random.default_rng(seed))
    assert begin[0] == Start(0.0, None)
    assert {start.after for start in begin} == {None}
    return np.diff([start.time for start in begin])


def test_without_a_rate_all_arrive_at_once():
    assert set(gaps()) == {0.0}


def test_poisson_gaps_are_exponential():
    assert stats.kstest(gaps(request_rate=4.0), stats.expon(scale=0.25).cdf).pvalue > 0.001


@pytest.mark.parametrize("burstiness", [0.25, 0.5, 1.0, 4.0])
def test_burstiness_is_the_shape_of_gamma_gaps(burstiness):
    measured = gaps(request_rate=4.0, burstiness=burstiness)
    assert np.mean(measured) == pytest.approx(0.25, rel=0.03)
    assert np.std(measured) / np.mean(measured) == pytest.approx(1 / np.sqrt(burstiness), rel=0.03)
    assert stats.kstest(measured, stats.gamma(burstiness, scale=0.25 / burstiness).cdf).pvalue > 0.001


def test_burstiness_1_is_the_poisson_process_itself():
    assert (gaps(request_rate=4.0, burstiness=1.0) == gaps(request_rate=4.0)).all()
    assert (gaps(request_rate=4.0) != gaps(request_rate=4.0, seed=1)).any()


def test_the_rate_moves_the_same_requests():
    assert gaps(request_rate=8.0, burstiness=0.5) == pytest.approx(gaps(request_rate=4.0, burstiness=0.5) / 2)


def test_a_client_waits_for_its_own_request():
    begin = starts(ArrivalProcess(num_clients=3, think_time_s=1.5), 8, np.random.default_rng(0))
    assert begin == [Start(0.0)] * 3 + [Start(1.5, i) for i in range(5)]
    at_once = starts(ArrivalProcess(num_clients=3), 4, np.random.default_rng(0))
    assert at_once[3] == Start(0.0, 0)


CLOSED = SyntheticWorkload(
    kind="lognormal",
    num_requests=7,
    prompt=Lengths(law="constant", value=5),
    output=Lengths(law="constant", value=3),
    num_clients=2,
    think_time_s=5.0,
)


def test_requests_of_a_closed_loop_follow_each_other():
    arrivals = make_workload(CLOSED, 4, None, 97)
    assert [a.after for a in arrivals] == [None, None, *(f"seed4-{i}" for i in range(5))]
    assert [a.time for a in arrivals] == [0, 0, 5, 5, 5, 5, 5]
    open_loop = make_workload(CLOSED.model_copy(update={"num_clients": None}), 4, None, 97)
    assert [a.prompt_token_ids for a in open_loop] == [a.prompt_token_ids for a in arrivals]


def served(arrivals, **fields):
    """Arrival and end of each request, by id."""
    engine = host_engine(seconds_per_step=1.0, prefix_cache="none", **fields)
    ended = [r for advanced, _ in drive(engine, arrivals, engine.clock) for r in advanced if r.is_finished]
    times = {r.request_id: (r.metrics.arrival_time, r.metrics.finished_time) for r in ended}
    assert len(times) == len(arrivals)
    return [times[a.request_id] for a in arrivals]


def test_a_closed_loop_by_hand():
    # both clients are served at once: three steps, five seconds of thought
    assert served(make_workload(CLOSED, 0, None, 97)) == [(0, 3)] * 2 + [(8, 11)] * 2 + [(16, 19)] * 2 + [(24, 27)]
    # the second client waits for the first one, and is three seconds behind from then on
    one_by_one = [(0, 3), (0, 6), (8, 11), (11, 14), (16, 19), (19, 22), (24, 27)]
    assert served(make_workload(CLOSED, 0, None, 97), max_num_seqs=1) == one_by_one


def test_no_more_than_the_clients_are_ever_in_the_system():
    spec = CLOSED.model_copy(
        update={"num_requests": 40, "num_clients": 3, "think_time_s": 0.5, "output": Lengths(mean=6, sigma=0.6, max=20)}
    )
    spans = served(make_workload(spec, 0, None, 97), max_num_seqs=2)
    busy = [sum(begin <= at < end for begin, end in spans) for at, _ in spans]
    assert max(busy) == 3
    for i, (arrival, _) in enumerate(spans[3:]):
        assert arrival == spans[i][1] + 0.5


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"burstiness": 2.0}, "burstiness has no effect without request_rate: set it, or leave burstiness out"),
        ({"num_clients": 2, "burstiness": 2.0}, "burstiness has no effect without request_rate"),
        ({"num_clients": 2, "request_rate": 2.0}, "num_clients is a closed loop, .* and request_rate an open one"),
        ({"think_time_s": 2.0}, "think_time_s has no effect without num_clients"),
        ({"think_time_s": 0.0}, "think_time_s has no effect without num_clients"),
        ({"request_rate": 1.0, "think_time_s": 2.0}, "think_time_s has no effect without num_clients"),
        ({"num_clients": 2, "think_time_s": -1.0}, "think_time_s: input should be greater than or equal to 0"),
        ({"request_rate": 1.0, "burstiness": 0.0}, "burstiness: input should be greater than 0"),
        ({"num_clients": 0}, "num_clients: input should be greater than or equal to 1"),
    ],
)
def test_what_has_no_effect_is_refused(values, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        parse(ArrivalProcess, values)
