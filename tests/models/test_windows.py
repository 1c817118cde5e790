"""Sliding-window layers: through the pages, against the dense reference; and which settings they refuse."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_reference import DenseReference
from flax import nnx
from paged_decoder import num_given_up, run
from random_llama import random_tokens

from paged_jax.kv_cache.group import CacheGroup
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder, stack_layers
from paged_jax.models.weights import dummy_decoder

FULL, SLIDING = "full_attention", "sliding_attention"
CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    qkv_bias=True,
)
MIXED = (SLIDING, FULL, SLIDING)
LENGTH = 30
BLOCK_SIZE = 4
CHUNKS = {"at_once": [LENGTH], "chunks": [7, 1, 4, 9, 1, 8], "decode": [1] * LENGTH}


def windowed(window: int, layer_types: tuple[str, ...] | None = None) -> ModelConfig:
    return replace(CONFIG, sliding_window=window, layer_types=layer_types)


def decoder(config: ModelConfig) -> Decoder:
    """Dummy weights, with norms and biases that are not 1 and 0."""
    rng = np.random.default_rng(1)
    graph, state = nnx.split(dummy_decoder(config, 0, jnp.dtype("float32")))

    def shift(leaf: jax.Array) -> jax.Array:
        return leaf + 0.3 * rng.standard_normal(leaf.shape, dtype=np.float32) if leaf.ndim == 1 else leaf

    return nnx.merge(graph, jax.tree.map(shift, state))


TOKENS = random_tokens(LENGTH, CONFIG.vocab_size, 2)


@cache
def expected(config: ModelConfig) -> np.ndarray:
    return DenseReference(decoder(config)).logits(TOKENS)


@pytest.mark.parametrize("layer_types", [None, MIXED], ids=["all", "some"])
@pytest.mark.parametrize("window", [1, 4, 5])
class TestAgainstTheDenseReference:
    """S02: windows of one token, of a block and of one more, while pages outside are NaN and given up."""

    @pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
    def test_logits(self, window, layer_types, chunks):
        config = windowed(window, layer_types)
        logits = run(decoder(config), TOKENS, chunks, block_size=BLOCK_SIZE)
        np.testing.assert_allclose(logits, expected(config), rtol=0, atol=1e-4)

    def test_reference_attention(self, window, layer_types):
        config = windowed(window, layer_types)
        logits = run(decoder(config), TOKENS, CHUNKS["chunks"], "reference", BLOCK_SIZE)
        np.testing.assert_allclose(logits, expected(config), rtol=0, atol=1e-4)

    def test_these_cases_decide(self, window, layer_types):
        """One token more or less in the window moves the logits far more than the tolerance."""
        own, wider = expected(windowed(window, layer_types)), expected(windowed(window + 1, layer_types))
        np.testing.assert_allclose(own[:window], wider[:window], rtol=0, atol=1e-12)
        assert np.abs(own[window:] - wider[window:]).max(axis=1).min() > 1e-2


def test_blocks_are_given_up_in_these_cases():
    assert [num_given_up(w, LENGTH - 1, BLOCK_SIZE) for w in (None, 1, 4, 5)] == [0, 7, 6, 6]
    assert [num_given_up(5, start, 4) for start in (7, 8, 11, 12)] == [0, 1, 1, 2]


def test_a_window_that_holds_everything_hides_nothing():
    logits = run(decoder(windowed(LENGTH, MIXED)), TOKENS, CHUNKS["chunks"], block_size=BLOCK_SIZE)
    np.testing.assert_allclose(logits, expected(CONFIG), rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunks", ["chunks", "decode"])
def test_stacked_layers_equal_unrolled_ones(chunks):
    model = decoder(windowed(5))
    unrolled = run(model, TOKENS, CHUNKS[chunks], block_size=BLOCK_SIZE)
    stacked = run(stack_layers(model), TOKENS, CHUNKS[chunks], block_size=BLOCK_SIZE)
    np.testing.assert_allclose(stacked, unrolled, rtol=0, atol=1e-5)


def test_mixed_layers_cannot_be_stacked():
    assert decoder(windowed(5)).can_stack
    model = decoder(windowed(5, MIXED))
    assert not model.can_stack
    with pytest.raises(ValueError, match="layer_loop 'scanned' needs layers that are all alike"):
        stack_layers(model)


class TestCacheGroups:
    def test_one_kind_is_one_group(self):
        assert decoder(CONFIG).cache_groups == (CacheGroup(3, 2, 8),)
        assert decoder(windowed(5)).cache_groups == (CacheGroup(3, 2, 8, sliding_window=5),)
        assert decoder(windowed(5, (SLIDING,) * 3)).cache_groups == (CacheGroup(3, 2, 8, sliding_window=5),)

    def test_two_kinds_are_two_groups_and_the_full_one_is_first(self):
        model = decoder(windowed(5, MIXED))
        assert model.cache_groups == (CacheGroup(1, 2, 8), CacheGroup(2, 2, 8, sliding_window=5))
        assert [layer.group for layer in model.layers] == [1, 0, 1]

    def test_layers_of_a_group_are_traced_together(self):
        graphs = {nnx.split(layer)[0] for layer in decoder(windowed(5, MIXED)).layers}
        assert len(graphs) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": 0}, r"sliding_window \(0\) is less than 1"),
        ({"sliding_window": 4, "layer_types": (FULL, SLIDING)}, "layer_types names 2 layers, but num_layers is 3"),
        ({"layer_types": MIXED}, "'sliding_attention', but there is no sliding_window"),
        ({"sliding_window": 4, "layer_types": (FULL,) * 3}, r"sliding_window \(4\) has no effect"),
        ({"layer_types": (FULL, FULL, "chunked_attention")}, "layer type 'chunked_attention' is not supported"),
    ],
)
def test_windows_that_make_no_sense_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(CONFIG, **change)
