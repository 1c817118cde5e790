"""A Hugging Face directory: `config.json` beside `model.safetensors`, whole or in shards."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors then finds by name
import numpy as np
import safetensors

from paged_jax.checkpoints.tensors import LazyTensor, LazyTensors
from paged_jax.models.config import ModelConfig
from paged_jax.models.families import from_hf

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_json(path: Path) -> Any:
    """The parsed file. Raises ValueError, naming it, when it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` as a dict. Raises FileNotFoundError when the directory has none."""
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} has no config.json: a Hugging Face model directory holds config.json and {_SINGLE}"
        )
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(config).__name__}")
    return config


def load_directory(directory: Path) -> tuple[ModelConfig, LazyTensors]:
    """Config and weights of a Hugging Face directory; the weights are read tensor by tensor, when looked up.

    The rotary buffers of old checkpoints are left out. Raises FileNotFoundError for a missing file or shard
    and ValueError for a damaged one.
    """
    raw = read_config(directory)
    entries, dtypes = _entries(directory)
    if not (raw.get("dtype") or raw.get("torch_dtype")):
        stored = dtypes.get("model.embed_tokens.weight", "F32")
        raw = {**raw, "dtype": _DTYPES.get(stored, stored)}
    config = from_hf(raw)
    kept = {name: entry for name, entry in entries.items() if not name.endswith("rotary_emb.inv_freq")}
    return config, LazyTensors(kept)


def _entries(directory: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    entries: dict[str, LazyTensor] = {}
    dtypes: dict[str, str] = {}
    for file, wanted in _files(directory).items():
        with _open(file) as reader:
            present = set(reader.keys())
            for name in sorted(present if wanted is None else wanted):
                if name not in present:
                    raise ValueError(f"{file} has no tensor {name!r}, which {_INDEX} says it holds")
                header = reader.get_slice(name)
                entries[name] = LazyTensor(tuple(header.get_shape()), partial(_read, file, name))
                dtypes[name] = header.get_dtype()
    return entries, dtypes


def _files(directory: Path) -> dict[Path, set[str] | None]:
    """Weight file -> the names to take from it (None: all of them)."""
    index_path = directory / _INDEX
    if (directory / _SINGLE).is_file():
        return {directory / _SINGLE: None}
    if not index_path.is_file():
        torch_only = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
        hint = "; its PyTorch files must be converted to safetensors first" if torch_only else ""
        raise FileNotFoundError(f"{directory} has no weights: neither {_SINGLE} nor {_INDEX} is there{hint}")
    weight_map = read_json(index_path).get("weight_map")
    if not weight_map:
        raise ValueError(f"{index_path} has no weight_map, so it names no shards")
    files: dict[Path, set[str] | None] = {}
    for name, shard in weight_map.items():
        files.setdefault(directory / shard, set()).add(name)  # type: ignore[union-attr]
    missing = sorted(file.name for file in files if not file.is_file())
    if missing:
        raise FileNotFoundError(
            f"{directory} lacks {len(missing)} of {len(files)} weight shards ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}): complete the download"
        )
    return files


def _open(file: Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="np")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is not a complete safetensors file ({error}): download it again") from None


def _read(file: Path, name: str) -> np.ndarray:
    with _open(file) as reader:
        return reader.get_tensor(name)
