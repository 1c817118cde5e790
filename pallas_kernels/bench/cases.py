"""What is timed: settings of a run, the points of its grid, and batches laid into pages."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_pages import allocate_pages, page_shape
from pallas_kernels.paged_attention import AttentionShapes, page_backend, pick_implementation

type Tiles = tuple[int, int]

CONTIGUOUS_PAGE = 512
"""Tokens of a page of the contiguous cache, or the context if that is less: the largest page that kernels promise."""
FOREIGN = ("torch", "jax")
"""Not ours: torch's SDPA over contiguous keys and values, and JAX's own paged attention."""
PLATFORM_DEFAULTS = {
    "cpu": ("xla", "contiguous"),
    "gpu": ("mosaic_gpu", "triton", "xla", "contiguous", "torch", "jax"),
    "tpu": ("mosaic_tpu", "xla", "contiguous", "jax"),
}
_TRIED_KEY_TILES = {"xla": (32, 128), "mosaic_tpu": (64, 256), "mosaic_gpu": (128,), "triton": (32, 128)}
_TRIED_ROWS = {"mosaic_tpu": 128, "mosaic_gpu": 64, "triton": 16}


@dataclass(frozen=True)
class Settings:
    """One run of the benchmark."""

    platform: str
    implementations: tuple[str, ...]
    batch: tuple[int, ...]
    context: tuple[int, ...]
    page_sizes: tuple[int, ...]
    tiles: tuple[Tiles | None, ...]
    """None among them are an implementation's defaults; empty: those, and others at the largest batch and context."""
    heads: tuple[int, int, int]
    """Query heads, KV heads, head_dim."""
    dtype: str
    kv_dtype: str
    repeats: int
    trial_seconds: float
    """How long one trial at least takes: as many calls as fill it."""
    copy_bytes: int
    """Of the array whose copying gives the bandwidth."""
    matmul_size: int
    """Of the square matrices whose product gives the other roof."""
    seed: int = 0

    @property
    def is_quantized(self) -> bool:
        """Whether the pages need scales."""
        return jnp.dtype(self.kv_dtype).itemsize == 1


@dataclass(frozen=True)
class Point:
    """One cell of the grid: `batch` sequences that decode one token each over `context` tokens."""

    implementation: str
    batch: int
    context: int
    page_size: int | None
    """None where nothing is paged."""
    tiles: Tiles | None = None

    def __str__(self) -> str:
        words = [self.implementation, f"batch {self.batch}", f"context {self.context}"]
        words += [f"page {self.page_size}"] if self.page_size else []
        return ", ".join(words + ([f"tiles {self.tiles[0]},{self.tiles[1]}"] if self.tiles else []))


class Batch(NamedTuple):
    """Arguments of one call."""

    q: jax.Array
    kv_pages: jax.Array
    kv_lens: jax.Array
    block_tables: jax.Array
    cu_q_lens: jax.Array
    num_seqs: jax.Array
    kv_scales: jax.Array | None


def points(settings: Settings) -> list[Point]:
    """The whole grid, in the order of the settings."""
    largest = max(settings.batch), max(settings.context)
    found = []
    for batch, context, name in itertools.product(settings.batch, settings.context, settings.implementations):
        point = Point(name, batch, context, None)
        if name == "contiguous":
            found.append(replace(point, page_size=min(CONTIGUOUS_PAGE, context)))
        elif name == "torch":
            found.append(point)
        elif name == "jax":
            found += [replace(point, page_size=size) for size in settings.page_sizes]
        else:
            tried = [None, *_tried_tiles(name, settings)] if (batch, context) == largest else [None]
            cells = itertools.product(settings.page_sizes, settings.tiles or tried)
            found += [replace(point, page_size=size, tiles=tiles) for size, tiles in cells]
    return found


def groups(cells: list[Point], seed: int) -> Iterator[list[Point]]:
    """Points of one batch and context each, which are in memory together and timed in turns; in random order."""
    shapes = sorted({(p.batch, p.context) for p in cells})
    for i in np.random.default_rng(seed).permutation(len(shapes)):
        yield [p for p in cells if (p.batch, p.context) == shapes[i]]


def refusal(point: Point, settings: Settings) -> str | None:
    """Why a point cannot be measured here: one sentence, or None."""
    name = point.implementation
    if name in FOREIGN:
        if settings.is_quantized:
            return f"{name} is compared on float pages only, not on {settings.kv_dtype}"
        if name == "jax" and settings.platform == "cpu":
            return "JAX's own paged attention runs on a GPU or TPU only"
        if name == "torch" and settings.platform == "gpu":
            try:
                import torch
            except ImportError:
                return "torch is not installed"
            return None if torch.cuda.is_available() else "this torch sees no GPU"
        return "torch is compared on a GPU only" if name == "torch" else None
    try:
        kernel_of(point, settings)
    except ValueError as error:
        return str(error)
    return None


@cache  # the choice is logged each time that it is made
def kernel_of(point: Point, settings: Settings) -> str:
    """The implementation that serves a point, "contiguous" resolved; ValueError with the reason if it cannot."""
    name = None if point.implementation == "contiguous" else point.implementation
    size = point.page_size or CONTIGUOUS_PAGE
    num_heads, num_kv_heads, head_dim = settings.heads
    _, page_rows, page_head_dim = _page_shape(name, size, settings)
    shapes = AttentionShapes(
        num_tokens=point.batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=jnp.dtype(settings.dtype),
        num_sequences=point.batch,
        table_width=-(-point.context // size),
        num_pages=1 + point.batch * -(-point.context // size),
        block_size=size,
        page_rows=page_rows,
        page_head_dim=page_head_dim,
        kv_dtype=jnp.dtype(settings.kv_dtype),
    )
    return pick_implementation(shapes, implementation=name, tiles=point.tiles).name


def make_batch(
    settings: Settings,
    q_lens: list[int],
    kv_lens: list[int],
    page_size: int,
    kernel: str,
    *,
    in_order: bool = False,
    poisoned: bool = False,
) -> Batch:
    """Random queries and pages. A sequence's pages lie in random order, or one after the other if `in_order`.

    `poisoned`: NaN in all slots past a sequence's end (in their scales where the pages are integers).
    """
    num_heads, num_kv_heads, head_dim = settings.heads
    rng = np.random.default_rng(settings.seed)
    rows, width = len(q_lens), -(-max(kv_lens) // page_size)
    num_pages = 1 + rows * width
    order = np.arange(rows * width) if in_order else rng.permutation(rows * width)
    tables = 1 + order.reshape(rows, width).astype(np.int32)
    used = np.zeros((num_pages, page_size), bool)
    for row, length in zip(tables, kv_lens, strict=True):
        positions = np.arange(length)
        used[row[positions // page_size], positions % page_size] = True
    key_q, key_kv = jax.random.split(jax.random.key(settings.seed))
    kv_dtype = jnp.dtype(settings.kv_dtype)
    shape = _page_shape(kernel, page_size, settings)
    pages = allocate_pages(num_pages, shape, kv_dtype)
    own = (num_pages, page_size, 2 * num_kv_heads, head_dim)

    @jax.jit
    def fill(pages, keep):
        values = jax.random.normal(key_kv, own, jnp.bfloat16 if kv_dtype.itemsize < 4 else jnp.float32)
        values = jnp.round(values * 30) if kv_dtype == jnp.int8 else values
        pages = pages.at[:, :, : own[2], : own[3]].set(values.astype(kv_dtype))
        if poisoned and kv_dtype != jnp.int8:
            pages = jnp.where(keep[:, :, None, None], pages, jnp.asarray(jnp.nan, kv_dtype))
        return pages

    scales = None
    if settings.is_quantized:
        scale = np.where(used, 1 / 30 if kv_dtype == jnp.int8 else 1.0, np.nan if poisoned else 0.0)
        scales = jnp.broadcast_to(jnp.asarray(scale, jnp.float32)[:, :, None], (*scale.shape, shape[1]))
    return Batch(
        jax.random.normal(key_q, (sum(q_lens), num_heads, head_dim), jnp.dtype(settings.dtype)),
        fill(pages, jnp.asarray(used)),
        jnp.asarray(kv_lens, jnp.int32),
        jnp.asarray(tables),
        jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
        jnp.asarray([rows], jnp.int32),
        scales,
    )


def bytes_per_call(point: Point, settings: Settings) -> int:
    """Bytes that attention cannot avoid: keys, values (and their scales) of all visible tokens, queries, outputs."""
    num_heads, num_kv_heads, head_dim = settings.heads
    row = head_dim * jnp.dtype(settings.kv_dtype).itemsize + (4 if settings.is_quantized else 0)
    queries = point.batch * num_heads * head_dim * jnp.dtype(settings.dtype).itemsize
    return point.batch * point.context * 2 * num_kv_heads * row + 2 * queries


def flops_per_call(point: Point, settings: Settings) -> int:
    """Multiplications and additions of the two products."""
    num_heads, _, head_dim = settings.heads
    return 4 * point.batch * point.context * num_heads * head_dim


def _page_shape(kernel: str | None, page_size: int, settings: Settings) -> tuple[int, int, int]:
    _, num_kv_heads, head_dim = settings.heads
    kv_dtype = jnp.dtype(settings.kv_dtype)
    backend = page_backend(kernel)
    return page_shape(backend, block_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=kv_dtype)


def _tried_tiles(name: str, settings: Settings) -> list[Tiles]:
    group = settings.heads[0] // settings.heads[1]
    tokens = max(1, _TRIED_ROWS[name] // group) if name in _TRIED_ROWS else 64
    return [(tokens, keys) for keys in _TRIED_KEY_TILES.get(name, ())]
