"""Log-probabilities of sampled tokens and of the most likely ones, on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32


class Logprobs(NamedTuple):
    """One row per row of logits; the K most likely tokens in falling order, the lower id first of equals."""

    chosen: Float32[Array, "S"]
    """Log-probability of the chosen token."""
    rank: Int32[Array, "S"]
    """1 + the tokens that are more likely than the chosen one."""
    top_tokens: Int32[Array, "S K"]
    top_logprobs: Float32[Array, "S K"]


def token_logprobs(
    logits: Float[Array, "S V"], tokens: Int[Array, "S"], wanted: Bool[Array, ""], max_top: int
) -> Logprobs:
    """Log-probabilities of `tokens` and of the `max_top` most likely ones (at most V), zeros unless `wanted`.

    The logits are those of the model, before bans, temperature and filters; computed in float32.
    """
    num_top = min(max_top, logits.shape[1])

    def compute() -> Logprobs:
        x = logits.astype(jnp.float32)
        largest = jnp.max(x, axis=-1, keepdims=True)
        total = jnp.log(jnp.sum(jnp.exp(x - largest), axis=-1, keepdims=True))
        chosen = jnp.take_along_axis(x, tokens[:, None], axis=-1)
        rank = 1 + jnp.sum(x > chosen, axis=-1, dtype=jnp.int32)
        top, top_tokens = lax.top_k(x, num_top)
        # the largest first: added to the total, it would round that away
        chosen, top = chosen - largest - total, top - largest - total
        return Logprobs(chosen[:, 0], rank, top_tokens.astype(jnp.int32), top)

    # a step in which nobody asks pays for none of it
    return lax.cond(wanted, compute, lambda: jax.tree.map(jnp.zeros_like, jax.eval_shape(compute)))
