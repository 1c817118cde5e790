"""Log-probabilities against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling.logprobs import token_logprobs

jitted = jax.jit(token_logprobs, static_argnames="max_top")


def log_softmax(logits) -> np.ndarray:
    x = np.asarray(logits, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocab_size", [1, 7, 300, 49_152])
@pytest.mark.parametrize("scale", [0.1, 3, 1000])
def test_they_are_those_of_the_softmax(vocab_size, scale, dtype):
    """Ties, many in bfloat16, are ranked alike and listed by token id."""
    rng = np.random.default_rng(vocab_size)
    logits = jnp.asarray(rng.normal(size=(5, vocab_size)) * scale, dtype)
    tokens = rng.integers(0, vocab_size, 5).astype(np.int32)
    tokens[0] = np.argmax(np.asarray(logits, np.float32)[0])
    got = jitted(logits, jnp.asarray(tokens), jnp.asarray(True), max_top=20)
    expected, rows = log_softmax(logits), np.arange(5)
    own = expected[rows, tokens]
    np.testing.assert_allclose(got.chosen, own, rtol=1e-6, atol=2e-6)
    np.testing.assert_array_equal(got.rank, 1 + (expected > own[:, None]).sum(axis=1))
    assert got.rank[0] == 1
    order = np.argsort(-expected, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(got.top_tokens, order)
    top = np.take_along_axis(expected, order, axis=1)
    np.testing.assert_allclose(got.top_logprobs, top, rtol=1e-6, atol=2e-6)
    assert got.chosen.dtype == got.top_logprobs.dtype == jnp.float32


def test_extreme_logits():
    """No overflow, and a token that cannot come has -inf."""
    logits = jnp.asarray([[3e38, 0, -3e38], [-jnp.inf, 1, 1], [-3e38, -3e38, -3e38]], jnp.float32)
    got = jitted(logits, jnp.asarray([0, 0, 2], jnp.int32), jnp.asarray(True), max_top=2)
    np.testing.assert_allclose(got.chosen, [0, -np.inf, -np.log(3)], rtol=1e-6)
    np.testing.assert_array_equal(got.rank, [1, 3, 1])
    np.testing.assert_array_equal(got.top_tokens, [[0, 1], [1, 2], [0, 1]])
    np.testing.assert_allclose(got.top_logprobs[1], [-np.log(2)] * 2, rtol=1e-6)


def test_nothing_is_computed_unless_it_is_wanted():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 50)), jnp.float32)
    got = jitted(logits, jnp.zeros(3, jnp.int32), jnp.asarray(False), max_top=4)
    wanted = jitted(logits, jnp.zeros(3, jnp.int32), jnp.asarray(True), max_top=4)
    assert [leaf.shape for leaf in got] == [leaf.shape for leaf in wanted] == [(3,), (3,), (3, 4), (3, 4)]
    assert not any(np.asarray(leaf).any() for leaf in got)
