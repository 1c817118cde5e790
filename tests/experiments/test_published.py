"""Published numbers against ours: quantities, differences and verdicts computed by hand."""

import csv
import io
import math

import pytest

from paged_jax.experiments.config import experiment_from_dict, load_experiment, settings
from paged_jax.experiments.metrics import METRICS
from paged_jax.experiments.published import Measured, compare, sustained
from paged_jax.experiments.published_plot import draw_published, write_published_figure
from paged_jax.experiments.published_table import (
    as_csv,
    as_latex,
    as_markdown,
    as_terminal,
    comparison_table,
    sentences,
)
from paged_jax.experiments.report import write_reports
from paged_jax.experiments.statistics import Estimate
from paged_jax.experiments.summary import MetricSummary, SettingSummary
from paged_jax.experiments.trials import check_same_experiment, plan, write_config

LATENCY = "normalized_latency_s_per_token_mean"
MAX, PAGED, ORACLE = ({"engine.allocator": name} for name in ("reserve_max", "paged", "reserve_oracle"))
RATES = [1.0, 2.0, 4.0]
FACTOR = {"paged": 0.2, "reserve_max": 0.6, "reserve_oracle": 0.3}
ROW = {"name": "a", "metric": "wall_s", "at": {**PAGED, "workload.request_rate": 1.0}, "value": 1}


@pytest.fixture
def make(raw_experiment):
    """The experiment of allocators and rates, with these rows."""

    def make(*rows, sweep=None, x="workload.request_rate", **published):
        raw_experiment["sweep"] = sweep or {"engine.allocator": list(FACTOR), "workload.request_rate": RATES}
        raw_experiment["engine"] = {"num_blocks": 64}
        raw_experiment["report"] = {"x": x, "y": ["wall_s"]}
        raw_experiment["published"] = {"source": "Somebody, 2023, figure 1", "rows": list(rows), **published}
        return experiment_from_dict(raw_experiment)

    return make


def at(allocator, rate):
    return {"engine.allocator": allocator, "workload.request_rate": rate}


def by_allocator_and_rate(setting, metric):
    """Latencies of 0.2, 0.3 and 0.6 s a token for each request/s."""
    return FACTOR[setting.engine.allocator] * setting.workload.request_rate


def compared(config, value=by_allocator_and_rate):
    summaries = [
        SettingSummary(
            s, {m: MetricSummary(Estimate(value(s, m), math.nan), math.nan, math.nan, None, math.nan) for m in METRICS}
        )
        for s in settings(config)
    ]
    return compare(config, summaries)


def row_of(config, value=by_allocator_and_rate):
    return compared(config, value).rows[0]


def cells(comparison):
    table = comparison_table("t", [comparison])
    return [dict(zip(table.headings, row, strict=True)) for row in table.rows]


def test_a_metric_at_one_setting(make):
    row = {"name": "Orca (Max)", "metric": "kv_token_states", "at": at("reserve_max", 1), "value": 0.5}
    comparison = compared(make(row))
    assert comparison.rows[0].ours == Measured(0.6, 0.6)
    assert comparison.verdict is None
    assert cells(comparison) == [
        {"what": "Orca (Max)", "paper": "50 %", "ours": "60 %", "difference": "+10.0 points"}
    ]  # fmt: skip


def test_means_are_over_seeds_and_repeats(raw_experiment, tmp_path):
    row = {"name": "a", "metric": "wall_s", "at": {"engine.block_size": 4}, "value": 10}
    config = experiment_from_dict({**raw_experiment, "published": {"source": "s", "rows": [row]}})
    records = [
        {"key": t.key, "run": 0, "tokens_sha256": "", "metrics": dict.fromkeys(METRICS, 2.0 * t.seed + t.repeat + 9)
         | {"compilations": 0, "truncated_requests": 0}}
        for t in plan(config)
    ]  # fmt: skip
    text = write_reports(config, records, tmp_path)  # 9, 10, 11, 12
    assert "10 s  10.50 s" in text
    (line,) = csv.DictReader(io.StringIO((tmp_path / "published.csv").read_text()))
    assert (line["what"], float(line["paper_low"]), float(line["ours"])) == ("a", 10, 10.5)
    assert float(line["difference"]) == 0.5
    assert "ours against s" in (tmp_path / "summary.md").read_text()
    assert "![published](figures/published.png)" in (tmp_path / "summary.md").read_text()
    assert "ours against s" in (tmp_path / "summary.tex").read_text()
    assert (tmp_path / "figures" / "published.pdf").read_bytes().startswith(b"%PDF")
    write_reports(experiment_from_dict(raw_experiment), records, tmp_path)
    assert not (tmp_path / "published.csv").exists()


@pytest.mark.parametrize(
    ("xs", "values", "limit", "low", "high"),
    [
        ([1, 2, 4], [0.2, 0.8, 1.2], 1.0, 3.0, 3.0),  # halfway from 2 to 4
        ([1, 2, 4], [0.2, 1.0, 3.0], 1.0, 2.0, 2.0),
        ([1, 2, 4], [0.2, 0.6, 0.9], 1.0, 4.0, math.inf),
        ([1, 2, 4], [0.2, 0.6, 1.0], 1.0, 4.0, math.inf),
        ([1, 2, 4], [1.5, 2.0, 3.0], 1.0, 0.0, 1.0),
        ([1, 2, 4], [0.5, 1.5, 0.9], 1.0, 1.5, 1.5),  # up to where it first exceeds, whatever comes after
        ([1, 2, 4], [0.5, math.nan, 0.9], 1.0, 1.0, 1.0),
        ([1, 2, 4], [0.5, math.inf, 0.9], 1.0, 1.0, 1.0),
    ],
)
def test_what_is_sustained_lies_between_the_values_that_were_run(xs, values, limit, low, high):
    assert sustained(xs, values, limit) == Measured(
        pytest.approx(low), high if math.isinf(high) else pytest.approx(high)
    )


def test_the_values_of_x_are_looked_at_in_ascending_order(make):
    sweep = {"engine.allocator": ["reserve_max"], "workload.request_rate": [4.0, 1.0, 2.0]}
    row = {"name": "a", "sustained": LATENCY, "limit": 1.0, "value": 1}
    # 0.6 at 1 and 1.2 at 2 requests/s
    assert row_of(make(row, sweep=sweep)).ours.low == pytest.approx(1 + 0.4 / 0.6)


def test_a_ratio_of_sustained_rates(make):
    row = {"name": "r", "sustained": LATENCY, "limit": 0.7, "at": PAGED, "over": {"at": MAX}, "value": [1.7, 2.7]}
    # paged: 0.4 at 2, 0.8 at 4 -> 3.5; Max: 0.6 at 1, 1.2 at 2 -> 7/6
    comparison = compared(make(row))
    assert comparison.rows[0].ours.low == pytest.approx(3.0)
    assert cells(comparison)[0] | {"ours": ""} == {
        "what": "r", "paper": "1.7 to 2.7 x", "ours": "", "difference": "+11.1 %"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "value", "low", "high", "difference"),
    [
        (1.0, [1.7, 2.7], 2.4, math.inf, "open"),  # paged: at least 4; Max: 5/3
        (1.0, [1.0, 2.0], 2.4, math.inf, "≥ +20.0 %"),
        (1.0, [2.0, None], 2.4, math.inf, "inside"),
        (0.5, [1.0, 2.0], 2.5, math.inf, "≥ +25.0 %"),  # 2.5; Max: at most 1
        (0.5, [None, 3.0], 2.5, math.inf, "open"),
        (9.0, [1.0, 2.0], 0.0, math.inf, "open"),  # both at least 4: nothing is known
    ],
)
def test_beyond_the_grid_only_bounds_are_known(make, limit, value, low, high, difference):
    row = {"name": "r", "sustained": LATENCY, "limit": limit, "at": PAGED, "over": {"at": MAX}, "value": value}
    comparison = compared(make(row))
    ours = comparison.rows[0].ours
    assert (ours.low, ours.high) == (pytest.approx(low), high)
    assert cells(comparison)[0]["difference"] == difference
    assert cells(comparison)[0]["ours"] == (f"≥ {low:.3f} x" if low else "n/a")
    (line,) = csv.DictReader(io.StringIO(as_csv(comparison)))
    assert (line["ours"], line["ours_high"]) == ("", "")
    assert float(line["ours_low"]) == pytest.approx(low)


def test_an_upper_bound(make):
    row = {"name": "r", "sustained": LATENCY, "limit": 0.5, "at": MAX, "over": {"at": PAGED}, "value": 0.5}
    comparison = compared(make(row))
    assert comparison.rows[0].ours == Measured(0.0, pytest.approx(0.4))
    assert (cells(comparison)[0]["ours"], cells(comparison)[0]["difference"]) == ("≤ 0.4000 x", "≤ -20.0 %")


def test_a_saving(make):
    row = {"name": "s", "metric": "wall_s", "at": at("paged", 1.0), "saving": {"at": MAX}, "value": [0.1, 0.6]}
    comparison = compared(make(row))
    assert comparison.rows[0].ours.low == pytest.approx(1 - 0.2 / 0.6)
    assert cells(comparison)[0] == {
        "what": "s", "paper": "10 to 60 %", "ours": "66.67 %", "difference": "+6.7 points"
    }  # fmt: skip


def test_bounds_of_a_saving():
    assert Measured(1.0, 1.0).saved(Measured(4.0, math.inf)) == Measured(0.75, 1.0)
    assert Measured(1.0, math.inf).saved(Measured(4.0, 4.0)) == Measured(-math.inf, 0.75)
    assert math.isnan(Measured(1.0, 1.0).over(Measured(0.0, 0.0)).low)


def test_a_ratio_of_two_metrics_at_one_setting_has_their_units(make):
    row = {"name": "a", "metric": "wall_s", "at": at("paged", 1.0), "over": {"metric": "steps"}, "value": 1}
    compared_row = row_of(make(row), lambda s, m: 6.0 if m == "wall_s" else 3.0)
    assert (compared_row.ours.low, compared_row.unit) == (2.0, "s / (1)")


def test_a_spread_over_listed_values_and_over_all_of_x(make):
    sweep = {"engine.block_size": [8, 16, 32, 64], "engine.max_num_seqs": [2, 4]}

    def value(setting, metric):
        return setting.engine.block_size + 0.0

    listed = {"engine.block_size": [16, 64], "engine.max_num_seqs": 2}
    rows = [
        {"name": "a", "spread": "wall_s", "at": listed, "value": 1},
        {"name": "b", "spread": "wall_s", "at": {"engine.max_num_seqs": 4}, "value": [1, 8]},
    ]
    comparison = compared(make(*rows, sweep=sweep, x="engine.block_size"), value)
    assert [row.ours.low for row in comparison.rows] == [4.0, 8.0]
    assert [row["difference"] for row in cells(comparison)] == ["+300 %", "inside"]


def test_an_order(make):
    row = {"name": "o", "metric": LATENCY, "at": {"workload.request_rate": 1.0}}
    comparison = compared(
        make({**row, "order": [PAGED, ORACLE, MAX]}, {**row, "name": "p", "order": [MAX, PAGED, ORACLE]})
    )
    right, wrong = cells(comparison)
    assert right["paper"] == right["ours"] == "paged < reserve_oracle < reserve_max"
    assert (right["difference"], wrong["difference"]) == ("same order", "2 of 3 pairs differ")
    assert wrong["paper"] == "reserve_max < paged < reserve_oracle"


def test_a_long_order_has_numbers_and_a_legend(make):
    row = {"name": "o", "metric": "wall_s", "order": [at("reserve_max", rate) for rate in (4.0, 1.0, 2.0)]}
    found = compared(make(row))
    (line,) = comparison_table("t", [found]).rows
    assert line[1:3] == ("1 < 2 < 3", "2 < 3 < 1")
    assert sentences(found)[0] == (
        "o: 1 is allocator=reserve_max, request_rate=4.0; 2 is allocator=reserve_max, request_rate=1.0; "
        "3 is allocator=reserve_max, request_rate=2.0."
    )


def test_equal_values_are_no_order_and_bounds_leave_it_open(make):
    row = {"name": "o", "sustained": LATENCY, "limit": 1.0, "order": [MAX, ORACLE, PAGED]}
    found = row_of(make(row))  # 5/3, 10/3, at least 4
    assert (found.ours, found.ours_order) == (Measured(0, 0), ("reserve_max", "<", "reserve_oracle", "<", "paged"))
    found = row_of(make({**row, "limit": 2.0}))  # 10/3, at least 4, at least 4
    assert (found.ours, found.ours_order[-2]) == (Measured(0, 1), "?")
    same = {"name": "o", "metric": "wall_s", "at": {"workload.request_rate": 1.0}, "order": [MAX, ORACLE]}
    found = row_of(make(same), lambda s, m: 1.0)
    assert (found.ours, found.ours_order[1]) == (Measured(1, 1), "=")


def claim_rows(*expected):
    """Rows whose value is 0.6."""
    return [{"name": f"r{i}", "metric": "wall_s", "at": at("reserve_max", 1.0)} | e for i, e in enumerate(expected)]


HOLDS, FAILS, SHOWN = {"expect": [0.5, None]}, {"expect": [None, 0.5]}, {"informative": True}


@pytest.mark.parametrize(
    ("rows", "verdict", "words"),
    [
        ([HOLDS], "holds", ["yes"]),
        ([HOLDS, HOLDS, SHOWN], "holds", ["yes", "yes", "-"]),
        ([HOLDS, FAILS], "holds in part", ["yes", "no"]),
        ([FAILS, SHOWN], "does not hold", ["no", "-"]),
        ([{"expect": 0.6}], "holds", ["yes"]),
        ([{"expect": [0.6, 0.7]}], "holds", ["yes"]),
        ([{"expect": [0.5, 0.6]}], "holds", ["yes"]),
        ([{"expect": [0.61, 0.7]}], "does not hold", ["no"]),
        ([{"value": 0.9, "expect": [0.5, 0.7]}], "holds", ["yes"]),
    ],
)
def test_a_claim_gets_a_verdict_from_its_rows(make, rows, verdict, words):
    comparison = compared(make(*claim_rows(*rows), statement="It is 0.6.", source=None))
    assert comparison.verdict == verdict
    assert [row["holds"] for row in cells(comparison)] == words
    for text in (as_terminal(comparison), as_markdown(comparison), as_latex(comparison)):
        assert f"Claim: It is 0.6. Verdict: {verdict}." in text


def test_an_order_is_judged_and_a_bound_leaves_a_claim_undecided(make):
    order = {"name": "o", "metric": "wall_s", "at": {"workload.request_rate": 1.0}, "order": [PAGED, ORACLE, MAX]}
    comparison = compared(make(order, statement="s"))
    assert (comparison.verdict, cells(comparison)[0]["expected"]) == ("holds", "paged < reserve_oracle < reserve_max")
    assert compared(make({**order, "order": [MAX, PAGED]}, statement="s")).verdict == "does not hold"
    bound = {"name": "b", "sustained": LATENCY, "limit": 1.0, "at": PAGED}
    for expect, verdict in [([1, 5], "undecided"), ([1, 3], "does not hold"), ([4, None], "holds")]:
        comparison = compared(make({**bound, "expect": expect}, statement="s"))
        assert comparison.verdict == verdict
    nothing = {"name": "n", "metric": "wall_s", "at": at("paged", 1.0), "expect": 1}
    comparison = compared(make(nothing, statement="s"), lambda s, m: math.nan)
    assert (comparison.verdict, cells(comparison)[0]["ours"]) == ("undecided", "n/a")


def test_values_may_be_one_sided_and_short_times_are_in_milliseconds(make):
    row = {"name": "a", "metric": "ttft_s_p50", "at": at("paged", 1.0), "value": [None, 0.25]}
    assert cells(compared(make(row)))[0] == {
        "what": "a", "paper": "≤ 250 ms", "ours": "200 ms", "difference": "inside"
    }  # fmt: skip
    assert cells(compared(make({**row, "value": [0.25, None]})))[0]["difference"] == "-20.0 %"
    assert cells(compared(make({**row, "value": 0.2})))[0]["difference"] == "0"
    assert cells(compared(make({**row, "value": 0})))[0]["difference"] == "+200 ms"


def test_a_row_without_a_published_value_is_shown_when_it_says_so(make):
    rows = claim_rows({"value": 1}, SHOWN)
    first, second = cells(compared(make(*rows)))
    assert first["difference"] == "-40.0 %"
    assert (second["paper"], second["difference"]) == ("", "")


def test_the_table_lines_up_and_notes_are_wrapped_below_it(make):
    rows = claim_rows({"value": 0.5, "name": "short"}, {"value": 0.5, "name": "a much longer name"})
    text = as_terminal(compared(make(*rows, notes=["because " * 40, "another"])))
    title, _, *lines = text.splitlines()
    assert title == "tiny: ours against Somebody, 2023, figure 1"
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[2].startswith("short ")
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "* another"
    assert lines[5].startswith("* because")
    assert lines[6].startswith("  because")


def test_latex_has_no_bare_special_characters(make):
    latex = as_latex(compared(make(*claim_rows({"value": [None, 5]}), notes=["50 % of a_b"])))
    assert r"$\le$ 5 s" in latex
    assert r"50 \% of a\_b" in latex
    assert r"\begin{tabular}{lrrr}" in latex


def test_csv_has_the_metrics_own_units(make):
    row = {"name": "a, b", "metric": "kv_token_states", "at": at("paged", 1.0), "value": [0.25, None]}
    (line,) = csv.DictReader(io.StringIO(as_csv(compared(make(row)))))
    assert (line["what"], line["paper_low"], line["paper_high"], line["ours"]) == ("a, b", "0.25", "", "0.2")
    assert float(line["difference"]) == pytest.approx(-0.05)


def test_a_key_of_a_group_replaces_those_that_move_with_it(make):
    sweep = {
        "workload.request_rate": RATES,
        "zip": [{"engine.allocator": ["paged", "reserve_max"], "engine.max_num_seqs": [8, 4]}],
    }
    over = {"name": "a", "metric": "wall_s", "at": {"engine.max_num_seqs": 8, "workload.request_rate": 1},
            "over": {"at": MAX}, "value": 1}  # fmt: skip
    assert row_of(make(over, sweep=sweep)).ours.low == pytest.approx(0.2 / 0.6)


def test_the_section_survives_the_file_that_a_run_writes(make, tmp_path):
    row = {"name": "a", "metric": "wall_s", "at": {"engine.num_swap_blocks": None}, "value": [None, 1]}
    sweep = {"zip": [{"engine.num_swap_blocks": [None, 8], "engine.preemption_mode": ["recompute", "swap"]}]}
    config = make(row, sweep=sweep, x="engine.num_swap_blocks")
    write_config(config, tmp_path / "config.yaml")
    assert load_experiment(tmp_path / "config.yaml") == config


def test_what_was_published_makes_no_other_experiment(make, tmp_path):
    write_config(make({**ROW, "value": 2}), tmp_path / "config.yaml")
    config = make(ROW)
    trials = plan(config)
    check_same_experiment(config, trials, [trial.key for trial in trials], tmp_path)
    with pytest.raises(ValueError, match="holds 1 trial of a different configuration"):
        check_same_experiment(config, trials, ["of another version"], tmp_path)


def test_figure_pairs_paper_and_ours_by_what_is_on_their_axis(make, tmp_path):
    rows = [
        {"name": "a", "metric": "kv_token_states", "at": at("paged", 1.0), "value": 0.25},
        {"name": "b", "metric": "kv_token_states", "at": at("reserve_max", 1.0), "value": [0.5, 0.7]},
        {"name": "c", "sustained": LATENCY, "limit": 0.7, "at": PAGED, "value": [2, None]},
        {"name": "d", "metric": "wall_s", "at": {"workload.request_rate": 1.0}, "order": [PAGED, MAX]},
    ]
    comparison = compared(make(*rows))
    shares, rate = draw_published(comparison, "workload.request_rate").axes
    assert (shares.get_xlabel(), rate.get_xlabel()) == ("token states (%)", "request rate (requests/s)")
    drawn = {(line.get_label(), *line.get_xdata()) for line in shares.lines}
    assert drawn == {("paper", 25.0), ("ours", 20.0), ("paper", 50.0, 70.0), ("ours", 60.0)}
    assert len({line.get_marker() for line in shares.lines}) == 2
    files = write_published_figure(comparison, "workload.request_rate", tmp_path)
    assert [f.name for f in files] == ["published.png", "published.pdf"]
    assert write_published_figure(compared(make(rows[-1])), None, tmp_path / "none") == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"at": {"engine.alocator": "paged"}}, "which is not swept; did you mean 'engine.allocator'?"),
        ({"at": at("pagd", 1.0)}, "at.engine.allocator is 'pagd', which is not one of the sweep's values; did you"),
        ({"at": at("paged", 3.0)}, "at.workload.request_rate is '3.0', which is not one of the sweep's values"),
        ({"at": PAGED}, "at leaves more than one setting, which differ in workload.request_rate: add"),
        ({"at": {}}, "at leaves more than one setting, which differ in engine.allocator, workload.request_rate"),
        ({"at": {**PAGED, "workload.request_rate": [1.0, 2.0]}}, "is '[1.0, 2.0]', which is not one of"),
        ({"metric": "wal_s"}, "metric names an unknown metric 'wal_s'; did you mean 'wall_s'?"),
        ({"metric": None}, "a quantity is missing: give one of metric, spread, sustained"),
        ({"spread": "steps"}, "metric and spread are two quantities"),
        ({"limit": 1}, "limit has no effect without sustained"),
        ({"metric": None, "sustained": LATENCY, "at": PAGED}, "sustained needs a limit"),
        ({"metric": None, "sustained": LATENCY, "limit": 1}, "at names workload.request_rate, which sustained"),
        ({"metric": None, "sustained": LATENCY, "limit": 1, "at": {}}, "more than one series, which differ in engine"),
        ({"metric": None, "spread": "steps"}, "spread needs at least two settings"),
        ({"metric": None, "spread": "steps", "at": {}}, "at leaves more than one setting, which differ in engine"),
        ({"over": {"at": {"engine.allocator": "pagd"}}}, "at.engine.allocator is 'pagd'"),
        ({"over": {"metrc": "steps"}}, "unknown key 'published.rows.0.over.metrc'; did you mean 'metric'?"),
        ({"over": {"spread": "steps"}}, "spread cannot be compared with metric"),
        ({"over": {"metric": "stepz"}}, "unknown metric 'stepz'; did you mean 'steps'?"),
        ({"over": {}, "saving": {}}, "over and saving cannot be combined"),
        ({"value": [2, 1]}, "value must be a number or a range [low, high] with low <= high"),
        ({"value": [None, None]}, "value must be a number or a range"),
        ({"value": "much"}, "published.rows.0.value: input should be a valid number"),
        ({"value": None}, "has no value: give the published value, or informative: true"),
        ({"informative": True}, "has a value and is informative too"),
        ({"expect": 1}, "expect has no effect without published.statement: use value"),
        ({"order": [MAX, PAGED]}, "value has no effect with order"),
        ({"valu": 1}, "unknown key 'published.rows.0.valu'; did you mean 'value'?"),
        ({"name": ""}, "published.rows.0.name: string should have at least 1 character"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_are_one_sentence(make, change, sentence):
    row = {key: value for key, value in {**ROW, **change}.items() if value is not None or key == "value"}
    with pytest.raises(ValueError, match=r"published\.rows\.0") as caught:
        make(row)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "published", "sentence"),
    [
        ([ROW], {"source": None}, "published.source is missing: say where the values come from"),
        ([ROW, ROW], {}, "published.rows has two rows named 'a'"),
        ([ROW], {"statement": "s"}, "('a') has no expect: give the expect that the claim is judged by"),
        ([{**ROW, "expect": 1, "informative": True}], {"statement": "s"}, "has an expect and is informative too"),
        ([{**ROW, "informative": True}], {"statement": "s"}, "published.rows are all informative"),
        ([], {}, "published.rows"),
        ([ROW], {"note": "x"}, "unknown key 'published.note'; did you mean 'notes'?"),
        ([ROW], {"rows": "all"}, "published.rows must be a list of keys and values, got 'all'"),
    ],
)
def test_sections_that_cannot_be_are_one_sentence(make, rows, published, sentence):
    with pytest.raises(ValueError, match="published") as caught:
        make(*rows, **published)
    assert sentence in str(caught.value)


def test_sustained_needs_numbers_on_its_axis(make):
    row = {"name": "a", "sustained": LATENCY, "limit": 1, "at": {"workload.request_rate": 1.0}, "value": 1}
    with pytest.raises(ValueError, match=r"engine\.allocator has values that are not numbers"):
        make(row, x="engine.allocator")
    with pytest.raises(ValueError, match=r"needs at least two values of workload\.request_rate"):
        make({**row, "at": {}}, sweep={"workload.request_rate": [1.0]})


def test_values_that_do_not_meet_are_named(make):
    sweep = {"zip": [{"engine.allocator": ["paged", "reserve_max"], "workload.request_rate": [1.0, 2.0]}]}
    with pytest.raises(ValueError, match=r"at \(allocator=paged, request_rate=2.0\) leaves no setting"):
        make({**ROW, "at": at("paged", 2.0)}, sweep=sweep)


def test_an_experiment_without_a_sweep_has_one_setting(raw_experiment):
    rows = [{"name": "a", "metric": "wall_s", "value": 1}]
    raw = {**raw_experiment, "sweep": {}, "report": {"y": ["wall_s"]}, "published": {"source": "s", "rows": rows}}
    assert row_of(experiment_from_dict(raw), lambda s, m: 2.0).ours.low == 2.0
    assert experiment_from_dict({**raw, "published": None}).published is None
