"""Beam search on the tiny model against its definition, alone and in pools that are too small for all beams."""

from functools import cache

import pytest
from host_executor import VOCAB_SIZE, check_accounting, drain
from tiny_engines import MakeEngine, Windows, best_beams, greedy, make_reference

from paged_jax.engine.request import Request
from paged_jax.sampling.params import BeamSearchParams

PARAMS = [
    BeamSearchParams(beam_width=2, max_tokens=5),
    BeamSearchParams(beam_width=3, max_tokens=4, length_penalty=0.0),
    BeamSearchParams(beam_width=3, max_tokens=7, length_penalty=1.5),
    BeamSearchParams(beam_width=2, max_tokens=1),
    BeamSearchParams(beam_width=1, max_tokens=6),
    BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True),
]
EOS = (31, 62)

type Case = tuple[tuple[int, ...], BeamSearchParams, list[tuple[tuple[int, ...], str, float]]]


@cache
def _cases(windows: Windows) -> list[Case]:
    """Searches that hang on no near tie; the first has a beam that ends early."""
    reference, cases = make_reference(windows), []
    for i, params in enumerate(PARAMS):
        ends = () if params.ignore_eos else EOS
        for first in range(VOCAB_SIZE):
            prompt = tuple((first + 7 * j + i) % VOCAB_SIZE for j in range(5 + 3 * i))
            try:
                expected = best_beams(reference, prompt, params, ends)
            except AssertionError:
                continue
            if i > 1 or any(reason == "stop" for _, reason, _ in expected):
                cases.append((prompt, params, expected))
                break
    assert len(cases) == len(PARAMS)
    return cases


def _check(leader: Request, expected: list[tuple[tuple[int, ...], str, float]]) -> None:
    found = leader.beam_search.best()
    assert [(beam.token_ids, beam.finish_reason) for beam in found] == [beam[:2] for beam in expected]
    for beam, (_, _, total) in zip(found, expected, strict=True):
        assert abs(beam.cumulative_logprob - total) < 1e-4 * max(1, len(beam.token_ids))
    assert all(sample.is_finished for sample in leader.samples)


@pytest.mark.parametrize("windows", ["full", "full+windowed"])
def test_beams_are_those_of_the_definition(tiny_engine: MakeEngine, windows: Windows) -> None:
    engine = tiny_engine(windows=windows, eos_token_ids=EOS)
    for _ in range(2):  # the second time with cached prompts
        for prompt, params, expected in _cases(windows):
            leader = engine.add_request("beams", prompt, params)
            drain(engine)
            _check(leader, expected)
    assert sum(len(pairs) for plan in engine.executor.plans for pairs in plan.copies), "no beam was ever forked"


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"preemption_mode": "swap", "num_swap_blocks": 40, "prefix_cache": "none"},
        {"prefix_cache": "radix", "victim_policy": "most_blocks", "budget_order": "prefill_first"},
        {"scheduling_policy": "srpt", "preemption_mode": "auto", "num_swap_blocks": 4, "eviction": "lfu"},
        {"batching": "static", "victim_policy": "fewest_tokens_lost"},
    ],
    ids=str,
)
def test_beams_in_a_pool_that_is_too_small(tiny_engine: MakeEngine, fields: dict[str, object], block_size: int) -> None:
    engine = tiny_engine(
        block_size=block_size,
        num_blocks={1: 26, 3: 10, 4: 7}[block_size],
        max_num_seqs=6,
        max_num_batched_tokens=9,
        eos_token_ids=EOS,
        **fields,
    )
    cases = _cases("full")
    reference = make_reference()
    mates = reference.prompts([5, 9], seed=4, count=10)
    leaders = [engine.add_request(f"beams-{i}", case[0], case[1]) for i, case in enumerate(cases)]
    requests = [engine.add_request(str(i), prompt, greedy(10), priority=-1) for i, prompt in enumerate(mates)]
    idle = 0
    while engine.has_unfinished_requests():
        before = engine.last_step
        # a step may do no more than let a beam give way that waits for the others
        idle = 0 if engine.step() or engine.last_step is not before else idle + 1
        assert idle < 4, "nothing goes on"
        check_accounting(engine)
    for leader, (*_, expected) in zip(leaders, cases, strict=True):
        _check(leader, expected)
    for prompt, request in zip(mates, requests, strict=True):
        tokens = reference.greedy(prompt, 10)
        end = next((i + 1 for i, token in enumerate(tokens) if token in EOS), 10)
        assert request.output_token_ids == tokens[:end]
    preempted = sum(beam.metrics.num_preemptions for leader in leaders for beam in leader.samples)
    assert preempted, "no beam had to give way: this tests nothing"
    if fields.get("preemption_mode") == "swap":
        assert any(plan.swap_ins for plan in engine.executor.plans)
