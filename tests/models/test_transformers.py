"""Mistral and Qwen2 with sliding windows, against transformers' own eager attention where it is installed."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from paged_decoder import run
from random_llama import random_tokens, random_weights

from paged_jax.models.families import from_hf
from paged_jax.models.weights import load_decoder

torch = pytest.importorskip("torch", reason="needs torch, which is no dependency")
transformers = pytest.importorskip("transformers", reason="needs transformers, which is no dependency")

SEED, LENGTH = 7, 41
BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "use_cache": False,
    "dtype": "float32",
}
FULL, SLIDING = "full_attention", "sliding_attention"
QWEN2 = {"use_sliding_window": True}
CASES = {
    "mistral-none": ("Mistral", {"sliding_window": None}, (None,) * 3),
    "mistral-1": ("Mistral", {"sliding_window": 1}, (1,) * 3),
    "mistral-4": ("Mistral", {"sliding_window": 4, "tie_word_embeddings": True}, (4,) * 3),
    "mistral-5": ("Mistral", {"sliding_window": 5, "head_dim": 24}, (5,) * 3),
    "qwen2-unused": ("Qwen2", {"use_sliding_window": False, "sliding_window": 4}, (None,) * 3),
    "qwen2-1": ("Qwen2", {**QWEN2, "sliding_window": 1, "max_window_layers": 0}, (1,) * 3),
    "qwen2-4": ("Qwen2", {**QWEN2, "sliding_window": 4, "max_window_layers": 1}, (None, 4, 4)),
    "qwen2-5": ("Qwen2", {**QWEN2, "sliding_window": 5, "max_window_layers": 2}, (None, None, 5)),
    "qwen2-types": ("Qwen2", {**QWEN2, "sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING]}, (5, None, 5)),
}


def eager_logits(family: str, fields: Mapping, tokens: np.ndarray, folder: Path) -> tuple[np.ndarray, dict]:
    """Logits [T, vocab] of the random model, and its config.json as transformers writes it."""
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**{**BASE, **fields}, architectures=[f"{family}ForCausalLM"], attn_implementation="eager")
    config.save_pretrained(folder)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    weights = {name: torch.from_numpy(array) for name, array in random_weights(config.to_dict(), SEED).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
    return logits, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_logits(case, tmp_path):
    """S02, and the biases of Qwen2."""
    family, fields, windows = CASES[case]
    tokens = random_tokens(LENGTH, BASE["vocab_size"], SEED)
    expected, config = eager_logits(family, fields, tokens, tmp_path)
    model = load_decoder(from_hf(config), random_weights(config, SEED), jnp.dtype("float32"))
    assert model.config.layer_windows == windows
    for chunks in ([LENGTH], [9, 1, 16, 1, 14], [1] * LENGTH):
        np.testing.assert_allclose(run(model, tokens, chunks, block_size=4), expected, rtol=0, atol=1e-4)
