"""The shape of a model: everything that the decoder needs to know, and nothing of where it came from."""

from dataclasses import dataclass
from typing import Literal

LAYER_TYPES = ("full_attention", "sliding_attention")
RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the model was trained on.

    `linear` divides positions by `factor`; `llama3` stretches the low frequencies only (Llama 3.1); `yarn` is
    Peng et al., 2023 (arXiv 2309.00071). Fields that a kind does not use are None.
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None  # yarn
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None means 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range outward to whole dimensions


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family. Attention sees all tokens before it, or a window of them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of all four projections
    qkv_bias: bool = False  # of all but the output projection
    mlp_bias: bool = False
    sliding_window: int | None = None  # keys that a token sees in a sliding layer, its own included
    layer_types: tuple[str, ...] | None = None  # of LAYER_TYPES; None: all slide if there is a window, else none does
    dtype: str = "float32"  # of the checkpoint's tensors: float32, bfloat16 or float16

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads)
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) is odd: rotary embeddings turn pairs of dimensions")
        check_windows(self.num_layers, self.sliding_window, self.layer_types)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None where it sees all tokens."""
        return layer_windows(self.num_layers, self.sliding_window, self.layer_types)


def layer_windows(
    num_layers: int, sliding_window: int | None, layer_types: tuple[str, ...] | None
) -> tuple[int | None, ...]:
    """The sliding window of each layer, from what a config says of them; None where a layer sees all tokens."""
    if layer_types is None:
        return (sliding_window,) * num_layers
    return tuple(sliding_window if kind == "sliding_attention" else None for kind in layer_types)


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless the query heads fall into whole groups, one for each KV head."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads ({num_heads}) is not a multiple of num_kv_heads ({num_kv_heads}): "
            "grouped-query attention needs whole groups"
        )


def check_windows(num_layers: int, sliding_window: int | None, layer_types: tuple[str, ...] | None) -> None:
    """Raise ValueError for a window or layer types that contradict each other or the number of layers."""
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window ({sliding_window}) is less than 1: a token sees at least itself")
    if layer_types is None:
        return
    for kind in layer_types:
        if kind not in LAYER_TYPES:
            raise ValueError(f"layer type {kind!r} is not supported; known: {', '.join(LAYER_TYPES)}")
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types names {len(layer_types)} layers, but num_layers is {num_layers}")
    if "sliding_attention" in layer_types and sliding_window is None:
        raise ValueError("layer_types has a 'sliding_attention', but there is no sliding_window: set one")
    if "sliding_attention" not in layer_types and sliding_window is not None:
        raise ValueError(f"sliding_window ({sliding_window}) has no effect: layer_types has no 'sliding_attention'")
