"""Rows of keys and values as one-byte numbers with a scale each."""

from __future__ import annotations

import contextlib

import jax.numpy as jnp

with contextlib.suppress(ImportError):  # a bare machine has only jax and numpy: annotations are not looked at there
    from jaxtyping import Array, Float, Shaped


def quantize_rows(
    rows: Float[Array, "T Hkv D"], dtype: jnp.dtype
) -> tuple[Shaped[Array, "T Hkv D"], Float[Array, "T Hkv"]]:
    """Each row as `dtype` (int8 or float8_e4m3fn), and the float32 scale that brings it back: row = stored * scale.

    The scale is the row's largest absolute value over the type's (symmetric, per token and head); int8 rounds to
    nearest even. A row of zeros has scale 1.

    Raises:
        ValueError: for a type of more than one byte.
    """
    dtype = jnp.dtype(dtype)
    if dtype.itemsize != 1:
        raise ValueError(f"{dtype} is no quantised type: use int8 or float8_e4m3fn")
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    wide = rows.astype(jnp.float32)
    peak = jnp.max(jnp.abs(wide), axis=-1)
    scales = jnp.where(peak == 0.0, 1.0, peak / largest)
    scaled = jnp.clip(wide / scales[..., None], -largest, largest)  # the division may round past the end
    return (jnp.round(scaled) if is_integer else scaled).astype(dtype), scales
