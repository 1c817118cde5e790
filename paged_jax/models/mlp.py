"""Gated feed-forward layer: SwiGLU (Shazeer, 2020)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from paged_jax.models.config import ModelConfig
from paged_jax.models.layers import Linear


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)

    def __call__(self, x: Float[Array, "hidden T"]) -> Float[Array, "hidden T"]:
        """In x's dtype."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
