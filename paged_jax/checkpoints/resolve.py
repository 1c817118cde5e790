"""From what a person types after `--model` to a checkpoint: its shape, weights and tokenizer."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paged_jax.catalog.entries import Entry, entries
from paged_jax.catalog.fetch import fetch
from paged_jax.checkpoints.gguf import GgufFile
from paged_jax.checkpoints.safetensors import load_directory, read_config
from paged_jax.checkpoints.tensors import LazyTensors
from paged_jax.checkpoints.tokenizer import Tokenizer, configured_eos
from paged_jax.config import nearest
from paged_jax.models.config import ModelConfig
from paged_jax.models.families import from_hf

LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True)
class Checkpoint:
    """A model that has been found: everything but its weights is in memory.

    `tensors` is None for a dummy, whose weights the caller draws. `tokenizer` is None when the model brought
    none.
    """

    name: str
    config: ModelConfig
    tensors: LazyTensors | None
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]


def resolve(name_or_path: str, load_format: LoadFormat = "auto") -> Checkpoint:
    """Find a model: a catalogue name, a Hugging Face directory, a `.gguf` file, or a hub id `org/name`.

    Catalogue names come first; `./name` is always a path. With `load_format="dummy"` no weights are read, and
    none are fetched. Raises FileNotFoundError or ValueError with one sentence that says what is missing and
    what to do.
    """
    dummy = load_format == "dummy"
    match _locate(name_or_path, dummy):
        case Entry() as entry:
            return _from_catalogue(entry, dummy)
        case Path() as path if path.is_dir():
            return _from_directory(path, dummy)
        case Path() as path:
            return _from_file(path, dummy)
        case hub_id:
            return _from_directory(_hub_snapshot(hub_id, dummy), dummy, hub_id)


def prepare(name_or_path: str, load_format: LoadFormat = "auto") -> None:
    """Do the part of `resolve` that a person should not wait for, or should see by itself.

    Raises at once for a model that does not exist, and fetches a catalogue model's weights with a progress bar.
    """
    dummy = load_format == "dummy"
    found = _locate(name_or_path, dummy)
    if isinstance(found, Entry) and not dummy:
        fetch(found.name)


def _locate(name_or_path: str, dummy: bool) -> Entry | Path | str:
    """What a name stands for: a catalogue entry, a file or directory that exists, or else a hub id."""
    catalogue = {entry.name: entry for entry in entries()}
    entry = catalogue.get(name_or_path)
    if entry is not None:
        if entry.config is None:
            raise ValueError(
                f"model {entry.name!r} is in the catalogue for the simulator only, the decoder cannot run it: "
                "use `executor: simulated`"
            )
        if entry.source is None and not dummy:
            raise ValueError(f"model {entry.name!r} is known by its shape only, without weights: use load_format=dummy")
        return entry
    path = Path(name_or_path).expanduser()
    if path.is_dir() or path.is_file():
        return path
    if _looks_like_path(name_or_path):
        raise FileNotFoundError(f"model {name_or_path!r} does not exist: there is no such file or directory")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name_or_path):
        return name_or_path
    raise ValueError(
        f"no model {name_or_path!r}: it is no catalogue name, no file or directory here, "
        "and no hub id (org/name)"
        f"{nearest(name_or_path, list(catalogue))}"
    )


def _from_catalogue(entry: Entry, dummy: bool) -> Checkpoint:
    if dummy and not entry.cached:
        return Checkpoint(entry.name, entry.config, None, None, ())
    return _from_file(fetch(entry.name), dummy, entry.name)


def _from_file(path: Path, dummy: bool, name: str | None = None) -> Checkpoint:
    if path.suffix.lower() != ".gguf":
        raise ValueError(f"model {str(path)!r} is a file but no .gguf file: give the directory that holds config.json")
    file = GgufFile(path)
    has_tokenizer = "tokenizer.ggml.model" in file.metadata
    tokenizer = Tokenizer.from_gguf(file.metadata) if has_tokenizer else None
    tensors = None if dummy else file.tensors
    return Checkpoint(name or path.stem, file.config, tensors, tokenizer, tokenizer.eos_token_ids if tokenizer else ())


def _from_directory(directory: Path, dummy: bool, name: str | None = None) -> Checkpoint:
    if dummy:
        config, tensors = from_hf(read_config(directory)), None
    else:
        config, tensors = load_directory(directory)
    has_tokenizer = any((directory / file).is_file() for file in ("tokenizer.json", "tokenizer.model"))
    tokenizer = Tokenizer.from_directory(directory) if has_tokenizer else None
    eos = tokenizer.eos_token_ids if tokenizer else configured_eos(directory)
    return Checkpoint(name or directory.resolve().name, config, tensors, tokenizer, eos)


def _looks_like_path(text: str) -> bool:
    return (
        text.startswith((".", "~", "/"))
        or text.endswith(".gguf")
        or text.count("/") > 1
        or (os.sep != "/" and os.sep in text)
    )


def _hub_snapshot(repository: str, dummy: bool) -> Path:
    """The local folder of a hub repository; the network is asked only for what the hub's cache lacks."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.jinja"] + ([] if dummy else ["*.safetensors"])
    # read what is needed and forget it: a snapshot cached by another program may lack some of the files
    check: Callable[[Path], object] = read_config if dummy else load_directory
    try:
        folder = Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=True))
        check(folder)
        return folder
    except (LocalEntryNotFoundError, FileNotFoundError):
        pass
    except HFValidationError as error:
        raise ValueError(f"{repository!r} is not a hub id: {error}") from None
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"model {repository!r} is neither here nor could it be fetched from the Hugging Face hub "
            f"({reason}): check the name and the network, and log in with `hf auth login` if it is private"
        ) from None
