"""A device with round figures, on which step costs can be worked out by hand."""

from typing import Any

from paged_jax.simulation.hardware import GemmTile, Hardware
from paged_jax.simulation.model_shape import ModelShape

TERA, GIGA = 1e12, 1e9


def round_hardware(**changes: Any) -> Hardware:
    """1 TFLOP/s, 1 GB/s to memory and 1 MB/s to the host, perfect efficiencies, nothing fixed; the longer of computing
    and reading counts."""
    values: dict[str, Any] = {
        "name": "round",
        "kind": "gpu",
        "num_cores": 1,
        "memory_bytes": 10**9,
        "memory_bandwidth": GIGA,
        "peak_flops": {"float32": TERA, "float16": TERA},
        "gemm_tiles": (GemmTile(rows=1, columns=1, efficiency=1.0),),
        "gemm_bandwidth_efficiency": 1.0,
        "overlap": float("inf"),
        "elementwise_bandwidth_efficiency": 1.0,
        "attention_flops_efficiency": 1.0,
        "attention_saturation_tokens": 0.0,
        "attention_masked_share": 0.0,
        "attention_bandwidth_efficiency": 1.0,
        "page_overhead_bytes": 0.0,
        "attention_tile_tokens": 1024,
        "attention_decode_s": 0.0,
        "attention_chunk_s": 0.0,
        "kernel_s": 0.0,
        "kernel_launch_s": 0.0,
        "step_launch_s": 0.0,
        "host_step_s": 0.0,
        "host_request_s": 0.0,
        "eager_host_step_s": 0.0,
        "eager_host_request_s": 0.0,
        "host_link_bandwidth": 1e6,
        "host_link_latency_s": 0.0,
        "link_bandwidth": 1e6,
        "link_latency_s": 0.0,
        "link_devices": 4,
    }
    return Hardware(**{**values, **changes})


def small_shape(**changes: Any) -> ModelShape:
    """Two layers of 4 query heads on 2 KV heads of 8, hidden size 32, a gated MLP of 64, 100 words."""
    values: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
    }
    return ModelShape(**{**values, **changes})
