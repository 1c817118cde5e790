"""Where two runs part: the step worked out by hand, both sides of it, and what it amounts to."""

from pathlib import Path

from host_executor import host_engine
from recorded_runs import served, three

from paged_jax.engine.engine import Arrival
from paged_jax.experiments.trace import Trace
from paged_jax.experiments.trace_diff import diff
from paged_jax.experiments.what_if import what_if
from paged_jax.sampling.params import SamplingParams


def test_first_come_first_served_and_shortest_job_first_part_where_the_second_is_admitted(tmp_path: Path) -> None:
    """All wait behind the first; its last step is step 3, and step 4 admits the second or the third."""
    arrivals = [
        Arrival(0.0, "first", (1, 2), SamplingParams(max_tokens=3), expected_output_len=3),
        Arrival(1.0, "long", (3, 4), SamplingParams(max_tokens=6), expected_output_len=6),
        Arrival(1.0, "short", (5, 6), SamplingParams(max_tokens=2), expected_output_len=2),
    ]
    a = served(tmp_path / "a.jsonl", arrivals, max_num_seqs=1, prefix_cache="none")
    what_if(a, ["scheduling_policy=sjf", "length_predictor=oracle"], str(tmp_path / "b.jsonl"))
    text = diff(a, Trace(str(tmp_path / "b.jsonl")))
    assert (
        text.partition("from step 4 on")[0]
        == f"""\
A: {tmp_path}/a.jsonl
B: {tmp_path}/b.jsonl
settings that differ, A | B:
  scheduling_policy: fcfs | sjf
  length_predictor: None | oracle
the same 3 requests arrive

step 3, the same in both:
  starts at         2 s
  tokens            1
  decodes           first
  sampled           first 50
  finished          first (length, 3 tokens)

step 4, where they part:
  starts at         3 s
  blocks         A  long [1] from number 0
                 B  short [1] from number 0
  tokens            2
  chunks         A  long (2 tokens from 0)
                 B  short (2 tokens from 0)
  admitted       A  long (slot 0)
                 B  short (slot 0)
  sampled        A  long 50
                 B  short 50

"""
    )
    later, overall = (table.split("\n\n")[1] for table in text.split("from step 4 on")[1].split("over all"))
    rows = [
        {line.rsplit(maxsplit=3)[0].strip(): line.split()[-3:] for line in t.splitlines()} for t in (later, overall)
    ]
    assert rows[0]["steps"] == ["8", "8", "0"]
    assert rows[1]["steps"] == ["11", "11", "0"]
    assert rows[0]["tokens computed"] == ["10", "10", "0"]  # 2 + 5 and 2 + 1
    assert rows[0]["mean wait (s)"] == ["5", "3", "-2"]  # 2 and 8; 2 and 4
    assert rows[0]["longest wait (s)"] == ["8", "4", "-4"]
    assert rows[1]["longest wait (s)"] == ["8", "4", "-4"]
    assert rows[0]["requests finished"] == ["2", "2", "0"]
    assert rows[1]["requests finished"] == ["3", "3", "0"]
    assert rows[1]["time (s)"] == ["11", "11", "0"]


def test_equal_traces(tmp_path: Path) -> None:
    a, b = three(tmp_path / "a.jsonl"), three(tmp_path / "b.jsonl")
    text = diff(a, b)
    assert "the settings are the same\nthe same 3 requests arrive\n\nall 12 steps are the same\n\nover all\n" in text
    assert "where they part" not in text


def test_different_arrivals(tmp_path: Path) -> None:
    def arrivals(*names: str, max_tokens: int = 2) -> list[Arrival]:
        return [Arrival(0.0, name, (1, 2), SamplingParams(max_tokens=max_tokens), priority=1) for name in names]

    a = served(tmp_path / "a.jsonl", [*arrivals("x", "y"), *arrivals("z")])
    b = served(tmp_path / "b.jsonl", [*arrivals("x", "w"), *arrivals("z", max_tokens=3)])
    assert (
        "different requests arrive (3 in A, 3 in B):\n"
        "  'y' arrives only in A\n  'z' has another params\n  'w' arrives only in B\n"
    ) in diff(a, b)


def test_a_run_that_ends_before_the_other(tmp_path: Path) -> None:
    whole = three(tmp_path / "a.jsonl")
    path = tmp_path / "b.jsonl"
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    sixth = next(index for index, line in enumerate(lines) if '"step":7' in line)
    path.write_text("".join(lines[:sixth]) + '{"event":"st')
    text = diff(whole, Trace(str(path)))
    assert f"note: the last line of {path} is torn, and left out\n" in text
    assert "step 7 (B has ended), where they part:\n" in text


def test_block_ids_and_preemptions_count_and_are_shown(tmp_path: Path) -> None:
    arrivals = [Arrival(0.0, name, (n,) * 4, SamplingParams(max_tokens=9)) for n, name in enumerate("ab")]
    a = served(tmp_path / "a.jsonl", arrivals, num_blocks=4)
    b = served(tmp_path / "b.jsonl", arrivals, num_blocks=4, victim_policy="victim_policies:FirstArrivedVictim")
    text = diff(a, b)
    assert "  preempted      A  b (recompute)\n                 B  a (recompute)\n" in text
    path = tmp_path / "c.jsonl"
    path.write_text((tmp_path / "a.jsonl").read_text().replace('"id":"b","blocks":[[2]]', '"id":"b","blocks":[[3]]'))
    assert "  blocks         A  a [1] from number 0, b [2] from number 0\n" in diff(a, Trace(str(path)))


def test_samples_copies_beams_and_swaps_are_put_into_words(tmp_path: Path) -> None:
    engine = host_engine(trace_file=str(tmp_path / "a.jsonl"))
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=3, temperature=1, n=2, seed=1))
    while engine.has_unfinished_requests():
        engine.step()
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    second = next(index for index, line in enumerate(lines) if '"step":2' in line)
    (tmp_path / "b.jsonl").write_text("".join(lines[:second]))
    text = diff(Trace(str(tmp_path / "a.jsonl")), Trace(str(tmp_path / "b.jsonl")))
    assert "  forks             a/1\n" in text
    assert "  admitted          a (slot 0), a/1 (slot 1)\n" in text
    assert "  copied         A  1 to 2\n                 B  -\n" in text
