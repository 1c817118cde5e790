import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from paged_jax.checkpoints.safetensors import load_directory


def split(folder, weights, shards=2):
    """Rewrite the directory's weights as shards with an index."""
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(shards):
        names = sorted(weights)[number::shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: weights[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_whole(hf_directory, weights):
    config, tensors = load_directory(hf_directory)
    assert (config.num_layers, config.attention_bias, config.dtype) == (2, True, "float32")
    assert set(tensors) == set(weights)
    for name, array in weights.items():
        assert tensors.shape(name) == array.shape
        np.testing.assert_array_equal(tensors[name], array)


def test_shards(hf_directory, weights):
    split(hf_directory, weights)
    _, tensors = load_directory(hf_directory)
    assert len(tensors) == len(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(tensors[name], array)


def test_bfloat16(hf_directory, weights, config):
    save_file(
        {name: array.astype(ml_dtypes.bfloat16) for name, array in weights.items()},
        hf_directory / "model.safetensors",
    )
    del config["torch_dtype"]
    (hf_directory / "config.json").write_text(json.dumps(config))
    model, tensors = load_directory(hf_directory)
    assert model.dtype == "bfloat16"  # told by the tensors where the config is silent
    array = tensors["model.norm.weight"]
    assert array.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(array, weights["model.norm.weight"].astype(ml_dtypes.bfloat16))


def test_nothing_is_read_before_it_is_looked_up(hf_directory):
    _, tensors = load_directory(hf_directory)
    (hf_directory / "model.safetensors").unlink()
    assert tensors.shape("model.norm.weight") == (64,)
    assert "model.norm.weight" in tensors
    with pytest.raises(FileNotFoundError):
        tensors["model.norm.weight"]


def test_rotary_buffers_are_left_out_and_a_tied_head_is_kept_to_be_compared(hf_directory, weights, config):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    save_file(weights | buffer, hf_directory / "model.safetensors")
    (hf_directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    _, tensors = load_directory(hf_directory)
    assert set(tensors) == set(weights)


def test_no_config(hf_directory):
    (hf_directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_directory(hf_directory)


def test_broken_config(hf_directory):
    (hf_directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_directory(hf_directory)


def test_no_weights(hf_directory):
    (hf_directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has no weights"):
        load_directory(hf_directory)
    (hf_directory / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="must be converted to safetensors"):
        load_directory(hf_directory)


def test_missing_shard(hf_directory, weights):
    split(hf_directory, weights)
    (hf_directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks 1 of 2 weight shards \(model-00002-of-00002"):
        load_directory(hf_directory)


def test_index_names_a_tensor_that_its_shard_lacks(hf_directory, weights):
    split(hf_directory, weights)
    index = hf_directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"ghost": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ValueError, match="has no tensor 'ghost'"):
        load_directory(hf_directory)


def test_index_without_a_map(hf_directory, weights):
    split(hf_directory, weights)
    (hf_directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="names no shards"):
        load_directory(hf_directory)


def test_truncated_file(hf_directory):
    file = hf_directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_directory(hf_directory)
