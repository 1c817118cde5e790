"""Time of one layer's attention in one step: decodes read pages, prompts compute."""

from collections.abc import Sequence

from paged_jax.execution.plan import ScheduledRequest
from paged_jax.simulation.hardware import Hardware
from paged_jax.simulation.layer_shapes import split
from paged_jax.simulation.model_shape import DTYPE_BYTES, ModelShape
from paged_jax.simulation.roofline import overlapped


class AttentionCost:
    """Layers that have one sliding window, or none, on one device of a tensor-parallel group.

    With latent attention, decodes work on the latents themselves (absorbed), prompts on keys and values made of them.
    """

    def __init__(
        self,
        hardware: Hardware,
        shape: ModelShape,
        *,
        window: int | None,
        block_size: int,
        dtype: str,
        kv_dtype: str,
        tensor_parallel_size: int = 1,
        contiguous: bool = False,
    ) -> None:
        self._window, self._overlap = window, hardware.overlap
        self._decode_s, self._chunk_s = hardware.attention_decode_s, hardware.attention_chunk_s
        self._masked_share = hardware.attention_masked_share
        self._longest, self._tile = hardware.attention_longest, hardware.attention_tile_tokens
        self._unit = min(block_size, self._tile)  # tokens of one copy
        heads = split(shape.num_heads, tensor_parallel_size)
        if shape.kv_lora_rank is None:
            kv_heads = split(shape.num_kv_heads, tensor_parallel_size)
            token_bytes = 2 * kv_heads * shape.head_dim * DTYPE_BYTES[kv_dtype]
            decode_flops = chunk_flops = 4 * heads * shape.head_dim
            expand_flops = 0
        else:
            kv_heads = 1  # one latent for all heads, which every device holds whole
            width = shape.kv_lora_rank + shape.qk_rope_head_dim
            token_bytes = width * DTYPE_BYTES[kv_dtype]
            decode_flops = 2 * heads * (width + shape.kv_lora_rank)
            chunk_flops = 2 * heads * (shape.head_dim + shape.v_head_dim)
            # the latents of earlier chunks become keys and values again
            expand_flops = 2 * heads * shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)
        # a thread block of a GPU copies one head's part of a page, other kernels copy pages whole
        copies = kv_heads if hardware.kind == "gpu" else 1
        overhead = 0 if contiguous else copies * hardware.page_overhead_bytes
        bandwidth = hardware.memory_bandwidth * hardware.attention_bandwidth_efficiency
        copied = self._unit * token_bytes + overhead
        self._unit_s = copied / bandwidth
        self.page_efficiency = self._unit * token_bytes / copied
        """Of the time in which a decode reads a full page, the share that contiguous memory would take."""
        peak = hardware.flops(dtype) * hardware.attention_flops_efficiency
        self._tile_s = self._tile * decode_flops / peak
        self._pair_s, self._expand_s = chunk_flops / peak, expand_flops / peak
        self._query_s = self._pair_s * hardware.attention_saturation_tokens

    def seconds(self, contexts: Sequence[int], chunks: Sequence[ScheduledRequest] = (), padded_rows: int = 0) -> float:
        """Seconds of one layer for decodes that see `contexts` tokens each, themselves included, and for chunks."""
        fixed = compute = 0.0
        units = 0
        if contexts:
            fixed = self._decode_s
            if self._longest:
                contexts = [max(contexts)] * max(padded_rows, len(contexts))
            unit, tile, window = self._unit, self._tile, self._window
            if window is None:
                round_up, round_up_tile = unit - 1, tile - 1
                units = sum([(context + round_up) // unit for context in contexts])
                compute = self._tile_s * sum([(context + round_up_tile) // tile for context in contexts])
            else:
                units = sum([self._units(context, context - 1) for context in contexts])
                compute = self._tile_s * sum([-(-min(context, window) // tile) for context in contexts])
        if chunks:
            fixed += self._chunk_s
            for chunk in chunks:
                start, count = chunk.start, chunk.num_tokens
                units += self._units(start + count, start)
                compute += self._computed(start, count) * self._pair_s + count * self._query_s + start * self._expand_s
        return overlapped(compute, units * self._unit_s, self._overlap) + fixed

    def _units(self, end: int, first_query: int) -> int:
        """Copies that bring what tokens `first_query` to `end` - 1 see."""
        first = 0 if self._window is None else max(0, first_query - self._window + 1)
        return -(-end // self._unit) - first // self._unit

    def _computed(self, start: int, count: int) -> float:
        """Pairs of a query and a key that the kernel computes: those that count, and its share of the masked ones.

        Without a window a chunk masks the count * (count - 1) / 2 pairs above its diagonal; with one, a kernel that
        skips what is too far below the diagonal is taken to skip as much above it.
        """
        masked = self._pairs(0, count) - count  # as many above the chunk's own diagonal as below
        return self._pairs(start, count) + self._masked_share * masked

    def _pairs(self, start: int, count: int) -> float:
        """Pairs of a query and a key that it sees."""
        window = self._window
        if window is None or start + count <= window:
            return count * (start + (count + 1) / 2)
        growing = max(0, window - start)  # queries that the window does not yet cut short
        return growing * (start + (growing + 1) / 2) + (count - growing) * window
