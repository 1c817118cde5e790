"""Sizes that follow from a model's shape: of a page, and of hidden states that would be kept in its place."""

from paged_jax.simulation.layer_shapes import dense_matrices, expert_matrices
from paged_jax.simulation.model_shape import DTYPE_BYTES, ModelShape


def model_sizes(shape: ModelShape, *, dtype: str, kv_dtype: str, block_size: int) -> dict[str, float]:
    """The metrics of a model's shape; `dtype` is that of activations.

    A layer's keys and values are made of that layer's input, so that a checkpoint from which they could be made again
    holds the inputs of all layers, and making them costs the key and value projections.
    """
    hidden_state = shape.hidden_size * DTYPE_BYTES[dtype]
    return {
        "kv_page_bytes": shape.kv_bytes_per_token(kv_dtype) / shape.num_layers * block_size,
        "hidden_state_bytes": hidden_state,
        "hidden_bytes_per_token": hidden_state * shape.num_layers,
        "kv_projection_share": _kv_projections(shape) / _products(shape),
    }


def _kv_projections(shape: ModelShape) -> int:
    """Multiplications for a token's keys and values, of latent attention for its latent."""
    if shape.kv_lora_rank is None:
        columns = 2 * shape.num_kv_heads * shape.head_dim
    else:
        columns = shape.kv_lora_rank + (shape.qk_rope_head_dim or 0)
    return shape.num_layers * shape.hidden_size * columns


def _products(shape: ModelShape) -> int:
    """Multiplications of a token with the weights of all layers, those of the experts that it visits included."""
    dense = sum(m.inner * m.columns * m.layers * m.per_layer for m in dense_matrices(shape, 1))
    expert = sum(m.inner * m.columns * m.layers * m.per_layer for m in expert_matrices(shape, 1))
    return dense + expert * shape.num_experts_per_tok
