import pytest
from matplotlib import rcParams

from paged_jax.experiments.config import experiment_from_dict
from paged_jax.experiments.metrics import METRICS
from paged_jax.experiments.plots import draw, write_figures
from paged_jax.experiments.summary import summarise
from paged_jax.experiments.trials import plan


def summaries_of(config):
    records = [
        {"key": t.key, "metrics": dict.fromkeys(METRICS, 0.2 + 0.01 * t.seed + 0.001 * t.repeat)} for t in plan(config)
    ]
    return summarise(config, records)


@pytest.fixture
def config(raw_experiment):
    return experiment_from_dict(raw_experiment)


def test_files_are_real_images_and_global_state_is_left_alone(config, tmp_path):
    before = dict(rcParams)
    files = write_figures(config, summaries_of(config), tmp_path)
    assert dict(rcParams) == before
    assert {f.name for f in files} == {"throughput.png", "throughput.pdf", "memory.png", "memory.pdf"}
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG" if file.suffix == ".png" else b"%PDF")


def test_block_sizes_lie_on_a_log_scale_with_units_on_both_axes(config):
    axes = draw(config, summaries_of(config), [["output_tokens_per_s"]]).axes[0]
    assert axes.get_xscale() == "log"
    assert [t.get_text() for t in axes.get_xticklabels()] == ["4", "16", "64"]
    assert axes.get_xlabel() == "block size (tokens)"
    assert axes.get_ylabel() == "output throughput (tokens/s)"


def test_lines_of_a_panel_differ_without_colour(config):
    axes = draw(config, summaries_of(config), [["ttft_s_p50", "ttft_s_p95"]]).axes[0]
    first, second = (container.lines[0] for container in axes.containers)
    assert first.get_linestyle() != second.get_linestyle()
    assert first.get_marker() != second.get_marker()
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["p50", "p95"]
    assert axes.get_ylabel() == "TTFT (ms)"


def test_parts_of_the_pool_are_stacked_with_hatches(config):
    panel = ["kv_token_states", "kv_internal_fragmentation", "kv_free"]
    axes = draw(config, summaries_of(config), [panel]).axes[0]
    assert len(axes.patches) == 9
    assert len({(p.get_hatch(), p.get_facecolor()) for p in axes.patches}) == 3


def test_words_are_placed_side_by_side_and_other_swept_keys_are_series(raw_experiment):
    raw_experiment["sweep"] = {"engine.prefix_cache": ["hash", "none"], "engine.block_size": [4, 16]}
    raw_experiment["report"] = {"x": "engine.prefix_cache", "y": ["wall_s"]}
    config = experiment_from_dict(raw_experiment)
    axes = draw(config, summaries_of(config), [["wall_s"]]).axes[0]
    assert axes.get_xscale() == "linear"
    assert [t.get_text() for t in axes.get_xticklabels()] == ["hash", "none"]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["block_size=4", "block_size=16"]
