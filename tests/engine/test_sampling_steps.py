"""Randomness across steps, on a rigged model whose logits are a table: failure modes G19 and G20."""

from collections.abc import Callable, Sequence
from math import exp

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from host_executor import drain
from tiny_engines import PoolView, run

from paged_jax.config import EngineConfig
from paged_jax.engine.clock import VirtualClock
from paged_jax.engine.engine import Engine
from paged_jax.execution.buckets import Bucket
from paged_jax.execution.jax_executor import JaxExecutor
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.sampling.params import SamplingParams

VOCAB = 16
MAX_LEN = 300


class RiggedModel(nnx.Module):
    """Row t of `table` holds the logits that follow token t; the pages are carried along and never used."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = nnx.Param(jnp.asarray(table, jnp.float32))

    vocab_size = VOCAB
    cache_groups = (CacheGroup(num_layers=1, num_kv_heads=1, head_dim=2),)

    def __call__(self, token_ids, pages, batch, options):
        return self.table[...][token_ids].T, pages

    def logits(self, hidden):
        return hidden.T


@pytest.fixture(scope="module")
def rigged_executor() -> Callable[[np.ndarray], JaxExecutor]:
    """The executor of a rigged model, compiled once for all tables: they are its weights."""
    executor = JaxExecutor(
        RiggedModel(np.zeros((VOCAB, VOCAB))),
        num_blocks=120,
        block_size=16,
        max_request_len=MAX_LEN,
        max_num_seqs=6,
        buckets=(Bucket(8, 6),),
        kv_dtype=jnp.dtype("float32"),
    )
    executor.warm_up()

    def with_table(table: np.ndarray) -> JaxExecutor:
        _, executor._weights = nnx.split(RiggedModel(table))
        return executor

    return with_table


def _engine(executor: JaxExecutor, seed: int = 0, eos_token_ids: Sequence[int] = ()) -> Engine:
    return Engine(
        EngineConfig(max_num_seqs=6, max_num_batched_tokens=8, seed=seed),
        PoolView(executor, executor.num_blocks),
        clock=VirtualClock(),
        tokenizer=None,
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        eos_token_ids=eos_token_ids,
    )


def test_g19_every_step_draws_anew(rigged_executor: Callable[[np.ndarray], JaxExecutor]) -> None:
    executor = rigged_executor(np.zeros((VOCAB, VOCAB)))
    engine = _engine(executor)
    compilations = executor.num_compilations
    params = SamplingParams(temperature=1.0, max_tokens=256)
    (request,) = run(engine, ((1, 2), params))
    counts = np.bincount(request.output_token_ids, minlength=VOCAB)
    chi_square = float(np.sum((counts - 16) ** 2 / 16))
    assert 2.4 < chi_square < 44.3  # the 1e-4 tails for 15 degrees of freedom
    # a key that comes round again would repeat the sequence
    halves = request.output_token_ids[:128], request.output_token_ids[128:]
    assert halves[0] != halves[1]

    (again,) = run(engine, ((1, 2), params))
    assert again.output_token_ids != request.output_token_ids
    batch = run(engine, ((1, 2), params), ((1, 2), params))
    assert batch[0].output_token_ids != batch[1].output_token_ids
    seeded = SamplingParams(temperature=1.0, max_tokens=256, seed=11)
    (first,), (second,) = run(engine, ((1, 2), seeded)), run(engine, ((1, 2), seeded))
    assert first.output_token_ids == second.output_token_ids
    assert executor.num_compilations == compilations


def test_g20_seed_holds_whatever_the_batch_mates_do(
    rigged_executor: Callable[[np.ndarray], JaxExecutor],
) -> None:
    table = np.random.default_rng(0).normal(0, 1.5, (VOCAB, VOCAB))
    executor = rigged_executor(table)
    a = ((3, 4), SamplingParams(temperature=0.8, seed=42, max_tokens=16))
    unseeded = ((3, 4), SamplingParams(temperature=0.8, max_tokens=16))
    seeded = ((5,), SamplingParams(temperature=0.8, seed=7, max_tokens=16))
    greedy = ((5,), SamplingParams(temperature=0, max_tokens=16))
    filtered = ((6, 7), SamplingParams(temperature=2.0, top_k=3, top_p=0.5, max_tokens=16))
    (alone,) = run(_engine(executor), a)
    expected = alone.output_token_ids
    assert len(set(expected)) > 1
    for seed in range(4):  # of the engine: B's tokens differ from run to run
        assert run(_engine(executor, seed), a, unseeded)[0].output_token_ids == expected
    assert run(_engine(executor), a, seeded)[0].output_token_ids == expected
    last = run(_engine(executor), unseeded, seeded, greedy, filtered, unseeded, a)[-1]
    assert last.output_token_ids == expected

    engine = _engine(executor)
    for i, mate in enumerate((unseeded, greedy, filtered)):
        engine.add_request(f"mate-{i}", *mate)
    for _ in range(5):
        engine.step()
    joined = engine.add_request("a", *a)
    engine.step()
    assert joined.slot == 3
    drain(engine)
    assert joined.output_token_ids == expected


def test_sampled_frequencies_are_those_of_the_softmax(
    rigged_executor: Callable[[np.ndarray], JaxExecutor],
) -> None:
    logits = np.log(np.arange(1, VOCAB + 1))
    executor = rigged_executor(np.tile(logits, (VOCAB, 1)))
    params = [SamplingParams(temperature=0.5, max_tokens=256, seed=seed) for seed in range(6)]
    requests = run(_engine(executor), *(((0,), own) for own in params))
    counts = np.bincount(np.ravel([r.output_token_ids for r in requests]), minlength=VOCAB)
    weights = np.array([exp(2 * x) for x in logits])
    wanted = counts.sum() * weights / weights.sum()
    assert float(np.sum((counts - wanted) ** 2 / wanted)) < 44.3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_s09_min_tokens_and_ignore_eos_know_every_eos(
    rigged_executor: Callable[[np.ndarray], JaxExecutor], temperature: float
) -> None:
    """Of two ends of sequence the second is always by far the most likely, then the first."""
    first_eos, second_eos, runner_up = 2, 9, 5
    table = np.zeros((VOCAB, VOCAB))
    table[:, second_eos], table[:, first_eos], table[:, runner_up] = 90, 60, 30
    engine = _engine(rigged_executor(table), eos_token_ids=(first_eos, second_eos))

    def outputs(**fields: object) -> tuple[list[int], str]:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=7, **fields)
        (request,) = run(engine, ((3,), params))
        return request.output_token_ids, request.finish_reason

    assert outputs() == ([second_eos], "stop")
    assert outputs(min_tokens=1) == ([runner_up, second_eos], "stop")
    assert outputs(min_tokens=5) == ([runner_up] * 5 + [second_eos], "stop")
    assert outputs(min_tokens=7) == ([runner_up] * 7, "length")
    assert outputs(ignore_eos=True) == ([second_eos] * 7, "length")
    # a stop token of its own still counts, and is still kept back
    assert outputs(ignore_eos=True, stop_token_ids=[second_eos]) == ([second_eos], "stop")
    assert outputs(ignore_eos=True, stop_token_ids=[second_eos], min_tokens=2) == (
        [first_eos] * 2 + [second_eos],
        "stop",
    )


def test_s18_samples_of_one_seed_differ_and_come_again(rigged_executor: Callable[[np.ndarray], JaxExecutor]) -> None:
    executor = rigged_executor(np.zeros((VOCAB, VOCAB)))
    params = SamplingParams(n=3, seed=1, max_tokens=16)

    def samples(engine: Engine) -> list[list[int]]:
        (leader,) = run(engine, ((1, 2), params))
        return [sample.output_token_ids for sample in leader.samples]

    engine = _engine(executor)
    first = samples(engine)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert samples(engine) == first
    assert samples(_engine(executor, seed=5)) == first
    # the first of them is what a single sample is
    (single,) = run(engine, ((1, 2), SamplingParams(seed=1, max_tokens=16)))
    assert single.output_token_ids == first[0]
    (other,) = run(engine, ((1, 2), SamplingParams(n=3, seed=2, max_tokens=16)))
    assert not {tuple(sample.output_token_ids) for sample in other.samples} & {tuple(tokens) for tokens in first}
