"""How a call of the Mosaic GPU attention kernel is laid out, and which calls it refuses."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.paged_attention.query_tiles import num_query_tiles
from pallas_kernels.paged_attention.shapes import AttentionShapes
from pallas_kernels.paged_attention.tiles import DEFAULT_TILES

NUM_ROWS = 64
"""Rows of a query tile: wgmma's M."""
NUM_CONSUMERS = 2
"""Warp groups that compute; one more copies."""
NUM_KEYS = 64
"""Keys that are multiplied at once: wgmma's K with a swizzle of 128 bytes."""
SHARED_BYTES = 226 * 1024
"""Shared memory of a block on Hopper (227 KiB), less the barriers and the compiler's own scratch."""
MAX_STAGES = 8
NUM_SMS = 132
"""Of an H100 or H200; only decides how often keys are split."""
MIN_TILES_PER_SPLIT = 8
MAX_HEAD_DIM = 256
COMPUTE_TYPES = tuple(jnp.dtype(t) for t in (jnp.bfloat16, jnp.float16, jnp.float32))
PAGE_TYPES = (*COMPUTE_TYPES, *(jnp.dtype(t) for t in (jnp.int8, jnp.float8_e4m3fn)))


class Plan(NamedTuple):
    """What is static about a launch."""

    num_tiles: int
    num_kv_heads: int
    group: int
    query_tokens: int
    head_dim: int
    """Of the pages: a multiple of 64."""
    dtype: Any
    """Of the products' operands."""
    kv_dtype: Any
    key_tile: int
    unit: int
    """Tokens of one copy: divides the page and the key tile."""
    block_size: int
    table_width: int
    wgmma: bool
    repack: bool
    """Whether tiles go from plain shared memory through registers into the swizzled layout that wgmma reads."""
    quantized: bool
    piece: int
    """Elements of a head that lie together in shared memory and are accumulated at once: 64 or 128."""
    by_columns: bool
    """Whether the consumers divide the columns of the output among them instead of the keys."""
    stages: int
    splits: int
    scale: float = 1.0
    soft_cap: float | None = None
    windowed: bool = False

    @property
    def reads_raw(self) -> bool:
        """Whether the ring holds tokens as the pages have them, K and V side by side."""
        return self.repack or not self.wgmma

    @property
    def units(self) -> int:
        """Copies of K (or of K and V together) in a key tile."""
        return self.key_tile // self.unit

    @property
    def pieces(self) -> int:
        """Pieces of a head."""
        return self.head_dim // self.piece

    @property
    def own_pieces(self) -> int:
        """Pieces of the output that one consumer accumulates."""
        return self.pieces // NUM_CONSUMERS if self.by_columns else self.pieces

    @property
    def copies(self) -> int:
        """Copies of one unit."""
        return 1 if self.reads_raw else 2 * self.pieces

    @property
    def barriers(self) -> int:
        """Barriers of the ring: who waits for one must wait each time, so consumers that take turns share none."""
        return self.stages if self.by_columns else self.stages * NUM_CONSUMERS

    @property
    def arrivals(self) -> int:
        """Arrivals that make a key tile complete."""
        return self.units * self.copies + self.quantized


def num_splits(num_tiles: int, num_kv_heads: int, table_width: int, block_size: int, key_tile: int) -> int:
    """Into how many parts the keys of each tile are split, so that few and long sequences fill the device too."""
    cells = num_tiles * num_kv_heads
    if cells >= NUM_SMS:
        return 1
    key_tiles = table_width * block_size // key_tile
    return max(1, min(2 * NUM_SMS // cells, key_tiles // MIN_TILES_PER_SPLIT))


def plan_call(shapes: AttentionShapes, tiles: tuple[int, int] | None) -> Plan:
    """How a call of these shapes runs; `stages` < 1 if its key tiles do not fit into shared memory."""
    same = shapes.kv_dtype == shapes.dtype
    # float16 does not hold a small probability times the scale of a value: with quantised pages it is no 16-bit product
    wgmma = shapes.dtype.itemsize == 2 and (same or (shapes.is_quantized and shapes.dtype == jnp.bfloat16))
    query_tokens, key_tile = tiles or DEFAULT_TILES["mosaic_gpu" if wgmma else "mosaic_gpu, float32"]
    query_tokens = query_tokens or NUM_ROWS // shapes.group
    unit = math.gcd(shapes.block_size, key_tile)
    repack = wgmma and (not same or unit % 8 != 0)
    dtype = shapes.dtype if wgmma else jnp.dtype(jnp.float32)
    head_dim = shapes.page_head_dim
    piece = 128 if head_dim % 128 == 0 and wgmma and not repack else 64
    by_columns = head_dim > 192

    tile_bytes = key_tile * head_dim
    fixed = NUM_ROWS * head_dim * dtype.itemsize
    if not by_columns:
        fixed += NUM_ROWS * (piece + 2) * 4
    if wgmma:
        fixed += NUM_CONSUMERS * NUM_ROWS * NUM_KEYS * dtype.itemsize
    if repack:
        fixed += NUM_CONSUMERS * NUM_KEYS * head_dim * dtype.itemsize
    stage = 2 * tile_bytes * shapes.kv_dtype.itemsize + 8 * key_tile * shapes.is_quantized
    tile_count = num_query_tiles(shapes.num_tokens, shapes.num_sequences, query_tokens)
    return Plan(
        num_tiles=tile_count,
        num_kv_heads=shapes.num_kv_heads,
        group=shapes.group,
        query_tokens=query_tokens,
        head_dim=head_dim,
        dtype=dtype,
        kv_dtype=shapes.kv_dtype,
        key_tile=key_tile,
        unit=unit,
        block_size=shapes.block_size,
        table_width=shapes.table_width,
        wgmma=wgmma,
        repack=repack,
        quantized=shapes.is_quantized,
        piece=piece,
        by_columns=by_columns,
        stages=min((SHARED_BYTES - fixed) // stage, MAX_STAGES),
        splits=num_splits(tile_count, shapes.num_kv_heads, shapes.table_width, shapes.block_size, key_tile),
    )


def refusal(shapes: AttentionShapes, tiles: tuple[int, int] | None) -> str | None:
    """Why this kernel cannot serve a call of these shapes: one sentence with the limit and the remedy, or None."""
    if shapes.dtype not in COMPUTE_TYPES:
        return f"the GPU kernel takes bfloat16, float16 and float32 queries, not {shapes.dtype}: cast them"
    if shapes.kv_dtype not in PAGE_TYPES:
        names = ", ".join(str(t) for t in PAGE_TYPES)
        return f"the GPU kernel reads pages of {names}, not {shapes.kv_dtype}: convert the pages"
    if shapes.group > NUM_ROWS:
        return (
            f"the GPU kernel serves at most {NUM_ROWS} query heads for each KV head, not {shapes.group}: "
            "use another implementation"
        )
    if shapes.page_head_dim % 64:
        return (
            f"the GPU kernel needs page rows of a multiple of 64 elements, not {shapes.page_head_dim}: "
            'allocate the pages with page_shape("gpu", ...)'
        )
    if shapes.page_head_dim > MAX_HEAD_DIM:
        return (
            f"the GPU kernel keeps at most {MAX_HEAD_DIM} elements of a head in registers, not "
            f"{shapes.page_head_dim}: use another implementation"
        )
    if tiles is not None:
        query_tokens, key_tile = tiles
        if not 1 <= query_tokens <= NUM_ROWS // shapes.group:
            return (
                f"a query tile of the GPU kernel has {NUM_ROWS} rows: with {shapes.group} query heads for each KV head "
                f"tiles take 1 to {NUM_ROWS // shapes.group} query tokens, not {query_tokens}"
            )
        if key_tile not in (64, 128):
            return f"key tiles of the GPU kernel have 64 or 128 tokens, not {key_tile}: choose one of the two"
    plan = plan_call(shapes, tiles)
    # One wide tile at a time would be served, but nothing would be on the way meanwhile.
    if plan.stages < (1 if plan.key_tile <= NUM_KEYS else 2):
        return (
            f"key tiles of {plan.key_tile} tokens of {shapes.page_head_dim} {shapes.kv_dtype} elements do not fit into "
            "shared memory twice: choose tiles with fewer keys"
        )
    return None
