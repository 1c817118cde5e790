"""A tiny model on disk: as a Hugging Face directory, and as llama.cpp's converter writes it to GGUF."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 96, 2, 4, 2, 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "torch_dtype": "float32",
    "eos_token_id": [2, 5],
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _weights() -> dict[str, np.ndarray]:
    rows = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        for name, shape in rows.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if "self_attn" in name:
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (HIDDEN,)
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def _interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order, row by row: of each head, dimension i goes to row 2 i and i + half to 2 i + 1."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


@pytest.fixture
def config() -> dict[str, Any]:
    return dict(CONFIG)


@pytest.fixture(scope="session")
def weights() -> dict[str, np.ndarray]:
    """Random float32 weights of the tiny model under Hugging Face names."""
    return _weights()


@pytest.fixture
def hf_directory(tmp_path: Path, weights, config) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


type Raw = tuple[np.ndarray, gguf.GGMLQuantizationType]


@pytest.fixture
def write_gguf(tmp_path: Path, weights) -> Callable[..., Path]:
    """Writes the tiny model as a GGUF file.

    `raw` replaces or adds tensors by GGUF name: (bytes, type), or None to leave one out.
    `metadata` does the same with keys.
    """

    def write(raw: dict[str, Raw | None] | None = None, metadata: dict[str, Any] | None = None) -> Path:
        path = tmp_path / "tiny.gguf"
        keys = {
            "llama.block_count": LAYERS,
            "llama.context_length": 512,
            "llama.embedding_length": HIDDEN,
            "llama.feed_forward_length": INNER,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KV_HEADS,
            "llama.rope.freq_base": 10000.0,
            "llama.rope.dimension_count": HEAD_DIM,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            **(metadata or {}),
        }
        writer = gguf.GGUFWriter(path, keys.pop("general.architecture", "llama"))
        for key, value in keys.items():
            _add_key(writer, key, value)
        tensors: dict[str, Raw | None] = {}
        for name, array in weights.items():
            heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
            rows = _interleave(array, heads) if heads else array
            tensors[_gguf_name(name)] = (rows, gguf.GGMLQuantizationType.F32)
        for name, entry in (tensors | (raw or {})).items():
            if entry is not None:
                writer.add_tensor(name, entry[0], raw_dtype=entry[1])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
