"""From a Hugging Face `config.json` to a `ModelConfig`: which families the decoder can stand for, exactly.

What the decoder cannot represent is refused by name: a model that loads and is subtly wrong is worse than one
that does not load.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paged_jax.config import nearest
from paged_jax.models.config import ModelConfig, RopeScaling

# What transformers assumes when a family's config.json leaves the key out.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "num_key_value_heads": None},
    "MistralForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
_BY_MODEL_TYPE = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_DTYPES = ("float32", "bfloat16", "float16")
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a parsed `config.json` (Llama, Mistral and Qwen2).

    Rope scaling is read from `rope_scaling` or `rope_parameters`, its kind from `rope_type` or the older
    `type`, and fields left out get the defaults of transformers, so that the result says everything. Raises
    ValueError, naming the key, for what the decoder cannot represent exactly.
    """
    family = _family(config)
    values = {**_FAMILY_DEFAULTS[family], **config}
    activation = values.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):  # two names of one function
        raise ValueError(f"hidden_act {activation!r} is not supported: the decoder's MLP is gated by silu")
    if values.get("quantization_config") is not None:
        method = values["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"quantization_config (method {method!r}) is not supported: "
            "use the model's unquantized checkpoint, or a .gguf file"
        )
    hidden_size = _integer(values, "hidden_size")
    num_heads = _integer(values, "num_attention_heads")
    max_positions = _integer(values, "max_position_embeddings")
    if values.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    theta, scaling = _rope(values, max_positions)
    num_layers = _integer(values, "num_hidden_layers")
    window, kinds = _windows(family, values, num_layers)
    llama = family == "LlamaForCausalLM"  # the others' biases are fixed, whatever their config says
    model = ModelConfig(
        vocab_size=_integer(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(values, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(values, "num_key_value_heads", num_heads),
        head_dim=_integer(values, "head_dim", hidden_size // num_heads),
        max_position_embeddings=max_positions,
        rms_norm_eps=_number(values, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        attention_bias=llama and bool(values.get("attention_bias", False)),
        qkv_bias=family == "Qwen2ForCausalLM",
        mlp_bias=llama and bool(values.get("mlp_bias", False)),
        sliding_window=window,
        layer_types=kinds,
        dtype=_dtype(values),
    )
    return _without_idle_windows(model)


def _family(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or [_BY_MODEL_TYPE.get(config.get("model_type", ""))]
    name = architectures[0]
    if name is None:
        raise ValueError(
            f"config.json names no architecture and its model_type is {config.get('model_type')!r}: "
            f"supported architectures are {', '.join(_FAMILY_DEFAULTS)}"
        )
    if name not in _FAMILY_DEFAULTS:
        raise ValueError(f"architecture {name!r} is not supported{nearest(name, list(_FAMILY_DEFAULTS))}")
    return name


def _windows(family: str, values: Mapping[str, Any], num_layers: int) -> tuple[int | None, tuple[str, ...] | None]:
    """The sliding window, None where no layer has it, and the layers' types, None where the family has but one."""
    window: int | None = None
    if family == "MistralForCausalLM" or (family == "Qwen2ForCausalLM" and values["use_sliding_window"]):
        window = None if values["sliding_window"] is None else _integer(values, "sliding_window")
    kinds = values.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise ValueError(f"layer_types in config.json must be a list, got {kinds!r}")
    if family != "Qwen2ForCausalLM":
        if window is not None and set(kinds or ()) - {"sliding_attention"}:
            raise ValueError(f"layer_types is not supported for {family}: its sliding_window holds for all layers")
        return window, None
    if kinds is None:
        full = num_layers if window is None else min(_integer(values, "max_window_layers", least=0), num_layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    return window if "sliding_attention" in kinds else None, tuple(kinds)


def _without_idle_windows(config: ModelConfig) -> ModelConfig:
    """The same model, said with fewer words: a window as long as the model's context hides nothing."""
    window = config.sliding_window
    if window is None or window >= config.max_position_embeddings:
        return replace(config, sliding_window=None, layer_types=None)
    if None not in config.layer_windows:
        return replace(config, layer_types=None)
    return config


def _dtype(values: Mapping[str, Any]) -> str:
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} of the checkpoint is not supported; known: {', '.join(_DTYPES)}")
    return name


def _rope(values: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling]:
    """Theta and scaling, with the precedence and the defaults of transformers."""
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    if any(isinstance(v, Mapping) for v in rope.values()):
        raise ValueError(f"rope parameters per layer type ({', '.join(rope)}) are not supported")
    theta = _number(rope, "rope_theta", _number(values, "rope_theta", 10000.0))
    partial = _number(rope, "partial_rotary_factor", _number(values, "partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {partial} is not supported: the decoder rotates whole heads")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise ValueError(f"rope scaling kind {kind!r} is not supported; known: {', '.join(_ROPE_KINDS)}")
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", factor=_number(rope, "factor"))
    # a value beside the rope block wins over the one inside it, as in transformers
    original = _integer(
        values,
        "original_max_position_embeddings",
        rope.get("original_max_position_embeddings") or max_positions,
    )
    if kind == "llama3":
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        if high <= low:
            raise ValueError(f"high_freq_factor {high} must be greater than low_freq_factor {low}")
        factor = _number(rope, "factor")
        return theta, RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    return theta, _yarn(rope, original, max_positions)


def _yarn(rope: Mapping[str, Any], original: int, max_positions: int) -> RopeScaling:
    factor = _number(rope, "factor", max_positions / original)
    mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all:
        attention_factor = _attention_scale(factor, mscale) / _attention_scale(factor, mscale_all)
    else:
        attention_factor = _attention_scale(factor, 1.0)
    return RopeScaling(
        "yarn",
        factor,
        original,
        # a zero means "unset" here too: transformers writes `or 32`
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=_number(rope, "attention_factor", attention_factor),
        mscale=mscale,
        mscale_all_dim=mscale_all,
        truncate=bool(rope.get("truncate", True)),
    )


def _attention_scale(factor: float, mscale: float) -> float:
    """YaRN's temperature of attention, sqrt(1/t) = 0.1 m ln(s) + 1 (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _integer(values: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    value = values.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json has no {key!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} in config.json must be an integer of at least {least}, got {value!r}")
    return value


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json has no {key!r}, which its kind of rope scaling needs")
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{key} in config.json must be a positive number, got {value!r}")
    return float(value)
