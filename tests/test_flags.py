"""Flags are made from the settings classes: nothing is left out, and nothing is said twice."""

import dataclasses
from typing import Any

import pytest
import tyro

from paged_jax.config import EngineConfig, parse
from paged_jax.flags import as_flags, field_docstrings, flags_of, known_flags, values_of
from paged_jax.sampling.params import SamplingParams

ENGINE_DEFAULTS = {name: field.default for name, field in EngineConfig.model_fields.items()}
ENGINE_FLAGS = flags_of(EngineConfig, ENGINE_DEFAULTS)


def engine_values(*arguments: str) -> dict[str, Any]:
    values = values_of(tyro.cli(ENGINE_FLAGS, args=arguments))
    return {name: value for name, value in values.items() if value != ENGINE_DEFAULTS[name]}


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ([], {}),
        (["--block-size", "32"], {"block_size": 32}),
        (["--block_size=32"], {"block_size": 32}),
        (["--block-size", "x"], {"block_size": "x"}),  # the settings class says what is wrong with it
        (["--block-size", "1.5"], {"block_size": 1.5}),
        (["--seed", "-1"], {"seed": -1}),
        (["--memory-utilization", "5e-1"], {"memory_utilization": 0.5}),
        (["--num-blocks", "none"], {}),
        (["--dtype", "bfloat16"], {"dtype": "bfloat16"}),
        (["--dtype", "16"], {"dtype": "16"}),
        (["--prefix-cache", "none"], {"prefix_cache": "none"}),
        (["--eviction", "package.module:Class"], {"eviction": "package.module:Class"}),
        (["--token-buckets", "16", "512"], {"token_buckets": (16, 512)}),
        (["--no-enable-chunked-prefill", "--debug"], {"enable_chunked_prefill": False, "debug": True}),
    ],
    ids=str,
)
def test_values_arrive_as_python_unchecked(arguments: list[str], values: dict[str, Any]) -> None:
    assert engine_values(*arguments) == values


def test_every_field_is_a_flag_with_the_same_default() -> None:
    flags = known_flags(ENGINE_FLAGS)
    assert {f"--{name.replace('_', '-')}" for name in EngineConfig.model_fields} <= set(flags)
    assert flags["--block-size"]
    assert not flags["--debug"]
    assert not flags["--no-debug"]
    assert parse(EngineConfig, values_of(ENGINE_FLAGS())) == EngineConfig()


@pytest.mark.parametrize("settings", [EngineConfig, SamplingParams])
def test_every_field_has_a_help_text(settings: type) -> None:
    fields = getattr(settings, "model_fields", None) or [f.name for f in dataclasses.fields(settings)]
    docs = field_docstrings(settings)
    assert set(fields) <= set(docs)
    assert all(docs.values())


def test_flags_may_have_other_names_and_defaults_than_their_fields() -> None:
    names = {"seed": "sampling_seed"}
    flags = flags_of(SamplingParams, {"seed": None, "top_k": 5, "stop": ()}, names=names)
    parsed = tyro.cli(flags, args=["--sampling-seed", "7", "--stop", "a b", "c"])
    assert values_of(parsed, names) == {"seed": 7, "top_k": 5, "stop": ("a b", "c")}


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("block_size: input should be 1, got 0", "--block-size: input should be 1, got 0"),
        ("block_size: a; seed: b", "--block-size: a; --seed: b"),
        ("max_num_batched_tokens (8) is less than max_num_seqs (16)",
         "--max-num-batched-tokens (8) is less than --max-num-seqs (16)"),
        ("unknown eviction 'x'; known: lru", "unknown --eviction 'x'; known: lru"),
        ("eviction is idle with prefix_cache 'none'", "--eviction is idle with --prefix-cache 'none'"),
        ("made from the seed", "made from the seed"),
        ("the seeds are odd", "the seeds are odd"),
    ],
)  # fmt: skip
def test_sentences_about_fields_become_sentences_about_flags(sentence: str, told: str) -> None:
    assert as_flags(sentence, ENGINE_DEFAULTS) == told


def test_sentences_use_the_flags_own_names() -> None:
    told = as_flags("seed must be whole", ["seed"], {"seed": "sampling_seed"})
    assert told == "--sampling-seed must be whole"
