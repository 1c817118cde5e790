"""What a caller gets back. Field names are vLLM's."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_jax.engine.beam_search import Hypothesis
from paged_jax.engine.request import Request, RequestMetrics
from paged_jax.execution.plan import TokenLogprobs

if TYPE_CHECKING:
    from paged_jax.checkpoints.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability, before temperature and filters."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None
    """None when the model has no tokenizer."""


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    """"" when the model has no tokenizer."""
    token_ids: list[int]
    finish_reason: str | None
    """"stop", "length", "abort", or None while it runs."""
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None = None
    """For each output token, by token id: its own and those of the most likely ones; None unless asked for."""
    cumulative_logprob: float | None = None
    """Sum over the output tokens, where log-probabilities were asked for, and for beams."""


@dataclass(frozen=True)
class RequestOutput:
    """A request's prompt, its completions and its times."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """Samples by index, or beams, the best first."""
    finished: bool
    metrics: RequestMetrics
    """Of the first sample."""

    @classmethod
    def from_request(cls, request: Request, tokenizer: "Tokenizer | None" = None) -> "RequestOutput":
        """A snapshot of the request, and all samples of its prompt, as it stands."""
        search = request.beam_search
        if search is None:
            outputs = [_completion(sample, tokenizer) for sample in request.samples]
        else:
            outputs = [_beam(index, found, tokenizer, request) for index, found in enumerate(search.best())]
        return cls(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=outputs,
            finished=all(sample.is_finished for sample in request.samples),
            metrics=request.metrics,
        )


def _completion(request: Request, tokenizer: "Tokenizer | None") -> CompletionOutput:
    tokens, logprobs = request.output_token_ids, request.logprobs
    return CompletionOutput(
        index=request.sample_index,
        text=request.text.text if request.text else "",
        token_ids=tokens,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        logprobs=None
        if logprobs is None
        else [_by_token(token, entry, tokenizer) for token, entry in zip(tokens, logprobs, strict=True)],
        cumulative_logprob=None if logprobs is None else sum(entry.logprob for entry in logprobs),
    )


def _beam(index: int, found: Hypothesis, tokenizer: "Tokenizer | None", request: Request) -> CompletionOutput:
    tokens = list(found.token_ids)
    skip = request.beam_search.params.skip_special_tokens
    return CompletionOutput(
        index=index,
        text="" if tokenizer is None else tokenizer.backend.decode(tokens, skip_special_tokens=skip),
        token_ids=tokens,
        finish_reason=found.finish_reason,
        stop_reason=None,
        cumulative_logprob=found.cumulative_logprob,
    )


def _by_token(token: int, entry: TokenLogprobs, tokenizer: "Tokenizer | None") -> dict[int, Logprob]:
    def decoded(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.backend.decode([token_id], skip_special_tokens=False)

    top = {t: Logprob(logprob, rank, decoded(t)) for rank, (t, logprob) in enumerate(entry.top, start=1)}
    return {token: Logprob(entry.logprob, entry.rank, decoded(token)), **{t: p for t, p in top.items() if t != token}}
