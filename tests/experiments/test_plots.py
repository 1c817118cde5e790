import pytest
from matplotlib import rcParams

from paged_jax.experiments.config import experiment_from_dict
from paged_jax.experiments.metrics import KV_SHARES, METRICS
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


def test_a_series_is_named_by_one_key_of_a_group_if_that_tells_it_apart(raw_experiment):
    raw_experiment["sweep"] = {
        "engine.block_size": [4, 16],
        "zip": [
            {"engine.num_swap_blocks": [None, 8, 8], "engine.preemption_mode": ["recompute", "swap", "auto"]},
            {"engine.watermark": [0, 0, 0.1], "workload.n": [1, 2, 2]},
        ],
    }
    raw_experiment["report"] = {"y": ["wall_s"]}
    config = experiment_from_dict(raw_experiment)
    assert config.legend_keys == ("engine.preemption_mode", "engine.watermark", "workload.n")
    axes = draw(config, summaries_of(config), [["wall_s"]]).axes[0]
    words = [t.get_text() for t in axes.get_legend().get_texts()]
    assert len(set(words)) == len(words) == 9
    assert words[1] == "preemption_mode=recompute, watermark=0, n=2"


@pytest.mark.parametrize("x", ["engine.scheduling_policy", "engine.num_swap_blocks"])
def test_long_names_and_unset_values_have_room(raw_experiment, tmp_path, x, recwarn):
    raw_experiment["workload"] |= {"users": 2, "priorities": 2}
    raw_experiment["sweep"] = {
        "engine.scheduling_policy": ["fcfs", "longest_prefix_match", "priority", "sjf", "srpt", "fair"],
        "zip": [{"engine.num_swap_blocks": [None, 8], "engine.preemption_mode": ["recompute", "swap"]}],
    }
    figures = {"a": [["wall_s"], ["kv_token_states", "kv_reserved", "kv_external_fragmentation", "kv_free"]]}
    raw_experiment["report"] = {"x": x, "y": ["wall_s"], "figures": figures}
    config = experiment_from_dict(raw_experiment)
    write_figures(config, summaries_of(config), tmp_path)
    assert not [str(w.message) for w in recwarn if "layout" in str(w.message)]
    axes = draw(config, summaries_of(config), [["wall_s"]]).axes[0]
    names = [t.get_text() for t in axes.get_xticklabels()]
    assert names == (["unset", "8"] if x.endswith("blocks") else list(config.sweep["engine.scheduling_policy"]))


def test_all_parts_of_the_pool_differ(config):
    axes = draw(config, summaries_of(config), [KV_SHARES]).axes[0]
    assert len({(p.get_hatch(), p.get_facecolor()) for p in axes.patches}) == len(KV_SHARES) == 6


def test_a_series_without_a_value_is_not_drawn_and_the_others_keep_their_looks(raw_experiment):
    raw_experiment["sweep"] = {"engine.block_size": [4, 16], "engine.prefix_cache": ["hash", "none"]}
    raw_experiment["report"] = {"x": "engine.block_size", "y": ["scalar_memory_use", "wall_s"]}
    config = experiment_from_dict(raw_experiment)
    records = [
        {
            "key": t.key,
            "metrics": dict.fromkeys(METRICS, 0.5)
            | {"scalar_memory_use": 0.5 if t.setting.values["engine.prefix_cache"] == "none" else None},
        }
        for t in plan(config)
    ]
    first, second = draw(config, summarise(config, records), [["scalar_memory_use"], ["wall_s"]]).axes
    assert first.get_legend() is None  # one line is left
    (alone,), (_, both) = ([c.lines[0] for c in axes.containers] for axes in (first, second))
    assert (alone.get_color(), alone.get_marker()) == (both.get_color(), both.get_marker())
    assert first.get_ylim()[0] == 0
