import re

import pytest

from paged_jax.config import EngineConfig
from paged_jax.experiments.memory import check_memory
from paged_jax.models.config import ModelConfig

MODEL = ModelConfig(
    vocab_size=8, hidden_size=16, intermediate_size=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4,
    max_position_embeddings=64, dtype="bfloat16",
)  # fmt: skip
BLOCK = 2 * 3 * 2 * 4 * 16 * 4
"""Bytes of a block: K and V * layers * heads * head_dim * tokens * 4 bytes."""


def test_memory_of_all_engines_together_is_checked():
    sized = [EngineConfig(block_size=b, kv_cache_memory=2**30) for b in (8, 16)]
    check_memory(sized, "cpu", 4 * 2**30)
    check_memory(sized, "cpu", None)
    with pytest.raises(ValueError, match=r"need 2.0 GiB together, and 1.0 GiB of memory are free"):
        check_memory(sized, "cpu", 2**30)
    with pytest.raises(ValueError, match=r"set engine.num_blocks"):
        check_memory([EngineConfig(block_size=b) for b in (8, 16)], "gpu", None)
    check_memory([EngineConfig(block_size=b, num_blocks=9) for b in (8, 16)], "gpu", None)
    check_memory([EngineConfig()], "gpu", None)


def test_memory_of_a_given_number_of_blocks_is_computed_from_the_model():
    need = 10 * BLOCK  # and the null block
    check_memory([EngineConfig(num_blocks=9)], "cpu", need, MODEL)
    check_memory([EngineConfig(num_blocks=9, kv_cache_dtype="bfloat16")], "cpu", need // 2, MODEL)
    with pytest.raises(ValueError, match=r"the setting needs .*: lower engine.kv_cache_memory or engine.num_blocks"):
        check_memory([EngineConfig(num_blocks=9)], "cpu", need - 1, MODEL)
    with pytest.raises(ValueError, match=r"2 settings need"):
        check_memory([EngineConfig(num_blocks=9), EngineConfig(num_blocks=9, dtype="float16")], "cpu", need, MODEL)


def swapping(mode, **settings):
    return EngineConfig(num_blocks=9, preemption_mode=mode, **settings)


SWAPPING = [
    (swapping("recompute"), 0),
    (swapping("swap", num_swap_blocks=7), 7 * BLOCK),
    (swapping("auto", num_swap_blocks=7), 7 * BLOCK),
    (swapping("package.module:Class", num_swap_blocks=7), 7 * BLOCK),
    (swapping("swap", swap_space=1000), 1000),
    (swapping("auto"), 2**30),
]


@pytest.mark.parametrize(("config", "swap_bytes"), SWAPPING)
def test_host_memory_for_swapping_counts_too(config, swap_bytes):
    need = 10 * BLOCK + swap_bytes
    check_memory([config], "cpu", need, MODEL)
    keys = "engine.kv_cache_memory or engine.num_blocks"
    if swap_bytes:
        keys += " or engine.swap_space or engine.num_swap_blocks"
    with pytest.raises(ValueError, match=rf": lower {re.escape(keys)}$"):
        check_memory([config], "cpu", need - 1, MODEL)
    with pytest.raises(ValueError, match=r"of 2 settings need"):
        check_memory([config, config], "cpu", 2 * need - 1, MODEL)


def test_beside_an_accelerator_only_swapped_blocks_are_in_main_memory():
    config = swapping("swap", num_swap_blocks=7)
    check_memory([config], "gpu", 7 * BLOCK // 2, MODEL)  # in the checkpoint's bfloat16
    with pytest.raises(ValueError, match=r"^the swapped blocks of the setting need.*: lower engine.swap_space or"):
        check_memory([config], "gpu", 7 * BLOCK // 2 - 1, MODEL)
    check_memory([swapping("recompute")], "gpu", 0, MODEL)
