"""What a request asks of the sampler. Field names are vLLM's."""

import math
from dataclasses import dataclass, field

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy (vLLM's threshold)."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Raises ValueError, one sentence that names the field, for values without a meaning.
    """

    temperature: float = 1.0
    """0 (anything below 1e-5) is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0, -1 or anything above the vocabulary keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities reach top_p; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one; in [0, 1]."""
    seed: int | None = None
    """Makes this request's samples reproducible; unset, the engine derives one."""
    max_tokens: int | None = 16
    """Most output tokens; None: until the context is full."""
    stop: str | tuple[str, ...] | list[str] = ()
    """End when the output text contains one of these; the text is cut before it."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """End at one of these tokens, which is kept in token_ids."""
    include_stop_str_in_output: bool = False
    """Cut the text after the stop string instead of before it."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave tokens such as <|im_end|> out of the text."""
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """`stop` as a tuple."""

    def __post_init__(self) -> None:
        for name, valid, rule in (
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a finite number, 0 or more"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= -1, "a whole number: -1 or 0 for all, else 1 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "None or a whole number from 0 to 2^64 - 1"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "None or at least 1"),
        ):
            if not valid:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(s, str) and s for s in stops):
            raise ValueError(f"stop must hold non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop_strings", stops)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE
