"""The decoder: one definition for every family that `families.py` can map onto it.

Attribute names are those of Hugging Face checkpoints, so that a parameter's path is its name in the file.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from paged_jax.kv_cache.group import CacheGroup, cache_groups, group_windows
from paged_jax.models.attention import Attention, AttentionBatch, AttentionOptions, RopeTables
from paged_jax.models.config import ModelConfig
from paged_jax.models.layers import Embedding, Linear, RMSNorm, project, tokens_first
from paged_jax.models.mlp import MLP
from paged_jax.models.positions import rope_tables

type Pages = tuple[Float[Array, "_ B KV D"], ...]
"""Of each cache group, whose numbers of layers may differ."""


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and around a residual.

    Its keys and values are in the pages of cache group `group`. Layers of one group differ in their weights only.
    """

    def __init__(self, config: ModelConfig, *, group: int, sliding_window: int | None, dtype: jnp.dtype) -> None:
        self.group = group
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, sliding_window=sliding_window, dtype=dtype)
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
        """`layer` counts within the cache group."""
        group = self.group
        attended, kv_pages = self.self_attn(
            self.input_layernorm(x), pages[group], layer, batch.groups[group], batch, rope, options
        )
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), (*pages[:group], kv_pages, *pages[group + 1 :])


class Decoder(nnx.Module):
    """Token ids to hidden states to logits, with keys and values in pages.

    `layers` is a list of layers, or after `stack_layers` one layer whose parameters have a leading layer axis.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        windows = group_windows(config.layer_windows)
        self.layers = nnx.List(
            DecoderLayer(config, group=windows.index(window), sliding_window=window, dtype=dtype)
            for window in config.layer_windows
        )
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
        """One for the layers that see all tokens and one for those with a sliding window, as far as there are any."""
        config = self.config
        return cache_groups(config.layer_windows, config.num_kv_heads, config.head_dim)

    @property
    def can_stack(self) -> bool:
        """Whether `stack_layers` takes it: its layers are all of one kind."""
        return len(group_windows(self.config.layer_windows)) == 1

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
            windows = self.config.layer_windows
            for number, layer in enumerate(self.layers):
                index = windows[:number].count(windows[number])  # within the cache group
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
    """One layer. Being a jitted function it is traced once for each cache group, not for each unrolled layer."""
    return nnx.merge(graph, state)(x, pages, layer, batch, rope, options)


def stack_layers(model: Decoder) -> Decoder:
    """The same model with its layers stacked for `lax.scan`: compiles once for all layers instead of once for each.

    Raises ValueError for a model that cannot (`Decoder.can_stack`).
    """
    if not model.can_stack:
        raise ValueError(
            "layer_loop 'scanned' needs layers that are all alike, and this model mixes full and sliding-window "
            "attention: choose 'auto' or 'unrolled'"
        )
    graphs, states = zip(*(nnx.split(layer) for layer in model.layers), strict=True)
    model.layers = nnx.merge(graphs[0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
    return model
