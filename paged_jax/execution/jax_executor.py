"""Runs plans on a JAX device: one compiled step per bucket, pages and sampling state donated."""

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from paged_jax.execution.batch import Batch, BatchBuilder
from paged_jax.execution.buckets import Bucket, pick_bucket
from paged_jax.execution.plan import SchedulerOutput, StepResult
from paged_jax.execution.step import Model, engine_step, group_page_shape
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.models.attention import AttentionOptions
from paged_jax.models.decoder import Pages
from paged_jax.sampling.state import init_sampling_state
from pallas_kernels.kv_pages import allocate_pages, scatter_pages
from pallas_kernels.paged_attention import page_backend

POISON_CHUNK = 64
"""Blocks that are poisoned at a time, so that poisoning compiles once."""


def bytes_per_block(groups: Sequence[CacheGroup], block_size: int, dtype: jnp.dtype, backend: str) -> int:
    """Bytes of one block over all layers of all groups, in the physical page shape of a backend."""
    return sum(
        group.num_layers * math.prod(group_page_shape(group, block_size, dtype, backend)) * dtype.itemsize
        for group in groups
    )


@dataclass(frozen=True)
class JaxStepHandle:
    """A step that runs on the device."""

    tokens: jax.Array
    """int32 [S], possibly still being computed."""
    rows: list[int]
    """Row of each scheduled request, or -1 for one that samples nothing."""
    num_padded_tokens: int

    def result(self) -> StepResult:
        """Wait for the tokens and bring them to the host."""
        tokens = np.asarray(self.tokens).tolist()
        new = tuple((tokens[row],) if row >= 0 else () for row in self.rows)
        return StepResult(new, self.num_padded_tokens)


class JaxExecutor:
    """Owns the device's state: weights, pages and sampling state.

    Every bucket's step is compiled ahead of its first use, by `warm_up` or on demand, and a compiled step accepts no
    other shape: nothing is ever recompiled unseen.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        max_request_len: int,
        max_num_seqs: int,
        buckets: tuple[Bucket, ...],
        kv_dtype: jnp.dtype,
        attention_implementation: str | None = None,
        attention_interpret: object = False,
        debug: bool = False,
    ) -> None:
        """`debug` fills freed blocks with NaN and refuses block ids that are out of range."""
        self.num_blocks = num_blocks
        self.vocab_size = model.vocab_size
        self.num_compilations = 0
        """Steps compiled so far."""
        self.compile_seconds = 0.0
        """Wall time that they took."""
        graph, self._weights = nnx.split(model)
        self._options = AttentionOptions(1 + num_blocks, attention_implementation, attention_interpret, debug)
        self._step = partial(engine_step, graph, self._options)
        backend = page_backend(attention_implementation)
        page_shapes = [
            (group.num_layers * (1 + num_blocks), group_page_shape(group, block_size, kv_dtype, backend))
            for group in model.cache_groups
        ]
        self._sampling = init_sampling_state(max_num_seqs)
        self._buckets = buckets
        self._builder = BatchBuilder(
            num_slots=max_num_seqs,
            block_size=block_size,
            max_request_len=max_request_len,
            num_groups=len(model.cache_groups),
        )
        self._steps: dict[Bucket, jax.stages.Compiled] = {}
        if attention_implementation is not None:
            self._check_attention([jax.ShapeDtypeStruct((rows, *page), kv_dtype) for rows, page in page_shapes])
        self._pages: Pages = tuple(allocate_pages(rows, page, kv_dtype) for rows, page in page_shapes)
        self._poison = self._compile_poison() if debug else None

    def submit(self, plan: SchedulerOutput) -> JaxStepHandle:
        """Start the step; the arrays it is made of are on their way when this returns."""
        if self._poison is not None:
            self._poison_blocks(plan.emptied_blocks)
        bucket = pick_bucket(self._buckets, plan.num_tokens)
        batch, rows = self._builder.build(plan, bucket)
        tokens = self._run(bucket, batch)
        sampling_rows = [row if part.samples else -1 for part, row in zip(plan.scheduled, rows, strict=True)]
        return JaxStepHandle(tokens, sampling_rows, bucket.num_tokens - plan.num_tokens)

    def warm_up(
        self, progress: Callable[[int, int], None] | None = None, buckets: Sequence[Bucket] | None = None
    ) -> None:
        """Compile the steps of `buckets` (None: of all), several at a time, and run each once on padding.

        `progress(done, total)` is told after each compilation.
        """
        buckets = self._buckets if buckets is None else buckets
        missing = [bucket for bucket in buckets if bucket not in self._steps]
        start = time.perf_counter()
        lowered = {bucket: self._lower(bucket) for bucket in missing}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = {pool.submit(step.compile): bucket for bucket, step in lowered.items()}
            for done, future in enumerate(as_completed(futures)):
                self._steps[futures[future]] = future.result()
                if progress is not None:
                    progress(done + 1, len(missing))
        self.num_compilations += len(missing)
        self.compile_seconds += time.perf_counter() - start
        for bucket in buckets:
            self._run(bucket, self._builder.empty(bucket)).block_until_ready()

    def compiled_step(self, bucket: Bucket) -> jax.stages.Compiled:
        """The bucket's compiled step, for its `memory_analysis()` and text."""
        return self._compiled(bucket)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Ascending."""
        return self._buckets

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages, null blocks included."""
        return sum(pages.nbytes for pages in self._pages)

    def _run(self, bucket: Bucket, batch: Batch) -> jax.Array:
        step = self._compiled(bucket)
        self._pages, self._sampling, tokens = step(self._weights, self._pages, self._sampling, batch)
        return tokens

    def _compiled(self, bucket: Bucket) -> jax.stages.Compiled:
        if bucket not in self._steps:
            start = time.perf_counter()
            self._steps[bucket] = self._lower(bucket).compile()
            self.compile_seconds += time.perf_counter() - start
            self.num_compilations += 1
        return self._steps[bucket]

    def _lower(self, bucket: Bucket) -> jax.stages.Lowered:
        step = jax.jit(self._step, donate_argnums=(1, 2))
        return step.lower(self._weights, self._pages, self._sampling, self._builder.empty(bucket))

    def _check_attention(self, pages: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Raise ValueError if the attention that was asked for cannot serve this model's shapes here."""
        for bucket in {self._buckets[0], self._buckets[-1]}:
            jax.eval_shape(self._step, self._weights, tuple(pages), self._sampling, self._builder.empty(bucket))

    def _compile_poison(self) -> jax.stages.Compiled:
        def poison(pages: Pages, block_ids: Int[Array, "P"]) -> Pages:
            def fill(group: jax.Array) -> jax.Array:
                layers = group.shape[0] // self._options.blocks_per_layer
                blocks = jnp.full((layers, block_ids.shape[0], *group.shape[1:]), jnp.nan, group.dtype)
                return scatter_pages(group, block_ids, blocks, blocks_per_layer=self._options.blocks_per_layer)

            return tuple(fill(group) for group in pages)

        block_ids = jnp.zeros(POISON_CHUNK, jnp.int32)
        return jax.jit(poison, donate_argnums=0).lower(self._pages, block_ids).compile()

    def _poison_blocks(self, block_ids: Sequence[int]) -> None:
        """Fill blocks that hold nothing with NaN, so that a read of one cannot go unseen."""
        for first in range(0, len(block_ids), POISON_CHUNK):
            padded = np.zeros(POISON_CHUNK, np.int32)  # the null block may be poisoned too: nobody reads it
            chunk = block_ids[first : first + POISON_CHUNK]
            padded[: len(chunk)] = chunk
            self._pages = self._poison(self._pages, padded)
