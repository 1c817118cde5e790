"""Writes hf_reference/: logits of Hugging Face's own Llama on tiny random models, the decoder's oracle.

Run by hand, only when a variant is added, in an environment that has `torch` (CPU), `transformers` and
`numpy`; the files here came from torch 2.13.0 and transformers 5.24.0:

    python tests/models/make_hf_reference.py

Per variant: NAME.json, the config.json as `save_pretrained` writes it, and NAME.npz with `tokens` [501]
int32, `positions` [P] and `logits` [P, vocab] float32 (every position where rope scaling is at stake, 64 of
them elsewhere). Weights come from random_llama.random_weights(config, SEED), so they are not stored.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from random_llama import random_tokens, random_weights
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 7
LENGTH = 501
BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
THETA = {"rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALED = {
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64, **THETA},
    "linear": {"rope_type": "linear", "factor": 4.0, **THETA},
    "yarn": {**YARN, **THETA},
    "yarn_explicit": {
        **YARN,
        "attention_factor": 0.8,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        **THETA,
    },
    "nested_theta": {"rope_type": "default", "rope_theta": 500000.0},
}
OTHERS = {
    "plain": {},
    "head_dim_24": {"head_dim": 24},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "untied": {"tie_word_embeddings": False},
}


def main() -> None:
    out = Path(__file__).parent / "hf_reference"
    out.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    tokens = random_tokens(LENGTH, BASE["vocab_size"], SEED)
    some = np.unique(np.linspace(0, LENGTH - 1, 64).astype(np.int32))
    for name in [*SCALED, *OTHERS]:
        extra = {"rope_parameters": SCALED[name]} if name in SCALED else OTHERS[name]
        config = LlamaConfig(**{**BASE, **extra}, architectures=["LlamaForCausalLM"], dtype="float32")
        model = LlamaForCausalLM(config).eval()
        weights = random_weights(config.to_dict(), SEED)
        missing, unexpected = model.load_state_dict({k: torch.from_numpy(w) for k, w in weights.items()}, strict=False)
        if unexpected or set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
            raise SystemExit(f"{name}: missing {missing}, unexpected {unexpected}")
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
        positions = np.arange(LENGTH, dtype=np.int32) if name in SCALED else some
        np.savez_compressed(out / f"{name}.npz", tokens=tokens, positions=positions, logits=logits[positions])
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            saved = json.loads((Path(folder) / "config.json").read_text())
        (out / f"{name}.json").write_text(json.dumps(saved, indent=1) + "\n")
        top = np.sort(logits, axis=-1)
        print(name, "std", logits.std().round(2), "smallest top gaps", np.sort(top[:, -1] - top[:, -2])[:3])


if __name__ == "__main__":
    main()
