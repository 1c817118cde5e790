"""The pure function that is compiled for each bucket."""

from typing import Protocol

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from paged_jax.execution.batch import FROM_SLOT, Batch
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.models.attention import AttentionBatch, AttentionOptions, GroupBatch
from paged_jax.models.decoder import Pages
from paged_jax.sampling.logprobs import Logprobs, token_logprobs
from paged_jax.sampling.sampler import ban, sample
from paged_jax.sampling.state import SamplingState, admit, gather, record
from pallas_kernels.kv_pages import page_shape


class Model(Protocol):
    """What a step asks of a model: an NNX module such as `Decoder`."""

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        ...

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Which pages it needs."""
        ...

    def __call__(
        self, token_ids: Int[Array, "T"], pages: Pages, batch: AttentionBatch, options: AttentionOptions
    ) -> tuple[Float[Array, "hidden T"], Pages]:
        """Final hidden states, and the pages with the tokens' keys and values stored."""
        ...

    def logits(self, hidden: Float[Array, "hidden S"]) -> Float[Array, "S vocab"]:
        """Scores of the next token."""
        ...


def engine_step(
    graph: nnx.GraphDef,
    options: AttentionOptions,
    max_logprobs: int,
    weights: nnx.State,
    pages: Pages,
    sampling: SamplingState,
    batch: Batch,
) -> tuple[Pages, SamplingState, Int[Array, "R"], Logprobs | None]:
    """Embed, layers, logits of the rows that sample, sample. Jitted with `pages` and `sampling` donated.

    Log-probabilities, with those of the `max_logprobs` most likely tokens, are zeros unless the batch wants them, and
    None if `max_logprobs` is 0.
    """
    model: Model = nnx.merge(graph, weights)
    sampling = admit(sampling, batch.admitted_slots, batch.admitted_rows)
    token_ids = jnp.where(batch.token_ids == FROM_SLOT, sampling.last_token[batch.token_slots], batch.token_ids)
    attention = AttentionBatch(
        positions=batch.positions,
        write_offsets=batch.write_offsets,
        kv_lens=batch.kv_lens,
        cu_q_lens=batch.cu_q_lens,
        num_seqs=batch.num_seqs,
        groups=tuple(GroupBatch(*group) for group in zip(batch.block_tables, batch.write_blocks, strict=True)),
    )
    hidden, pages = model(token_ids, pages, attention, options)
    logits = model.logits(hidden[:, batch.logit_rows])
    rows = gather(sampling, batch.sample_slots)
    tokens = sample(ban(logits, batch.banned_token_ids), rows, batch.sample_index, batch.sample_positions)
    logprobs = token_logprobs(logits, tokens, batch.wants_logprobs, max_logprobs) if max_logprobs else None
    return pages, record(sampling, batch.sample_slots, tokens), tokens, logprobs


def group_page_shape(group: CacheGroup, block_size: int, dtype: jnp.dtype, backend: str) -> tuple[int, int, int]:
    """The physical shape of one layer's page of one block of a cache group."""
    return page_shape(
        backend, block_size=block_size, num_kv_heads=group.num_kv_heads, head_dim=group.head_dim, dtype=dtype
    )
