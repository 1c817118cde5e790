"""Rotary position embeddings (Su et al., 2021) and their scalings for long contexts."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from paged_jax.models.config import ModelConfig


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies, float32 [head_dim / 2], and the factor that multiplies cosines and sines.

    Follows the Hugging Face definitions of `default`, `linear`, `llama3` and `yarn` (arXiv 2309.00071).
    """
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    frequencies = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling.kind == "linear":
        return (frequencies / scaling.factor).astype(np.float32), 1.0
    if scaling.kind == "llama3":
        original = _required(scaling.original_max_position_embeddings, "original_max_position_embeddings")
        low = _required(scaling.low_freq_factor, "low_freq_factor")
        high = _required(scaling.high_freq_factor, "high_freq_factor")
        turns = original * frequencies / (2 * math.pi)  # of each pair within the original context
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32), 1.0
    if scaling.kind == "yarn":
        return _yarn(config, frequencies)
    return frequencies.astype(np.float32), 1.0


def _yarn(config: ModelConfig, frequencies: np.ndarray) -> tuple[np.ndarray, float]:
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    original = _required(scaling.original_max_position_embeddings, "original_max_position_embeddings")

    def dimension_with_turns(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_with_turns(_required(scaling.beta_fast, "beta_fast"))
    high = dimension_with_turns(_required(scaling.beta_slow, "beta_slow"))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no length would divide by zero
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    scaled = frequencies / scaling.factor * ramp + frequencies * (1 - ramp)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    factor = scaling.attention_factor
    if factor is None:
        if scaling.mscale and scaling.mscale_all_dim:
            factor = magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
        else:
            factor = magnitude(1.0)
    return scaled.astype(np.float32), factor


def _required[T](value: T | None, name: str) -> T:
    if value is None:
        raise ValueError(f"rope scaling needs {name}")
    return value


def rope_tables(
    config: ModelConfig, positions: Int[Array, "T"]
) -> tuple[Float[Array, "T 1 half"], Float[Array, "T 1 half"]]:
    """Cosines and sines of each position, float32, ready to broadcast over heads."""
    frequencies, factor = rope_frequencies(config)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None]
    return (jnp.cos(angles) * factor)[:, None], (jnp.sin(angles) * factor)[:, None]


def apply_rope(
    x: Float[Array, "T heads D"], tables: tuple[Float[Array, "T 1 half"], Float[Array, "T 1 half"]]
) -> Float[Array, "T heads D"]:
    """Turn each pair (x[i], x[i + D/2]) by its position's angle, in float32."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
