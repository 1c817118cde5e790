"""Beam searches: by hand, and inside the engine against a search that looks at the whole vocabulary at every step."""

import math
from dataclasses import dataclass, field

import pytest
from host_executor import beam_logprobs, host_engine
from policy_grid import cache_groups
from requests_alone import beams_alone
from watcher import Watcher

from paged_jax.engine.beam_search import BeamSearch
from paged_jax.engine.engine import Engine
from paged_jax.execution.plan import TokenLogprobs
from paged_jax.sampling.params import BeamSearchParams, SamplingParams

EOS = tuple(range(2, 97, 9))
"""Eleven of 97 tokens, so that most searches see some among their candidates."""


@dataclass(eq=False)
class Beam:
    """What a search asks of a request."""

    output_token_ids: list[int] = field(default_factory=list)


def offer(search: BeamSearch, beam: Beam, **probabilities: float) -> None:
    """Tokens t0, t1, ... and how likely they are, in the order given, which is from the most likely on."""
    top = tuple((int(name[1:]), math.log(p)) for name, p in probabilities.items())
    search.offer(beam, TokenLogprobs(top[0][1], 1, top))


def search_by_hand(length_penalty: float) -> list[tuple[tuple[int, ...], str, float]]:
    """Two beams, three tokens, of which 9 ends it."""
    params = BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=length_penalty)
    search = BeamSearch(params, frozenset([9]), 3)
    a, b = Beam(), Beam()
    search.beams = [a]
    offer(search, a, t1=0.5, t2=0.3, t9=0.15)
    assert search.is_ready
    assert search.choose() == [(a, 1), (a, 2)]
    a.output_token_ids, b.output_token_ids = [1], [2]
    search.continue_with([a, b])
    offer(search, a, t9=0.6, t1=0.3, t2=0.1)
    assert not search.is_ready
    offer(search, b, t1=0.7, t2=0.2, t9=0.1)
    assert search.is_ready
    # 1 1: 0.15, 1 2: 0.05, 2 1: 0.21, 2 2: 0.06
    assert search.choose() == [(b, 1), (a, 1)]
    b.output_token_ids, a.output_token_ids = [2, 1], [1, 1]
    search.continue_with([b, a])
    offer(search, b, t1=0.5, t9=0.4, t2=0.1)
    offer(search, a, t2=0.9, t9=0.05, t1=0.05)
    # 2 1 1: 0.105, 2 1 2: 0.021, 1 1 2: 0.135, 1 1 1: 0.0075
    assert search.choose() == [(a, 2), (b, 1)]
    assert search.is_finished
    return [(best.token_ids, best.finish_reason, math.exp(best.cumulative_logprob)) for best in search.best()]


@pytest.mark.parametrize(
    ("length_penalty", "best"),
    [
        # ended: nothing 0.15, 1: 0.3, 2: 0.03, 2 1: 0.084, 1 1: 0.0075; at the end 1 1 2: 0.135, 2 1 1: 0.105
        (0.0, [((1,), "stop", 0.3), ((), "stop", 0.15)]),
        # logarithms by length: 1: -1.20, 1 1 2: -0.67, 2 1 1: -0.75
        (1.0, [((1, 1, 2), "length", 0.135), ((2, 1, 1), "length", 0.105)]),
        # a penalty below 0 prefers short ones: nothing and 1 keep theirs, others grow worse with their length
        (-1.0, [((1,), "stop", 0.3), ((), "stop", 0.15)]),
    ],
)
def test_a_search_by_hand(length_penalty: float, best: list[tuple[tuple[int, ...], str, float]]) -> None:
    found = search_by_hand(length_penalty)
    assert [(tokens, reason) for tokens, reason, _ in found] == [(tokens, reason) for tokens, reason, _ in best]
    assert [p for *_, p in found] == pytest.approx([p for *_, p in best])


def make(**fields: object) -> tuple[Engine, Watcher]:
    engine = host_engine(**{"max_num_seqs": 6, "eos_token_ids": EOS, **fields})
    return engine, Watcher(engine)


def beams(width: int, length: int, penalty: float = 1.0, ignore_eos: bool = False) -> BeamSearchParams:
    return BeamSearchParams(beam_width=width, max_tokens=length, length_penalty=penalty, ignore_eos=ignore_eos)


@pytest.mark.parametrize("length", range(1, 7))
@pytest.mark.parametrize("width", range(1, 5))
def test_searches_of_all_sizes(width: int, length: int) -> None:
    # the watcher compares each with `beams_alone`
    _, watcher = make(num_blocks=128)
    for penalty in (-1.0, 0.0, 0.7, 1.0, 2.0):
        for first in (0, 30, 60):
            for ignore_eos in (False, True):
                watcher.add(range(first, first + 7), beams(width, length, penalty, ignore_eos))
    watcher.drain()
    reasons = {h.finish_reason for e in watcher.ended for h in e.leader.beam_search.best()}
    assert reasons == ({"stop", "length"} if width * length > 1 else {"length"})
    assert all(len(e.leader.beam_search.best()) == width for e in watcher.ended)


def test_the_oracle_is_greedy_with_one_beam_and_exhaustive_with_as_many_as_there_are_tokens() -> None:
    prompt = (1, 2, 3)
    tokens: list[int] = []
    for _ in range(5):
        tokens.append(beam_logprobs((*prompt, *tokens))[0][0])
    assert beams_alone(prompt, beams(1, 5, ignore_eos=True), 64)[0][0] == tuple(tokens)
    pairs = [(a + b, (s, t)) for s, a in beam_logprobs(prompt) for t, b in beam_logprobs((*prompt, s))]
    widest = beams_alone(prompt, beams(97, 2, 0.0, ignore_eos=True), 64)
    assert [found[0] for found in widest] == [pair for _, pair in sorted(pairs, key=lambda p: -p[0])[:97]]


@pytest.mark.parametrize("pool_tokens", [16, 24, 32, 200])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_cache", ["none", "hash", "radix"])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_searches_in_little_memory(block_size: int, prefix_cache: str, mode: str, pool_tokens: int) -> None:
    num_blocks = max(1, pool_tokens // block_size)
    swap = {"num_swap_blocks": 64} if mode == "swap" else {}
    engine, watcher = make(
        block_size=block_size, num_blocks=num_blocks, prefix_cache=prefix_cache, preemption_mode=mode, **swap
    )
    watcher.add(range(8), beams(4, 6))
    watcher.add(range(40, 46), SamplingParams(max_tokens=9, ignore_eos=True))
    watcher.add((*range(8), 50), beams(3, 5, 0.5))
    watcher.add(range(60, 65), SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True))
    watcher.drain()
    plans = engine.executor.plans
    preempted = sum(len(plan.preempted) for plan in plans)
    swapped = sum(len(plan.swap_outs) for plan in plans)
    assert (preempted > 0) == (pool_tokens < 200)
    assert swapped == 0 or mode == "swap"


@pytest.mark.parametrize("allocator", ["paged", "reserve_max", "reserve_pow2", "reserve_oracle"])
@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("windows", ["full", "full+windowed", "windowed"])
@pytest.mark.parametrize("budget_order", ["decode_first", "prefill_first"])
def test_searches_under_other_policies(allocator: str, batching: str, windows: str, budget_order: str) -> None:
    _, watcher = make(
        allocator=allocator,
        batching=batching,
        budget_order=budget_order,
        groups=cache_groups({"windows": windows}),
        num_blocks=16,
        max_model_len=16,
        max_num_batched_tokens=7,
    )
    for first in (0, 20, 40):
        watcher.add(range(first, first + 8), beams(3, 6))
        watcher.add(range(first + 3, first + 8), SamplingParams(max_tokens=5, ignore_eos=True))
    watcher.drain()


def test_beams_share_their_beginnings() -> None:
    engine, watcher = make(prefix_cache="none", eos_token_ids=())
    x = watcher.add(range(8), beams(3, 5))
    pool = engine.scheduler.kv_cache.pools[0]

    def tables() -> list[list[int]]:
        return [list(r.block_tables[0].block_ids) for r in x.leader.samples]

    watcher.step()
    assert tables() == [[1, 2]] * 3
    assert [pool.ref_count(block) for block in (1, 2)] == [3, 3]
    assert pool.num_in_use == 2
    outputs = [tuple(r.output_token_ids) for r in x.leader.samples]
    assert len(set(outputs)) == 3  # the same prompt, and three different tokens
    watcher.step()
    # each has computed its own token in a block of its own; a beam that goes on twice shares that, too
    in_use = {block for table in tables() for block in table}
    assert pool.num_in_use == len(in_use) == 2 + len({tuple(r.token_ids[:9]) for r in x.leader.samples})
    for _ in range(2):
        watcher.step()
        prefixes = {tuple(r.token_ids[: r.num_computed_tokens]) for r in x.leader.samples}
        blocks = {table[2] for table in tables()}
        assert all(table[:2] == [1, 2] for table in tables())
        assert len(prefixes) <= len(blocks) <= 3
    watcher.drain()
    assert any(pairs for plan in engine.executor.plans for pairs in plan.copies)


def test_a_search_that_ends_with_its_first_token_reports_all_its_beams() -> None:
    _, watcher = make()
    x = watcher.add(range(9), beams(3, 1))
    watcher.step()
    assert set(x.delivered) == set(x.leader.samples)
    watcher.drain()
