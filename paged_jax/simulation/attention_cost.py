"""Time of the attention kernel in one step: decodes read whole pages, prompts compute."""

from collections.abc import Sequence
from typing import NamedTuple

from paged_jax.execution.plan import SchedulerOutput
from paged_jax.simulation.hardware import Hardware
from paged_jax.simulation.layer_shapes import split
from paged_jax.simulation.model_shape import DTYPE_BYTES, ModelShape
from paged_jax.simulation.roofline import overlapped


class AttentionWork(NamedTuple):
    """What one layer of a kind has to do for a plan, on one device."""

    seconds: float
    pages: int
    """Pages that its block tables name to the kernel."""


class AttentionCost:
    """Attention of one kind of layer: those with one sliding window, or those without."""

    def __init__(
        self,
        hardware: Hardware,
        shape: ModelShape,
        *,
        window: int | None,
        block_size: int,
        dtype: str,
        kv_dtype: str,
        tensor_parallel_size: int,
        contiguous: bool,
    ) -> None:
        latent = shape.kv_lora_rank is not None
        self._window, self._block_size, self._overlap = window, block_size, hardware.overlap
        self._fixed = hardware.kernel_s
        heads = split(shape.num_heads, tensor_parallel_size)
        # latent attention has one latent for all heads, which every device holds whole
        kv_heads = 1 if latent else split(shape.num_kv_heads, tensor_parallel_size)
        kv_bytes = DTYPE_BYTES[kv_dtype]
        if latent:
            width = shape.kv_lora_rank + shape.qk_rope_head_dim
            token_bytes = width * kv_bytes
            decode_flops = 2 * heads * (width + shape.kv_lora_rank)  # absorbed: scores over both parts, then latents
            chunk_flops = 2 * heads * (shape.head_dim + shape.v_head_dim)
            # latents of earlier chunks become keys and values again
            self._expand_flops = 2 * heads * shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)
        else:
            token_bytes = 2 * kv_heads * shape.head_dim * kv_bytes
            decode_flops = chunk_flops = 4 * heads * shape.head_dim
            self._expand_flops = 0
        self._page_s = block_size * token_bytes / (hardware.memory_bandwidth * hardware.attention_bandwidth_efficiency)
        peak = hardware.flops(dtype) * hardware.attention_flops_efficiency
        self._decode_tile_s = hardware.attention_tile_tokens * decode_flops / peak
        self._chunk_pair_s, self._expand_s = chunk_flops / peak, self._expand_flops / peak
        self._tile_rows, self._tile_tokens = hardware.attention_tile_rows, hardware.attention_tile_tokens
        # a thread block of a GPU reads one head's part of a page, other kernels read pages whole
        readers = kv_heads if hardware.kind == "gpu" else 1
        self._lookup_s = 0.0 if contiguous else readers * hardware.page_lookup_s / hardware.num_cores

    def work(self, contexts: Sequence[int], plan: SchedulerOutput) -> AttentionWork:
        """One layer's work for decodes that see `contexts` tokens each, themselves included, and the plan's chunks."""
        pages, tiles = self._decode_pages(contexts)
        compute, reads = tiles * self._decode_tile_s, pages
        for chunk in plan.chunks:
            start, count = chunk.start, chunk.num_tokens
            chunk_pages = self._pages(start + count, start)
            pages += chunk_pages
            reads += chunk_pages
            compute += self._pairs(start, count) * self._chunk_pair_s + start * self._expand_s
        if not pages:
            return AttentionWork(0.0, 0)
        memory = reads * self._page_s
        return AttentionWork(overlapped(compute, memory, self._overlap) + pages * self._lookup_s + self._fixed, pages)

    def _decode_pages(self, contexts: Sequence[int]) -> tuple[int, int]:
        """Pages read, and tiles of keys computed."""
        block, tile, window = self._block_size, self._tile_tokens, self._window
        if window is None:
            return sum(-(-c // block) for c in contexts), sum(-(-c // tile) for c in contexts)
        pages = sum(self._pages(c, c - 1) for c in contexts)
        return pages, sum(-(-min(c, window) // tile) for c in contexts)

    def _pages(self, end: int, first_query: int) -> int:
        """Pages that hold what tokens `first_query` to `end` - 1 see."""
        first = 0 if self._window is None else max(0, first_query - self._window + 1)
        return -(-end // self._block_size) - first // self._block_size

    def _pairs(self, start: int, count: int) -> float:
        """Pairs of a query and a key that it sees, queries padded to whole tiles; half a tile is masked."""
        padded = -(-count // self._tile_rows) * self._tile_rows
        window = self._window
        if window is None or start + count <= window:
            seen = count * start + count * (count + 1) / 2
        elif start >= window:
            seen = count * window
        else:
            growing = window - start
            seen = growing * start + growing * (growing + 1) / 2 + (count - growing) * window
        return seen * padded / count
