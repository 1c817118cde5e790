"""Sampling on the device: G19, G20 and G21 for the sampler, and the filters against sorting on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling.sampler import NEXT_TOKEN, _draw_key, _filtered_probabilities, ban, sample
from paged_jax.sampling.seeds import seed_words
from paged_jax.sampling.state import SamplingState, admit, gather, init_sampling_state, record

jitted_sample = jax.jit(sample, static_argnames="purpose")
jitted_admit = jax.jit(admit)
jitted_filters = jax.jit(_filtered_probabilities)


def make_rows(seeds, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> SamplingState:
    n = len(seeds)
    return SamplingState(
        key_data=jnp.asarray([seed_words(int(s)) for s in seeds], jnp.uint32),
        temperature=jnp.asarray(np.broadcast_to(temperature, n), jnp.float32),
        top_k=jnp.asarray(np.broadcast_to(top_k, n), jnp.int32),
        top_p=jnp.asarray(np.broadcast_to(top_p, n), jnp.float32),
        min_p=jnp.asarray(np.broadcast_to(min_p, n), jnp.float32),
        last_token=jnp.zeros(n, jnp.int32),
    )


def draw(logits, rows, positions=0, sample_index=0, purpose=NEXT_TOKEN) -> np.ndarray:
    n = rows.top_k.shape[0]
    index = jnp.asarray(np.broadcast_to(sample_index, n), jnp.int32)
    return np.asarray(
        jitted_sample(
            jnp.asarray(logits),
            rows,
            index,
            jnp.asarray(np.broadcast_to(positions, n), jnp.int32),
            purpose=purpose,
        )
    )


def draws(logits_row, count, seed=5, **params) -> np.ndarray:
    """Many draws from one distribution: one request's consecutive positions, side by side as rows."""
    logits = np.broadcast_to(np.asarray(logits_row, np.float32), (count, len(logits_row)))
    return draw(logits, make_rows([seed] * count, **params), positions=np.arange(count))


def chi_square(tokens, probabilities) -> float:
    expected = probabilities * len(tokens)
    observed = np.bincount(tokens, minlength=len(probabilities))
    assert not observed[expected == 0].any()
    return float((((observed - expected) ** 2)[expected > 0] / expected[expected > 0]).sum())


def test_g19_positions_give_fresh_randomness_and_seeds_reproduce_it():
    flat = np.zeros(16, np.float32)
    first = draws(flat, 256, seed=11)
    assert chi_square(first, np.full(16, 1 / 16)) < 44.3  # the 1e-4 tail for 15 degrees of freedom
    np.testing.assert_array_equal(first, draws(flat, 256, seed=11))
    assert (first != draws(flat, 256, seed=12)).mean() > 0.8
    # both words of the seed count, and so do the sample's index and the purpose
    assert (first != draws(flat, 256, seed=11 + 2**32)).mean() > 0.8
    rows = make_rows([11] * 256)
    logits = np.broadcast_to(flat, (256, 16))
    np.testing.assert_array_equal(first, draw(logits, rows, np.arange(256)))
    assert (first != draw(logits, rows, np.arange(256), sample_index=1)).mean() > 0.8
    assert (first != draw(logits, rows, np.arange(256), purpose=1)).mean() > 0.8


def test_g19_no_compilation_for_other_parameters():
    traces = []

    @jax.jit
    def counted(*args):
        traces.append(None)
        return sample(*args)

    logits, zeros = jnp.zeros((3, 50)), jnp.zeros(3, jnp.int32)
    for params in ({}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}):
        counted(logits, make_rows([1, 2, 3], **params), zeros, zeros + 7)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 30, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_g20_a_row_depends_on_nothing_but_itself(params):
    vocab_size, count = 331, 16
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(count, vocab_size)).astype(np.float32) * 2
    alone = np.concatenate([draw(logits[i : i + 1], make_rows([42], **params), positions=i) for i in range(count)])
    # with itself at other positions, in one batch
    np.testing.assert_array_equal(draw(logits, make_rows([42] * count, **params), positions=np.arange(count)), alone)
    # in any row of a batch of any size, beside mates of each kind
    kinds = [{}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.5}, {"temperature": 3.0}]
    for batch, slot in ((5, 0), (16, 5), (16, 15)):
        for i, mates in enumerate(kinds):
            others = make_rows(rng.integers(0, 2**63, batch), **mates)
            rows = jitted_admit(others, jnp.asarray([slot]), make_rows([42], **params))
            mixed = rng.normal(size=(batch, vocab_size)).astype(np.float32)
            mixed[slot] = logits[i]
            positions = rng.integers(0, 1000, batch)
            positions[slot] = i
            assert draw(mixed, rows, positions)[slot] == alone[i]


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_g21_tiny_temperatures_equal_greedy(temperature, dtype):
    rng = np.random.default_rng(1)
    # distinct in bfloat16 too, up to 1e4
    logits = jnp.asarray(np.stack([rng.permutation(np.geomspace(0.1, 1e4, 97)) for _ in range(8)]), dtype)
    tokens = draw(logits, make_rows(range(8), temperature=temperature), np.arange(8))
    np.testing.assert_array_equal(tokens, np.argmax(np.asarray(logits, np.float32), axis=-1))


@pytest.mark.parametrize("top_p", [0.0, 1e-45, 1e-6, 1e-4])
def test_g21_tiny_top_p_equals_greedy(top_p):
    logits = np.random.default_rng(2).normal(size=(8, 97)).astype(np.float32) * 100
    tokens = draw(logits, make_rows(range(8), top_p=top_p), np.arange(8))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_g21_banned_tokens_in_a_mixed_batch_are_never_chosen():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(64, 97)).astype(np.float32) * 1e3
    banned = rng.random((64, 97)) < 0.9
    banned[:, 13] = False
    logits[banned] = -np.inf
    temperature = np.resize([0, 1e-5, 1e-3, 1, 1e3, 3e38], 64)
    top_k, top_p = np.resize([0, 90], 64), np.resize([1, 0.99, 1, 0.5, 1], 64)
    with jax.debug_nans(True):
        for seed in range(4):
            rows = make_rows(np.arange(64) + seed, temperature=temperature, top_k=top_k, top_p=top_p)
            tokens = draw(logits, rows, np.arange(64))
            assert not banned[np.arange(64), tokens].any()
            greedy = temperature == 0
            np.testing.assert_array_equal(tokens[greedy], logits.argmax(-1)[greedy])


def test_g21_extreme_logits_stay_in_range():
    logits = np.zeros((5, 300), np.float32)
    logits[0] = -np.inf  # all banned
    logits[1, 7] = np.inf
    logits[2, 8], logits[2, 9] = 3e38, -3e38
    logits[3] = -3e38
    logits[4, :299] = -np.inf
    for params in ({}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 3e38, "min_p": 1.0}):
        tokens = draw(logits, make_rows(range(5), **params))
        assert tokens[0] == 0
        assert tokens[1] == 7
        assert tokens[2] == 8 or params.get("temperature")
        assert 0 <= tokens[3] < 300
        assert tokens[4] == 299


def test_a_greedy_row_takes_the_first_of_equals_and_minus_zero_is_zero():
    logits = np.asarray([[0, 5, 5, 1], [-1, -0.0, 0.0, -2]], np.float32)
    np.testing.assert_array_equal(draw(logits, make_rows([0, 1], temperature=0)), [1, 1])
    tokens = draws([-1, -0.0, 0.0, -2], 200, top_k=1)
    assert set(tokens) == {1, 2}


def kept_by_sorting(logits, temperature, top_k, top_p, min_p):
    """The oracle: (kept mask, probabilities) by sorting, in float64."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    keep = p >= min_p
    if 0 < top_k < len(x):
        keep &= logits >= np.sort(logits)[::-1][top_k - 1]
    p = np.where(keep, p, 0)
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-logits, kind="stable")
        number = np.searchsorted(np.cumsum(p[order]), top_p) + 1
        keep &= logits >= logits[order[min(number, len(x)) - 1]]
    p = np.where(keep, p, 0)
    return keep, p / p.sum()


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**7},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.7, "min_p": 0.02},
    {"top_k": -1, "top_p": 0.9, "min_p": 0.3},
]


@pytest.mark.parametrize("vocab_size", [1, 31, 256, 1031])
@pytest.mark.parametrize("tied", [False, True])
def test_filters_keep_what_sorting_keeps(vocab_size, tied):
    """Exactly the support: read off the probabilities that are drawn from."""
    rng = np.random.default_rng(vocab_size)
    for case, params in enumerate(FILTERS):
        params = {"temperature": [0.5, 1.0, 2.0][case % 3], "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
        logits = rng.normal(size=(6, vocab_size)).astype(np.float32) * 2
        if tied:
            logits = np.round(logits * 2) / 2
        p = np.asarray(
            jitted_filters(jnp.asarray(logits), make_rows(range(6), **params), jnp.ones(6, bool)), np.float64
        )
        for row in range(6):
            keep, probabilities = kept_by_sorting(logits[row], **params)
            np.testing.assert_array_equal(p[row] > 0, keep)
            np.testing.assert_allclose(p[row] / p[row].sum(), probabilities, rtol=2e-5)


@pytest.mark.parametrize("vocab_size", [5, 777])
@pytest.mark.parametrize("params", [{}, {"top_k": 40}, {"top_p": 0.8}, {"temperature": 1.5, "min_p": 0.05}], ids=str)
def test_tokens_come_as_often_as_their_probabilities_say(vocab_size, params):
    logits = np.random.default_rng(9).normal(size=vocab_size).astype(np.float32) * 1.5
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    _, probabilities = kept_by_sorting(logits, **values)
    tokens = draws(logits, 20_000, **params)
    assert (probabilities[tokens] > 0).all()
    # rare tokens are counted together, so that the chi-square distribution holds
    rare = probabilities * len(tokens) < 10
    classes = np.where(rare, 0, np.cumsum(~rare))
    expected = np.bincount(classes, weights=probabilities)
    observed = np.bincount(classes[tokens], minlength=len(expected))
    used = expected * len(tokens) >= 1
    statistic = ((observed - expected * len(tokens)) ** 2 / np.maximum(expected * len(tokens), 1e-9))[used].sum()
    freedom = max(used.sum() - 1, 1)
    # Wilson and Hilferty's cube root makes it normal; 3.7 is the 1e-4 tail
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    assert z < 3.7


def test_a_real_vocabulary_size_keeps_what_sorting_keeps():
    logits = np.random.default_rng(4).normal(size=49_152).astype(np.float32) * 3
    tokens = draws(logits, 32, top_k=50, top_p=0.9)
    keep, _ = kept_by_sorting(logits, 1.0, 50, 0.9, 0.0)
    assert keep[tokens].all()
    assert len(set(tokens)) > 3


def test_bans_reach_their_rows_and_padding_reaches_none():
    """The last token of the vocabulary is banned by its own id only, not by padding's."""
    logits = np.random.default_rng(6).normal(size=(4, 97)).astype(np.float32)
    none = np.iinfo(np.int32).max
    ids = np.asarray([[96, 0, none], [none] * 3, [5, 5, 97], [7, 8, 9]], np.int32)
    expected = logits.copy()
    expected[0, [96, 0]] = expected[2, 5] = expected[3, 7:10] = -np.inf
    jitted = jax.jit(ban)
    np.testing.assert_array_equal(jitted(logits, ids), expected)
    np.testing.assert_array_equal(jitted(logits, np.full_like(ids, none)), logits)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_the_samples_of_a_prompt_differ_by_their_index(temperature):
    """S18: flat logits, one seed, three samples."""
    tokens = draw(
        np.zeros((3, 50), np.float32), make_rows([1] * 3, temperature=temperature), 4, sample_index=np.arange(3)
    )
    assert len(set(tokens.tolist())) == (1 if temperature == 0 else 3)


def test_state_rows_go_to_their_slots_and_padding_goes_nowhere():
    state = init_sampling_state(4)
    new = make_rows([2**40 + 1, 2, 3], temperature=[0.5, 0.6, 0.7], top_k=[1, 2, 3])
    state = jax.jit(admit)(state, jnp.asarray([2, 0, 4]), new)  # the last is padding
    np.testing.assert_array_equal(state.key_data, [[0, 2], [0, 0], [2**8, 1], [0, 0]])
    np.testing.assert_allclose(state.temperature, [0.6, 0, 0.5, 0], rtol=1e-6)
    np.testing.assert_array_equal(state.top_k, [2, 0, 1, 0])
    state = jax.jit(record)(state, jnp.asarray([2, 4, 3]), jnp.asarray([70, 80, 90], jnp.int32))
    np.testing.assert_array_equal(state.last_token, [0, 0, 70, 90])
    rows = jax.jit(gather)(state, jnp.asarray([2, 4, 0, 4]))
    np.testing.assert_array_equal(rows.last_token, [70, 0, 0, 0])
    np.testing.assert_allclose(rows.temperature, [0.5, 0, 0.6, 0], rtol=1e-6)  # padding is greedy
    assert [leaf.dtype for leaf in jax.tree.leaves(rows)] == [leaf.dtype for leaf in jax.tree.leaves(state)]


def test_state_is_a_tree_of_any_leaves():
    shapes = jax.eval_shape(lambda: init_sampling_state(3))
    assert isinstance(shapes, SamplingState)
    assert jax.tree.map(lambda leaf: None, shapes).top_k is None


def test_the_key_is_the_seed_folded_with_index_position_and_purpose():
    seed, index, position, purpose = 2**40 + 5, 3, 70, NEXT_TOKEN
    key = jax.random.wrap_key_data(jnp.asarray(seed_words(seed), jnp.uint32), impl="threefry2x32")
    for number in (index, position, purpose):
        key = jax.random.fold_in(key, number)
    folded = _draw_key(jnp.asarray(seed_words(seed), jnp.uint32), jnp.int32(index), jnp.int32(position), purpose)
    np.testing.assert_array_equal(jax.random.key_data(folded), jax.random.key_data(key))
