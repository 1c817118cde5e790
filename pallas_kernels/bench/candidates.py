"""What is compared, each as something that can be called n times in a row."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.bench.cases import CONTIGUOUS_PAGE, FOREIGN, Batch, Point, Settings, kernel_of, make_batch
from pallas_kernels.paged_attention import page_backend, ragged_paged_attention

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2.5e-3}
"""Largest difference to the reference as a share of the largest element of the same query and head: sums in another
order, and rounded probabilities and results in the 16-bit types. The coarser one of queries and pages counts; one-byte
types are exact in bfloat16."""
_MIXED = [1, 5, 1, 17, 1], [37, 5, 130, 64, 1]
_LONG_DECODES = [1, 1], [1300, 1111]
"""Few and long: what is timed is decodes, and kernels may lay those out in another way and split their keys."""
_EQUAL_DECODES = [1] * 4, [100] * 4


@dataclass(frozen=True)
class Candidate:
    """`run(n)` does n calls, each on the output of the one before, and waits; `output()` is that of one call."""

    run: Callable[[int], object]
    output: Callable[[], np.ndarray]


def prepare(point: Point, settings: Settings, batches: dict[Any, Batch]) -> Candidate:
    """The candidate of a point; `batches` keeps those that are in memory."""
    return _candidate(point, settings, [1] * point.batch, [point.context] * point.batch, batches, poisoned=False)


def check(point: Point, settings: Settings, answers: dict[Any, np.ndarray]) -> str | None:
    """Compare with the reference on small batches: the sentence to stop with, or None. `answers` keeps the reference's.

    Ours get prefill chunks and decodes in one batch, then a few long decodes, with NaN in all slots that no query sees;
    the others get what all of them can do, decodes of equal length without NaN.
    """
    ours = point.implementation not in FOREIGN
    tolerance = max(TOLERANCE.get(dtype, 0.0) for dtype in (settings.dtype, settings.kv_dtype))
    for q_lens, kv_lens in (_MIXED, _LONG_DECODES) if ours else (_EQUAL_DECODES,):
        batches: dict[Any, Batch] = {}
        out = _candidate(point, settings, q_lens, kv_lens, batches, poisoned=ours).output()
        ((key, batch),) = batches.items()
        key = key, ours, len(q_lens)
        if key not in answers:
            answers[key] = np.asarray(_attend("reference", None, settings, batch, batch.q), np.float64)
        largest = np.abs(answers[key]).max(axis=-1)
        difference = (np.abs(out - answers[key]).max(axis=-1) / largest).max()
        if not difference <= tolerance:  # NaN, too
            return f"differs from the reference by {difference:.3g} of the largest element, more than {tolerance:g}"
    return None


def _candidate(
    point: Point,
    settings: Settings,
    q_lens: list[int],
    kv_lens: list[int],
    batches: dict[Any, Batch],
    *,
    poisoned: bool,
) -> Candidate:
    name = point.implementation
    kernel = "xla" if name in FOREIGN else kernel_of(point, settings)
    size, in_order = point.page_size or CONTIGUOUS_PAGE, name == "contiguous"
    key = size, page_backend(kernel), in_order
    if key not in batches:
        batches[key] = make_batch(settings, q_lens, kv_lens, size, kernel, in_order=in_order, poisoned=poisoned)
    batch = batches[key]
    if name == "torch":
        return _torch(settings, batch, kv_lens[0])
    if name == "jax":
        build = _jax_gpu if settings.platform == "gpu" else _jax_tpu
        return _chained(*build(settings, batch))
    return _chained(partial(_attend, kernel, point.tiles, settings), batch)


def _chained(attend: Callable[[Any, jax.Array], jax.Array], arguments: Any) -> Candidate:
    """n calls in one program. What a call does with positions, tables and scales alone may be done once for all."""
    loop = jax.jit(lambda n, q, rest: lax.fori_loop(0, n, lambda _, q: attend(rest, q), q))

    def run(n: int) -> jax.Array:
        return jax.block_until_ready(loop(jnp.int32(n), arguments.q, arguments))

    return Candidate(run, lambda: np.asarray(run(1), np.float64))


def _attend(kernel: str, tiles: tuple[int, int] | None, settings: Settings, batch: Batch, q: jax.Array) -> jax.Array:
    _, num_kv_heads, head_dim = settings.heads
    return ragged_paged_attention(
        q,
        batch.kv_pages,
        batch.kv_lens,
        batch.block_tables,
        batch.cu_q_lens,
        batch.num_seqs,
        layer=0,
        blocks_per_layer=batch.kv_pages.shape[0],
        num_kv_heads=num_kv_heads,
        scale=head_dim**-0.5,
        kv_scales=batch.kv_scales,
        implementation=kernel,
        tiles=tiles,
    )


def _jax_gpu(settings: Settings, batch: Batch) -> tuple[Callable[[Batch, jax.Array], jax.Array], Batch]:
    """JAX's own Triton kernel, which decodes only and wants keys and values apart, heads first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of that module
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    # as that of the triton kernel, for the same reason: it comes when the program is lowered
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    _, num_kv_heads, head_dim = settings.heads
    own = batch.kv_pages[:, :, : 2 * num_kv_heads, :head_dim]
    pages = jnp.stack([jnp.moveaxis(own[:, :, i::2], 2, 0) for i in (0, 1)])
    splits = math.gcd(16, batch.block_tables.shape[1])

    def attend(batch: Batch, q: jax.Array) -> jax.Array:
        keys, values = batch.kv_pages
        scaled = q * jnp.asarray(head_dim**-0.5, q.dtype)
        return paged_attention(scaled, keys, values, batch.block_tables, batch.kv_lens, k_splits=splits).astype(q.dtype)

    return attend, batch._replace(kv_pages=pages)


def _jax_tpu(settings: Settings, batch: Batch) -> tuple[Callable[[Batch, jax.Array], jax.Array], Batch]:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as theirs

    _, num_kv_heads, head_dim = settings.heads
    pages = batch.kv_pages[:, :, : 2 * num_kv_heads, :head_dim]

    def attend(batch: Batch, q: jax.Array) -> jax.Array:
        lens, tables, offsets = batch.kv_lens, batch.block_tables, batch.cu_q_lens
        return theirs(q, batch.kv_pages, lens, tables, offsets, batch.num_seqs, sm_scale=head_dim**-0.5)

    return attend, batch._replace(kv_pages=pages)


def _torch(settings: Settings, batch: Batch, context: int) -> Candidate:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    _, num_kv_heads, head_dim = settings.heads
    kv = batch.kv_pages[batch.block_tables][..., : 2 * num_kv_heads, :head_dim]
    kv = jnp.moveaxis(kv.reshape(len(batch.kv_lens), -1, num_kv_heads, 2, head_dim)[:, :context], 3, 0)
    keys, values = (torch.from_dlpack(jnp.moveaxis(part, 2, 1)).contiguous() for part in kv)
    q = torch.from_dlpack(batch.q)[:, :, None]

    def chain(n: int) -> Any:
        out = q
        for _ in range(n):
            out = scaled_dot_product_attention(out, keys, values, enable_gqa=True)
        torch.cuda.synchronize()
        return out

    return Candidate(chain, lambda: chain(1)[:, :, 0].double().cpu().numpy())
