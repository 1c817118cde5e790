"""What SamplingParams accepts, refuses and normalises (G21's invalid values; G22 for parameters)."""

import copy
import dataclasses
import inspect
import pickle
import re

import numpy as np
import pytest

from paged_jax.sampling.params import BeamSearchParams, SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (-1, NAN, INF, 1e39, 10**400, "1", None, True)),
        *(("top_k", v) for v in (-5, -2, 5.0, NAN, True, 2**31, None)),
        *(("top_p", v) for v in (0, -0.1, 1.5, NAN, INF, False)),
        *(("min_p", v) for v in (-0.1, 2, NAN, True)),
        *(("seed", v) for v in (-1, 2**64, 1.0, True, "7")),
        *(("max_tokens", v) for v in (0, -1, 2.5, True)),
        *(("stop", v) for v in ("", ["a", ""], 3, [3], b"x")),
        *(("stop_token_ids", v) for v in (3, "3", [-1], [1.5], [True], [None])),
        *(("include_stop_str_in_output", v) for v in (1, "no", None)),
        ("ignore_eos", 0),
        ("skip_special_tokens", "yes"),
    ],
)
def test_a_value_without_a_meaning_is_refused_in_a_sentence_that_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"^{field} (must|holds)") as error:
        SamplingParams(**{field: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("logit_bias", "known: "),
        ("best_of", "known: "),
        ("presence_penalty", "known: "),
        ("max_token", "did you mean 'max_tokens'?"),
    ],
)
def test_an_unknown_field_is_a_value_error_with_the_nearest_known_one(field, hint):
    with pytest.raises(ValueError, match=re.escape(f"no field '{field}'; {hint}")):
        SamplingParams(**{field: 2})


def test_the_constructor_shows_its_fields_to_notebooks():
    names = list(inspect.signature(SamplingParams).parameters)
    assert names[:5] == ["n", "temperature", "top_k", "top_p", "min_p"]
    assert "stop_strings" not in names


def test_numpy_numbers_and_lists_become_plain_hashable_values():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        seed=np.uint64(2**64 - 1),
        stop=["x", "y"],
        stop_token_ids=np.array([1, 2]),
    )
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert params.seed == 2**64 - 1
    assert params.stop == params.stop_strings == ("x", "y")
    assert params.stop_token_ids == (1, 2)
    assert SamplingParams(stop="x") == SamplingParams(stop=["x"])
    for same in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), dataclasses.replace(params)):
        assert same == params
        assert hash(same) == hash(params)
    assert dataclasses.replace(params, stop="z").stop_strings == ("z",)


def test_none_means_no_stops():
    params = SamplingParams(stop=None, stop_token_ids=None)
    assert params.stop_strings == params.stop_token_ids == ()


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-8, True), (9.99e-6, True), (1e-5, False)])
def test_tiny_temperatures_are_greedy(temperature, greedy):
    params = SamplingParams(temperature=temperature)
    assert params.is_greedy is greedy
    assert params.temperature == (0 if greedy else temperature)


def test_g22_numbers_beyond_the_vocabulary():
    SamplingParams(top_k=10**7, stop_token_ids=[0, 96]).validate_for(97)
    with pytest.raises(ValueError, match=r"stop_token_ids holds 97, .* 97 tokens"):
        SamplingParams(stop_token_ids=[3, 97]).validate_for(97)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"n": 0}, "n must be a whole number, 1 or more, got 0"),
        ({"n": 2, "temperature": 0}, r"n \(2\) greedy samples would all be the same: set a temperature, or n to 1"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens \(5\) is more than max_tokens \(4\)"),
        ({"logprobs": -1}, "logprobs must be None or a whole number, 0 or more, got -1"),
    ],
)
def test_samples_and_log_probabilities_are_checked(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"beam_width": 0, "max_tokens": 3}, "beam_width must be a whole number, 1 or more, got 0"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be a whole number, 1 or more, got 0"),
        ({"beam_width": 2, "max_tokens": 3, "length_penalty": float("nan")}, "length_penalty must be a number"),
        ({"beam_width": 2, "max_tokens": 3, "temperature": 1}, "BeamSearchParams has no field 'temperature'"),
    ],
)
def test_beam_search_params_are_checked(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        BeamSearchParams(**values)
