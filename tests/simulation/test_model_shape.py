import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from paged_jax.catalog.entries import entries, get
from paged_jax.checkpoints.resolve import resolve
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.models.config import ModelConfig
from paged_jax.models.weights import dummy_decoder
from paged_jax.simulation.model_shape import DTYPE_BYTES, ModelShape

PUBLISHED = {
    # counted by the Hugging Face hub in the published checkpoints
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,  # without the module for multi-token prediction and the scales of float8
}
ROUNDED = {"opt-13b": 12.85e9, "opt-66b": 65.7e9, "opt-175b": 175e9, "deepseek-v2": 236e9, "deepseek-v3": 671e9}

TINY = ModelConfig(
    vocab_size=19, hidden_size=24, intermediate_size=20, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
    max_position_embeddings=64,
)  # fmt: skip
MIXED = ("full_attention", "sliding_attention", "full_attention")
CONFIGS = {
    "plain": TINY,
    "tied": dataclasses.replace(TINY, tie_word_embeddings=True),
    "all attention biases": dataclasses.replace(TINY, attention_bias=True),
    "biases of queries, keys and values": dataclasses.replace(TINY, qkv_bias=True),
    "both": dataclasses.replace(TINY, attention_bias=True, qkv_bias=True),
    "mlp biases": dataclasses.replace(TINY, mlp_bias=True),
    "one kv head": dataclasses.replace(TINY, num_kv_heads=1, num_layers=1),
    "windows": dataclasses.replace(TINY, sliding_window=5),
    "mixed": dataclasses.replace(TINY, sliding_window=5, layer_types=MIXED),
    "all full": dataclasses.replace(TINY, layer_types=("full_attention",) * 3),
}
GROUPS = {
    "windows": (CacheGroup(3, 2, 8, 5),),
    "mixed": (CacheGroup(2, 2, 8, None), CacheGroup(1, 2, 8, 5)),
    "one kv head": (CacheGroup(1, 1, 8, None),),
}
PLAIN_GROUPS = (CacheGroup(3, 2, 8, None),)

SHAPE = ModelShape.from_config(TINY)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
MLA = {"kv_lora_rank": 10, "qk_rope_head_dim": 2, "qk_nope_head_dim": 6, "v_head_dim": 5}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_number_of_parameters(name):
    assert get(name).shape.num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_number_of_parameters(name):
    assert get(name).shape.num_parameters == pytest.approx(ROUNDED[name], rel=0.01)


def test_every_model_of_the_catalogue_is_checked_against_a_published_number():
    made_up = {"tiny-llama", "deepseek-v2-mha"}
    assert {entry.name for entry in entries()} - made_up == PUBLISHED.keys() | ROUNDED.keys()


def test_opt_125m_tensor_by_tensor():
    """OPT-125M has 125,239,296 parameters (Hugging Face), which knows of each bias."""
    small = dataclasses.replace(
        get("opt-13b").shape, hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12, num_kv_heads=12,
        head_dim=64,
    )  # fmt: skip
    assert small.num_parameters == 125_239_296


@pytest.mark.parametrize("name", CONFIGS)
def test_the_decoder_has_as_many_parameters_and_the_same_cache_groups(name):
    config = CONFIGS[name]
    shape, decoder = ModelShape.from_config(config), dummy_decoder(config, seed=0, dtype=jnp.dtype("float32"))
    parameters = jax.tree.leaves(nnx.state(decoder, nnx.Param))
    assert shape.num_parameters == sum(leaf.size for leaf in parameters)
    assert shape.cache_groups() == decoder.cache_groups == GROUPS.get(name, PLAIN_GROUPS)
    assert shape.layer_windows == config.layer_windows


def test_smollm2_is_the_shape_of_its_file(smollm2_path):
    real = ModelShape.from_config(resolve(str(smollm2_path)).config)
    assert real == get("smollm2-135m").shape


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        ("opt-13b", "float16", 2 * 40 * 40 * 128 * 2),  # 819,200: "800 KB" in the paper
        ("opt-13b", "float32", 2 * 819_200),
        ("llama-2-7b", "float16", 524_288),
        ("llama-3-8b", "bfloat16", 131_072),
        ("llama-3-8b", "float8", 65_536),
        ("llama-3-8b", "int8", 65_536),
        ("smollm2-135m", "float32", 2 * 30 * 3 * 64 * 4),
        ("deepseek-v2", "bfloat16", (512 + 64) * 2 * 60),
        ("deepseek-v3", "float8", (512 + 64) * 61),
    ],
)
def test_kv_bytes_of_a_token(name, dtype, size):
    assert get(name).shape.kv_bytes_per_token(dtype) == size


def test_published_dtypes():
    assert {name: get(name).shape.dtype for name in ("opt-13b", "llama-2-7b", "llama-3-8b")} == {
        "opt-13b": "float16",
        "llama-2-7b": "float16",
        "llama-3-8b": "bfloat16",
    }
    assert all(entry.shape.dtype in DTYPE_BYTES for entry in entries())


def test_mistrals_layers_all_slide():
    """Version 0.1 sees 4096 tokens in each of its 32 layers, of the 32,768 it takes."""
    assert get("mistral-7b").shape.cache_groups() == (CacheGroup(32, 8, 128, 4096),)
    assert get("mistral-7b").shape.layer_windows == (4096,) * 32


def test_latent_attention_caches_one_row_for_all_heads():
    assert get("deepseek-v2").shape.cache_groups() == (CacheGroup(60, 1, 576, None),)


def test_latent_attention_without_a_rank_of_queries():
    """DeepSeek-V2-Lite: 15,706,484,224 parameters (Hugging Face), of which queries are projected in one step."""
    lite = dataclasses.replace(
        get("deepseek-v2").shape, hidden_size=2048, intermediate_size=10944, num_layers=27, num_heads=16,
        num_kv_heads=16, q_lora_rank=None, num_experts=64, moe_intermediate_size=1408,
    )  # fmt: skip
    assert lite.num_parameters == 15_706_484_224


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_kv_heads": 3}, r"num_heads \(4\) is not a multiple of num_kv_heads \(3\)"),
        ({"head_dim": 7}, r"head_dim \(7\) is odd"),
        ({"sliding_window": 0}, r"sliding_window \(0\) is less than 1"),
        ({"layer_types": MIXED}, "there is no sliding_window: set one"),
        ({"layer_types": MIXED[:2], "sliding_window": 5}, "layer_types names 2 layers, but num_layers is 3"),
        ({"dtype": "floatt16"}, "dtype 'floatt16' is not supported; did you mean 'float16'"),
        ({"num_experts_per_tok": 2}, r"num_experts_per_tok \(2\) has no effect without num_experts"),
        ({"moe_intermediate_size": 2}, r"moe_intermediate_size \(2\) has no effect without num_experts"),
        ({"num_shared_experts": 2}, r"num_shared_experts \(2\) has no effect without num_experts"),
        ({"num_dense_layers": 2}, r"num_dense_layers \(2\) has no effect without num_experts"),
        ({"router_bias": True}, r"router_bias \(True\) has no effect without num_experts"),
        ({**MOE, "moe_intermediate_size": None}, "num_experts needs moe_intermediate_size"),
        ({**MOE, "num_experts_per_tok": 0}, r"num_experts_per_tok \(0\) must be from 1 to num_experts \(4\)"),
        ({**MOE, "num_experts_per_tok": 5}, r"num_experts_per_tok \(5\) must be from 1 to num_experts \(4\)"),
        ({**MOE, "num_dense_layers": 3}, r"num_dense_layers \(3\) leaves none of num_layers \(3\)"),
        ({"q_lora_rank": 2}, r"q_lora_rank \(2\) has no effect without kv_lora_rank"),
        ({"v_head_dim": 2}, r"v_head_dim \(2\) has no effect without kv_lora_rank"),
        ({**MLA, "v_head_dim": None}, "latent attention, which needs v_head_dim"),
        ({**MLA, "qk_nope_head_dim": 4}, r"head_dim \(8\) must be qk_nope_head_dim \(4\) plus qk_rope_head_dim \(2\)"),
        ({**MLA, "qk_norm": True}, "qk_norm is not supported with latent attention"),
        ({**MLA, "attention_bias": True}, "attention_bias is not supported with latent attention"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        dataclasses.replace(SHAPE, **change)
    assert "\n" not in str(caught.value)


def test_the_sizes_that_the_refusals_start_from_are_fine():
    dataclasses.replace(SHAPE, **MOE, num_dense_layers=2)
    dataclasses.replace(SHAPE, **MLA)
    dataclasses.replace(SHAPE, head_dim=7, learned_positions=True)


def test_a_kv_cache_of_an_unknown_dtype():
    with pytest.raises(ValueError, match="dtype 'fp8' of a KV cache is not supported; known: bfloat16, float16"):
        SHAPE.kv_bytes_per_token("fp8")
