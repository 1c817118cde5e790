"""The same output length for all."""

from paged_jax.engine.policies import LengthPredictor
from paged_jax.engine.request import Request

DEFAULT_OUTPUT_LEN = 256
"""Tokens, where the config says nothing."""


class ConstantLength(LengthPredictor):
    """Knows nothing: orders by predicted output become orders of arrival, by remaining output of progress."""

    def predict(self, request: Request) -> int:
        """`constant_output_len` tokens, whoever asks."""
        return self.config.constant_output_len or DEFAULT_OUTPUT_LEN
