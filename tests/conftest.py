"""Settings for all tests: strict types, warnings as errors, derandomized Hypothesis in CI."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# each warp group that waits in the Mosaic GPU interpreter holds one of XLA's threads: with two it may wait for ever
os.environ.setdefault("NPROC", "16")

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# every array argument of these packages is checked against its annotated shape and dtype
install_import_hook(
    [
        "pallas_kernels",
        "paged_jax.models",
        "paged_jax.sampling.logprobs",
        "paged_jax.sampling.sampler",
        "paged_jax.sampling.state",
    ],
    "beartype.beartype",
)

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

pytest_plugins = ["fixtures_smollm2"]

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The reference files beside the project; tests that need them skip without them."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the reference files in {SHARED}, which are not here")
    return SHARED
