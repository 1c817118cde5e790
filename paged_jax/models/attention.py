"""Grouped-query attention through the KV pages."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from paged_jax.models.config import ModelConfig
from paged_jax.models.layers import Linear, tokens_first
from paged_jax.models.positions import apply_rope
from pallas_kernels.kv_pages import write_kv_pages
from pallas_kernels.paged_attention import ragged_paged_attention

type RopeTables = tuple[Float[Array, "T 1 half"], Float[Array, "T 1 half"]]


class GroupBatch(NamedTuple):
    """Where the tokens of a batch are in one cache group's pages. Padding points at the null block, 0."""

    block_tables: Int[Array, "S W"]
    write_blocks: Int[Array, "T"]


class AttentionBatch(NamedTuple):
    """The ragged structure of a flat batch: sequence s owns tokens cu_q_lens[s]:cu_q_lens[s+1]."""

    positions: Int[Array, "T"]
    write_offsets: Int[Array, "T"]
    kv_lens: Int[Array, "S"]
    cu_q_lens: Int[Array, "S+1"]
    num_seqs: Int[Array, "1"]
    groups: tuple[GroupBatch, ...]


@dataclass(frozen=True)
class AttentionOptions:
    """What the compiled step fixes about attention."""

    blocks_per_layer: int
    """Null block included."""
    implementation: str | None = None
    """Of ragged_paged_attention; None picks by platform and shapes."""
    interpret: object = False
    """Run the kernel that `implementation` names in Pallas' interpreter."""
    debug: bool = False
    """Refuse block ids that are out of range."""

    @property
    def writes(self) -> dict[str, object]:
        """How pages are written that the implementation reads: by a kernel of ours on a TPU only."""
        if self.implementation != "mosaic_tpu":
            return {}
        return {"implementation": "mosaic_tpu", "interpret": self.interpret}


class Attention(nnx.Module):
    """Project, turn, store keys and values in the pages, attend through the pages, project back.

    With a sliding window token i sees tokens max(0, i - window + 1) to i, and what is before them may be anything.
    """

    def __init__(self, config: ModelConfig, *, sliding_window: int | None, dtype: jnp.dtype) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.sliding_window = sliding_window
        hidden, bias = config.hidden_size, config.attention_bias or config.qkv_bias
        self.q_proj = Linear(hidden, self.num_heads * self.head_dim, bias=bias, dtype=dtype)
        self.k_proj = Linear(hidden, self.num_kv_heads * self.head_dim, bias=bias, dtype=dtype)
        self.v_proj = Linear(hidden, self.num_kv_heads * self.head_dim, bias=bias, dtype=dtype)
        self.o_proj = Linear(self.num_heads * self.head_dim, hidden, bias=config.attention_bias, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "hidden T"],
        kv_pages: Float[Array, "N B KV D"],
        layer: int | Int[Array, ""],
        group: GroupBatch,
        batch: AttentionBatch,
        rope: RopeTables,
        options: AttentionOptions,
    ) -> tuple[Float[Array, "hidden T"], Float[Array, "N B KV D"]]:
        """`layer` counts within the cache group, whose pages these are."""

        def heads(y: jax.Array, count: int) -> jax.Array:
            return tokens_first(y).reshape(-1, count, self.head_dim)

        q = apply_rope(heads(self.q_proj(x), self.num_heads), rope)
        k = apply_rope(heads(self.k_proj(x), self.num_kv_heads), rope)
        v = heads(self.v_proj(x), self.num_kv_heads)
        kv_pages = write_kv_pages(
            kv_pages,
            k,
            v,
            group.write_blocks,
            batch.write_offsets,
            layer=layer,
            blocks_per_layer=options.blocks_per_layer,
            **options.writes,
        )
        out = ragged_paged_attention(
            q,
            kv_pages,
            batch.kv_lens,
            group.block_tables,
            batch.cu_q_lens,
            batch.num_seqs,
            layer=layer,
            blocks_per_layer=options.blocks_per_layer,
            num_kv_heads=self.num_kv_heads,
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window,
            implementation=options.implementation,
            interpret=options.interpret,
            debug=options.debug,
        )
        return self.o_proj(out.reshape(out.shape[0], -1).T), kv_pages
