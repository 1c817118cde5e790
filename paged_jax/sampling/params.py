"""What a request asks of the sampler. Field names are vLLM's."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, no_type_check

from paged_jax.config import nearest

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy (vLLM's threshold)."""
FLOAT32_MAX = 3.4028235e38
INT32_MAX = 2**31 - 1


def _refuse_unknown_fields[T](cls: type[T]) -> type[T]:
    """Make the constructor answer an unknown keyword, such as one more of vLLM's, with a ValueError."""
    init = cls.__init__
    known = [f.name for f in fields(cls) if f.init]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                raise ValueError(f"{cls.__name__} has no field {name!r}{nearest(name, known)}")
        init(self, *args, **values)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


# wrong types are the caller's errors, told in our words: the tests' type checker must not be faster
@no_type_check
@_refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    The filters apply in this order: temperature, min_p, top_k, top_p, each to what the one before has left;
    tokens that tie with the last one kept are kept too. NumPy numbers are taken and stored as Python's, lists
    as tuples.
    Raises ValueError, one sentence that names the field, for unknown fields and values without a meaning.
    """

    n: int = 1
    """Samples of the prompt, which share its KV blocks; more than 1 wants a temperature."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy, and anything below 1e-5 is stored as 0."""
    top_k: int = 0
    """Keep the k most likely tokens; 0, -1 or anything from the vocabulary's size up keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities reach top_p; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one; in [0, 1]."""
    seed: int | None = None
    """Makes this request's samples reproducible; unset, the engine derives one."""
    max_tokens: int | None = 16
    """Most output tokens; None: until the context is full."""
    min_tokens: int = 0
    """Fewest output tokens: before that, tokens that would end the request are not sampled."""
    logprobs: int | None = None
    """Report each output token's log-probability, and those of this many most likely tokens; None: none."""
    stop: str | tuple[str, ...] | list[str] | None = ()
    """End when the output text contains one of these; the text is cut before it."""
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    """End at one of these tokens, which is kept in the output."""
    include_stop_str_in_output: bool = False
    """Cut the text after the stop string instead of before it."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave tokens such as <|im_end|> out of the text."""
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """`stop` as a tuple, with the type to match."""

    def __post_init__(self) -> None:
        stops = _strings("stop", self.stop)
        temperature = _number("temperature", self.temperature, 0, FLOAT32_MAX, "a number from 0 to 3.4e38")
        max_tokens, seed = self.max_tokens, self.seed
        values: dict[str, Any] = {
            "temperature": temperature if temperature >= GREEDY_TEMPERATURE else 0.0,
            "top_k": _integer("top_k", self.top_k, -1, INT32_MAX, "a whole number: -1 or 0 for all, else 1 or more"),
            "top_p": _number("top_p", self.top_p, math.ulp(0), 1, "a number above 0 and at most 1"),
            "min_p": _number("min_p", self.min_p, 0, 1, "a number from 0 to 1"),
            "seed": None
            if seed is None
            else _integer("seed", seed, 0, 2**64 - 1, "None or a whole number from 0 to 2^64 - 1"),
            "max_tokens": None
            if max_tokens is None
            else _integer("max_tokens", max_tokens, 1, math.inf, "None or a whole number, 1 or more"),
            "n": _integer("n", self.n, 1, INT32_MAX, "a whole number, 1 or more"),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, INT32_MAX, "a whole number, 0 or more"),
            "logprobs": None
            if self.logprobs is None
            else _integer("logprobs", self.logprobs, 0, INT32_MAX, "None or a whole number, 0 or more"),
            "stop": stops,
            "stop_strings": stops,
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
        }
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens}): lower it, or raise "
                "max_tokens"
            )
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n ({self.n}) greedy samples would all be the same: set a temperature, or n to 1")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    def validate_for(self, vocab_size: int) -> None:
        """Check the fields that name tokens against a vocabulary.

        A top_k beyond the vocabulary is not an error: it keeps all tokens. Raises ValueError for a stop token
        that the model cannot produce.
        """
        for token_id in self.stop_token_ids or ():
            if token_id >= vocab_size:
                raise ValueError(
                    f"stop_token_ids holds {token_id}, but the vocabulary ends at {vocab_size - 1} "
                    f"(it has {vocab_size} tokens)"
                )


@no_type_check
@_refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """What a beam search looks for. Field names are vLLM's.

    Raises ValueError, one sentence that names the field, for unknown fields and values without a meaning.
    """

    beam_width: int
    """Continuations that are kept at each step, and returned."""
    max_tokens: int
    """Most output tokens."""
    length_penalty: float = 1.0
    """Hypotheses are ranked by cumulative log-probability / generated tokens ** length_penalty."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave tokens such as <|im_end|> out of the text."""

    def __post_init__(self) -> None:
        values = {
            "beam_width": _integer("beam_width", self.beam_width, 1, INT32_MAX, "a whole number, 1 or more"),
            "max_tokens": _integer("max_tokens", self.max_tokens, 1, INT32_MAX, "a whole number, 1 or more"),
            "length_penalty": _number("length_penalty", self.length_penalty, -100, 100, "a number from -100 to 100"),
        }
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name, value in values.items():
            object.__setattr__(self, name, value)


def num_samples(params: SamplingParams | BeamSearchParams) -> int:
    """How many samples or beams of its prompt run at once."""
    return params.beam_width if isinstance(params, BeamSearchParams) else params.n


def _number(name: str, value: Any, low: float, high: float, rule: str) -> float:
    # NaN fails both comparisons, and integers too large for a float compare without overflow
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= value <= high:
        raise ValueError(f"{name} must be {rule}, got {value!r}")
    return float(value)


def _integer(name: str, value: Any, low: int, high: float, rule: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= high:
        raise ValueError(f"{name} must be {rule}, got {value!r}")
    return int(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else value
    if isinstance(strings, Iterable):
        strings = tuple(strings)
        if all(isinstance(s, str) and s for s in strings):
            return strings
    raise ValueError(f"{name} must be a non-empty string or several of them, got {value!r}")


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable | None):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    rule = "a list of token ids, whole numbers from 0"
    return tuple(_integer(name, token_id, 0, INT32_MAX, rule) for token_id in (() if value is None else value))
