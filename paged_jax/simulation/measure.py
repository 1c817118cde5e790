"""Measures this machine: steps of the real executor whose plans are made by hand, so that no prompt need be computed
before a decode of a long context can be timed."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paged_jax.config import EngineConfig
from paged_jax.execution.buckets import make_buckets, num_rows, pick_bucket
from paged_jax.execution.plan import ScheduledRequest, SchedulerOutput
from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.sampling.params import SamplingParams
from paged_jax.simulation.cost_model import CostModel
from paged_jax.simulation.fit import Parameter, Sample, Stage
from paged_jax.simulation.hardware import Hardware
from paged_jax.simulation.model_shape import ModelShape

DECODE, PREFILL, MIXED = "decode", "prefill", "decodes and a chunk"
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 16, 512
LONGEST = 1600
"""Tokens; with a full batch of them at several page sizes, some gigabytes of pages."""
MEASURED_STAGES = (
    Stage(
        (DECODE, PREFILL, MIXED),
        (
            Parameter("gemm_tiles.0.efficiency", 0.02, 1.0),
            Parameter("gemm_bandwidth_efficiency", 0.05, 1.0),
            Parameter("attention_flops_efficiency", 0.002, 1.0),
            Parameter("attention_bandwidth_efficiency", 0.01, 1.0),
            Parameter("page_overhead_bytes", 1.0, 1e6),
            Parameter("attention_saturation_tokens", 0.0, 1e4),
        ),
    ),
)
"""All at once: only whole steps are measured. Not `step_launch_s`, which where nothing overlaps looks the same as
reading the weights."""
_PROBE_ROWS = 2048
_PROBE_BYTES = 2**28
_PROBES = 20


class Point(NamedTuple):
    """One shape of a step."""

    block_size: int
    contexts: tuple[int, ...] = ()
    """Tokens that each decode sees, itself included."""
    chunk: int = 0
    """Tokens of a prompt; 0: none."""
    start: int = 0
    """Tokens of it that are in the pages already."""

    @property
    def part(self) -> str:
        """What it is in tables."""
        return MIXED if self.contexts and self.chunk else PREFILL if self.chunk else DECODE

    @property
    def shape(self) -> tuple[int, ...]:
        """All of it as numbers."""
        return (self.block_size, self.chunk, self.start, *self.contexts)


@dataclass(eq=False)
class HandMadeRequest:
    """What an executor reads of a request, without an engine that serves it."""

    token_ids: list[int]
    slot: int
    num_computed_tokens: int
    block_tables: tuple[BlockTable, ...]
    seed: int = 0
    sample_index: int = 0
    sampling_params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    end_token_ids: frozenset[int] = frozenset()
    sampled_on_device: bool = True
    num_output_tokens: int = 1
    num_logprobs: int | None = None


def points(block_sizes: Sequence[int], longest: int, seed: int = 0) -> list[Point]:
    """What is measured: every kind of step at the first block size, decodes at the others.

    Few buckets are needed, since each takes seconds to compile.
    """
    draw = random.Random(seed)
    main, full, found = block_sizes[0], MAX_NUM_SEQS, []

    def lengths(count: int) -> tuple[int, ...]:
        return tuple(draw.randint(1, longest) for _ in range(count))

    contexts = [c for c in (16, 100, 500, 1000, 1500) if c <= longest]
    for block_size in block_sizes:
        for batch in (1, 4, full) if block_size == main else (full,):
            found += [Point(block_size, (context,) * batch) for context in contexts]
        found += [Point(block_size, lengths(full)) for _ in range(4)]
    starts = [s for s in (0, 200, 512, 1024) if s + MAX_NUM_BATCHED_TOKENS <= longest]
    for tokens in (full, 4 * full, 16 * full, MAX_NUM_BATCHED_TOKENS):
        found += [Point(main, (), tokens, start) for start in starts]
        if tokens > full:
            found += [Point(main, lengths(full - 1), tokens - full + 1, start) for start in starts[:3]]
    return found


class Machine:
    """Real executors of one model, one for each block size, on whatever device JAX runs on."""

    def __init__(self, model: str) -> None:
        """Loads JAX and the model's shape."""
        import jax

        from paged_jax.llm import EngineFactory

        self.platform: str = jax.default_backend()
        self.device_kind: str = jax.devices()[0].device_kind
        self._factory = EngineFactory(model)
        self._engines: dict[int, Any] = {}
        decoder = self._factory.decoder(EngineConfig(load_format="dummy"))
        self.shape: ModelShape = ModelShape.from_config(decoder.config)
        self.dtype: str = str(decoder.embed_tokens.weight[...].dtype)
        self.longest: int = min(LONGEST, decoder.config.max_position_embeddings - 1)
        """Most tokens that a request has."""

    def _config(self, block_size: int) -> EngineConfig:
        blocks = (MAX_NUM_SEQS + 1) * -(-self.longest // block_size)
        return EngineConfig(
            block_size=block_size,
            num_blocks=blocks,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=self.longest + 1,
            load_format="dummy",  # times do not depend on the weights
        )

    def seconds(self, point: Point) -> float:
        """Seconds of one step of this shape, from its plan to its tokens on the host."""
        engine = self._engines.get(point.block_size)
        if engine is None:
            engine = self._engines[point.block_size] = self._factory(self._config(point.block_size))
        plan = hand_made_plan(point, len(engine.executor.cache_groups))
        start = time.perf_counter()
        engine.executor.submit(plan).result()
        return time.perf_counter() - start

    def probe(self) -> tuple[float, float]:
        """The device's peaks: FLOP/s of a large product in the model's dtype, and bytes/s of a long sum."""
        import jax
        import jax.numpy as jnp

        square = jnp.ones((_PROBE_ROWS, _PROBE_ROWS), self.dtype)
        product = jax.jit(lambda a: jnp.dot(a, a, precision=jax.lax.Precision.HIGHEST))
        long = jnp.ones(_PROBE_BYTES // 4, jnp.float32)
        total = jax.jit(jnp.sum)
        flops = 2 * _PROBE_ROWS**3 / _fastest(lambda: product(square).block_until_ready())
        return flops, _PROBE_BYTES / _fastest(lambda: total(long).block_until_ready())


def hand_made_plan(point: Point, num_groups: int) -> SchedulerOutput:
    """A plan of this shape; each request has its slot's share of the pool's blocks, in order."""

    def request(slot: int, num_tokens: int, computed: int) -> HandMadeRequest:
        count = -(-num_tokens // point.block_size)
        tables = tuple(BlockTable(list(range(1 + slot * count, 1 + (slot + 1) * count))) for _ in range(num_groups))
        return HandMadeRequest([1] * num_tokens, slot, computed, tables)

    most = max((*point.contexts, point.start + point.chunk))
    decodes = [request(slot, most, context - 1) for slot, context in enumerate(point.contexts)]
    chunks = []
    if point.chunk:
        prompt = request(len(decodes), most, point.start)
        chunks = [ScheduledRequest(prompt, point.start, point.chunk, True)]
    everyone = [*decodes, *(chunk.request for chunk in chunks)]
    return SchedulerOutput(decodes, chunks, admitted=everyone, num_tokens=len(decodes) + point.chunk)


def measure(
    machine: Machine,
    chosen: Sequence[Point],
    *,
    repeats: int,
    seed: int = 0,
    on_step: Callable[[Point], None] = lambda point: None,
) -> list[Sample]:
    """The median time of each point's step, after one that is thrown away.

    Points are measured in rounds, each in a random order of its own, so that what else the machine does falls on all.
    """
    draw, times = random.Random(seed), {point: [] for point in chosen}
    for again in range(repeats + 1):
        order = list(times)
        draw.shuffle(order)
        for point in order:
            seconds = machine.seconds(point)
            if again:  # the first one compiles
                times[point].append(seconds)
            on_step(point)
    predictor = StepPredictor(machine.shape, machine.dtype)
    return [
        Sample(point.part, point.shape, statistics.median(seconds), predictor.of(point))
        for point, seconds in times.items()
    ]


class StepPredictor:
    """What the cost model says about points; it keeps the cost models of the device that it was asked about last."""

    def __init__(self, shape: ModelShape, dtype: str) -> None:
        self._shape, self._dtype = shape, dtype
        self._hardware: Hardware | None = None
        self._costs: dict[int, CostModel] = {}
        self._buckets = make_buckets(
            EngineConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS)
        )

    def of(self, point: Point) -> Callable[[Hardware], float]:
        """Seconds of the point's step as a function of the device."""
        plan = hand_made_plan(point, 1)
        bucket = pick_bucket(self._buckets, plan.num_tokens, num_rows(plan))

        def predict(hardware: Hardware) -> float:
            if hardware is not self._hardware:
                self._hardware, self._costs = hardware, {}
            cost = self._costs.get(point.block_size)
            if cost is None:
                cost = self._costs[point.block_size] = CostModel(
                    hardware, self._shape, block_size=point.block_size, dtype=self._dtype, kv_dtype=self._dtype
                )
            return cost.seconds(plan, bucket.num_tokens, bucket.num_seqs)

        return predict


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the quickest of many runs, after one that compiles: a peak is what nothing disturbed."""
    times = []
    for _ in range(_PROBES + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])
