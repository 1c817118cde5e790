"""When a request ends, and why."""

from paged_jax.engine.request import Request


def check_stop(request: Request, token: int) -> None:
    """Set the finish and stop reasons if this token, its newest, ends the request; add its text if it has any."""
    params = request.sampling_params
    if token in request.end_token_ids and request.num_output_tokens >= params.min_tokens:
        request.finish_reason = "stop"
        request.stop_reason = token if token in params.stop_token_ids else None
    elif len(request.token_ids) >= request.max_total_tokens:
        request.finish_reason = "length"
    if request.text is not None and (request.finish_reason != "stop" or params.include_stop_str_in_output):
        stop_string = request.text.append(token)
        if stop_string is not None:
            request.finish_reason = "stop"
            request.stop_reason = stop_string


def finish_text(request: Request) -> bool:
    """Show the text that was held back until the end; whether it completes a stop string, which is then the reason."""
    stop_string = request.text.finish() if request.text is not None else None
    if stop_string is not None:
        request.finish_reason = "stop"
        request.stop_reason = stop_string
    return stop_string is not None
