import copy
import re
from pathlib import Path

import pytest

from paged_jax.experiments.config import as_plain, experiment_from_dict, load_experiment, settings
from paged_jax.experiments.sweep import shown
from paged_jax.experiments.trials import write_config

CONFIGS = Path(__file__).parents[2] / "configs"
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


def test_null_in_a_sweep_leaves_its_key_unset(raw_experiment, tmp_path):
    raw_experiment["sweep"] = {
        "zip": [
            {
                "engine.scheduling_policy": ["fcfs", "sjf", "srpt"],
                "engine.length_predictor": [None, "oracle", "oracle"],
            },
            {"engine.preemption_mode": ["recompute", "swap"], "engine.num_swap_blocks": [None, 8]},
        ],
        "engine.aging_s": [None],
        "workload.request_rate": [None, 3.0],
    }
    raw_experiment["report"] = {"y": ["wall_s"], "x": "engine.scheduling_policy"}
    config = experiment_from_dict(raw_experiment)
    points = settings(config)
    assert [s.engine.length_predictor for s in points] == [None, None, "oracle", "oracle", "oracle", "oracle"] * 2
    assert [s.engine.num_swap_blocks for s in points] == [None, 8] * 6
    assert [s.workload.request_rate for s in points] == [None] * 6 + [3.0] * 6
    assert points[0].label == (
        "aging_s=unset, request_rate=unset, scheduling_policy=fcfs, length_predictor=unset, preemption_mode=recompute, "
        "num_swap_blocks=unset"
    )
    write_config(config, tmp_path / "config.yaml")
    assert settings(load_experiment(tmp_path / "config.yaml")) == points


@pytest.mark.parametrize(
    ("value", "text"), [(None, "unset"), (16, "16"), (True, "True"), ("lru", "lru"), ((4, None), "[4, unset]")]
)
def test_swept_values_as_people_read_them(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(
    ("workload", "engine"),
    [
        ({"users": 2, "cache_salts": True}, ["fcfs"]),
        ({"users": 2}, ["fcfs", "fair"]),
        ({"users": 2, "priorities": 2}, ["my_policies:Queue"]),
        ({"priorities": 2}, ["fcfs", "priority"]),
    ],
)
def test_users_and_priorities_may_be_looked_at_by_one_setting_of_those_compared(raw_experiment, workload, engine):
    raw_experiment["sweep"] = {"engine.scheduling_policy": engine}
    raw_experiment["workload"] |= workload
    raw_experiment["report"] = {"y": ["wall_s"]}
    assert len(settings(experiment_from_dict(raw_experiment))) == len(engine)


IMPOSSIBLE_SETTINGS = [
    ({"workload.users": 2}, {"engine.scheduling_policy": ["fcfs", "sjf"]},
     "workload.users has no effect without engine.scheduling_policy 'fair' or workload.cache_salts: leave it out"),
    ({}, {"workload.priorities": [None, 2]},
     "workload.priorities has no effect without engine.scheduling_policy 'priority' or engine.victim_policy "
     "'lowest_priority': leave it out"),
    ({}, {"engine.prefix_cache": ["hash", "none"], "engine.eviction": ["lru", None]},
     "engine: eviction has no effect with prefix_cache 'none': leave it unset "
     "(setting prefix_cache=none, eviction=lru)"),
    ({}, {"engine.scheduling_policy": ["sjf", "fcfs"], "engine.aging_s": [None, 5.0]},
     "leave it unset (setting scheduling_policy=fcfs, aging_s=5.0)"),
    ({}, {"engine.allocator": ["paged", "reserve_max"], "engine.prefix_cache": [None, "radix"]},
     "leave prefix_cache ('radix') unset (setting allocator=reserve_max, prefix_cache=radix)"),
    ({}, {"engine.batching": ["continuous", "static"], "engine.scheduling_policy": ["sjf", "srpt"]},
     "use 'sjf' (setting batching=static, scheduling_policy=srpt)"),
    ({}, {"engine.eviction": ["lru", "belady"]},
     "`paged-jax replay FILE eviction=belady` (setting eviction=belady)"),
    ({"engine.eviction": "belady"}, {}, "engine.eviction 'belady' must know the future"),
    ({"engine.trace_file": "run.jsonl"}, {"engine.block_size": [8, 16]},
     "engine.trace_file is one file, and an experiment runs many trials"),
    ({}, {"engine.scheduling_policy": ["fcfs", "priority"]},
     "engine.scheduling_policy 'priority' has no effect without workload.priorities: set it (setting "),
    ({"workload.users": 2}, {"engine.victim_policy": ["last_arrived", "lowest_priority"]},
     "engine.victim_policy 'lowest_priority' has no effect without workload.priorities: set it (setting "),
    ({"workload.priorities": 2}, {"engine.scheduling_policy": ["priority", "fair"]},
     "engine.scheduling_policy 'fair' has no effect without workload.users: set it (setting scheduling_policy=fair)"),
    ({}, {"workload.n": [1, 4, 5]},
     "workload.n (5) samples of a prompt run at once, more than engine.max_num_seqs (4): lower the one or raise the "
     "other (setting n=5)"),
    ({"workload.cache_salts": True}, {"workload.users": [2, None]},
     "workload: cache_salts keeps the prefixes of users apart, and there is one user: set users, too "
     "(setting users=unset)"),
    ({}, {"engine.block_size": [8, None]}, "engine.block_size: input should be a valid integer, got None (setting "),
    ({}, {"workload.priorities": [1]},
     "workload.priorities: input should be greater than or equal to 2, got 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "sweep", "sentence"), IMPOSSIBLE_SETTINGS, ids=[b[2][-50:] for b in IMPOSSIBLE_SETTINGS]
)
def test_a_setting_that_cannot_work_is_named(raw_experiment, values, sweep, sentence):
    raw = {**raw_experiment, "sweep": sweep, "report": {"y": ["wall_s"]}}
    for key, value in values.items():
        section, _, name = key.partition(".")
        raw[section] = {**raw[section], name: value}
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        experiment_from_dict(raw)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 280
    assert message.count("(setting ") == sentence.count("(setting ")


def test_what_is_wrong_in_every_setting_is_not_blamed_on_one(raw_experiment):
    raw_experiment["engine"]["max_num_seqs"] = 0
    with pytest.raises(ValueError, match=r"^engine\.max_num_seqs: .*, got 0$"):
        experiment_from_dict(raw_experiment)


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
    ({"workload": None}, "workload.kind is missing: it is one of prompts, lognormal, uniform"),
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
    ({"sweep": {"engine.token_buckets": [[8, 512], [8, 512]]}},
     "sweep.engine.token_buckets [(8, 512), (8, 512)] repeats a value"),
    ({"sweep": {"zip": [{"engine.block_size": [4, 8, 4], "engine.num_blocks": [8, 9, 8]}]}},
     "sweep.engine.block_size [4, 8, 4] and sweep.engine.num_blocks [8, 9, 8] repeats a row of values"),
    ({"engine": {}, "sweep": {"zip": [{"engine.block_size": [4, 4], "engine.num_blocks": [99, 98]}]},
      "report": {"y": ["wall_s"]}},
     "report.x is 'engine.block_size', whose values [4, 4] repeat: choose a key whose values tell the settings"),
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
    ({"executor": "simulator"}, "executor: input should be 'jax' or 'simulated', got 'simulator'"),
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


EXPERIMENTS = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path.parent.name != "hardware"]


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda p: p.name)
def test_experiments_that_come_with_the_repository_can_run(file):
    config = load_experiment(file)
    assert config.name.replace("-", "_").endswith(file.stem)
    for point in settings(config):  # a fresh clone has no traces beside it
        assert point.workload.kind != "trace" or point.workload.stand_in is not None


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
