"""The default model for tests: fetched once into the user's cache; they skip without a network."""

from pathlib import Path

import pytest

from paged_jax.catalog.fetch import FetchError, fetch


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Path of SmolLM2's GGUF file. Workers that fetch at the same time each succeed: see `fetch`."""
    try:
        return fetch("smollm2-135m", progress=False)
    except FetchError as error:
        pytest.skip(f"needs SmolLM2: {error}")
