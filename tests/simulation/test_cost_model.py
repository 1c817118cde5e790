"""Step costs against ones worked out by hand on a device with round figures, and what must never be cheaper."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_hardware import round_hardware, small_shape

from paged_jax.catalog.entries import entries
from paged_jax.execution.plan import Fork, ScheduledRequest, SchedulerOutput, Swap
from paged_jax.simulation.cost_model import CostModel, StepCost
from paged_jax.simulation.hardware import GemmTile, load_hardware
from paged_jax.simulation.layer_shapes import distinct_experts
from paged_jax.simulation.model_shape import ModelShape
from paged_jax.simulation.roofline import overlapped
from paged_jax.simulation.shapes import find_shape


def decoding(*computed: int, idle: tuple[int, ...] = ()) -> SchedulerOutput:
    """Decodes, and rows that have ended, of requests with so many computed tokens."""
    decodes = [SimpleNamespace(num_computed_tokens=c) for c in computed]
    ended = [SimpleNamespace(num_computed_tokens=c) for c in idle]
    return SchedulerOutput(decodes=decodes, idle=ended, num_tokens=len(decodes) + len(ended))


def prompts(*chunks: tuple[int, int]) -> SchedulerOutput:
    """Chunks (start, tokens) of prompts."""
    return SchedulerOutput(
        chunks=[ScheduledRequest(SimpleNamespace(), start, count, True) for start, count in chunks],
        num_tokens=sum(count for _, count in chunks),
    )


def model(hardware=None, shape=None, **settings) -> CostModel:
    values = {"block_size": 16, "dtype": "float32", "kv_dtype": "float32", **settings}
    return CostModel(hardware or round_hardware(), shape or small_shape(), **values)


def cost(plan: SchedulerOutput, hardware=None, shape=None, rows: int = 0, tokens: int | None = None, **kw) -> StepCost:
    return model(hardware, shape, **kw).step(plan, plan.num_tokens if tokens is None else tokens, rows)


NOTHING = SchedulerOutput()


class TestProducts:
    def test_a_layer_that_waits_for_its_weights(self):
        # per layer: 32 x (4 + 2 + 2) * 8, 32 x 32, 32 x 2 * 64, 64 x 32; one token in and out of each
        weights = 32 * 64 + 32 * 32 + 32 * 128 + 64 * 32
        activations = (32 + 64) + (32 + 32) + (32 + 128) + (64 + 32)
        expected = 2 * 4 * (weights + activations) / 1e9
        assert cost(decoding(0)).gemm == pytest.approx(expected)

    def test_a_layer_that_computes(self):
        slow = round_hardware(peak_flops={"float32": 1e6})
        assert cost(decoding(0), slow).gemm == pytest.approx(2 * 2 * (32 * 64 + 32 * 32 + 32 * 128 + 64 * 32) / 1e6)

    def test_a_bucket_is_computed_whole(self):
        slow = round_hardware(peak_flops={"float32": 1e6})
        assert cost(decoding(0), slow, tokens=16).gemm == pytest.approx(16 * cost(decoding(0), slow).gemm)

    def test_tiles_come_in_waves(self):
        # 130 x 64 needs 2 x 1 tiles of 128 x 128: one wave of two cores; 257 rows need two
        tiled = round_hardware(
            num_cores=2, peak_flops={"float32": 1e6}, gemm_tiles=(GemmTile(rows=128, columns=128, efficiency=0.5),)
        )
        one = small_shape(num_layers=1, intermediate_size=1, num_kv_heads=4, gated_mlp=False)
        wave = 2 * 128 * 128 / 0.5 * 2 / 1e6  # of each inner element
        # columns 96, 32, 1 and 32 are one tile each; inner 32, 32, 32 and 1
        assert cost(prompts((0, 130)), tiled, one).gemm == pytest.approx((32 + 32 + 32 + 1) * wave)
        assert cost(prompts((0, 257)), tiled, one).gemm == pytest.approx((32 + 32 + 32 + 1) * 2 * wave)

    def test_the_quickest_tile_is_taken(self):
        both = (GemmTile(rows=128, columns=128, efficiency=1.0), GemmTile(rows=8, columns=8, efficiency=0.5))
        slow = round_hardware(peak_flops={"float32": 1e6}, gemm_tiles=both)
        only = round_hardware(peak_flops={"float32": 1e6}, gemm_tiles=both[1:])
        assert cost(decoding(0), slow).gemm == cost(decoding(0), only).gemm

    def test_efficiencies_divide_the_peaks(self):
        for changes in ({"gemm_bandwidth_efficiency": 0.5}, {"memory_bandwidth": 5e8}):
            assert cost(decoding(0), round_hardware(**changes)).gemm == pytest.approx(2 * cost(decoding(0)).gemm)

    def test_computing_hides_behind_reading_as_the_device_says(self):
        compute = cost(decoding(0), round_hardware(peak_flops={"float32": 1e6}, memory_bandwidth=1e30)).gemm
        memory = cost(decoding(0)).gemm
        added = cost(decoding(0), round_hardware(peak_flops={"float32": 1e6}, overlap=1.0)).gemm
        assert added == pytest.approx(compute + memory)

    def test_partly_hidden(self):
        assert overlapped(3.0, 4.0, overlap=2.0) == overlapped(4.0, 3.0, overlap=2.0) == pytest.approx(5.0)
        assert overlapped(3e-7, 4e-7, overlap=2.0) == pytest.approx(5e-7)
        assert overlapped(3.0, 4.0, overlap=float("inf")) == 4.0
        assert overlapped(0.0, 0.0, overlap=2.0) == 0.0

    def test_each_kernel_has_a_fixed_time(self):
        assert cost(decoding(0), round_hardware(kernel_s=1.0)).gemm == pytest.approx(2 * 4, rel=1e-3)

    def test_half_the_bytes_of_half_the_width(self):
        assert cost(decoding(0), dtype="float16").gemm == pytest.approx(cost(decoding(0)).gemm / 2)


class TestExperts:
    SHAPE = small_shape(num_layers=1, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)

    def test_expected_number_of_experts_that_are_visited(self):
        # two of eight each: 8 (1 - (6/8)^T)
        assert distinct_experts(self.SHAPE, 1) == pytest.approx(2)
        assert distinct_experts(self.SHAPE, 2) == pytest.approx(3.5)
        assert distinct_experts(self.SHAPE, 10_000) == pytest.approx(8)

    def test_only_visited_experts_are_read(self):
        attention = 32 * 64 + 32 * 32 + (32 + 64) + (32 + 32)
        router = 32 * 8 + 32 + 8
        experts = 2 * (32 * 32 + 16 * 32 + (32 + 32) + (16 + 32))
        assert cost(decoding(0), shape=self.SHAPE).gemm == pytest.approx(4 * (attention + router + experts) / 1e9)

    def test_shared_experts_and_dense_layers(self):
        shape = small_shape(
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, num_shared_experts=1, num_dense_layers=1
        )
        attention = 32 * 64 + 32 * 32 + (32 + 64) + (32 + 32)
        dense = 32 * 128 + 64 * 32 + (32 + 128) + (64 + 32)
        expert = 32 * 32 + 16 * 32 + (32 + 32) + (16 + 32)
        router = 32 * 8 + 32 + 8
        expected = 4 * (2 * attention + dense + router + 3 * expert) / 1e9
        assert cost(decoding(0), shape=shape).gemm == pytest.approx(expected)


class TestAttention:
    def test_decodes_read_whole_pages(self):
        # 17 tokens are two pages of 16, 16 tokens one: 3 x 16 tokens of 2 x 2 heads x 8 numbers in each of two layers
        assert cost(decoding(16, 15)).attention == pytest.approx(2 * 3 * 16 * 2 * 2 * 8 * 4 / 1e9)

    def test_rows_that_have_ended_compute_their_last_token_again(self):
        assert cost(decoding(16, idle=(16,))).attention == cost(decoding(16, 15)).attention
        assert cost(decoding(16, idle=(17,))).attention == cost(decoding(16, 16)).attention

    def test_a_page_costs_more_than_its_bytes(self):
        slow = round_hardware(page_overhead_bytes=1000.0)
        per_head = cost(decoding(31), slow).attention - cost(decoding(31)).attention
        assert per_head == pytest.approx(2 * 2 * 2 * 1000 / 1e9)  # layers, KV heads, pages
        whole = round_hardware(kind="tpu", page_overhead_bytes=1000.0)
        assert cost(decoding(31), whole).attention - cost(decoding(31)).attention == pytest.approx(2 * 2 * 1000 / 1e9)

    def test_contiguous_memory_has_no_pages_to_look_up(self):
        slow = round_hardware(page_overhead_bytes=1000.0)
        assert cost(decoding(31), slow, contiguous=True).attention == cost(decoding(31)).attention

    def test_a_large_page_is_copied_by_tiles(self):
        tiled = round_hardware(attention_tile_tokens=64, page_overhead_bytes=1000.0)
        assert cost(decoding(99), tiled, block_size=512).attention == cost(decoding(99), tiled, block_size=64).attention

    def test_decodes_compute_whole_tiles(self):
        slow = round_hardware(attention_tile_tokens=64, peak_flops={"float32": 1e6}, memory_bandwidth=1e30)
        # 65 tokens are two tiles: 4 FLOPs for each of 4 heads of 8
        assert cost(decoding(64), slow).attention == pytest.approx(2 * 128 * 4 * 4 * 8 / 1e6)

    def test_prompts_compute_the_pairs_that_they_see(self):
        slow = round_hardware(peak_flops={"float32": 1e6}, memory_bandwidth=1e30)
        pairs = (10 + 1) + (10 + 2) + (10 + 3)
        assert cost(prompts((10, 3)), slow).attention == pytest.approx(2 * pairs * 4 * 4 * 8 / 1e6)

    def test_a_kernel_computes_its_share_of_what_is_masked(self):
        def pairs(start: int, count: int, share: float, shape=None) -> float:
            slow = round_hardware(peak_flops={"float32": 1e6}, memory_bandwidth=1e30, attention_masked_share=share)
            return cost(prompts((start, count)), slow, shape).attention * 1e6 / (2 * 4 * 4 * 8)

        assert pairs(10, 3, 1.0) == pytest.approx(3 * 13)  # the rectangle
        assert pairs(10, 3, 0.5) == pytest.approx(11 + 12 + 13 + 3 / 2)
        assert pairs(10, 1, 1.0) == pytest.approx(11)
        # a window of 20: above the diagonal as far as below it, 19 keys, and none beyond the chunk
        windowed = small_shape(sliding_window=20)
        for start, count in ((0, 5), (0, 50), (15, 10), (30, 40)):
            seen = sum(min(position + 1, 20) for position in range(start, start + count))
            masked = sum(1 for query in range(count) for key in range(query + 1, count) if key - query < 20)
            assert pairs(start, count, 1.0, windowed) == pytest.approx(seen + masked), (start, count)

    def test_prompts_that_see_little_compute_slowly(self):
        slow = round_hardware(peak_flops={"float32": 1e6}, memory_bandwidth=1e30, attention_saturation_tokens=12.0)
        # 12 keys seen on average: half the speed
        other = round_hardware(peak_flops={"float32": 1e6}, memory_bandwidth=1e30, attention_flops_efficiency=0.5)
        assert cost(prompts((10, 3)), slow).attention == pytest.approx(cost(prompts((10, 3)), other).attention)

    def test_a_window_bounds_what_is_read_and_computed(self):
        windowed = small_shape(sliding_window=20)
        # a query at position 99 sees 80..99: pages 5 and 6 of 16 tokens
        assert cost(decoding(99), shape=windowed).attention == pytest.approx(2 * 2 * 16 * 2 * 2 * 8 * 4 / 1e9)
        slow = round_hardware(peak_flops={"float32": 1e6}, memory_bandwidth=1e30, attention_tile_tokens=10)
        assert cost(decoding(99), slow, windowed).attention == pytest.approx(2 * 20 * 4 * 4 * 8 / 1e6)
        for start, count in ((0, 5), (0, 50), (15, 10), (30, 4)):
            pairs = sum(min(position + 1, 20) for position in range(start, start + count))
            found = cost(prompts((start, count)), slow, windowed).attention
            assert found == pytest.approx(2 * pairs * 4 * 4 * 8 / 1e6), (start, count)

    def test_layers_of_two_kinds(self):
        mixed = small_shape(sliding_window=20, layer_types=("full_attention", "sliding_attention"))
        both = cost(decoding(99), shape=mixed).attention
        halves = cost(decoding(99), shape=small_shape(sliding_window=20)).attention + cost(decoding(99)).attention
        assert both == pytest.approx(halves / 2)

    def test_fixed_times_of_a_layer(self):
        fixed = round_hardware(attention_decode_s=1.0, attention_chunk_s=10.0)
        assert cost(decoding(0), fixed).attention == pytest.approx(2, rel=1e-3)
        assert cost(prompts((0, 1)), fixed).attention == pytest.approx(20, rel=1e-3)
        both = prompts((0, 1))._replace(decodes=decoding(0).decodes)
        assert cost(both, fixed).attention == pytest.approx(22, rel=1e-3)
        assert cost(NOTHING, fixed).attention == 0

    def test_a_kernel_of_whole_arrays_runs_all_rows_to_the_longest(self):
        longest = round_hardware(attention_longest=True)
        assert cost(decoding(99, 3), longest, rows=4).attention == cost(decoding(99, 99, 99, 99)).attention

    def test_latents_are_read_once_for_all_heads(self):
        latent = small_shape(
            head_dim=12, num_kv_heads=4, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8
        )
        assert cost(decoding(16), shape=latent).attention == pytest.approx(2 * 32 * (16 + 4) * 4 / 1e9)
        slow = round_hardware(peak_flops={"float32": 1e6}, memory_bandwidth=1e30, attention_tile_tokens=1)
        # absorbed: each of 4 heads, 20 numbers of the latent and its key to score, 16 to add up
        assert cost(decoding(16), slow, latent).attention == pytest.approx(2 * 17 * 2 * 4 * (20 + 16) / 1e6)
        # a second chunk makes keys (8) and values (8) of the 5 latents before it, then sees 6 and 7 tokens
        expand, attend = 5 * 2 * 4 * 16 * (8 + 8), (6 + 7) * 2 * 4 * (12 + 8)
        assert cost(prompts((5, 2)), slow, latent).attention == pytest.approx(2 * (expand + attend) / 1e6)
        two = cost(decoding(16), shape=latent, tensor_parallel_size=2)
        assert two.attention == cost(decoding(16), shape=latent).attention

    def test_half_the_bytes_of_float16_pages(self):
        assert cost(decoding(16), kv_dtype="float16").attention == cost(decoding(16)).attention / 2


class TestTheRest:
    def test_elementwise(self):
        # norms 2 x 5 x 32; rotation 2 x (32 + 16) + 2 x 16; activation 3 x 64; in both layers, and the embedding 2 x 32
        numbers = 2 * (10 * 32 + 2 * 48 + 32 + 3 * 64) + 64
        assert cost(decoding(0, 0)).elementwise == pytest.approx(2 * 4 * numbers / 1e9)
        assert cost(decoding(0), round_hardware(kernel_s=1.0)).elementwise == pytest.approx(2 * 4, rel=1e-3)

    def test_logits_of_the_rows_that_sample(self):
        assert cost(NOTHING, rows=3).logits == pytest.approx(4 * (32 * 100 + 3 * 32 + 3 * 100) / 1e9)
        slow = round_hardware(peak_flops={"float32": 1e6})
        assert cost(NOTHING, slow, rows=3).logits == pytest.approx(2 * 3 * 32 * 100 / 1e6)

    def test_sampling_goes_over_float32_logits(self):
        assert cost(NOTHING, rows=3).sampling == pytest.approx(6 * 3 * 100 * 4 / 1e9)

    def test_compiled_steps_are_launched_once(self):
        fixed = round_hardware(step_launch_s=2.0, kernel_launch_s=1e3, host_step_s=3.0, host_request_s=0.5)
        step = cost(decoding(0, 0, idle=(0,)), fixed)
        assert (step.launch, step.host) == (2.0, 3.0 + 3 * 0.5)
        assert cost(prompts((0, 7), (0, 2)), fixed).host == 3.0 + 2 * 0.5

    def test_eager_launches_run_ahead_of_the_device(self):
        fixed = round_hardware(kernel_launch_s=1.0, eager_host_step_s=3.0, eager_host_request_s=0.5)
        step = cost(decoding(0), fixed, eager=True)
        assert step.host == 3.5
        kernels = 2 * 9 + 10
        assert step.total - step.host - step.block_tables == pytest.approx(kernels)
        busy = round_hardware(kernel_launch_s=1.0, attention_decode_s=20.0)
        assert cost(decoding(0), busy, eager=True).launch == 0

    def test_block_tables_travel_each_step(self):
        link = round_hardware(host_link_latency_s=5.0)
        assert cost(decoding(16), link).block_tables == pytest.approx(5 + 2 * 4 / 1e6)
        assert cost(prompts((10, 30)), link).block_tables == pytest.approx(5 + 3 * 4 / 1e6)
        assert cost(decoding(16), link, contiguous=True).block_tables == 0

    def test_copies_read_and_write_all_layers(self):
        plan = SchedulerOutput(copies=(((1, 2), (3, 4), (5, 6)),))
        assert cost(plan).copies == pytest.approx(2 * 3 * 2 * 16 * 2 * 2 * 8 * 4 / 1e9)

    def test_swaps_move_keys_and_values_of_each_layer_by_themselves(self):
        out = Swap(SimpleNamespace(), ((1, 2, 3),), ((4, 5, 6),))
        back = Swap(SimpleNamespace(), ((7,),), ((8,),))
        plan = SchedulerOutput(swap_outs=[out], swap_ins=[back])
        assert cost(plan).swaps == pytest.approx(4 * 2 * 16 * 2 * 2 * 8 * 4 / 1e6)
        slow = cost(plan, round_hardware(host_link_latency_s=1.0))
        assert slow.swaps - cost(plan).swaps == pytest.approx(4 * 2 * 2)

    def test_forks_cost_their_rows_only(self):
        plan = prompts((0, 4))
        forked = plan._replace(forks=[Fork(SimpleNamespace(), SimpleNamespace())])
        assert cost(forked, rows=2) == cost(plan, rows=2)

    def test_seconds_is_the_sum_of_the_parts(self):
        fixed = round_hardware(kernel_s=1e-3, step_launch_s=1e-3, host_step_s=1e-3)
        plan = prompts((10, 30))._replace(decodes=decoding(5, 6).decodes)
        step = model(fixed).step(plan, 64, 4)
        assert model(fixed).seconds(plan, 64, 4) == step.total == pytest.approx(math.fsum(step))


class TestTensorParallelism:
    def test_each_device_has_its_share(self):
        one, two = cost(decoding(99), rows=1), cost(decoding(99), rows=1, tensor_parallel_size=2)
        weights = 32 * 64 + 32 * 32 + 32 * 128 + 64 * 32
        activations = (32 + 32) + (16 + 32) + (32 + 64) + (32 + 32)
        assert two.gemm == pytest.approx(2 * 4 * (weights / 2 + activations) / 1e9)
        assert two.attention == one.attention / 2

    @pytest.mark.parametrize("name", [entry.name for entry in entries()])
    def test_one_device_holds_the_model(self, name):
        shape = find_shape(name)
        found = model(round_hardware(), shape, dtype="float16").weight_bytes()
        assert found == shape.num_parameters * 2

    @pytest.mark.parametrize(
        "changes",
        [
            {"qkv_bias": True, "qk_norm": True},
            {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "tie_word_embeddings": True},
            {"mlp_bias": True, "gated_mlp": False, "learned_positions": True},
            {"mlp_bias": True, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            | {"num_shared_experts": 2, "num_dense_layers": 1, "router_bias": True},
            {"head_dim": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
        ],
    )
    def test_one_device_holds_every_bias_and_norm(self, changes):
        shape = small_shape(**changes)
        assert model(shape=shape).weight_bytes() == shape.num_parameters * 4

    def test_each_device_holds_its_share_of_the_weights(self):
        layer = 32 * 32 + 16 * 32 + 32 * 64 + 32 * 32 + 2 * 32  # half of each matrix, both norms whole
        assert model(tensor_parallel_size=2).weight_bytes() == 4 * (2 * layer + 2 * 50 * 32 + 32)
        # four devices have a query head each, and a KV head each as well, of two
        layer = 32 * 24 + 8 * 32 + 32 * 32 + 16 * 32 + 2 * 32
        assert model(tensor_parallel_size=4).weight_bytes() == 4 * (2 * layer + 2 * 25 * 32 + 32)
        # biases of queries, keys, values and of up-projections are divided, those after a sum of all devices are not
        biased = small_shape(attention_bias=True, mlp_bias=True, learned_positions=True, tie_word_embeddings=True)
        layer += 24 + 32 + 32 + 32
        assert model(shape=biased, tensor_parallel_size=4).weight_bytes() == 4 * (2 * layer + 25 * 32 + 4098 * 32 + 32)
        experts = small_shape(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            num_shared_experts=1,
            num_dense_layers=1,
            router_bias=True,
            mlp_bias=True,
        )
        attention, dense = 32 * 32 + 16 * 32 + 2 * 32, 32 * 64 + 32 * 32 + 64 + 32
        router, expert = 4 * 32 + 4, 32 * 16 + 8 * 32 + 16 + 32
        numbers = 2 * attention + dense + router + 5 * expert + 2 * 50 * 32 + 32
        assert model(shape=experts, tensor_parallel_size=2).weight_bytes() == 4 * numbers

    def test_what_belongs_to_no_head_or_expert_is_whole_on_every_device(self):
        # DeepSeek-V2 on eight devices, 16 heads each: projections to the latents, out of them, and the output's
        attention = 5120 * 1536 + 1536 * 16 * 192 + 5120 * (512 + 64) + 512 * 16 * (128 + 128) + 16 * 128 * 5120
        norms = 2 * 5120 + 1536 + 512
        dense, expert, router = 3 * 5120 * 12288 // 8, 3 * 5120 * 1536 // 8, 160 * 5120
        layers = 60 * (attention + norms) + dense + 59 * (router + 162 * expert)
        numbers = layers + 2 * 102400 // 8 * 5120 + 5120
        found = model(load_hardware("h200"), find_shape("deepseek-v2"), dtype="bfloat16", tensor_parallel_size=8)
        assert found.weight_bytes() == 2 * numbers
        assert found.weight_bytes() / 1e9 == pytest.approx(60.16, abs=0.005)

    def test_each_device_moves_its_share_of_a_page(self):
        plan = SchedulerOutput(copies=(((1, 2),),), swap_outs=[Swap(SimpleNamespace(), ((1, 2, 3),), ((4, 5, 6),))])
        one, two, four = (cost(plan, tensor_parallel_size=tp) for tp in (1, 2, 4))
        assert (two.copies, two.swaps) == (one.copies / 2, one.swaps / 2) == (four.copies, four.swaps)
        latent = small_shape(
            head_dim=12, num_kv_heads=4, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8
        )
        whole = cost(plan, shape=latent, tensor_parallel_size=4)
        assert whole.copies == pytest.approx(2 * 2 * 16 * 20 * 4 / 1e9)
        assert whole.swaps == pytest.approx(3 * 2 * 16 * 20 * 4 / 1e6)
        # a latent is one piece, not a key and a value
        slow = cost(plan, round_hardware(host_link_latency_s=1.0), latent)
        assert slow.swaps - whole.swaps == pytest.approx(3 * 2)

    def test_a_kv_head_is_not_divided(self):
        four = cost(decoding(99), tensor_parallel_size=4)
        assert four.attention == cost(decoding(99), tensor_parallel_size=2).attention

    def test_two_ring_all_reduces_a_layer_and_the_logits(self):
        slow = round_hardware(link_latency_s=1.0)
        four = cost(decoding(0, 0), slow, rows=2, tensor_parallel_size=4).collectives
        reduce = 2 * 3 * (2 * 32 * 4 / 4 / 1e6 + 1.0)
        gather = 3 * (2 * 100 * 4 / 4 / 1e6 + 1.0)
        assert four == pytest.approx(2 * 2 * reduce + gather)
        assert cost(decoding(0, 0), slow, rows=2).collectives == 0

    def test_what_is_refused(self):
        for field in ("link_bandwidth", "link_latency_s", "link_devices"):
            with pytest.raises(
                ValueError, match=f"'round' has no {field}: set what is missing, or leave tensor_parallel_size"
            ):
                model(round_hardware(**{field: None}), tensor_parallel_size=2)
            model(round_hardware(**{field: None}))
        eight = small_shape(num_heads=8)
        model(round_hardware(link_devices=8), eight, tensor_parallel_size=8)
        with pytest.raises(
            ValueError, match=r"'round' join 4 devices at most \(link_devices\): tensor_parallel_size \(8\)"
        ):
            model(shape=eight, tensor_parallel_size=8)
        with pytest.raises(
            ValueError, match="'this-cpu' has no link_bandwidth and no link_latency_s and no link_devices"
        ):
            model(load_hardware("this-cpu"), tensor_parallel_size=2)
        with pytest.raises(ValueError, match="does not divide the model's 4 attention heads"):
            model(tensor_parallel_size=3)
        with pytest.raises(ValueError, match="no peak_flops for dtype 'bfloat16'"):
            model(dtype="bfloat16")


class TestNeverCheaper:
    """More work on real devices."""

    OPT = ModelShape(50272, 5120, 20480, 40, 40, 40, 128, 2048, gated_mlp=False)
    DEVICES = ("a100-40gb", "tpu-v5e", "this-cpu")

    def _model(self, device: str, block_size: int = 16, **settings) -> CostModel:
        hardware = load_hardware(device)
        return model(hardware, self.OPT, block_size=block_size, **settings)

    @settings(max_examples=40, deadline=None)
    @given(
        st.sampled_from(DEVICES),
        st.lists(st.integers(1, 2000), min_size=1, max_size=20),
        st.integers(0, 19),
        st.integers(1, 300),
    )
    def test_longer_contexts(self, device, contexts, which, more):
        longer = list(contexts)
        longer[which % len(longer)] += more
        seconds = [self._model(device).seconds(decoding(*c), 32, 32) for c in (contexts, longer)]
        assert seconds[0] <= seconds[1]

    @settings(max_examples=40, deadline=None)
    @given(st.sampled_from(DEVICES), st.lists(st.integers(1, 2000), min_size=1, max_size=20), st.integers(1, 2000))
    def test_one_more_request(self, device, contexts, another):
        seconds = [self._model(device).seconds(decoding(*c), 32, 32) for c in (contexts, [*contexts, another])]
        assert seconds[0] < seconds[1]

    @settings(max_examples=40, deadline=None)
    @given(st.sampled_from(DEVICES), st.integers(0, 1500), st.integers(1, 500), st.integers(0, 100))
    def test_a_longer_or_later_chunk(self, device, start, count, more):
        base = self._model(device).seconds(prompts((start, count)), 1024, 4)
        assert base <= self._model(device).seconds(prompts((start, count + more)), 1024, 4)
        assert base <= self._model(device).seconds(prompts((start + more, count)), 1024, 4)

    @settings(max_examples=40, deadline=None)
    @given(st.sampled_from(DEVICES), st.integers(1, 4000), st.integers(1, 4000))
    def test_a_larger_bucket(self, device, one, other):
        small, large = sorted((one, other))
        plan = decoding(5)
        assert self._model(device).seconds(plan, small, 4) <= self._model(device).seconds(plan, large, 4)
        assert self._model(device).seconds(plan, 4, small) <= self._model(device).seconds(plan, 4, large)

    @settings(max_examples=40, deadline=None)
    @given(st.sampled_from(DEVICES), st.integers(1, 2000), st.integers(0, 7))
    def test_smaller_pages_cost_more_to_swap_and_to_read(self, device, num_tokens, power):
        # whole pages of both sizes
        small, large = 2**power, 2 ** (power + 1)
        num_tokens = -(-num_tokens // large) * large

        def swapped(block_size: int) -> float:
            ids = tuple(range(1, num_tokens // block_size + 1))
            plan = SchedulerOutput(swap_outs=[Swap(SimpleNamespace(), (ids,), (ids,))])
            return self._model(device, block_size).step(plan, 0, 0).swaps

        assert swapped(small) >= swapped(large)
        assert swapped(small) > swapped(large) or load_hardware(device).host_link_latency_s == 0
        reads = [self._model(device, b).step(decoding(num_tokens - 1), 1, 1).attention for b in (small, large)]
        assert reads[0] >= reads[1]

    @settings(max_examples=20, deadline=None)
    @given(st.integers(1, 100), st.integers(1, 100))
    def test_more_copies(self, few, more):
        plans = [SchedulerOutput(copies=(tuple((1, 2) for _ in range(n)),)) for n in (few, few + more)]
        assert self._model("a100-40gb").seconds(plans[0], 0, 0) < self._model("a100-40gb").seconds(plans[1], 0, 0)

    @pytest.mark.parametrize("tp", [2, 4, 8])
    def test_more_devices_shorten_products_and_attention(self, tp):
        one, more = (self._model("a100-40gb", tensor_parallel_size=n) for n in (1, tp))
        plan = decoding(*range(500, 516))
        for part in ("gemm", "attention", "logits"):
            assert getattr(more.step(plan, 16, 16), part) < getattr(one.step(plan, 16, 16), part)
            assert getattr(more.step(plan, 16, 16), part) > getattr(one.step(plan, 16, 16), part) / tp


def test_the_paged_kernel_is_slower_as_published():
    """Kwon et al., 2023, figure 18a: 20 to 26 % at block size 16, OPT-13B on an A100."""
    shape = TestNeverCheaper.OPT
    plan = decoding(*[2047] * 64)
    paged, contiguous = (
        cost(plan, load_hardware("a100-40gb"), shape, dtype="float16", kv_dtype="float16", contiguous=c).attention
        for c in (False, True)
    )
    assert 1.20 <= paged / contiguous <= 1.26


def test_no_jax():
    """Simulating needs none."""
    code = (
        "import sys; from paged_jax.simulation import cost_model, hardware, fit, profiles, measure; "
        "hardware.load_hardware('h200'); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
