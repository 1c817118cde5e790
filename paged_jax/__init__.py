"""PagedAttention and continuous batching in JAX: a small LLM serving engine for systems research."""

from typing import TYPE_CHECKING, Any

from paged_jax.sampling.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from paged_jax.llm import LLM
    from paged_jax.outputs import RequestOutput

__all__ = ["LLM", "BeamSearchParams", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # JAX takes a second to import: only those who load a model wait for it
    if name == "LLM":
        from paged_jax.llm import LLM

        return LLM
    if name == "RequestOutput":
        from paged_jax.outputs import RequestOutput

        return RequestOutput
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
