"""Engines over a simulated device: memory by hand, and settings that are refused."""

import pytest

from paged_jax.config import EngineConfig, parse
from paged_jax.engine.clock import VirtualClock
from paged_jax.simulation.engines import activation_bytes, bytes_per_block, simulated_engine
from paged_jax.simulation.hardware import load_hardware
from paged_jax.simulation.shapes import find_shape


def config(**values: object) -> EngineConfig:
    return parse(EngineConfig, {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_logprobs": 0, **values})


def test_the_papers_kv_memory_has_the_papers_slots() -> None:
    # table 1 of Kwon et al., 2023: 12, 21.2 and 264 GB hold 15.7K, 9.7K and 60.1K slots
    for model, hardware, devices, gib, slots in (
        ("opt-13b", "a100-40gb", 1, 12, 15_700),
        ("opt-66b", "a100-40gb", 4, 21.2, 9_700),
        ("opt-175b", "a100-80gb", 8, 264, 60_100),
    ):
        settings = config(
            kv_cache_memory=int(gib * 2**30), tensor_parallel_size=devices, dtype="float16", max_model_len=2048
        )
        engine = simulated_engine(model, hardware, settings)
        assert engine.num_blocks * 16 == pytest.approx(slots, rel=0.01)


def test_an_accelerators_memory_holds_weights_activations_and_blocks() -> None:
    settings = config(dtype="float16", block_size=16)
    engine = simulated_engine("llama-2-7b", "a100-80gb", settings)
    shape = find_shape("llama-2-7b")
    activations = 256 * (2 * 4096 + 2 * 11008) * 2 + 8 * 32000 * 4
    assert activation_bytes(shape, settings, 2) == activations
    free = 0.9 * load_hardware("a100-80gb").memory_bytes - 6_738_415_616 * 2 - activations
    assert engine.num_blocks == int(free // (16 * 524_288))


def test_heads_are_divided_among_devices_but_not_split() -> None:
    llama = find_shape("llama-3-8b")  # 8 KV heads, 128 KiB a token
    assert [bytes_per_block(llama, config(tensor_parallel_size=n), "bfloat16") for n in (1, 4, 8, 16)] == [
        16 * 131_072,
        4 * 131_072,
        2 * 131_072,
        2 * 131_072,
    ]
    deepseek = find_shape("deepseek-v2")  # one latent head, which every device needs whole
    assert bytes_per_block(deepseek, config(tensor_parallel_size=8), "bfloat16") == 16 * 69_120


def test_a_cpu_has_a_gibibyte_in_float32_unless_told_otherwise() -> None:
    per_block = 16 * 4 * 2 * 30 * 3 * 64
    assert simulated_engine("smollm2-135m", "this-cpu", config()).num_blocks == 2**30 // per_block


def test_swap_space_holds_whole_blocks_of_all_devices() -> None:
    settings = config(preemption_mode="swap", swap_space=10 * 16 * 819_200 + 1, num_blocks=10, max_model_len=128)
    assert simulated_engine("opt-13b", "a100-40gb", settings).executor.num_swap_blocks == 10


def test_the_clock_is_virtual_and_may_be_given() -> None:
    clock = VirtualClock()
    assert simulated_engine("tiny-llama", "h200", config()).clock.now() == 0.0
    assert simulated_engine("tiny-llama", "h200", config(), clock=clock).clock is clock


@pytest.mark.parametrize(
    ("model", "hardware", "values", "sentence"),
    [
        ("opt-13c", "h200", {}, "no model 'opt-13c'"),
        ("opt-13b", "h2000", {}, "no hardware 'h2000' in the catalogue; did you mean 'h200'?"),
        ("opt-175b", "a100-40gb", {}, "less 325.2 GiB of weights, leaves nothing for the KV cache"),
        ("tiny-llama", "this-cpu", {"memory_utilization": 0.5}, "memory_utilization has no effect on a CPU"),
        ("tiny-llama", "h200", {"attention_implementation": "xla"}, "attention_implementation has no effect"),
        ("tiny-llama", "h200", {"layer_loop": "scanned"}, "layer_loop has no effect on a simulated device"),
        ("tiny-llama", "h200", {"load_format": "dummy"}, "load_format has no effect on a simulated device"),
        ("llama-3-8b", "h200", {"tensor_parallel_size": 3}, "tensor_parallel_size"),
        ("opt-175b", "l4", {"num_blocks": 200}, "of weights of opt-175b and .* more than the 22 GiB of l4"),
        ("opt-13b", "h200", {"max_model_len": 4096}, r"max_model_len \(4096\) is more than the 2048 positions"),
    ],
)
def test_what_cannot_be_is_one_sentence(model: str, hardware: str, values: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")) as error:
        simulated_engine(model, hardware, config(**values))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"enforce_eager": True}, "enforce_eager is for the simulated device only"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is for the simulated device only"),
        ({"kv_cache_dtype": "float8"}, "kv_cache_dtype 'float8' is for the simulated device only"),
    ],
)
def test_a_real_engine_refuses_what_is_only_simulated(values: dict, sentence: str) -> None:
    from paged_jax.llm import build_engine

    with pytest.raises(ValueError, match=sentence):
        build_engine("tiny-llama", config(load_format="dummy", **values))


def test_buckets_have_no_effect_on_an_eager_engine() -> None:
    with pytest.raises(ValueError, match="token_buckets has no effect with enforce_eager"):
        config(enforce_eager=True, token_buckets=(8, 256))
