import copy
import re

import pytest

from paged_jax.experiments.config import as_plain, experiment_from_dict, load_experiment, settings
from paged_jax.experiments.trials import write_config

FILE = """\
name: tiny
model: tiny-llama
engine: {max_num_seqs: 4, load_format: dummy}
workload:
  kind: lognormal
  num_requests: 6
  prompt: {mean: 6, sigma: 5e-1, max: 12}
  output: {mean: 6, sigma: 0.5, max: 12}
sweep: {engine.block_size: [4, 16]}
report: {y: [output_tokens_per_s]}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(FILE)
    return path


def test_reads_yaml_1_2_and_turns_lists_into_tuples(path):
    swept = FILE.replace("engine.block_size: [4, 16]", "engine.prefix_cache: [hash, none]")
    path.write_text(swept.replace("name: tiny", "name: off"))
    config = load_experiment(path)
    assert config.name == "off"
    assert config.workload.prompt.sigma == 0.5
    assert [s.engine.prefix_cache for s in settings(config)] == ["hash", "none"]
    assert config.seeds == (0, 1, 2)
    assert config.x == "engine.prefix_cache"


def test_overrides(path):
    config = load_experiment(
        path,
        [
            "engine.max_num_seqs=8",
            "seeds=[3,4]",
            "sweep.engine.block_size=[1,2,8]",
            "workload.output.mean=5.5",
        ],
    )
    assert [s.engine.block_size for s in settings(config)] == [1, 2, 8]
    assert config.engine.max_num_seqs == 8
    assert config.seeds == (3, 4)
    assert config.workload.output.mean == 5.5


def test_grid_and_zip_combine(raw_experiment):
    raw_experiment["sweep"] = {
        "engine.block_size": [8, 16],
        "zip": [{"engine.max_num_seqs": [2, 4], "engine.max_num_batched_tokens": [64, 128]}],
    }
    del raw_experiment["engine"]["max_num_seqs"]
    config = experiment_from_dict(raw_experiment)
    points = [(s.engine.block_size, s.engine.max_num_seqs, s.engine.max_num_batched_tokens) for s in settings(config)]
    assert points == [(8, 2, 64), (8, 4, 128), (16, 2, 64), (16, 4, 128)]
    assert config.series_keys == ("engine.max_num_seqs", "engine.max_num_batched_tokens")
    assert settings(config)[0].label == "block_size=8, max_num_seqs=2, max_num_batched_tokens=64"


def test_a_required_key_may_be_swept_and_the_written_config_reads_back(raw_experiment, tmp_path):
    output = dict(raw_experiment["workload"]["output"])
    del output["mean"]
    raw_experiment["workload"]["output"] = output
    raw_experiment["sweep"]["workload.output.mean"] = [4, 8]
    config = experiment_from_dict(raw_experiment)
    assert len(settings(config)) == 6
    write_config(config, tmp_path / "config.yaml")
    again = load_experiment(tmp_path / "config.yaml")
    assert as_plain(again) == as_plain(config)
    assert settings(again) == settings(config)


BAD_VALUES = [
    ({"engine.blok_size": 4}, "unknown key 'engine.blok_size'; did you mean 'engine.block_size'?"),
    ({"block_size": 4}, "unknown key 'block_size'; did you mean 'engine.block_size'?"),
    ({"sedes": [0]}, "unknown key 'sedes'; did you mean 'seeds'?"),
    ({"workload.output.sigm": 1},
     "unknown key 'workload.output.sigm'; did you mean 'workload.output.sigma'?"),
    ({"workload.prefix_len": 4}, "workload.prefix_len belongs to kind shared_prefix, not to lognormal"),
    ({"workload.kind": "lognorml"},
     "workload.kind: there is no kind 'lognorml'; did you mean 'lognormal'?"),
    ({"workload.output.mean": 40}, "workload.output: the mean (40) must lie between min (1) and max (12)"),
    ({"workload.num_requests": 0},
     "workload.num_requests: input should be greater than or equal to 1, got 0"),
    ({"workload": None}, "workload.kind is missing: it is one of prompts, lognormal, shared_prefix"),
    ({"workload": {"kind": "prompts", "num_requests": 999, "output": {"mean": 2, "sigma": 0, "max": 2}}},
     "num_requests (999) is more than the 37 prompts of the package"),
    ({"sweep": {"engine.block_size": [4, 0]}},
     "engine.block_size: input should be greater than or equal to 1, got 0"),
    ({"sweep": {"engine.blck_size": [4]}},
     "sweep names an unknown key 'engine.blck_size'; did you mean 'engine.block_size'?"),
    ({"sweep": {"seeds": [1, 2]}}, "sweep.seeds: only keys of engine and workload"),
    ({"sweep": {"workload.output": [1]}},
     "sweep.workload.output: sweep the keys inside of it, such as workload.output.mean"),
    ({"sweep": {"engine.block_size": 4}},
     "sweep.engine.block_size must be a list with at least one value, got 4"),
    ({"sweep": {"engine.block_size": []}},
     "sweep.engine.block_size must be a list with at least one value"),
    ({"sweep": {"engine.block_size": [16, 16]}}, "sweep.engine.block_size [16, 16] repeats a value"),
    ({"sweep": [1]}, "sweep must map keys to lists"),
    ({"sweep": {"zip": {"engine.block_size": [4]}}}, "sweep.zip must be a list of groups"),
    ({"sweep": {"zip": [{"engine.block_size": [4, 8], "engine.num_blocks": [9]}]}},
     "equally many values, but engine.block_size has 2, engine.num_blocks has 1"),
    ({"sweep": {"engine.block_size": [4], "zip": [{"engine.block_size": [4]}]}},
     "sweep names engine.block_size twice"),
    ({"engine.block_size": 8}, "engine.block_size is both set and swept"),
    ({"engine.max_model_len": 16}, "requests of 24 tokens, more than engine.max_model_len (16)"),
    ({"engine.kv_cache_memory": 1000}, "engine: num_blocks and kv_cache_memory both set the size"),
    ({"engine": 3}, "engine must hold keys and values, got 3"),
    ({"executor": "simulated"}, "executor: input should be 'jax', got 'simulated'"),
    ({"name": "a/b"}, "name: string should match pattern"),
    ({"seeds": []}, "seeds: tuple should have at least 1 item"),
    ({"seeds": [1, 1]}, "seeds [1, 1] repeat a seed"),
    ({"seeds": ["1"]}, "seeds.0: input should be a valid integer, got '1'"),
    ({"repeats": 0}, "repeats: input should be greater than or equal to 1, got 0"),
    ({"repeats": 1.5}, "repeats: input should be a valid integer, got 1.5"),
    ({"report": {"y": ["output_token_per_s"]}},
     "report.y names an unknown metric 'output_token_per_s'; did you mean 'output_tokens_per_s'?"),
    ({"report.figures": {"a": ["ttft_s_p5"]}},
     "report.figures.a names an unknown metric 'ttft_s_p5'; did you mean 'ttft_s_p95'?"),
    ({"report.figures": {"a": ["ttft_s_p50", "peak_blocks"]}},
     "report.figures.a puts blocks and s on one axis"),
    ({"report.figures": {"a": []}}, "report.figures.a is empty: list the metrics that it shows"),
    ({"sweep": None, "report": {"y": ["wall_s"], "figures": {"a": ["wall_s"]}}},
     "report.figures are drawn over a swept key, but nothing is swept"),
    ({"sweep": 0}, "sweep must map keys to lists"),
    ({"sweep": False}, "sweep must map keys to lists"),
    ({"sweep": ""}, "sweep must map keys to lists"),
    ({"report.x": "engine.block_siz"},
     "report.x is 'engine.block_siz', which is not a swept key; did you mean 'engine.block_size'?"),
    ({"report.baseline": 17}, "report.baseline is 17, which is not one of the values [4, 16, 64]"),
    ({"report.why": 17}, "unknown key 'report.why'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), BAD_VALUES, ids=[str(b[0])[:50] for b in BAD_VALUES])
def test_a_bad_value_is_one_sentence(raw_experiment, change, sentence):
    raw = copy.deepcopy(raw_experiment)
    for key, value in change.items():
        *parents, last = key.split(".")
        place = raw
        for parent in parents:
            place = place[parent]
        place[last] = value
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        experiment_from_dict(raw)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


BAD_FILES = [
    ("", "is empty"),
    ("# only a comment\n", "is empty"),
    ("- a\n- b\n", "does not hold keys and values"),
    (FILE + "seeds: [0]\nseeds: [1]\n", 'line 12: there is a second key "seeds"'),
    (FILE + "seeds: [0\n", "not valid YAML"),
    (FILE.replace("name:", "\tname:"), "line 1: not valid YAML"),
    (FILE.replace("workload:\n  kind: lognormal", "worklod:\n  kind: lognormal"), "workload is missing"),
    (FILE.replace("name: tiny\n", ""), "name is missing"),
    (FILE.replace("report: {y: [output_tokens_per_s]}", ""), "report is missing"),
]


@pytest.mark.parametrize(("text", "sentence"), BAD_FILES)
def test_a_bad_file_is_one_sentence(path, text, sentence):
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        load_experiment(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no experiment file at .*none.yaml"):
        load_experiment(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="cannot read"):
        load_experiment(tmp_path)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("engine.block_size", "is not an override: write key=value"),
        ("engine.block_size=8", "engine.block_size is swept: override sweep.engine.block_size"),
        ("engine.max_num_seq=8", "unknown key 'engine.max_num_seq'; did you mean 'engine.max_num_seqs'?"),
        ("name.first=8", "name is a single value and has no keys below it"),
        ("seeds=[0", "override 'seeds=[0', line 1: not valid YAML"),
    ],
)
def test_a_bad_override_is_one_sentence(path, override, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load_experiment(path, [override])
