"""Seconds that one step takes on a device, from the exact shapes of its plan."""

from collections import Counter
from typing import NamedTuple

from paged_jax.execution.plan import SchedulerOutput
from paged_jax.simulation.attention_cost import AttentionCost
from paged_jax.simulation.gemm import gemm_seconds
from paged_jax.simulation.hardware import Hardware
from paged_jax.simulation.layer_shapes import dense_matrices, distinct_experts, expert_matrices, split
from paged_jax.simulation.model_shape import DTYPE_BYTES, ModelShape

KERNELS_PER_LAYER = 12
"""Launches of an eager layer: two norms, two residual sums, projections of queries, keys and values, rotation, write to
the pages, attention, output projection, up, activation, down."""
KERNELS_PER_EXPERT_LAYER = 4
"""And with experts: router, choice of experts, sorting tokens by expert and back."""
KERNELS_PER_STEP = 10
"""Besides layers: embedding, last norm, choice of rows, logits, and the sampler's temperature, filters, softmax, draw."""
SAMPLING_PASSES = 6
"""Times that the sampler goes over a row of float32 logits: scale, softmax's maximum, sum and quotient, noise, argmax."""
TABLE_ENTRY_BYTES = 4
"""Of a block id, int32."""
LOGIT_BYTES = 4
"""Logits are float32."""
ALL_REDUCES_PER_LAYER = 2
"""After the output projection and after the MLP (Shoeybi et al., 2019, Megatron-LM)."""


class StepCost(NamedTuple):
    """Seconds of one step by part."""

    gemm: float
    attention: float
    elementwise: float
    logits: float
    sampling: float
    collectives: float
    launch: float
    host: float
    block_tables: float
    copies: float
    swaps: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self)


class _Dense(NamedTuple):
    """What depends on the numbers of tokens and rows alone."""

    gemm: float
    elementwise: float
    logits: float
    sampling: float
    collectives: float


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
        tp = tensor_parallel_size
        if tp > 1 and hardware.link_bandwidth is None:
            raise ValueError(
                f"hardware {hardware.name!r} has no link_bandwidth, so that tensor_parallel_size ({tp}) must be 1"
            )
        if shape.num_heads % tp:
            raise ValueError(
                f"tensor_parallel_size ({tp}) does not divide the model's {shape.num_heads} attention heads"
            )
        self._hardware, self._shape, self._tp = hardware, shape, tp
        self._dtype, self._eager, self._contiguous = dtype, eager, contiguous
        self._bytes = DTYPE_BYTES[dtype]
        self._matrices, self._experts = dense_matrices(shape, tp), expert_matrices(shape, tp)
        self._dense: dict[tuple[int, int], _Dense] = {}
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
        groups = shape.cache_groups()
        devices = 1 if shape.kv_lora_rank is not None else min(tp, shape.num_kv_heads)
        # of one layer, on one device, keys and values together
        self._page_bytes = block_size * shape.kv_bytes_per_token(kv_dtype) / shape.num_layers / devices
        self._group_layers = [group.num_layers for group in groups]
        moe_layers = shape.num_layers - shape.num_dense_layers if shape.num_experts else 0
        kernels = shape.num_layers * KERNELS_PER_LAYER + moe_layers * KERNELS_PER_EXPERT_LAYER + KERNELS_PER_STEP
        if tp > 1:
            kernels += shape.num_layers * ALL_REDUCES_PER_LAYER
        self._launch_s = kernels * hardware.kernel_launch_s if eager else hardware.step_launch_s

    def weight_bytes(self) -> int:
        """Bytes of the weights that each device holds."""
        return split(self._shape.num_parameters * self._bytes, self._tp)

    def seconds(self, plan: SchedulerOutput, padded_tokens: int, padded_rows: int) -> float:
        """Seconds of the step: `step(...).total`."""
        return sum(self.step(plan, padded_tokens, padded_rows))

    def step(self, plan: SchedulerOutput, padded_tokens: int, padded_rows: int) -> StepCost:
        """Seconds of the step, part by part.

        `padded_tokens` and `padded_rows` are those of the compiled bucket, for matrix products and logits; attention
        goes over what the plan holds.
        """
        dense = self._dense.get((padded_tokens, padded_rows))
        if dense is None:
            dense = self._dense[padded_tokens, padded_rows] = self._dense_parts(padded_tokens, padded_rows)
        contexts = [request.num_computed_tokens + 1 for request in plan.decodes]
        if plan.idle:
            contexts += [request.num_computed_tokens for request in plan.idle]
        attention, entries = 0.0, 0
        for layers, cost in self._attention:
            work = cost.work(contexts, plan)
            attention += layers * work.seconds
            entries += work.pages
        hardware = self._hardware
        num_seqs = len(contexts) + len(plan.chunks)
        if self._eager:
            host = hardware.eager_host_step_s + num_seqs * hardware.eager_host_request_s
            # launches run ahead of the device: they show where they take longer than what they launch
            device = sum(dense) + attention
            launch = self._launch_s - device if self._launch_s > device else 0.0
        else:
            host = hardware.host_step_s + num_seqs * hardware.host_request_s
            launch = self._launch_s
        tables = 0.0
        if not self._contiguous:
            tables = hardware.host_link_latency_s + entries * TABLE_ENTRY_BYTES / hardware.host_link_bandwidth
        copies = self._copy_seconds(plan) if plan.copies else 0.0
        swaps = self._swap_seconds(plan) if plan.swap_outs or plan.swap_ins else 0.0
        return StepCost(*dense[:1], attention, *dense[1:], launch, host, tables, copies, swaps)

    def _dense_parts(self, tokens: int, rows: int) -> _Dense:
        hardware, shape, tp = self._hardware, self._shape, self._tp
        bandwidth = hardware.memory_bandwidth * hardware.elementwise_bandwidth_efficiency
        vocab = split(shape.vocab_size, tp)
        gemm = sum(
            m.layers * gemm_seconds(hardware, self._dtype, self._bytes, tokens, m.inner, m.columns, m.per_layer)
            for m in self._matrices
        )
        if self._experts and tokens:
            gemm += self._expert_seconds(tokens)
        kernels = 6 * shape.num_layers  # of KERNELS_PER_LAYER: two norms, two sums, rotation, activation
        elementwise = kernels * hardware.kernel_s + self._elementwise_bytes(tokens) / bandwidth if tokens else 0.0
        return _Dense(
            gemm=gemm,
            elementwise=elementwise,
            logits=gemm_seconds(hardware, self._dtype, self._bytes, rows, shape.hidden_size, vocab),
            sampling=rows * shape.vocab_size * LOGIT_BYTES * SAMPLING_PASSES / bandwidth,
            collectives=self._collective_seconds(tokens, rows) if tp > 1 else 0.0,
        )

    def _expert_seconds(self, tokens: int) -> float:
        """Products of the experts that are visited, the tokens spread evenly over them."""
        shape = self._shape
        distinct = max(1, round(distinct_experts(shape, tokens)))
        rows = -(-tokens * shape.num_experts_per_tok // distinct)
        return sum(
            m.layers
            * gemm_seconds(self._hardware, self._dtype, self._bytes, rows, m.inner, m.columns, m.per_layer * distinct)
            for m in self._experts
        )

    def _elementwise_bytes(self, tokens: int) -> float:
        """Read and written by norms, residual sums, rotation, the write to the pages, activations, the embedding."""
        shape, tp = self._shape, self._tp
        heads = split(shape.num_heads, tp) * shape.head_dim
        if shape.kv_lora_rank is None:
            keys = split(shape.num_kv_heads, tp) * shape.head_dim
            attention = 2 * (heads + keys) + 4 * keys
        else:
            attention = 2 * heads + 4 * (shape.kv_lora_rank + shape.qk_rope_head_dim)
        layer = 10 * shape.hidden_size + attention  # norms: 2 x (read, write); sums: 2 x (two reads, a write)
        inner_dense, moe_layers = shape.intermediate_size, 0
        inner_moe = 0
        if shape.moe_intermediate_size is not None:
            moe_layers = shape.num_layers - shape.num_dense_layers
            inner_moe = shape.moe_intermediate_size * (shape.num_experts_per_tok + shape.num_shared_experts)
        passes = 3 if shape.gated_mlp else 2
        inner = passes * ((shape.num_layers - moe_layers) * split(inner_dense, tp) + moe_layers * split(inner_moe, tp))
        return tokens * self._bytes * (shape.num_layers * layer + inner + 2 * shape.hidden_size)

    def _collective_seconds(self, tokens: int, rows: int) -> float:
        """Ring all-reduces of hidden states, and the gathering of logits."""
        hardware, shape, tp = self._hardware, self._shape, self._tp
        assert hardware.link_bandwidth is not None and hardware.link_latency_s is not None
        share = (tp - 1) / tp
        moved = tokens * shape.hidden_size * self._bytes
        reduce = 2 * share * moved / hardware.link_bandwidth + 2 * (tp - 1) * hardware.link_latency_s
        gather = share * rows * shape.vocab_size * LOGIT_BYTES / hardware.link_bandwidth
        gather += (tp - 1) * hardware.link_latency_s
        return ALL_REDUCES_PER_LAYER * shape.num_layers * (reduce if tokens else 0.0) + (gather if rows else 0.0)

    def _copy_seconds(self, plan: SchedulerOutput) -> float:
        """Blocks read and written in all layers by one kernel for each cache group."""
        hardware, total = self._hardware, 0.0
        bandwidth = hardware.memory_bandwidth * hardware.elementwise_bandwidth_efficiency
        for layers, copies in zip(self._group_layers, plan.copies, strict=True):
            if copies:
                total += 2 * len(copies) * layers * self._page_bytes / bandwidth + hardware.kernel_s
        return total

    def _swap_seconds(self, plan: SchedulerOutput) -> float:
        """Blocks moved to the host and back: as vLLM lays them out, keys and values of each layer of each block are
        pieces of their own, each a transfer with its latency."""
        hardware, pages = self._hardware, 0
        for swap in (*plan.swap_outs, *plan.swap_ins):
            pages += sum(n * len(ids) for n, ids in zip(self._group_layers, swap.device_blocks, strict=True))
        pieces = pages if self._shape.kv_lora_rank is not None else 2 * pages
        return pieces * hardware.host_link_latency_s + pages * self._page_bytes / hardware.host_link_bandwidth
