"""The decoder: one definition for every family that `families.py` can map onto it.

Attribute names are those of Hugging Face checkpoints, so that a parameter's path is its name in the file.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from paged_jax.kv_cache.group import CacheGroup
from paged_jax.models.attention import Attention, AttentionBatch, AttentionOptions, RopeTables
from paged_jax.models.config import ModelConfig
from paged_jax.models.layers import Embedding, Linear, RMSNorm, project, tokens_first
from paged_jax.models.mlp import MLP
from paged_jax.models.positions import rope_tables

type Pages = tuple[Float[Array, "N B KV D"], ...]


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "hidden T"],
        pages: Pages,
        layer: int | Int[Array, ""],
        batch: AttentionBatch,
        rope: RopeTables,
        options: AttentionOptions,
    ) -> tuple[Float[Array, "hidden T"], Pages]:
        """The Llama family keeps all its layers in cache group 0."""
        attended, kv_pages = self.self_attn(
            self.input_layernorm(x), pages[0], layer, batch.groups[0], batch, rope, options
        )
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), (kv_pages, *pages[1:])


class Decoder(nnx.Module):
    """Token ids to hidden states to logits, with keys and values in pages.

    `layers` is a list of layers, or after `stack_layers` one layer whose parameters have a leading layer axis.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        )

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.config.vocab_size

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """One: every layer keeps every token."""
        return (CacheGroup(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim),)

    def __call__(
        self, token_ids: Int[Array, "T"], pages: Pages, batch: AttentionBatch, options: AttentionOptions
    ) -> tuple[Float[Array, "hidden T"], Pages]:
        """Final hidden states of all tokens, and the pages with their keys and values stored."""
        x = self.embed_tokens(token_ids)
        rope = rope_tables(self.config, batch.positions)
        if isinstance(self.layers, DecoderLayer):
            graph, stacked = nnx.split(self.layers)

            def body(carry, layer):
                state, index = layer
                return _run_layer(graph, state, *carry, index, batch, rope, options), None

            indices = jnp.arange(self.config.num_layers, dtype=jnp.int32)
            (x, pages), _ = lax.scan(body, (x, pages), (stacked, indices))
        else:
            for index, layer in enumerate(self.layers):
                graph, state = nnx.split(layer)
                x, pages = _run_layer(graph, state, x, pages, jnp.int32(index), batch, rope, options)
        return self.norm(x), pages

    def logits(self, hidden: Float[Array, "hidden S"]) -> Float[Array, "S vocab"]:
        """Scores of the next token, float32."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return tokens_first(project(head.weight[...], hidden, jnp.dtype("float32")))


@partial(jax.jit, static_argnames=("graph", "options"))
def _run_layer(
    graph: nnx.GraphDef,
    state: nnx.State,
    x: jax.Array,
    pages: Pages,
    layer: jax.Array,
    batch: AttentionBatch,
    rope: RopeTables,
    options: AttentionOptions,
) -> tuple[jax.Array, Pages]:
    """One layer. Being a jitted function it is traced once, not once for each unrolled layer."""
    return nnx.merge(graph, state)(x, pages, layer, batch, rope, options)


def stack_layers(model: Decoder) -> Decoder:
    """The same model with its layers stacked for `lax.scan`: compiles once for all layers instead of once for each."""
    graphs, states = zip(*(nnx.split(layer) for layer in model.layers), strict=True)
    model.layers = nnx.merge(graphs[0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
    return model
