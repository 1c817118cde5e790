"""Measuring a machine and fitting it: on a machine that is itself computed, and, briefly, on this one."""

import random
from pathlib import Path

import pytest
from round_hardware import round_hardware, small_shape

from paged_jax.commands import UsageError
from paged_jax.commands.calibrate import Calibrate
from paged_jax.experiments.cross_check import COMPARED, Compared, cross_check, cross_check_table
from paged_jax.simulation import measure as measure_module
from paged_jax.simulation.cost_model import CostModel
from paged_jax.simulation.fit import fit, part_errors
from paged_jax.simulation.hardware import hardware_names, load_hardware
from paged_jax.simulation.hardware_file import hardware_text
from paged_jax.simulation.measure import (
    DECODE,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    MEASURED_STAGES,
    MIXED,
    PREFILL,
    Machine,
    Point,
    StepPredictor,
    hand_made_plan,
    measure,
    points,
)


class ComputedMachine:
    """Takes as long as the cost model says, but for some noise."""

    def __init__(self, hardware, noise: float = 0.0, shape=None) -> None:
        self.shape, self.dtype = shape or small_shape(), "float32"
        self.asked: list[Point] = []
        self._hardware, self._noise, self._draw = hardware, noise, random.Random(1)
        self._predictor = StepPredictor(self.shape, self.dtype)

    def seconds(self, point: Point) -> float:
        self.asked.append(point)
        disturbed = 10.0 if self._draw.random() < self._noise else 1.0
        return disturbed * self._predictor.of(point)(self._hardware)


TRUTH = load_hardware("this-cpu").model_copy(
    update={"attention_bandwidth_efficiency": 0.1, "gemm_bandwidth_efficiency": 0.3, "page_overhead_bytes": 700.0}
)
SHAPE = small_shape(hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, num_layers=30)


class TestPoints:
    def test_every_kind_of_step_fits_the_engine(self):
        chosen = points((16, 1, 128), 1600)
        assert len(set(chosen)) == len(chosen) < 80
        assert {p.part for p in chosen} == {DECODE, PREFILL, MIXED}
        assert {p.block_size for p in chosen} == {16, 1, 128}
        assert all(p.part == DECODE for p in chosen if p.block_size != 16)
        for point in chosen:
            assert len(point.contexts) + bool(point.chunk) <= MAX_NUM_SEQS
            assert 1 <= len(point.contexts) + point.chunk <= MAX_NUM_BATCHED_TOKENS
            assert max((*point.contexts, point.start + point.chunk)) <= 1600
        # few programs: a bucket takes seconds to compile
        assert {len(p.contexts) + p.chunk for p in chosen} == {1, 4, 16, 64, 256, 512}

    def test_a_short_model_has_fewer(self):
        chosen = points((16,), 127)
        assert chosen
        assert max(max((*p.contexts, p.start + p.chunk)) for p in chosen) <= 127

    def test_plans_by_hand(self):
        plan = hand_made_plan(Point(16, (1, 33), chunk=20, start=40), num_groups=2)
        assert [r.num_computed_tokens for r in plan.decodes] == [0, 32]
        (chunk,) = plan.chunks
        assert (chunk.start, chunk.num_tokens, plan.num_tokens) == (40, 20, 22)
        everyone = [*plan.decodes, chunk.request]
        assert list(plan.admitted) == everyone
        assert [r.slot for r in everyone] == [0, 1, 2]
        for group in range(2):
            ids = [b for r in everyone for b in r.block_tables[group].block_ids]
            assert len(set(ids)) == len(ids) == 3 * 4  # nobody shares, and each has room for the longest, 60 tokens
            assert min(ids) == 1


class TestMeasuring:
    def test_the_first_time_is_thrown_away_and_medians_count(self):
        machine = ComputedMachine(TRUTH, noise=0.2)
        chosen = points((16,), 1600)
        samples = measure(machine, chosen, repeats=9)
        assert len(machine.asked) == 10 * len(chosen)
        exact = [s.predict(TRUTH) for s in samples]
        wrong = [s.part for s, e in zip(samples, exact, strict=True) if s.seconds != pytest.approx(e)]
        assert len(wrong) <= 3  # of five disturbed repetitions in nine
        assert [s.shape for s in samples] == [p.shape for p in chosen]

    def test_compiling_is_not_measured(self):
        machine, compiled = ComputedMachine(TRUTH), set()
        exact = machine.seconds

        def seconds(point: Point) -> float:
            slow = point not in compiled
            compiled.add(point)
            return exact(point) * (100 if slow else 1)

        machine.seconds = seconds
        for sample in measure(machine, points((16,), 200), repeats=1):
            assert sample.seconds == pytest.approx(sample.predict(TRUTH))

    def test_rounds_are_in_orders_of_their_own(self):
        machine, chosen = ComputedMachine(TRUTH), points((16,), 200)
        measure(machine, chosen, repeats=1)
        first, second = machine.asked[: len(chosen)], machine.asked[len(chosen) :]
        assert set(first) == set(second) == set(chosen)
        assert first != second != chosen

    def test_predictions_are_of_the_bucket(self):
        slow = round_hardware(peak_flops={"float32": 1e6})
        found = StepPredictor(small_shape(), "float32").of(Point(16, (5,) * 10))(slow)
        plan = hand_made_plan(Point(16, (5,) * 10), 1)
        cost = CostModel(slow, small_shape(), block_size=16, dtype="float32", kv_dtype="float32")
        assert found == cost.seconds(plan, 16, 16) > cost.seconds(plan, 10, 10)

    def test_a_device_is_recovered(self):
        machine = ComputedMachine(TRUTH, shape=SHAPE)
        samples = measure(machine, points((16, 1, 128), 1600), repeats=1)
        found = fit(load_hardware("this-cpu"), samples, MEASURED_STAGES)
        assert all(e.held_out < 2 for e in part_errors(found, samples))
        assert found.attention_bandwidth_efficiency == pytest.approx(0.1, rel=0.05)
        assert found.gemm_bandwidth_efficiency == pytest.approx(0.3, rel=0.05)
        assert found.gemm_tiles[0].efficiency == pytest.approx(TRUTH.gemm_tiles[0].efficiency, rel=0.05)
        assert found.page_overhead_bytes == pytest.approx(700, rel=0.05)


class TestThisMachine:
    def test_steps_of_a_real_executor(self, monkeypatch):
        monkeypatch.setattr(measure_module, "_PROBE_ROWS", 256)
        machine = Machine("tiny-llama")
        assert (machine.platform, machine.dtype) == ("cpu", "float32")
        assert machine.longest == 511
        chosen = [Point(16, (20, 90, 300, 511) * 3), Point(16, (), 16, 30)]  # of one bucket
        samples = measure(machine, chosen, repeats=1)
        assert [s.part for s in samples] == [DECODE, PREFILL]
        assert all(1e-5 < s.seconds < 10 for s in samples)
        flops, bandwidth = machine.probe()
        assert 1e8 < flops < 1e15
        assert 1e7 < bandwidth < 1e14

    def test_both_executors_serve_the_same(self, monkeypatch):
        from paged_jax.experiments import cross_check as module

        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "token_buckets": (16,)}  # one program to compile
        monkeypatch.setattr(module, "ENGINE", {**sizes, "max_model_len": 256, "num_blocks": 64})
        monkeypatch.setitem(module.WORKLOAD, "num_requests", 3)
        monkeypatch.setitem(module.WORKLOAD, "prompt", {"mean": 10, "sigma": 0.5, "max": 20})
        monkeypatch.setitem(module.WORKLOAD, "output", {"mean": 5, "sigma": 0.5, "max": 10})
        runs = []
        rows = cross_check("tiny-llama", "this-cpu", repeats=2, on_run=lambda: runs.append(1))
        assert len(runs) == 2
        assert tuple(row.metric for row in rows) == COMPARED
        assert all(row.real > 0 and row.simulated > 0 for row in rows)


def test_the_difference_is_of_the_real_run():
    rows = [Compared("output_tokens_per_s", 200.0, 230.0), Compared("ttft_s_mean", 0.5, 0.4)]
    assert [row.difference for row in rows] == pytest.approx([0.15, -0.2])
    text = cross_check_table(rows)
    assert "+15.0" in text
    assert "-20.0" in text
    assert "500" in text  # milliseconds


@pytest.mark.parametrize("name", hardware_names())
def test_written_devices_are_read_again(tmp_path, name):
    device = load_hardware(name)
    path = tmp_path / "mine.yaml"
    path.write_text(hardware_text(device, ("one", "two")))
    assert path.read_text().startswith("# one\n# two\nname: ")
    again = load_hardware(str(path))
    assert again == device


class TestCommand:
    def test_profiles(self, tmp_path, capsys):
        write_profiles(tmp_path / "mlp.csv", tmp_path / "attention.csv")
        output = tmp_path / "mine.yaml"
        Calibrate(profiles=str(tmp_path), output=str(output))()
        printed = capsys.readouterr().out
        assert "gemm_tiles.1.efficiency" in printed
        assert "shapes held out" in printed
        assert f"wrote {output}" in printed
        found = load_hardware(str(output))
        assert found.name == "mine"
        assert "held-out shapes" in output.read_text()
        # the profiles are computed with these constants
        assert found.elementwise_bandwidth_efficiency == pytest.approx(0.4, rel=0.02)
        assert found.attention_decode_s == pytest.approx(3e-5, rel=0.05)
        assert found.attention_saturation_tokens == pytest.approx(300, rel=0.1)

    def test_a_base_of_another_kind(self, tmp_path):
        with pytest.raises(ValueError, match="this machine's device is a CPU, and --base h200 is a GPU"):
            Calibrate(model="tiny-llama", base="h200", output=str(tmp_path / "x.yaml"))()

    def test_what_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match="--repeats must be 1 or more"):
            Calibrate(repeats=0)()
        with pytest.raises(UsageError, match="--block-sizes must be 1 or more"):
            Calibrate(block_sizes=())()
        with pytest.raises(UsageError, match=r"--output must end in .yaml"):
            Calibrate(output="here")()
        with pytest.raises(UsageError, match="--cross-check compares with this machine"):
            Calibrate(profiles=str(tmp_path), cross_check=True)()
        with pytest.raises(ValueError, match="no hardware 'h20'"):
            Calibrate(base="h20", output=str(tmp_path / "x.yaml"))()
        assert not list(tmp_path.iterdir())


def write_profiles(mlp: Path, attention: Path) -> None:
    """Files of the cost model's own times."""
    import pandas as pd

    from paged_jax.simulation import profiles

    truth = load_hardware("a100-80gb").model_copy(
        update={
            "elementwise_bandwidth_efficiency": 0.4,
            "attention_decode_s": 3e-5,
            "attention_saturation_tokens": 300.0,
        }
    )
    common = {"n_head": 32, "n_kv_head": 8, "n_embd": 4096, "n_expanded_embd": 14336, "use_gated_mlp": True}
    parts = (*profiles.PRODUCTS, *profiles.ELEMENTWISE)
    rows = [
        {**common, "num_tokens": tokens, "num_tensor_parallel_workers": tp, **_times(parts, 1.0)}
        for tokens in (1, 8, 40, 100, 300, 1000, 3000, 9000)
        for tp in (1, 2, 4)
    ]
    pd.DataFrame(rows).to_csv(mlp, index=False)
    shape = {"n_embd": 4096, "n_q_head": 32, "n_kv_head": 8, "block_size": 16, "num_tensor_parallel_workers": 1}
    rows = [
        {**shape, "batch_size": batch, "prefill_chunk_size": 0, "kv_cache_size": cached, "is_prefill": False}
        for batch in (1, 8, 64)
        for cached in (16, 500, 2000, 4000)
    ] + [
        {**shape, "batch_size": 1, "prefill_chunk_size": chunk, "kv_cache_size": cached, "is_prefill": True}
        for chunk in (64, 300, 1000, 3000)
        for cached in (0, 500, 2000)
    ]
    rows = [{**row, **_times((profiles.DECODE, profiles.PREFILL), 1.0)} for row in rows]
    pd.DataFrame(rows).to_csv(attention, index=False)
    # now the true times, by what the reader says is asked for
    for path in (mlp, attention):
        table = pd.read_csv(path)
        reader = profiles._mlp_samples if path == mlp else profiles._attention_samples
        for index in range(len(table)):
            one = path.with_name("one.csv")
            table.iloc[[index]].to_csv(one, index=False)
            for sample in reader(one):
                table.loc[index, f"time_stats.{sample.part}.median"] = 1e3 * sample.predict(truth)
            one.unlink()
        table.to_csv(path, index=False)


def _times(parts: tuple[str, ...], value: float) -> dict[str, float]:
    return {f"time_stats.{part}.median": value for part in parts}
