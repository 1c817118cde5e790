"""As long as the request says."""

from paged_jax.engine.policies import LengthPredictor
from paged_jax.engine.policies.constant_length import DEFAULT_OUTPUT_LEN
from paged_jax.engine.request import Request


class GivenLength(LengthPredictor):
    """What the request brings: its true length if a workload knows it, else the most that it may generate."""

    def predict(self, request: Request) -> int:
        """`expected_output_len`, else `max_tokens`, else `constant_output_len` tokens."""
        given = request.expected_output_len or request.sampling_params.max_tokens
        return given or self.config.constant_output_len or DEFAULT_OUTPUT_LEN
