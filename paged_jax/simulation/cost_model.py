"""Seconds that one step takes on a device, from the exact shapes of its plan."""

from collections import Counter
from typing import NamedTuple

from paged_jax.execution.plan import SchedulerOutput
from paged_jax.simulation import elementwise
from paged_jax.simulation.attention_cost import AttentionCost
from paged_jax.simulation.elementwise import elements_per_token, elementwise_seconds
from paged_jax.simulation.gemm import gemm_seconds
from paged_jax.simulation.hardware import Hardware
from paged_jax.simulation.layer_shapes import (
    dense_matrices,
    distinct_experts,
    expert_matrices,
    held_parameters,
    split,
)
from paged_jax.simulation.model_shape import DTYPE_BYTES, ModelShape
from paged_jax.simulation.transfers import TransferCost

KERNELS_PER_LAYER = elementwise.KERNELS_PER_LAYER + 5
"""Products (queries, keys and values in one; output; up, with gate; down) and attention besides."""
KERNELS_PER_EXPERT_LAYER = 4
"""With experts besides: router, choice of experts, sorting tokens by expert and back."""
KERNELS_PER_STEP = 10
"""Besides layers: embedding, last norm, choice of rows, logits, the sampler's temperature, filters, softmax, draw."""
SAMPLING_PASSES = 6
"""Over float32 logits: scale, the softmax's maximum, sum and quotient, noise, argmax."""
LOGIT_BYTES = 4
ALL_REDUCES_PER_LAYER = 2
"""After attention's output projection and after the MLP (Shoeybi et al., 2019, Megatron-LM)."""
LINK_FIELDS = ("link_bandwidth", "link_latency_s", "link_devices")
"""What a device must have to be one of a tensor-parallel group."""


class StepCost(NamedTuple):
    """Seconds of one step by part."""

    gemm: float
    elementwise: float
    logits: float
    sampling: float
    collectives: float
    attention: float
    launch: float
    host: float
    block_tables: float
    copies: float
    swaps: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self)


class CostModel:
    """A model of some shape on one device, or on each of a tensor-parallel group of them.

    `eager` stands for an engine that launches every kernel by itself and pads nothing; `contiguous` for KV memory
    without block tables.
    """

    def __init__(
        self,
        hardware: Hardware,
        shape: ModelShape,
        *,
        block_size: int,
        dtype: str,
        kv_dtype: str,
        tensor_parallel_size: int = 1,
        eager: bool = False,
        contiguous: bool = False,
    ) -> None:
        """Raises ValueError for a dtype without a peak, and for tensor parallelism that the device or model lacks."""
        tp = tensor_parallel_size
        if tp > 1:
            missing = [name for name in LINK_FIELDS if getattr(hardware, name) is None]
            if missing:
                raise ValueError(
                    f"hardware {hardware.name!r} has no {' and no '.join(missing)}: set what is missing, or leave "
                    f"tensor_parallel_size ({tp}) at 1"
                )
            assert hardware.link_devices is not None  # for the type checker
            if tp > hardware.link_devices:
                raise ValueError(
                    f"the links of hardware {hardware.name!r} join {hardware.link_devices} devices at most "
                    f"(link_devices): tensor_parallel_size ({tp}) must not be larger"
                )
        if shape.num_heads % tp:
            raise ValueError(
                f"tensor_parallel_size ({tp}) does not divide the model's {shape.num_heads} attention heads"
            )
        self._hardware, self._shape, self._tp = hardware, shape, tp
        self._dtype, self._bytes = dtype, DTYPE_BYTES[dtype]
        self._block_size, self._eager, self._contiguous = block_size, eager, contiguous
        self._matrices, self._experts = dense_matrices(shape, tp), expert_matrices(shape, tp)
        self._by_tokens: dict[int, tuple[float, float, float]] = {}
        self._by_rows: dict[int, tuple[float, float, float]] = {}
        self._attention = [
            (
                layers,
                AttentionCost(
                    hardware,
                    shape,
                    window=window,
                    block_size=block_size,
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                    tensor_parallel_size=tp,
                    contiguous=contiguous,
                ),
            )
            for window, layers in Counter(shape.layer_windows).items()
        ]
        self._transfers = TransferCost(
            hardware, shape, block_size=block_size, kv_dtype=kv_dtype, tensor_parallel_size=tp
        )
        moe_layers = shape.num_layers - shape.num_dense_layers if shape.num_experts else 0
        kernels = shape.num_layers * KERNELS_PER_LAYER + moe_layers * KERNELS_PER_EXPERT_LAYER + KERNELS_PER_STEP
        kernels += shape.num_layers * ALL_REDUCES_PER_LAYER if tp > 1 else 0
        self._launch_s = kernels * hardware.kernel_launch_s if eager else hardware.step_launch_s
        self._host_s = hardware.eager_host_step_s if eager else hardware.host_step_s
        self._host_request_s = hardware.eager_host_request_s if eager else hardware.host_request_s

    def weight_bytes(self) -> int:
        """Bytes of the weights that each device holds."""
        return held_parameters(self._shape, self._tp) * self._bytes

    @property
    def page_efficiency(self) -> float:
        """Of the time in which a decode reads a full page, the share that contiguous memory would take."""
        return self._attention[0][1].page_efficiency

    def seconds(self, plan: SchedulerOutput, padded_tokens: int, padded_rows: int) -> float:
        """Seconds of the step: `step(...).total`."""
        return sum(self._parts(plan, padded_tokens, padded_rows))

    def step(self, plan: SchedulerOutput, padded_tokens: int, padded_rows: int) -> StepCost:
        """Seconds of the step, part by part.

        `padded_tokens` and `padded_rows` are those of the compiled bucket, for products and logits; attention goes
        over what the plan holds.
        """
        return StepCost(*self._parts(plan, padded_tokens, padded_rows))

    def _parts(self, plan: SchedulerOutput, padded_tokens: int, padded_rows: int) -> tuple[float, ...]:
        """The fields of StepCost."""
        by_tokens = self._by_tokens.get(padded_tokens)
        if by_tokens is None:
            by_tokens = self._by_tokens[padded_tokens] = self._token_parts(padded_tokens)
        by_rows = self._by_rows.get(padded_rows)
        if by_rows is None:
            by_rows = self._by_rows[padded_rows] = self._row_parts(padded_rows)
        gemm, elementwise, reduces = by_tokens
        logits, sampling, gather = by_rows
        contexts = [request.num_computed_tokens + 1 for request in plan.decodes]
        if plan.idle:
            contexts += [request.num_computed_tokens for request in plan.idle]
        chunks = plan.chunks
        attention = 0.0
        for layers, cost in self._attention:
            attention += layers * cost.seconds(contexts, chunks, padded_rows)
        launch = self._launch_s
        if self._eager:
            # launches run ahead of the device: they show where they take longer than what they launch
            launch = max(0.0, launch - gemm - elementwise - reduces - logits - sampling - gather - attention)
        tables = 0.0
        if not self._contiguous:
            block = self._block_size
            entries = sum([-(-context // block) for context in contexts])
            if chunks:
                entries += sum([-(-(chunk.start + chunk.num_tokens) // block) for chunk in chunks])
            tables = self._transfers.block_tables(entries * len(self._attention))
        return (
            gemm,
            elementwise,
            logits,
            sampling,
            reduces + gather,
            attention,
            launch,
            self._host_s + (len(contexts) + len(chunks)) * self._host_request_s,
            tables,
            self._transfers.copies(plan) if any(plan.copies) else 0.0,
            self._transfers.swaps(plan) if plan.swap_outs or plan.swap_ins else 0.0,
        )

    def _token_parts(self, tokens: int) -> tuple[float, float, float]:
        """Products, elementwise kernels and all-reduces of a step of so many tokens."""
        if not tokens:
            return 0.0, 0.0, 0.0
        hardware, shape, tp = self._hardware, self._shape, self._tp
        gemm = sum(
            m.layers * gemm_seconds(hardware, self._dtype, self._bytes, tokens, m.inner, m.columns, m.per_layer)
            for m in self._matrices
        )
        if self._experts:
            distinct = max(1, round(distinct_experts(shape, tokens)))
            rows = split(tokens * shape.num_experts_per_tok, distinct)  # if tokens spread evenly over those visited
            gemm += sum(
                m.layers * gemm_seconds(hardware, self._dtype, self._bytes, rows, m.inner, m.columns, distinct)
                for m in self._experts
            )
        num_bytes = tokens * self._bytes * elements_per_token(shape, tp)
        kernels = shape.num_layers * elementwise.KERNELS_PER_LAYER
        reduces = ALL_REDUCES_PER_LAYER * shape.num_layers * self._ring(tokens * shape.hidden_size * self._bytes, 2)
        return gemm, elementwise_seconds(hardware, num_bytes, kernels), reduces

    def _row_parts(self, rows: int) -> tuple[float, float, float]:
        """Logits, sampling and the gathering of the devices' logits, for so many rows."""
        if not rows:
            return 0.0, 0.0, 0.0
        hardware, shape = self._hardware, self._shape
        vocab = split(shape.vocab_size, self._tp)
        logits = gemm_seconds(hardware, self._dtype, self._bytes, rows, shape.hidden_size, vocab)
        logit_bytes = rows * shape.vocab_size * LOGIT_BYTES
        return logits, elementwise_seconds(hardware, logit_bytes * SAMPLING_PASSES), self._ring(logit_bytes, 1)

    def _ring(self, num_bytes: float, rounds: int) -> float:
        """Seconds to gather (one round) or all-reduce (two) so many bytes around a ring of the devices."""
        tp, hardware = self._tp, self._hardware
        if tp == 1:
            return 0.0
        assert hardware.link_bandwidth is not None  # for the type checker: __init__ has seen to both
        assert hardware.link_latency_s is not None
        return rounds * (tp - 1) * (num_bytes / tp / hardware.link_bandwidth + hardware.link_latency_s)
