"""The study of block sizes that is shipped: every file runs, and what can be computed by hand comes out so."""

from pathlib import Path
from typing import Any

import pytest

from paged_jax.experiments.config import ExperimentConfig, Setting, load_experiment, settings
from paged_jax.experiments.simulated_trials import simulate
from paged_jax.experiments.trials import Trial

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs" / "block_size_study").glob("*.yaml"))
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def load(name: str) -> ExperimentConfig:
    return load_experiment(ROOT / "configs" / "block_size_study" / f"{name}.yaml")


def small(setting: Setting, num_requests: int) -> dict[str, Any]:
    """The metrics of a setting with few requests."""
    workload = setting.workload.model_copy(update={"num_requests": num_requests})
    few = Setting(setting.values, setting.model, setting.hardware, setting.engine, workload)
    return simulate(Trial(few, 0, 0, "simulated"))["metrics"]


def test_the_files_are_there():
    assert {path.stem for path in FILES} >= {
        "sharegpt",
        "alpaca",
        "long_context",
        "shared_prompt",
        "context",
        "devices",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_sweeps_the_sizes_and_its_largest_blocks_run(path):
    config = load_experiment(path)
    assert config.sweep["engine.block_size"] == SIZES
    assert config.executor == "simulated"
    assert config.report.optimum is not None
    last = {}  # of each series
    for setting in settings(config):
        last[tuple(setting.values[key] for key in config.series_keys)] = setting
    for setting in last.values():
        metrics = small(setting, 2)
        assert metrics["finished_requests"] == 2
        for name in config.report.y:
            assert metrics[name] is not None


def test_pages_and_tables_by_hand():
    """Llama 3 8B, 8 KV heads of 128 in 16 bits, 256 rows of 8,192 tokens.

    A GPU copies one head's part of a page: 16 tokens are 16 * 2 * 128 * 2 = 8,192 bytes, and the overhead is as much as
    1,884 more. A TPU copies all heads that are on the device, 2 of 8 with four devices, as 16,384 bytes more. Its table
    has 256 * 8,192 / B entries of 4 bytes, in 1 MiB.
    """
    wanted = {"l4", "a100-80gb", "tpu-v5e", "tpu-v6e"}
    found = {
        (s.hardware, s.engine.block_size): small(s, 1)
        for s in settings(load("devices"))
        if s.hardware in wanted and s.engine.block_size in (1, 16, 128)
    }
    efficiency = {key: metrics["page_efficiency"] for key, metrics in found.items()}
    assert efficiency["a100-80gb", 16] == pytest.approx(8192 / (8192 + 1884))
    assert efficiency["a100-80gb", 1] == pytest.approx(512 / (512 + 1884))
    assert efficiency["a100-80gb", 128] == pytest.approx(64 * 512 / (64 * 512 + 1884))  # in tiles of 64
    assert efficiency["tpu-v5e", 16] == pytest.approx(0.5)
    assert efficiency["tpu-v6e", 16] == pytest.approx(65536 / (65536 + 16384))
    use = {key: metrics["scalar_memory_use"] for key, metrics in found.items()}
    assert [use["tpu-v5e", size] for size in (1, 16, 128)] == [8, 0.5, 0.0625]
    assert use["l4", 16] != use["l4", 16]  # NaN: it reads tables from main memory


def test_a_prefix_is_found_up_to_its_last_full_block():
    """500 tokens of prefix, then at most 200 of their own: one request after another finds what the first has left."""
    for setting in settings(load("shared_prompt")):
        if setting.values["workload.prefix_len"] != 500 or setting.engine.block_size not in (1, 16, 128, 512):
            continue
        workload = setting.workload.model_copy(update={"num_requests": 2, "num_prefixes": 1, "num_clients": 1})
        alone = Setting(setting.values, setting.model, setting.hardware, setting.engine, workload)
        metrics = simulate(Trial(alone, 0, 0, "simulated"))["metrics"]
        assert metrics["prefix_hit_tokens"] == {1: 500, 16: 496, 128: 384, 512: 0}[setting.engine.block_size]


def test_only_swaps_take_the_time_of_swaps():
    """Small pools: then requests give way, and many small pieces take longer than few large ones."""
    seconds = {}
    for setting in settings(load("swap")):
        size, mode = setting.engine.block_size, setting.values["engine.preemption_mode"]
        if size not in (4, 64):
            continue
        engine = setting.engine.model_copy(update={"num_blocks": 3072 // size})
        few = Setting(setting.values, setting.model, setting.hardware, engine, setting.workload)
        metrics = small(few, 16)
        assert metrics["preemptions"] > 0
        seconds[mode, size] = metrics["swap_s"] / metrics["preemptions"]
    assert seconds["recompute", 4] == seconds["recompute", 64] == 0
    assert seconds["swap", 4] > 2 * seconds["swap", 64] > 0
