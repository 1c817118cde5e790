"""The benchmark of the scheduler: what it refuses before anything is measured, and what its columns add up to."""

import re
from collections.abc import Sequence

import pytest

from paged_jax.experiments.config import read_overrides
from paged_jax.experiments.scheduler_bench import SETTINGS, Row, Sample, rows, table

REFUSED = [
    ("max_num_seqs=2", "max_num_seqs is chosen here so that all requests of a row fit: leave it out"),
    ("max_num_batched_tokens=64", "max_num_batched_tokens is chosen here"),
    ("num_blocks=9", "num_blocks is chosen here"),
    ("max_model_len=64", "max_model_len is chosen here"),
    ("block_size=8", "block_size has a flag of its own here: use --block-size"),
    ("trace_file=x", "trace_file has no effect in this benchmark, which has no model and no device: leave it out"),
    ("dtype=float32", "dtype has no effect in this benchmark"),
    ("layer_loop=scanned", "layer_loop has no effect in this benchmark"),
    ("seed=1", "seed has no effect in this benchmark"),
    ("eviction=lfo", "unknown eviction 'lfo'; did you mean 'lfu'?"),
    ("evction=lfu", "unknown key 'evction'; did you mean 'eviction'?"),
    ("watermark=2", "watermark: input should be less than 1, got 2 (in the setting 'default policies')"),
    ("allocator=reserve_max", "(in the setting 'priorities, radix tree, swap, n=4')"),
]


def planned(*overrides: str, running: Sequence[int] = (4,)) -> list[Row]:
    return rows(running, prompt_len=20, block_size=4, repeats=2, overrides=read_overrides(overrides))


@pytest.mark.parametrize(("override", "sentence"), REFUSED)
def test_what_cannot_be_measured_is_refused_before_anything_is(override: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        planned(override)
    assert "\n" not in str(caught.value)


def test_every_row_is_measured_and_its_columns_add_up() -> None:
    measured = [(row, row.samples()) for row in planned(running=(4, 8)) if "32,768" not in row.work]
    assert [(row.setting, row.num_requests) for row, _ in measured] == [
        (setting, number) for setting in SETTINGS for number in (4, 8, 1)
    ]
    for row, samples in measured:
        assert len(samples) == (16 if row.is_admission else 2)
        assert all(sample.launch > 0 and sample.booking > 0 for sample in samples)
        assert all((sample.door > 0) == row.is_admission for sample in samples)
    lines = table(measured).splitlines()
    assert lines[0].split("  ")[-1] == "per request"
    for line in lines:
        cells = line.replace(",", "").split()[-7:]
        if not line.startswith("  ") or "us" in cells or "door" in line:
            continue
        door, launch, booking, scheduler, total, _, _ = (0.0 if cell == "-" else float(cell) for cell in cells)
        assert launch + booking == pytest.approx(scheduler, abs=0.11)
        assert door + scheduler == pytest.approx(total, abs=0.11)


def test_the_sample_with_the_smallest_total_is_shown() -> None:
    row = planned()[0]
    text = table([(row, [Sample(5.0, 7.0), Sample(4.0, 2.0), Sample(1.0, 9.0)])])
    assert text.splitlines()[-1].split()[-7:] == ["-", "4.0", "2.0", "6.0", "6.0", "10.0", "1.50"]


def test_settings_that_an_override_leaves_unread_are_dropped() -> None:
    assert len(planned("preemption_mode=recompute")) == 6


def test_requests_that_are_held_back_end_the_benchmark_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="of 4 requests run at once under these settings: leave out what holds"):
        planned("watermark=0.9")[0].samples()
