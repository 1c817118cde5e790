"""srpt takes places of requests that run only where that admits the one that waits."""

from host_executor import drain, host_engine, tokens_alone

from paged_jax.sampling.params import SamplingParams


def asking(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def test_who_cannot_be_admitted_for_the_budget_displaces_nobody() -> None:
    engine = host_engine(
        scheduling_policy="srpt",
        length_predictor="oracle",
        enable_chunked_prefill=False,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
    )
    long = [engine.add_request(f"long-{i}", range(i, i + 4), asking(40), expected_output_len=40) for i in range(4)]
    engine.step()
    for i in range(2):
        engine.add_request(f"short-{i}", range(50 * i, 50 * i + 40), asking(2), expected_output_len=2)
    engine.step()
    assert [request.metrics.num_preemptions for request in long] == [0] * 4
    drain(engine)


def test_who_would_not_fit_in_what_all_others_hold_displaces_nobody() -> None:
    engine = host_engine(scheduling_policy="srpt", length_predictor="oracle", num_blocks=20, max_num_seqs=6)
    short = engine.add_request("short", range(40), asking(3), expected_output_len=3)
    engine.step()
    others = [
        engine.add_request(f"other-{i}", range(40 + i, 44 + i), asking(30), expected_output_len=30) for i in range(3)
    ]
    engine.step()
    big = engine.add_request(
        "big", range(10, 70), asking(5), expected_output_len=5
    )  # 15 blocks, of which 10 are short's
    engine.step()
    assert [request.metrics.num_preemptions for request in others] == [0] * 3
    drain(engine)
    assert big.output_token_ids == tokens_alone(range(10, 70), asking(5), 256)[0]
    assert short.is_finished


def test_a_shorter_request_takes_the_slot_of_the_longest() -> None:
    engine = host_engine(
        scheduling_policy="srpt", length_predictor="oracle", victim_policy="longest_remaining", max_num_seqs=2
    )
    middling = engine.add_request("middling", range(4), asking(20), expected_output_len=20)
    long = engine.add_request("long", range(5, 9), asking(30), expected_output_len=30)
    engine.step()
    short = engine.add_request("short", range(10, 14), asking(2), expected_output_len=2)
    engine.step()
    assert (middling.metrics.num_preemptions, long.metrics.num_preemptions) == (0, 1)
    assert short.num_output_tokens == 1
    drain(engine)
