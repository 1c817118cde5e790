"""Settings are checked at once, and what is wrong with them is one sentence that names the key."""

import re

import pytest

from paged_jax.config import EngineConfig, StrictModel, nearest, parse
from paged_jax.engine.policies import load_policy
from paged_jax.engine.policies.fcfs import FCFSQueue


class Wide(StrictModel):
    """A field of several types, whose members pydantic would report one by one."""

    value: int | float | str | tuple[int, ...] = 0


AT_LEAST_ONE = "input should be greater than or equal to 1"
DTYPES = "input should be 'auto', 'float32', 'bfloat16' or 'float16'"

BAD = [
    ({"block_sise": 8}, "unknown key 'block_sise'; did you mean 'block_size'?"),
    ({"max_num_sequences": 8}, "unknown key 'max_num_sequences'; did you mean 'max_num_seqs'?"),
    ({"block_size": 0}, f"block_size: {AT_LEAST_ONE}, got 0"),
    ({"block_size": 513}, "block_size: input should be less than or equal to 512, got 513"),
    ({"block_size": "16"}, "block_size: input should be a valid integer, got '16'"),
    ({"block_size": 16.0}, "block_size: input should be a valid integer, got 16.0"),
    ({"block_size": True}, "block_size: input should be a valid integer, got True"),
    ({"block_size": None}, "block_size: input should be a valid integer, got None"),
    ({"num_blocks": "x"}, "num_blocks: input should be a valid integer, got 'x'"),
    ({"num_blocks": 0}, f"num_blocks: {AT_LEAST_ONE}, got 0"),
    ({"kv_cache_memory": -3}, f"kv_cache_memory: {AT_LEAST_ONE}, got -3"),
    ({"memory_utilization": 2.0}, "memory_utilization: input should be less than or equal to 1, got 2.0"),
    ({"max_num_seqs": 0}, f"max_num_seqs: {AT_LEAST_ONE}, got 0"),
    ({"max_model_len": 1}, "max_model_len: input should be greater than or equal to 2, got 1"),
    ({"seed": -1}, "seed: input should be greater than or equal to 0, got -1"),
    ({"seed": 2**32}, "seed: input should be less than 4294967296, got 4294967296"),
    ({"debug": 1}, "debug: input should be a valid boolean, got 1"),
    ({"prefix_cache": 3}, "prefix_cache: input should be a valid string, got 3"),
    ({"dtype": "float64"}, f"dtype: {DTYPES}, got 'float64'"),
    ({"kv_cache_dtype": 8}, f"kv_cache_dtype: {DTYPES}, got 8"),
    (
        {"attention_implementation": "xle"},
        "input should be 'auto', 'reference', 'xla', 'mosaic_tpu', 'mosaic_gpu' or 'triton', got 'xle'",
    ),
    ({"attention_interpret": True}, "attention_interpret has no effect with attention_implementation 'auto'"),
    ({"token_buckets": 512}, "token_buckets: input should be a list, got 512"),
    ({"token_buckets": [8, "x"]}, "token_buckets.1: input should be a valid integer, got 'x'"),
    ({"token_buckets": [0, 512]}, f"token_buckets.0: {AT_LEAST_ONE}, got 0"),
    ({"token_buckets": []}, "token_buckets [] must be a non-empty ascending list without repeats"),
    ({"token_buckets": [512, 8]}, "token_buckets [512, 8] must be a non-empty ascending list"),
    ({"token_buckets": [8]}, "the last of token_buckets (8) must equal max_num_batched_tokens (512)"),
    ({"num_blocks": 3, "kv_cache_memory": 4}, "num_blocks and kv_cache_memory both set the size"),
    ({"num_blocks": 3, "memory_utilization": 0.5}, "num_blocks and memory_utilization both set the size"),
    ({"kv_cache_memory": 1 << 20, "memory_utilization": 0.5}, "kv_cache_memory and memory_utilization both set"),
    ({"max_num_batched_tokens": 8}, "max_num_batched_tokens (8) is less than max_num_seqs (16)"),
    ({"prefix_cache": "none", "eviction": "lru"}, "eviction has no effect with prefix_cache 'none'"),
    ({"prefix_cache": "hsah"}, "unknown prefix_cache 'hsah'; did you mean 'hash'? (or give"),
    ({"victim_policy": "last"}, "unknown victim_policy 'last'; known: fewest_tokens_lost, last_arrived"),
    ({"scheduling_policy": "package.module:"}, "unknown scheduling_policy 'package.module:'"),
    ({"eviction": ":Class"}, "unknown eviction ':Class'"),
    ({"eviction": ".module:Class"}, "unknown eviction '.module:Class'"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "sentence"), BAD, ids=str)
def test_bad_values_are_one_sentence(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        parse(EngineConfig, values)
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    assert message.count(", got ") <= 1, "one problem is told more than once"


def test_path_inside_a_file_is_put_before_the_key() -> None:
    with pytest.raises(ValueError, match=r"^engine\.block_size: .*, got 0$"):
        parse(EngineConfig, {"block_size": 0}, "engine")
    with pytest.raises(ValueError, match=r"^unknown key 'engine\.blocksize'; did you mean 'block_size'\?$"):
        parse(EngineConfig, {"blocksize": 8}, "engine")


def test_two_problems_are_both_told() -> None:
    with pytest.raises(ValueError, match=r"^block_size: .*, got 0; num_blocks: .*, got 0$"):
        parse(EngineConfig, {"block_size": 0, "num_blocks": 0})


def test_members_of_a_union_are_one_problem() -> None:
    with pytest.raises(ValueError, match=r"^value: .*integer or .*number or .*string or .*list, got None$"):
        parse(Wide, {"value": None})


def test_lists_are_taken_for_tuples() -> None:
    assert parse(EngineConfig, {"token_buckets": [8, 512]}).token_buckets == (8, 512)
    assert EngineConfig(token_buckets=[16, 512]).token_buckets == (16, 512)
    assert parse(Wide, {"value": [1, 2]}).value == (1, 2)


def test_config_is_frozen_and_hashable() -> None:
    config = parse(EngineConfig, {"token_buckets": [8, 512]})
    with pytest.raises(ValueError, match="frozen"):
        config.block_size = 8
    assert hash(config) == hash(EngineConfig(token_buckets=(8, 512)))


def test_whole_number_is_a_number() -> None:
    assert parse(EngineConfig, {"memory_utilization": 1}).memory_utilization == 1.0


def test_nearest_lists_what_is_known_when_nothing_is_close() -> None:
    assert nearest("zzz", ["lru", "fifo"]) == "; known: fifo, lru"
    assert nearest("lr", ["lru", "fifo"]) == "; did you mean 'lru'?"


def test_policies_are_loaded_by_short_name_or_path() -> None:
    assert load_policy("scheduling_policy", "fcfs") is FCFSQueue
    assert load_policy("scheduling_policy", "paged_jax.engine.policies.fcfs:FCFSQueue") is FCFSQueue


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no.such.module:Class", "eviction 'no.such.module:Class' cannot be loaded: No module named 'no'"),
        (
            "math:Nothing",
            "eviction 'math:Nothing' cannot be loaded: module 'math' has no attribute 'Nothing'",
        ),
        ("math:pi", "eviction 'math:pi' is not a class"),
    ],
)
def test_policy_that_cannot_be_loaded_is_named(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load_policy("eviction", name)
