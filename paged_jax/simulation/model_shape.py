"""The shape of a model as the cost model sees it, of families too that the decoder cannot run."""

from dataclasses import dataclass, fields
from typing import Self

from paged_jax.config import nearest
from paged_jax.kv_cache.group import CacheGroup, cache_groups
from paged_jax.models.config import ModelConfig, check_heads, check_windows, layer_windows

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}
_MOE_FIELDS = ("num_experts_per_tok", "moe_intermediate_size", "num_shared_experts", "num_dense_layers", "router_bias")
_MLA_FIELDS = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer: what decides its FLOPs, its bytes and its KV cache, and nothing of its numbers.

    Names are those of `ModelConfig` and of Hugging Face. Raises ValueError for sizes that contradict each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the layers without experts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys; with latent attention qk_nope_head_dim + qk_rope_head_dim
    max_position_embeddings: int
    gated_mlp: bool = True  # three matrices; False: two, as in OPT
    tie_word_embeddings: bool = False
    learned_positions: bool = False  # a table of embeddings, as in OPT; False: rotary
    norm_bias: bool = False  # LayerNorm's; False: RMSNorm
    qk_norm: bool = False  # over each head of queries and keys, as in Qwen3
    attention_bias: bool = False  # of all four projections
    qkv_bias: bool = False  # of all but the output projection
    mlp_bias: bool = False
    sliding_window: int | None = None  # keys that a token sees in a sliding layer, its own included
    layer_types: tuple[str, ...] | None = None  # as in ModelConfig
    # mixture of experts; 0 experts: none
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None  # of one expert
    num_shared_experts: int = 0  # which every token visits
    num_dense_layers: int = 0  # the first layers, which have no experts (DeepSeek's first_k_dense_replace)
    router_bias: bool = False  # one number for each expert, as in DeepSeek-V3
    # multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); None: ordinary attention
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None  # None with latent attention: queries are projected in one step
    qk_rope_head_dim: int | None = None
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None
    dtype: str = "bfloat16"  # of the published weights

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads)
        if self.head_dim % 2 and not self.learned_positions:
            raise ValueError(f"head_dim ({self.head_dim}) is odd: rotary embeddings turn pairs of dimensions")
        check_windows(self.num_layers, self.sliding_window, self.layer_types)
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not supported{nearest(self.dtype, list(DTYPE_BYTES))}")
        self._check_experts()
        self._check_latent_attention()

    @classmethod
    def from_config(cls, config: ModelConfig) -> Self:
        """The shape of a model that the decoder runs."""
        known = {field.name for field in fields(config)}
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls) if field.name in known})

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None where it sees all tokens."""
        return layer_windows(self.num_layers, self.sliding_window, self.layer_types)

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, those of all experts included. Not those of multi-token prediction."""
        hidden = self.hidden_size
        norm = hidden * (2 if self.norm_bias else 1)
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        if self.learned_positions:
            embeddings += (self.max_position_embeddings + 2) * hidden  # OPT's table has two rows more than positions
        num_dense = self.num_dense_layers if self.num_experts else self.num_layers
        mlps = num_dense * self._mlp_parameters(self.intermediate_size)
        if self.moe_intermediate_size is not None:
            router = self.num_experts * (hidden + (1 if self.router_bias else 0))
            experts = self.num_experts + self.num_shared_experts
            layer = router + experts * self._mlp_parameters(self.moe_intermediate_size)
            mlps += (self.num_layers - num_dense) * layer
        return embeddings + self.num_layers * (self._attention_parameters() + 2 * norm) + mlps + norm

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes that one token's keys and values take in all layers.

        `dtype` is one of DTYPE_BYTES. Latent attention stores, in place of keys and values, one latent vector and one
        rotated key that all heads share.
        """
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {dtype!r} of a KV cache is not supported{nearest(dtype, list(DTYPE_BYTES))}")
        numbers = 2 * self.num_kv_heads * self.head_dim if self.kv_lora_rank is None else self._latent_size
        return numbers * self.num_layers * DTYPE_BYTES[dtype]

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The groups of layers that share block tables, as the decoder makes them.

        With latent attention a token is one row that serves as key and as value: one head of that size, without the
        factor of two that `2 * num_kv_heads * head_dim` has elsewhere. `kv_bytes_per_token` has the bytes.
        """
        if self.kv_lora_rank is None:
            return cache_groups(self.layer_windows, self.num_kv_heads, self.head_dim)
        return cache_groups(self.layer_windows, 1, self._latent_size)

    @property
    def _latent_size(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    def _attention_parameters(self) -> int:
        if self.kv_lora_rank is not None:
            return self._latent_attention_parameters()
        hidden, queries = self.hidden_size, self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        total = 2 * hidden * queries + 2 * hidden * keys
        if self.attention_bias or self.qkv_bias:
            total += queries + 2 * keys
        if self.attention_bias:
            total += hidden
        if self.qk_norm:
            total += 2 * self.head_dim
        return total

    def _latent_attention_parameters(self) -> int:
        hidden, heads, query_rank = self.hidden_size, self.num_heads, self.q_lora_rank
        all_queries = heads * self.head_dim
        queries = hidden * all_queries if query_rank is None else query_rank * (hidden + 1 + all_queries)  # 1: its norm
        latent = hidden * self._latent_size + self.kv_lora_rank  # and its norm
        keys_and_values = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + latent + keys_and_values + heads * self.v_head_dim * hidden

    def _mlp_parameters(self, inner: int) -> int:
        up = 2 if self.gated_mlp else 1
        biases = up * inner + self.hidden_size if self.mlp_bias else 0
        return (up + 1) * self.hidden_size * inner + biases

    def _check_experts(self) -> None:
        if not self.num_experts:
            for name in _MOE_FIELDS:
                if getattr(self, name):
                    raise ValueError(f"{name} ({getattr(self, name)}) has no effect without num_experts: set it too")
            return
        if self.moe_intermediate_size is None:
            raise ValueError("num_experts needs moe_intermediate_size, the inner size of one expert: set it too")
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be from 1 to num_experts ({self.num_experts})"
            )
        if self.num_dense_layers >= self.num_layers:
            raise ValueError(
                f"num_dense_layers ({self.num_dense_layers}) leaves none of num_layers ({self.num_layers}) "
                "for the experts: make it smaller"
            )

    def _check_latent_attention(self) -> None:
        if self.kv_lora_rank is None:
            for name in (*_MLA_FIELDS, "q_lora_rank"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} ({getattr(self, name)}) has no effect without kv_lora_rank: set it too")
            return
        for name in _MLA_FIELDS:
            if getattr(self, name) is None:
                raise ValueError(f"kv_lora_rank is for latent attention, which needs {name}: set it too")
        for name in ("qk_norm", "attention_bias", "qkv_bias"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported with latent attention (kv_lora_rank): leave it out")
        if self.head_dim != self.qk_nope_head_dim + self.qk_rope_head_dim:
            raise ValueError(
                f"head_dim ({self.head_dim}) must be qk_nope_head_dim ({self.qk_nope_head_dim}) plus "
                f"qk_rope_head_dim ({self.qk_rope_head_dim})"
            )
