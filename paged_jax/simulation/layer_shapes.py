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


def held_parameters(shape: ModelShape, tp: int) -> int:
    """Weights that the fullest device holds: those of these matrices, and embeddings, norms and biases besides.

    Norms, positions and what follows an all-reduce are whole on every device, as are matrices of latent attention and
    routers that do not belong to heads or experts. With one device, `shape.num_parameters`.
    """
    experts = [m._replace(per_layer=shape.num_experts) for m in expert_matrices(shape, tp)]
    matrices = sum(m.inner * m.columns * m.layers * m.per_layer for m in (*dense_matrices(shape, tp), *experts))
    embeddings = split(shape.vocab_size, tp) * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    if shape.learned_positions:
        embeddings += (shape.max_position_embeddings + 2) * shape.hidden_size  # as in `num_parameters`
    return matrices + embeddings + _norms(shape) + _biases(shape, tp)


def distinct_experts(shape: ModelShape, num_tokens: int) -> float:
    """Expected number of experts that at least one token visits, if each token picks its own k of E evenly."""
    missed = (1.0 - shape.num_experts_per_tok / shape.num_experts) ** num_tokens
    return shape.num_experts * (1.0 - missed)


def split(count: int, tp: int) -> int:
    """What the fullest device holds of `count` things that are divided among `tp` devices."""
    return -(-count // tp)


def _norms(shape: ModelShape) -> int:
    norms = (2 * shape.num_layers + 1) * shape.hidden_size * (2 if shape.norm_bias else 1)
    if shape.qk_norm:
        norms += shape.num_layers * 2 * shape.head_dim
    if shape.kv_lora_rank is not None:
        norms += shape.num_layers * (shape.kv_lora_rank + (shape.q_lora_rank or 0))
    return norms


def _biases(shape: ModelShape, tp: int) -> int:
    attention = 0
    if shape.attention_bias or shape.qkv_bias:
        attention += (split(shape.num_heads, tp) + 2 * split(shape.num_kv_heads, tp)) * shape.head_dim
    if shape.attention_bias:
        attention += shape.hidden_size
    moe_layers = shape.num_layers - shape.num_dense_layers if shape.num_experts else 0
    mlps = moe_layers * shape.num_experts if shape.router_bias else 0
    if shape.mlp_bias:
        up = 2 if shape.gated_mlp else 1
        mlps += (shape.num_layers - moe_layers) * (up * split(shape.intermediate_size, tp) + shape.hidden_size)
        if shape.moe_intermediate_size is not None:
            expert = up * split(shape.moe_intermediate_size, tp) + shape.hidden_size
            mlps += moe_layers * (shape.num_experts + shape.num_shared_experts) * expert
    return shape.num_layers * attention + mlps


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
