"""What a caller gets back. Field names are vLLM's."""

from dataclasses import dataclass

from paged_jax.engine.request import Request, RequestMetrics


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


@dataclass(frozen=True)
class RequestOutput:
    """A request's prompt, its completions and its times."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics

    @classmethod
    def from_request(cls, request: Request) -> "RequestOutput":
        """A snapshot of the request as it stands."""
        completion = CompletionOutput(
            index=0,
            text=request.text.text if request.text else "",
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        return cls(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[completion],
            finished=request.is_finished,
            metrics=request.metrics,
        )
