"""What a request is predicted to generate yet."""

from paged_jax.engine.policies import PolicyContext
from paged_jax.engine.request import Request


def remaining_output(context: PolicyContext, request: Request) -> int:
    """Predicted output tokens less those generated; at least 1, for whoever has outlived its prediction."""
    return max(1, context.predict_output_len(request) - request.num_output_tokens)
