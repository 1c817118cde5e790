"""The published files themselves: row counts and means as their publishers and `../shared/README.md` give them."""

import itertools

import numpy as np
import pytest

from paged_jax.experiments.request_traces.lengths import read_lengths
from paged_jax.experiments.request_traces.mooncake import read_mooncake
from paged_jax.experiments.request_traces.spec import TraceWorkload
from paged_jax.experiments.request_traces.workload import trace_requests, workload_notes
from paged_jax.experiments.workloads import make_workload

FILES = {
    "conv": ("azure", "azure/AzureLLMInferenceTrace_conv.csv", {}, 19_366, 1155, 211),
    "code": ("azure", "azure/AzureLLMInferenceTrace_code.csv", {}, 8_819, 2048, 28),
    "sharegpt": ("lengths", "sharegpt/sharegpt_lengths.csv", {}, 58_787, 299, 324),
    "sharegpt to 2048": ("lengths", "sharegpt/sharegpt_lengths.csv", {"max_total_tokens": 2048}, None, 155, 318),
}


def spec_of(shared, fmt, file, **fields):
    return TraceWorkload(kind="trace", format=fmt, file=str(shared / "traces" / file), **fields)


@pytest.mark.parametrize("name", FILES)
def test_rows_and_means_of_lengths(shared, name):
    fmt, file, fields, rows, prompt, output = FILES[name]
    requests = trace_requests(spec_of(shared, fmt, file, **fields), 0, 32_000, None)
    assert rows in (None, len(requests))
    assert round(np.mean([len(r.prompt_token_ids) for r in requests])) == prompt
    assert round(np.mean([r.output_len for r in requests])) == output
    if "max_total_tokens" in fields:
        assert max(len(r.prompt_token_ids) + r.output_len for r in requests) <= fields["max_total_tokens"]
    if fmt == "azure":  # an hour, less what is not shown of it
        assert requests[0].time == 0
        assert 3400 < requests[-1].time < 3600
        assert all(a.time <= b.time for a, b in itertools.pairwise(requests))


def test_what_a_limit_drops_is_counted(shared):
    notes = workload_notes(spec_of(shared, "lengths", FILES["sharegpt"][1], max_total_tokens=2048))
    (dropped,) = (int(n.split(": ")[1].split()[0]) for n in notes if "of more than max_total_tokens (2048)" in n)
    kept = trace_requests(spec_of(shared, "lengths", FILES["sharegpt"][1], max_total_tokens=2048), 0, 97, None)
    assert dropped + len(kept) == 58_787


def test_arxiv(shared):
    rows = read_lengths(shared / "traces/arxiv/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv")
    assert len(rows) == 28_257
    assert round(np.mean([row.prompt_len for row in rows])) == 2588
    assert round(np.mean([row.output_len for row in rows])) == 291


def test_mooncake(shared):
    """Whole, its prompts take 1.2 GB: their lengths are those of the file, and a few are made."""
    rows = read_mooncake(shared / "traces/mooncake/conversation_trace.jsonl", None)
    assert len(rows) == 12_031
    assert round(np.mean([row.prompt_len for row in rows])) == 12_035
    assert round(np.mean([row.output_len for row in rows])) == 343
    assert max(row.time_ns for row in rows) == 3_536_999 * 10**6
    few = make_workload(
        spec_of(shared, "mooncake", "mooncake/conversation_trace.jsonl", max_requests=5), 0, None, 32_000
    )
    assert [len(a.prompt_token_ids) for a in few] == [6758, 7322, 7236, 2290, 6760]
    assert len({a.prompt_token_ids[:512] for a in few}) == 1, "all begin with block 0"
    assert len({a.prompt_token_ids[512:528] for a in few}) == 5, "and differ from there on"


@pytest.mark.parametrize(("file", "count"), [("mt_bench_question.jsonl", 80), ("gsm8k_test.jsonl", 1319)])
def test_prompts(shared, file, count):
    class Words:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [0] * len(text.split())

    output = {"law": "constant", "value": 8} if file.startswith("mt") else None
    spec = TraceWorkload(kind="trace", format="prompts", file=str(shared / "prompts" / file), output=output)
    requests = trace_requests(spec, 0, 97, Words())
    assert len(requests) == count
    assert (np.mean([r.output_len for r in requests]) == 8) == (output is not None)
