"""What the executor makes of plans made by hand: forks, idle rows, bans, log-probabilities, swaps, other weights."""

from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from planned_requests import HandMade, chunk, plan, request

from paged_jax.execution.buckets import Bucket
from paged_jax.execution.jax_executor import JaxExecutor
from paged_jax.execution.plan import Fork, StepResult, Swap
from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.models.config import ModelConfig
from paged_jax.models.weights import dummy_decoder
from paged_jax.sampling.params import SamplingParams

FLOAT32 = jnp.dtype("float32")
MODEL = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
BLOCKS, SLOTS = 24, 4
PROMPT = (3, 1, 4, 1, 5, 9)
VOCAB = 16


class Rigged(nnx.Module):
    """Row t of `table` holds the logits that follow token t; two cache groups, whose pages nobody touches."""

    vocab_size = VOCAB
    cache_groups = (CacheGroup(1, 1, 2), CacheGroup(2, 2, 4, sliding_window=5))

    def __init__(self, table: np.ndarray) -> None:
        self.table = nnx.Param(jnp.asarray(table, jnp.float32))

    def __call__(self, token_ids, pages, batch, options):
        return self.table[...][token_ids].T, pages

    def logits(self, hidden):
        return hidden.T


def make_executor(model, **options) -> JaxExecutor:
    settings = {"num_blocks": BLOCKS, "block_size": 4, "max_request_len": 32, "max_num_seqs": SLOTS}
    settings |= {"buckets": (Bucket(2, 2), Bucket(16, SLOTS)), "kv_dtype": FLOAT32, "num_swap_blocks": 8}
    return JaxExecutor(model, **{**settings, **options})


@pytest.fixture(scope="module")
def executor() -> JaxExecutor:
    return make_executor(dummy_decoder(MODEL, 0, FLOAT32))


@pytest.fixture(scope="module")
def rigged() -> JaxExecutor:
    return make_executor(Rigged(np.zeros((VOCAB, VOCAB))))


def step(executor: JaxExecutor, **fields: object) -> StepResult:
    """Run a plan, and give its requests what it has computed."""
    made = plan(**fields)
    result = executor.submit(made).result()
    requests = [*made.decodes, *(p.request for p in made.chunks), *(fork.child for fork in made.forks)]
    for part in made.scheduled:
        part.request.num_computed_tokens = part.start + part.num_tokens
    for fork in made.forks:
        fork.child.num_computed_tokens = fork.parent.num_computed_tokens
    for planned, tokens in zip(requests, result.token_ids, strict=True):
        planned.token_ids += tokens
    return result


def prefill(executor: JaxExecutor, *requests: HandMade, **fields: object) -> StepResult:
    chunks = [chunk(r, 0, len(r.token_ids)) for r in requests]
    return step(executor, chunks=chunks, admitted=[*requests, *fields.pop("admitted", ())], **fields)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_forks_sample_what_separate_requests_would(executor, temperature):
    """One prompt for four samples, three of them forked: each goes on as if it had computed the prompt itself."""
    params = SamplingParams(temperature=temperature)
    alone = [request(PROMPT, 0, [20, 21, 22], seed=5, sample_index=i, sampling_params=params) for i in range(SLOTS)]
    for one in alone:
        prefill(executor, one)
        for _ in range(4):
            step(executor, decodes=[one])
    parent = request(PROMPT, 2, [5, 6], seed=5, sampling_params=params)
    children = [
        request(PROMPT, slot, seed=5, sample_index=i, sampling_params=params) for i, slot in ((1, 3), (2, 0), (3, 1))
    ]
    prefill(executor, parent, forks=[Fork(parent, child) for child in children], admitted=children)
    # the first block is shared by all; the second, half full, is copied for all but the last
    samples = [parent, *children]
    for own, child in enumerate(children, start=7):
        child.block_tables = (BlockTable([5, own, own + 6]),)
    parent.block_tables[0].block_ids.append(12)
    step(executor, decodes=samples, copies=([(6, 7), (6, 8), (6, 9)],))
    for _ in range(3):
        step(executor, decodes=samples)
    assert [r.token_ids for r in samples] == [r.token_ids for r in alone]
    assert len({tuple(r.token_ids) for r in samples}) == (1 if temperature == 0 else SLOTS)


def test_s18_forks_of_flat_logits_differ(rigged):
    rigged.update_weights(Rigged(np.zeros((VOCAB, VOCAB))))
    params = SamplingParams(temperature=1.0)
    parent = request([1], 0, [1], [1], seed=1, sampling_params=params)
    children = [request([1], i, seed=1, sample_index=i, sampling_params=params) for i in (1, 2)]
    result = prefill(rigged, parent, forks=[Fork(parent, c) for c in children], admitted=children)
    assert len(set(result.token_ids)) == 3
    tables = [(BlockTable([i]), BlockTable([i])) for i in (2, 3)]
    for child, own in zip(children, tables, strict=True):
        child.block_tables = own
    copies = ([(1, 2), (1, 3)],) * 2
    assert len(set(step(rigged, decodes=[parent, *children], copies=copies).token_ids)) > 1


def pages_but_null(executor: JaxExecutor) -> np.ndarray:
    (pages,) = executor._pages
    return np.asarray(pages).view(np.uint32).reshape(MODEL.num_layers, 1 + BLOCKS, -1)[:, 1:].copy()


def test_idle_rows_change_no_page_and_no_neighbour(executor):
    """A request that has ended computes on beside one that has not; its last token was never computed."""
    ended, alone, neighbour = (request(PROMPT, slot, [4 + 2 * slot, 5 + 2 * slot]) for slot in range(3))
    for one in (ended, alone, neighbour):
        prefill(executor, one)
    step(executor, decodes=[ended])
    step(executor, decodes=[alone])
    before = pages_but_null(executor)
    alone_next = step(executor, decodes=[alone]).token_ids
    changed = np.unique(np.nonzero(before != pages_but_null(executor))[1])
    np.testing.assert_array_equal(changed, [alone.block_tables[0].block_ids[1] - 1])
    step(executor, decodes=[neighbour])
    before = pages_but_null(executor)
    neighbour_next = step(executor, decodes=[neighbour], idle=[ended]).token_ids
    changed = np.unique(np.nonzero(before != pages_but_null(executor))[1])
    np.testing.assert_array_equal(changed, [neighbour.block_tables[0].block_ids[1] - 1])
    assert neighbour_next == alone_next
    before = pages_but_null(executor)
    prefill(executor, request((30, 31), 3, [20]), idle=[ended])
    changed = np.unique(np.nonzero(before != pages_but_null(executor))[1])
    np.testing.assert_array_equal(changed, [19])


def test_the_host_may_choose_the_newest_token(executor):
    chosen, same = request(PROMPT, 0, [1, 2], sampled_on_device=False), request((*PROMPT, 7), 1, [3, 4])
    prefill(executor, chosen)
    assert chosen.token_ids[-1] != 7
    chosen.token_ids[-1] = 7
    step(executor, decodes=[chosen])
    prefill(executor, same)
    assert chosen.token_ids == same.token_ids


@pytest.mark.parametrize("temperature", [0, 0.2])
def test_ending_tokens_wait_for_min_tokens(rigged, temperature):
    """The two most likely tokens end the request: the third comes until two tokens are out. Others may end."""
    logits = np.zeros(VOCAB)
    logits[[3, 8, 5]] = 90, 80, 70
    rigged.update_weights(Rigged(np.tile(logits, (VOCAB, 1))))
    fields = {"end_token_ids": frozenset({3, 8}), "seed": 4}
    held = SamplingParams(temperature=temperature, min_tokens=2)
    free = SamplingParams(temperature=temperature)
    requests = [request([1], i, [1 + i], [1 + i], sampling_params=p, **fields) for i, p in enumerate((held, free))]
    child = request([1], 2, sampling_params=held, **fields)
    prefill(rigged, *requests, forks=[Fork(requests[0], child)], admitted=[child])
    for _ in range(2):
        step(rigged, decodes=requests)
    assert [r.token_ids for r in requests] == [[1, 5, 5, 3], [1, 3, 3, 3]]
    assert child.token_ids == [1, 5]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = np.asarray(logits, np.float64)
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


def test_logprobs_are_those_of_the_model_row_by_row(rigged):
    """Before temperature, filters and bans; as many as each request wants; in the order of the result's tokens."""
    table = np.random.default_rng(0).normal(0, 3, (VOCAB, VOCAB)).astype(np.float32)
    rigged.update_weights(Rigged(table))
    expected = log_softmax(table)
    best = int(table[2].argmax())
    kinds = [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 2.0, "top_k": 4, "logprobs": 0},
        {"temperature": 0, "logprobs": 5, "min_tokens": 1},
        {"temperature": 1.0},
    ]
    decode, part, prompt, quiet = (
        request([i, 2], i, [1 + i], [1 + i], sampling_params=SamplingParams(**kind), end_token_ids=frozenset({best}))
        for i, kind in enumerate(kinds)
    )
    prefill(rigged, decode)
    made = {"decodes": [decode], "chunks": [chunk(part, 0, 1), chunk(prompt, 0, 2)]}
    result = step(rigged, **made, forks=[Fork(prompt, quiet)], admitted=[part, prompt, quiet])
    assert [len(tokens) for tokens in result.token_ids] == [1, 0, 1, 1]
    first, nothing, banned, unasked = result.logprobs
    assert nothing is None
    assert unasked is None
    check(first, decode.token_ids[-1], expected[decode.token_ids[-2]], 3)
    check(banned, prompt.token_ids[-1], expected[2], 5)
    assert first.rank == 1
    assert banned.rank == 2
    assert banned.top[0][0] == best
    result = step(rigged, chunks=[chunk(part, 1, 1)], decodes=[quiet])
    check(result.logprobs[1], part.token_ids[-1], expected[2], 0)
    assert result.logprobs[0] is None


def check(answer, token: int, row: np.ndarray, count: int) -> None:
    order = np.argsort(-row, kind="stable")
    assert answer.logprob == pytest.approx(row[token], abs=1e-5)
    assert answer.rank == 1 + (row > row[token]).sum()
    assert [t for t, _ in answer.top] == order[:count].tolist()
    assert [p for _, p in answer.top] == pytest.approx(row[order[:count]].tolist(), abs=1e-5)


def test_logprobs_that_nobody_wants_are_none(rigged):
    assert prefill(rigged, request([1, 2], 0, [1], [1])).logprobs is None
    without = make_executor(Rigged(np.zeros((VOCAB, VOCAB))), max_logprobs=0)
    params = SamplingParams(temperature=0, logprobs=2)
    assert prefill(without, request([1, 2], 0, [1], [1], sampling_params=params)).logprobs is None
    outputs = [e.compiled_step(Bucket(2, 2)).out_tree.num_leaves for e in (without, rigged)]
    assert outputs[0] + 4 == outputs[1], "log-probabilities are compiled although nobody can have them"


def test_at_most_the_vocabulary_is_reported(rigged):
    params = SamplingParams(temperature=0, logprobs=20)
    (answer,) = prefill(rigged, request([1, 2], 0, [1], [1], sampling_params=params)).logprobs
    assert len(answer.top) == VOCAB


def test_a_swapped_request_goes_on_as_if_nothing_had_happened(executor):
    """Its blocks are written by another request in the step that takes them; it comes back to other blocks and slot."""
    alone, moved = request(PROMPT, 0, [1, 2, 3]), request(PROMPT, 1, [4, 5, 6])
    for one in (alone, moved):
        prefill(executor, one)
        step(executor, decodes=[one])
    thief = request(range(10), 1, [4, 5, 6])
    prefill(executor, thief, swap_outs=[Swap(moved, ((4, 5, 6),), ((7, 0, 3),))])
    moved.slot, moved.block_tables = 3, (BlockTable([5, 9, 4]),)
    swap = Swap(moved, ((5, 9, 4),), ((7, 0, 3),))
    step(executor, decodes=[alone, moved], swap_ins=[swap], admitted=[moved])
    step(executor, decodes=[moved, alone])
    assert moved.token_ids == alone.token_ids


@contextmanager
def compilations():
    """A list that grows by one for each program that the backend compiles."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_after_warm_up_no_plan_compiles_anything():
    executor = make_executor(Rigged(np.zeros((VOCAB, VOCAB))), debug=True)
    with compilations() as seen:
        executor.warm_up()
    count = executor.num_compilations
    assert len(seen) >= count == 2 + 2 * (1 + 2 * 6)  # steps; per group poison, moves of 1, 2, 3, 4, 6 and 8
    params = SamplingParams(temperature=1.0, top_k=3, top_p=0.5, logprobs=3, min_tokens=2)
    fields = {"sampling_params": params, "end_token_ids": frozenset({1})}
    with compilations() as seen:
        for size in range(1, 9):
            first = request(range(size), 0, [1, 2], [1, 2], **fields)
            child = request(range(size), 1, **fields)
            prefill(executor, first, forks=[Fork(first, child)], admitted=[child], emptied_blocks=([9], [8, 7]))
            child.block_tables = (BlockTable([1, 3, 4]), BlockTable([0, 3, 4]))
            blocks = tuple(range(10, 10 + size)), tuple(range(10, 11 + size // 2))
            host = tuple(tuple(range(len(ids))) for ids in blocks)
            step(executor, decodes=[child], copies=([(2, 3)], [(2, 3)]), swap_outs=[Swap(first, blocks, host)])
            step(executor, decodes=[child], idle=[first], swap_ins=[Swap(first, blocks, host)], admitted=[first])
    assert seen == []
    assert executor.num_compilations == count


def test_other_weights_answer_as_their_own_executor_does(executor):
    other = dummy_decoder(MODEL, 1, FLOAT32)
    (expected,) = prefill(make_executor(other), request(PROMPT, 0, [1, 2])).token_ids
    try:
        (before,) = prefill(executor, request(PROMPT, 0, [1, 2])).token_ids
        with compilations() as seen:
            executor.update_weights(other)
            (after,) = prefill(executor, request(PROMPT, 0, [1, 2])).token_ids
        assert seen == []
        assert after == expected != before
    finally:
        executor.update_weights(dummy_decoder(MODEL, 0, FLOAT32))


@pytest.mark.parametrize(
    ("change", "dtype", "message"),
    [
        (
            {"intermediate_size": 32},
            "float32",
            r"layers.0.mlp.down_proj.weight' is float32\[16, 32\] in the new model, ",
        ),
        ({}, "bfloat16", r"embed_tokens.weight' is bfloat16\[40, 16\] in the new model, but float32\[40, 16\] in the"),
        ({"tie_word_embeddings": False}, "float32", "lm_head.weight' is in the new model only"),
        ({"num_layers": 1}, "float32", "layers.1.* is in the model that is loaded only"),
        ({"rope_theta": 7.0}, "float32", "computes differently"),
    ],
)
def test_weights_of_another_make_are_refused(executor, change, dtype, message):
    kept = executor._weights
    with pytest.raises(ValueError, match=message):
        executor.update_weights(dummy_decoder(replace(MODEL, **change), 1, jnp.dtype(dtype)))
    assert executor._weights is kept


def test_it_says_what_it_has(rigged):
    assert (rigged.num_blocks, rigged.num_swap_blocks) == (BLOCKS, 8)
    assert rigged.cache_groups == Rigged.cache_groups
