import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from paged_jax.models.config import ModelConfig, RopeScaling
from paged_jax.models.families import from_hf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
HF_CONFIGS = sorted((Path(__file__).parent / "hf_reference").glob("*.json"))


def rope(**fields) -> RopeScaling:
    return from_hf({**LLAMA, "rope_scaling": fields}).rope_scaling


def test_plain_llama():
    assert from_hf({**LLAMA, "torch_dtype": "bfloat16"}) == ModelConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        dtype="bfloat16",
    )


def test_defaults_of_transformers_fill_what_is_left_out():
    few = {
        k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
    }
    config = from_hf(few)
    assert (config.num_kv_heads, config.max_position_embeddings, config.rms_norm_eps) == (4, 2048, 1e-6)
    assert (config.tie_word_embeddings, config.rope_theta, config.dtype) == (False, 10000.0, "float32")


def test_model_type_stands_in_for_architectures():
    assert from_hf({**LLAMA, "architectures": None, "model_type": "llama"}) == from_hf(LLAMA)


def test_options():
    config = from_hf({**LLAMA, "head_dim": 24, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True})
    assert (config.head_dim, config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (
        24,
        *[True] * 3,
    )


@pytest.mark.parametrize("dtype", ["float16", "torch.float16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_under_both_keys(key, dtype):
    assert from_hf({**LLAMA, key: dtype}).dtype == "float16"


@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
@pytest.mark.parametrize("block_key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_under_every_key(block_key, kind_key):
    config = from_hf({**LLAMA, block_key: {kind_key: "llama3", **LLAMA3}})
    expected = RopeScaling(
        "llama3", 8.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0
    )
    assert config.rope_scaling == expected


def test_theta_inside_the_rope_block_wins():
    block = {"rope_type": "default", "rope_theta": 500000.0}
    assert from_hf({**LLAMA, "rope_theta": 7.0, "rope_parameters": block}).rope_theta == 500000.0
    assert from_hf({**LLAMA, "rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}).rope_theta == 7.0


def test_original_length_beside_the_block_wins_and_defaults_to_the_full_one():
    fields = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    assert rope(rope_type="llama3", **fields).original_max_position_embeddings == 512
    beside = {
        **LLAMA,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        "original_max_position_embeddings": 128,
    }
    assert from_hf(beside).rope_scaling.original_max_position_embeddings == 128


def test_yarn_defaults():
    scaling = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=None)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32.0, 1.0, True)
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_mscale_counts_only_with_its_partner():
    base = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    both = rope(**base, mscale=2.0, mscale_all_dim=0.5).attention_factor
    assert both == pytest.approx((0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    assert rope(**base, mscale=2.0).attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert rope(**base, mscale=2.0, mscale_all_dim=0.5, attention_factor=0.8).attention_factor == 0.8


def test_yarn_factor_from_the_two_lengths():
    assert rope(rope_type="yarn", factor=None, original_max_position_embeddings=64).factor == 8.0


def test_mistral_without_an_active_window():
    config = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert from_hf({**config, "sliding_window": None}) == from_hf(LLAMA)
    assert from_hf({**config, "sliding_window": 512}) == from_hf(LLAMA)


def test_mistral_with_a_window_in_every_layer():
    config = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    expected = replace(from_hf(LLAMA), sliding_window=100)
    assert from_hf({**config, "sliding_window": 100}) == expected
    assert from_hf({**config, "sliding_window": 100, "layer_types": ["sliding_attention"] * 2}) == expected
    # 4096 where nothing is said, as in transformers
    assert from_hf({**config, "max_position_embeddings": 8192}).sliding_window == 4096


QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "max_window_layers": 1}
WINDOWED = {**QWEN2, "use_sliding_window": True}
PLAIN_QWEN2 = replace(from_hf(LLAMA), qkv_bias=True)


class TestQwen2:
    def test_biases_are_those_of_queries_keys_and_values_whatever_the_config_says(self):
        assert from_hf({**QWEN2, "attention_bias": True, "mlp_bias": True}) == PLAIN_QWEN2

    def test_model_type_stands_in_for_architectures(self):
        assert from_hf({**QWEN2, "architectures": None, "model_type": "qwen2"}) == PLAIN_QWEN2

    def test_defaults_of_transformers(self):
        few = {k: v for k, v in WINDOWED.items() if k in ("architectures", "vocab_size", "use_sliding_window")}
        config = from_hf(
            {**few, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 32, "num_hidden_layers": 30}
        )
        assert (config.max_position_embeddings, config.num_kv_heads, config.rms_norm_eps) == (32768, 32, 1e-6)
        assert (config.sliding_window, config.layer_windows) == (4096, (None,) * 28 + (4096,) * 2)

    def test_the_first_layers_see_everything(self):
        kinds = ("full_attention", "sliding_attention")
        assert from_hf(WINDOWED) == replace(PLAIN_QWEN2, sliding_window=100, layer_types=kinds)
        assert from_hf({**WINDOWED, "max_window_layers": 0}) == replace(PLAIN_QWEN2, sliding_window=100)

    def test_layer_types_go_before_max_window_layers(self):
        kinds = ("sliding_attention", "full_attention")
        config = from_hf({**WINDOWED, "layer_types": list(kinds)})
        assert config == replace(PLAIN_QWEN2, sliding_window=100, layer_types=kinds)

    @pytest.mark.parametrize(
        "change",
        [
            {"use_sliding_window": False},
            {"sliding_window": None},
            {"sliding_window": 512},
            {"max_window_layers": 2},
            {"max_window_layers": 28},
            {"layer_types": ["full_attention"] * 2},
        ],
    )
    def test_windows_that_hide_nothing_are_none(self, change):
        assert from_hf({**WINDOWED, **change}) == PLAIN_QWEN2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported"),
        ({"architectures": ["LlamaForCausaLM"]}, "did you mean 'LlamaForCausalLM'"),
        ({"architectures": [], "model_type": "opt"}, "'opt'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 100,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "layer_types is not supported for MistralForCausalLM",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window .* at least 1, got 0"),
        ({**WINDOWED, "layer_types": ["full_attention", "linear_attention"]}, "'linear_attention' is not supported"),
        ({**WINDOWED, "layer_types": ["sliding_attention"]}, "layer_types names 1 layers"),
        ({**WINDOWED, "layer_types": "sliding_attention"}, "layer_types in config.json must be a list"),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 2}, "there is no sliding_window"),
        ({**WINDOWED, "max_window_layers": -1}, "max_window_layers .* at least 0, got -1"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "'Qwen3ForCausalLM' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "made-up", "factor": 2.0}}, "'made-up'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor'"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"vocab_size": None}, "'vocab_size'"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"hidden_size": 63}, "hidden_size 63"),
        ({"num_key_value_heads": 3}, r"num_kv_heads \(3\)"),
        ({"dtype": "float8_e4m3fn"}, "'float8_e4m3fn'"),
    ],
)
def test_what_the_decoder_cannot_represent_is_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        from_hf({**LLAMA, **change})


@pytest.mark.parametrize("path", HF_CONFIGS, ids=lambda path: path.stem)
def test_configs_that_transformers_wrote(path):
    config = from_hf(json.loads(path.read_text()))
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    expected = {"llama3": "llama3", "linear": "linear", "yarn": "yarn", "yarn_explicit": "yarn"}
    assert config.rope_scaling.kind == expected.get(path.stem, "default")


def test_the_reference_covers_every_variant():
    assert len(HF_CONFIGS) == 9
