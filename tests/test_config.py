"""Settings are checked at once, and what is wrong with them is one sentence that names the key."""

import re

import pytest

from paged_jax.config import POLICIES, EngineConfig, StrictModel, nearest, parse
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
    ({"kv_cache_dtype": 8}, f"kv_cache_dtype: {DTYPES.replace(' or', ',')}, 'float8' or 'int8', got 8"),
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
    ({"batching": "statik"}, "unknown batching 'statik'; did you mean 'static'?"),
    ({"allocator": "reserve"}, "unknown allocator 'reserve'; did you mean 'reserve_"),
    ({"preemption_mode": "swop"}, "unknown preemption_mode 'swop'; did you mean 'swap'?"),
    ({"length_predictor": "orakle"}, "unknown length_predictor 'orakle'; did you mean 'oracle'?"),
    ({"budget_order": "decodes"}, "budget_order: input should be 'decode_first' or 'prefill_first', got 'decodes'"),
    ({"watermark": 1.0}, "watermark: input should be less than 1, got 1.0"),
    ({"watermark": -0.1}, "watermark: input should be greater than or equal to 0, got -0.1"),
    ({"max_preemptions": -1}, "max_preemptions: input should be greater than or equal to 0, got -1"),
    ({"max_logprobs": 1025}, "max_logprobs: input should be less than or equal to 1024, got 1025"),
    ({"aging_s": 0, "scheduling_policy": "sjf"}, "aging_s: input should be greater than 0, got 0"),
    ({"fair_quantum": 0, "scheduling_policy": "fair"}, f"fair_quantum: {AT_LEAST_ONE}, got 0"),
    ({"constant_output_len": 0, "scheduling_policy": "sjf"}, f"constant_output_len: {AT_LEAST_ONE}, got 0"),
    ({"num_swap_blocks": -1, "preemption_mode": "swap"}, "num_swap_blocks: input should be greater than or equal to 0"),
    ({"trace_file": 3}, "trace_file: input should be a valid string, got 3"),
]  # fmt: skip

RESERVATIONS = ("reserve_max", "reserve_pow2", "reserve_oracle")

# pairs that cannot work, and settings that nobody reads
REFUSED = [
    *(({"allocator": allocator, "prefix_cache": cache},
       f"allocator '{allocator}' gives each request one contiguous run of blocks, which nobody else can share: leave "
       f"prefix_cache ('{cache}') unset")
      for allocator in RESERVATIONS for cache in ("hash", "radix", "package.module:Class")),
    *(({"allocator": allocator, "eviction": "lru"}, f"eviction has no effect with allocator '{allocator}'")
      for allocator in RESERVATIONS),
    *(({"allocator": "reserve_max", **unused}, f"{next(iter(unused))} has no effect with allocator 'reserve_max'")
      for unused in ({"preemption_mode": "swap"}, {"victim_policy": "most_blocks"}, {"max_preemptions": 1})),
    ({"batching": "paged_jax.engine.policies.static:StaticBatching", "scheduling_policy": "srpt"},
     "scheduling_policy 'srpt' takes places"),
    ({"allocator": "paged_jax.kv_cache.reservation:ReserveMax", "prefix_cache": "hash"}, "allocator 'reserve_max'"),
    *(({"allocator": allocator, "watermark": 0.1}, f"watermark has no effect with allocator '{allocator}'")
      for allocator in RESERVATIONS),
    *(({"scheduling_policy": "longest_prefix_match", **without},
       "scheduling_policy 'longest_prefix_match' asks the prefix cache, and there is none")
      for without in ({"prefix_cache": "none"}, {"allocator": "reserve_max"})),
    *(({"scheduling_policy": policy, "aging_s": 5.0},
       "aging_s has no effect without scheduling_policy 'priority' or 'sjf' or 'srpt' or 'longest_prefix_match': leave")
      for policy in ("fcfs", "fair")),
    *(({"scheduling_policy": policy, "fair_quantum": 64},
       "fair_quantum has no effect without scheduling_policy 'fair': leave it unset")
      for policy in ("fcfs", "priority", "sjf", "srpt", "longest_prefix_match")),
    *(({"scheduling_policy": policy, name: value},
       f"{name} has no effect without scheduling_policy 'sjf' or 'srpt' or 'fair' or victim_policy "
       "'longest_remaining': leave it unset")
      for policy in ("fcfs", "priority", "longest_prefix_match")
      for name, value in (("length_predictor", "oracle"), ("constant_output_len", 9))),
    *(({"scheduling_policy": "sjf", "length_predictor": predictor, "constant_output_len": 9},
       f"constant_output_len has no effect with length_predictor '{predictor}': leave it unset")
      for predictor in ("oracle", "prompt_length", "package.module:Class")),
    *(({"preemption_mode": "recompute", name: 9},
       f"{name} has no effect without preemption_mode 'swap' or 'auto': leave it unset")
      for name in ("num_swap_blocks", "swap_space")),
    *(({"preemption_mode": mode, "swap_block_cost": 2.0},
       "swap_block_cost has no effect without preemption_mode 'auto': leave it unset")
      for mode in ("recompute", "swap")),
    ({"preemption_mode": "swap", "num_swap_blocks": 9, "swap_space": 9},
     "num_swap_blocks and swap_space both set the size of host memory: give one of them"),
    ({"batching": "static", "scheduling_policy": "srpt"},
     "scheduling_policy 'srpt' takes places of requests that run, and batching 'static' fixes a batch until it is "
     "done: use 'sjf'"),
]  # fmt: skip

ACCEPTED = [
    *({"allocator": allocator, "prefix_cache": cache} for allocator in RESERVATIONS for cache in (None, "none")),
    *({"scheduling_policy": policy, "aging_s": 5}
      for policy in ("priority", "sjf", "srpt", "longest_prefix_match", "package.module:Class")),
    *({"scheduling_policy": policy, "fair_quantum": 64} for policy in ("fair", "package.module:Class")),
    *({"scheduling_policy": policy, "length_predictor": "oracle"} for policy in ("sjf", "srpt", "fair")),
    *({"scheduling_policy": policy, "constant_output_len": 9, "length_predictor": predictor}
      for policy in ("sjf", "srpt", "fair") for predictor in (None, "constant")),
    {"victim_policy": "longest_remaining", "length_predictor": "prompt_length"},
    {"victim_policy": "package.module:Class", "constant_output_len": 9},
    *({"preemption_mode": mode, name: 0} for mode in ("swap", "auto", "package.module:Class")
      for name in ("num_swap_blocks", "swap_space")),
    *({"preemption_mode": mode, "swap_block_cost": 0} for mode in ("auto", "package.module:Class")),
    *({"prefix_cache": cache, "eviction": eviction} for cache in (None, "hash", "radix", "package.module:Class")
      for eviction in ("lru", "lfu", "fifo", "cost", "belady")),
    *({"batching": "static", "scheduling_policy": policy} for policy in ("fcfs", "priority", "sjf", "fair")),
    {"allocator": "reserve_max", "scheduling_policy": "srpt", "preemption_mode": "swap", "num_swap_blocks": 9},
]  # fmt: skip


@pytest.mark.parametrize(("values", "sentence"), BAD, ids=str)
def test_bad_values_are_one_sentence(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        parse(EngineConfig, values)
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    assert message.count(", got ") <= 1, "one problem is told more than once"


@pytest.mark.parametrize(("values", "sentence"), REFUSED, ids=str)
def test_settings_that_cannot_work_together_are_one_sentence_with_the_remedy(
    values: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}") as caught:
        parse(EngineConfig, values)
    assert "\n" not in str(caught.value)
    assert re.search(r": (leave|choose|give|use) ", str(caught.value)), "what can be done about it is not said"


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_settings_that_work_together_are_taken(values: dict[str, object]) -> None:
    config = parse(EngineConfig, values)
    assert {name: getattr(config, name) for name in values} == values


def test_every_policy_of_the_table_exists() -> None:
    for field, names in POLICIES.items():
        for name in names:
            assert isinstance(load_policy(field, name), type)


@pytest.mark.parametrize(
    ("values", "cache"),
    [({}, "hash"), ({"prefix_cache": "radix"}, "radix"), *(({"allocator": a}, "none") for a in RESERVATIONS)],
    ids=str,
)
def test_an_unset_prefix_cache_is_what_the_allocator_can_have(values: dict[str, object], cache: str) -> None:
    assert EngineConfig(**values).prefix_cache_name == cache


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


def test_a_policy_of_ours_named_by_its_path_is_the_short_name() -> None:
    assert EngineConfig(batching="paged_jax.engine.policies.static:StaticBatching") == EngineConfig(batching="static")
