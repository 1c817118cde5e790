"""Time of moving KV pages and block tables between steps."""

from paged_jax.execution.plan import SchedulerOutput
from paged_jax.simulation.elementwise import elementwise_seconds
from paged_jax.simulation.hardware import Hardware
from paged_jax.simulation.layer_shapes import split
from paged_jax.simulation.model_shape import ModelShape

TABLE_ENTRY_BYTES = 4
"""Of a block id, int32."""


class TransferCost:
    """Copies of pages on the device, swaps to host memory and back, block tables from the host."""

    def __init__(
        self, hardware: Hardware, shape: ModelShape, *, block_size: int, kv_dtype: str, tensor_parallel_size: int
    ) -> None:
        self._hardware = hardware
        self._group_layers = [group.num_layers for group in shape.cache_groups()]
        latent = shape.kv_lora_rank is not None
        # latent attention has one latent for all heads, which every device holds whole
        share = 1.0 if latent else split(shape.num_kv_heads, tensor_parallel_size) / shape.num_kv_heads
        self._page_bytes = block_size * share * shape.kv_bytes_per_token(kv_dtype) / shape.num_layers
        self._pieces_per_page = 1 if latent else 2

    def block_tables(self, num_entries: int) -> float:
        """Seconds to bring so many table entries to the device, in one transfer."""
        hardware = self._hardware
        return hardware.host_link_latency_s + num_entries * TABLE_ENTRY_BYTES / hardware.host_link_bandwidth

    def copies(self, plan: SchedulerOutput) -> float:
        """Seconds of the plan's copy-on-write: blocks read and written in all layers, by a kernel per cache group."""
        total = 0.0
        for layers, copies in zip(self._group_layers, plan.copies, strict=True):
            if copies:
                total += elementwise_seconds(self._hardware, 2 * len(copies) * layers * self._page_bytes)
        return total

    def swaps(self, plan: SchedulerOutput) -> float:
        """Seconds of the plan's swaps, in which the step waits for them.

        As vLLM lays pages out (Kwon et al., 2023), keys and values of each layer of each block are pieces of their
        own, and each is a transfer with its latency.
        """
        pages = 0
        for swap in (*plan.swap_outs, *plan.swap_ins):
            pages += sum(n * len(ids) for n, ids in zip(self._group_layers, swap.device_blocks, strict=True))
        hardware = self._hardware
        latency = pages * self._pieces_per_page * hardware.host_link_latency_s
        return latency + pages * self._page_bytes / hardware.host_link_bandwidth
