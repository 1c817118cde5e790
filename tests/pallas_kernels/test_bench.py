"""The benchmark command: a whole quick run, what it writes, what it refuses, and that it stops at a wrong kernel."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench import candidates
from pallas_kernels.bench.__main__ import main
from pallas_kernels.bench.cases import Point, Settings, bytes_per_call, make_batch, points, refusal
from pallas_kernels.bench.report import append, read_trials, split, summarise
from pallas_kernels.paged_attention import xla

SETTINGS = Settings(
    platform="cpu",
    implementations=("xla", "contiguous"),
    batch=(2, 3),
    context=(8, 32),
    page_sizes=(4, 16),
    tiles=(),
    heads=(2, 1, 8),
    dtype="float32",
    kv_dtype="float32",
    repeats=2,
    trial_seconds=1e-4,
    copy_bytes=1 << 16,
    matmul_size=8,
)
TINY = ["--quick", "--batch", "1", "--context", "5", "--page-sizes", "4", "--heads", "2,1,8", "--tiles", "default"]


def run(tmp_path: Path, *arguments: str) -> int:
    return main([*TINY, "--output-dir", str(tmp_path / "out"), *arguments])


def test_a_run_checks_times_and_writes_the_files_of_an_experiment(tmp_path, capsys):
    assert run(tmp_path) == 0
    out, err = capsys.readouterr()
    directory = tmp_path / "out"
    written = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
    tables = {"summary.csv", "summary.md", "summary.tex"}
    figures = {"figures/roofline.png", "figures/roofline.pdf"}
    assert written == {"config.yaml", "environment.json", "trials.jsonl"} | tables | figures
    assert json.loads((directory / "config.yaml").read_text())["page_sizes"] == [4]
    assert json.loads((directory / "environment.json").read_text())["runs"][0]["device"]["platform"] == "cpu"
    trials = read_trials(directory)
    names = [t["setting"]["implementation"] for t in trials]
    assert {name: names.count(name) for name in names} == {"xla": 2, "contiguous": 2, "copy": 2, "matmul": 2}
    assert len({t["key"] for t in trials}) == len(trials)
    with (directory / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["implementation"] for row in rows[:2]] == ["xla", "contiguous"]
    assert float(rows[0]["seconds_median"]) > 0
    # 5 tokens of K and V of one head of 8 float32, and a query and an output of two
    assert rows[0]["bytes_per_call"] == str(5 * 2 * 8 * 4 + 2 * 2 * 8 * 4)
    assert "contiguous (xla)" in out
    assert "copy bandwidth:" in out
    assert "[1/4, " in err
    assert "s left]" in err

    assert run(tmp_path) == 2
    assert "holds an earlier run: discard it with --fresh" in capsys.readouterr().err


def without_mask(*arguments, **options):
    """All queries at the sequence's end: chunks see what comes after them."""
    q, pages, kv_lens, tables, cu_q_lens, num_seqs = arguments
    return xla.ragged_paged_attention(q, pages, kv_lens + 2, tables, cu_q_lens, num_seqs, **options)


def with_swapped_values(q, pages, *arguments, **options):
    return xla.ragged_paged_attention(q, pages[:, :, jnp.array([1, 0])], *arguments, **options)


def with_a_wrong_page(q, pages, kv_lens, tables, *arguments, **options):
    return xla.ragged_paged_attention(q, pages, kv_lens, jnp.roll(tables, 1, axis=1), *arguments, **options)


@pytest.mark.parametrize("planted", [without_mask, with_swapped_values, with_a_wrong_page])
def test_a_wrong_kernel_stops_the_run_before_any_timing(planted, tmp_path, monkeypatch, capsys):
    def attend(q, pages, kv_lens, tables, cu_q_lens, num_seqs, *, implementation, **options):
        call = candidates_attend if implementation == "reference" else planted_call
        return call(q, pages, kv_lens, tables, cu_q_lens, num_seqs, implementation=implementation, **options)

    def planted_call(*arguments, implementation, tiles, num_kv_heads, **options):
        names = ("sliding_window", "logit_soft_cap", "sinks", "alibi_slopes")
        options |= dict.fromkeys(names) | {"tiles": tiles, "num_kv_heads": num_kv_heads}
        return planted(*arguments, **options)

    candidates_attend = candidates.ragged_paged_attention
    monkeypatch.setattr(candidates, "ragged_paged_attention", attend)
    assert run(tmp_path) == 1
    assert "error: xla, page 4, tiles default: differs from the reference by" in capsys.readouterr().err
    assert not (tmp_path / "out" / "trials.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--implementations", "triton"],
            "triton, batch 1, context 5, page 4: attention implementation 'triton' cannot",
        ),
        (["--implementations", "torch"], "torch is compared on a GPU only"),
        (["--implementations", "jax"], "runs on a GPU or TPU only"),
    ],
)
def test_what_cannot_run_here_is_refused_with_the_reason(arguments, sentence, tmp_path, capsys):
    assert run(tmp_path, *arguments) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--implementations", "cuda"], "'cuda' is none of mosaic_gpu, mosaic_tpu"),
        (["--batch", "0"], "'0' is not a whole number of 1 or more"),
        (["--tiles", "16"], "'16' is neither QxK, such as 16x64, nor default"),
        (["--heads", "8,3,64"], "'8,3,64' is not Hq,Hkv,D with Hq a multiple of Hkv"),
        (["--interpret"], "unrecognized arguments: --interpret"),
    ],
)
def test_mistakes_in_the_command_line_are_named(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_grid_tries_tiles_at_its_largest_point_only():
    cells = points(SETTINGS)
    tried = {(p.batch, p.context) for p in cells if p.tiles is not None}
    assert tried == {(3, 32)}
    assert len([p for p in cells if p.implementation == "contiguous"]) == 4
    assert all(p.page_size == p.context for p in cells if p.implementation == "contiguous")
    assert not any(refusal(p, SETTINGS) for p in cells)


def test_a_contiguous_batch_lies_in_order_and_a_paged_one_does_not():
    batch = make_batch(SETTINGS, [1] * 4, [60] * 4, 4, "xla", in_order=True)
    np.testing.assert_array_equal(batch.block_tables.ravel(), np.arange(1, 61))
    shuffled = make_batch(SETTINGS, [1] * 4, [60] * 4, 4, "xla")
    assert sorted(shuffled.block_tables.ravel()) == list(range(1, 61))
    assert (np.diff(shuffled.block_tables.ravel()) != 1).any()
    assert np.isfinite(shuffled.kv_pages).all()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_other_types_of_pages_are_checked_too(kv_dtype):
    settings = Settings(**{**vars(SETTINGS), "dtype": "bfloat16", "kv_dtype": kv_dtype})
    point = Point("xla", 1, 8, 4)
    assert candidates.check(point, settings, {}) is None
    itemsize = jnp.dtype(kv_dtype).itemsize
    assert bytes_per_call(point, settings) == 8 * 2 * (8 * itemsize + (4 if itemsize == 1 else 0)) + 2 * 2 * 8 * 2


def write_trial(directory: Path, name: str, seconds: float, flops: int = 0) -> None:
    setting = {"implementation": name, "kernel": None, "batch": 1, "context": 8, "page_size": None, "tiles": None}
    metrics = {"seconds_per_call": seconds, "calls": 1, "bytes_per_call": 6, "flops_per_call": flops}
    append(directory / "trials.jsonl", {"key": "", "setting": setting, "metrics": metrics})


def test_summaries_are_medians_and_quartile_distances(tmp_path):
    for seconds in (4.0, 1.0, 2.0, 3.0, 100.0):
        write_trial(tmp_path, "copy", seconds)
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('{"cut')
    attention, roofs = split(summarise(read_trials(tmp_path)))
    assert not attention
    assert (roofs["copy"].seconds, roofs["copy"].bytes_per_s) == (3.0, 2.0)
    assert roofs["copy"].spread == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match=r"no trials\.jsonl in"):
        read_trials(tmp_path / "nowhere")


def test_the_figure_needs_matplotlib_and_says_so(tmp_path, monkeypatch, capsys):
    for name in ("copy", "matmul", "xla"):
        write_trial(tmp_path, name, 1.0, flops=12)
    assert main(["--figure", str(tmp_path)]) == 0
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == ["roofline.pdf", "roofline.png"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--figure", str(tmp_path)]) == 0
    assert f"`python -m pallas_kernels.bench --figure {tmp_path}` draws it" in capsys.readouterr().out


def test_help_is_shown_without_jax():
    code = """
import sys
from pallas_kernels.bench.__main__ import main
try:
    main(["--help"])
finally:
    assert "jax" not in sys.modules
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "There is no --interpret" in shown
    assert "examples:" in shown


def test_a_run_of_named_tiles_alone_has_its_figure_too(tmp_path):
    arguments = ["--quick", "--repeats", "1", "--implementations", "xla", "--tiles", "16x32"]
    assert main([*arguments, "--output-dir", str(tmp_path)]) == 0
    assert (tmp_path / "figures" / "roofline.png").stat().st_size > 0


def test_pages_of_more_than_512_tokens_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--page-sizes", "16,1024"])
    assert "a page has 1 to 512 tokens, not 1024" in capsys.readouterr().err
