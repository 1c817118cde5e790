"""The decoder through its pages, against Hugging Face's logits; and the loading of its weights."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from paged_decoder import run
from random_llama import random_weights

from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder, stack_layers
from paged_jax.models.families import from_hf
from paged_jax.models.weights import dummy_decoder, load_decoder

REFERENCE = Path(__file__).parent / "hf_reference"
VARIANTS = sorted(path.stem for path in REFERENCE.glob("*.npz"))
SEED = 7  # of make_hf_reference.py


@cache
def reference(variant: str) -> tuple[dict, np.ndarray, np.ndarray, np.ndarray]:
    """The variant's config.json, its tokens, and the logits at some positions."""
    with np.load(REFERENCE / f"{variant}.npz") as arrays:
        tokens, positions, logits = arrays["tokens"], arrays["positions"], arrays["logits"]
    return json.loads((REFERENCE / f"{variant}.json").read_text()), tokens, positions, logits


def load(variant: str) -> Decoder:
    config = reference(variant)[0]
    return load_decoder(from_hf(config), random_weights(config, SEED), jnp.dtype("float32"))


@pytest.mark.parametrize("variant", VARIANTS)
class TestAgainstHuggingFace:
    """Biases, an untied head, a head_dim of its own (S15), and the rope scalings at every position (G24)."""

    def test_prefill_at_once(self, variant):
        _, tokens, positions, expected = reference(variant)
        logits = run(load(variant), tokens, [len(tokens)])
        np.testing.assert_allclose(logits[positions], expected, rtol=0, atol=1e-4)

    def test_one_token_at_a_time(self, variant):
        _, tokens, positions, expected = reference(variant)
        logits = run(load(variant), tokens, [1] * len(tokens))
        np.testing.assert_allclose(logits[positions], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", ["head_dim_24", "llama3"])
def test_prefill_in_chunks(variant):
    _, tokens, positions, expected = reference(variant)
    logits = run(load(variant), tokens, [130, 1, 7, 64, 128, 3, 128, 40])
    np.testing.assert_allclose(logits[positions], expected, rtol=0, atol=1e-4)


def test_the_variants_cover_what_they_should():
    scalings = {from_hf(reference(v)[0]).rope_scaling.kind for v in VARIANTS}
    assert scalings == {"default", "linear", "llama3", "yarn"}
    configs = [from_hf(reference(v)[0]) for v in VARIANTS]
    assert {c.head_dim * c.num_heads == c.hidden_size for c in configs} == {True, False}
    assert {c.tie_word_embeddings for c in configs} == {True, False}
    assert {c.attention_bias and c.mlp_bias for c in configs} == {True, False}


@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
@pytest.mark.parametrize("variant", ["llama3", "linear", "yarn"])
def test_old_spelling_of_rope_scaling_means_the_same(variant, kind_key):
    """G24: `rope_scaling` beside a `rope_theta` at the top, and the kind under either name."""
    config = dict(reference(variant)[0])
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    rope[kind_key] = rope.pop("rope_type")
    assert from_hf({**config, "rope_scaling": rope}) == from_hf(reference(variant)[0])


def test_reference_attention_gives_the_same_logits():
    _, tokens, positions, expected = reference("head_dim_24")
    logits = run(load("head_dim_24"), tokens, [len(tokens)], "reference")
    np.testing.assert_allclose(logits[positions], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", ["biases"])
def test_stacked_layers_equal_unrolled_ones(variant):
    tokens = reference(variant)[1][:100]
    unrolled = run(load(variant), tokens, [60, 40])
    np.testing.assert_allclose(run(stack_layers(load(variant)), tokens, [60, 40]), unrolled, rtol=0, atol=1e-5)


def test_bfloat16_stays_near_float32():
    """bfloat16 keeps 8 bits: logits of about 2 after two layers stay within 0.15, and nothing is promoted."""
    config, tokens, positions, expected = reference("plain")
    model = load_decoder(from_hf(config), random_weights(config, SEED), jnp.dtype("bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("bfloat16")}
    few = positions < 100
    logits = run(model, tokens[:100], [100])
    assert np.abs(logits[positions[few]] - expected[few]).max() < 0.4
    assert np.sqrt(np.mean((logits[positions[few]] - expected[few]) ** 2)) < 0.08


CONFIG = ModelConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position_embeddings=32,
    tie_word_embeddings=True,
)
HF_CONFIG = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
FLOAT32 = jnp.dtype("float32")


class TestLoading:
    def test_every_tensor_lands_in_its_place(self):
        weights = random_weights(HF_CONFIG, 1)
        model = load_decoder(CONFIG, weights, FLOAT32)
        np.testing.assert_array_equal(
            model.layers[1].self_attn.k_proj.weight[...], weights["model.layers.1.self_attn.k_proj.weight"]
        )
        np.testing.assert_array_equal(
            model.layers[0].mlp.down_proj.weight[...], weights["model.layers.0.mlp.down_proj.weight"]
        )
        np.testing.assert_array_equal(model.norm.weight[...], weights["model.norm.weight"])

    def test_missing_tensor_is_named(self):
        weights = random_weights(HF_CONFIG, 1)
        del weights["model.layers.1.mlp.up_proj.weight"]
        with pytest.raises(ValueError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'.*\(12, 8\)"):
            load_decoder(CONFIG, weights, FLOAT32)

    def test_extra_tensor_is_named(self):
        weights = random_weights(HF_CONFIG, 1)
        weights["model.layers.2.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"]
        with pytest.raises(ValueError, match=r"'model\.layers\.2\.mlp\.up_proj\.weight' that this model has no"):
            load_decoder(CONFIG, weights, FLOAT32)

    def test_qwen2_has_no_bias_at_the_output_projection(self):
        weights = random_weights({**HF_CONFIG, "model_type": "qwen2"}, 1)
        attention = load_decoder(replace(CONFIG, qkv_bias=True), weights, FLOAT32).layers[1].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            np.testing.assert_array_equal(
                getattr(attention, name).bias[...], weights[f"model.layers.1.self_attn.{name}.bias"]
            )
        assert attention.o_proj.bias is None

    def test_misshapen_tensor_is_named(self):
        weights = random_weights(HF_CONFIG, 1)
        name = "model.layers.0.self_attn.q_proj.weight"
        weights[name] = weights[name][:4]
        with pytest.raises(ValueError, match=r"'model\.layers\.0\.self_attn\.q_proj\.weight' has shape \(4, 8\)"):
            load_decoder(CONFIG, weights, FLOAT32)

    def test_untied_model_needs_its_head(self):
        """S06"""
        with pytest.raises(ValueError, match=r"no tensor 'lm_head\.weight'"):
            load_decoder(replace(CONFIG, tie_word_embeddings=False), random_weights(HF_CONFIG, 1), FLOAT32)

    def test_tied_head_that_repeats_the_embeddings_is_accepted(self):
        """S06"""
        weights = random_weights(HF_CONFIG, 1)
        plain = load_decoder(CONFIG, weights, FLOAT32)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
        model = load_decoder(CONFIG, weights, FLOAT32)
        tokens = np.arange(8, dtype=np.int32)
        np.testing.assert_array_equal(run(model, tokens, [8]), run(plain, tokens, [8]))

    def test_tied_head_that_differs_is_refused(self):
        """S06"""
        weights = random_weights(HF_CONFIG, 1)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
        with pytest.raises(ValueError, match=r"tied embeddings, but tensor 'lm_head\.weight' differs"):
            load_decoder(CONFIG, weights, FLOAT32)

    def test_dummy_weights_follow_the_seed(self):
        def head(seed: int) -> np.ndarray:
            return np.asarray(dummy_decoder(CONFIG, seed, FLOAT32).embed_tokens.weight[...])

        np.testing.assert_array_equal(head(3), head(3))
        assert (head(3) != head(4)).all()
        model = dummy_decoder(replace(CONFIG, attention_bias=True), 3, FLOAT32)
        assert (model.norm.weight[...] == 1).all()
        assert (model.layers[0].self_attn.q_proj.bias[...] == 0).all()
        leaves = [leaf for leaf in jax.tree.leaves(nnx.state(model)) if leaf.ndim == 2]
        assert len({leaf.tobytes() for leaf in map(np.asarray, leaves)}) == len(leaves)
