"""What is asked of every request before it is queued: one sentence says what is wrong and how to mend it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paged_jax.config import EngineConfig
from paged_jax.engine.beam_search import num_candidates
from paged_jax.execution.buckets import MAX_BANNED_TOKENS
from paged_jax.sampling.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from paged_jax.checkpoints.tokenizer import Tokenizer


@dataclass(frozen=True)
class Door:
    """Checks requests against an engine's limits. Its methods raise ValueError and change nothing."""

    config: EngineConfig
    tokenizer: "Tokenizer | None"
    vocab_size: int
    max_model_len: int
    max_request_len: int
    num_blocks: int

    def read_prompt(self, prompt: str | Sequence[int]) -> tuple[str | None, tuple[int, ...]]:
        """The prompt's text, if it is one, and its tokens: not none, of the vocabulary, with room for one more."""
        text = prompt if isinstance(prompt, str) else None
        if text is not None:
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer: give the prompt as token ids")
            prompt = self.tokenizer.encode(text)
        try:
            if isinstance(prompt, bytes | bytearray | memoryview):
                raise TypeError  # an array would take them for the machine's numbers
            tokens = array("q", prompt)
        except (TypeError, OverflowError):
            raise ValueError("a prompt must be a string or a list of whole token ids") from None
        if not tokens:
            raise ValueError("the prompt is empty: give at least one token")
        values = np.frombuffer(tokens, np.int64)  # 32,768 Python numbers are looked through in 0.5 ms, these in 0.02
        for token in (int(values.min()), int(values.max())):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"prompt token id {token} is not in the vocabulary (0 to {self.vocab_size - 1})")
        token_ids = tuple(tokens)
        self._check_length(token_ids)
        return text, token_ids

    def _check_length(self, token_ids: tuple[int, ...]) -> None:
        if len(token_ids) >= self.max_request_len:
            limit = (
                f"max_model_len is {self.max_model_len}"
                if self.max_request_len == self.max_model_len
                else f"the KV cache of {self.num_blocks} blocks holds {self.max_request_len} tokens of a request"
            )
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and {limit}: it must leave room for at least one output token"
            )

    def check_labels(self, priority: object, user: object, cache_salt: object, expected_output_len: object) -> None:
        """What policies and caches sort and share requests by."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be a whole number, lower being more urgent, got {priority!r}")
        for name, value in (("user", user), ("cache_salt", cache_salt)):
            if not isinstance(value, str):
                raise ValueError(f"{name} must be a string, got {value!r}")
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{name} must be text that UTF-8 can write, got {value!r}") from None
        length = expected_output_len
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise ValueError(f"expected_output_len must be None or a whole number, 1 or more, got {length!r}")

    def check_params(self, params: SamplingParams, end_token_ids: frozenset[int]) -> None:
        """What the model and the engine can do."""
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which this model does not have: use stop_token_ids")
        params.validate_for(self.vocab_size)
        self._check_width(params.n)
        if params.logprobs is not None and not self.config.max_logprobs:
            raise ValueError("logprobs cannot be had with max_logprobs 0: leave it out, or raise max_logprobs")
        if params.logprobs is not None and params.logprobs > min(self.config.max_logprobs, self.vocab_size):
            raise ValueError(
                f"logprobs ({params.logprobs}) is more than max_logprobs ({self.config.max_logprobs}) or the "
                f"vocabulary ({self.vocab_size}): ask for fewer, or raise max_logprobs"
            )
        if params.min_tokens and len(end_token_ids) > MAX_BANNED_TOKENS:
            raise ValueError(
                f"min_tokens works with at most {MAX_BANNED_TOKENS} tokens that end a request, and this one has "
                f"{len(end_token_ids)}: give fewer stop_token_ids"
            )

    def check_beams(self, params: BeamSearchParams, end_token_ids: frozenset[int]) -> None:
        """Enough candidates must be at hand."""
        self._check_width(params.beam_width)
        wanted = num_candidates(params, len(end_token_ids))
        if wanted > min(self.config.max_logprobs, self.vocab_size):
            raise ValueError(
                f"beam_width {params.beam_width} looks at {wanted} candidates of each beam, more than max_logprobs "
                f"({self.config.max_logprobs}) or the vocabulary ({self.vocab_size}): choose a smaller beam_width, or "
                "raise max_logprobs"
            )

    def _check_width(self, width: int) -> None:
        if width > self.config.max_num_seqs:
            raise ValueError(
                f"{width} samples or beams of a prompt run at once, more than max_num_seqs "
                f"({self.config.max_num_seqs}): ask for fewer, or raise max_num_seqs"
            )
