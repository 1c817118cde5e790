import json
import subprocess
import sys

import pytest

from paged_jax.catalog.entries import entries
from paged_jax.simulation.model_shape import ModelShape
from paged_jax.simulation.shapes import find_shape

MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "sliding_window": 64,
    "torch_dtype": "bfloat16",
}


def test_a_catalogue_name():
    assert {entry.name: find_shape(entry.name) for entry in entries()} == {e.name: e.shape for e in entries()}


def test_a_hugging_face_directory_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL), encoding="utf-8")
    assert find_shape(str(tmp_path)) == ModelShape(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        max_position_embeddings=512, sliding_window=64, dtype="bfloat16",
    )  # fmt: skip


def test_a_gguf_file(smollm2_path):
    shape = find_shape(str(smollm2_path))
    assert (shape.num_parameters, shape.num_kv_heads, shape.tie_word_embeddings) == (134_515_008, 3, True)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match=r"no model 'opt-13': .*; did you mean 'opt-13b'") as caught:
        find_shape("opt-13")
    assert "\n" not in str(caught.value)


def test_a_path_that_is_not_there():
    with pytest.raises(FileNotFoundError, match=r"model './opt-13b' does not exist"):
        find_shape("./opt-13b")


def test_a_catalogue_name_imports_nothing_heavy():
    code = (
        "import sys; from paged_jax.simulation.shapes import find_shape; find_shape('deepseek-v3');"
        "heavy = ('jax', 'numpy', 'gguf', 'tokenizers', 'huggingface_hub', 'pandas');"
        "print(*[name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
