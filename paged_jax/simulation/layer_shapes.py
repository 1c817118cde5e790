"""The matrices that a model multiplies by in one step, as one device of a tensor-parallel group holds them."""

from typing import NamedTuple

from paged_jax.simulation.model_shape import ModelShape


class Matrix(NamedTuple):
    """[inner, columns] of weights, in `layers` layers, `per_layer` of them side by side in one launch."""

    inner: int
    columns: int
    layers: int
    per_layer: int = 1


def dense_matrices(shape: ModelShape, tp: int) -> tuple[Matrix, ...]:
    """Those that every token goes through, the logits' aside: projections of attention and MLPs.

    Query, key and value projections are one matrix, gate and up as well, as every serving engine fuses them.
    """
    matrices = list(_attention(shape, tp))
    num_dense = shape.num_dense_layers if shape.num_experts else shape.num_layers
    matrices += _mlp(shape, shape.intermediate_size, num_dense, tp)
    if shape.moe_intermediate_size is not None:
        moe_layers = shape.num_layers - num_dense
        matrices.append(Matrix(shape.hidden_size, shape.num_experts, moe_layers))  # the router
        matrices += _mlp(shape, shape.moe_intermediate_size * shape.num_shared_experts, moe_layers, tp)
    return tuple(m for m in matrices if m.layers and m.columns and m.inner)


def expert_matrices(shape: ModelShape, tp: int) -> tuple[Matrix, ...]:
    """One expert's, each device holding a slice of every expert; none for a model without experts."""
    if shape.moe_intermediate_size is None:
        return ()
    return tuple(_mlp(shape, shape.moe_intermediate_size, shape.num_layers - shape.num_dense_layers, tp))


def distinct_experts(shape: ModelShape, num_tokens: int) -> float:
    """Expected number of experts that at least one token visits, if each token picks its own k of E evenly."""
    missed = (1.0 - shape.num_experts_per_tok / shape.num_experts) ** num_tokens
    return shape.num_experts * (1.0 - missed)


def split(count: int, tp: int) -> int:
    """What the fullest device holds of `count` things that are divided among `tp` devices."""
    return -(-count // tp)


def _mlp(shape: ModelShape, inner: int, layers: int, tp: int) -> list[Matrix]:
    inner = split(inner, tp)
    up = Matrix(shape.hidden_size, inner * (2 if shape.gated_mlp else 1), layers)
    return [up, Matrix(inner, shape.hidden_size, layers)]


def _attention(shape: ModelShape, tp: int) -> list[Matrix]:
    layers, hidden, heads = shape.num_layers, shape.hidden_size, split(shape.num_heads, tp)
    if shape.kv_lora_rank is None:
        columns = (heads + 2 * split(shape.num_kv_heads, tp)) * shape.head_dim
        return [Matrix(hidden, columns, layers), Matrix(heads * shape.head_dim, hidden, layers)]
    queries = heads * shape.head_dim
    if shape.q_lora_rank is None:
        matrices = [Matrix(hidden, queries, layers)]
    else:
        matrices = [Matrix(hidden, shape.q_lora_rank, layers), Matrix(shape.q_lora_rank, queries, layers)]
    # keys' and values' up-projections: absorbed into queries and outputs head by head, or applied to the latents;
    # either way the same weights and, for the step's own tokens, the same FLOPs
    return [
        *matrices,
        Matrix(hidden, shape.kv_lora_rank + shape.qk_rope_head_dim, layers),
        Matrix(shape.kv_lora_rank, shape.qk_nope_head_dim, layers, heads),
        Matrix(shape.kv_lora_rank, shape.v_head_dim, layers, heads),
        Matrix(heads * shape.v_head_dim, hidden, layers),
    ]
