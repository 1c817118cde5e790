"""A `.gguf` file of the Llama architecture, told in Hugging Face's names, shapes and row order."""

import math
import re
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize

from paged_jax.checkpoints.tensors import LazyTensor, LazyTensors
from paged_jax.models.config import ModelConfig, RopeScaling

_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_ROPE_FREQS = "rope_freqs.weight"
_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Keys under which a "llama" file says that it computes something the decoder does not.
_UNSUPPORTED_KEYS = (
    "expert_count",
    "attention.sliding_window",
    "attention.scale",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "rope.scaling.yarn_log_multiplier",
)


class GgufFile:
    """An open `.gguf` file: `metadata`, `config` and `tensors`, which stay on disk until they are looked up.

    Raises FileNotFoundError when there is no such file, ValueError when it is damaged, is of another
    architecture, or holds a tensor whose name or quantisation is not known.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        self.path = path
        try:
            reader = _FastReader(path)
        # what the reader meets in a truncated or foreign file depends on where it stops making sense
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a complete GGUF file ({error})") from None
        self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{path} has architecture {architecture!r}; of GGUF files only 'llama' is supported")
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError(f"{path} is one part of a split model: merge the parts with llama.cpp's gguf-split first")

    @cached_property
    def config(self) -> ModelConfig:
        """The model's shape, from the `llama.*` keys and, where these are silent, from the tensors."""
        for key in _UNSUPPORTED_KEYS:
            if self._key(key, None):
                raise ValueError(f"{self.path} sets llama.{key} to {self._key(key)}, which is not supported")
        hidden_size, num_heads = self._integer("embedding_length"), self._integer("attention.head_count")
        rotary = self._key("rope.dimension_count", None)
        head_dim = self._key("attention.key_length", rotary or hidden_size // num_heads)
        if (rotary or head_dim) != head_dim:
            raise ValueError(f"{self.path} rotates {rotary} of {head_dim} dimensions a head; only all are supported")
        if self._key("attention.value_length", head_dim) != head_dim:
            raise ValueError(f"{self.path} has values of another length than keys, which is not supported")
        embedding = self._tensor("token_embd.weight")
        return ModelConfig(
            vocab_size=int(embedding.shape[1]),
            hidden_size=hidden_size,
            intermediate_size=self._integer("feed_forward_length"),
            num_layers=self._integer("block_count"),
            num_heads=num_heads,
            num_kv_heads=self._integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position_embeddings=self._integer("context_length"),
            rms_norm_eps=_decimal(self._key("attention.layer_norm_rms_epsilon", 1e-5)),
            rope_theta=_decimal(self._key("rope.freq_base", 10000.0)),
            rope_scaling=self._rope_scaling(head_dim),
            tie_word_embeddings="output.weight" not in self._tensors,
            attention_bias="blk.0.attn_q.bias" in self._tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self._tensors,
            dtype={"F16": "float16", "BF16": "bfloat16"}.get(embedding.tensor_type.name, "float32"),
        )

    @cached_property
    def tensors(self) -> LazyTensors:
        """The weights as float32 arrays under Hugging Face names, dequantised when looked up."""
        entries = {}
        for name, tensor in self._tensors.items():
            if name == _ROPE_FREQS:
                continue  # told by config.rope_scaling
            if tensor.tensor_type.name not in _TYPES:
                raise ValueError(
                    f"tensor {name!r} in {self.path} has type {tensor.tensor_type.name}, which is not "
                    f"supported; known: {', '.join(_TYPES)}"
                )
            shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF lists the fastest dimension first
            entries[self._hf_name(name)] = LazyTensor(shape, partial(_read, tensor, shape, self._row_order(name)))
        return LazyTensors(entries)

    def _hf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        known = _LAYER_NAMES.get(layer[2]) if layer else _GLOBAL_NAMES.get(stem)
        if known is None or kind not in ("weight", "bias"):
            raise ValueError(f"{self.path} holds a tensor {name!r}, which is not part of a Llama model")
        return f"model.layers.{layer[1]}.{known}.{kind}" if layer else f"{known}.{kind}"

    def _row_order(self, name: str) -> Callable[[np.ndarray], np.ndarray] | None:
        if ".attn_q." in name:
            return partial(unpermute_rows, num_heads=self.config.num_heads)
        if ".attn_k." in name:
            return partial(unpermute_rows, num_heads=self.config.num_kv_heads)
        return None

    def _rope_scaling(self, head_dim: int) -> RopeScaling:
        kind = self._key("rope.scaling.type", "linear")  # llama.cpp's reading of a factor without a type
        factor = _decimal(self._key("rope.scaling.factor", self._key("rope.scale_linear", 0.0)))
        original = self._key("rope.scaling.original_context_length", None)
        unscaled = kind == "none" or factor in (0.0, 1.0)
        if _ROPE_FREQS in self._tensors:
            if not unscaled:
                raise ValueError(
                    f"{self.path} holds {_ROPE_FREQS!r} and {kind} scaling at once, which is not supported"
                )
            return self._llama3_scaling(head_dim, original)
        if unscaled:
            return RopeScaling()
        if kind == "linear":
            return RopeScaling("linear", factor)
        if kind != "yarn":
            raise ValueError(f"{self.path} has rope scaling {kind!r}; known: none, linear, yarn")
        scale = self._key("rope.scaling.yarn_attn_factor", self._key("rope.scaling.attn_factor", 1.0))
        return RopeScaling(
            "yarn",
            factor,
            original or self._integer("context_length"),
            beta_fast=_decimal(self._key("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=_decimal(self._key("rope.scaling.yarn_beta_slow", 1.0)),
            attention_factor=_decimal(scale) * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
        )

    def _llama3_scaling(self, head_dim: int, original: int | None) -> RopeScaling:
        """The parameters behind `rope_freqs.weight`, where llama.cpp stores Llama 3's scaling by frequency.

        Low and high factor are 1 and 4 in every published model and the original length is 8192 unless the
        file tells another; whether that explains the stored factors is checked, since a guess must not pass
        silently.
        """
        tensor = self._tensors[_ROPE_FREQS]
        stored = _read(tensor, (int(tensor.n_elements),), None)
        factor = _decimal(stored.max())
        if np.all(stored == 1.0):
            return RopeScaling()
        theta = _decimal(self._key("rope.freq_base", 10000.0))
        for length in dict.fromkeys((original or 8192, 8192)):
            scaling = RopeScaling("llama3", factor, length, low_freq_factor=1.0, high_freq_factor=4.0)
            expected = _llama3_factors(scaling, theta, head_dim)
            if stored.shape == expected.shape and np.allclose(stored, expected, rtol=1e-4):
                return scaling
        raise ValueError(
            f"{self.path} stores rope scaling factors in {_ROPE_FREQS!r} that are not Llama 3's "
            "(low 1, high 4, original length 8192): use the model's Hugging Face directory instead"
        )

    def _key(self, key: str, *default: Any) -> Any:
        value = self.metadata.get(f"llama.{key}", *default)
        if value is None and not default:
            raise ValueError(f"{self.path} has no metadata key 'llama.{key}'")
        return value

    def _integer(self, key: str, *default: int) -> int:
        """A number of the whole model; some files list it layer by layer."""
        value = self._key(key, *default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1:
            raise ValueError(f"{self.path} has another llama.{key} in each layer, which is not supported")
        return int(values.pop())

    def _tensor(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise ValueError(f"{self.path} has no tensor {name!r}")
        return self._tensors[name]


def unpermute_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of query and key weights and biases, `[num_heads * head_dim, ...]`.

    llama.cpp rotates neighbouring pairs of dimensions, Hugging Face dimension i with i + head_dim / 2, so its
    converter interleaves the two halves of each head. The inverse takes every head's even rows, then its odd
    ones.
    """
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class _FastReader(GGUFReader):
    """The package's reader on a plain view of the file.

    It slices once per token of the vocabulary, and slicing a memmap costs several times more.
    """

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._data = mapped.view(np.ndarray)


def _read(
    tensor: ReaderTensor, shape: tuple[int, ...], reorder: Callable[[np.ndarray], np.ndarray] | None
) -> np.ndarray:
    kind = GGMLQuantizationType(tensor.tensor_type)
    values = np.asarray(dequantize(tensor.data, kind), np.float32).reshape(shape)
    return values if reorder is None else reorder(values)


def _llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> np.ndarray:
    """`[head_dim / 2]`: by how much each rotary frequency is divided (Llama 3.1's rule)."""
    low, high, original = (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position_embeddings,
    )
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)  # within the original length
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - keep) / scaling.factor + keep)


def _decimal(value: float | np.floating) -> float:
    """The shortest decimal of a float32: the file stores 1e-05 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))
