"""Output lengths from the workload."""

from paged_jax.engine.policies import LengthPredictor
from paged_jax.engine.request import Request


class OracleLength(LengthPredictor):
    """The true length, which only a replayed or synthetic workload knows: the best that prediction can do."""

    def predict(self, request: Request) -> int:
        """Its `expected_output_len`. Raises ValueError when it brings none."""
        if request.expected_output_len is None:
            raise ValueError(
                "length_predictor 'oracle' needs the request's expected_output_len, which request "
                f"{request.request_id!r} does not bring: give it, or choose another predictor"
            )
        return max(1, request.expected_output_len)
