import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from paged_jax.catalog import entries as catalogue
from paged_jax.checkpoints.resolve import resolve

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGED_JAX_CACHE", str(tmp_path / "empty"))


def test_directory(hf_directory):
    found = resolve(str(hf_directory))
    assert (found.name, found.config.num_layers, found.tokenizer, found.eos_token_ids) == (
        "tiny",
        2,
        None,
        (2, 5),
    )
    assert found.tensors["model.norm.weight"].shape == (64,)


def test_dummy_directory_needs_no_weights(hf_directory):
    (hf_directory / "model.safetensors").unlink()
    found = resolve(str(hf_directory), "dummy")
    assert (found.config.hidden_size, found.tensors, found.eos_token_ids) == (64, None, (2, 5))


def test_gguf_file(write_gguf):
    path = write_gguf()
    found = resolve(str(path))
    assert (found.name, found.config.num_heads, found.tokenizer, found.eos_token_ids) == ("tiny", 4, None, ())
    assert "lm_head.weight" in found.tensors
    assert resolve(str(path), "dummy").tensors is None


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="../shared/reference is not here")
def test_stories260k():
    found = resolve(str(REFERENCE / "stories260K"))
    assert found.tokenizer.vocab_size == found.config.vocab_size == 512
    assert found.eos_token_ids == (2,)


def test_shape_only_model():
    found = resolve("tiny-llama", "dummy")
    assert (found.config.num_layers, found.tensors, found.tokenizer, found.eos_token_ids) == (
        2,
        None,
        None,
        (),
    )
    with pytest.raises(ValueError, match=r"'tiny-llama' is known by its shape only, .* load_format=dummy"):
        resolve("tiny-llama")


@pytest.mark.usefixtures("no_cache")
def test_dummy_of_a_model_that_is_not_cached_fetches_nothing(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    found = resolve("smollm2-135m", "dummy")
    assert (found.config.num_layers, found.tensors, found.tokenizer) == (30, None, None)


def test_smollm2(smollm2_path):
    found = resolve("smollm2-135m")
    assert found.config == catalogue.get("smollm2-135m").config  # the catalogue tells the file's own shape
    assert found.eos_token_ids == (2,)
    assert found.tokenizer.has_chat_template
    dummy = resolve("smollm2-135m", "dummy")
    assert dummy.tensors is None
    assert dummy.tokenizer is not None


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("smolm2-135m", ValueError, "no model 'smolm2-135m'.*did you mean 'smollm2-135m'"),
        ("./smollm2-135m", FileNotFoundError, "does not exist"),
        ("/no/such/folder", FileNotFoundError, "does not exist"),
        ("missing.gguf", FileNotFoundError, r"'missing\.gguf' does not exist"),
        (__file__, ValueError, r"is a file but no \.gguf file"),
        (str(Path(__file__).parent), FileNotFoundError, r"has no config\.json"),
    ],
)
def test_what_is_not_there_is_one_sentence(name, error, words):
    with pytest.raises(error, match=words):
        resolve(name)


def test_hub_id_from_the_local_cache(monkeypatch, hf_directory):
    asked = []

    def snapshot(repository, allow_patterns, local_files_only=False):
        asked.append((repository, local_files_only))
        return str(hf_directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    found = resolve("some/model")
    assert (found.name, found.config.num_layers) == ("some/model", 2)
    assert asked == [("some/model", True)]


def test_hub_id_whose_cache_lacks_files_is_completed(monkeypatch, hf_directory, tmp_path):
    partial = tmp_path / "partial"
    partial.mkdir()
    (partial / "config.json").write_text((hf_directory / "config.json").read_text())

    def snapshot(repository, allow_patterns, local_files_only=False):
        return str(partial if local_files_only else hf_directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert "lm_head.weight" in resolve("some/model").tensors
    # a dummy needs the config alone
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, local_files_only=False, **__: str(partial))
    assert resolve("some/model", "dummy").tensors is None


def test_hub_without_a_network(monkeypatch):
    def snapshot(*_, **__):
        raise LocalEntryNotFoundError("no network here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(FileNotFoundError, match=r"'some/model' is neither here nor .*no network here"):
        resolve("some/model")


def test_broken_generation_config_is_named(hf_directory):
    (hf_directory / "generation_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON"):
        resolve(str(hf_directory))


def test_loading_imports_no_jax():
    code = (
        "import json, sys, paged_jax.checkpoints.resolve; "
        "print(json.dumps([m for m in ('jax', 'flax', 'torch', 'pandas', 'matplotlib') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
