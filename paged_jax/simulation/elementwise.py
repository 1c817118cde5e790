"""Time of kernels that read and write, and hardly compute."""

from paged_jax.simulation.hardware import Hardware
from paged_jax.simulation.layer_shapes import split
from paged_jax.simulation.model_shape import ModelShape

KERNELS_PER_LAYER = 4
"""Two norms, each with the residual sum before it; rotation with the write to the pages; activation."""


def elementwise_seconds(hardware: Hardware, num_bytes: float, kernels: int = 1) -> float:
    """Seconds of kernels that move `num_bytes` altogether."""
    bandwidth = hardware.memory_bandwidth * hardware.elementwise_bandwidth_efficiency
    return num_bytes / bandwidth + kernels * hardware.kernel_s


def elements_per_token(shape: ModelShape, tp: int) -> int:
    """Elements that all elementwise kernels of a step read and write for one token, on one of `tp` devices."""
    heads = split(shape.num_heads, tp) * shape.head_dim
    if shape.kv_lora_rank is None:
        keys = split(shape.num_kv_heads, tp) * shape.head_dim
        rotation = 2 * (heads + keys) + 2 * keys  # queries and keys turned, then keys and values written
    else:
        rotation = 2 * heads + 2 * (shape.kv_lora_rank + shape.qk_rope_head_dim)
    norms = (
        2 * 5 * shape.hidden_size
    )  # each reads the stream and what is added, writes the sum, reads it, writes its norm
    moe_layers, moe_inner = 0, 0
    if shape.moe_intermediate_size is not None:
        moe_layers = shape.num_layers - shape.num_dense_layers
        moe_inner = shape.moe_intermediate_size * (shape.num_experts_per_tok + shape.num_shared_experts)
    inner = (shape.num_layers - moe_layers) * split(shape.intermediate_size, tp) + moe_layers * split(moe_inner, tp)
    activation = inner * (3 if shape.gated_mlp else 2)
    embedding = 2 * shape.hidden_size
    return shape.num_layers * (norms + rotation) + activation + embedding
