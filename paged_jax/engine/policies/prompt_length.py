"""Output lengths guessed from the prompt."""

from paged_jax.engine.policies import LengthPredictor
from paged_jax.engine.request import Request


class PromptLength(LengthPredictor):
    """As long as the prompt: right in order, if not in size, where long questions get long answers."""

    def predict(self, request: Request) -> int:
        """Its prompt's tokens."""
        return max(1, request.num_prompt_tokens)
