"""Engines over a simulated device: the real scheduler and KV cache manager, in virtual time."""

from paged_jax.config import DEFAULT_CPU_KV_CACHE_MEMORY, DEFAULT_SWAP_SPACE, RESERVATIONS, EngineConfig
from paged_jax.engine.clock import Clock, VirtualClock
from paged_jax.engine.engine import Engine
from paged_jax.execution.buckets import make_buckets
from paged_jax.execution.simulated_executor import SimulatedExecutor
from paged_jax.simulation.cost_model import CostModel
from paged_jax.simulation.hardware import Hardware, load_hardware
from paged_jax.simulation.model_shape import DTYPE_BYTES, ModelShape
from paged_jax.simulation.shapes import find_shape

DEFAULT_MEMORY_UTILIZATION = 0.9
"""Share of an accelerator's memory that is used, weights included: vLLM's default, and that of real engines here."""

WITHOUT_EFFECT = ("attention_implementation", "attention_interpret", "layer_loop", "load_format")
"""Settings of a real device's programs and weights."""


def simulated_engine(model: str, hardware: str, config: EngineConfig, *, clock: Clock | None = None) -> Engine:
    """An engine that serves `model`, of which only the shape matters, on a modelled device.

    `hardware` is a name of the hardware catalogue or a YAML file that `paged-jax calibrate` has written; the clock is
    a virtual one that begins at 0 unless another is given. Raises ValueError, one sentence, for names that do not
    exist, settings without effect on a simulated device, and memory that does not hold the model.
    """
    check_simulated(config)
    shape, device = find_shape(model), load_hardware(hardware)
    dtype, kv_dtype = dtypes(config, device, shape)
    # a trace may ask for longer requests than the model was trained for: their time is as well known
    max_model_len = config.max_model_len or shape.max_position_embeddings
    if shape.learned_positions and max_model_len > shape.max_position_embeddings:
        raise ValueError(
            f"max_model_len ({max_model_len}) is more than the {shape.max_position_embeddings} positions that {model} "
            "has learned: lower it"
        )
    cost = CostModel(
        device,
        shape,
        block_size=config.block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        eager=config.enforce_eager,
        contiguous=config.allocator in RESERVATIONS,
    )
    per_block = bytes_per_block(shape, config, kv_dtype)
    num_blocks = _num_blocks(config, device, cost, shape, per_block, DTYPE_BYTES[dtype])
    _check_memory(device, cost.weight_bytes(), num_blocks * per_block, model)
    executor = SimulatedExecutor(
        cost,
        num_blocks=num_blocks,
        cache_groups=shape.cache_groups(),
        vocab_size=shape.vocab_size,
        max_num_seqs=config.max_num_seqs,
        buckets=None if config.enforce_eager else make_buckets(config),
        kv_bytes_per_token=shape.kv_bytes_per_token(kv_dtype),
        num_swap_blocks=_num_swap_blocks(config, shape, kv_dtype),
    )
    return Engine(
        config,
        executor,
        clock=clock or VirtualClock(),
        tokenizer=None,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=(),
    )


def dtypes(config: EngineConfig, device: Hardware, shape: ModelShape) -> tuple[str, str]:
    """Types of weights and activations, and of KV pages, for which the config may leave the choice."""
    dtype = config.dtype if config.dtype != "auto" else ("float32" if device.kind == "cpu" else shape.dtype)
    return dtype, dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def check_simulated(config: EngineConfig) -> None:
    """Raise ValueError for a setting that changes nothing on a simulated device."""
    for field in WITHOUT_EFFECT:
        if getattr(config, field) != type(config).model_fields[field].default:
            raise ValueError(f"{field} has no effect on a simulated device, which runs no programs: leave it unset")


def _check_memory(device: Hardware, weights: float, blocks: float, model: str) -> None:
    """Raise ValueError if a device has no room for its part of the weights and of the KV cache."""
    if weights + blocks > device.memory_bytes:
        raise ValueError(
            f"{weights / 2**30:.1f} GiB of weights of {model} and {blocks / 2**30:.1f} GiB of KV blocks are more than "
            f"the {device.memory_bytes / 2**30:.0f} GiB of {device.name}: raise tensor_parallel_size, or lower "
            "num_blocks or kv_cache_memory"
        )


def bytes_per_block(shape: ModelShape, config: EngineConfig, kv_dtype: str) -> float:
    """Bytes of a block over all layers on one device: heads are divided among devices, but one is not split.

    Latent attention's cache has one head for all, so that each device holds it whole.
    """
    heads = 1 if shape.kv_lora_rank is not None else shape.num_kv_heads
    share = max(1 / config.tensor_parallel_size, 1 / heads)
    return shape.kv_bytes_per_token(kv_dtype) * config.block_size * share


def _num_blocks(
    config: EngineConfig, device: Hardware, cost: CostModel, shape: ModelShape, per_block: float, itemsize: int
) -> int:
    """Usable blocks: as configured, or as many as the memory holds beside the weights and a step's activations."""
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_memory is not None:
        budget: float = config.kv_cache_memory / config.tensor_parallel_size
        said = f"the KV budget of {config.kv_cache_memory:,} bytes"
    elif device.kind == "cpu":
        if config.memory_utilization is not None:
            raise ValueError("memory_utilization has no effect on a CPU: set kv_cache_memory")
        budget, said = DEFAULT_CPU_KV_CACHE_MEMORY, "the KV budget of 1 GiB"
    else:
        share = config.memory_utilization or DEFAULT_MEMORY_UTILIZATION
        budget = device.memory_bytes * share - cost.weight_bytes() - activation_bytes(shape, config, itemsize)
        said = (
            f"{share:.0%} of the {device.memory_bytes / 2**30:.0f} GiB of {device.name} (tensor_parallel_size "
            f"{config.tensor_parallel_size}), less {cost.weight_bytes() / 2**30:.1f} GiB of weights,"
        )
    if budget < 0:
        raise ValueError(f"{said} leaves nothing for the KV cache: raise tensor_parallel_size, or take a larger device")
    count = int(budget // per_block)
    if count < 2:
        raise ValueError(
            f"{said} does not hold two blocks of {per_block:,.0f} bytes: give more memory or devices, or a smaller "
            "block_size"
        )
    return count


def activation_bytes(shape: ModelShape, config: EngineConfig, itemsize: int) -> float:
    """Bytes that the largest step holds at once on one device: two rows of hidden states, the MLP's inner ones, and
    float32 logits of every sampling row."""
    widest = max(shape.intermediate_size, shape.num_heads * shape.head_dim)
    inner = (1 + shape.gated_mlp) * widest / config.tensor_parallel_size
    return (
        config.max_num_batched_tokens * (2 * shape.hidden_size + inner) * itemsize
        + config.max_num_seqs * shape.vocab_size * 4 / config.tensor_parallel_size
    )


def _num_swap_blocks(config: EngineConfig, shape: ModelShape, kv_dtype: str) -> int:
    """Blocks of host memory: as configured, or as many as its budget holds; none if nothing is ever swapped."""
    if config.preemption_mode == "recompute":
        return 0
    if config.num_swap_blocks is not None:
        return config.num_swap_blocks
    budget = DEFAULT_SWAP_SPACE if config.swap_space is None else config.swap_space
    return budget // (shape.kv_bytes_per_token(kv_dtype) * config.block_size)
