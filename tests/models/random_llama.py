"""Random Llama, Mistral or Qwen2 weights that any process can draw again: numpy only, so tests need no torch."""

from collections.abc import Mapping

import numpy as np


def weight_shapes(config: Mapping) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a Hugging Face model with this `config.json` (a tied head is left out)."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    rows = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, shape in rows.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if config.get("model_type") == "qwen2":
                has_bias = name.startswith("self_attn") and name != "self_attn.o_proj"
            else:
                has_bias = config.get("attention_bias" if name.startswith("self_attn") else "mlp_bias")
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
    return shapes


def random_weights(config: Mapping, seed: int) -> dict[str, np.ndarray]:
    """Float32 weights, drawn by sorted name from one generator, so that the same seed gives the same numbers.

    The scale makes attention sharp enough for a wrong rotation to move the logits by about 1, and soft enough
    for float32 to agree with float64 within 4e-5.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in sorted(weight_shapes(config).items()):
        noise = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.2 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            weights[name] = np.float32(0.2) * noise
        else:
            weights[name] = np.float32(0.15) * noise
    return {name: np.asarray(w, np.float32) for name, w in weights.items()}


def random_tokens(length: int, vocab_size: int, seed: int) -> np.ndarray:
    """`[length]` int32 token ids, uniform over the vocabulary."""
    return np.random.default_rng(seed).integers(0, vocab_size, length, dtype=np.int32)
