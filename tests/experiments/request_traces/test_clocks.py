"""G25: three requests at 0, 0.1 and 0.25 s, however their file writes the times, give one and the same run."""

import json
from decimal import Decimal
from pathlib import Path

import pytest
from host_executor import host_engine
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.engine.engine import Arrival, drive
from paged_jax.experiments.request_traces.spec import TraceWorkload
from paged_jax.experiments.request_traces.workload import TraceRequest, trace_requests, workload_notes
from paged_jax.sampling.params import SamplingParams

EPOCH = Decimal("1700000000")
SECONDS = [Decimal("0"), Decimal("0.1"), Decimal("0.25")]
LENGTHS = [(4, 3), (5, 2), (6, 1)]
"""(prompt, output) of the three requests."""

HEADERS = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
}


def line(fmt: str, time: object, prompt: int, output: int) -> str:
    """One row; `time` as it is to be written."""
    match fmt:
        case "azure":
            return f"{time},{prompt},{output}"
        case "burstgpt":
            return f"{time},ChatGPT,{prompt},{output},{prompt + output},Conversation log"
        case _:
            ids = list(range(-(-prompt // 512)))
            row = {"timestamp": 0, "input_length": prompt, "output_length": output, "hash_ids": [prompt, *ids[1:]]}
            return json.dumps(row).replace('"timestamp": 0', f'"timestamp": {time}')


def write(tmp_path: Path, fmt: str, rows: list[str], **fields: object) -> TraceWorkload:
    path = tmp_path / f"{fmt}.trace"
    path.write_text("\n".join([HEADERS[fmt], *rows] if fmt in HEADERS else rows) + "\n")
    return TraceWorkload(kind="trace", format=fmt, file=str(path), **fields)


def requests_of(spec: TraceWorkload) -> list[TraceRequest]:
    return trace_requests(spec, 0, 97, None)


def latencies(requests: list[TraceRequest]) -> list[list[float]]:
    """All TTFTs and all end-to-end latencies of these requests on the host model, whose steps take a second."""
    engine = host_engine(seconds_per_step=1.0)
    arrivals = [
        Arrival(r.time, str(i), r.prompt_token_ids, SamplingParams(max_tokens=r.output_len, ignore_eos=True))
        for i, r in enumerate(requests)
    ]
    served = {r.request_id: r.metrics for advanced, _ in drive(engine, arrivals, engine.clock) for r in advanced}
    assert len(served) == len(requests), "requests in = requests reported"
    times = [served[str(i)] for i in range(len(requests))]
    return [[m.first_token_time - m.arrival_time for m in times], [m.finished_time - m.arrival_time for m in times]]


# the first is alone in the step from 0 to 1 s; the others join it from 1 to 2 s
BY_HAND = [pytest.approx([1.0, 1.9, 1.75]), pytest.approx([3.0, 2.9, 1.75])]

UNITS = {"s": Decimal(1), "ms": Decimal(1000), "us": Decimal(1_000_000)}
VARIANTS = {
    "relative": (SECONDS, "s"),
    "epoch": ([EPOCH + s for s in SECONDS], "s"),
    "epoch in scientific notation": (["1.7e9", "1.7000000001e9", "1.70000000025e9"], "s"),
    "ms": ([s * 1000 for s in SECONDS], "ms"),
    "epoch in ms": ([(EPOCH + s) * 1000 for s in SECONDS], "ms"),
    "us": ([int(s * 1_000_000) for s in SECONDS], "us"),
    "epoch in us": ([int((EPOCH + s) * 1_000_000) for s in SECONDS], "us"),
}


@pytest.mark.parametrize("fmt", ["azure", "burstgpt", "mooncake"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)], ids=["in order", "out of order", "swapped"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_run_whatever_the_clock_unit_and_order(tmp_path, fmt, order, variant):
    times, unit = VARIANTS[variant]
    spec = write(tmp_path, fmt, [line(fmt, times[i], *LENGTHS[i]) for i in order], time_unit=unit)
    requests = requests_of(spec)
    assert [r.time for r in requests] == [0.0, 0.1, 0.25]
    assert [(len(r.prompt_token_ids), r.output_len) for r in requests] == LENGTHS
    assert latencies(requests) == BY_HAND
    notes = " ".join(workload_notes(spec))
    assert ("in the order of their times" in notes) == (order != (0, 1, 2))
    assert ("times count from the first request" in notes) == ("epoch" in variant)


@pytest.mark.parametrize(
    "written",
    [
        ["2023-11-16 18:15:46.6805900", "2023-11-16 18:15:46.7805900", "2023-11-16 18:15:46.9305900"],
        ["2023-12-31T23:59:59.9", "2024-01-01T00:00:00", "2024-01-01T00:00:00.15"],
        ["2024-02-29 23:59:59.95+00:00", "2024-03-01 00:00:00.05Z", "2024-03-01 02:00:00.2+0200"],
        ["2024-02-29 18:29:59.95-05:30", "2024-03-01 00:00:00.050000000Z", "2024-02-29 20:00:00.2-04:00"],
    ],
)
def test_dates_give_the_same_run(tmp_path, written):
    spec = write(tmp_path, "azure", [line("azure", written[i], *LENGTHS[i]) for i in (1, 2, 0)])
    requests = requests_of(spec)
    assert [r.time for r in requests] == [0.0, 0.1, 0.25]
    assert latencies(requests) == BY_HAND


@pytest.mark.parametrize(("fmt", "written"), [("azure", [0, 2]), ("burstgpt", [0, 2]), ("mooncake", [0, 2000])])
def test_a_unit_need_not_be_declared_where_it_is_that_of_the_format(tmp_path, fmt, written):
    spec = write(tmp_path, fmt, [line(fmt, time, 4, 2) for time in written])
    assert [r.time for r in requests_of(spec)] == [0.0, 2.0]


@pytest.mark.parametrize("fmt", ["azure", "burstgpt", "mooncake"])
def test_equal_times_keep_the_order_of_the_file(tmp_path, fmt):
    rows = [line(fmt, time, prompt, 1) for time, prompt in ((5, 3), (2, 9), (5, 1), (2, 7), (5, 2))]
    spec = write(tmp_path, fmt, rows, time_unit="s")
    requests = requests_of(spec)
    assert [(r.time, len(r.prompt_token_ids)) for r in requests] == [(0, 9), (0, 7), (3, 3), (3, 1), (3, 2)]
    latencies(requests)


def test_requests_that_all_have_one_time_arrive_at_once_and_that_is_said(tmp_path):
    spec = write(tmp_path, "azure", [line("azure", 7, 4, 1)] * 3)
    assert [r.time for r in requests_of(spec)] == [0.0] * 3
    assert "all rows have the same time, so all requests arrive at once" in " ".join(workload_notes(spec))


MILLISECONDS = st.integers(0, 10**6)  # the unit is us: that no two are nearer is the point, see `check_span`


@given(st.lists(st.tuples(MILLISECONDS, st.integers(1, 9), st.integers(1, 5)), min_size=2, max_size=12), st.data())
def test_the_order_of_rows_and_the_origin_of_the_clock_change_nothing(tmp_path_factory, rows, data):
    rows = list({ms: (1000 * ms, prompt, output) for ms, prompt, output in rows}.values())  # times that differ
    tmp_path = tmp_path_factory.mktemp("trace")
    offset = data.draw(st.integers(0, 2 * 10**15))
    shuffled = data.draw(st.permutations(rows))

    def read(rows, offset):
        written = [line("azure", time + offset, prompt, output) for time, prompt, output in rows]
        return requests_of(write(tmp_path, "azure", written, time_unit="us"))

    expected = read(rows, 0)
    assert read(shuffled, offset) == expected
    first = min(time for time, _, _ in rows)
    in_order = sorted(rows)
    assert [r.time for r in expected] == pytest.approx([(time - first) / 1e6 for time, _, _ in in_order])
    assert [(len(r.prompt_token_ids), r.output_len) for r in expected] == [row[1:] for row in in_order]


REFUSED = {
    "two columns": (
        "azure",
        ["TIMESTAMP,arrival_epoch,ContextTokens,GeneratedTokens", "0,1700000000,4,1", "1,1700000001,4,1"],
        r"line 1: the columns TIMESTAMP and arrival_epoch are two clocks.*delete one, and call the other TIMESTAMP",
    ),
    "two columns of burstgpt": (
        "burstgpt",
        [HEADERS["burstgpt"] + ",send_time", "0,ChatGPT,4,1,5,API log,1700000000"],
        "line 1: the columns Timestamp and send_time are two clocks",
    ),
    "two keys": (
        "mooncake",
        ['{"timestamp": 0, "sent_at": 1700000000, "input_length": 4, "output_length": 1, "hash_ids": [0]}'],
        "line 1: timestamp and sent_at are two clocks",
    ),
    "rows of two clocks": (
        "azure",
        [HEADERS["azure"], "0,4,1", "0.1,4,1", "1700000000.25,4,1"],
        r"53\.9 years pass from line 2 to line 4; they are read as seconds: set workload\.time_unit, unless some rows",
    ),
    "us read as s": (
        "burstgpt",
        [HEADERS["burstgpt"], *(line("burstgpt", i * 10**6, 4, 1) for i in range(40_000))],
        r"1\.27e\+03 years pass.*read as seconds: set workload\.time_unit",
    ),
    "s read as ms": (
        "mooncake",
        [line("mooncake", Decimal(i) / 10**4, 4, 1) for i in range(50)],
        r"50 requests within 4\.9e-06 s.*they are read as milliseconds: set workload\.time_unit",
    ),
    "a date among numbers": (
        "azure",
        [HEADERS["azure"], "0,4,1", "2023-11-16 18:15:46.68,4,1"],
        "line 3: TIMESTAMP is '2023-11-16 18:15:46.68', not a time",
    ),
    "a number among dates": (
        "azure",
        [HEADERS["azure"], "2023-11-16 18:15:46.68,4,1", "5,4,1"],
        "line 3: TIMESTAMP is '5', while line 2 has '2023-11-16 18:15:46.68': write all times in the same way",
    ),
    "one date has a zone": (
        "azure",
        [HEADERS["azure"], "2023-11-16 18:15:46.68,4,1", "2023-11-16 18:15:46.68Z,4,1"],
        "line 3: .*write all times in the same way",
    ),
    "no such day": ("azure", [HEADERS["azure"], "2023-02-29 18:15:46,4,1"], "line 2: there is no day 2023-02-29"),
    "no such hour": ("azure", [HEADERS["azure"], "2023-02-28 24:15:46,4,1"], "line 2: .*is no time of day"),
    "negative": (
        "burstgpt",
        [HEADERS["burstgpt"], "-1,ChatGPT,4,1,5,API log"],
        "line 2: Timestamp is -1, not a time from 0 on",
    ),
    "a long exponent": (
        "burstgpt",
        [HEADERS["burstgpt"], "1e999999999,x,4,1,5,y"],
        "line 2: Timestamp is 1e99.* not a ti",
    ),
    "nan": ("burstgpt", [HEADERS["burstgpt"], "nan,ChatGPT,4,1,5,API log"], "line 2: Timestamp is nan, not a time"),
    "blank": ("burstgpt", [HEADERS["burstgpt"], ",ChatGPT,4,1,5,API log"], "line 2: Timestamp is '', not a time"),
    "text": ("mooncake", [line("mooncake", '"soon"', 4, 1)], "line 1: timestamp is 'soon', not a time: mend or delete"),
    "true": ("mooncake", [line("mooncake", "true", 4, 1)], "line 1: timestamp is True, not a time"),
    "lengths only": (
        "azure",
        [HEADERS["azure"], "XXX,4,1", ",5,1"],
        "TIMESTAMP holds no times: use workload.format 'lengths' with an arrival process",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_times_that_are_none_are_refused_in_one_sentence(tmp_path, case):
    fmt, lines, sentence = REFUSED[case]
    path = tmp_path / "bad.trace"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=sentence) as refused:
        requests_of(TraceWorkload(kind="trace", format=fmt, file=str(path)))
    assert str(path) in str(refused.value)


def test_a_unit_of_dates_is_refused(tmp_path):
    spec = write(tmp_path, "azure", [line("azure", "2023-11-16 18:15:46.68", 4, 1)], time_unit="ms")
    with pytest.raises(ValueError, match=r"workload.time_unit has no effect on the dates.*leave it out"):
        requests_of(spec)


def test_a_trace_of_a_third_of_a_year_is_read(tmp_path):
    """BurstGPT has 121 days."""
    spec = write(tmp_path, "burstgpt", [line("burstgpt", time, 4, 1) for time in (0, 121 * 86400)])
    assert requests_of(spec)[1].time == 121 * 86400
