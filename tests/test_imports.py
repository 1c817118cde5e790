"""What researchers import by the thousand stays free of JAX, which takes a second and wants a device."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

HOST_PACKAGES = ["paged_jax/commands", "paged_jax/engine", "paged_jax/kv_cache"]
HOST_MODULES = [
    "paged_jax",
    "paged_jax.config",
    "paged_jax.catalog",
    "paged_jax.catalog.entries",
    "paged_jax.catalog.fetch",
    "paged_jax.checkpoints.resolve",
    "paged_jax.cli",
    "paged_jax.execution.buckets",
    "paged_jax.execution.plan",
    "paged_jax.experiments.config",
    "paged_jax.experiments.metrics",
    "paged_jax.experiments.replay",
    "paged_jax.experiments.replay_engine",
    "paged_jax.experiments.scheduler_bench",
    "paged_jax.experiments.sweep",
    "paged_jax.experiments.totals",
    "paged_jax.experiments.trace",
    "paged_jax.experiments.trace_diff",
    "paged_jax.experiments.what_if",
    "paged_jax.experiments.workloads",
    "paged_jax.flags",
    "paged_jax.models.config",
    "paged_jax.outputs",
    "paged_jax.sampling.params",
    "paged_jax.sampling.seeds",
    "paged_jax.sampling.stop",
    "paged_jax.simulation.model_shape",
    "paged_jax.simulation.shapes",
    *(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in HOST_PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    ),
]

# the first module in the list that brings JAX in is named; each is imported on top of those before it
SCRIPT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    found = sorted({"jax", "jaxlib", "flax", "torch"} & set(sys.modules))
    if found:
        sys.exit(f"importing {name} imports {', '.join(found)}")
"""


def test_host_modules_import_no_jax() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *HOST_MODULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = "import sys, paged_jax; print(*sorted({'jax', 'numpy', 'pandas', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_facade_is_imported_when_it_is_asked_for() -> None:
    script = "import paged_jax; from paged_jax import LLM, RequestOutput; print(LLM.__module__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "paged_jax.llm"


def test_unknown_name_is_an_attribute_error() -> None:
    import paged_jax

    with pytest.raises(AttributeError, match="module 'paged_jax' has no attribute 'LMM'"):
        paged_jax.LMM  # noqa: B018
