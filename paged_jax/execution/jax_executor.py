"""Runs plans on a JAX device: one compiled step per bucket, pages and sampling state donated."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.execution.batch import Batch, BatchBuilder
from paged_jax.execution.buckets import Bucket, num_rows, pick_bucket
from paged_jax.execution.page_moves import PageMoves
from paged_jax.execution.plan import SchedulerOutput, StepResult, TokenLogprobs
from paged_jax.execution.programs import Programs
from paged_jax.execution.step import Model, engine_step, group_page_shape
from paged_jax.interrupts import HeldInterrupts
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.models.attention import AttentionOptions
from paged_jax.sampling.logprobs import Logprobs
from paged_jax.sampling.state import init_sampling_state
from pallas_kernels.kv_pages import allocate_pages
from pallas_kernels.paged_attention import page_backend


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
    """int32 [R], possibly still being computed."""
    logprobs: Logprobs | None
    """Of the same rows; None when nobody wants them."""
    rows: list[int]
    """Row of each of the plan's decodes, chunks and forks, or -1 for one that samples nothing."""
    num_logprobs: list[int | None]
    """How many of the most likely tokens each of these wants; None: no log-probabilities."""
    num_padded_tokens: int

    def result(self) -> StepResult:
        """Wait for the tokens and bring them to the host."""
        tokens = np.asarray(self.tokens).tolist()
        new = tuple((tokens[row],) if row >= 0 else () for row in self.rows)
        return StepResult(new, self.num_padded_tokens, logprobs=self._logprobs())

    def _logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        if self.logprobs is None:
            return None
        chosen, rank, top_tokens, top_logprobs = (np.asarray(a).tolist() for a in self.logprobs)
        return tuple(
            None
            if row < 0 or count is None
            else TokenLogprobs(
                chosen[row], rank[row], tuple(zip(top_tokens[row][:count], top_logprobs[row][:count], strict=True))
            )
            for row, count in zip(self.rows, self.num_logprobs, strict=True)
        )


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
        num_swap_blocks: int = 0,
        max_logprobs: int = 20,
        attention_implementation: str | None = None,
        attention_interpret: object = False,
        debug: bool = False,
    ) -> None:
        """Lengths in tokens; blocks per cache group, `num_swap_blocks` of them in host memory.

        With `max_logprobs` 0 no log-probabilities can be had, and nothing is compiled for them. `debug` fills freed
        blocks with NaN and refuses block ids that are out of range.
        """
        self.num_blocks = num_blocks
        self.num_swap_blocks = num_swap_blocks
        self.vocab_size = model.vocab_size
        self.cache_groups = model.cache_groups
        self.kv_bytes_per_token = kv_dtype.itemsize * sum(
            2 * group.num_layers * group.num_kv_heads * group.head_dim for group in model.cache_groups
        )
        self._graph, self._weights = nnx.split(model)
        self._options = AttentionOptions(1 + num_blocks, attention_implementation, attention_interpret, debug)
        self._step = partial(engine_step, self._graph, self._options, max_logprobs)
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
        self._steps = Programs(self._lower)
        if attention_implementation is not None:
            self._check_attention([jax.ShapeDtypeStruct((rows, *page), kv_dtype) for rows, page in page_shapes])
        self._pages = [allocate_pages(rows, page, kv_dtype) for rows, page in page_shapes]
        self._moves = PageMoves(
            self._pages,
            blocks_per_layer=1 + num_blocks,
            # a whole block table moves at once; copies, of a block of some requests, are few
            largest=self._builder.table_width if num_swap_blocks else min(max_num_seqs, 16),
            debug=debug,
        )

    def submit(self, plan: SchedulerOutput) -> JaxStepHandle:
        """Start the step; the arrays it is made of are on their way when this returns."""
        with HeldInterrupts():  # the pages are donated to each move
            self._moves.run(self._pages, plan)
        requests = [*plan.decodes, *(part.request for part in plan.chunks), *(fork.child for fork in plan.forks)]
        bucket = pick_bucket(self._buckets, plan.num_tokens, num_rows(plan))
        batch, rows = self._builder.build(plan, bucket)
        tokens, logprobs = self._run(bucket, batch)
        return JaxStepHandle(
            tokens,
            logprobs if batch.wants_logprobs else None,
            rows,
            [request.num_logprobs for request in requests],
            bucket.num_tokens - plan.num_tokens,
        )

    def warm_up(
        self,
        progress: Callable[[int, int], None] | None = None,
        buckets: Sequence[Bucket] | None = None,
        moves: bool = True,
    ) -> None:
        """Compile the steps of `buckets` (None: of all), several at a time, and run each once on padding.

        With `moves` also all programs that move pages, which swaps and copies of shared blocks need; without, they are
        compiled when they are needed first. `progress(done, total)` is told after each step's compilation.
        """
        if moves:
            self._moves.compile()
        buckets = self._buckets if buckets is None else buckets
        self._steps.compile(buckets, progress)
        for bucket in buckets:
            self._run(bucket, self._builder.empty(bucket))[0].block_until_ready()

    def update_weights(self, model: Model) -> None:
        """Go on with the weights of another model of the same make; nothing is compiled anew.

        The prefix cache knows nothing of it: reset that too. Raises ValueError naming the first parameter whose
        shape or dtype differs, or that only one of the models has.
        """
        graph, weights = nnx.split(model)
        old, new = (dict(_named_leaves(state)) for state in (self._weights, weights))
        for name in [*old, *new]:
            if name not in old or name not in new:
                owner = "the model that is loaded" if name in old else "the new model"
                raise ValueError(f"parameter {name!r} is in {owner} only: its weights need an executor of their own")
            if (old[name].shape, old[name].dtype) != (new[name].shape, new[name].dtype):
                raise ValueError(
                    f"parameter {name!r} is {new[name].dtype}{list(new[name].shape)} in the new model, but "
                    f"{old[name].dtype}{list(old[name].shape)} in the one that is loaded"
                )
        if graph != self._graph:
            raise ValueError("the new model computes differently from the loaded one: it needs an executor of its own")
        self._weights = weights

    def compiled_step(self, bucket: Bucket) -> jax.stages.Compiled:
        """The bucket's compiled step, for its `memory_analysis()` and text."""
        return self._steps[bucket]

    @property
    def num_compilations(self) -> int:
        """Programs compiled so far: steps and moves of pages."""
        return len(self._steps) + len(self._moves.programs)

    @property
    def compile_seconds(self) -> float:
        """Wall time that they took."""
        return self._steps.compile_seconds + self._moves.programs.compile_seconds

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Ascending."""
        return self._buckets

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages, null blocks included."""
        return sum(pages.nbytes for pages in self._pages)

    def _run(self, bucket: Bucket, batch: Batch) -> tuple[jax.Array, Logprobs | None]:
        step = self._steps[bucket]
        with HeldInterrupts():  # what is donated must be replaced
            pages, self._sampling, tokens, logprobs = step(self._weights, tuple(self._pages), self._sampling, batch)
            self._pages = list(pages)
        return tokens, logprobs

    def _lower(self, bucket: Bucket) -> jax.stages.Lowered:
        step = jax.jit(self._step, donate_argnums=(1, 2))
        return step.lower(self._weights, tuple(self._pages), self._sampling, self._builder.empty(bucket))

    def _check_attention(self, pages: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Raise ValueError if the attention that was asked for cannot serve this model's shapes here."""
        for bucket in {self._buckets[0], self._buckets[-1]}:
            jax.eval_shape(self._step, self._weights, tuple(pages), self._sampling, self._builder.empty(bucket))


def _named_leaves(weights: nnx.State) -> Iterator[tuple[str, jax.Array]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        yield ".".join(str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey)), leaf
